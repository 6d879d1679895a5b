//! The schemes of the examples on published vectors.

use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderValue, Request, Uri, header};
use sha1::Sha1;

use super::shared::signature::{Received, Refusal, Scheme, any_of};
use super::{Case, VECTORS, case, cases, genuine, signature_header, time_header};

#[test]
fn every_published_vector_is_accepted_or_refused_as_it_says() {
    for (scheme, json, genuine, forged) in VECTORS {
        let cases = cases(json);
        for case in &cases {
            let verdict = case.verdict(*scheme);
            assert_eq!(verdict.is_ok(), case.valid, "{scheme:?} {}: {verdict:?}", case.name);
        }
        let found = cases.iter().filter(|case| case.valid).count();
        assert_eq!((found, cases.len() - found), (*genuine, *forged), "{scheme:?}");
    }
}

/// A vector that is refused for another reason does not test its own.
#[test]
fn every_forgery_is_refused_for_its_own_reason() {
    use Refusal::{Forged, Malformed, Missing, OutOfTime};
    for (scheme, name, refusal) in [
        (Scheme::StandardWebhooks, "too-old", OutOfTime),
        (Scheme::StandardWebhooks, "too-new", OutOfTime),
        (Scheme::StandardWebhooks, "bad-signature", Forged),
        (Scheme::StandardWebhooks, "wrong-version", Forged),
        (Scheme::StandardWebhooks, "id-tampered", Forged),
        (Scheme::StandardWebhooks, "missing-id", Missing("webhook-id")),
        (Scheme::StandardWebhooks, "missing-timestamp", Missing("webhook-timestamp")),
        (Scheme::StandardWebhooks, "missing-signature", Missing("webhook-signature")),
        (Scheme::StandardWebhooks, "bad-timestamp", Malformed("webhook-timestamp")),
        (Scheme::Svix, "too-old", OutOfTime),
        (Scheme::Svix, "too-new", OutOfTime),
        (Scheme::Svix, "id-tampered", Forged),
        (Scheme::Svix, "missing-id", Missing("svix-id")),
        (Scheme::Svix, "missing-signature", Missing("svix-signature")),
        (Scheme::Stripe, "stale", OutOfTime),
        (Scheme::Stripe, "bad", Forged),
        (Scheme::Twilio, "helper-lib-wrong-signature", Forged),
    ] {
        assert_eq!(case(scheme, name).verdict(scheme), Err(refusal), "{scheme:?} {name}");
    }
}

#[test]
fn another_body_secret_or_signature_is_refused() {
    for (scheme, case) in genuine() {
        let (name, header) = (format!("{scheme:?} {}", case.name), signature_header(scheme));
        let (check, now) = (case.check(scheme), case.now());
        let refused = |head: &Parts, body: &[u8], what: &str| {
            let verdict = check(&Received { head, body, now });
            verdict.expect_err(&format!("{name}: {what}"))
        };
        let (head, body) = (case.head(), case.body_utf8.as_bytes());

        for at in BTreeSet::from([0, body.len() / 2, body.len().saturating_sub(1)]) {
            let mut other = body.to_vec();
            if let Some(byte) = other.get_mut(at) {
                *byte ^= 1;
                assert_eq!(refused(&head, &other, "one bit of the body"), Refusal::Forged);
            }
        }
        assert_eq!(refused(&head, &[body, b"1"].concat(), "a longer body"), Refusal::Forged);
        if !body.is_empty() {
            assert_eq!(refused(&head, &body[1..], "a shorter body"), Refusal::Forged);
        }

        let other = case.with_another_secret();
        assert_eq!(other.verdict(scheme), Err(Refusal::Forged), "{name}: another secret");

        let signature = head.headers[&header].to_str().unwrap().to_owned();
        let with = |signatures: &[&str]| {
            let mut head = head.clone();
            head.headers.remove(&header);
            for signature in signatures {
                head.headers.append(&header, HeaderValue::from_str(signature).unwrap());
            }
            head
        };
        assert!(matches!(refused(&with(&[]), body, "no signature"), Refusal::Missing(_)));
        let twice = with(&[&signature, &signature]);
        assert!(matches!(refused(&twice, body, "two headers"), Refusal::Malformed(_)));
        // A prefix of a signature is refused. Stripe's header continues after the signature.
        let end = signature.find("v1=").map_or(signature.len(), |at| at + 3 + 64);
        for less in [1, 2, 4, 8, 20] {
            let prefix = with(&[&signature[..end - less]]);
            assert_eq!(refused(&prefix, body, "a prefix of the signature"), Refusal::Forged);
        }
        refused(&with(&[""]), body, "an empty signature");
    }
}

#[test]
fn signature_is_valid_for_five_minutes_before_and_after() {
    let mut timed = BTreeSet::new();
    for (scheme, case) in genuine() {
        let head = case.head();
        let check = case.check(scheme);
        let at =
            |head: &Parts, now| check(&Received { head, body: case.body_utf8.as_bytes(), now });
        let Some(header) = time_header(scheme) else {
            // No time is signed.
            assert_eq!(at(&head, i64::MAX), Ok(()), "{scheme:?} {}", case.name);
            continue;
        };
        timed.insert(header.to_string());
        let value = head.headers[&header].to_str().unwrap();
        let digits = value.trim_start_matches("t=").split(',').next().unwrap();
        let time: i64 = digits.parse().unwrap();
        for (now, verdict) in [
            (time, Ok(())),
            (time + 300, Ok(())),
            (time - 300, Ok(())),
            (time + 301, Err(Refusal::OutOfTime)),
            (time - 301, Err(Refusal::OutOfTime)),
            (i64::MAX, Err(Refusal::OutOfTime)),
            (i64::MIN, Err(Refusal::OutOfTime)),
        ] {
            assert_eq!(at(&head, now), verdict, "{scheme:?} {}: {}", case.name, now - time);
        }
        for (other, verdict) in
            [((time + 1).to_string(), Refusal::Forged), (i64::MIN.to_string(), Refusal::OutOfTime)]
        {
            let mut head = head.clone();
            let other = value.replacen(digits, &other, 1);
            head.headers.insert(&header, HeaderValue::from_str(&other).unwrap());
            assert_eq!(at(&head, time), Err(verdict), "{scheme:?} {}: {other}", case.name);
        }
    }
    assert_eq!(timed.len(), 4);
}

/// The sender signs with one or both secrets, and the receiver has both.
#[test]
fn two_secrets_are_accepted_while_one_replaces_the_other() {
    for (scheme, case) in genuine() {
        let other = case.with_another_secret();
        let (right, wrong) = (case.check(scheme), other.check(scheme));
        let (head, now) = (case.head(), case.now());
        let request = Received { head: &head, body: case.body_utf8.as_bytes(), now };
        for (checks, verdict) in [
            (vec![&right, &wrong], Ok(())),
            (vec![&wrong, &right], Ok(())),
            (vec![&wrong, &wrong], Err(Refusal::Forged)),
            (vec![], Err(Refusal::Forged)),
        ] {
            let both = any_of(checks.into_iter().cloned().collect());
            assert_eq!(both(&request), verdict, "{scheme:?} {}", case.name);
        }
    }
    // Both signatures in one header: the vectors "rotation-two-signatures" and "two-v1", in both orders.
    let mut stripe = case(Scheme::Stripe, "two-v1");
    let header = stripe.headers["Stripe-Signature"].replacen(",v1=", ",v1=00,v1=zz,v1=", 1);
    stripe.headers.insert("Stripe-Signature".to_owned(), header);
    assert_eq!(stripe.verdict(Scheme::Stripe), Ok(()));
    let two_times = stripe.headers["Stripe-Signature"].replacen("t=", "t=1753900006,t=", 1);
    stripe.headers.insert("Stripe-Signature".to_owned(), two_times);
    assert_eq!(stripe.verdict(Scheme::Stripe), Err(Refusal::Malformed("stripe-signature")));
}

/// The verified id is the id that every reader of the request uses.
#[test]
fn svix_accepts_both_header_families_if_they_agree() {
    let own = case(Scheme::Svix, "official-sign-vector");
    let standard = case(Scheme::StandardWebhooks, "official-sign-vector");
    assert_eq!(standard.verdict(Scheme::Svix), Ok(()), "the standard family alone");
    assert_eq!(own.verdict(Scheme::StandardWebhooks), Err(Refusal::Missing("webhook-id")));

    let mut both = own.clone();
    both.headers.extend(standard.headers.clone());
    assert_eq!(both.verdict(Scheme::Svix), Ok(()));
    let retry = case(Scheme::Svix, "retry-new-timestamp-same-id");
    for (name, value) in [
        ("svix-id", "msg_other"),
        ("webhook-id", "msg_other"),
        ("webhook-timestamp", &retry.headers["svix-timestamp"]),
        ("webhook-signature", &retry.headers["svix-signature"]),
    ] {
        let mut differ = both.clone();
        differ.headers.insert(name.to_owned(), value.to_owned());
        let refusal = differ.verdict(Scheme::Svix).unwrap_err();
        assert!(matches!(refusal, Refusal::Ambiguous(_)), "{name}: {refusal:?}");
    }
}

/// The guide states what these senders do not sign.
#[test]
fn id_outside_the_signature_can_be_changed() {
    for (scheme, header) in [
        (Scheme::GitHub, "x-github-delivery"),
        (Scheme::Gitea, "x-gitea-delivery"),
        (Scheme::Shopify, "x-shopify-event-id"),
        (Scheme::Twilio, "i-twilio-idempotency-token"),
    ] {
        for (_, mut case) in genuine().into_iter().filter(|(of, _)| *of == scheme) {
            case.headers.retain(|name, _| !name.eq_ignore_ascii_case(header));
            case.headers.insert(header.to_owned(), "another".to_owned());
            assert_eq!(case.verdict(scheme), Ok(()), "{header}");
        }
    }
}

/// Twilio signs URL and fields without separators.
#[test]
fn twilio_signature_does_not_cover_boundaries_between_parameters() {
    let sent = case(Scheme::Twilio, "sms-status-sent");
    let recut = |body: String| Case { body_utf8: body, ..sent.clone() };
    let moved = recut(sent.body_utf8.replace("=sent&SmsSid=", "=sentSmsSid"));
    assert_ne!(moved.body_utf8, sent.body_utf8);
    assert_eq!(moved.verdict(Scheme::Twilio), Ok(()), "one field less, and another status");
    assert_eq!(
        recut(sent.body_utf8.replace("=sent", "=failed")).verdict(Scheme::Twilio),
        Err(Refusal::Forged)
    );

    // A GET has no body into which the end of its query could move.
    let get = case(Scheme::Twilio, "sms-inbound-get");
    let (url, end) = get.url.split_at(get.url.len() - 4);
    let body: String = end.bytes().map(|byte| format!("%{byte:02X}")).collect();
    for method in ["GET", "HEAD"] {
        let recut = Case {
            url: url.to_owned(),
            body_utf8: body.clone(),
            method: method.to_owned(),
            ..get.clone()
        };
        assert_eq!(recut.verdict(Scheme::Twilio), Err(Refusal::Forged), "{method}");
    }
}

/// The configured URL is verified, whatever host the request names.
#[test]
fn twilio_signature_needs_the_public_url() {
    let sms = case(Scheme::Twilio, "sms-inbound");
    let (mut head, body) = (sms.head(), sms.body_utf8.as_bytes());
    head.headers.insert(header::HOST, HeaderValue::from_static("10.0.0.7:3000"));
    for (public_url, verdict) in [
        ("https://example.com", Ok(())),
        ("https://example.com/", Ok(())),
        ("http://example.com", Err(Refusal::Forged)),
        ("https://example.com:443", Ok(())),
        ("https://example.org", Err(Refusal::Forged)),
        ("https://example.com/prefix", Err(Refusal::Forged)),
    ] {
        let check = Scheme::Twilio.check(&sms.secret, Some(public_url)).unwrap();
        assert_eq!(check(&Received { head: &head, body, now: 0 }), verdict, "{public_url}");
    }
    // A proxy that removes the prefix.
    head.uri = Uri::from_static("/sms");
    let check = Scheme::Twilio.check(&sms.secret, Some("https://example.com/twilio")).unwrap();
    assert_eq!(check(&Received { head: &head, body, now: 0 }), Ok(()));

    // Signed with the port; the vectors have no such case.
    let mut mac = Hmac::<Sha1>::new_from_slice(b"12345").unwrap();
    mac.update(b"http://[::1]:8080/hook");
    let signature = STANDARD.encode(mac.finalize().into_bytes());
    let (mut head, ()) = Request::get("/hook").body(()).unwrap().into_parts();
    head.headers.insert("x-twilio-signature", signature.parse().unwrap());
    for (public_url, verdict) in [
        ("http://[::1]:8080", Ok(())),
        ("http://[::1]", Err(Refusal::Forged)),
        ("http://[::1]:80", Err(Refusal::Forged)),
    ] {
        let check = Scheme::Twilio.check("12345", Some(public_url)).unwrap();
        assert_eq!(check(&Received { head: &head, body: b"", now: 0 }), verdict, "{public_url}");
    }

    let json = case(Scheme::Twilio, "helper-lib-json-bodySHA256");
    let mut unsigned = json.clone();
    unsigned.url = json.url.replace("0a1ff", "1a1ff");
    assert_eq!(unsigned.verdict(Scheme::Twilio), Err(Refusal::Forged));
}
