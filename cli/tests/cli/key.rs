//! `key` on every sample.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tower_dedup::provider;

use crate::command::{Ran, run_with};

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

fn payloads() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/payloads")
}

#[tokio::test]
async fn key_prints_the_expected_key_of_every_constructed_sample() {
    let mut asked = 0;
    for preset in provider::ALL {
        let file = payloads().join(format!("constructed/{}.json", preset.name()));
        let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        for case in cases {
            // A capture may omit members; other members are ignored.
            let mut answer = printed(&[preset.name()], &case.to_string()).await;
            if let Some(reason) = answer.as_object_mut().unwrap().remove("reason") {
                assert!(reason.as_str().is_some_and(|reason| !reason.is_empty()));
                assert_eq!(answer["outcome"], "malformed");
            }
            assert_eq!(answer, case["expect"], "{}: {}", preset.name(), case["name"]);
            asked += 1;
        }
    }
    assert!(asked > 150, "only {asked}");
}

#[tokio::test]
async fn key_reads_captured_samples() {
    let sns = "arn:aws:sns:us-east-1:1234567890:SES_Events|19ba9823-d7f2-53c1-860e-cb10e0d13dfc";
    let sendgrid = json!(["ZHJvcC0xMDk5NDkxOS1MUnpYbF9OSFN0T0doUTRrb2ZTbV9BLTA"]);
    let batch = json!(["/mycontext/4|B234-1234-1234", "/mycontext/9|C234-1234-1234"]);
    let key = |key: &str| json!({ "outcome": "key", "key": key });
    let keys = |keys: Value| json!({ "outcome": "keys", "keys": keys });
    for (preset, file, expected) in [
        ("cloudevents", "cloudevents/batch.json", keys(batch)),
        ("cloudevents", "cloudevents/binary.json", key("/mycontext/subcontext|1234-1234-1234")),
        ("cloudevents", "cloudevents/structured.json", key("/mycontext|C234-1234-1234")),
        ("sendgrid", "sendgrid/signature_vector.json", keys(sendgrid)),
        ("aws-sns", "aws_sns/bounce_event.json", key(sns)),
        ("aws-sns", "aws_sns/subscription_confirmation.json", json!({ "outcome": "bypass" })),
    ] {
        let path = payloads().join(file);
        assert_eq!(printed(&[preset, path.to_str().unwrap()], "").await, expected, "{file}");
    }
}

#[tokio::test]
async fn key_prints_its_fields_in_this_order() {
    let msg_1 = r#"{"headers": {"Webhook-ID": "msg_1"}}"#;
    let malformed = r#"{"outcome":"malformed","reason":"the body is not a JSON array"}"#;
    for (args, stdin, line) in [
        (&["openai", "-"][..], msg_1, r#"{"outcome":"key","key":"msg_1"}"#),
        (&["openai"], "{}", r#"{"outcome":"missing"}"#),
        (&["sendgrid"], r#"{"body_utf8": "{}"}"#, malformed),
        (&["box"], r#"{"method": "GET"}"#, r#"{"outcome":"bypass"}"#),
    ] {
        assert_eq!(key(args, stdin).await.stdout, format!("{line}\n"));
    }
}

#[tokio::test]
async fn key_prints_keys_as_they_are_stored() {
    let long = json!({ "headers": { "webhook-id": "x".repeat(256) } }).to_string();
    let stored = tower_dedup::DedupKey::new("any", &"x".repeat(256)).unwrap();
    let expected = json!({ "outcome": "key", "key": stored.id() });
    assert_eq!(printed(&["standard-webhooks"], &long).await, expected);
}

#[tokio::test]
async fn key_reads_binary_bodies_and_repeated_headers() {
    // {"update_id":7}
    let base64 = r#"{"body_base64": "eyJ1cGRhdGVfaWQiOjd9", "headers": null, "url": null}"#;
    assert_eq!(printed(&["telegram"], base64).await, json!({ "outcome": "key", "key": "7" }));
    let twice = r#"{"headers": {"webhook-id": "a", "Webhook-Id": "a"}}"#;
    assert_eq!(printed(&["svix"], twice).await["outcome"], "malformed");
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
