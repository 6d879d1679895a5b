//! `Scheme::sign` signs as the senders do.

use bytes::Bytes;
use http::Request;
use tower_dedup::verify::{Refusal, Scheme};

use crate::vectors::{VECTORS, at, cases};

const URL: &str = "https://example.com";

/// Returns a request of this sender without a signature.
fn unsigned(scheme: Scheme) -> Request<Bytes> {
    let body = match scheme {
        Scheme::Adyen => {
            r#"{"notificationItems": [
                {"NotificationRequestItem": {"pspReference": "1", "success": "true"}},
                {"NotificationRequestItem": {"pspReference": "2", "success": "false"}}]}"#
        }
        Scheme::Twilio => "MessageSid=SM1&MessageStatus=sent",
        _ => r#"{"id": "evt_1"}"#,
    };
    let id = match scheme {
        Scheme::Svix => "svix-id",
        Scheme::Twitch => "twitch-eventsub-message-id",
        _ => "webhook-id",
    };
    Request::post("/hook?a=%3A").header(id, "msg_1").body(body.into()).unwrap()
}

#[test]
fn signed_request_is_verified() {
    for scheme in Scheme::ALL {
        let [secret, private] = scheme.test_secrets();
        let verifier = scheme.verifier_at(URL, secret).unwrap();
        let now = at(1_753_900_006);
        let (head, body) = unsigned(*scheme).into_parts();
        verifier.verify(&head, &body, now).unwrap_err();
        let signed = scheme.sign(private, Some(URL), now, unsigned(*scheme)).unwrap();
        let (head, body) = signed.into_parts();
        assert_eq!(verifier.verify(&head, &body, now), Ok(()), "{scheme:?}");
        let later = verifier.verify(&head, &body, at(1_753_900_307));
        assert_eq!(later.is_err(), scheme.signs_time(), "{scheme:?}");
        if let Scheme::SendGrid = scheme {
            continue;
        }
        let other = scheme.sign("61", Some(URL), now, unsigned(*scheme));
        let Ok(other) = other else { continue };
        let (head, body) = other.into_parts();
        assert_eq!(verifier.verify(&head, &body, now), Err(Refusal::Forged), "{scheme:?}");
    }
}

/// Signing a vector again gives the published signature, if time and URL have one form only.
#[test]
fn vectors_are_signed_as_published() {
    let mut other = Vec::new();
    for (scheme, json, ..) in VECTORS {
        // Its signatures differ each time.
        if matches!(scheme, Scheme::SendGrid | Scheme::Adyen) {
            continue;
        }
        for case in cases(json).into_iter().filter(|case| case.valid) {
            let (head, body) = case.request().into_parts();
            drop(body);
            let request = Request::from_parts(head.clone(), Bytes::from(case.body_utf8.clone()));
            let time = match scheme {
                Scheme::Slack | Scheme::HubSpot => case.now(),
                _ => signed_time(*scheme, &case.headers).unwrap_or(case.now()),
            };
            let url = case.public_url();
            let again = scheme.sign(&case.secret, Some(&url), at(time), request).unwrap();
            let header = scheme.in_words()[0];
            let published = head.headers[header].to_str().unwrap();
            let own = again.headers()[header].to_str().unwrap();
            if !published.contains(own) {
                other.push(case.name);
            }
        }
    }
    // Fractions of a second, decoded URLs and offsets have other forms too.
    assert_eq!(other, ["notification", "encoded-query", "primary-key", "secondary-key"]);
}

fn signed_time(
    scheme: Scheme,
    headers: &std::collections::BTreeMap<String, String>,
) -> Option<i64> {
    let (name, start) = match scheme {
        Scheme::StandardWebhooks => ("webhook-timestamp", ""),
        Scheme::Svix => ("svix-timestamp", ""),
        Scheme::Stripe => ("stripe-signature", "t="),
        Scheme::Paddle => ("paddle-signature", "ts="),
        _ => return None,
    };
    let (_, value) = headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name))?;
    value.strip_prefix(start)?.split([',', ';']).next()?.parse().ok()
}

/// The signatures are those of the crate `standardwebhooks` 1.0.1, by the specification's authors.
#[test]
fn standard_webhooks_agrees_with_its_reference_library() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let verifier = Scheme::StandardWebhooks.verifier(secret).unwrap();
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
        let signed = Scheme::StandardWebhooks.sign(secret, None, now, request).unwrap();
        assert_eq!(signed.headers(), &head.headers, "{id}");
    }
}
