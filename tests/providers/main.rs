//! Every preset on samples of its sender.
//!
//! 1. The key of each sample is pinned. The key of a preset is frozen with its first release, because
//!    stored events would run again under another key.
//! 2. Samples come from the senders and their libraries if there are any. Others are constructed from
//!    the sender's documentation; `tests/payloads/INDEX.md` lists them.
//! 3. Every preset has an event, a retry of it with the values that change on a retry, and another
//!    event. All samples are also delivered to a real layer.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

mod cases;
mod cloudevents;
mod facts;
mod hostile;
mod page;
mod twilio;
mod types;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use cases::{Case, Outcome, outcome};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::provider::{self, Preset};
use tower_dedup::{DedupLayer, Delivery};

#[tokio::test]
async fn every_preset_holds() {
    for preset in provider::ALL {
        println!("{}", preset.name());
        hold(*preset).await;
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/payloads/constructed");
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap();
        assert_eq!(provider::find(name).unwrap().name(), name, "an unknown preset");
    }
}

async fn hold(preset: Preset) {
    let cases = cases::of(preset);
    for case in &cases {
        let (head, body) = case.parts();
        assert_eq!(outcome(preset, &head, &body), case.expect, "{}: {}", case.name, case.why);
    }
    assert_samples_suffice(&cases);
    assert_layer_runs_each_event_once(preset, &cases).await;
}

/// The samples have an event, its retry with other values, and another event.
fn assert_samples_suffice(cases: &[Case]) {
    let events: Vec<_> = cases.iter().filter(|case| !case.expect.keys().is_empty()).collect();
    let differs = |one: &Case, other: &Case| {
        one.headers != other.headers || one.body_utf8 != other.body_utf8 || one.url != other.url
    };
    let shares = |one: &Case, other: &Case| {
        let keys = other.expect.keys();
        one.expect.keys().iter().any(|key| keys.contains(key))
    };
    let pairs = || events.iter().flat_map(|one| events.iter().map(move |other| (*one, *other)));
    assert!(pairs().any(|(one, other)| shares(one, other) && differs(one, other)), "no retry");
    assert!(pairs().any(|(one, other)| !shares(one, other)), "no other event");
}

/// Delivers all samples twice.
async fn assert_layer_runs_each_event_once(preset: Preset, cases: &[Case]) {
    // The new keys of each run of the handler; none if it ran without a delivery.
    let runs = Arc::new(Mutex::new(Vec::<Vec<String>>::new()));
    let handler = {
        let runs = Arc::clone(&runs);
        service_fn(move |request: Request<Full<Bytes>>| {
            let new =
                |delivery: &Delivery| delivery.keys().map(|key| key.id().to_owned()).collect();
            runs.lock().unwrap().push(request.extensions().get().map_or_else(Vec::new, new));
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) }
        })
    };
    let service =
        ServiceBuilder::new().layer(DedupLayer::new(preset, MemoryAdapter::new())).service(handler);
    let mut seen = BTreeSet::new();
    for case in cases.iter().chain(cases) {
        let (head, body) = case.parts();
        let request = Request::from_parts(head, Full::new(body));
        let response = service.clone().oneshot(request).await.unwrap();
        let mut fresh: Vec<String> = Vec::new();
        for key in case.expect.keys() {
            if seen.insert(key.clone()) {
                fresh.push(key.clone());
            }
        }
        let (status, expected) = match &case.expect {
            Outcome::Missing | Outcome::Malformed => (StatusCode::BAD_REQUEST, vec![]),
            Outcome::Bypass if page::fact(preset, "Handshake, answered by the layer").is_some() => {
                (StatusCode::OK, vec![])
            }
            Outcome::Bypass => (StatusCode::OK, vec![vec![]]),
            _ if fresh.is_empty() => (StatusCode::OK, vec![]),
            _ => (StatusCode::OK, vec![fresh]),
        };
        assert_eq!(response.status(), status, "{}", case.name);
        assert_eq!(std::mem::take(&mut *runs.lock().unwrap()), expected, "{}", case.name);
    }
}
