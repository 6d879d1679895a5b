//! `key` on every sample.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tower_dedup::provider;

fn key() -> Command {
    let mut command = crate::command::command();
    command.arg("key");
    command
}

fn with_stdin(args: &[&str], stdin: &[u8]) -> Output {
    let mut command = key();
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    // The process may exit before it has read all of stdin.
    let _ = process.stdin.take().unwrap().write_all(stdin);
    process.wait_with_output().unwrap()
}

/// Returns the line that the command prints.
fn printed(args: &[&str], stdin: &[u8]) -> Value {
    let output = with_stdin(args, stdin);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {stderr}");
    assert_eq!((stdout.lines().count(), &*stderr), (1, ""), "{args:?}");
    serde_json::from_str(&stdout).unwrap()
}

/// Returns the error that the command prints.
fn refusal(args: &[&str], stdin: &[u8]) -> String {
    let output = with_stdin(args, stdin);
    assert!(!output.status.success(), "{args:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn payloads() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/payloads")
}

#[test]
fn key_prints_the_expected_key_of_every_constructed_sample() {
    let mut asked = 0;
    for preset in provider::ALL {
        let file = payloads().join(format!("constructed/{}.json", preset.name()));
        let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        for case in cases {
            // A capture may omit members; other members are ignored.
            let mut answer = printed(&[preset.name()], case.to_string().as_bytes());
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

#[test]
fn key_reads_captured_samples() {
    for (preset, file, expected) in [
        (
            "cloudevents",
            "cloudevents/batch.json",
            json!({ "outcome": "keys", "keys": ["/mycontext/4|B234-1234-1234", "/mycontext/9|C234-1234-1234"] }),
        ),
        (
            "cloudevents",
            "cloudevents/binary.json",
            json!({ "outcome": "key", "key": "/mycontext/subcontext|1234-1234-1234" }),
        ),
        (
            "cloudevents",
            "cloudevents/structured.json",
            json!({ "outcome": "key", "key": "/mycontext|C234-1234-1234" }),
        ),
        (
            "sendgrid",
            "sendgrid/signature_vector.json",
            json!({ "outcome": "keys", "keys": ["ZHJvcC0xMDk5NDkxOS1MUnpYbF9OSFN0T0doUTRrb2ZTbV9BLTA"] }),
        ),
        (
            "aws-sns",
            "aws_sns/bounce_event.json",
            json!({
                "outcome": "key",
                "key": "arn:aws:sns:us-east-1:1234567890:SES_Events|19ba9823-d7f2-53c1-860e-cb10e0d13dfc",
            }),
        ),
        ("aws-sns", "aws_sns/subscription_confirmation.json", json!({ "outcome": "bypass" })),
    ] {
        let path = payloads().join(file);
        assert_eq!(printed(&[preset, path.to_str().unwrap()], b""), expected, "{file}");
    }
}

#[test]
fn key_prints_its_fields_in_this_order() {
    let line = |args: &[&str], stdin: &str| {
        String::from_utf8(with_stdin(args, stdin.as_bytes()).stdout).unwrap()
    };
    let request = r#"{"headers": {"Webhook-ID": "msg_1"}}"#;
    assert_eq!(line(&["openai", "-"], request), "{\"outcome\":\"key\",\"key\":\"msg_1\"}\n");
    assert_eq!(line(&["openai"], "{}"), "{\"outcome\":\"missing\"}\n");
    assert_eq!(
        line(&["sendgrid"], r#"{"body_utf8": "{}"}"#),
        "{\"outcome\":\"malformed\",\"reason\":\"the body is not a JSON array\"}\n"
    );
    assert_eq!(line(&["box"], r#"{"method": "GET"}"#), "{\"outcome\":\"bypass\"}\n");
}

#[test]
fn key_prints_keys_as_they_are_stored() {
    let long = json!({ "headers": { "webhook-id": "x".repeat(256) } }).to_string();
    let stored = tower_dedup::DedupKey::new("any", &"x".repeat(256)).unwrap();
    let expected = json!({ "outcome": "key", "key": stored.id() });
    assert_eq!(printed(&["standard-webhooks"], long.as_bytes()), expected);
}

#[test]
fn key_reads_binary_bodies_and_repeated_headers() {
    // {"update_id":7}
    let base64 = br#"{"body_base64": "eyJ1cGRhdGVfaWQiOjd9", "headers": null, "url": null}"#;
    assert_eq!(printed(&["telegram"], base64), json!({ "outcome": "key", "key": "7" }));
    let twice = br#"{"headers": {"webhook-id": "a", "Webhook-Id": "a"}}"#;
    assert_eq!(printed(&["svix"], twice)["outcome"], "malformed");
    let absolute = br#"{"method": "GET", "url": "https://example.com:8443/v?CallSid=CA1#rc=2"}"#;
    assert_eq!(printed(&["twilio"], absolute)["key"], "|CA1||||");
}

#[test]
fn key_names_what_it_cannot_read() {
    let unknown = refusal(&["strip"], b"{}");
    assert!(unknown.contains("\"strip\"") && unknown.contains("stripe"), "{unknown}");
    for preset in provider::ALL {
        assert!(unknown.contains(preset.name()), "{unknown}");
    }
    assert!(refusal(&["stripe", "no/such/file"], b"").contains("no/such/file"));
    assert!(refusal(&["stripe"], b"{").contains("stdin"));
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
        let error = refusal(&["stripe"], request.as_bytes());
        assert!(error.starts_with("error: stdin: "), "{request}: {error}");
    }
    assert!(refusal(&[], b"").contains("PROVIDER"));
}

#[test]
fn key_lists_every_preset_with_its_floor() {
    let output = key().arg("--list").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), provider::ALL.len());
    for (line, preset) in lines.iter().zip(provider::ALL) {
        let named = line.strip_prefix(preset.name()).unwrap();
        assert!(named.starts_with([' ', ',']), "{line}");
        assert!(preset.aliases().iter().all(|alias| line.contains(alias)), "{line}");
        assert!(line.ends_with(preset.floor_basis()), "{line}");
    }
    let floor = |name: &str, floor: &str| {
        let line = lines.iter().find(|line| line.starts_with(name)).unwrap();
        assert!(line.contains(&format!(" {floor} ")), "{line}");
    };
    floor("standard-webhooks", "151 h 10 min");
    floor("svix", "55 h 10 min 10 s");
    floor("slack", "12 min");
    floor("stripe", "30 days");
    floor("shopify", "8 h");
}
