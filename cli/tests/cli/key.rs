//! `key`: how it reads a captured request, and what it prints. `tests/providers` has the samples of each preset.

use serde_json::{Value, json};
use tower_dedup::provider;

use crate::command::{Ran, run_with};
use support::dedup_key;

async fn key(args: &[&str], stdin: &str) -> Ran {
    run_with("", &[&["key"], args].concat(), stdin).await
}

/// Returns the line that the command prints.
async fn printed(args: &[&str], stdin: &str) -> Value {
    let ran = key(args, stdin).await;
    assert_eq!((ran.code, ran.stdout.lines().count(), &*ran.stderr), (0, 1, ""), "{args:?}");
    ran.json().remove(0)
}

/// Returns the error that the command prints.
async fn refusal(args: &[&str], stdin: &str) -> String {
    let ran = key(args, stdin).await;
    assert_eq!((ran.code, &*ran.stdout), (2, ""), "{args:?}");
    ran.stderr
}

#[tokio::test]
async fn key_prints_each_outcome_as_one_line() {
    // A capture may omit members; other members are ignored.
    let msg_1 = r#"{"headers": {"Webhook-ID": "msg_1"}, "why": "as the sender shows it"}"#;
    let events = r#"{"body_utf8": "[{\"sg_event_id\": \"a\"}, {\"sg_event_id\": \"b\"}]"}"#;
    let malformed = r#"{"outcome":"malformed","reason":"the body is not a JSON array"}"#;
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/payloads/cloudevents/binary.json");
    // `printf %s "$BODY" | sha256sum`
    let binary = r#"{"outcome":"key","key":"/mycontext/subcontext|1234-1234-1234","content_identity":{"namespace":"cloudevents.body","id":"body_eaf558fa8c6d94540f6b4d4ab6e4c25ee954a1bb32f2a1c82894c40217138baf"}}"#;
    let each = r#"{"outcome":"keys","keys":["a","b"],"content_identities":[{"namespace":"sendgrid.body","id":"body_14414b5c8f60c2b3fcda2d2c2ffbac5554469dda95a177c31b6e77c402fa0219"},{"namespace":"sendgrid.body","id":"body_15f6b31cdcf648fccf63e1a06197a72ee60729e3597c7a821a16e52503101438"}]}"#;
    let long = "x".repeat(256);
    let stored = format!(r#"{{"outcome":"key","key":"{}"}}"#, dedup_key(&long).id());
    let long = json!({ "headers": { "webhook-id": long } }).to_string();
    for (args, stdin, line) in [
        (&["openai", "-"][..], msg_1, r#"{"outcome":"key","key":"msg_1"}"#),
        // As it is stored.
        (&["openai"], &*long, &*stored),
        (&["cloudevents", file], "", binary),
        (&["sendgrid"], events, each),
        (&["openai"], "{}", r#"{"outcome":"missing"}"#),
        (&["sendgrid"], r#"{"body_utf8": "{}"}"#, malformed),
        (&["box"], r#"{"method": "GET"}"#, r#"{"outcome":"bypass"}"#),
        (
            &["slack"],
            r#"{"body_utf8": "{\"type\":\"url_verification\"}"}"#,
            r#"{"outcome":"bypass"}"#,
        ),
    ] {
        assert_eq!(key(args, stdin).await.stdout, format!("{line}\n"));
    }
}

#[tokio::test]
async fn key_reads_binary_bodies_and_repeated_headers() {
    // {"update_id":7}
    let base64 = r#"{"body_base64": "eyJ1cGRhdGVfaWQiOjd9", "headers": null, "url": null}"#;
    assert_eq!(printed(&["telegram"], base64).await["key"], "7");
    for twice in [r#"{"webhook-id": "a", "Webhook-Id": "a"}"#, r#"{"webhook-id": ["a", "a"]}"#] {
        let twice = format!(r#"{{"headers": {twice}}}"#);
        assert_eq!(printed(&["svix"], &twice).await["outcome"], "malformed");
    }
    let absolute = r#"{"method": "GET", "url": "https://example.com:8443/v?CallSid=CA1#rc=2"}"#;
    assert_eq!(printed(&["twilio"], absolute).await["key"], "|CA1||||");
}

#[tokio::test]
async fn key_names_what_it_cannot_read() {
    let unknown = refusal(&["strip"], "{}").await;
    assert!(unknown.contains("\"strip\"") && unknown.contains("stripe"), "{unknown}");
    for preset in provider::ALL {
        assert!(unknown.contains(preset.name()), "{unknown}");
    }
    assert!(refusal(&["stripe", "no/such/file"], "").await.contains("no/such/file"));
    assert!(refusal(&["stripe"], "{").await.contains("stdin"));
    // It has no end.
    #[cfg(unix)]
    assert!(refusal(&["stripe", "/dev/zero"], "").await.contains("expected value"));
    for request in [
        r#"{"url": "a b"}"#,
        r#"{"method": "A B"}"#,
        r#"{"headers": {"a b": "c"}}"#,
        r#"{"headers": {"a": "b\nc"}}"#,
        r#"{"headers": {"a": 1}}"#,
        r#"{"headers": []}"#,
        r#"{"body_base64": "?"}"#,
        r#"{"body_base64": "", "body_utf8": ""}"#,
        "[]",
    ] {
        let error = refusal(&["stripe"], request).await;
        assert!(error.starts_with("error: stdin: "), "{request}: {error}");
    }
    assert!(refusal(&[], "").await.contains("PROVIDER"));
}
