//! `Preset::sign` signs as the senders do.

use bytes::Bytes;
use http::Request;
use tower_dedup::internals::signs_time;
use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::Refusal;

use crate::secrets::test_secrets;
use crate::vectors::{VECTORS, at, cases, scheme, senders, signature_header};

const URL: &str = "https://example.com";

/// Returns a request of this sender without a signature.
fn unsigned(sender: Preset) -> Request<Bytes> {
    let body = match sender.name() {
        "adyen" => {
            r#"{"notificationItems": [
                {"NotificationRequestItem": {"pspReference": "1", "success": "true"}},
                {"NotificationRequestItem": {"pspReference": "2", "success": "false"}}]}"#
        }
        "twilio" => "MessageSid=SM1&MessageStatus=sent",
        _ => r#"{"id": "evt_1"}"#,
    };
    let id = match sender.name() {
        "svix" => "svix-id",
        "twitch" => "twitch-eventsub-message-id",
        _ => "webhook-id",
    };
    let request = Request::post("/hook?a=%3A").header(id, "msg_1");
    request.header("x-signature-timestamp", "1").body(body.into()).unwrap()
}

#[test]
fn signed_request_is_verified() {
    for sender in senders() {
        let [secret, private] = test_secrets(sender);
        let verifier = sender.verifier_at(URL, secret).unwrap();
        let now = at(1_753_900_006);
        let (head, body) = unsigned(sender).into_parts();
        verifier.verify(&head, &body, now).unwrap_err();
        let signed = scheme(sender).sign(private, Some(URL), now, unsigned(sender)).unwrap();
        let (head, body) = signed.into_parts();
        // Adyen signs each item in the body.
        let has_header = || head.headers.contains_key(signature_header(sender));
        assert!(sender == provider::ADYEN || has_header(), "{sender:?}");
        assert_eq!(verifier.verify(&head, &body, now), Ok(()), "{sender:?}");
        let later = verifier.verify(&head, &body, at(1_753_900_307));
        assert_eq!(later.is_err(), signs_time(&sender), "{sender:?}");
        if sender == provider::SENDGRID {
            continue;
        }
        let other = scheme(sender).sign("61", Some(URL), now, unsigned(sender));
        let Ok(other) = other else { continue };
        let (head, body) = other.into_parts();
        assert_eq!(verifier.verify(&head, &body, now), Err(Refusal::Forged), "{sender:?}");
    }
}

/// Signing a vector again gives the published signature, if time and URL have one form only.
#[test]
fn vectors_are_signed_as_published() {
    let mut other = Vec::new();
    for (sender, json, ..) in VECTORS {
        // The vectors have no private key.
        if matches!(sender.name(), "sendgrid" | "discord" | "adyen") {
            continue;
        }
        for case in cases(json).into_iter().filter(|case| case.valid) {
            let (head, body) = case.request().into_parts();
            drop(body);
            let request = Request::from_parts(head.clone(), Bytes::from(case.body_utf8.clone()));
            let time = match sender.name() {
                "slack" | "hubspot" => case.now(),
                _ => signed_time(*sender, &case.headers).unwrap_or(case.now()),
            };
            let url = case.public_url();
            let again = scheme(*sender).sign(&case.secret, Some(&url), at(time), request).unwrap();
            let header = signature_header(*sender);
            let published = head.headers[&header].to_str().unwrap();
            let own = again.headers()[&header].to_str().unwrap();
            if !published.contains(own) {
                other.push(case.name);
            }
        }
    }
    // Fractions of a second, decoded URLs and offsets have other forms too.
    assert_eq!(other, ["notification", "encoded-query", "primary-key", "secondary-key"]);
}

fn signed_time(
    sender: Preset,
    headers: &std::collections::BTreeMap<String, String>,
) -> Option<i64> {
    let (name, start) = match sender.name() {
        "standard-webhooks" => ("webhook-timestamp", ""),
        "svix" => ("svix-timestamp", ""),
        "stripe" => ("stripe-signature", "t="),
        "paddle" => ("paddle-signature", "ts="),
        _ => return None,
    };
    let (_, value) = headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name))?;
    value.strip_prefix(start)?.split([',', ';']).next()?.parse().ok()
}

/// The signatures are those of the crate `standardwebhooks` 1.0.1, by the specification's authors.
#[test]
fn standard_webhooks_agrees_with_its_reference_library() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let verifier = provider::STANDARD_WEBHOOKS.verifier(secret).unwrap();
    let now = at(1_614_265_330);
    for (id, body, signature) in [
        ("msg_0", "", "v1,Z74b2x1mVjQ+I0jmbFzY9J1FWJ6eDIb5SUXCugOgJcM="),
        ("msg_1", "{}", "v1,ZztYR0IIDCBCUcYzh8ZE+qsQWpIgtHU7R1hpe8htaD4="),
        ("msg_2", "Grüße", "v1,fPMBCboETOzpIB/J4VRqFeyfL7J0/HqW2ZBaU7iQA6A="),
        ("msg_3", &"x".repeat(10_000), "v1,1us5sa37iUCwaqKsnWYlAAVYW60gQNSyVhsh4c3BUrQ="),
    ] {
        let request = Request::post("/hook")
            .header("webhook-id", id)
            .header("webhook-timestamp", "1614265330")
            .header("webhook-signature", signature);
        let (head, ()) = request.body(()).unwrap().into_parts();
        assert_eq!(verifier.verify(&head, body.as_bytes(), now), Ok(()), "{id}");

        let request = Request::post("/hook").header("webhook-id", id);
        let request = request.body(Bytes::from(body.to_owned())).unwrap();
        let signed = scheme(provider::STANDARD_WEBHOOKS).sign(secret, None, now, request).unwrap();
        assert_eq!(signed.headers(), &head.headers, "{id}");
    }
}
