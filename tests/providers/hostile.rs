//! Hostile bodies.

use bytes::Bytes;
use http::{Request, request};
use tower_dedup::KeyErrorKind;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider;

use crate::cases::{self, Outcome, outcome};

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

/// Returns a list of `count` events for every preset with multi-event deliveries.
fn lists(count: usize) -> Vec<(provider::Preset, &'static str, String)> {
    let list = |event: &str| vec![event; count].join(",");
    vec![
        (provider::SENDGRID, "application/json", format!("[{}]", list("{}"))),
        (provider::SENDGRID, "application/json", format!("[{}]", list("0"))),
        (
            provider::HUBSPOT,
            "application/json",
            format!("[{}]", list(r#"{"portalId":1,"appId":1,"subscriptionId":1,"eventId":1}"#)),
        ),
        (
            provider::CLOUDEVENTS,
            "application/cloudevents-batch+json",
            format!("[{}]", list(r#"{"source":"s","id":"i"}"#)),
        ),
        (
            provider::AZURE_EVENT_GRID,
            "application/json",
            format!("[{}]", list(r#"{"topic":"s","id":"i"}"#)),
        ),
        (
            provider::ADYEN,
            "application/json",
            format!(
                r#"{{"notificationItems":[{}]}}"#,
                list(r#"{"NotificationRequestItem":{"pspReference":1,"eventCode":1,"success":1}}"#)
            ),
        ),
        (provider::WHATSAPP, "application/json", format!(r#"{{"entry":[{}]}}"#, list("{}"))),
        (
            provider::WHATSAPP,
            "application/json",
            format!(r#"{{"entry":[{}]}}"#, list(r#"{"changes":[0]}"#)),
        ),
        (
            provider::WHATSAPP,
            "application/json",
            format!(
                r#"{{"entry":[{{"changes":[{{"value":{{"messages":[{}]}}}}]}}]}}"#,
                list(r#"{"id":"w"}"#)
            ),
        ),
    ]
}

#[test]
fn ten_thousand_items_are_as_many_keys() {
    for (preset, content_type, body) in lists(10_000) {
        let Outcome::Keys { keys } = outcome(preset, &head(content_type), &Bytes::from(body))
        else {
            panic!("{preset:?}: no keys");
        };
        assert_eq!(keys.len(), 10_000, "{preset:?}");
    }
}

#[test]
fn two_hundred_thousand_items_are_too_many() {
    for (preset, content_type, body) in lists(200_000) {
        let (head, body) = (head(content_type), Bytes::from(body));
        let refused = preset.extractor().extract(&RequestRef::new(&head, &body)).unwrap_err();
        assert_eq!(refused.kind(), KeyErrorKind::TooMany, "{preset:?}");
    }
    // The sum of all arrays counts, although no single array is too long.
    let messages = vec![r#"{"id":1}"#; 40_000].join(",");
    let change = format!(r#"{{"changes":[{{"value":{{"messages":[{messages}]}}}}]}}"#);
    let body = format!(r#"{{"entry":[{change},{change}]}}"#);
    assert_eq!(kind(provider::WHATSAPP, body), Err(KeyErrorKind::TooMany));
}

/// Every id contains a copy of a part that all events share. A body of two megabytes would need
/// tens of gigabytes.
#[test]
fn long_part_is_not_copied_for_every_event() {
    let (long, few) = ("x".repeat(1 << 20), 3);
    let entry = |what: &str| format!(r#"{{"entry":[{{"id":"{long}","changes":[{what}]}}]}}"#);
    let of_phone = |count: usize| {
        let messages = vec![r#"{"id":1}"#; count].join(",");
        let metadata = format!(r#""metadata":{{"phone_number_id":"{long}"}}"#);
        format!(
            r#"{{"entry":[{{"changes":[{{"value":{{{metadata},"messages":[{messages}]}}}}]}}]}}"#
        )
    };
    for (body, count) in [
        (of_phone(few), few),
        (of_phone(40_000), 40_000),
        (entry(&vec!["{}"; few].join(",")), few),
        (entry(&vec!["{}"; 40_000].join(",")), 40_000),
    ] {
        match kind(provider::WHATSAPP, body) {
            Ok(Extracted::Keys(keys)) => assert_eq!((keys.events().len(), count), (few, few)),
            refused => assert_eq!((refused, count), (Err(KeyErrorKind::TooMany), 40_000)),
        }
    }
}

#[test]
fn events_carry_their_own_bytes_unless_these_change_on_a_retry() {
    for preset in provider::ALL.iter().filter(|preset| preset.key().is_none()) {
        let mut payloads = 0;
        for case in cases::of(*preset) {
            let (head, body) = case.parts();
            let extracted = preset.extractor().extract(&RequestRef::new(&head, &body));
            let Ok(Extracted::Keys(keys)) = extracted else { continue };
            let within = body.as_ptr_range();
            for event in keys.events() {
                let Some(payload) = event.payload() else {
                    assert!(!keys.is_multi_event() || preset.name() == "hubspot", "{}", case.name);
                    continue;
                };
                payloads += 1;
                let payload = payload.as_ptr_range();
                assert!(within.start <= payload.start && payload.end <= within.end, "a copy");
            }
        }
        assert_eq!(payloads == 0, preset.name() == "hubspot", "{preset:?}");
    }
}
