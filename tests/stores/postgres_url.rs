//! Which URLs the Postgres adapter accepts: those that name one host. What it reads of them.

use std::env;
use std::error::Error as _;
use std::process::Command;

use sqlx::{Connection, PgConnection};
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::{self, PostgresAdapter};
use tower_dedup::{ConfigError, StoreErrorKind};

use support::postgres::Schema;
use support::{FIRST, dedup_key, terms};

const ONE_ADDRESS: &str = "give one address that leads to the primary";

/// Returns the cause of the refusal. No server listens at the addresses of these tests, so an
/// accepted URL gives `None`.
async fn refused(url: &str) -> Option<String> {
    let error = PostgresAdapter::connect(url).await.unwrap_err();
    let other = adapter::connect(url).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), other.kind(), "{url}");
    let shown = format!("{error} {error:?} {other} {other:?}");
    assert!(!shown.contains("hidden") && !shown.contains("127.0.0.1"), "{shown}");
    let cause = error.source().unwrap().downcast_ref::<ConfigError>().cloned();
    let kind = if cause.is_some() { StoreErrorKind::Config } else { StoreErrorKind::Unavailable };
    assert_eq!(error.kind(), kind, "{url}: {error:?}");
    cause.map(|cause| cause.to_string())
}

#[tokio::test]
async fn connect_with_several_hosts_is_refused() {
    for url in [
        "postgres://u@127.0.0.1,localhost/db",
        "postgres://u:hidden@127.0.0.1:1,localhost:2/db",
        "postgresql://u@127.0.0.1:1,localhost:1?sslmode=disable",
        "postgres://u@127.0.0.1%2Clocalhost:1/db",
        "postgres:///db?host=127.0.0.1,localhost&port=1",
        "postgres:///db?host=127.0.0.1%2clocalhost&port=1",
        "postgres:///db?host=/nowhere,/elsewhere",
        "postgres:///db?hostaddr=127.0.0.1,127.0.0.2",
        "postgres://127.0.0.1/db?port=1,2",
    ] {
        assert_eq!(
            refused(url).await,
            Some(format!("the store URL names several hosts: {ONE_ADDRESS}")),
            "{url}"
        );
    }
}

/// `sqlx` takes the host from the environment if the URL has none. The test sets the environment of
/// a process of its own.
#[tokio::test]
async fn connect_without_a_host_and_several_in_the_environment_is_refused() {
    const NAME: &str =
        "postgres_url::connect_without_a_host_and_several_in_the_environment_is_refused";
    if env::var_os("PGHOST").is_some_and(|host| host == "127.0.0.1,localhost") {
        assert_eq!(
            refused("postgres:///db").await,
            Some(format!("the store URL names several hosts: {ONE_ADDRESS}"))
        );
        return;
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", NAME]).env("PGHOST", "127.0.0.1,localhost").env_remove("PGHOSTADDR");
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
async fn connect_with_a_parameter_that_chooses_a_server_is_refused() {
    for name in ["target_session_attrs", "load_balance_hosts"] {
        for url in [
            format!("postgres://u:hidden@127.0.0.1:1/db?{name}=read-write"),
            format!("postgres://u:hidden@127.0.0.1:1?sslmode=disable&{name}"),
        ] {
            let cause = Some(format!("the URL parameter `{name}` is not supported: {ONE_ADDRESS}"));
            assert_eq!(refused(&url).await, cause, "{url}");
        }
    }
}

#[tokio::test]
async fn connect_with_one_host_is_tried_whatever_else_the_url_holds() {
    for url in [
        "postgres://u:hid,den@127.0.0.1:1/db",
        "postgres://u,v:hid%40den,@127.0.0.1:1/d,b",
        "postgres:///db?host=127.0.0.1&port=1&application_name=a,b",
        "postgres://127.0.0.1:1/db?options[search_path]=a,b&channel_binding=prefer",
    ] {
        assert_eq!(refused(url).await, None, "{url}");
    }
}

#[tokio::test]
async fn connect_reads_table_and_schema_from_the_url() {
    let schema = Schema::fresh();
    let database = schema.database_url();
    let and = if database.contains('?') { '&' } else { '?' };
    let url = format!("{database}{and}dedup_table=seen&dedup_schema={}", schema.name());
    let adapter = PostgresAdapter::connect(&url).await.unwrap();
    assert_eq!(adapter.claim(&dedup_key("a"), &terms()).await.unwrap(), FIRST);
    let mut connection = PgConnection::connect(&schema.url()).await.unwrap();
    let rows = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM seen");
    assert_eq!(rows.fetch_one(&mut connection).await.unwrap(), 1);
}
