//! The first four presets in depth, and how presets are composed further. `tests/providers` holds
//! all of them to their samples.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::Full;
use serde::Deserialize;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::key::{self, Event, Extracted, KeyExtractor, RequestRef};
use tower_dedup::provider::{self, Preset};
use tower_dedup::{DedupKey, DedupLayer, Delivery, KeyErrorKind, OnMissingKey};

const STANDARD_WEBHOOKS: &str = include_str!("../payloads/standard_webhooks/vectors.json");
const STRIPE: &str = include_str!("../payloads/stripe/cases.json");
const STRIPE_EVENT: &str = include_str!("../payloads/stripe/event.fixture.json");
const TWILIO: &str = include_str!("../payloads/twilio/cases.json");
const GITHUB_SIGNATURES: &str = include_str!("../payloads/github/signature_vectors.json");
const GITHUB: &[&str] = &[
    include_str!("../payloads/github/installation.created.payload.json"),
    include_str!("../payloads/github/issues.opened.payload.json"),
    include_str!("../payloads/github/ping.payload.json"),
    include_str!("../payloads/github/pull_request.opened.payload.json"),
    include_str!("../payloads/github/push.payload.json"),
];

/// Constructed: GitHub's samples are bodies only.
const GUID: &str = "72d3162e-cc78-11e3-81ab-4c9367dc0958";

#[derive(Deserialize)]
struct Case {
    #[serde(default)]
    name: String,
    #[serde(default = "post")]
    method: String,
    #[serde(default = "hook")]
    url: String,
    headers: BTreeMap<String, String>,
    body_utf8: String,
    #[serde(default)]
    expected_key: Option<Expected>,
    valid: bool,
}

/// An id, or the `Field=value` pairs that make one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    Id(String),
    Fields(Vec<String>),
}

fn post() -> String {
    "POST".to_owned()
}

fn hook() -> String {
    "https://example.com/hook".to_owned()
}

impl Case {
    /// The request as a server sees it: the target in origin form.
    fn request(&self) -> Request<Full<Bytes>> {
        let url: Uri = self.url.parse().unwrap();
        let target = url.path_and_query().unwrap().as_str();
        let mut request = Request::builder().method(self.method.as_str()).uri(target);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(Full::new(Bytes::from(self.body_utf8.clone()))).unwrap()
    }

    fn extract(&self, preset: Preset) -> Extracted {
        let (head, _) = self.request().into_parts();
        let body = Bytes::from(self.body_utf8.clone());
        KeyExtractor::from(preset).extract(&RequestRef::new(&head, &body)).unwrap()
    }
}

fn cases(json: &str) -> Vec<Case> {
    serde_json::from_str(json).unwrap()
}

fn case(json: &str, name: &str) -> Case {
    cases(json).into_iter().find(|case| case.name == name).unwrap()
}

/// The one event of a delivery that has one.
fn event(extracted: Extracted) -> Event {
    match extracted {
        Extracted::Keys(keys) => match keys.events() {
            [event] => event.clone(),
            other => panic!("not one event: {other:?}"),
        },
        other => panic!("no key: {other:?}"),
    }
}

fn key_of(preset: Preset, name: &str, json: &str) -> DedupKey {
    event(case(json, name).extract(preset)).key().clone()
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

/// The keys of all handler runs while every case is delivered twice through a layer.
async fn runs(preset: Preset, cases: &[Case]) -> Vec<DedupKey> {
    let runs = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let runs = Arc::clone(&runs);
        service_fn(move |request: Request<Full<Bytes>>| {
            let delivery = request.extensions().get::<Delivery>();
            runs.lock().unwrap().extend(delivery.and_then(Delivery::key).cloned());
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
        })
    };
    let service = ServiceBuilder::new()
        .layer(
            DedupLayer::new(preset, MemoryAdapter::new()).on_missing_key(OnMissingKey::PassThrough),
        )
        .service(handler);
    for case in cases.iter().chain(cases) {
        let response = service.clone().oneshot(case.request()).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{}", case.name);
    }
    drop(service);
    Arc::into_inner(runs).unwrap().into_inner().unwrap()
}

// Standard Webhooks

#[test]
fn standard_webhooks_samples_give_the_keys_they_expect() {
    for case in cases(STANDARD_WEBHOOKS) {
        let extracted = case.extract(provider::STANDARD_WEBHOOKS);
        match &case.expected_key {
            Some(Expected::Id(id)) => {
                assert_key(&event(extracted), "standard-webhooks", id, &case.name);
            }
            // The one case without an id.
            None => assert_eq!(extracted, Extracted::Missing, "{}", case.name),
            Some(Expected::Fields(_)) => panic!("{}: not an id", case.name),
        }
    }
}

#[test]
fn standard_webhooks_keys_do_not_depend_on_time_or_signature() {
    let published = key_of(provider::STANDARD_WEBHOOKS, "official-sign-vector", STANDARD_WEBHOOKS);
    assert_eq!(published.id(), "msg_p5jXN8AQM9LWM0D4loKWxJek");
    // Among these are forged ones: whether a signature holds is not the key's business but that of
    // the layer outside.
    for name in [
        "retry-new-timestamp-same-id",
        "rotation-two-signatures",
        "v1a-then-v1",
        "too-old",
        "bad-signature",
        "missing-signature",
        "missing-timestamp",
    ] {
        let key = key_of(provider::STANDARD_WEBHOOKS, name, STANDARD_WEBHOOKS);
        assert_eq!(key, published, "{name}");
    }
    let other = key_of(provider::STANDARD_WEBHOOKS, "id-tampered", STANDARD_WEBHOOKS);
    assert_eq!(other.id(), "msg_other");
}

#[tokio::test]
async fn standard_webhooks_samples_run_once_an_event() {
    let valid: Vec<_> = cases(STANDARD_WEBHOOKS).into_iter().filter(|case| case.valid).collect();
    let ran = runs(provider::STANDARD_WEBHOOKS, &valid).await;
    let ids: Vec<_> = ran.iter().map(DedupKey::id).collect();
    assert_eq!(ids, ["msg_p5jXN8AQM9LWM0D4loKWxJek"]);
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
    // A redelivery has the same guid, another event has another.
    let other = "72d3162e-cc78-11e3-81ab-4c9367dc0959";
    assert_key(&event(github(other, GITHUB[0])), "github", other, "another guid");
    // Configured as a form, and none at all.
    assert_key(&event(github(GUID, "payload=%7B%7D")), "github", GUID, "form");
    assert_key(&event(github(GUID, "")), "github", GUID, "empty");
}

#[test]
fn github_keys_do_not_depend_on_the_signature() {
    for mut case in cases(GITHUB_SIGNATURES) {
        assert_eq!(case.extract(provider::GITHUB), Extracted::Missing, "no guid in the vectors");
        case.headers.insert("X-GitHub-Delivery".to_owned(), GUID.to_owned());
        let forged = if case.valid { "" } else { " (forged)" };
        let what = format!("{}{forged}", case.body_utf8);
        assert_key(&event(case.extract(provider::GITHUB)), "github", GUID, &what);
    }
}

#[test]
fn github_hook_id_can_be_added_where_several_hooks_post_to_one_route() {
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
fn stripe_samples_give_the_keys_they_expect() {
    for case in cases(STRIPE) {
        let Some(Expected::Id(id)) = &case.expected_key else { panic!("{}: no id", case.name) };
        assert_key(&event(case.extract(provider::STRIPE)), "stripe", id, &case.name);
    }
    let request = Request::post("/hook").body(STRIPE_EVENT).unwrap();
    let fixture = event(extract(&provider::STRIPE.into(), request));
    assert_key(&fixture, "stripe", "evt_1Pgc76B7WZ01zgkWwyRHS12y", "fixture");
}

#[test]
fn stripe_retries_give_one_key_and_events_their_own() {
    let first = key_of(provider::STRIPE, "invoice.paid", STRIPE);
    assert_eq!(first.id(), "evt_1NG8Du2eZvKYlo2CUI79vXWy");
    // A retry is signed anew, and a forged request ("bad") is the verifying layer's business.
    for name in ["invoice.paid-retry", "two-v1", "stale", "bad"] {
        assert_eq!(key_of(provider::STRIPE, name, STRIPE), first, "{name}");
    }
    let charge = key_of(provider::STRIPE, "charge.succeeded", STRIPE);
    assert_eq!(charge.id(), "evt_3NG8Du2eZvKYlo2C1aBcDeFg");
}

#[test]
fn stripe_thin_events_have_their_id_in_the_same_place() {
    let thin = key_of(provider::STRIPE, "thin-v2", STRIPE);
    assert_eq!(thin.id(), "evt_test_65R9Ijk8dKEYZcXeRWn16R9A7j1FSQ3w3TGDPLLGSM4CW0");
}

#[test]
fn stripe_twin_events_share_the_second_identity_where_it_is_asked_for() {
    let extractor = KeyExtractor::from(provider::STRIPE)
        .second_identity("object", key::json("/data/object/id").and(key::json("/type")));
    let of = |body: &str| event(extract(&extractor, Request::post("/").body(body).unwrap()));
    let first = of(STRIPE_EVENT);
    let second = first.second_identity().unwrap();
    assert_eq!(
        (second.namespace(), second.id()),
        ("stripe.object", "price_1PgafmB7WZ01zgkW6dKueIc5|plan.created")
    );
    // Constructed: the same change under another event id.
    let twin = of(&STRIPE_EVENT.replace("evt_1Pgc76B7WZ01zgkWwyRHS12y", "evt_twin"));
    assert_ne!(twin.key(), first.key());
    assert_eq!(twin.second_identity(), first.second_identity());
    // A thin event has no data, and so no second identity.
    assert_eq!(of(&case(STRIPE, "thin-v2").body_utf8).second_identity(), None);
}

#[tokio::test]
async fn stripe_samples_run_once_an_event() {
    let valid: Vec<_> = cases(STRIPE).into_iter().filter(|case| case.valid).collect();
    let ran = runs(provider::STRIPE, &valid).await;
    let ids: Vec<_> = ran.iter().map(DedupKey::id).collect();
    assert_eq!(
        ids,
        [
            "evt_1NG8Du2eZvKYlo2CUI79vXWy",
            "evt_3NG8Du2eZvKYlo2C1aBcDeFg",
            "evt_test_65R9Ijk8dKEYZcXeRWn16R9A7j1FSQ3w3TGDPLLGSM4CW0",
        ]
    );
}

#[test]
fn a_stripe_event_without_an_id_is_missing_and_a_body_that_is_no_json_is_malformed() {
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

/// Every sample with its key; `None` where the request carries neither a message nor a call.
const TWILIO_KEYS: &[(&str, Option<&str>)] = &[
    ("helper-lib-voice", Some("|CA1234567890ABCDE||||")),
    ("helper-lib-array-param", None),
    ("helper-lib-duplicate-values", None),
    // The sample expects no key because its signature is wrong. That is for the layer outside to
    // find out: the key is the same as that of `helper-lib-voice`, whose bytes it has.
    ("helper-lib-wrong-signature", Some("|CA1234567890ABCDE||||")),
    (
        "sms-status-queued",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000001|queued"),
    ),
    (
        "sms-status-sent",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000001|sent"),
    ),
    (
        "sms-status-delivered",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000001|delivered"),
    ),
    (
        "sms-status-delivered-retry",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000001|delivered"),
    ),
    (
        "sms-inbound",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000002|received"),
    ),
    (
        "sms-inbound-get",
        Some("AC00000000000000000000000000000001|SM00000000000000000000000000000003|"),
    ),
    ("helper-lib-json-bodySHA256", None),
];

#[test]
fn twilio_samples_give_the_keys_they_expect() {
    let cases = cases(TWILIO);
    let names: Vec<_> = cases.iter().map(|case| case.name.as_str()).collect();
    let pinned: Vec<_> = TWILIO_KEYS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, pinned);
    for (case, (name, pinned)) in cases.iter().zip(TWILIO_KEYS) {
        let extracted = case.extract(provider::TWILIO);
        let Some(id) = pinned else {
            assert_eq!(extracted, Extracted::Missing, "{name}");
            assert!(case.expected_key.is_none(), "{name}");
            continue;
        };
        assert_key(&event(extracted), "twilio", id, name);
        match &case.expected_key {
            Some(Expected::Fields(fields)) => {
                for field in fields {
                    let (_, value) = field.split_once('=').unwrap();
                    assert!(id.split('|').any(|part| part == value), "{name}: no {field} in {id}");
                }
            }
            None => assert!(!case.valid, "{name}: only a forged request has a key unasked"),
            Some(Expected::Id(_)) => panic!("{name}: an id"),
        }
    }
}

#[test]
fn twilio_statuses_of_one_message_are_different_events() {
    let keys: BTreeSet<_> = ["sms-status-queued", "sms-status-sent", "sms-status-delivered"]
        .map(|name| key_of(provider::TWILIO, name, TWILIO))
        .into();
    assert_eq!(keys.len(), 3);
}

#[test]
fn a_twilio_retry_with_an_idempotency_token_gives_the_key_of_the_first_try() {
    let retry = case(TWILIO, "sms-status-delivered-retry");
    assert!(retry.headers.contains_key("I-Twilio-Idempotency-Token"));
    assert_eq!(
        event(retry.extract(provider::TWILIO)).key(),
        &key_of(provider::TWILIO, "sms-status-delivered", TWILIO)
    );
}

/// Constructed: the same parameters, sent either way.
fn twilio(parameters: &str) -> [Extracted; 2] {
    let form = Request::post("/voice")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(parameters)
        .unwrap();
    let query = Request::get(format!("/voice?{parameters}")).body("").unwrap();
    [form, query].map(|request| extract(&provider::TWILIO.into(), request))
}

#[test]
fn twilio_calls_are_known_by_call_and_status() {
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
        // A field that could be taken for the end of one part and the start of the next.
        ("AccountSid=AC1&CallSid=CA1%7Cringing", "AC1|CA1%7Cringing||||"),
    ] {
        for extracted in twilio(parameters) {
            assert_key(&event(extracted), "twilio", id, parameters);
        }
    }
}

#[test]
fn twilio_message_status_wins_over_its_older_name() {
    for (parameters, id) in [
        ("AccountSid=AC1&MessageSid=SM1&MessageStatus=sent&SmsStatus=queued", "AC1|SM1|sent"),
        ("AccountSid=AC1&MessageSid=SM1&SmsStatus=received", "AC1|SM1|received"),
        ("MessageSid=SM1", "|SM1|"),
        // A message wins over a call, should both be there.
        ("AccountSid=AC1&CallSid=CA1&MessageSid=SM1", "AC1|SM1|"),
    ] {
        for extracted in twilio(parameters) {
            assert_key(&event(extracted), "twilio", id, parameters);
        }
    }
}

#[tokio::test]
async fn twilio_samples_run_once_an_event() {
    let valid: Vec<_> = cases(TWILIO).into_iter().filter(|case| case.valid).collect();
    let ran: Vec<_> = runs(provider::TWILIO, &valid).await;
    let ids: Vec<_> = ran.iter().map(DedupKey::id).collect();
    let mut expected: Vec<_> = TWILIO_KEYS.iter().filter_map(|(_, id)| *id).collect();
    let mut seen = BTreeSet::new();
    expected.retain(|id| seen.insert(*id));
    assert_eq!(ids, expected);
}
