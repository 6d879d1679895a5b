//! Hostile bodies.

use bytes::Bytes;
use http::{Request, request};
use tower_dedup::KeyErrorKind;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider;

use crate::cases::outcome;

const TYPES: [&str; 6] = [
    "application/json",
    "application/x-www-form-urlencoded",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
    "text/plain",
    "\u{fe0f}",
];

/// Returns the headers that presets read, so that the outcome depends on the body only.
fn head(content_type: &str) -> request::Parts {
    let mut request = Request::post("/hook?MessageSid=%FF&CallSid=&CallSid=1");
    for name in ["x-amz-sns-rawdelivery", "aeg-event-type", "twitch-eventsub-message-type"] {
        request = request.header(name, "revocation");
    }
    request
        .header("content-type", content_type.as_bytes())
        .header("x-github-event", "ping")
        .body(())
        .unwrap()
        .into_parts()
        .0
}

fn deep(open: &str, close: &str) -> String {
    format!("{}{}", open.repeat(20_000), close.repeat(20_000))
}

/// Returns every body, as it is and as the event of every list that a preset reads.
fn bodies() -> Vec<(&'static str, Vec<u8>)> {
    let long = "x".repeat(1 << 20);
    let field = |value: &str| {
        let names = ["id", "type", "Type", "event_id", "update_id", "MessageID", "RecordType"];
        let fields: Vec<_> = names.iter().map(|name| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    let events = [
        ("deep lists", deep("[", "]")),
        ("deep objects", deep("{\"a\":", "}")),
        ("one megabyte in one field", format!("{{\"id\":\"{long}\"}}")),
        (
            "repeated names",
            r#"{"id":"a","id":"b","event_id":1,"event_id":2,"type":1,"type":2}"#.into(),
        ),
        ("beyond 64 bits", field("18446744073709551616")),
        ("a fraction", field("1e3")),
        ("lists", field("[]")),
        ("objects", field("{}")),
        ("nulls", field("null")),
        ("empty strings", field("\"\"")),
        ("a NUL", field(r#""a\u0000b""#)),
        ("half a surrogate", field(r#""\ud800""#)),
        ("a scalar", "7".into()),
        ("nothing", String::new()),
    ];
    let mut bodies = Vec::new();
    for (what, event) in events {
        // A megabyte is slow without optimisation, so it is tried in fewer places.
        let places = if event.len() > 100_000 { 3 } else { usize::MAX };
        let wrapped = [
            event.clone(),
            format!("[{event}]"),
            format!(r#"{{"entry":[{{"changes":[{{"value":{{"messages":[{event}]}}}}]}}]}}"#),
            format!(r#"{{"notificationItems":[{{"NotificationRequestItem":{event}}}]}}"#),
            format!(r#"{{"notificationItems":{event}}}"#),
            format!(r#"{{"entry":{event}}}"#),
            format!(r#"{{"entry":[{event}]}}"#),
            format!(r#"{{"entry":[{{"changes":[{event}]}}]}}"#),
            format!(r#"{{"message":{event},"subscription":{event}}}"#),
        ];
        for wrapped in wrapped.into_iter().take(places) {
            bodies.push((what, wrapped.into_bytes()));
        }
    }
    for (what, body) in [
        ("not UTF-8", &b"{\"id\":\"\xff\",\"event_id\":\"\xff\"}"[..]),
        ("a list that is not UTF-8", b"[{\"id\":\"\xff\",\"sg_event_id\":\"\xff\"}]"),
        ("a broken escape in a form", b"MessageSid=%zz&CallSid=%"),
        ("not UTF-8 in a form", b"MessageSid=%ff%fe"),
        ("a field twice", b"MessageSid=1&MessageSid=1&CallSid=2&CallSid=2"),
        ("a byte order mark", b"\xef\xbb\xbf{\"id\":\"a\"}"),
        ("two values", b"{\"id\":\"a\"}{\"id\":\"b\"}"),
        ("a list without its end", b"[{\"id\":\"a\"},"),
    ] {
        bodies.push((what, body.to_vec()));
    }
    bodies
}

#[test]
fn hostile_body_never_panics_and_has_a_defined_outcome() {
    for (what, body) in bodies() {
        let body = Bytes::from(body);
        // A megabyte is also tried with fewer content types.
        let types = if body.len() > 100_000 { &TYPES[..1] } else { &TYPES };
        for content_type in types {
            let head = head(content_type);
            for preset in provider::ALL {
                let answer = outcome(*preset, &head, &body);
                for id in answer.keys() {
                    assert!((1..=255).contains(&id.len()), "{preset:?}: {what}");
                    assert!(!id.contains('\0'), "{preset:?}: {what}");
                }
            }
        }
    }
}

fn kind(preset: provider::Preset, body: impl Into<Bytes>) -> Result<Extracted, KeyErrorKind> {
    let (head, body) = (head("application/json"), body.into());
    preset.extractor().extract(&RequestRef::new(&head, &body)).map_err(|error| error.kind())
}

#[test]
fn malformed_body_has_its_reason() {
    for (preset, body, expected) in [
        (provider::STRIPE, r#"{"id":"a","id":"b"}"#, KeyErrorKind::Repeated),
        (provider::STRIPE, r#"{"account":"a","account":"b","id":"c"}"#, KeyErrorKind::Repeated),
        (provider::TELEGRAM, r#"{"update_id":18446744073709551616}"#, KeyErrorKind::NotAnId),
        (provider::TELEGRAM, r#"{"update_id":1e3}"#, KeyErrorKind::NotAnId),
        (provider::SENDGRID, r#"[{"sg_event_id":"a"},{"sg_event_id":[]}]"#, KeyErrorKind::NotAnId),
        (provider::SENDGRID, r#"[{"sg_event_id":""}]"#, KeyErrorKind::Empty),
        (provider::SENDGRID, r#"{"sg_event_id":"a"}"#, KeyErrorKind::NotAnArray),
        (provider::HUBSPOT, r#"[{"portalId":1,"portalId":1}]"#, KeyErrorKind::Repeated),
        (provider::WHATSAPP, r#"{"entry":[],"entry":[]}"#, KeyErrorKind::Repeated),
        (provider::WHATSAPP, r#"{"entry":[{"changes":7}]}"#, KeyErrorKind::NotAnArray),
        (provider::WHATSAPP, r#"{"entry":{}}"#, KeyErrorKind::NotAnArray),
        (provider::ADYEN, "live=false", KeyErrorKind::InvalidJson),
    ] {
        assert_eq!(kind(preset, body), Err(expected), "{preset:?}: {body}");
    }
    // Malformed is reported before missing.
    let body = r#"[{"eventId":1},{"portalId":[]}]"#;
    assert_eq!(kind(provider::HUBSPOT, body), Err(KeyErrorKind::NotAnId));
}

/// The sum of all arrays counts, although no single array is too long.
#[test]
fn updates_of_all_entries_together_are_bounded() {
    let messages = vec![r#"{"id":1}"#; 40_000].join(",");
    let change = format!(r#"{{"changes":[{{"value":{{"messages":[{messages}]}}}}]}}"#);
    let body = format!(r#"{{"entry":[{change},{change}]}}"#);
    assert_eq!(kind(provider::WHATSAPP, body), Err(KeyErrorKind::TooMany));
}
