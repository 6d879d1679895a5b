//! Exit codes, and what is never printed.

use crate::command::{command, end_of, run};
use support::postgres::shared;
use support::redis::shared as shared_redis;

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
        (&format!("postgres://app@host/app?dedup_{SECRET}=a"), 2),
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

/// An argument that is not where it belongs is part of the error of the command line.
#[tokio::test]
async fn help_and_usage_errors_print_no_url() {
    let url = &*format!("postgres://app:{SECRET}@host/app");
    for (args, code, words) in [
        (&["--help"][..], 0, "Exit codes:"),
        (&["get", "--help"], 0, "Usage:"),
        (&["--version"], 0, "tower-dedup"),
        (&[], 2, "Usage: tower-dedup"),
        (&["get"], 2, "Usage:"),
        (&["no-such-command"], 2, "Usage:"),
        (&["list", "--since", "soon"], 2, "soon"),
        (&["stats", "--timeout", "0s"], 2, "0s"),
        (&[url, "stats"], 2, "URL"),
        (&["stats", url], 2, "URL"),
        (&["purge", "--keys-per-statement", url], 2, "URL"),
        (&["stats", "--timeout", url], 2, "URL"),
        (&["list", "--state", url], 2, "URL"),
        (&["missed", "test", "--id", url], 2, "URL"),
        (&["missed", "test", "--preset", url], 2, "URL"),
        (&["key", url], 2, "URL"),
        (&["key", "github", url], 2, "URL"),
    ] {
        let ran = run(url, args).await;
        ran.assert(code, words);
        assert!(!ran.said().contains(SECRET), "{ran:?}");
        assert_eq!((ran.stdout.is_empty(), ran.stderr.is_empty()), (code != 0, code == 0));
    }
}

#[tokio::test]
async fn errors_are_json_if_asked_for() {
    let ran = run("postgres://app@127.0.0.1:1/app", &["stats", "--json"]).await;
    let error: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!((ran.code, &error["exit_code"]), (3, &serde_json::json!(3)));
    assert!(error["error"].as_str().unwrap().contains("Connection refused"), "{error}");
    assert_eq!(ran.stdout, "");
}
