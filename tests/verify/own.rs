//! Schemes of one's own, and what each refuses.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderName, HeaderValue, Request};
use sha2::Sha256;
use tower::ServiceExt;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;
use tower_dedup::provider;
use tower_dedup::verify::{Part, Refusal, Scheme, VerifierError, VerifyLayer};
use tower_dedup::{DedupLayer, key};

use crate::vectors::{OF_SCHEMES, PAIRS, at};
use support::log::Log;
use support::secrets::test_secrets;

const NOW: i64 = 1_753_900_006;
const SECRET: &str = "a_secret_for_tests";
const SHOP: Scheme = Scheme::hmac_sha256(
    "x-shop-signature",
    &[Part::Header("x-shop-id"), Part::Text("."), Part::Seconds("x-shop-time"), Part::Body],
)
.prefix("sha256=");
const BANK: Scheme =
    Scheme::hmac_sha256("x-bank", &[Part::Item("t="), Part::Text("."), Part::Body])
        .separated_by(&[',', ' '])
        .prefix("v1=");

fn unsigned(body: &'static str) -> Request<Bytes> {
    Request::post("/hook").header("x-shop-id", "e1").body(Bytes::from(body)).unwrap()
}

/// The code of `<id>.<time><body>`, by the crate `hmac`.
fn shop_code(secret: &str, time: &str, body: &str) -> String {
    let mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    let code = mac.chain_update(format!("e1.{time}{body}")).finalize().into_bytes();
    format!("sha256={}", base16ct::lower::encode_string(&code))
}

#[test]
fn every_form_of_a_scheme_verifies_what_it_signs_and_nothing_else() {
    const TEXT: &[Part] = &[Part::Body];
    let schemes = [
        SHOP,
        BANK,
        Scheme::hmac_sha256("X-A", TEXT),
        Scheme::hmac_sha256("x-a", TEXT).base64().base64_secret(),
        Scheme::hmac_sha1("x-a", TEXT).prefix("sha1=").hex_secret(),
        Scheme::hmac_sha512("x-a", TEXT).prefix("sha512="),
        Scheme::hmac_sha256("x-bank", &[Part::ItemMillis("t="), Part::Body])
            .separated_by(&[','])
            .prefix("v1="),
        Scheme::hmac_sha256("x-a", &[Part::Millis("x-ms"), Part::Body]),
        Scheme::hmac_sha256("x-a", &[Part::Body, Part::Rfc3339("x-date")]),
        Scheme::hmac_sha256("x-a", &[Part::Url, Part::Body]),
        Scheme::ed25519("x-a", &[Part::Seconds("x-time"), Part::Body]),
        Scheme::ed25519("x-a", TEXT).base64(),
    ];
    for scheme in schemes {
        let [public, private] = test_secrets(Some(scheme));
        let verifier = scheme.verifier_at("https://h", public).unwrap();
        let signed = scheme.sign(private, Some("https://h"), at(NOW), unsigned("body")).unwrap();
        let (mut head, body) = signed.into_parts();
        assert_eq!(verifier.verify(&head, &body, at(NOW)), Ok(()), "{scheme:?}");
        assert_eq!(verifier.verify(&head, b"bodY", at(NOW)), Err(Refusal::Forged), "{scheme:?}");
        let timed = scheme.sign(private, Some("https://h"), at(NOW), unsigned("")).unwrap();
        let has_time = timed.headers().len() > 2 || timed.headers().contains_key("x-bank");
        let late = verifier.verify(&head, &body, at(NOW + 301));
        assert_eq!(late.is_err(), has_time, "{scheme:?}");
        head.uri = "/other".parse().unwrap();
        let has_url = scheme.verifier(public).is_err();
        assert_eq!(verifier.verify(&head, &body, at(NOW)).is_err(), has_url, "{scheme:?}");
    }
    // The same code by another program.
    let signed = SHOP.sign(SECRET, None, at(NOW), unsigned("body")).unwrap();
    assert_eq!(signed.headers()["x-shop-signature"], shop_code(SECRET, "1753900006", "body"));
}

fn verdict(
    scheme: Scheme,
    secret: &str,
    now: i64,
    header: &str,
    body: &str,
) -> Result<(), Refusal> {
    let request = Request::post("/hook").header("x-signature", header).body(()).unwrap();
    let (head, ()) = request.into_parts();
    scheme.verifier(secret).unwrap().verify(&head, body.as_bytes(), at(now))
}

#[test]
fn vectors_of_schemes_are_accepted_and_no_other_body_secret_or_algorithm_is() {
    for (scheme, secret, now, header, body) in OF_SCHEMES {
        let verdict = |secret: &str, body: &str| verdict(*scheme, secret, *now, header, body);
        assert_eq!(verdict(secret, body), Ok(()), "{header}");
        assert_eq!(verdict(secret, &body[1..]), Err(Refusal::Forged), "{header}");
        assert_eq!(verdict("another", body), Err(Refusal::Forged), "{header}");
    }
    let [.., (_, secret, now, header, body)] = OF_SCHEMES else { panic!("vectors") };
    let sha256 = Scheme::hmac_sha256("x-signature", &[Part::Body]).base64();
    assert_eq!(verdict(sha256, secret, *now, header, body), Err(Refusal::Forged));
}

/// The vector of `hook0/hook0`, `output-worker/src/work.rs`, by which Coinbase signs.
#[test]
fn scheme_of_names_and_values_of_headers_verifies_a_published_vector() {
    let scheme = Scheme::hmac_sha256(
        "x-hook0-signature",
        &[
            Part::Item("t="),
            Part::Text(".x-event-id x-event-type."),
            Part::Header("x-event-id"),
            Part::Text("."),
            Part::Header("x-event-type"),
            Part::Text("."),
            Part::Body,
        ],
    );
    let verifier = scheme.separated_by(&[',']).prefix("v1=").verifier("secret").unwrap();
    let verdict = |id: &str| {
        let signature = "t=1636936200,\
            v0=1b3d69df55f1e52f05224ba94a5162abeb17ef52cd7f4948c390f810d6a87e98,\
            h=x-event-id x-event-type,\
            v1=bc521546ba5de381b12f135782d2008b028c3065c191760b12b76850a8fc8f51";
        let request = Request::post("/").header("x-hook0-signature", signature);
        let request =
            request.header("x-event-id", id).header("x-event-type", "service.resource.verb");
        let (head, ()) = request.body(()).unwrap().into_parts();
        verifier.verify(&head, b"hello !", at(1_636_936_200))
    };
    assert_eq!(verdict("1a01cb48-5142-4d9b-8f90-d20cca61f0ee"), Ok(()));
    assert_eq!(verdict("1a01cb48-5142-4d9b-8f90-d20cca61f0ef"), Err(Refusal::Forged));
}

/// A code holds with the time before it only: with another one, who has captured a delivery could send it for ever.
#[test]
fn each_of_several_times_is_signed_by_the_codes_that_follow_it() {
    const NOW: i64 = 1_795_900_495;
    const CODE: &str = "v1=0ba2f4b1042efb83915fc89757a118afd145ac12af1b2459c47c87b58fb7ad93";
    // Of the time 1795900000, which is too old.
    const OLD: &str = "v1=940d4303d7476049dd40de79cef4fdde5f1ac1e393289e2efe551693c9df0cad";
    const MALFORMED: Result<(), Refusal> = Err(Refusal::Malformed("x-signature"));
    const FORGED: Result<(), Refusal> = Err(Refusal::Forged);
    let four = format!("t={NOW},v1=00,t={NOW},t={NOW},v1=zz,t={NOW},{CODE}");
    for (header, expected) in [
        (format!("t={NOW},{CODE}"), Ok(())),
        // With one time, the order does not matter.
        (format!("{CODE},t={NOW}"), Ok(())),
        (format!("t={NOW},{CODE} t={NOW},v1=00"), Ok(())),
        (format!("t={NOW},v1=00,{CODE} t={NOW},v1=00"), Ok(())),
        (format!("t=1795900000,{OLD} t={NOW},{CODE}"), Ok(())),
        (format!("t={NOW},v1=00 t=1795900000,{OLD}"), FORGED),
        (format!("t={NOW} t=1795900000,{OLD}"), FORGED),
        (format!("t=1795900000,{OLD} t={NOW}"), FORGED),
        (format!("t={NOW},{OLD} t={NOW},{OLD}"), FORGED),
        (format!("t=1795900000,{CODE} t={NOW},{OLD}"), FORGED),
        (format!("{CODE} t={NOW} t={NOW}"), FORGED),
        (format!("t=1795900000,{OLD} t=1795900000,{OLD}"), Err(Refusal::OutOfTime)),
        (format!("t={NOW},{CODE} t=,v1=00"), MALFORMED),
        (format!("t={NOW},{CODE} t=now"), MALFORMED),
        (CODE.to_owned(), MALFORMED),
        // Each time hashes the body again.
        (four.clone(), Ok(())),
        (format!("t={NOW},{four}"), MALFORMED),
    ] {
        let body = r#"{"id":"e1"}"#;
        assert_eq!(verdict(PAIRS, SECRET, NOW, &header, body), expected, "{header}");
    }
    // Eight signatures of Ed25519 are tried, whatever the times are.
    let scheme =
        Scheme::ed25519("x-signature", &[Part::Item("t="), Part::Body]).separated_by(&[',']);
    let [public, private] = test_secrets(Some(scheme));
    let signed = scheme.sign(private, None, at(NOW), unsigned("body")).unwrap();
    let code = signed.headers()["x-signature"].to_str().unwrap().split_once(',').unwrap().1;
    let other = "00".repeat(64);
    for (before, times, expected) in
        [(7, 1, Ok(())), (8, 1, FORGED), (3, 2, Ok(())), (4, 2, FORGED), (2, 4, FORGED)]
    {
        let header = [&*format!("t={NOW},"); 4][..times].concat();
        let header = header + &format!("{other},").repeat(before) + code;
        assert_eq!(verdict(scheme, public, NOW, &header, "body"), expected, "{before}, {times}");
    }
}

/// What is wrong, the headers, and the reason.
type Refused<'a> = (&'a str, &'a [(&'static str, &'a str)], Refusal);

/// Each is 401, with its reason in the log, and leaves no key.
#[tokio::test]
async fn bad_input_is_refused_with_its_reason_and_leaves_no_key() {
    const OTHER: Refusal = Refusal::Malformed("x-shop-algorithm");
    const GUARDED: Scheme = Scheme::hmac_sha256(
        "x-shop-signature",
        &[
            Part::Fixed("x-shop-algorithm", "HMAC-SHA256"),
            Part::Header("x-shop-id"),
            Part::Text("."),
            Part::Seconds("x-shop-time"),
            Part::Body,
        ],
    )
    .prefix("sha256=");
    let (log, _guard) = Log::of_this_thread();
    let store = std::sync::Arc::new(MemoryAdapter::new());
    let verify = VerifyLayer::new(GUARDED.verifier(SECRET).unwrap()).named("shop");
    let dedup = DedupLayer::new(key::header("x-shop-id").namespace("shop"), store.clone());
    let layers = (verify, dedup.require_verified());
    let app = axum::Router::new().route("/hook", post(async || "done").layer(layers));
    let send = async |headers: &[(&'static str, &str)]| {
        let mut request = Request::post("/hook").body(Body::from("body")).unwrap();
        for (name, value) in headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            request.headers_mut().append(HeaderName::from_static(name), value);
        }
        app.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let [now, long_ago, in_ms] = [now, now - 301, now * 1_000].map(|time| time.to_string());
    let (id, time) = (("x-shop-id", "e1"), ("x-shop-time", &*now));
    let valid = shop_code(SECRET, time.1, "body");
    let code = ("x-shop-signature", &*valid);
    let millis = shop_code(SECRET, &in_ms, "body");
    let old = shop_code(SECRET, &long_ago, "body");
    let sha1 = valid.replace("sha256=", "sha1=");
    let (another, upper) = (shop_code("another", time.1, "body"), valid.replace("=", "=x"));
    let cases: &[Refused<'_>] = &[
        ("no header", &[id, time], Refusal::Missing("x-shop-signature")),
        ("no time", &[id, code], Refusal::Missing("x-shop-time")),
        ("no id", &[time, code], Refusal::Missing("x-shop-id")),
        ("the code twice", &[id, time, code, code], Refusal::Malformed("x-shop-signature")),
        ("the id twice", &[id, ("x-shop-id", "e2"), time, code], Refusal::Malformed("x-shop-id")),
        ("the time twice", &[id, time, time, code], Refusal::Malformed("x-shop-time")),
        (
            "milliseconds",
            &[id, ("x-shop-time", &in_ms), ("x-shop-signature", &millis)],
            Refusal::OutOfTime,
        ),
        (
            "an old time",
            &[id, ("x-shop-time", &long_ago), ("x-shop-signature", &old)],
            Refusal::OutOfTime,
        ),
        ("no number", &[id, ("x-shop-time", "now"), code], Refusal::Malformed("x-shop-time")),
        (
            "the least number",
            &[id, ("x-shop-time", "-9223372036854775808"), code],
            Refusal::OutOfTime,
        ),
        (
            "too many digits",
            &[id, ("x-shop-time", "99999999999999999999"), code],
            Refusal::Malformed("x-shop-time"),
        ),
        ("not ASCII", &[id, ("x-shop-time", "é"), code], Refusal::Malformed("x-shop-time")),
        ("another algorithm's prefix", &[id, time, ("x-shop-signature", &sha1)], Refusal::Forged),
        ("another algorithm's header", &[("x-shop-algorithm", "none"), id, time, code], OTHER),
        ("another key", &[id, time, ("x-shop-signature", &another)], Refusal::Forged),
        ("no code", &[id, time, ("x-shop-signature", "sha256=")], Refusal::Forged),
        ("no hexadecimal", &[id, time, ("x-shop-signature", &upper)], Refusal::Forged),
        ("an empty header", &[id, time, ("x-shop-signature", "")], Refusal::Forged),
    ];
    for (name, headers, refusal) in cases {
        assert_eq!(send(headers).await, 401, "{name}");
        let record = log.last("not verified");
        assert_eq!(
            (&*record["preset"], &*record["reason"]),
            ("shop", &*refusal.to_string()),
            "{name}"
        );
    }
    assert_eq!(log.all("not verified").len(), cases.len());
    assert_eq!(store.stats().await.unwrap().rows, 0);
    assert_eq!(send(&[id, time, code, ("x-shop-algorithm", "HMAC-SHA256")]).await, 200);
    assert_eq!(store.stats().await.unwrap().rows, 1);
}

#[test]
fn invalid_scheme_or_secret_is_an_error_that_shows_no_secret() {
    const BODY: &[Part] = &[Part::Body];
    const NAME: &str = "a header has a valid name";
    let scheme = |header, text| Scheme::hmac_sha256(header, text);
    for (scheme, rule) in [
        (scheme("", BODY), NAME),
        (scheme("x signature", BODY), NAME),
        (scheme("x", &[Part::Header(""), Part::Body]), NAME),
        (scheme("x", &[Part::Fixed("a:b", "c"), Part::Body]), NAME),
        (Scheme::token(""), NAME),
        (scheme("x", &[]), "the text has the body"),
        (scheme("x", &[Part::Seconds("y")]), "the text has the body"),
        (
            scheme("x", &[Part::Seconds("y"), Part::Millis("z"), Part::Body]),
            "the text has one time at most",
        ),
        (
            scheme("x", &[Part::Item("t="), Part::Body]),
            "a header with a time and a code is separated",
        ),
        (
            scheme("x", &[Part::ItemMillis("t="), Part::Body]),
            "a header with a time and a code is separated",
        ),
        (
            scheme("x", &[Part::ItemMillis("t="), Part::Item("s="), Part::Body]),
            "the text has one time at most",
        ),
    ] {
        let error = scheme.verifier("secret").unwrap_err();
        assert!(matches!(error, VerifierError::InvalidScheme(of) if of == rule));
        assert!(scheme.sign("secret", None, at(NOW), unsigned("")).is_err());
        assert!(error.to_string().contains(rule) && !error.to_string().contains("secret"));
    }
    let base64 = scheme("x", BODY).base64_secret();
    for (scheme, secret, is_empty) in [
        (SHOP, "", true),
        (SHOP, "secret\n", false),
        (base64, "s3cr3t", false),
        (scheme("x", BODY).hex_secret(), "s3cr3t", false),
        (Scheme::ed25519("x", BODY), "d75a98", false),
        (Scheme::ed25519("x", BODY), "s3cr3t", false),
        (Scheme::token("authorization"), "", true),
    ] {
        let error = scheme.verifier(secret).unwrap_err();
        assert_eq!(error == VerifierError::EmptySecret, is_empty, "{error}");
        assert!(secret.is_empty() || !error.to_string().contains(secret), "{error}");
        assert!(SHOP.verifier("a").unwrap().or_secret("").is_err());
    }
}

/// The signature and the keys are those of Svix's own test.
#[test]
fn standard_webhooks_verifies_both_kinds_in_one_header() {
    const PUBLIC: &str = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=";
    const PRIVATE: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
    const SHARED: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const V1: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
    const V1A: &str = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==";
    const BODY: &str = r#"{"test": 2432232314}"#;
    let now = at(1_614_265_330);
    let other = provider::STANDARD_WEBHOOKS.scheme().unwrap();
    let other = other.sign("whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=", None, now, {
        let request = Request::post("/").header("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek");
        request.body(Bytes::from(BODY)).unwrap()
    });
    let other = other.unwrap().headers()["webhook-signature"].to_str().unwrap().to_owned();
    for (sender, family) in [(provider::STANDARD_WEBHOOKS, "webhook"), (provider::SVIX, "svix")] {
        let verdict = |secrets: &[&str], signatures: &str| {
            let mut verifier = sender.verifier(secrets[0]).unwrap();
            for secret in &secrets[1..] {
                verifier = verifier.or_secret(secret).unwrap();
            }
            let request = Request::post("/")
                .header(format!("{family}-id"), "msg_p5jXN8AQM9LWM0D4loKWxJek")
                .header(format!("{family}-timestamp"), "1614265330")
                .header(format!("{family}-signature"), signatures);
            let (head, ()) = request.body(()).unwrap().into_parts();
            verifier.verify(&head, BODY.as_bytes(), now)
        };
        let (both, unknown) = (format!("{V1A} {V1}"), Err(Refusal::Forged));
        let nine = [&*other; 8].join(" ") + " " + V1A;
        for (secrets, signatures, expected) in [
            (&[PUBLIC][..], V1A, Ok(())),
            (&[PUBLIC], &both, Ok(())),
            (&[SHARED], &both, Ok(())),
            (&[PUBLIC, SHARED], V1, Ok(())),
            (&[SHARED, PUBLIC], V1A, Ok(())),
            (&[PUBLIC], &format!("{other} {V1A}"), Ok(())),
            (&[PUBLIC], V1, unknown),
            (&[SHARED], V1A, unknown),
            (&[PUBLIC], &other, unknown),
            // The code of one kind as one of the other.
            (&[PUBLIC], &V1A.replace("v1a", "v1"), unknown),
            (&[SHARED], &V1.replace("v1", "v1a"), unknown),
            (&[PUBLIC], "v1a,", unknown),
            (&[PUBLIC], &V1A[..40], unknown),
            // Each signature hashes the body again.
            (&[PUBLIC], &nine, unknown),
        ] {
            assert_eq!(verdict(secrets, signatures), expected, "{secrets:?} {signatures}");
        }
        let request =
            Request::post("/").header(format!("{family}-id"), "msg_p5jXN8AQM9LWM0D4loKWxJek");
        let request = request.body(Bytes::from(BODY)).unwrap();
        let signed = sender.scheme().unwrap().sign(PRIVATE, None, now, request).unwrap();
        assert_eq!(signed.headers()[&*format!("{family}-signature")], V1A);
        for malformed in ["whpk_", "whpk_AAAA", "whpk_!"] {
            assert!(sender.verifier(malformed).is_err(), "{malformed}");
        }
        // Supabase shows its secrets so.
        assert!(sender.verifier(format!("v1,{SHARED}")).is_ok());
    }
}
