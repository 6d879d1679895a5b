//! The schemes: what each accepts, and why it refuses.

use std::collections::BTreeSet;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderValue, Request, Uri, header};
use sha1::Sha1;
use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::{Part, Refusal, Scheme, VerifierError};

use crate::vectors::{
    Case, VECTORS, at, case, cases, genuine, senders, signature_header, signed_by, signs_time,
};
use support::secrets::test_secrets;

/// A vector that is refused for another reason does not test its own.
#[test]
fn every_published_vector_is_accepted_or_refused_for_its_own_reason() {
    for (sender, json, genuine, forged) in VECTORS {
        let cases = cases(json);
        for case in &cases {
            let refused = case.verdict(*sender).err().map(|refusal| refusal.to_string());
            assert_eq!(refused, case.refused, "{sender:?} {}", case.name);
        }
        let found = cases.iter().filter(|case| case.refused.is_none()).count();
        assert_eq!((found, cases.len() - found), (*genuine, *forged), "{sender:?}");
    }
}

#[test]
fn another_body_secret_or_signature_is_refused() {
    // Adyen signs some values only, inside the body: see its vectors.
    for (sender, case) in genuine().into_iter().filter(|(of, _)| *of != provider::ADYEN) {
        let (name, header) = (format!("{sender:?} {}", case.name), signature_header(sender));
        let (verifier, now) = (case.verifier(sender), at(case.now()));
        let refused = |head: &Parts, body: &[u8], what: &str| {
            let verdict = verifier.verify(head, body, now);
            verdict.expect_err(&format!("{name}: {what}"))
        };
        let (head, body) = (case.head(), case.body_utf8.as_bytes());

        for place in BTreeSet::from([0, body.len() / 2, body.len().saturating_sub(1)]) {
            let mut other = body.to_vec();
            if let Some(byte) = other.get_mut(place) {
                *byte ^= 1;
                assert_eq!(refused(&head, &other, "one bit of the body"), Refusal::Forged);
            }
        }
        assert_eq!(refused(&head, &[body, b"1"].concat(), "a longer body"), Refusal::Forged);
        if !body.is_empty() {
            assert_eq!(refused(&head, &body[1..], "a shorter body"), Refusal::Forged);
        }

        let other = case.with_another_secret();
        assert_eq!(other.verdict(sender), Err(Refusal::Forged), "{name}: another secret");

        let signature = match case.name.as_str() {
            "secondary-key" => head.headers["box-signature-secondary"].clone(),
            _ => head.headers[&header].clone(),
        };
        let signature = signature.to_str().unwrap().to_owned();
        let with = |signatures: &[&str]| {
            let mut head = head.clone();
            head.headers.remove(&header);
            // Box signs twice.
            head.headers.remove("box-signature-secondary");
            for signature in signatures {
                head.headers.append(&header, HeaderValue::from_str(signature).unwrap());
            }
            head
        };
        assert!(matches!(refused(&with(&[]), body, "no signature"), Refusal::Missing(_)));
        let twice = with(&[&signature, &signature]);
        assert!(matches!(refused(&twice, body, "two headers"), Refusal::Malformed(_)));
        // A prefix of a signature is refused. The header continues after it at Stripe and Paddle. The padding of base64
        // is no part of the code.
        let start = signature.find("v1=").or_else(|| signature.find("h1="));
        let whole = signature.trim_end_matches('=');
        let end = start.map_or(whole.len(), |start| start + 3 + 64);
        for less in [1, 2, 4, 8, 20] {
            let prefix = with(&[&signature[..end - less]]);
            assert_eq!(refused(&prefix, body, "a prefix of the signature"), Refusal::Forged);
        }
        refused(&with(&[""]), body, "an empty signature");
    }
}

#[test]
fn signature_is_valid_for_five_minutes_before_and_after() {
    const TIME: i64 = 1_753_900_006;
    let timed: Vec<_> = senders().into_iter().filter(signs_time).collect();
    assert_eq!(timed.len(), 11);
    for sender in timed {
        let [secret, private] = test_secrets(sender.scheme());
        let id = match sender.name() {
            "svix" => "svix-id",
            "twitch" => "twitch-eventsub-message-id",
            _ => "webhook-id",
        };
        let request = Request::post("/hook").header(id, "1").body(Bytes::from("{}")).unwrap();
        let signed = signed_by(sender, private, "https://h", at(TIME), request);
        let (head, body) = signed.into_parts();
        let five = sender.verifier_at("https://h", secret).unwrap();
        let ten = five.clone().tolerance(Duration::from_secs(600));
        let late = Err(Refusal::OutOfTime);
        for (verifier, now, verdict) in [
            (&five, TIME, Ok(())),
            (&five, TIME + 300, Ok(())),
            (&five, TIME - 300, Ok(())),
            (&five, TIME + 301, late),
            (&five, TIME - 301, late),
            (&five, i64::MAX, late),
            (&five, i64::MIN, late),
            (&ten, TIME + 600, Ok(())),
            (&ten, TIME + 601, late),
        ] {
            assert_eq!(verifier.verify(&head, &body, at(now)), verdict, "{sender:?}: {now}");
        }
    }
    for (sender, case) in genuine().into_iter().filter(|(sender, _)| !signs_time(sender)) {
        let (verifier, body) = (case.verifier(sender), case.body_utf8.as_bytes());
        assert_eq!(verifier.verify(&case.head(), body, at(i64::MAX)), Ok(()), "{sender:?}");
    }
}

/// The sender signs with one or both secrets, and the receiver has both.
#[test]
fn two_secrets_are_accepted_while_one_replaces_the_other() {
    for (sender, case) in genuine() {
        let other = case.with_another_secret();
        let [right, wrong] = [&case, &other].map(|of| of.verifier(sender));
        let (head, now) = (case.head(), at(case.now()));
        for (verifier, verdict) in [
            (right.or_secret(&other.secret), Ok(())),
            (wrong.clone().or_secret(&case.secret), Ok(())),
            (wrong.or_secret(&other.secret), Err(Refusal::Forged)),
        ] {
            let verified = verifier.unwrap().verify(&head, case.body_utf8.as_bytes(), now);
            assert_eq!(verified, verdict, "{sender:?} {}", case.name);
        }
    }
    // Both signatures in one header: the vectors "rotation-two-signatures" and "two-v1", in both orders.
    let mut stripe = case(provider::STRIPE, "two-v1");
    let header = stripe.headers["Stripe-Signature"].replacen(",v1=", ",v1=00,v1=zz,v1=", 1);
    stripe.headers.insert("Stripe-Signature".to_owned(), header);
    assert_eq!(stripe.verdict(provider::STRIPE), Ok(()));
    // The codes are not those of the first time.
    let two_times = stripe.headers["Stripe-Signature"].clone() + ",t=1753900006";
    for (header, expected) in [
        (two_times.clone(), Ok(())),
        (two_times.replacen(",v1=", ",t=1753900007,v1=", 1), Err(Refusal::Forged)),
        (format!("t=now,{two_times}"), Err(Refusal::Malformed("stripe-signature"))),
    ] {
        stripe.headers.insert("Stripe-Signature".to_owned(), header.clone());
        assert_eq!(stripe.verdict(provider::STRIPE), expected, "{header}");
    }
}

/// The verified id is the id that every reader of the request uses.
#[test]
fn svix_accepts_both_header_families_if_they_agree() {
    let own = case(provider::SVIX, "official-sign-vector");
    let standard = case(provider::STANDARD_WEBHOOKS, "official-sign-vector");
    assert_eq!(standard.verdict(provider::SVIX), Ok(()), "the standard family alone");
    assert_eq!(own.verdict(provider::STANDARD_WEBHOOKS), Err(Refusal::Missing("webhook-id")));

    let mut both = own.clone();
    both.headers.extend(standard.headers.clone());
    assert_eq!(both.verdict(provider::SVIX), Ok(()));
    let retry = case(provider::SVIX, "retry-new-timestamp-same-id");
    for (name, value) in [
        ("svix-id", "msg_other"),
        ("webhook-id", "msg_other"),
        ("webhook-timestamp", &retry.headers["svix-timestamp"]),
        ("webhook-signature", &retry.headers["svix-signature"]),
    ] {
        let mut differ = both.clone();
        differ.headers.insert(name.to_owned(), value.to_owned());
        let refusal = differ.verdict(provider::SVIX).unwrap_err();
        assert!(matches!(refusal, Refusal::Ambiguous(_)), "{name}: {refusal:?}");
    }
}

/// The guide states what these senders do not sign.
#[test]
fn id_outside_the_signature_can_be_changed() {
    for (sender, header) in [
        (provider::GITHUB, "x-github-delivery"),
        (provider::GITEA, "x-gitea-delivery"),
        (provider::SHOPIFY, "x-shopify-webhook-id"),
        (provider::TWILIO, "i-twilio-idempotency-token"),
        (provider::BOX, "box-delivery-id"),
        (provider::RAZORPAY, "x-razorpay-event-id"),
    ] {
        for (_, mut case) in genuine().into_iter().filter(|(of, _)| *of == sender) {
            case.headers.retain(|name, _| !name.eq_ignore_ascii_case(header));
            case.headers.insert(header.to_owned(), "another".to_owned());
            assert_eq!(case.verdict(sender), Ok(()), "{header}");
        }
    }
}

/// The signed text of a GET is also the text of a POST with the end of the query in its form, and the
/// reverse. The text can contain a message that a stranger wrote.
#[test]
fn twilio_signature_of_one_method_is_refused_for_the_other_at_every_cut() {
    const ORIGIN: &str = "https://example.com";
    let signed = |method: &str, target: &str, body: &str| {
        let sample = case(provider::TWILIO, "sms-inbound-get");
        let request = Request::builder().method(method).uri(target);
        let request = request.body(Bytes::copy_from_slice(body.as_bytes())).unwrap();
        let request = signed_by(provider::TWILIO, &sample.secret, ORIGIN, at(0), request);
        let signature = request.headers()["x-twilio-signature"].to_str().unwrap().to_owned();
        Case {
            method: method.to_owned(),
            url: format!("{ORIGIN}{target}"),
            headers: [("X-Twilio-Signature".to_owned(), signature)].into(),
            body_utf8: body.to_owned(),
            ..sample
        }
    };
    let recut = |case: &Case, method: &str, url: &str, body: &str| {
        let (method, url, body_utf8) = (method.to_owned(), url.to_owned(), body.to_owned());
        Case { method, url, body_utf8, ..case.clone() }.verdict(provider::TWILIO)
    };
    let encoded = |text: &str| text.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
    let account = "AccountSid=AC00000000000000000000000000000001";
    let in_form = account.replace('=', "");
    let refused = Err(Refusal::Malformed("AccountSid"));

    for (get, verdict) in [
        (case(provider::TWILIO, "sms-inbound-get"), Ok(())),
        (signed("GET", &format!("/sms?{account}&Body=AccountSid&MessageSid=SM1"), ""), Ok(())),
        (signed("GET", &format!("/sms?Body={in_form}MessageSidSM2&{account}"), ""), refused),
    ] {
        assert_eq!(get.verdict(provider::TWILIO), verdict, "{}", get.url);
        for cut in ORIGIN.len() + 1..=get.url.len() {
            let (url, form) = get.url.split_at(cut);
            for method in ["POST", "PUT"] {
                assert_eq!(recut(&get, method, url, &encoded(form)), refused, "{method} {url}");
            }
        }
    }

    let json = case(provider::TWILIO, "helper-lib-json-bodySHA256");
    let digest = json.url.split_once("bodySHA256=").unwrap().1;
    let form = |message: &str| format!("{account}&Body={}&MessageSid=SM1", encoded(message));
    for (post, verdict) in [
        (case(provider::TWILIO, "sms-status-sent"), Ok(())),
        (case(provider::TWILIO, "helper-lib-voice"), Ok(())),
        (signed("POST", "/sms?tenant=1", &form("x&MessageSid=SM2")), Ok(())),
        (signed("POST", "/sms?tenant=1", &form(&format!("x&bodySHA256={digest}&"))), Ok(())),
        (signed("POST", "/sms?tenant=1", &form(&format!("x&{account}&MessageSid=SM2&"))), refused),
    ] {
        assert_eq!(post.verdict(provider::TWILIO), verdict, "{}", post.body_utf8);
        let fields = form_urlencoded::parse(post.body_utf8.as_bytes());
        let text: String = fields.map(|(name, value)| format!("{name}{value}")).collect();
        for cut in 0..=text.len() {
            let (query, form) = text.split_at(cut);
            let url = format!("{}{query}", post.url);
            for method in ["GET", "HEAD"] {
                assert!(recut(&post, method, &url, &encoded(form)).is_err(), "{method} {url}");
            }
        }
        let url = format!("{}{text}", post.url);
        assert!(recut(&post, "POST", &url, &json.body_utf8).is_err(), "{url}");
    }
}

/// The content type is not signed. Under another one, the fields are not read for the key.
#[test]
fn twilio_form_of_another_content_type_is_refused() {
    let sent = case(provider::TWILIO, "sms-status-sent");
    let refused = Err(Refusal::Malformed("content-type"));
    for (content_type, verdict) in [
        ("application/x-www-form-urlencoded; charset=UTF-8", Ok(())),
        ("application/json", refused),
        ("text/plain", refused),
    ] {
        let mut case = sent.clone();
        case.headers.retain(|name, _| !name.eq_ignore_ascii_case("content-type"));
        assert_eq!(case.verdict(provider::TWILIO), Ok(()));
        case.headers.insert("Content-Type".to_owned(), content_type.to_owned());
        assert_eq!(case.verdict(provider::TWILIO), verdict, "{content_type}");
    }
}

/// The configured URL is verified, whatever host the request names.
#[test]
fn twilio_signature_needs_the_public_url() {
    let sms = case(provider::TWILIO, "sms-inbound");
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
        let verifier = provider::TWILIO.verifier_at(public_url, &sms.secret).unwrap();
        assert_eq!(verifier.verify(&head, body, at(0)), verdict, "{public_url}");
    }
    // A proxy that removes the prefix.
    head.uri = Uri::from_static("/sms");
    let verifier = provider::TWILIO.verifier_at("https://example.com/twilio", &sms.secret).unwrap();
    assert_eq!(verifier.verify(&head, body, at(0)), Ok(()));

    // Signed with the port; the vectors have no such case.
    let mut mac = Hmac::<Sha1>::new_from_slice(b"12345").unwrap();
    mac.update(b"http://[::1]:8080/hook");
    let signature = STANDARD.encode(mac.finalize().into_bytes());
    let (mut head, ()) = Request::post("/hook").body(()).unwrap().into_parts();
    head.headers.insert("x-twilio-signature", signature.parse().unwrap());
    for (public_url, verdict) in [
        ("http://[::1]:8080", Ok(())),
        ("http://[::1]", Err(Refusal::Forged)),
        ("http://[::1]:80", Err(Refusal::Forged)),
    ] {
        let verifier = provider::TWILIO.verifier_at(public_url, "12345").unwrap();
        assert_eq!(verifier.verify(&head, b"", at(0)), verdict, "{public_url}");
    }

    let json = case(provider::TWILIO, "helper-lib-json-bodySHA256");
    let mut unsigned = json.clone();
    unsigned.url = json.url.replace("0a1ff", "1a1ff");
    assert_eq!(unsigned.verdict(provider::TWILIO), Err(Refusal::Forged));
}

/// The whole header is compared.
#[test]
fn shared_token_is_accepted_only_as_a_whole() {
    for (sender, header) in [
        (provider::GITLAB, "X-Gitlab-Token"),
        (provider::TELEGRAM, "X-Telegram-Bot-Api-Secret-Token"),
    ] {
        let verifier = sender.verifier("to-ken").unwrap().or_secret("previous").unwrap();
        let with = |tokens: &[&str]| {
            let mut request = Request::post("/hook");
            for token in tokens {
                request = request.header(header, *token);
            }
            let (head, ()) = request.body(()).unwrap().into_parts();
            verifier.verify(&head, b"any body", at(0))
        };
        assert_eq!(with(&["to-ken"]), Ok(()), "{sender:?}");
        assert_eq!(with(&["previous"]), Ok(()), "{sender:?}");
        for token in ["", "to-ke", "to-ken2", "To-ken", "to-kem"] {
            assert_eq!(with(&[token]), Err(Refusal::Forged), "{sender:?} {token}");
        }
        assert!(matches!(with(&[]), Err(Refusal::Missing(_))), "{sender:?}");
        assert!(matches!(with(&["to-ken", "to-ken"]), Err(Refusal::Malformed(_))), "{sender:?}");
    }
}

/// Every sender has vectors, but for the shared tokens, and Gitea, whose vectors are GitHub's.
#[test]
fn every_scheme_has_vectors() {
    let tested = genuine().into_iter().map(|(sender, _)| sender.name());
    let tested: BTreeSet<_> = tested.chain(["gitlab", "telegram"]).collect();
    assert_eq!(tested, senders().iter().map(Preset::name).collect());
}

/// A colon of one value could stand at the end of another: the code of the item decides which has it.
#[test]
fn adyen_item_is_accepted_wherever_its_values_can_be_told_apart() {
    const KEY: &str = "6120736563726574206f662032342062797465732e2e2e2e";
    let report = "r_2022-11-01T00:00:00.csv";
    // The values in the order of the signed text.
    let item = |[psp, original, account, reference, code]: [&str; 5], signature: &str| {
        serde_json::json!({"NotificationRequestItem": {
            "pspReference": psp, "originalReference": original, "merchantAccountCode": account,
            "merchantReference": reference, "amount": {"value": 0, "currency": "EUR"},
            "eventCode": code, "success": "true", "additionalData": {"hmacSignature": signature},
        }})
    };
    let signature = |[psp, original, account, reference, code]: [&str; 5]| {
        let text = format!("{psp}:{original}:{account}:{reference}:0:EUR:{code}:true");
        let mac = Hmac::<sha2::Sha256>::new_from_slice(b"a secret of 24 bytes....")
            .unwrap()
            .chain_update(text);
        STANDARD.encode(mac.finalize().into_bytes())
    };
    let verdict = |items: &[serde_json::Value]| {
        let body = serde_json::json!({"notificationItems": items}).to_string();
        let (head, ()) = Request::post("/hook").body(()).unwrap().into_parts();
        provider::ADYEN.verifier(KEY).unwrap().verify(&head, body.as_bytes(), at(0))
    };
    const REPORT: &str = "REPORT_AVAILABLE";
    const PAID: &str = "AUTHORISATION";
    let sound = [
        [report, "", "Shop", "", REPORT],
        ["settlement_1.csv", "", "Shop", "", REPORT],
        [":::", "", "Shop", "x", REPORT],
        ["7914073381342284", "", "Shop", "order:1:2", PAID],
        ["7914073381342284", "", "Shop", ":", PAID],
        ["7914073381342284", "", "Shop", " ", PAID],
        ["7914073381342284", "8313547924770610", "Shop", "", "REFUND"],
    ];
    let sound = sound.map(|values| item(values, &signature(values)));
    assert_eq!(verdict(&sound), Ok(()), "all in one request");
    for genuine in [
        [report, "", "Shop", "", REPORT],
        [":::", "", "Shop", "x", REPORT],
        ["7914073381342284", "", "Shop", "order:1:2", PAID],
        ["7914073381342284", "8313547924770610", "Shop", "a:b:c", "REFUND"],
    ] {
        let signed = signature(genuine);
        let text = genuine[..4].join(":");
        let words: Vec<_> = text.split(':').collect();
        // Every other way to cut the same text into four values.
        for a in 1..words.len() {
            for b in a + 1..words.len() {
                for c in b + 1..words.len() {
                    let cut = [&words[..a], &words[a..b], &words[b..c], &words[c..]];
                    let [psp, original, account, reference] = cut.map(|words| words.join(":"));
                    let values = [&*psp, &original, &account, &reference, genuine[4]];
                    let accepted = verdict(&[item(values, &signed)]).is_ok();
                    assert_eq!(accepted, values == genuine, "{values:?}");
                }
            }
        }
    }
}

/// The request that a proxy or axum's `nest` leaves of `/square` has the path `/`.
#[test]
fn signed_url_may_end_without_the_slash_of_an_empty_path() {
    for sender in senders().into_iter().filter(|sender| {
        sender.verifier("x").is_err_and(|error| error == VerifierError::NoPublicUrl)
    }) {
        let secret = test_secrets(sender.scheme())[0];
        for (configured, sent, public_url, left, accepted) in [
            ("https://h", "/square", "https://h/square", "/", true),
            ("https://h", "/square", "https://h/square/", "/", true),
            ("https://h", "/square/", "https://h/square", "/", true),
            ("https://h", "/square?a=1", "https://h/square", "/?a=1", true),
            ("https://h", "/square/?a=1", "https://h/square", "/?a=1", true),
            ("https://h", "/square/hook", "https://h/square", "/hook", true),
            ("https://h", "/square", "https://h", "/square", true),
            ("https://h", "/square", "https://h/squar", "/e", false),
            ("https://h", "/square", "https://h/square", "/square", false),
            ("https://h", "/squarehook", "https://h/square", "/hook", false),
            ("https://h", "/square?a=1", "https://h/square", "/?a=2", false),
        ] {
            let request = Request::post(sent).body(Bytes::from("b=2")).unwrap();
            let signed = signed_by(sender, secret, configured, at(1_753_900_006), request);
            let (mut head, body) = signed.into_parts();
            head.uri = left.parse().unwrap();
            let verifier = sender.verifier_at(public_url, secret).unwrap();
            let verdict = verifier.verify(&head, &body, at(1_753_900_006));
            assert_eq!(
                verdict.is_ok(),
                accepted,
                "{sender:?} {sent} {public_url} {left}: {verdict:?}"
            );
        }
    }
}

/// Sorting a million pairs takes longer than the rest of a request.
#[test]
fn form_of_more_than_a_thousand_fields_is_refused() {
    let secret = test_secrets(provider::TWILIO.scheme())[0];
    let verifier = provider::TWILIO.verifier_at("https://h", secret).unwrap();
    for (fields, verdict) in [(1_000, Ok(())), (1_001, Err(Refusal::Malformed("the form")))] {
        let body: Vec<_> = (0..fields).map(|field| format!("f{field:04}=1")).collect();
        let request = Request::post("/hook").body(Bytes::from(body[..1_000].join("&"))).unwrap();
        let signed = signed_by(provider::TWILIO, secret, "https://h", at(0), request);
        let (head, _) = signed.into_parts();
        assert_eq!(verifier.verify(&head, body.join("&").as_bytes(), at(0)), verdict, "{fields}");
    }
}

/// An encoded `/` or `?` of a path is another path: of another tenant, for example.
#[test]
fn hubspot_decodes_the_query_and_not_the_path() {
    let secret = test_secrets(provider::HUBSPOT.scheme())[0];
    let now = at(1_753_900_006);
    for (signed, sent, accepted) in [
        ("/hubspot/acme?v=1", "/hubspot/acme?v=1", true),
        ("/hubspot/acme?v=1", "/hubspot/acme%3Fv=1", false),
        ("/hubspot/acme?v=1", "/hubspot/acme%3fv=1", false),
        ("/hubspot/acme/a", "/hubspot/acme%2Fa", false),
        ("/hubspot/acme;a", "/hubspot/acme%3Ba", false),
        ("/hubspot/a%3Fb", "/hubspot/a%3Fb", true),
        ("/hubspot/a?v=1:/?@!$'()*,;", "/hubspot/a?v=1%3A%2f%3F%40%21%24%27%28%29%2A%2C%3B", true),
        ("/hubspot/a%2Fb?v=a:b", "/hubspot/a%2Fb?v=a%3Ab", true),
        ("/hubspot/a?v=1&w=2", "/hubspot/a?v=1%26w=2", false),
    ] {
        let request = Request::post(signed).body(Bytes::new()).unwrap();
        let request = signed_by(provider::HUBSPOT, secret, "https://h", now, request);
        let (mut head, _) = request.into_parts();
        head.uri = sent.parse().unwrap();
        let verifier = provider::HUBSPOT.verifier_at("https://h", secret).unwrap();
        assert_eq!(verifier.verify(&head, b"", now).is_ok(), accepted, "{signed} {sent}");
    }
}

/// RFC 3339 allows lower-case letters and a space, too. No sender writes them.
#[test]
fn date_is_read_as_senders_write_it_only() {
    const DATED: Scheme = Scheme::hmac_sha256("x-code", &[Part::Rfc3339("x-time"), Part::Body]);
    let verifier = DATED.verifier("secret").unwrap().tolerance(Duration::ZERO);
    for (time, seconds) in [
        ("1969-12-31T23:59:59Z", Some(-1)),
        ("2000-02-29T12:00:00.5Z", Some(951_825_600)),
        ("2020-01-01T00:00:00-07:00", Some(1_577_862_000)),
        ("2022-12-28T14:31:01.123456789+05:30", Some(1_672_218_061)),
        ("2022-12-28 14:31:01Z", None),
        ("2022-12-28t14:31:01Z", None),
        ("2022-12-28T14:31:01z", None),
        ("2022-12-28T14:31:01\u{2212}07:00", None),
        ("2022-12-28T14:31:01", None),
        ("2022-02-29T14:31:01Z", None),
    ] {
        let mac = Hmac::<sha2::Sha256>::new_from_slice(b"secret").unwrap().chain_update(time);
        let code = base16ct::lower::encode_string(&mac.finalize().into_bytes());
        let request = Request::post("/").header("x-code", code).header("x-time", time.as_bytes());
        let (head, ()) = request.body(()).unwrap().into_parts();
        let expected = seconds.map(|_| ()).ok_or(Refusal::Malformed("x-time"));
        let now = at(seconds.unwrap_or(1_672_218_061));
        assert_eq!(verifier.verify(&head, b"", now), expected, "{time}");
    }
}
