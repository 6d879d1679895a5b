//! `get`, `list`, `stats` and `forget` on every store; `migrate` and `purge` on both SQL stores.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tower_dedup::DedupKey;
use tower_dedup::adapter;
use tower_dedup::adapter::contract::{CallTerms, StoredResponse, Token};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use crate::command::{Ran, code_unread, doctor, execute, run, run_with, with};
use support::postgres::Schema;
use support::redis::{fresh_prefix, shared, with_prefix};
use support::{dedup_key, sqlite_url, terms};

/// A fresh store.
pub(crate) struct Place {
    pub(crate) url: String,
    _kept: Box<dyn Any>,
}

impl Place {
    pub(crate) fn sqlite() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { url: sqlite_url(dir.path()), _kept: Box::new(dir) }
    }

    pub(crate) fn both() -> [Self; 2] {
        let schema = Schema::fresh();
        [Self::sqlite(), Self { url: schema.url(), _kept: Box::new(schema) }]
    }

    pub(crate) fn all() -> [Self; 3] {
        let [sqlite, postgres] = Self::both();
        let url = with_prefix(shared(), &fresh_prefix());
        [sqlite, postgres, Self { url, _kept: Box::new(()) }]
    }

    pub(crate) async fn adapter(&self) -> Arc<dyn MaintenanceAdapter> {
        adapter::connect(&self.url).await.unwrap()
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Ran {
        run(&self.url, args).await
    }

    /// Sets a column of a key of a SQL store to a time in the past.
    async fn set_past(&self, column: &str, id: &str, seconds: u32) {
        let past = match self.url.starts_with("sqlite:") {
            true => format!("(unixepoch() - {seconds}) * 1000"),
            false => format!("now() - interval '{seconds} s'"),
        };
        let sql = format!("UPDATE webhook_deliveries SET {column} = {past} WHERE id = '{id}'");
        execute(&self.url, &sql).await;
    }
}

/// Claims one key of each state: `run`, `gone`, `bad` and `done`.
pub(crate) async fn fill(url: &str) {
    let adapter = adapter::connect(url).await.unwrap();
    let mine = terms();
    let lapsed = CallTerms::on_completion(Token::random(), mine.retention(), Duration::ZERO);
    adapter.claim(&dedup_key("gone"), &lapsed).await.unwrap();
    for id in ["run", "bad", "done"] {
        adapter.claim(&dedup_key(id), &mine).await.unwrap();
    }
    adapter.release(&dedup_key("bad"), &mine).await.unwrap();
    adapter.complete(&dedup_key("done"), &mine).await.unwrap();
    adapter.close().await;
}

#[tokio::test]
async fn purge_deletes_expired_keys_and_the_others_stay() {
    for place in Place::both() {
        fill(&place.url).await;
        place.set_past("expires_at", "done", 3_600).await;
        place.set_past("expires_at", "bad", 3_600).await;
        let purged = place.run(&["purge", "--keys-per-statement", "1"]).await;
        purged.assert(0, "purged  2\n");
        let running = place.run(&["get", "test", "run"]).await;
        running.assert(0, "\nstate          in-flight\n");
        place.run(&["get", "test", "done"]).await.assert(1, "there is no such key\n");
    }
}

#[tokio::test]
async fn get_prints_the_stored_data_of_a_complete_key_and_no_state_of_an_unknown_one() {
    for place in Place::all() {
        let adapter = place.adapter().await;
        let key = DedupKey::new("stripe", "evt_1").unwrap();
        let response = StoredResponse::new(StatusCode::CREATED, HeaderMap::new(), "private".into());
        let terms = terms().with_payload_sha256([0xab; 32]).with_response(response.into());
        adapter.complete(&key, &terms).await.unwrap();
        let got = place.run(&["get", "stripe", "evt_1"]).await;
        got.assert(0, "\nstate           complete\n");
        got.assert(0, &format!("\npayload_sha256  {}\n", "ab".repeat(32)));
        for word in ["private", "takeover", "unreadable"] {
            assert!(!got.said().contains(word), "{got:?}");
        }
        let json = &place.run(&["get", "stripe", "evt_1", "--json"]).await.json()[0];
        assert_eq!(json["response"], json!({ "status": 201, "bytes": 7 }));
        assert_eq!((&json["state"], &json["takeover"]), (&json!("complete"), &json!(false)));
        // An unknown key is an object without a state.
        let got = place.run(&["get", "test", "a", "--json"]).await;
        let unknown = json!({ "namespace": "test", "id": "a", "state": null });
        assert_eq!((got.code, got.json()), (1, vec![unknown]));
        // The command that it names may be copied to a shell.
        let unknown = place.run(&["get", "twilio", "$(reboot)"]).await;
        unknown.assert(1, "tower-dedup list --id PART\n");
        assert!(!unknown.said().contains("reboot"), "{unknown:?}");
    }
}

/// Every command but `migrate` is refused without a table, and makes none.
#[tokio::test]
async fn only_migrate_makes_the_table() {
    for place in Place::both() {
        if place.url.starts_with("sqlite:") {
            place.run(&["migrate", "--check"]).await.assert(1, "missing");
            place.run(&["stats"]).await.assert(4, "there is no file");
            place.run(&["doctor"]).await.assert(4, "there is no file");
            // A file without the table.
            run(&with(&place.url, "dedup_table=other"), &["migrate"]).await.assert(0, "");
        }
        for (args, code, words) in [
            (&["get", "test", "a"][..], 4, "run `tower-dedup migrate`"),
            (&["list"], 4, "run `tower-dedup migrate`"),
            (&["stats"], 4, "run `tower-dedup migrate`"),
            (&["forget", "test", "a", "--yes"], 4, "run `tower-dedup migrate`"),
            (&["purge"], 4, "run `tower-dedup migrate`"),
            (&["doctor"], 1, "has no table"),
            (&["migrate", "--check"], 1, "missing"),
            (&["migrate"], 0, "made"),
            (&["migrate", "--check"], 0, "current"),
            (&["migrate"], 0, "is current"),
        ] {
            place.run(args).await.assert(code, words);
        }
        if place.url.starts_with("sqlite:") {
            execute(&place.url, "DROP INDEX webhook_deliveries_expires_at").await;
            place.run(&["purge"]).await.assert(4, "run `tower-dedup migrate`");
            place.run(&["migrate"]).await.assert(0, "made");
        }
        let third = with(&place.url, "dedup_table=third");
        run(&third, &["migrate", "--check"]).await.assert(1, "missing");
    }
}

#[tokio::test]
async fn doctor_sees_the_table_and_its_purge_lag() {
    for place in Place::both() {
        let url = place.url.clone();
        place.run(&["migrate"]).await.assert(0, "made");
        let other = doctor(&with(&url, "dedup_table=other")).await;
        other.assert_finding("table", "error", "has no table");
        let good = doctor(&url).await;
        good.assert_finding("table", "ok", "exists");
        good.assert_finding("purge", "ok", "no expired key");
        place.adapter().await.complete(&dedup_key("old"), &terms()).await.unwrap();
        for (hours, level) in [(24, "ok"), (26, "warning")] {
            place.set_past("expires_at", "old", hours * 3_600).await;
            let found = format!("expired 1day{}", if hours == 26 { " 2h" } else { "" });
            doctor(&url).await.assert_finding("purge", level, &found);
        }
        let older = "the store has no table of this version: run `tower-dedup migrate`";
        execute(&url, "UPDATE webhook_deliveries_schema SET version = 0").await;
        doctor(&url).await.assert_finding("table", "error", older);
        place.run(&["get", "test", "old"]).await.assert(4, older);
        place.run(&["migrate", "--check"]).await.assert(1, older);
        // This version has no older one, whose table it could change.
        place.run(&["migrate"]).await.assert(4, older);
        execute(&url, "UPDATE webhook_deliveries_schema SET version = 1").await;
        // No version number tells of a column that another program has renamed.
        execute(&url, "ALTER TABLE webhook_deliveries RENAME COLUMN attempts TO tries").await;
        doctor(&url).await.assert_finding("table", "error", "cannot be read: ");
    }
}

#[tokio::test]
async fn migrate_print_prints_what_makes_the_table() {
    let [sqlite, postgres] = Place::both();
    let seen = with(&sqlite.url, "dedup_table=seen");
    let printed = run(&seen, &["migrate", "--print"]).await;
    printed.assert(0, "CREATE TABLE IF NOT EXISTS \"seen\"");
    let printed = postgres.run(&["migrate", "--print"]).await;
    let mut connection = PgConnection::connect(&postgres.url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(printed.stdout)).execute(&mut connection).await.unwrap();
    postgres.run(&["migrate", "--check"]).await.assert(0, "current");
    // It needs no server.
    let nowhere =
        run("postgres://nobody@127.0.0.1:1/none", &["migrate", "--print", "--json"]).await;
    let statements = nowhere.json()[0]["statements"].to_string();
    assert!(statements.contains("CREATE TABLE IF NOT EXISTS"), "{statements}");
}

#[tokio::test]
async fn stats_counts_each_state() {
    for place in Place::all() {
        fill(&place.url).await;
        let stats = &place.run(&["stats", "--json"]).await.json()[0];
        let counts = ["rows", "in_flight", "lapsed", "released", "complete", "expired"];
        assert_eq!(counts.map(|name| stats[name].as_u64().unwrap()), [4, 1, 1, 1, 1, 0]);
        assert_eq!(stats["is_exact"], true);
        place.run(&["stats"]).await.assert(0, "oldest_in_flight_seconds  ");
    }
}

fn ids(keys: &[Value]) -> Vec<&str> {
    let mut ids: Vec<_> = keys.iter().map(|key| key["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn list_selects_by_state_namespace_id_time_and_attempts() {
    for place in Place::both() {
        fill(&place.url).await;
        let released = place.run(&["list", "--state", "released"]).await;
        released.assert(0, "released  test       bad  -           1         2");
        released.assert(0, "why a handler failed is in the service's log");
        place.run(&["list", "--state", "failed"]).await.assert(2, "released");
        place.adapter().await.claim(&dedup_key("bad"), &terms()).await.unwrap();
        place.set_past("first_seen_at", "done", 7_200).await;
        for (args, expected) in [
            (&[][..], &["bad", "done", "gone", "run"][..]),
            (&["--state", "in-flight"], &["bad", "run"]),
            (&["--state", "lapsed"], &["gone"]),
            (&["--state", "released"], &[]),
            (&["--state", "complete"], &["done"]),
            (&["--since", "1h"], &["bad", "gone", "run"]),
            (&["--attempts-over", "1"], &["bad"]),
            (&["--id", "on"], &["done", "gone"]),
            (&["--namespace", "test", "--since", "1d"], &["bad", "done", "gone", "run"]),
            (&["--namespace", "tes"], &[]),
        ] {
            let listed = place.run(&[&["list", "--json"], args].concat()).await;
            assert_eq!((listed.code, ids(&listed.json())), (0, expected.to_vec()), "{args:?}");
        }
        let table = place.run(&["list", "--state", "lapsed"]).await;
        table.assert(0, "lapsed  test       gone  -           1         2");
        let none = place.run(&["list", "--namespace", "none"]).await;
        none.assert(0, "no keys\n");
        none.assert(0, "leaves no key: search the service's log");
        // The newest first.
        place.set_past("first_seen_at", "gone", 3_600).await;
        let all = place.run(&["list"]).await.stdout;
        let ids: Vec<_> = all.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
        assert_eq!(ids[3..], ["gone", "done"], "{all}");
        let limited = place.run(&["list", "--limit", "3", "--json"]).await;
        assert_eq!(limited.json().len(), 3);
        limited.assert(0, "--limit 3 is reached: this is one page of any keys");
        place.run(&["list", "--state", "gone"]).await.assert(2, "in-flight");
    }
}

#[tokio::test]
async fn forget_asks_and_only_yes_confirms() {
    run("", &["forget", "--help"]).await.assert(0, "on-arrival ledger");
    for place in Place::all() {
        fill(&place.url).await;
        let forget = async |stdin| run_with(&place.url, &["forget", "test", "done"], stdin).await;
        for stdin in ["", "\n", "n\n", "yess\n"] {
            let ran = forget(stdin).await;
            ran.assert(1, "nothing was changed");
            ran.assert(1, "completed_at");
        }
        // A row of the on-arrival ledger looks like this one while its handler runs.
        let asked = forget("y\n").await;
        asked.assert(0, "forgotten");
        let question = "If its layer is `on_arrival`, the event may still be running.\nForget this key? \
                        Its next delivery runs, unless a second identity is complete for another id: see the \
                        record `same body`, and `tower-dedup key`. [y/N] ";
        assert!(asked.stderr.ends_with(question), "{asked:?}");
        forget("").await.assert(1, "there is no such key");
    }
}

/// The output is the only record of the reason.
#[tokio::test]
async fn forget_prints_when_and_why_and_lets_a_complete_event_run() {
    for place in Place::all() {
        fill(&place.url).await;
        let reason = "invoice \u{1f9fe} was not sent";
        let forgotten = place.run(&["forget", "test", "done", "--reason", reason, "--yes"]).await;
        forgotten.assert(0, "id         done\nresult     forgotten\n");
        let note = "note       the next delivery runs, unless a second identity is complete for another id\n";
        forgotten.assert(0, note);
        forgotten.assert(0, &format!("reason     {reason}\n"));
        let claimed = place.adapter().await.claim(&dedup_key("done"), &terms()).await.unwrap();
        assert!(format!("{claimed:?}").starts_with("First"), "{claimed:?}");

        for (id, code, result) in
            [("none", 1, "missing"), ("run", 1, "in-flight"), ("gone", 0, "forgotten")]
        {
            let ran = place.run(&["forget", "test", id, "--reason", "x", "--yes", "--json"]).await;
            assert_eq!(ran.code, code, "{ran:?}");
            let line = &ran.json()[0];
            assert_eq!((&line["result"], &line["reason"]), (&json!(result), &json!("x")));
            assert!(line["at"].as_str().is_some_and(|at| at.ends_with('Z')), "{line}");
        }
    }
}

#[tokio::test]
async fn hash_ids_prints_the_ids_of_the_logs() {
    let place = Place::sqlite();
    fill(&place.url).await;
    let hash = format!("#{}", dedup_key("done").log_id());
    for args in [
        &["get", "test", "done"][..],
        &["list", "--state", "complete"],
        &["list", "--state", "complete", "--json"],
        &["forget", "test", "done", "--reason", "x", "--yes"],
    ] {
        let ran = place.run(&[args, &["--hash-ids"]].concat()).await;
        ran.assert(0, &hash);
        assert!(!ran.said().replace(&hash, "").contains("done"), "{ran:?}");
    }
}

/// An id comes from outside: it must not command the operator's terminal, nor show text in another order.
#[tokio::test]
async fn control_characters_and_direction_overrides_of_ids_are_escaped() {
    const HOSTILE: &str = "\u{7f}\u{80}\u{9b}\u{9f}\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\
                           \u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{1b}[2J";
    let place = Place::sqlite();
    let id = &*format!("{HOSTILE}evil\n");
    place.adapter().await.complete(&dedup_key(id), &terms()).await.unwrap();
    let forget = ["forget", "test", id, "--reason", "\u{2066}x"];
    let captured = json!({ "body_utf8": json!({ "id": HOSTILE }).to_string() }).to_string();
    for (args, code, words) in [
        (&["get", "test", id][..], 0, "\\u{1b}[2Jevil\\n"),
        (&["list"], 0, "\\u{202e}\\u{2066}"),
        (&forget, 1, "\\u{202e}\\u{2066}"),
        (&["get", "test", id, "--json"], 0, "\\u007f\\u0080\\u009b\\u009f\\u061c"),
        (&["list", "--json"], 0, "\\u202e\\u2066"),
        (&[&forget[..], &["--yes", "--json"]].concat(), 0, "\\u202e\\u2066"),
        (&[&forget[..], &["--yes"]].concat(), 1, "reason     \\u{2066}x"),
        // An error repeats what it was given.
        (&["key", HOSTILE], 2, "2066"),
        (&["key", "stripe", HOSTILE], 2, "2066"),
        (&["list", "--state", HOSTILE], 2, "2066"),
        (&["key", "stripe"], 0, "\\u202e\\u2066"),
    ] {
        let ran = run_with(&place.url, args, &captured).await;
        ran.assert(code, words);
        for char in HOSTILE.chars().take(19) {
            assert!(!ran.said().contains(char), "{char:?} in {ran:?}");
        }
        if args.contains(&"--json") {
            assert!(ran.json().iter().all(|line| line["id"] == id), "{ran:?}");
        }
    }
}

/// The key is forgotten then, and the code alone does not say so.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn error_of_stdout_names_it() {
    let place = Place::sqlite();
    place.run(&["migrate"]).await.assert(0, "made");
    let mut command = crate::command::command();
    command.env("TOWER_DEDUP_STORE", &place.url).arg("stats");
    command.stdout(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: stdout: No space left"), "{stderr}");
}

/// A reader that has gone, as `head` has, turns no no into a yes, and ends no command in a panic. Without a reader
/// of the question, `forget` changes nothing.
#[cfg(unix)]
#[tokio::test]
async fn broken_pipe_keeps_the_exit_code() {
    let place = Place::sqlite();
    fill(&place.url).await;
    let url = &*place.url;
    for (stderr, args, store, code) in [
        (false, &["forget", "test", "run", "--yes"][..], url, 1),
        (false, &["doctor"], &with(url, "dedup_table=other"), 1),
        (false, &["get", "test", "none"], url, 1),
        (false, &["get", "test", "run"], url, 0),
        (false, &["list", "--json"], url, 0),
        (true, &["list", "--limit", "1"], url, 0),
        (true, &["forget", "test", "done"], url, 2),
        (true, &["get", "test", "none"], url, 1),
        (true, &["get", "test", "done"], "memory:", 2),
        (true, &["get"], url, 2),
        (true, &["list", "--state", "postgres://x"], url, 2),
    ] {
        assert_eq!(code_unread(store, args, stderr).await, Some(code), "{args:?}");
    }
    // Nothing was changed.
    place.run(&["get", "test", "done"]).await.assert(0, "complete");
}
