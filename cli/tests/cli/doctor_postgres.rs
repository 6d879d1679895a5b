//! `doctor` on Postgres: a test makes each misconfiguration, and sees its line.
//!
//! TLS to another machine is in a unit test.

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::command::{Ran, run};
use crate::roles::Role;
use crate::support::cluster::blocking;
use crate::support::postgres::{Schema, Server};

/// Returns the level and the text of a check.
#[track_caller]
fn line<'a>(ran: &'a Ran, check: &str) -> (&'a str, &'a str) {
    let mut lines = ran.stdout.lines().filter_map(|line| {
        let (level, rest) = line.split_at_checked(9)?;
        let (name, found) = rest.split_at_checked(14)?;
        (name.trim_end() == check).then_some((level.trim_end(), found))
    });
    lines.next_back().unwrap_or_else(|| panic!("no line {check}: {ran:?}"))
}

#[track_caller]
fn assert_line(ran: &Ran, check: &str, level: &str, words: &str) {
    let (found_level, found) = line(ran, check);
    assert_eq!(found_level, level, "{check}: {ran:?}");
    assert!(found.contains(words), "{check}: {words:?} in {found:?}");
    // A line that is not ok says what to do.
    let advice = ran.stdout.lines().skip_while(|line| !line.contains(found)).nth(1).unwrap();
    assert_eq!(advice.contains("-> "), level != "ok", "{advice}");
}

#[tokio::test]
async fn settings_of_the_server() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    // The tests' servers have fsync off.
    let ran = run(&url, &["doctor"]).await;
    assert_eq!(ran.code, 1);
    assert_line(&ran, "durability", "error", "fsync is off");

    let server = set(server, &["fsync = on"]).await;
    let ran = run(&url, &["doctor"]).await;
    ran.assert(0, "0 error(s), 0 warning(s)");
    assert_line(&ran, "tls", "ok", "on this machine");
    let json = run(&url, &["doctor", "--json"]).await.json();
    assert!(json.len() == 7 && json.iter().all(|finding| finding["level"] == "ok"), "{json:?}");

    let server = set(server, &["full_page_writes = off"]).await;
    let ran = run(&url, &["doctor"]).await;
    assert_eq!(ran.code, 0);
    assert_line(&ran, "durability", "warning", "full_page_writes is off");

    let (standby, _server) = blocking(move || (server.standby(), server)).await;
    let ran = run(&standby.url(), &["doctor"]).await;
    assert_eq!(ran.code, 1);
    assert_line(&ran, "primary", "error", "standby");
}

/// Sets parameters and restarts the server.
async fn set(server: Server, parameters: &'static [&str]) -> Server {
    blocking(move || {
        for parameter in parameters {
            server.run(&format!("ALTER SYSTEM SET {parameter}"));
        }
        server.restart_immediately();
        server
    })
    .await
}

#[tokio::test]
async fn settings_of_the_role() {
    let role = Role::fresh().await;
    role.grant("SELECT, INSERT, UPDATE, DELETE").await;
    let (url, name) = (role.url(), role.name.clone());
    role.admin(&format!("ALTER ROLE {name} SET default_transaction_read_only = on")).await;
    assert_line(&run(&url, &["doctor"]).await, "primary", "error", "takes no writes");
    role.admin(&format!("ALTER ROLE {name} RESET ALL")).await;
    role.remove().await;
}

#[tokio::test]
async fn each_missing_privilege_has_a_line() {
    let role = Role::fresh().await;
    role.grant("SELECT, INSERT, UPDATE, DELETE").await;
    let (url, name, schema) = (role.url(), role.name.clone(), role.schema.name().to_owned());
    assert_line(&run(&url, &["doctor"]).await, "rights", "ok", "DELETE");
    let table = format!("{schema}.webhook_deliveries");
    for (right, on, level, words) in [
        ("SELECT", table.clone(), "error", "lacks SELECT"),
        ("INSERT", table.clone(), "error", "lacks INSERT"),
        ("UPDATE", table.clone(), "error", "lacks UPDATE"),
        ("DELETE", table.clone(), "warning", "lacks DELETE"),
        ("SELECT", format!("{table}_schema"), "error", "lacks SELECT on the version table"),
    ] {
        role.admin(&format!("REVOKE {right} ON {on} FROM {name}")).await;
        assert_line(&run(&url, &["doctor"]).await, "rights", level, words);
        role.admin(&format!("GRANT {right} ON {on} TO {name}")).await;
    }
    role.admin(&format!("REVOKE USAGE ON SCHEMA {schema} FROM {name}")).await;
    let ran = run(&url, &["doctor", "--schema", &schema]).await;
    assert_line(&ran, "rights", "error", "lacks USAGE on the schema");
    role.remove().await;
}

#[tokio::test]
async fn state_of_the_table() {
    let schema = Schema::fresh();
    let url = schema.url();
    let ran = run(&url, &["doctor"]).await;
    assert_line(&ran, "table", "error", "is missing");
    run(&url, &["migrate"]).await.assert(0, "made");
    let ran = run(&url, &["doctor"]).await;
    assert_line(&ran, "table", "ok", "exists");
    assert_line(&ran, "purge", "ok", "no expired key");
    assert_line(&ran, "index", "ok", "expires_at");
    for (sql, check, level, words) in [
        ("DROP INDEX webhook_deliveries_expires_at", "index", "warning", "none on expires_at"),
        ("ALTER TABLE webhook_deliveries SET UNLOGGED", "table", "error", "unlogged"),
        (
            "INSERT INTO webhook_deliveries (key, namespace, id, attempts, takeover, first_seen_at, \
             completed_at, expires_at) SELECT gen_random_uuid(), 'test', 'old', 1, false, now(), \
             now(), now() - interval '26 h'",
            "purge",
            "warning",
            "expired 1 d 2 h ago",
        ),
        ("UPDATE webhook_deliveries_schema SET version = 0", "table", "error", "older"),
    ] {
        execute(&url, sql).await;
        assert_line(&run(&url, &["doctor"]).await, check, level, words);
    }
}

async fn execute(url: &str, sql: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}
