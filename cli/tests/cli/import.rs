//! `import` on every store.

use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt;
use serde_json::Value;
use sqlx::{Connection, Executor, PgConnection};
use tower_dedup::adapter::contract::ClaimReply;
use tower_dedup::adapter::maintenance::ListFilter;

use crate::command::{Ran, run_with};
use crate::keys::{Place, fill};
use support::{dedup_key, terms};

const DAY: u64 = 86_400;

/// Returns a time in the past.
fn ago(seconds: u64) -> String {
    humantime::format_rfc3339_seconds(SystemTime::now() - Duration::from_secs(seconds)).to_string()
}

async fn import(place: &Place, lines: &str) -> Ran {
    run_with(&place.url, &["import", "test", "--json"], lines).await
}

/// The numbers of imported, known, running, too old and bad lines.
fn counts(ran: &Ran) -> [u64; 5] {
    let counts = &ran.json()[0];
    let names = ["imported", "known", "in_flight", "too_old", "bad_lines"];
    names.map(|name| counts[name].as_u64().unwrap())
}

async fn migrated(place: Place) -> Place {
    place.adapter().await.stats().await.unwrap();
    place
}

#[tokio::test]
async fn imported_id_is_a_duplicate_until_its_own_retention_ends() {
    for place in Place::all() {
        let place = migrated(place).await;
        let old = ago(29 * DAY);
        let lines = format!(
            "\u{feff}new,{}\r\na,b|c\t{old}\n\ntwice,{old}\ntwice,{}\nover,{}\nlater,2999-01-01T00:00:00Z",
            ago(0),
            ago(60),
            ago(30 * DAY + 1),
        );
        let first = import(&place, &lines).await;
        assert_eq!((first.code, counts(&first)), (0, [4, 1, 0, 1, 0]), "{first:?}");
        let again = import(&place, &lines).await;
        assert_eq!((again.code, counts(&again)), (0, [0, 5, 0, 1, 0]), "{again:?}");
        let adapter = place.adapter().await;
        for (id, days) in [("new", 30), ("a,b|c", 1), ("twice", 30), ("later", 30)] {
            let claimed = adapter.claim(&dedup_key(id), &terms()).await.unwrap();
            assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{id}: {claimed:?}");
            let entry = adapter.get(&dedup_key(id)).await.unwrap().unwrap();
            let left = entry.expires_at.duration_since(SystemTime::now()).unwrap().as_secs();
            // The time of this test.
            assert!((days * DAY - 600..=days * DAY).contains(&left), "{id}: {left}");
            for at in [entry.first_seen_at, entry.completed_at.unwrap()] {
                let age = at.elapsed().unwrap_or_default().as_secs();
                let expected = (30 - days) * DAY;
                assert!((expected..expected + 600).contains(&age), "{id}: {age}");
            }
        }
        assert!(adapter.get(&dedup_key("over")).await.unwrap().is_none());
    }
}

/// A key that the service has is as it was, but for one that is free: the old program has handled its event.
#[tokio::test]
async fn complete_and_running_keys_stay_as_they_are() {
    for place in Place::all() {
        fill(&place.url).await;
        let adapter = place.adapter().await;
        let mine = terms();
        adapter.claim(&dedup_key("mine"), &mine).await.unwrap();
        let before = adapter.get(&dedup_key("done")).await.unwrap();
        let lines: String = ["run", "gone", "bad", "done", "mine"]
            .map(|id| format!("{id}\t{}\n", ago(60)))
            .concat();
        let ran = import(&place, &lines).await;
        assert_eq!((ran.code, counts(&ran)), (0, [2, 1, 2, 0, 0]), "{ran:?}");
        assert_eq!(adapter.get(&dedup_key("done")).await.unwrap(), before);
        let held = adapter.complete(&dedup_key("mine"), &mine).await.unwrap();
        assert_eq!(format!("{held:?}"), "Held");
        place.run(&["get", "test", "bad"]).await.assert(0, "complete");
    }
}

#[tokio::test]
async fn line_that_cannot_be_read_is_reported_and_the_others_are_imported() {
    let place = migrated(Place::sqlite()).await;
    let now = ago(0);
    let lines = format!(
        "id,received_at\na,{now}\nb\n\"c\",{now}\nd,1769860800\n ,{now}\ne\0,{now}\nf,{now}\n\"g\t{now}\n\
         evt_1,invoice.paid,{now}\nevt_1\tinvoice.paid\t{now}\n{long},{now}\n\\N\t{now}\na\\\\b\t{now}\nh,{now}\n",
        long = "x".repeat(2 << 20),
    );
    let ran = import(&place, &lines).await;
    assert_eq!((ran.code, counts(&ran)), (1, [4, 0, 0, 0, 11]), "{ran:?}");
    let reported: Vec<Value> =
        ran.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lines: Vec<_> = reported.iter().map(|line| line["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, [1, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14]);
    for (args, line, why) in [
        (&[][..], "x\n", "has no tab and no comma"),
        (&[], "x\t\n", "has no time like"),
        (&[], "x,\n", "has no time like"),
        (&[], "\t\n", "has no time like"),
        (&[], "x\t\\N\n", "has no time like"),
        (&[], "\\N\t2026-01-31T12:00:00Z\n", "has a backslash, which only --copy reads"),
        (&[], "a\\b,2026-01-31T12:00:00Z\n", "has a backslash, which only --copy reads"),
        (&["--copy"], "x,2026-01-31T12:00:00Z\n", "has no tab between an id and a time"),
        (&["--copy"], "\\N\t2026-01-31 12:00:00+00\n", "has no id: it is NULL"),
        (&["--copy"], "x\t\\N\n", "has no time like"),
        (&["--copy"], "a\\x\t2026-01-31 12:00:00+00\n", "has an escape that COPY does not write"),
    ] {
        let ran = run_with(&place.url, &[&["import", "test"], args].concat(), line).await;
        ran.assert(1, &format!("line 1 {why}"));
        ran.assert(1, "bad_lines  1\n");
    }
    // Of many, the first are reported.
    let many = import(&place, &format!("{}z,{now}\n", "x\n".repeat(30))).await;
    assert_eq!((counts(&many), many.stderr.lines().count()), ([1, 0, 0, 0, 30], 20));
    run_with(&place.url, &["import", ""], "").await.assert(2, "the namespace");
}

/// The ids of the table are those of the store, whatever `COPY` escapes. A row without an id is reported.
#[tokio::test]
async fn output_of_copy_is_decoded() {
    let [_, place] = Place::both();
    let place = migrated(place).await;
    let ids =
        [r"a\b", "tab\tid", "plain", "line\nfeed", "x\r\u{8}\u{b}\u{c}", r"\N", "quote\"id", "a,b"];
    let mut connection = PgConnection::connect(&place.url).await.unwrap();
    let table =
        "CREATE TABLE processed_events (event_id text, received_at timestamptz DEFAULT now())";
    connection.execute(table).await.unwrap();
    for id in ids.map(Some).into_iter().chain([None]) {
        let insert = sqlx::query("INSERT INTO processed_events (event_id) VALUES ($1)").bind(id);
        insert.execute(&mut connection).await.unwrap();
    }
    let copy = "COPY (SELECT event_id, received_at FROM processed_events) TO STDOUT";
    let copied = connection.copy_out_raw(copy).await.unwrap();
    let copied: Vec<_> = copied.try_collect().await.unwrap();
    let lines = String::from_utf8(copied.concat()).unwrap();
    let ran = run_with(&place.url, &["import", "test", "--json", "--copy"], &lines).await;
    assert_eq!((ran.code, counts(&ran)), (1, [ids.len() as u64, 0, 0, 0, 1]), "{ran:?}");
    let adapter = place.adapter().await;
    for id in ids {
        assert!(adapter.get(&dedup_key(id)).await.unwrap().is_some(), "{id:?}");
    }
}

/// A sender that may repeat an event for longer than the layer's default has the longer retention.
#[tokio::test]
async fn retention_is_that_of_the_layer_or_of_the_option() {
    let place = migrated(Place::sqlite()).await;
    let floor = tower_dedup::provider::find("stripe").unwrap().retention_floor().as_secs();
    let stripe = async |args: &[&str], line: String| {
        let args = [&["import", "stripe", "--json"], args].concat();
        counts(&run_with(&place.url, &args, &line).await)
    };
    let kept = floor.max(30 * DAY);
    assert_eq!(stripe(&[], format!("a,{}", ago(kept - 60))).await, [1, 0, 0, 0, 0]);
    assert_eq!(stripe(&[], format!("b,{}", ago(kept + 60))).await, [0, 0, 0, 1, 0]);
    let option = &["--retention", "400d"];
    assert_eq!(stripe(option, format!("b,{}", ago(kept + 60))).await, [1, 0, 0, 0, 0]);
}

/// Their claims would be sent at the same time, and any of them would count.
#[tokio::test]
async fn latest_of_several_times_of_an_id_counts() {
    let [_, place] = Place::both();
    let place = migrated(place).await;
    let (old, now) = (ago(10 * DAY), ago(0));
    let lines = (0..200).map(|id| format!("evt_{id},{old}\nevt_{id},{now}\n"));
    let lines = lines.collect::<String>();
    assert_eq!(counts(&import(&place, &lines).await), [200, 200, 0, 0, 0]);
    let keys = place.adapter().await.list(&ListFilter::default(), None, 500).await.unwrap().keys;
    let later = SystemTime::now() + Duration::from_secs(25 * DAY);
    let early = keys.iter().filter(|(_, entry)| entry.expires_at < later).count();
    assert_eq!((keys.len(), early), (200, 0));
}

/// More lines than one part, and more than fit into a batch. What the first run has not sent, the second sends.
#[tokio::test]
async fn second_run_continues_the_first() {
    let [_, place] = Place::both();
    let place = migrated(place).await;
    let line = |id| format!("evt_{id},{}\n", ago(id * 60));
    let lines = |ids: std::ops::Range<u64>| ids.map(line).collect::<String>();
    let first = import(&place, &lines(0..9_000)).await;
    assert_eq!(counts(&first), [9_000, 0, 0, 0, 0]);
    let all = import(&place, &lines(0..18_000)).await;
    assert_eq!(counts(&all), [9_000, 9_000, 0, 0, 0]);
    assert_eq!(counts(&import(&place, &lines(0..18_000)).await), [0, 18_000, 0, 0, 0]);
    let stats = place.adapter().await.stats().await.unwrap();
    assert_eq!((stats.rows, stats.complete), (18_000, 18_000));
}

#[tokio::test]
async fn store_that_fails_says_to_run_the_command_again() {
    let place = Place::sqlite();
    import(&place, "a,2026-01-31T12:00:00Z").await.assert(4, "tower-dedup migrate");
    run_with("memory:", &["import", "test"], "").await.assert(2, "its own process");
    let [_, postgres] = Place::both();
    let ran = import(&postgres, &format!("a,{}", ago(0))).await;
    ran.assert(4, "(0 are imported: run the command again)");
    postgres.run(&["migrate"]).await.assert(0, "made");
    assert_eq!(counts(&import(&postgres, &format!("a,{}", ago(0))).await), [1, 0, 0, 0, 0]);
}
