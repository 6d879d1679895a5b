//! `inbox list`, `show`, `retry` and `drop`, and the line of `doctor`, with the table in Postgres and in SQLite.

use std::convert::Infallible;
use std::process::Stdio;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use serde_json::json;
use sqlx::PgPool;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::{Layer, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, key};
use tower_dedup_inbox::Inbox;

use crate::command::{Ran, command, doctor, execute, run, run_with, spawn};
use crate::keys::Place;
use crate::roles::Role;
use support::dedup_key;
use support::postgres::{Schema, shared};
use support::redis::shared as shared_redis;

/// A fresh database with the table of an inbox.
struct World {
    place: Place,
    inbox: Inbox,
}

impl World {
    async fn both() -> [Self; 2] {
        let [sqlite, postgres] = Place::both();
        [Self::new(sqlite).await, Self::new(postgres).await]
    }

    async fn new(place: Place) -> Self {
        let inbox = inbox(&place.url, "shop").await;
        inbox.migrate().await.unwrap();
        Self { place, inbox }
    }

    /// Makes rows 1 to 5: one that waits for two hours, one of each of three reasons, and one that runs.
    async fn filled() -> [Self; 2] {
        let worlds = Self::both().await;
        for world in &worlds {
            for id in ["a", "b", "c"] {
                store(&world.inbox, "test", id, "{\"n\": 1}").await;
            }
            store(&world.inbox, "other", "d", "\u{1b}[2J").await;
            store(&inbox(&world.place.url, "billing").await, "test", "e", "").await;
            let past = match world.is_sqlite() {
                true => "received - 7200000",
                false => "received - interval '2 h'",
            };
            let park = "UPDATE webhook_inbox SET due = NULL, attempts = 11, last = '500', parked =";
            world
                .execute(&format!(
                    "UPDATE webhook_inbox SET received = {past} WHERE seq = 1;
                     {park} 'failed' WHERE seq = 2;
                     {park} 'refused' WHERE seq = 3;
                     UPDATE webhook_inbox SET turn = key WHERE seq = 4;
                     {park} 'expired' WHERE seq = 5"
                ))
                .await;
        }
        worlds
    }

    fn is_sqlite(&self) -> bool {
        self.place.url.starts_with("sqlite:")
    }

    async fn execute(&self, sql: &str) {
        execute(&self.place.url, sql).await;
    }

    async fn run(&self, args: &[&str]) -> Ran {
        self.place.run(&[&["inbox"], args].concat()).await
    }

    async fn answer(&self, args: &[&str], stdin: &str) -> Ran {
        run_with(&self.place.url, &[&["inbox"], args].concat(), stdin).await
    }

    /// Returns the number and the state of each row.
    async fn rows(&self) -> Vec<(i64, String)> {
        let listed = self.run(&["list", "--json", "--limit", "10000"]).await.json();
        let row = |row: &serde_json::Value| {
            (row["seq"].as_i64().unwrap(), row["state"].as_str().unwrap().to_owned())
        };
        listed.iter().map(row).collect()
    }
}

async fn inbox(url: &str, service: &str) -> Inbox {
    match url.strip_prefix("sqlite://") {
        Some(file) => Inbox::sqlite(file, service),
        None => Inbox::postgres(PgPool::connect(url).await.unwrap(), service),
    }
}

/// Stores a delivery, and runs no handler.
async fn store(inbox: &Inbox, namespace: &str, id: &str, body: impl Into<Bytes>) {
    let layer =
        DedupLayer::new(key::header("webhook-id").namespace(namespace), MemoryAdapter::new());
    let handler = service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let service = inbox.clone().later().around(layer).layer(handler);
    let request = Request::post("/hook?tenant=7").header("webhook-id", id);
    let request = request.header("authorization", "Bearer s3cr3t").body(Full::new(body.into()));
    let response = service.oneshot(request.unwrap()).await.unwrap();
    assert_eq!(response.headers()["x-dedup-result"], "stored");
}

#[tokio::test]
async fn list_selects_rows_and_pages() {
    for world in World::filled().await {
        let listed = world.run(&["list"]).await;
        listed.assert(0, "SEQ  STATE             SERVICE  NAMESPACE  ID  EVENT TYPE");
        listed.assert(0, "\n2    parked (failed)   shop     test       b   -           2");
        listed.assert(0, "  11        500\n");
        for (args, seqs) in [
            (&[][..], &[1, 2, 3, 4, 5][..]),
            (&["--service", "billing"], &[5]),
            (&["--namespace", "other"], &[4]),
            (&["--id", "b"], &[2]),
            (&["--id", "b", "--service", "billing"], &[]),
            (&["--parked"], &[2, 3, 5]),
            (&["--parked=refused"], &[3]),
            (&["--received-until", "1h"], &[1]),
            (&["--received-until", "2020-01-01T00:00:00Z"], &[]),
            (&["--received-until", "2999-01-01T00:00:00Z"], &[1, 2, 3, 4, 5]),
            (&["--limit", "2"], &[1, 2]),
            (&["--after", "3"], &[4, 5]),
        ] {
            let listed = world.run(&[&["list", "--json"], args].concat()).await;
            let found: Vec<_> =
                listed.json().iter().map(|row| row["seq"].as_i64().unwrap()).collect();
            assert_eq!((listed.code, &found[..]), (0, seqs), "{args:?}");
            assert_eq!(listed.stderr.contains("--after 2"), args == ["--limit", "2"], "{listed:?}");
        }
        let rows = world.rows().await;
        let states = rows.iter().map(|(_, state)| state.as_str());
        let expected = ["waiting", "parked", "parked", "running", "parked"];
        assert!(states.eq(expected), "{rows:?}");
        let row = &world.run(&["list", "--json", "--id", "b"]).await.json()[0];
        assert_eq!(row["keys"], json!([{ "namespace": "test", "id": "b" }]));
        assert_eq!((&row["parked"], &row["attempts"]), (&json!("failed"), &json!(11)));
        world.run(&["list", "--id", "none"]).await.assert(0, "no rows\n");
        for args in [
            &["list", "--parked=unknown"][..],
            &["list", "--received-until", "yesterday"],
            &["list", "--table", "a;b"],
            &["retry"],
            &["drop", "--yes"],
        ] {
            assert_eq!(world.run(args).await.code, 2, "{args:?}");
        }
    }
}

#[tokio::test]
async fn show_prints_the_request_as_personal_data() {
    for world in World::filled().await {
        let shown = world.run(&["show", "1"]).await;
        shown.assert(0, "\n\nPOST /hook?tenant=7\nwebhook-id: a\n\n{\"n\": 1}\n");
        shown.assert(0, "personal data");
        assert!(!shown.said().contains("s3cr3t"), "{shown:?}");
        world.run(&["show", "4"]).await.assert(0, "\n\\u{1b}[2J\n");
        world.run(&["show", "99"]).await.assert(1, "there is no such row\n");
        // The line is a captured request.
        let json = world.run(&["show", "1", "--json"]).await;
        let captured = run_with("", &["key", "standard-webhooks"], &json.stdout).await;
        captured.assert(0, "{\"outcome\":\"key\",\"key\":\"a\"");

        store(&world.inbox, "test", "f", vec![0xff, 0, 1]).await;
        world.run(&["show", "6"]).await.assert(0, "3 bytes that are no text: --body-to FILE\n");
        let json = &world.run(&["show", "6", "--json"]).await.json()[0];
        assert_eq!(json["body_base64"], "/wAB");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("body");
        let to_file = ["show", "6", "--body-to", file.to_str().unwrap()];
        world.run(&to_file).await.assert(0, "the body is in ");
        assert_eq!(std::fs::read(&file).unwrap(), [0xff, 0, 1]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        world.run(&to_file).await.assert(2, "exists");

        let hash = format!("#{}", dedup_key("b").log_id());
        for args in [&["show", "2"][..], &["show", "2", "--json"], &["list", "--id", "b"]] {
            let hashed = world.run(&[args, &["--hash-ids"]].concat()).await;
            hashed.assert(0, &hash);
            assert!(!hashed.said().contains("webhook-id"), "{hashed:?}");
        }
    }
}

#[tokio::test]
async fn retry_makes_rows_due_and_leaves_those_that_run_or_are_expired() {
    for world in World::filled().await {
        for stdin in ["", "n\n"] {
            world.answer(&["retry", "2"], stdin).await.assert(1, "nothing was changed\n");
        }
        assert_eq!(world.rows().await[1].1, "parked");
        let retried = world.answer(&["retry", "2"], "y\n").await;
        retried.assert(0, "Make 1 row(s) due now, with all their attempts? [y/N]");
        retried.assert(0, "rows    1\nleft    0\n");
        let row = &world.run(&["list", "--json", "--id", "b"]).await.json()[0];
        assert_eq!((&row["state"], &row["attempts"]), (&json!("waiting"), &json!(0)));
        for (args, code, rows, left) in [
            (&["5"][..], 1, 0, 1),
            (&["99"], 1, 0, 1),
            (&["4", "4", "2"], 1, 1, 1),
            (&["2", "--parked"], 1, 0, 1),
            (&["--parked"], 1, 1, 1),
            (&["--parked=failed"], 0, 0, 0),
        ] {
            let ran = world.run(&[&["retry", "--yes", "--json"], args].concat()).await;
            assert_eq!(ran.code, code, "{args:?} {ran:?}");
            let json = &ran.json()[0];
            assert_eq!((&json["rows"], &json["left"]), (&json!(rows), &json!(left)), "{args:?}");
            assert_eq!(json["result"], if rows == 0 { "none" } else { "retried" });
        }
        let waiting = [1, 2, 3].map(|seq| (seq, "waiting".to_owned()));
        assert_eq!(world.rows().await[..3], waiting);
    }
}

#[tokio::test]
async fn drop_deletes_rows_and_says_that_they_do_not_run() {
    for world in World::filled().await {
        let declined = world.answer(&["drop", "--service", "shop"], "no\n").await;
        declined.assert(
            1,
            "1 of them run: their handlers go on, and are not repeated. Delete 4 row(s)?",
        );
        declined.assert(1, "Their events are not delivered again.");
        assert_eq!(world.rows().await.len(), 5);
        world.run(&["drop", "1", "99", "--yes"]).await.assert(1, "rows    1\nleft    1\n");
        world.run(&["drop", "--id", "b", "--yes"]).await.assert(0, "no key is forgotten");
        world.run(&["drop", "--namespace", "other", "--yes"]).await.assert(0, "rows    1\n");
        assert_eq!(world.rows().await.iter().map(|row| row.0).collect::<Vec<_>>(), [3, 5]);
        let dropped = world.run(&["drop", "--received-until", "0001-01-01T00:00:00Z"]).await;
        dropped.assert(0, "no row is selected");
        world
            .run(&["drop", "--received-until", "2999-01-01T00:00:00Z", "--yes"])
            .await
            .assert(0, "rows    2\n");
        assert!(world.rows().await.is_empty());
    }
}

/// More rows than one call returns.
#[tokio::test]
async fn large_tables_are_read_and_changed_in_parts() {
    for world in World::both().await {
        store(&world.inbox, "test", "a", "x").await;
        let (key, later) = match world.is_sqlite() {
            true => ("CAST(i AS BLOB)", "received + i"),
            false => ("int4send(i)", "received + i * interval '1 ms'"),
        };
        let columns = "namespace, keys, due, format, method, target, headers, body";
        world
            .execute(&format!(
                "INSERT INTO webhook_inbox (key, service, received, {columns})
                 WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)
                 SELECT {key}, 'many', {later}, {columns} FROM n, webhook_inbox WHERE seq = 1"
            ))
            .await;
        assert_eq!(world.rows().await.len(), 5_001);
        let listed = world.run(&["list", "--limit", "2500"]).await;
        listed.assert(0, "--limit 2500 is reached: the next page is --after 2500\n");
        assert_eq!(listed.stdout.lines().count(), 2_502, "two portions, each with a head");
        let retried = world.run(&["retry", "--service", "many", "--yes"]).await;
        retried.assert(0, "rows    5000\nleft    0\n");
        let asked = world.answer(&["drop", "--service", "many"], "y\n").await;
        asked.assert(0, "and 4990 more\nDelete 5000 row(s)?");
        asked.assert(0, "rows    5000\nleft    0\n");
        assert_eq!(world.rows().await, [(1, "waiting".to_owned())]);
    }
}

#[tokio::test]
async fn doctor_sees_rows_that_are_parked_or_wait_for_long() {
    for world in World::filled().await {
        let url = &world.place.url;
        let is_sqlite = world.is_sqlite();
        let doctor = async || doctor(url).await;
        doctor().await.assert_finding("inbox", "warning", "2 rows are parked -> see");
        world.run(&["drop", "2", "5", "--yes"]).await.assert(0, "");
        let late = "a row of test of the service shop waits for 2h";
        doctor().await.assert_finding("inbox", "warning", late);
        world.run(&["drop", "1", "--yes"]).await.assert(0, "");
        let well = doctor().await;
        well.assert_finding("inbox", "ok", "1 rows wait, 1 are parked");
        // The file is that of an inbox alone.
        assert_eq!(well.said().contains("\"table\""), !is_sqlite, "{well:?}");
        world.execute("ALTER TABLE webhook_inbox RENAME COLUMN last TO latest").await;
        let other_version = doctor().await;
        other_version.assert_finding("inbox", "error", "cannot be read");
        other_version.assert_finding("inbox", "error", "call `Inbox::migrate`");
    }
}

/// What the operator has confirmed is what was there when the question was asked.
#[tokio::test]
async fn rows_that_come_while_the_question_is_open_are_spared() {
    for world in World::both().await {
        for id in ["a", "b"] {
            store(&world.inbox, "test", id, id).await;
        }
        let mut drop = command();
        drop.env("TOWER_DEDUP_STORE", &world.place.url).args([
            "inbox",
            "drop",
            "--namespace",
            "test",
        ]);
        drop.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = spawn(drop);
        let (mut stderr, mut said) = (process.stderr.take().unwrap(), Vec::new());
        while !said.ends_with(b"[y/N] ") {
            assert_ne!(stderr.read_buf(&mut said).await.unwrap(), 0, "the question");
        }
        // A new one, and one that its sender has delivered again.
        store(&world.inbox, "test", "c", "c").await;
        store(&world.inbox, "test", "b", "b").await;
        process.stdin.take().unwrap().write_all(b"y\n").await.unwrap();
        let output = process.wait_with_output().await.unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("rows    1\nleft    1\n"), "{said}");
        let left = world.rows().await;
        assert_eq!(left.iter().map(|row| row.0).collect::<Vec<_>>().len(), 2, "{left:?}");
        world.run(&["show", "1"]).await.assert(1, "no such row");
    }
}

#[tokio::test]
async fn database_without_an_inbox_is_refused_and_not_changed() {
    for place in Place::both() {
        if let Some(file) = place.url.strip_prefix("sqlite://") {
            place.run(&["inbox", "list"]).await.assert(4, "there is no file");
            assert!(!std::path::Path::new(file).exists());
        }
        place.run(&["migrate"]).await.assert(0, "made");
        for args in [&["list"][..], &["show", "1"], &["drop", "1", "--yes"]] {
            let ran = place.run(&[&["inbox"], args].concat()).await;
            ran.assert(4, "no table of an inbox");
        }
        run(&place.url, &["migrate", "--check"]).await.assert(0, "current");
    }
    run(shared_redis(), &["inbox", "list"]).await.assert(2, "Postgres or SQLite");
    let server = shared().split_once("://").unwrap().1.rsplit('@').next().unwrap();
    let wrong = run(&format!("postgres://no_such_role:s3cr3t@{server}"), &["inbox", "list"]).await;
    assert!(wrong.code == 4 && !wrong.said().contains("s3cr3t"), "{wrong:?}");
    // As the server says it, once, and without a line of the server's source.
    let other = run(shared(), &["inbox", "list", "--table", "pg_catalog.pg_class"]).await;
    assert_eq!(other.stderr, "error: column \"seq\" does not exist\n");
}

#[tokio::test]
async fn another_table_has_its_name_and_schema() {
    let schema = Schema::fresh();
    let inbox = inbox(&schema.url(), "shop").await.table(&format!("{}.events", schema.name()));
    inbox.migrate().await.unwrap();
    store(&inbox, "test", "a", "").await;
    for name in ["events", &format!("{}.events", schema.name())] {
        run(&schema.url(), &["inbox", "list", "--table", name]).await.assert(0, "waiting");
    }
}

#[tokio::test]
async fn commands_that_read_need_select_only() {
    let role = Role::fresh().await;
    let inbox = inbox(&role.schema.url(), "shop").await;
    inbox.migrate().await.unwrap();
    store(&inbox, "test", "a", "").await;
    let (schema, name) = (role.schema.name().to_owned(), role.name.clone());
    for (right, args, code, words) in [
        ("SELECT", &["list"][..], 0, "waiting"),
        ("SELECT", &["show", "1"], 0, "POST /hook"),
        ("SELECT", &["retry", "1", "--yes"], 4, "permission denied"),
        ("UPDATE", &["retry", "1", "--yes"], 0, "rows    1"),
        ("UPDATE", &["drop", "1", "--yes"], 4, "permission denied"),
        ("DELETE", &["drop", "1", "--yes"], 0, "rows    1"),
    ] {
        let grant = format!(
            "GRANT USAGE ON SCHEMA {schema} TO {name}; GRANT {right} ON {schema}.webhook_inbox TO {name}"
        );
        role.admin(&grant).await;
        run(&role.url(), &[&["inbox"], args].concat()).await.assert(code, words);
    }
    role.remove().await;
}
