//! The three modes of `CloudEvents`, on random events.

use bytes::Bytes;
use http::Request;
use proptest::prelude::*;
use tower_dedup::provider;

use crate::cases::{Outcome, outcome};

proptest! {
    #[test]
    fn cloudevents_event_has_one_key_in_every_mode(
        source in r"\PC{0,11}[!-~]",
        id in r"\PC{0,11}[!-~]",
    ) {
        // The HTTP binding encodes all but printable ASCII, and space, quote and percent.
        let encoded = |text: &str| -> String {
            let plain = |byte: &u8| byte.is_ascii_graphic() && !b"\"%".contains(byte);
            text.bytes()
                .map(|byte| match plain(&byte) {
                    true => char::from(byte).to_string(),
                    false => format!("%{byte:02X}"),
                })
                .collect()
        };
        let event = serde_json::json!({ "source": source, "id": id });
        let answer = |content_type: &str, body: String| {
            let (head, ()) = Request::post("/")
                .header("content-type", content_type)
                .header("ce-source", encoded(&source))
                .header("ce-id", encoded(&id))
                .body(())
                .unwrap()
                .into_parts();
            outcome(provider::CLOUDEVENTS, &head, &Bytes::from(body))
        };
        let structured = answer("application/cloudevents+json", event.to_string());
        let Outcome::Key { key } = structured.clone() else { panic!("{structured:?}") };
        prop_assert_eq!(&answer("text/plain", "x".into()), &structured);
        let batch = answer("application/cloudevents-batch+json", format!("[{event}]"));
        prop_assert_eq!(batch, Outcome::Keys { keys: vec![key] });
    }
}

/// The content type is not signed: with ids in headers, the events of a handled batch could run again.
#[test]
fn batch_of_events_is_malformed_in_binary_mode_and_other_lists_are_data() {
    let event = r#"{"source":"s","id":"1"}"#;
    let key = || Outcome::Key { key: "/shop|A9".to_owned() };
    for (body, expected) in [
        (format!("[{event}]"), Outcome::Malformed),
        (format!(" \t[{{}},\n{event}]"), Outcome::Malformed),
        (format!("\u{feff}[{event}]"), Outcome::Malformed),
        (r#"[1, {"id": "A1"}, {"source": "s", "id": null}]"#.to_owned(), key()),
        ("[]".to_owned(), key()),
        ("[".to_owned(), key()),
        (event.to_owned(), key()),
    ] {
        let request = Request::post("/").header("content-type", "application/json");
        let request = request.header("ce-source", "/shop").header("ce-id", "A9");
        let (head, ()) = request.body(()).unwrap().into_parts();
        let found = outcome(provider::CLOUDEVENTS, &head, &Bytes::from(body.clone()));
        assert_eq!(found, expected, "{body}");
    }
}

/// The first is the example of the HTTP protocol binding, section 3.1.3.2.
#[test]
fn attribute_is_unquoted_and_then_decoded_once() {
    let key = |id: &str| Outcome::Key { key: format!("/shop|{id}") };
    for (sent, expected) in [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", key("Euro € 😀")),
        ("%2541", key("%2541")),
        ("a+b", key("a+b")),
        (r#""a \"b\" \\ c""#, key(r#"a "b" \ c"#)),
        (r#"a"b"#, key(r#"a"b"#)),
        ("\"", key("\"")),
        ("\"\"", Outcome::Malformed),
        ("%", Outcome::Malformed),
        ("%2", Outcome::Malformed),
        ("%zz", Outcome::Malformed),
        ("%%", Outcome::Malformed),
        ("%+1", Outcome::Malformed),
        ("a%C", Outcome::Malformed),
        ("%ff", Outcome::Malformed),
    ] {
        let request = Request::post("/").header("ce-source", "/shop").header("ce-id", sent);
        let (head, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(outcome(provider::CLOUDEVENTS, &head, &Bytes::new()), expected, "{sent}");
    }
}
