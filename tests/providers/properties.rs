//! Properties of all presets, on random requests.

use bytes::Bytes;
use http::{HeaderValue, Request};
use proptest::prelude::*;
use tower_dedup::key::{self, Extracted, RequestRef};
use tower_dedup::provider;

use crate::cases::{self, Outcome, outcome};

fn content_type() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("application/json"),
        Just("application/x-www-form-urlencoded; charset=utf-8"),
        Just("application/cloudevents+json"),
        Just("application/cloudevents-batch+json; charset=utf-8"),
    ]
}

/// A name that some preset reads, or that none reads.
fn name() -> impl Strategy<Value = String> {
    const READ: &[&str] = &[
        "id",
        "type",
        "Type",
        "source",
        "topic",
        "event_id",
        "entry",
        "changes",
        "value",
        "messages",
        "statuses",
        "status",
        "sg_event_id",
        "MessageID",
        "RecordType",
        "ID",
        "account",
        "portalId",
        "appId",
        "subscriptionId",
        "eventId",
        "update_id",
        "TopicArn",
        "MessageId",
        "message",
        "messageId",
        "subscription",
        "notificationItems",
        "NotificationRequestItem",
        "event",
        "zen",
    ];
    prop_oneof![9 => prop::sample::select(READ).prop_map(str::to_owned), 1 => "[^\0]{0,3}"]
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        "[a-c|%]{0,4}".prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(6, 48, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::btree_map(name(), inner, 0..6)
                .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
        ]
    })
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => json().prop_map(|tree| tree.to_string().into_bytes()),
        1 => prop::collection::vec(any::<u8>(), 0..200),
        1 => "(MessageSid|CallSid|AccountSid|CallStatus)=[%a-f0-9+&=;]{0,20}"
            .prop_map(String::into_bytes),
    ]
}

/// The parts of some events; no part is empty.
fn events_by_part() -> impl Strategy<Value = Vec<(String, Option<String>)>> {
    let part = "[%|257Ca]{1,5}";
    prop::collection::vec((part, prop::option::of(part)), 1..6)
}

proptest! {
    #[test]
    fn preset_never_panics_and_is_deterministic(
        content_type in content_type(),
        header in prop::option::of("[ -~]{0,20}"),
        body in body(),
        sample in any::<prop::sample::Index>(),
    ) {
        let body = Bytes::from(body);
        for preset in provider::ALL {
            // One request has the head of a sample, so that its headers are present. Another has a
            // random head.
            let cases = cases::of(*preset);
            let (mut head, _) = cases[sample.index(cases.len())].parts();
            head.headers.insert("content-type", HeaderValue::from_static(content_type));
            if let Some(Ok(value)) = header.as_ref().map(|header| HeaderValue::from_str(header)) {
                head.headers.append("webhook-id", value);
            }
            let extractor = preset.extractor();
            let request = RequestRef::new(&head, &body);
            let extracted = extractor.extract(&request);
            prop_assert_eq!(&extracted, &extractor.extract(&request), "{:?}", preset);
            let Ok(Extracted::Keys(keys)) = extracted else { continue };
            prop_assert!(preset.key().is_none() || !keys.is_multi_event(), "{:?}", preset);
            for event in keys.events() {
                let id = event.key().id();
                prop_assert!((1..=255).contains(&id.len()) && !id.contains('\0'));
            }
        }
    }

    #[test]
    fn events_share_a_key_only_if_all_of_their_parts_are_equal(
        events in events_by_part(),
    ) {
        let list: Vec<_> = events
            .iter()
            .map(|(a, b)| serde_json::json!({ "a": a, "b": b }))
            .collect();
        let each =
            key::each("/list", key::json("/a").and(key::json("/b").optional())).namespace("n");
        let body = Bytes::from(serde_json::json!({ "list": list }).to_string());
        let (head, ()) = Request::post("/").body(()).unwrap().into_parts();
        let Ok(Extracted::Keys(keys)) = each.extract(&RequestRef::new(&head, &body)) else {
            panic!("no keys");
        };
        let keys = keys.events();
        prop_assert_eq!(keys.len(), events.len());
        for (one, of_one) in events.iter().zip(keys) {
            for (other, of_other) in events.iter().zip(keys) {
                prop_assert_eq!(one == other, of_one.key() == of_other.key());
            }
            // Each event alone has the same key as in the list.
            let alone = serde_json::json!({ "list": [{ "a": one.0, "b": one.1 }] }).to_string();
            let alone = Bytes::from(alone);
            let Ok(Extracted::Keys(alone)) = each.extract(&RequestRef::new(&head, &alone)) else {
                panic!("no key");
            };
            prop_assert_eq!(alone.first(), of_one.key());
        }
    }

    #[test]
    fn cloudevents_event_has_one_key_in_every_mode(
        source in "\\PC{1,12}",
        id in "\\PC{1,12}",
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
