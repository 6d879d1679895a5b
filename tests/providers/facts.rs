//! The facts of a preset beside its key.

use std::collections::BTreeSet;
use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::key::{self, Event, Extracted, RequestRef};
use tower_dedup::provider;
use tower_dedup::{DedupKey, DedupLayer};

use crate::cases::Outcome::Bypass;
use crate::cases::{self, Case, outcome};
use crate::page::fact;

#[test]
fn names_and_aliases_are_found_and_unique() {
    let mut names = BTreeSet::new();
    for preset in provider::ALL {
        for name in [&[preset.name()], preset.aliases()].concat() {
            let plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(name.chars().all(plain), "{name}");
            assert!(names.insert(name), "{name} is two presets");
            assert_eq!(provider::find(name).unwrap().name(), preset.name());
        }
    }
    for alias in
        "openai replicate supabase clerk resend forgejo meta meta-whatsapp instagram".split(' ')
    {
        assert!(names.contains(alias), "{alias}");
    }
    assert_eq!(provider::find("Standard_Webhooks").unwrap().name(), "standard-webhooks");
    for unknown in ["", "git", "stripes", "-"] {
        assert!(provider::find(unknown).is_none(), "{unknown:?}");
    }
}

/// An empty list is bypassed as well, but is no handshake.
#[test]
fn handshakes_of_presets_are_documented() {
    for preset in provider::ALL {
        let lets_past = |case: &Case| {
            let (head, body) = case.parts();
            preset.methods().contains(&head.method) && outcome(*preset, &head, &body) == Bypass
        };
        let is_empty_list = |case: &Case| case.name.contains("empty");
        let cases = cases::of(*preset);
        let is_head = |case: &Case| case.method == "HEAD" && case.expect == Bypass;
        let met = cases.iter().any(|c| is_head(c) || lets_past(c) && !is_empty_list(c));
        // The layer does not deduplicate Meta's GET and the OPTIONS of CloudEvents.
        let has_echo = preset.echo(None).is_ok() || preset.echo(Some("secret")).is_ok();
        let labels = ["Handshake", "Handshake, answered by the layer"];
        let documented = labels.iter().any(|label| fact(*preset, label).is_some());
        assert_eq!(met || has_echo, documented, "{preset:?}");
    }
}

/// Mail carries its attachments in base64.
#[tokio::test]
async fn inbound_mail_of_postmark_with_attachments_reaches_the_handler() {
    let layer = DedupLayer::new(provider::POSTMARK, MemoryAdapter::new());
    let service = ServiceBuilder::new().layer(layer).service(service_fn(async |_| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    for (mib, status) in [(48, 200), (65, 413)] {
        let attachment = "A".repeat(mib << 20);
        let body =
            format!(r#"{{"MessageID":"{mib}","Attachments":[{{"Content":"{attachment}"}}]}}"#);
        let request: Request<Full<Bytes>> = Request::post("/").body(body.into()).unwrap();
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), status, "{mib} MiB");
    }
}

#[test]
fn presets_of_one_event_can_be_composed_and_those_of_several_cannot() {
    let multi_event: Vec<_> =
        provider::ALL.iter().filter(|preset| preset.key().is_none()).collect();
    let names: Vec<_> = multi_event.iter().map(|preset| preset.name()).collect();
    let listed = "cloudevents adyen whatsapp sendgrid azure-event-grid hubspot microsoft-graph \
        messenger line quickbooks xero gocardless";
    assert_eq!(names, listed.split(' ').collect::<Vec<_>>());
    let hook = key::header("x-github-hook-id");
    let composed = provider::GITHUB.key().unwrap().and(hook).namespace("github-hooks");
    let request = Request::post("/").header("x-github-delivery", "guid");
    let (head, ()) = request.header("x-github-hook-id", "7").body(()).unwrap().into_parts();
    let found = composed.extract(&RequestRef::new(&head, &Bytes::new()));
    let expected = DedupKey::new("github-hooks", "guid|7").unwrap();
    assert_eq!(found, Ok(Extracted::Keys(Event::new(expected).into())));
}
