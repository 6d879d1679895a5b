//! Exit codes, and what is never printed.

use crate::command::{command, end_of, run};
use crate::support::postgres::shared;
use crate::support::redis::shared as shared_redis;
use crate::support::sqlite_url;

const SECRET: &str = "s3cr3t-p4ssw0rd";

#[tokio::test]
async fn no_error_contains_the_password_of_the_url() {
    let server = shared().split_once("://").unwrap().1.rsplit('@').next().unwrap();
    let wrong = format!("postgres://no_such_role:{SECRET}@{server}");
    let slow = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let redis = shared_redis().split_once("://").unwrap().1;
    let silent_at = slow.local_addr().unwrap();
    for (url, code) in [
        (&*wrong, 4),
        (&format!("postgres://app:{SECRET}@{silent_at}/app"), 3),
        (&format!("postgres://app:{SECRET}@127.0.0.1:1/app"), 3),
        (&format!("postgres://app:{SECRET}@no-such-host.invalid/app"), 3),
        (&format!("postgres://app:{SECRET}@a,b/app"), 2),
        (&format!("postgres://app:{SECRET}@[bad/app"), 2),
        (&format!("postgres://app:{SECRET}@host:port/app"), 2),
        (&format!("postgres://app@host/app?sslmode={SECRET}"), 2),
        (&format!("postgres://app@host/app?dedup_table={SECRET}"), 2),
        (&format!("{SECRET}://app@host/app"), 2),
        (&format!("redis://no_such_role:{SECRET}@{redis}"), 4),
        (&format!("redis://app:{SECRET}@{silent_at}"), 3),
        (&format!("redis+sentinel://app:{SECRET}@{silent_at}/mymaster"), 3),
        (&format!("redis://app:{SECRET}@127.0.0.1:1"), 3),
        (&format!("rediss://app:{SECRET}@127.0.0.1:1"), 3),
        (&format!("redis+cluster://app:{SECRET}@127.0.0.1:1,127.0.0.1:2"), 3),
        (&format!("redis+sentinel://app:{SECRET}@127.0.0.1:1,127.0.0.1:2/mymaster"), 3),
        (&format!("redis://app:{SECRET}@no-such-host.invalid"), 3),
        (&format!("redis://app:{SECRET}@[bad"), 2),
        (&format!("redis://app:{SECRET}@host:port"), 2),
        (&format!("redis://app:{SECRET}@host/{SECRET}"), 2),
        (&format!("redis://host/?dedup_prefix={SECRET}:"), 2),
        (SECRET, 2),
        ("", 2),
        ("memory:", 2),
    ] {
        for args in [&["get", "test", "a"][..], &["doctor"], &["migrate"]] {
            let args = [args, &["--timeout", "500ms"]].concat();
            let mut by_argument = command();
            by_argument.args(&args).args(["--store", url]);
            let (by_environment, by_argument) =
                tokio::join!(run(url, &args), end_of(by_argument, ""));
            for ran in [by_environment, by_argument] {
                assert_eq!(ran.code, code, "{ran:?}");
                assert!(!ran.stderr.is_empty(), "{args:?}");
                assert!(!ran.said().contains(SECRET), "{ran:?}");
            }
        }
    }
}

#[tokio::test]
async fn help_and_usage_errors_do_not_print_the_environment() {
    let url = format!("postgres://app:{SECRET}@host/app");
    for (args, code) in [
        (&["--help"][..], 0),
        (&["get", "--help"], 0),
        (&["--version"], 0),
        (&["get"], 2),
        (&["no-such-command"], 2),
        (&["list", "--since", "soon"], 2),
        (&["stats", "--timeout", "0s"], 2),
    ] {
        let ran = run(&url, args).await;
        assert_eq!(ran.code, code, "{ran:?}");
        assert!(!ran.said().contains(SECRET), "{ran:?}");
    }
    run(&url, &["--help"]).await.assert(0, "Exit codes:");
}

/// An argument that is not where it belongs is part of the error of the command line.
#[tokio::test]
async fn url_in_the_wrong_place_is_not_printed() {
    let url = &*format!("postgres://app:{SECRET}@host/app");
    for args in [
        &[url, "stats"][..],
        &["stats", url],
        &["purge", "--keys-per-statement", url],
        &["stats", "--timeout", url],
        &["list", "--state", url],
        &["key", url],
        &["key", "github", url],
    ] {
        let ran = run("", args).await;
        assert_eq!((ran.code, &*ran.stdout), (2, ""), "{args:?}: {ran:?}");
        assert!(!ran.said().contains(SECRET), "{ran:?}");
        assert!(ran.stderr.contains("URL"), "{ran:?}");
    }
    run("", &[]).await.assert(2, "Usage: tower-dedup");
}

#[tokio::test]
async fn errors_are_json_if_asked_for() {
    let ran = run("postgres://app@127.0.0.1:1/app", &["stats", "--json"]).await;
    let error: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!((ran.code, &error["exit_code"]), (3, &serde_json::json!(3)));
    assert!(error["error"].as_str().unwrap().contains("Connection refused"), "{error}");
    assert_eq!(ran.stdout, "");
}

#[tokio::test]
async fn file_that_is_no_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let url = sqlite_url(dir.path());
    std::fs::write(dir.path().join("dedup.db"), "not a database".repeat(100)).unwrap();
    run(&url, &["stats"]).await.assert(4, "not a database");
}
