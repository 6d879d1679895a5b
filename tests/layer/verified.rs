//! Signatures, checked outside the layer: the schemes that the examples bring, against published
//! vectors; and what becomes of a request on its way through both layers.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what cannot be unwrapped fails the test"
)]

#[path = "../../examples/receiver/handshake.rs"]
mod handshake;
#[path = "../../examples/receiver/secrets.rs"]
mod secrets;
#[path = "../../examples/shared/mod.rs"]
mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::{any, post};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use serde::Deserialize;
use sha1::Sha1;
use shared::signature::{Check, Received, Refusal, Scheme, SetupError, any_of};
use shared::verify::{Verify, VerifyLayer};
use tower::limit::ConcurrencyLimitLayer;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::{MaintenanceAdapter, MemoryAdapter};
use tower_dedup::{Dedup, DedupKey, DedupLayer, KeyExtractor, Verified, key, provider};

/// Every vector: the scheme, the file, and how many of its cases are genuine and forged.
const VECTORS: &[(Scheme, &str, usize, usize)] = &[
    (Scheme::StandardWebhooks, include_str!("../payloads/standard_webhooks/vectors.json"), 6, 9),
    (Scheme::Svix, include_str!("../payloads/svix/vectors.json"), 6, 9),
    (Scheme::GitHub, include_str!("../payloads/github/signature_vectors.json"), 2, 1),
    (Scheme::Stripe, include_str!("../payloads/stripe/cases.json"), 5, 2),
    (Scheme::Shopify, include_str!("../payloads/shopify/cases.json"), 5, 0),
    (Scheme::Slack, include_str!("../payloads/slack/cases.json"), 5, 0),
    (Scheme::Twilio, include_str!("../payloads/twilio/cases.json"), 10, 1),
];

#[derive(Deserialize, Clone)]
struct Case {
    #[serde(default)]
    name: String,
    #[serde(alias = "signing_secret", alias = "auth_token")]
    secret: String,
    #[serde(default = "post_method")]
    method: String,
    #[serde(default = "hook")]
    url: String,
    /// Where a time is signed; else that of the request.
    now_unix: Option<i64>,
    headers: BTreeMap<String, String>,
    body_utf8: String,
    #[serde(default = "yes")]
    valid: bool,
}

fn post_method() -> String {
    "POST".to_owned()
}

fn hook() -> String {
    "https://example.com/hook".to_owned()
}

fn yes() -> bool {
    true
}

impl Case {
    fn now(&self) -> i64 {
        let slack = || Some(self.headers.get("X-Slack-Request-Timestamp")?.parse().unwrap());
        self.now_unix.or_else(slack).unwrap_or(0)
    }

    /// As a server sees it: the target in origin form.
    fn request(&self) -> Request<Body> {
        let url: Uri = self.url.parse().unwrap();
        let target = url.path_and_query().unwrap().as_str();
        let mut request = Request::builder().method(self.method.as_str()).uri(target);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(Body::from(self.body_utf8.clone())).unwrap()
    }

    fn head(&self) -> Parts {
        self.request().into_parts().0
    }

    /// What comes before the target.
    fn public_url(&self) -> String {
        let url: Uri = self.url.parse().unwrap();
        format!("{}://{}", url.scheme_str().unwrap(), url.authority().unwrap())
    }

    fn check(&self, scheme: Scheme) -> Check {
        scheme.check(&self.secret, Some(&self.public_url())).unwrap()
    }

    fn with_another_secret(&self) -> Self {
        let mut other = self.clone();
        let at = self.secret.len() - 3;
        let letter = if other.secret[at..].starts_with('7') { "8" } else { "7" };
        other.secret.replace_range(at..=at, letter);
        other
    }

    fn verdict(&self, scheme: Scheme) -> Result<(), Refusal> {
        let (head, body) = (self.head(), self.body_utf8.as_bytes());
        self.check(scheme)(&Received { head: &head, body, now: self.now() })
    }
}

fn cases(json: &str) -> Vec<Case> {
    serde_json::from_str(json).unwrap()
}

fn case(scheme: Scheme, name: &str) -> Case {
    let (_, json, ..) = VECTORS.iter().find(|(of, ..)| *of == scheme).unwrap();
    cases(json).into_iter().find(|case| case.name == name).expect("a case of this name")
}

/// The genuine cases of all schemes, and Gitea's: GitHub's by another name.
fn genuine() -> Vec<(Scheme, Case)> {
    let mut genuine = Vec::new();
    for (scheme, json, ..) in VECTORS {
        genuine.extend(cases(json).into_iter().filter(|c| c.valid).map(|case| (*scheme, case)));
    }
    let is_github = |(scheme, _): &&(Scheme, Case)| *scheme == Scheme::GitHub;
    let gitea: Vec<_> = genuine.iter().filter(is_github).cloned().collect();
    for (_, mut case) in gitea {
        let signature = case.headers.remove("X-Hub-Signature-256").unwrap();
        let signature = signature.strip_prefix("sha256=").unwrap().to_owned();
        case.headers.insert("X-Gitea-Signature".to_owned(), signature);
        genuine.push((Scheme::Gitea, case));
    }
    genuine
}

/// Where a scheme has its signature.
fn signature_header(scheme: Scheme) -> HeaderName {
    HeaderName::from_static(match scheme {
        Scheme::StandardWebhooks => "webhook-signature",
        Scheme::Svix => "svix-signature",
        Scheme::GitHub => "x-hub-signature-256",
        Scheme::Gitea => "x-gitea-signature",
        Scheme::Stripe => "stripe-signature",
        Scheme::Shopify => "x-shopify-hmac-sha256",
        Scheme::Slack => "x-slack-signature",
        Scheme::Twilio => "x-twilio-signature",
    })
}

/// Where a scheme has the time that it signs.
fn time_header(scheme: Scheme) -> Option<HeaderName> {
    match scheme {
        Scheme::StandardWebhooks => Some(HeaderName::from_static("webhook-timestamp")),
        Scheme::Svix => Some(HeaderName::from_static("svix-timestamp")),
        Scheme::Stripe => Some(signature_header(scheme)),
        Scheme::Slack => Some(HeaderName::from_static("x-slack-request-timestamp")),
        Scheme::GitHub | Scheme::Gitea | Scheme::Shopify | Scheme::Twilio => None,
    }
}

// The schemes

#[test]
fn every_vector_has_its_verdict() {
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

/// A vector that is refused for another reason than its own says nothing of its own.
#[test]
fn every_forgery_is_found_for_its_own_reason() {
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
fn neither_body_nor_secret_nor_signature_can_be_another() {
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
        // Whole, or a prefix would do. Stripe's header goes on after the one that counts.
        let end = signature.find("v1=").map_or(signature.len(), |at| at + 3 + 64);
        for less in [1, 2, 4, 8, 20] {
            let prefix = with(&[&signature[..end - less]]);
            assert_eq!(refused(&prefix, body, "a prefix of the signature"), Refusal::Forged);
        }
        refused(&with(&[""]), body, "an empty signature");
    }
}

#[test]
fn a_signature_holds_for_five_minutes_before_and_after() {
    let mut timed = BTreeSet::new();
    for (scheme, case) in genuine() {
        let head = case.head();
        let check = case.check(scheme);
        let at =
            |head: &Parts, now| check(&Received { head, body: case.body_utf8.as_bytes(), now });
        let Some(header) = time_header(scheme) else {
            // Nothing says when it was signed.
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

/// The sender signs with both secrets, or with either, and the receiver has both.
#[test]
fn a_secret_can_be_changed() {
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
    // In one header: the vectors "rotation-two-signatures" and "two-v1", and the other way round.
    let mut stripe = case(Scheme::Stripe, "two-v1");
    let header = stripe.headers["Stripe-Signature"].replacen(",v1=", ",v1=00,v1=zz,v1=", 1);
    stripe.headers.insert("Stripe-Signature".to_owned(), header);
    assert_eq!(stripe.verdict(Scheme::Stripe), Ok(()));
    let two_times = stripe.headers["Stripe-Signature"].replacen("t=", "t=1753900006,t=", 1);
    stripe.headers.insert("Stripe-Signature".to_owned(), two_times);
    assert_eq!(stripe.verdict(Scheme::Stripe), Err(Refusal::Malformed("stripe-signature")));
}

/// What is verified is what any reader of the request takes for the id.
#[test]
fn svix_takes_both_families_if_they_agree() {
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

/// The guide says what these senders do not sign.
#[test]
fn unsigned_ids_can_be_changed() {
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

/// Twilio: URL and fields are signed without anything between them.
#[test]
fn twilio_knows_no_boundaries() {
    let sent = case(Scheme::Twilio, "sms-status-sent");
    let recut = |body: String| Case { body_utf8: body, ..sent.clone() };
    let moved = recut(sent.body_utf8.replace("=sent&SmsSid=", "=sentSmsSid"));
    assert_ne!(moved.body_utf8, sent.body_utf8);
    assert_eq!(moved.verdict(Scheme::Twilio), Ok(()), "one field less, and another status");
    assert_eq!(
        recut(sent.body_utf8.replace("=sent", "=failed")).verdict(Scheme::Twilio),
        Err(Refusal::Forged)
    );

    // A GET at least has no body for the end of its query to go to.
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

/// The URL is the one that is configured, whatever the request says of its host.
#[test]
fn twilio_needs_the_url_as_the_sender_knows_it() {
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
    // A proxy that takes the prefix off.
    head.uri = Uri::from_static("/sms");
    let check = Scheme::Twilio.check(&sms.secret, Some("https://example.com/twilio")).unwrap();
    assert_eq!(check(&Received { head: &head, body, now: 0 }), Ok(()));

    // Signed with the port, for which the vectors have no case.
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

// The secrets of the receiver

fn checks(
    variables: &[(&str, &str)],
    public_url: Option<&str>,
) -> Result<BTreeMap<&'static str, Check>, String> {
    let variables = variables.iter().map(|(name, secret)| ((*name).into(), (*secret).into()));
    secrets::checks(variables, public_url)
}

#[test]
fn a_receiver_knows_what_its_secrets_are_for() {
    let secrets = [
        ("PATH", "/bin"),
        ("WEBHOOK_SECRET_GITHUB", "new"),
        ("WEBHOOK_SECRET_GITHUB_PREVIOUS", "mysecret"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ];
    let found = checks(&secrets, None).unwrap();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), ["github", "standard-webhooks"]);
    let vector = cases(VECTORS[2].1).remove(1);
    let (head, body) = (vector.head(), vector.body_utf8.as_bytes());
    assert_eq!(found["github"](&Received { head: &head, body, now: 0 }), Ok(()));

    for (variable, secret, public_url, why) in [
        ("WEBHOOK_SECRET_NOBODY", "secret", None, "it knows WEBHOOK_SECRET_STANDARD_WEBHOOKS, "),
        ("WEBHOOK_SECRET_", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_github", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_GITHUB", "", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_secret!", None, "base64"),
        ("WEBHOOK_SECRET_TWILIO", "secret", None, "--public-url"),
    ] {
        let said = checks(&[(variable, secret)], public_url).err().expect(variable);
        assert!(said.contains(why) && said.contains(variable), "{said}");
        assert!(secret.is_empty() || !said.contains("secret!"), "the secret is not said: {said}");
    }
    assert_eq!(checks(&[], None).unwrap().len(), 0);
    assert!(checks(&[("WEBHOOK_SECRET_TWILIO", "x")], Some("https://example.com")).is_ok());
}

/// Every sender whose scheme is known can be given a secret.
#[test]
fn every_preset_with_a_scheme_has_its_variable() {
    let (mut with, mut without) = (0, 0);
    for preset in provider::ALL {
        let variable = preset.name().to_ascii_uppercase().replace('-', "_");
        let variable = format!("WEBHOOK_SECRET_{variable}");
        let found = checks(&[(&variable, "MfKQ9r8G")], Some("https://example.com"));
        if let Some(scheme) = Scheme::of(preset.name()) {
            with += 1;
            assert!(found.unwrap().contains_key(preset.name()), "{variable}");
            assert_eq!(scheme.check("", None).err(), Some(SetupError::EmptySecret));
        } else {
            without += 1;
            assert!(found.is_err(), "{variable}");
        }
    }
    assert!(with >= 4 && with + without == provider::ALL.len());
}

// Both layers

type Store = Arc<MemoryAdapter>;

/// What came out, and why if it is the layer's own.
type Answer = (u16, Option<String>);

type App = BoxCloneSyncService<Request<Body>, Answer, Infallible>;

fn answer<B>(response: &Response<B>) -> Answer {
    let result = response.headers().get("x-dedup-result");
    (response.status().as_u16(), result.map(|result| result.to_str().unwrap().to_owned()))
}

fn ran() -> Answer {
    (200, None)
}

fn duplicate() -> Answer {
    (200, Some("duplicate".to_owned()))
}

fn unverified() -> Answer {
    (401, None)
}

/// The two layers around a handler, and what it saw.
#[derive(Clone)]
struct Site {
    store: Store,
    bodies: Arc<Mutex<Vec<Bytes>>>,
    key: KeyExtractor,
    verify: VerifyLayer,
}

impl Site {
    fn new(key: impl Into<KeyExtractor>, check: Check) -> Self {
        Self {
            store: Arc::new(MemoryAdapter::new()),
            bodies: Arc::default(),
            key: key.into(),
            verify: VerifyLayer::new(check),
        }
    }

    fn at(mut self, clock: fn() -> i64) -> Self {
        self.verify = self.verify.clock(clock);
        self
    }

    /// Where the same events arrive at the same store, verified otherwise.
    fn verified_by(&self, verify: VerifyLayer) -> Self {
        Self { verify, ..self.clone() }
    }

    fn dedup(&self) -> DedupLayer {
        DedupLayer::new(self.key.clone(), Arc::clone(&self.store)).require_verified()
    }

    /// Around a service, without a framework; `outside` comes before `inside`.
    fn in_tower<O, I>(&self, outside: O, inside: I) -> App
    where
        I: Layer<Plain>,
        O: Layer<I::Service>,
        O::Service: Service<Request<Body>, Error = Infallible, Future: Send + 'static>
            + Clone
            + Send
            + Sync
            + 'static,
        <O::Service as Service<Request<Body>>>::Response: Answered,
    {
        let service = ServiceBuilder::new().layer(outside).layer(inside).service(self.plain());
        BoxCloneSyncService::new(service.map_response(|response| response.answer()))
    }

    /// A handler as a service.
    fn plain(&self) -> Plain {
        let bodies = Arc::clone(&self.bodies);
        BoxCloneSyncService::new(service_fn(move |request: Request<Full<Bytes>>| {
            let bodies = Arc::clone(&bodies);
            async move {
                assert!(request.extensions().get::<Verified>().is_some(), "not verified");
                let body = to_bytes(Body::new(request.into_body()), usize::MAX).await.unwrap();
                bodies.lock().unwrap().push(body);
                Ok(Response::new(Full::default()))
            }
        }))
    }

    /// A handler as the routes of an axum router.
    fn router(&self) -> Router {
        let bodies = Arc::clone(&self.bodies);
        let handler = async move |body: Bytes| bodies.lock().unwrap().push(body);
        Router::new().fallback(any(handler.clone())).route("/hook", post(handler))
    }

    /// In the documented order, without axum and with it.
    fn right(&self) -> [App; 2] {
        let router = self.router().layer(self.dedup()).layer(self.verify.clone());
        [self.in_tower(self.verify.clone(), self.dedup()), in_axum(router)]
    }

    /// The other way round.
    fn wrong(&self) -> [App; 2] {
        let router = self.router().layer(self.verify.clone()).layer(self.dedup());
        [self.in_tower(self.dedup(), self.verify.clone()), in_axum(router)]
    }

    /// How many keys the store knows, and how often the handler has run.
    async fn counts(&self) -> (u64, usize) {
        (self.store.count().await.unwrap(), self.bodies.lock().unwrap().len())
    }
}

type Plain = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

/// A response of any body.
trait Answered {
    fn answer(&self) -> Answer;
}

impl<B> Answered for Response<B> {
    fn answer(&self) -> Answer {
        answer(self)
    }
}

fn in_axum(router: Router) -> App {
    let service = ServiceBuilder::new().map_response(|response| answer(&response));
    BoxCloneSyncService::new(service.service(router))
}

async fn send(app: &App, request: Request<Body>) -> Answer {
    app.clone().oneshot(request).await.unwrap()
}

/// GitHub's own vector, as one of its deliveries.
fn github(id: &str) -> Request<Body> {
    let mut request = cases(VECTORS[2].1).remove(0).request();
    request.headers_mut().insert("x-github-delivery", HeaderValue::from_str(id).unwrap());
    request
}

fn github_check() -> Check {
    cases(VECTORS[2].1).remove(0).check(Scheme::GitHub)
}

#[tokio::test]
async fn an_unverified_request_uses_no_id_up() {
    for app in 0..2 {
        let site = Site::new(provider::GITHUB, github_check());
        let app = &site.right()[app];
        let unsigned = Request::post("/hook").header("x-github-delivery", "id-1");
        assert_eq!(send(app, unsigned.body(Body::from("forged")).unwrap()).await, unverified());
        let (head, _) = github("id-1").into_parts();
        let forged = Request::from_parts(head, Body::from("forged"));
        assert_eq!(send(app, forged).await, unverified());
        assert_eq!(site.counts().await, (0, 0));

        assert_eq!(send(app, github("id-1")).await, ran());
        assert_eq!(send(app, github("id-1")).await, duplicate());
        assert_eq!(site.counts().await, (1, 1));
        assert!(site.store.get(&DedupKey::new("github", "id-1").unwrap()).await.unwrap().is_some());
        // Nor does a forgery learn whether an id is known.
        let forged = Request::post("/hook").header("x-github-delivery", "id-1");
        assert_eq!(send(app, forged.body(Body::from("forged")).unwrap()).await, unverified());
    }
}

#[tokio::test]
async fn layers_in_the_wrong_order_are_found_out() {
    for app in 0..2 {
        let site = Site::new(provider::GITHUB, github_check());
        let app = &site.wrong()[app];
        assert_eq!(send(app, github("id-1")).await, (500, Some("unverified".to_owned())));
        assert_eq!(site.counts().await, (0, 0));
        assert_eq!(send(&site.right()[0], github("id-1")).await, ran());
    }
}

/// What the layer read, what the handler gets, and what was sent are one buffer.
#[tokio::test]
async fn the_body_is_buffered_once() {
    for app in 0..2 {
        let checked = Arc::<Mutex<Vec<usize>>>::default();
        let check: Check = {
            let checked = Arc::clone(&checked);
            Arc::new(move |request| {
                checked.lock().unwrap().push(request.body.as_ptr().addr());
                Ok(())
            })
        };
        let site = Site::new(key::header("x-id").namespace("acme"), check);
        let app = &site.right()[app];
        let deliver =
            |id: &str, body| Request::post("/hook").header("x-id", id).body(body).unwrap();

        let sent = Bytes::from(b"{\"id\": 1}\r\n\0\xff".repeat(1_000));
        assert_eq!(send(app, deliver("1", Body::from(sent.clone()))).await, ran());
        assert_eq!(*checked.lock().unwrap(), [sent.as_ptr().addr()]);
        let seen = site.bodies.lock().unwrap().pop().unwrap();
        assert_eq!((seen.as_ptr(), seen.len()), (sent.as_ptr(), sent.len()));

        // Many buffers become one, and that one goes on.
        let parts: Vec<_> = sent.chunks(100).map(|part| io::Result::Ok(part.to_vec())).collect();
        let body = Body::from_stream(stream::iter(parts));
        assert_eq!(send(app, deliver("2", body)).await, ran());
        let seen = site.bodies.lock().unwrap().pop().unwrap();
        assert_eq!(seen, sent);
        assert_eq!(checked.lock().unwrap()[1], seen.as_ptr().addr());
        assert_ne!(seen.as_ptr(), sent.as_ptr());
    }
}

/// GitHub signs no id: what was overheard runs again under another one, unless the body is an
/// identity too.
#[tokio::test]
async fn a_replay_under_a_fresh_id_is_stopped_by_the_body() {
    let by_id_or_body =
        || KeyExtractor::from(provider::GITHUB).second_identity("body", key::body_digest());
    for app in 0..2 {
        let site = Site::new(provider::GITHUB, github_check());
        let plain = &site.right()[app];
        assert_eq!(send(plain, github("id-1")).await, ran());
        assert_eq!(send(plain, github("id-2")).await, ran());
        assert_eq!(site.counts().await.1, 2);

        let site = Site::new(by_id_or_body(), github_check());
        let guarded = &site.right()[app];
        assert_eq!(send(guarded, github("id-1")).await, ran());
        assert_eq!(send(guarded, github("id-2")).await, duplicate());
        assert_eq!(site.counts().await.1, 1);
    }
}

/// A retry has the old id in a new signature, with a new time where that is signed.
#[tokio::test]
async fn a_retry_is_a_duplicate_whatever_its_signature() {
    type At = (&'static str, fn() -> i64);
    let slack = || key::json("/event_id").namespace("slack");
    let senders: [(Scheme, KeyExtractor, [At; 2]); 3] = [
        (
            Scheme::StandardWebhooks,
            provider::STANDARD_WEBHOOKS.into(),
            [
                ("official-sign-vector", || 1_614_265_330),
                ("retry-new-timestamp-same-id", || 1_614_265_630),
            ],
        ),
        (
            Scheme::Stripe,
            provider::STRIPE.into(),
            [("invoice.paid", || 1_753_900_006), ("invoice.paid-retry", || 1_753_903_606)],
        ),
        (
            Scheme::Slack,
            slack(),
            [("event_callback", || 1_531_420_700), ("event_callback-retry-1", || 1_531_420_701)],
        ),
    ];
    for (scheme, key, [(first, at), (retry, later)]) in senders {
        let (first, retry) = (case(scheme, first), case(scheme, retry));
        let header = signature_header(scheme);
        let signatures = [&first, &retry].map(|case| case.head().headers[&header].clone());
        assert_ne!(signatures[0], signatures[1], "{scheme:?}");
        for app in 0..2 {
            let site = Site::new(key.clone(), first.check(scheme)).at(at);
            assert_eq!(send(&site.right()[app], first.request()).await, ran(), "{scheme:?}");
            let site = site.at(later);
            assert_eq!(send(&site.right()[app], retry.request()).await, duplicate(), "{scheme:?}");
            assert_eq!(site.counts().await, (1, 1), "{scheme:?}");
        }
    }
}

/// A GET is verified as well: Twilio delivers by it, if told so.
#[tokio::test]
async fn a_get_is_verified() {
    let get = case(Scheme::Twilio, "sms-inbound-get");
    for app in 0..2 {
        let site = Site::new(provider::TWILIO, get.check(Scheme::Twilio));
        let app = &site.right()[app];
        let mut forged = get.request();
        *forged.uri_mut() = Uri::from_static("/twilio/sms?MessageSid=SM3");
        assert_eq!(send(app, forged).await, unverified());
        assert_eq!(send(app, get.request()).await, ran());
        assert_eq!(send(app, get.request()).await, duplicate());
        assert_eq!(site.counts().await, (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_is_not_looked_at() {
    let nobody: Check = Arc::new(|_| panic!("there is nothing to check"));
    let site = Site::new(provider::GITHUB, Arc::clone(&nobody));
    let verify = VerifyLayer::new(nobody).body_limit(10).body_timeout(Duration::from_secs(1));
    let site = site.verified_by(verify);
    let broken = || Err(io::Error::other("broken off"));
    let streamed = |parts: Vec<io::Result<Vec<u8>>>| Body::from_stream(stream::iter(parts));
    for app in 0..2 {
        let slow = Body::from_stream(stream::pending::<io::Result<Vec<u8>>>());
        for (body, status) in [
            (Body::from("eleven byte"), 413),
            (streamed(vec![Ok(vec![0; 6]), Ok(vec![0; 6])]), 413),
            (streamed(vec![Ok(vec![0; 6]), broken()]), 400),
            (slow, 408),
        ] {
            let request = Request::post("/hook").header("x-github-delivery", "id-1");
            let answer = send(&site.right()[app], request.body(body).unwrap()).await;
            assert_eq!(answer, (status, None));
        }
        assert_eq!(site.counts().await, (0, 0));
    }
}

/// The service that was asked whether it is ready is the one that is called.
#[tokio::test]
async fn the_ready_service_is_called() {
    let yes: Check = Arc::new(|_| Ok(()));
    let mut service = ServiceBuilder::new()
        .layer(VerifyLayer::new(yes))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(service_fn(async |_: Request<Full<Bytes>>| {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
    for _ in 0..3 {
        let request = Request::new(Body::empty());
        let response = tokio::time::timeout(Duration::from_secs(10), async {
            let ready = ServiceExt::<Request<Body>>::ready(&mut service).await.unwrap();
            ready.call(request).await.unwrap()
        });
        assert_eq!(response.await.expect("the limit is not used up").status(), 200);
    }
}

/// On a bare hyper server, and in a route of axum's, with both layers at once.
#[test]
fn it_fits_where_the_other_layer_does() {
    fn serves<S: Service<Request<Incoming>> + Clone + Send + 'static>(_: &S) {}
    let site = Site::new(provider::GITHUB, github_check());
    let layered: Verify<Dedup<_, _>> = site.verify.layer(site.dedup().layer(site.plain()));
    serves(&layered);
    let both = (site.verify.clone(), site.dedup());
    let _: Router = Router::new().route("/hook", post(async || "handled").layer(both));
}

// Handshakes

async fn shake(headers: &[(&'static str, &'static str)], body: &str) -> Option<(String, String)> {
    let headers = headers
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let response = handshake::answer(&headers.collect(), body.as_bytes())?;
    assert_eq!(response.status(), 200);
    let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    Some((kind, String::from_utf8(body.to_vec()).unwrap()))
}

#[tokio::test]
async fn handshakes_are_answered_as_their_senders_expect() {
    let text = |text: &str| Some(("text/plain; charset=utf-8".to_owned(), text.to_owned()));
    let slack = case(Scheme::Slack, "url_verification");
    let challenge = "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P";
    assert_eq!(shake(&[], &slack.body_utf8).await, text(challenge));

    let twitch = r#"{"challenge":"pogchamp","subscription":{"type":"channel.follow"}}"#;
    let kind = "twitch-eventsub-message-type";
    assert_eq!(shake(&[(kind, "webhook_callback_verification")], twitch).await, text("pogchamp"));
    assert_eq!(shake(&[(kind, "notification")], twitch).await, None);

    let grid = r#"[{"id":"1","data":{"validationCode":"512d38b6"}}]"#;
    let json = r#"{"validationResponse":"512d38b6"}"#;
    let kind = "aeg-event-type";
    let expected = Some(("application/json".to_owned(), json.to_owned()));
    assert_eq!(shake(&[(kind, "SubscriptionValidation")], grid).await, expected);
    assert_eq!(shake(&[(kind, "Notification")], grid).await, None);

    for body in [r#"{"type":"event_callback","challenge":"x"}"#, r#"{"challenge":"x"}"#, "x", ""] {
        assert_eq!(shake(&[], body).await, None, "{body}");
    }
}
