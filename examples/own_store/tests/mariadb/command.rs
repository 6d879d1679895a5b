//! The command over this store.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup_conformance::Store;

use crate::server::Database;

/// Runs the command. Returns its exit code, and what it printed.
async fn run(store: &str, args: &[&str], stdin: &str) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_own_store"));
    command.env("TOWER_DEDUP_STORE", store).args(args).kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    process.stdin.take().unwrap().write_all(stdin.as_bytes()).await.unwrap();
    let output = tokio::time::timeout(Duration::from_secs(60), process.wait_with_output());
    let output = output.await.expect("the command ends").unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}

#[tokio::test]
async fn operators_have_the_command() {
    let database = Database::create().await;
    let store = database.adapter();
    let (hour, minute) = (Duration::from_secs(3_600), Duration::from_secs(60));
    let key = |id| DedupKey::new("test", id).unwrap();
    store.claim(&key("done"), &CallTerms::on_claim(Token::random(), hour)).await.unwrap();
    let lease = CallTerms::on_completion(Token::random(), hour, minute);
    store.claim(&key("run"), &lease).await.unwrap();
    for (args, stdin, code, words) in [
        (&["get", "test", "run"][..], "", 0, "in-flight"),
        (&["get", "test", "none"], "", 1, "list --id PART"),
        (&["list", "--state", "complete"], "", 0, "complete  test       done"),
        (&["stats"], "", 0, "in_flight                 1"),
        (&["forget", "test", "run", "--yes"], "", 1, "is running"),
        (&["forget", "test", "done", "--yes"], "", 0, "forgotten"),
        (&["get", "test", "done"], "", 1, "there is no such key"),
        (&["import", "test"], "old\t2999-01-01T00:00:00Z\n", 0, "imported   1\n"),
        (&["get", "test", "old"], "", 0, "complete"),
        (&["purge"], "", 0, "purged  0"),
        (&["doctor"], "", 2, "a store of its own"),
        (&["migrate", "--print"], "", 2, "a store of its own"),
    ] {
        let (exit, said) = run(&database.url, args, stdin).await;
        assert!(exit == code && said.contains(words), "{args:?}: {exit} {said}");
        assert!(!said.contains("://"), "{said}");
    }
    let (exit, said) = run("mysql://root@127.0.0.1:1/none", &["stats"], "").await;
    assert!(exit == 3 && !said.contains("://"), "{exit} {said}");
}
