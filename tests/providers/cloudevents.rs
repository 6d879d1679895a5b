//! The headers of `CloudEvents`: attributes, and lists that are no batch.

use bytes::Bytes;
use http::Request;
use tower_dedup::provider;

use crate::cases::{Outcome, outcome};

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

/// The first is the example of the HTTP protocol binding, section 3.1.3.2. What it does not encode is left as it is,
/// because some SDKs encode nothing.
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
        ("%22%25%7f%c2%A0", key("\"%25\u{7f}\u{a0}")),
        ("100%", key("100%25")),
        ("100%25", key("100%25")),
        ("/files/a/b", key("/files/a/b")),
        ("/files/a%2Fb", key("/files/a%252Fb")),
        ("/files/a%252Fb", key("/files/a%252Fb")),
        ("%41%7E%2", key("%2541%257E%252")),
        ("%zz%%%+1%", key("%25zz%25%25%25+1%25")),
        ("%%20%", key("%25 %25")),
        ("a%C", key("a%25C")),
        ("a%\u{e9}", key("a%25\u{e9}")),
        // Encoded bytes that are not UTF-8 are refused, as the binding says.
        ("%ff", Outcome::Malformed),
        ("a%C3", Outcome::Malformed),
        ("%00", Outcome::Malformed),
        ("%20", Outcome::Malformed),
    ] {
        let request = Request::post("/").header("ce-source", "/shop").header("ce-id", sent);
        let (head, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(outcome(provider::CLOUDEVENTS, &head, &Bytes::new()), expected, "{sent}");
    }
}
