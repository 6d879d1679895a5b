//! Signatures are verified outside the dedup layer: schemes on published vectors, and requests
//! through both layers.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "what cannot be unwrapped fails the test"
)]

mod both_layers;
mod receiver;
mod schemes;

#[path = "../../../examples/receiver/handshake.rs"]
mod handshake;
#[path = "../../../examples/receiver/secrets.rs"]
mod secrets;
#[path = "../../../examples/shared/mod.rs"]
mod shared;

use std::collections::BTreeMap;

use axum::body::Body;
use http::request::Parts;
use http::{HeaderName, Request, Uri};
use serde::Deserialize;

use self::shared::signature::{Check, Received, Refusal, Scheme};

/// Every file of vectors: the scheme, the file, and the numbers of genuine and forged cases.
const VECTORS: &[(Scheme, &str, usize, usize)] = &[
    (Scheme::StandardWebhooks, include_str!("../../payloads/standard_webhooks/vectors.json"), 6, 9),
    (Scheme::Svix, include_str!("../../payloads/svix/vectors.json"), 6, 9),
    (Scheme::GitHub, include_str!("../../payloads/github/signature_vectors.json"), 2, 1),
    (Scheme::Stripe, include_str!("../../payloads/stripe/cases.json"), 5, 2),
    (Scheme::Shopify, include_str!("../../payloads/shopify/cases.json"), 5, 0),
    (Scheme::Slack, include_str!("../../payloads/slack/cases.json"), 5, 0),
    (Scheme::Twilio, include_str!("../../payloads/twilio/cases.json"), 10, 1),
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
    /// The signed time, else the time of the request.
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

    /// Returns the request as a server sees it, with the target in origin form.
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

    /// Returns the URL without the target.
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

/// Returns the genuine cases of all schemes, and Gitea's, which are GitHub's with another header.
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

/// Returns the header with the signature.
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

/// Returns the header with the signed time.
fn time_header(scheme: Scheme) -> Option<HeaderName> {
    match scheme {
        Scheme::StandardWebhooks => Some(HeaderName::from_static("webhook-timestamp")),
        Scheme::Svix => Some(HeaderName::from_static("svix-timestamp")),
        Scheme::Stripe => Some(signature_header(scheme)),
        Scheme::Slack => Some(HeaderName::from_static("x-slack-request-timestamp")),
        Scheme::GitHub | Scheme::Gitea | Scheme::Shopify | Scheme::Twilio => None,
    }
}
