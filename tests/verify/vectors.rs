//! The vectors: published by the senders and their libraries, or made by another program.
//! `tests/payloads/INDEX.md` has their origins.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Request, Uri};
use serde::Deserialize;
use tower_dedup::provider::{self, Preset};
use tower_dedup::verify::Part::{Body as BODY, Item, ItemMillis, Text};
use tower_dedup::verify::{Refusal, Scheme, Verifier};

use crate::page::row;
use support::secrets::test_secrets;

/// Every file of vectors: the sender, the file, and the numbers of genuine and forged cases.
pub(crate) const VECTORS: &[(Preset, &str, usize, usize)] = &[
    (provider::STANDARD_WEBHOOKS, include_str!("../payloads/standard_webhooks/vectors.json"), 6, 9),
    (provider::SVIX, include_str!("../payloads/svix/vectors.json"), 6, 9),
    (provider::GITHUB, include_str!("../payloads/github/signature_vectors.json"), 2, 1),
    (provider::STRIPE, include_str!("../payloads/stripe/cases.json"), 5, 2),
    (provider::SHOPIFY, include_str!("../payloads/shopify/cases.json"), 5, 0),
    (provider::SLACK, include_str!("../payloads/slack/cases.json"), 5, 0),
    (provider::TWILIO, include_str!("../payloads/twilio/cases.json"), 10, 1),
    (provider::WHATSAPP, include_str!("../payloads/github/signature_vectors.json"), 2, 1),
    (provider::CIRCLECI, include_str!("../payloads/circleci/signature_vectors.json"), 4, 1),
    (provider::SQUARE, include_str!("../payloads/square/signature_vectors.json"), 3, 4),
    (provider::PADDLE, include_str!("../payloads/paddle/signature_vectors.json"), 2, 7),
    (provider::ADYEN, include_str!("../payloads/adyen/signature_vectors.json"), 5, 8),
    (provider::TWITCH, include_str!("../payloads/twitch/signature_vectors.json"), 2, 3),
    (provider::SENDGRID, include_str!("../payloads/sendgrid/signature_vector.json"), 1, 0),
    (provider::HUBSPOT, include_str!("../payloads/hubspot/signature_vectors.json"), 4, 1),
    (provider::DISCORD, include_str!("../payloads/discord/signature_vectors.json"), 3, 3),
    (provider::BOX, include_str!("../payloads/box/signature_vectors.json"), 2, 3),
    (provider::MESSENGER, include_str!("../payloads/github/signature_vectors.json"), 2, 1),
    (provider::LINE, include_str!("../payloads/line/signature_vectors.json"), 3, 1),
    (provider::ZOOM, include_str!("../payloads/zoom/signature_vectors.json"), 2, 3),
    (provider::QUICKBOOKS, include_str!("../payloads/quickbooks/signature_vectors.json"), 2, 1),
    (provider::XERO, include_str!("../payloads/xero/signature_vectors.json"), 2, 2),
    (provider::RAZORPAY, include_str!("../payloads/razorpay/signature_vectors.json"), 2, 1),
    (provider::MOLLIE, include_str!("../payloads/mollie/signature_vectors.json"), 2, 2),
    (provider::GOCARDLESS, include_str!("../payloads/gocardless/signature_vectors.json"), 2, 1),
    (provider::NOTION, include_str!("../payloads/notion/signature_vectors.json"), 2, 2),
    (provider::INTERCOM, include_str!("../payloads/intercom/signature_vectors.json"), 2, 2),
    (provider::WORKOS, include_str!("../payloads/workos/signature_vectors.json"), 3, 4),
];

const IN_MILLIS: &[tower_dedup::verify::Part] = &[ItemMillis("t="), Text("."), BODY];
const IN_SECONDS: &[tower_dedup::verify::Part] = &[Item("t="), Text("."), BODY];
/// Sanity.
const URL_SAFE: Scheme =
    Scheme::hmac_sha256("x-signature", IN_MILLIS).separated_by(&[',']).prefix("v1=").base64();
/// `WorkOS`.
const MILLIS: Scheme =
    Scheme::hmac_sha256("x-signature", IN_MILLIS).separated_by(&[',', ' ']).prefix("v1=");
/// Persona, while its secret changes.
pub(crate) const PAIRS: Scheme =
    Scheme::hmac_sha256("x-signature", IN_SECONDS).separated_by(&[',', ' ']).prefix("v1=");
/// Paystack.
const SHA512: Scheme = Scheme::hmac_sha512("x-signature", &[BODY]);

/// The scheme, a secret, the time, the header and the body of genuine requests. Those of Sanity are in the tests of
/// `sanity-io/webhook-toolkit`, the first by SHA-512 in RFC 4231, section 4.3; `openssl dgst` has made the others.
pub(crate) const OF_SCHEMES: &[(Scheme, &str, i64, &str, &str)] = &[
    (
        URL_SAFE,
        "test",
        1_633_519_811,
        "t=1633519811129,v1=tLa470fx7qkLLEcMOcEUFuBbRSkGujyskxrNXcoh0N0",
        r#"{"_id":"resume"}"#,
    ),
    (
        URL_SAFE,
        "try-me",
        1_633_518_820,
        "t=1633518820676,v1=e7C9h2sfbFfc4V7TEz7PSOp4IoNzl0UdVsBV-1wgdeA",
        r#"{"title":"GROQ-Hooks are neat"}"#,
    ),
    (
        URL_SAFE,
        "try-me",
        1_633_518_820,
        "t=1633518820676,v1=e7C9h2sfbFfc4V7TEz7PSOp4IoNzl0UdVsBV+1wgdeA=",
        r#"{"title":"GROQ-Hooks are neat"}"#,
    ),
    (
        MILLIS,
        "a_secret_for_tests",
        1_795_900_495,
        "t=1795900495123, v1=c1f7a9859fe86f71b3054490528dc0676b9703e03e9f9a42a3d3ea3d243b3143",
        r#"{"id":"e1"}"#,
    ),
    (
        PAIRS,
        "a_secret_for_tests",
        1_795_900_495,
        "t=1795900495,v1=279747329613a48bae904d77dd3d9a4fa8f345bc4fb665cbd888fe7e377ba299 \
         t=1795900495,v1=0ba2f4b1042efb83915fc89757a118afd145ac12af1b2459c47c87b58fb7ad93",
        r#"{"id":"e1"}"#,
    ),
    (
        PAIRS,
        "the_previous_secret",
        1_795_900_495,
        "t=1795900495,v1=279747329613a48bae904d77dd3d9a4fa8f345bc4fb665cbd888fe7e377ba299 \
         t=1795900495,v1=0ba2f4b1042efb83915fc89757a118afd145ac12af1b2459c47c87b58fb7ad93",
        r#"{"id":"e1"}"#,
    ),
    (
        SHA512,
        "Jefe",
        0,
        "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea250554\
         9758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737",
        "what do ya want for nothing?",
    ),
    (
        SHA512.base64(),
        "a_secret_for_tests",
        0,
        "xyHBtuA+CyfWC4tpG1WY7kN7uywjhjTw3LhTTEuN86J+w1sQ+IzyWaa+Ojr9M7fzZjbzqzLhk1yozHgRQTQvTA==",
        r#"{"id":"e1"}"#,
    ),
    (
        SHA512.base64(),
        "a_secret_for_tests",
        0,
        "xyHBtuA-CyfWC4tpG1WY7kN7uywjhjTw3LhTTEuN86J-w1sQ-IzyWaa-Ojr9M7fzZjbzqzLhk1yozHgRQTQvTA",
        r#"{"id":"e1"}"#,
    ),
];

#[derive(Deserialize, Clone)]
pub(crate) struct Case {
    #[serde(default)]
    pub(crate) name: String,
    #[serde(alias = "signing_secret", alias = "auth_token", alias = "public_key_der_base64")]
    pub(crate) secret: String,
    #[serde(default = "post_method")]
    pub(crate) method: String,
    #[serde(default = "hook")]
    pub(crate) url: String,
    /// The signed time, else the time of the request.
    pub(crate) now_unix: Option<i64>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body_utf8: String,
    /// Why the request is refused, if it is forged.
    pub(crate) refused: Option<String>,
}

fn post_method() -> String {
    "POST".to_owned()
}

fn hook() -> String {
    "https://example.com/hook".to_owned()
}

impl Case {
    pub(crate) fn now(&self) -> i64 {
        let of = |name| Some(self.headers.get(name)?.parse().unwrap());
        let slack = || of("X-Slack-Request-Timestamp");
        let sendgrid = || of("X-Twilio-Email-Event-Webhook-Timestamp");
        self.now_unix.or_else(slack).or_else(sendgrid).unwrap_or(0)
    }

    /// Returns the request as a server sees it, with the target in origin form.
    pub(crate) fn request(&self) -> Request<Body> {
        let url: Uri = self.url.parse().unwrap();
        let target = url.path_and_query().unwrap().as_str();
        let mut request = Request::builder().method(self.method.as_str()).uri(target);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.body(Body::from(self.body_utf8.clone())).unwrap()
    }

    pub(crate) fn head(&self) -> Parts {
        self.request().into_parts().0
    }

    /// Returns the URL without the target.
    pub(crate) fn public_url(&self) -> String {
        let url: Uri = self.url.parse().unwrap();
        format!("{}://{}", url.scheme_str().unwrap(), url.authority().unwrap())
    }

    pub(crate) fn verifier(&self, sender: Preset) -> Verifier {
        sender.verifier_at(&self.public_url(), &self.secret).unwrap()
    }

    pub(crate) fn with_another_secret(&self) -> Self {
        let mut other = self.clone();
        if self.secret.len() == 124 {
            // The public key of another pair: a changed letter is no key.
            other.secret = test_secrets(provider::SENDGRID.scheme())[0].to_owned();
            return other;
        }
        if self.headers.contains_key("X-Signature-Ed25519") {
            other.secret = test_secrets(provider::DISCORD.scheme())[0].to_owned();
            return other;
        }
        let at = self.secret.len() - 3;
        let letter = if other.secret[at..].starts_with('7') { "8" } else { "7" };
        other.secret.replace_range(at..=at, letter);
        other
    }

    pub(crate) fn verdict(&self, sender: Preset) -> Result<(), Refusal> {
        let (head, body) = (self.head(), self.body_utf8.as_bytes());
        self.verifier(sender).verify(&head, body, at(self.now()))
    }
}

/// Signs a request as the sender does, for the server at this URL.
pub(crate) fn signed_by(
    sender: Preset,
    secret: &str,
    public_url: &str,
    now: SystemTime,
    request: Request<Bytes>,
) -> Request<Bytes> {
    sender.scheme().unwrap().sign(secret, Some(public_url), now, request).unwrap()
}

/// Returns the time that many seconds after 1970, or before.
pub(crate) fn at(seconds: i64) -> SystemTime {
    let distance = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

pub(crate) fn cases(json: &str) -> Vec<Case> {
    // SendGrid's vector is one case.
    if json.starts_with('{') {
        return vec![serde_json::from_str(json).unwrap()];
    }
    serde_json::from_str(json).unwrap()
}

pub(crate) fn case(sender: Preset, name: &str) -> Case {
    let (_, json, ..) = VECTORS.iter().find(|(of, ..)| *of == sender).unwrap();
    cases(json).into_iter().find(|case| case.name == name).expect("a case of this name")
}

/// Returns the genuine cases of all schemes, and Gitea's, which are GitHub's with another header.
pub(crate) fn genuine() -> Vec<(Preset, Case)> {
    let mut genuine = Vec::new();
    for (sender, json, ..) in VECTORS {
        genuine.extend(
            cases(json).into_iter().filter(|c| c.refused.is_none()).map(|case| (*sender, case)),
        );
    }
    let is_github = |(sender, _): &&(Preset, Case)| *sender == provider::GITHUB;
    let gitea: Vec<_> = genuine.iter().filter(is_github).cloned().collect();
    for (_, mut case) in gitea {
        let signature = case.headers.remove("X-Hub-Signature-256").unwrap();
        let signature = signature.strip_prefix("sha256=").unwrap().to_owned();
        case.headers.insert("X-Gitea-Signature".to_owned(), signature);
        genuine.push((provider::GITEA, case));
    }
    genuine
}

/// Returns the senders with a known scheme.
pub(crate) fn senders() -> Vec<Preset> {
    provider::ALL.iter().copied().filter(|preset| preset.scheme().is_some()).collect()
}

/// Returns `true` if a signed time limits how long a captured delivery of this sender can be sent again.
pub(crate) fn signs_time(sender: &Preset) -> bool {
    let scheme = format!("{:?}", sender.scheme());
    ["Seconds(", "Millis(", "Rfc3339(", "Item("].iter().any(|part| scheme.contains(part))
}

/// Returns the header with the signature.
pub(crate) fn signature_header(sender: Preset) -> HeaderName {
    HeaderName::from_static(row(sender)[1].trim_matches('`'))
}
