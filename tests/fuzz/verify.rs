//! Signatures: nothing is verified that the sender did not sign.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderName, HeaderValue, Request};
use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::Verifier;

use crate::fuzz::fuzz;
use crate::input::Input;
use crate::secrets::test_secrets;

const URL: &str = "https://example.com";
/// The headers that the schemes read.
const NAMES: [&str; 28] = [
    "x-signature-ed25519",
    "x-signature-timestamp",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "svix-id",
    "svix-timestamp",
    "svix-signature",
    "x-hub-signature-256",
    "x-gitlab-token",
    "x-gitea-signature",
    "circleci-signature",
    "stripe-signature",
    "x-shopify-hmac-sha256",
    "x-square-hmacsha256-signature",
    "paddle-signature",
    "x-slack-signature",
    "x-slack-request-timestamp",
    "x-twilio-signature",
    "x-telegram-bot-api-secret-token",
    "twitch-eventsub-message-timestamp",
    "twitch-eventsub-message-signature",
    "x-twilio-email-event-webhook-timestamp",
    "x-twilio-email-event-webhook-signature",
    "x-hubspot-request-timestamp",
    "x-hubspot-signature-v3",
    "box-delivery-timestamp",
    "box-signature-primary",
];

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_753_900_006)
}

/// The senders with a known scheme.
fn senders() -> Vec<Preset> {
    provider::ALL.iter().copied().filter(|preset| preset.scheme().is_some()).collect()
}

fn verifier(sender: Preset) -> Verifier {
    sender.verifier_at(URL, test_secrets(sender.scheme())[0]).unwrap()
}

/// Any headers and any body are refused, because nobody signed them.
#[test]
fn verify_any() {
    fuzz("verify_any", 4_000, &[], |input| {
        let mut input = Input(input);
        let sender = *input.pick(&senders());
        let mut request = Request::post("/hook?a=b").body(()).unwrap();
        for _ in 0..input.byte() % 6 {
            let name = HeaderName::from_static(input.pick::<&str>(&NAMES));
            if let Ok(value) = HeaderValue::from_bytes(input.bytes()) {
                request.headers_mut().append(name, value);
            }
        }
        let (head, ()) = request.into_parts();
        assert!(verifier(sender).verify(&head, input.0, now()).is_err(), "{sender:?}");
    });
}
