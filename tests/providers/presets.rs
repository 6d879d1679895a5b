//! Some presets on constructed requests, and how presets are composed further. The other modules run all
//! presets on their samples.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use bytes::Bytes;
use http::Request;
use tower_dedup::KeyErrorKind;
use tower_dedup::key::{self, Event, Extracted, KeyExtractor, RequestRef};
use tower_dedup::provider;

const STRIPE_EVENT: &str = include_str!("../payloads/stripe/event.fixture.json");
const GITHUB: &[&str] = &[
    include_str!("../payloads/github/installation.created.payload.json"),
    include_str!("../payloads/github/ping.payload.json"),
    include_str!("../payloads/github/pull_request.opened.payload.json"),
    // A form, and an empty body.
    "payload=%7B%7D",
    "",
];

/// Constructed, because GitHub's samples are bodies only.
const GUID: &str = "72d3162e-cc78-11e3-81ab-4c9367dc0958";

/// Returns the event of a delivery of one event.
fn event(extracted: Extracted) -> Event {
    match extracted {
        Extracted::Keys(keys) => match keys.events() {
            [event] => event.clone(),
            other => panic!("not one event: {other:?}"),
        },
        other => panic!("no key: {other:?}"),
    }
}

fn extract(extractor: &KeyExtractor, request: Request<&str>) -> Extracted {
    let (head, body) = request.into_parts();
    let body = Bytes::copy_from_slice(body.as_bytes());
    extractor.extract(&RequestRef::new(&head, &body)).unwrap()
}

fn assert_key(event: &Event, namespace: &str, id: &str, case: &str) {
    assert_eq!((event.key().namespace(), event.key().id()), (namespace, id), "{case}");
    assert_eq!(event.second_identity(), None, "{case}");
}

// GitHub

fn github(guid: &str, body: &'static str) -> Extracted {
    let request = Request::post("/hook").header("X-GitHub-Delivery", guid).body(body).unwrap();
    extract(&provider::GITHUB.into(), request)
}

#[test]
fn github_keys_are_the_delivery_guid_whatever_the_body() {
    for body in GITHUB {
        assert_key(&event(github(GUID, body)), "github", GUID, body);
    }
}

#[test]
fn github_key_can_be_composed_with_the_hook_id() {
    let extractor = provider::GITHUB
        .key()
        .unwrap()
        .and(key::header("x-github-hook-id"))
        .namespace("github-hooks");
    let of_hook = |hook: &str| {
        let request = Request::post("/hook")
            .header("X-GitHub-Delivery", GUID)
            .header("X-GitHub-Hook-ID", hook)
            .body(GITHUB[0])
            .unwrap();
        event(extract(&extractor, request))
    };
    assert_key(&of_hook("292430182"), "github-hooks", &format!("{GUID}|292430182"), "composed");
    assert_ne!(of_hook("292430182").key(), of_hook("292430183").key());
}

// Stripe

#[test]
fn stripe_twin_events_share_an_added_second_identity() {
    let extractor = KeyExtractor::from(provider::STRIPE)
        .second_identity("object", key::json("/data/object/id").and(key::json("/type")));
    let of = |body: &str| event(extract(&extractor, Request::post("/").body(body).unwrap()));
    let first = of(STRIPE_EVENT);
    assert_eq!(first.key().id(), "evt_1Pgc76B7WZ01zgkWwyRHS12y");
    let second = first.second_identity().unwrap();
    assert_eq!(
        (second.namespace(), second.id()),
        ("stripe.object", "price_1PgafmB7WZ01zgkW6dKueIc5|plan.created")
    );
    // Constructed: the same change under another event id.
    let twin = of(&STRIPE_EVENT.replace("evt_1Pgc76B7WZ01zgkWwyRHS12y", "evt_twin"));
    assert_ne!(twin.key(), first.key());
    assert_eq!(twin.second_identity(), first.second_identity());
    // A thin event has no data and so no second identity.
    assert_eq!(of(r#"{"id":"evt_2","object":"v2.core.event"}"#).second_identity(), None);
}

#[test]
fn stripe_key_is_missing_without_an_id_and_malformed_without_json() {
    let extractor = KeyExtractor::from(provider::STRIPE);
    let request = Request::post("/").body(r#"{"object":"event"}"#).unwrap();
    assert_eq!(extract(&extractor, request), Extracted::Missing);
    let (head, ()) = Request::post("/").body(()).unwrap().into_parts();
    let body = Bytes::from_static(b"id=evt_1");
    let error = extractor.extract(&RequestRef::new(&head, &body)).unwrap_err();
    assert_eq!(error.kind(), KeyErrorKind::InvalidJson);
}

// Twilio

const ACCOUNT: &str = "AC00000000000000000000000000000001";

/// Constructed: the same parameters, by POST and by GET.
fn twilio(parameters: &str) -> [Extracted; 2] {
    let form = Request::post("/voice")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(parameters)
        .unwrap();
    let query = Request::get(format!("/voice?{parameters}")).body("").unwrap();
    [form, query].map(|request| extract(&provider::TWILIO.into(), request))
}

#[test]
fn twilio_keys_of_calls_contain_the_status() {
    for (parameters, id) in [
        ("CallSid=CA1", "|CA1||||"),
        (&format!("AccountSid={ACCOUNT}&CallSid=CA1")[..], &format!("{ACCOUNT}|CA1||||")[..]),
        ("AccountSid=AC1&CallSid=CA1&CallStatus=ringing", "AC1|CA1|ringing|||"),
        (
            "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=2",
            "AC1|CA1|in-progress|2||",
        ),
        (
            "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&RecordingStatus=completed",
            "AC1|CA1|||RE1|completed",
        ),
        // A value with the separator in it.
        ("AccountSid=AC1&CallSid=CA1%7Cringing", "AC1|CA1%7Cringing||||"),
    ] {
        for extracted in twilio(parameters) {
            assert_key(&event(extracted), "twilio", id, parameters);
        }
    }
}

#[test]
fn twilio_message_status_precedes_sms_status() {
    for (parameters, id) in [
        ("AccountSid=AC1&MessageSid=SM1&MessageStatus=sent&SmsStatus=queued", "AC1|SM1|sent"),
        ("AccountSid=AC1&MessageSid=SM1&SmsStatus=received", "AC1|SM1|received"),
        ("MessageSid=SM1", "|SM1|"),
        // A message precedes a call if both are present.
        ("AccountSid=AC1&CallSid=CA1&MessageSid=SM1", "AC1|SM1|"),
    ] {
        for extracted in twilio(parameters) {
            assert_key(&event(extracted), "twilio", id, parameters);
        }
    }
}
