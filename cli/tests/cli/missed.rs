//! `missed` on every store.

use std::fmt::Write;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tower_dedup::DedupKey;

use crate::command::{Ran, command, execute, run_with};
use crate::keys::{Place, fill};
use support::{complete_all, dedup_key, terms};

async fn missed(place: &Place, args: &[&str], lines: &str) -> Ran {
    run_with(&place.url, &[&["missed"], args].concat(), lines).await
}

/// Every state in the order of the list, and every way to print it.
#[tokio::test]
async fn state_of_each_event_is_printed() {
    for place in Place::all() {
        fill(&place.url).await;
        let lines = "\u{feff}run\r\ngone\n\nbad \ndone\nnone\nnone\n";
        let ran = missed(&place, &["test"], lines).await;
        let table = "run\tin-flight\ngone\tlapsed\nbad\treleased\nnone\tunknown\nnone\tunknown\n";
        assert_eq!((ran.code, &*ran.stdout), (1, table), "{ran:?}");
        let json = missed(&place, &["test", "--json"], lines).await;
        let states: Vec<_> = json.json().iter().map(|line| line["state"].clone()).collect();
        assert_eq!(states, ["in-flight", "lapsed", "released", "unknown", "unknown"]);
        let counts: Value = serde_json::from_str(json.stderr.trim_end()).unwrap();
        let expected = json!({ "ids": 6, "complete": 1, "in_flight": 1, "lapsed": 1, "released": 1,
            "unknown": 2, "unreadable": 0 });
        assert_eq!(counts, expected);
        let hashed = missed(&place, &["test", "--hash-ids"], "bad\n").await;
        assert_eq!(hashed.stdout, format!("#{}\treleased\n", dedup_key("bad").log_id()));
        let ids = missed(&place, &["test", "--ids-only"], lines).await;
        assert_eq!((ids.code, &*ids.stdout), (1, "run\ngone\nbad\nnone\nnone\n"));
        for (lines, ids) in [("done\ndone\n", "ids 2, complete 2, "), ("\n\r\n", "ids 0, ")] {
            let ran = missed(&place, &["test"], lines).await;
            assert_eq!(ran.stdout, "", "{ran:?}");
            ran.assert(0, ids);
        }
    }
}

/// The key is that of the layer, however a line names the event.
#[tokio::test]
async fn line_may_be_json_with_the_id_or_a_captured_request() {
    let place = Place::sqlite();
    place.run(&["migrate"]).await.assert(0, "made");
    let adapter = place.adapter().await;
    let long = "x".repeat(300);
    let keys = [
        ("github", "guid-1"),
        ("github", "1234567890123456789"),
        ("stripe", "acct_1|evt_1"),
        ("stripe", "evt_2"),
        ("shopify", "shop.myshopify.com|id-1"),
        ("adyen", "account|psp-1|AUTHORISATION|true"),
        ("mine", &long),
        ("mine", "a|b"),
    ];
    let keys = keys.map(|(namespace, id)| DedupKey::new(namespace, id).unwrap());
    complete_all(&*adapter, &keys, &terms()).await.unwrap();
    let capture = |headers: Value, body: Value| {
        json!({ "headers": headers, "body_utf8": body.to_string(), "n": 7 }).to_string()
    };
    let item = |psp| {
        json!({ "NotificationRequestItem": { "merchantAccountCode": "account",
            "pspReference": psp, "eventCode": "AUTHORISATION", "success": "true" } })
    };
    let ping = json!({ "x-github-event": "ping", "x-github-delivery": "ping-1" });
    for (args, line, missing) in [
        (&["github", "--id", "/guid"][..], r#"{"guid":"guid-1","id":7}"#.to_owned(), &[][..]),
        (&["github", "--id", "/guid"], r#"{"guid":"guid-2","id":7}"#.to_owned(), &["guid-2"]),
        (&["github", "--id", "/id"], r#"{"id":1234567890123456789}"#.to_owned(), &[]),
        (&["mine", "--id", "/0", "--id", "/1"], r#"["a","b"]"#.to_owned(), &[]),
        (&["mine", "--id", "/1", "--id", "/0"], r#"["a","b"]"#.to_owned(), &["b|a"]),
        (&["mine"], "a|b".to_owned(), &[]),
        // Over 255 bytes, the key is a digest; the list has the id.
        (&["mine"], long.clone(), &[]),
        (&["github"], long.clone(), &[&*long]),
        (
            &["github", "--preset", "github"],
            capture(json!({ "X-GitHub-Delivery": "guid-1" }), json!({})),
            &[],
        ),
        (
            &["github", "--preset", "github"],
            capture(ping, json!({ "zen": "Design for failure.", "hook_id": 1 })),
            &[],
        ),
        (
            &["stripe", "--preset", "stripe"],
            capture(json!({}), json!({ "account": "acct_1", "id": "evt_1" })),
            &[],
        ),
        (&["stripe", "--preset", "stripe"], capture(json!({}), json!({ "id": "evt_2" })), &[]),
        (
            &["stripe", "--preset", "stripe"],
            capture(json!({}), json!({ "account": "acct_1", "id": "evt_2" })),
            &["acct_1|evt_2"],
        ),
        (
            &["shopify", "--preset", "shopify"],
            capture(
                json!({ "X-Shopify-Shop-Domain": "shop.myshopify.com", "X-Shopify-Webhook-Id": "id-1" }),
                json!({}),
            ),
            &[],
        ),
        (
            &["adyen", "--preset", "adyen"],
            capture(json!({}), json!({ "notificationItems": [item("psp-1"), item("psp-2")] })),
            &["account|psp-2|AUTHORISATION|true"],
        ),
        // Another namespace than that of the preset.
        (
            &["mine", "--preset", "github"],
            capture(json!({ "X-GitHub-Delivery": "guid-1" }), json!({})),
            &["guid-1"],
        ),
    ] {
        let ran = missed(&place, &[args, &["--ids-only"]].concat(), &line).await;
        let ids: Vec<_> = ran.stdout.lines().collect();
        assert_eq!((ran.code, &*ids), (i32::from(!missing.is_empty()), missing), "{args:?} {line}");
        // With the line, so that what delivers the event again has its own number of it.
        let ran = missed(&place, &[args, &["--json"]].concat(), &line).await;
        for (found, id) in ran.json().iter().zip(missing) {
            assert_eq!((&found["id"], &found["namespace"]), (&json!(id), &json!(args[0])));
            let shown = args.len() > 1;
            let expected = shown.then(|| serde_json::from_str::<Value>(&line).unwrap());
            assert_eq!(found["line"], json!(expected));
        }
        let ran = missed(&place, &[args, &["--json", "--hash-ids"]].concat(), &line).await;
        assert!(missing.iter().all(|id| !ran.said().contains(id)), "{ran:?}");
    }
}

/// The answer is not whole, so it is neither yes nor no.
#[tokio::test]
async fn line_that_cannot_be_read_is_reported_and_the_others_are_looked_up() {
    let place = Place::sqlite();
    fill(&place.url).await;
    let lines = format!("done\n \ne\0\n{}\nnone\n", "x".repeat(2 << 20));
    let ran = missed(&place, &["test", "--json"], &lines).await;
    assert_eq!(
        (ran.code, ran.json().len(), &ran.json()[0]["id"]),
        (2, 1, &json!("none")),
        "{ran:?}"
    );
    let told: Vec<Value> =
        ran.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&told[0]["line"], &told[1]["line"]), (&json!(3), &json!(4)));
    assert_eq!((&told[2]["ids"], &told[3]["exit_code"]), (&json!(2), &json!(2)));
    for (args, line, code, why) in [
        (&["--id", "/guid"][..], "guid-1", 2, "line 1 has no id: "),
        (&["--id", "/guid"], "{\"id\":1}", 2, "line 1 has no id: "),
        (&["--id", "/guid"], "[{\"guid\":\"a\"}]", 2, "line 1 has no id: "),
        (&["--id", "/guid"], "{\"guid\":1.5}", 2, "line 1 has no id: "),
        (&["--preset", "github"], "{}", 2, "line 1 has no id: the key is missing"),
        (&["--preset", "github"], "guid-1", 2, "line 1 has no id: "),
        (&["--preset", "gothub"], "", 2, "the presets are "),
        (&["--id", "guid"], "", 2, "--id"),
        (&["--id", "/a", "--preset", "github"], "", 2, "--preset"),
        (&["--ids-only", "--json"], "", 2, "--json"),
    ] {
        missed(&place, &[&["test"], args].concat(), line).await.assert(code, why);
    }
    missed(&place, &[""], "").await.assert(2, "the namespace");
    for place in Place::both() {
        missed(&place, &["test"], "a\n").await.assert(4, "tower-dedup migrate");
    }
}

/// One damaged row must not hide the others.
#[tokio::test]
async fn unreadable_key_is_told_apart() {
    let place = Place::sqlite();
    fill(&place.url).await;
    execute(&place.url, "UPDATE webhook_deliveries SET attempts = 'abc' WHERE id = 'done'").await;
    let ran = missed(&place, &["test"], "done\nrun\nnone\n").await;
    assert_eq!((ran.code, &*ran.stdout), (1, "done\tunreadable\nrun\tin-flight\nnone\tunknown\n"));
}

/// More lines than one part, of which the first is answered before the list has ended: nothing is gathered.
#[tokio::test]
async fn list_is_answered_as_it_is_read() {
    for place in Place::all() {
        fill(&place.url).await;
        let mut command = command();
        command.env("TOWER_DEDUP_STORE", &place.url).args(["missed", "test", "--ids-only"]);
        let mut command = tokio::process::Command::from(command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.kill_on_drop(true).spawn().unwrap();
        let mut stdin = process.stdin.take().unwrap();
        let mut stdout = BufReader::new(process.stdout.take().unwrap()).lines();
        for part in 0..3 {
            let mut lines = String::new();
            for line in 0..4_096 {
                let id = if line == part { "none" } else { "done" };
                writeln!(lines, "{id}").unwrap();
            }
            stdin.write_all(lines.as_bytes()).await.unwrap();
            stdin.flush().await.unwrap();
            let line = tokio::time::timeout(Duration::from_secs(30), stdout.next_line()).await;
            assert_eq!(line.expect("an answer").unwrap().as_deref(), Some("none"), "{part}");
        }
        drop(stdin);
        let output = process.wait_with_output().await.unwrap();
        assert_eq!(output.status.code(), Some(1));
        let counts = String::from_utf8(output.stderr).unwrap();
        assert!(counts.starts_with("ids 12288, complete 12285, "), "{counts}");
    }
}
