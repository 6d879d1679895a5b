//! `doctor` on Postgres: a test makes each misconfiguration, and sees its line.
//!
//! TLS to another machine is in a unit test.

use crate::command::{doctor, execute, run, with};
use crate::roles::Role;
use support::cluster::blocking;
use support::postgres::{Schema, Server, with_path};

#[tokio::test]
async fn settings_of_the_server() {
    let server = blocking(Server::start).await;
    let url = server.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    // The tests' servers have fsync off.
    let ran = doctor(&url).await;
    ran.assert_finding("durability", "error", "fsync is off");

    // It takes no id that its encoding lacks.
    execute(
        &url,
        "CREATE DATABASE latin1 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
    )
    .await;
    let latin1 = with_path(&url, "latin1");
    let made = run(&url, &["migrate", "--print"]).await;
    execute(&latin1, &made.stdout).await;
    doctor(&latin1).await.assert_finding("table", "error", "encoding is not UTF8");

    let server = set(server, &["fsync = on"]).await;
    let ran = doctor(&url).await;
    ran.assert_finding("tls", "ok", "on this machine");
    let json = ran.json();
    run(&url, &["doctor"]).await.assert(0, "0 error(s), 0 warning(s)");
    assert!(json.len() == 8 && json.iter().all(|finding| finding["level"] == "ok"), "{json:?}");

    let server = set(server, &["full_page_writes = off"]).await;
    let ran = doctor(&url).await;
    ran.assert_finding("durability", "warning", "full_page_writes is off");

    let (standby, _server) = blocking(move || (server.standby(), server)).await;
    let ran = doctor(&standby.url()).await;
    ran.assert_finding("primary", "error", "standby");
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
    doctor(&url).await.assert_finding("primary", "error", "takes no writes");
    role.admin(&format!("ALTER ROLE {name} RESET ALL")).await;
    role.remove().await;
}

#[tokio::test]
async fn each_missing_privilege_has_a_line() {
    let role = Role::fresh().await;
    role.grant("SELECT, INSERT, UPDATE, DELETE").await;
    let (url, name, schema) = (role.url(), role.name.clone(), role.schema.name().to_owned());
    doctor(&url).await.assert_finding("rights", "ok", "DELETE");
    let table = format!("{schema}.webhook_deliveries");
    for (right, on, level, words) in [
        ("SELECT", table.clone(), "error", "lacks SELECT"),
        ("INSERT", table.clone(), "error", "lacks INSERT"),
        ("UPDATE", table.clone(), "error", "lacks UPDATE"),
        ("DELETE", table.clone(), "warning", "lacks DELETE"),
        ("SELECT", format!("{table}_schema"), "error", "lacks SELECT on the version table"),
    ] {
        role.admin(&format!("REVOKE {right} ON {on} FROM {name}")).await;
        doctor(&url).await.assert_finding("rights", level, words);
        role.admin(&format!("GRANT {right} ON {on} TO {name}")).await;
    }
    role.admin(&format!("REVOKE USAGE ON SCHEMA {schema} FROM {name}")).await;
    let ran = doctor(&with(&url, &format!("dedup_schema={schema}"))).await;
    ran.assert_finding("rights", "error", "lacks USAGE on the schema");
    role.remove().await;
}

#[tokio::test]
async fn table_without_an_index_or_a_log() {
    let schema = Schema::fresh();
    let url = schema.url();
    run(&url, &["migrate"]).await.assert(0, "made");
    doctor(&url).await.assert_finding("index", "ok", "expires_at");
    for (sql, check, level, words) in [
        // As a CREATE INDEX CONCURRENTLY that has failed leaves it.
        (
            "UPDATE pg_index SET indisvalid = false
             WHERE indexrelid = 'webhook_deliveries_expires_at'::regclass",
            "index",
            "warning",
            "none on expires_at",
        ),
        ("DROP INDEX webhook_deliveries_expires_at", "index", "warning", "none on expires_at"),
        ("ALTER TABLE webhook_deliveries SET UNLOGGED", "table", "error", "unlogged"),
    ] {
        execute(&url, sql).await;
        doctor(&url).await.assert_finding(check, level, words);
    }
}
