//! [`Scheme::sign`]: signs requests, for tests.

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderValue, Request};
use serde_json::Value;
use sha1::Sha1;

use super::error::VerifierError;
use super::public_url::{PublicUrl, target};
use super::received::{HmacSha256, Received, mac};
use super::scheme::Scheme;
use super::schemes::{adyen, url, webhooks};
use super::time;
use super::verifier::unix;
use crate::error::BoxError;

/// A pair of keys for SendGrid, made for tests.
const PUBLIC_KEY: &str = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEu5xywnLmdP135pgu4+Dc2H5LxIKJ9mfI/yUcDPuw\
                          7yzWLtSakZA8TdMXds5+v2yDLy+3LTNtYVC4Nyf6Qdh+JQ==";
const PRIVATE_KEY: &str = "e2acd3efd495d6cdef46bc897e6ed2d6ac305f0b76d7b5fb7cf8acf8f0efb89b";

impl Scheme {
    /// Returns a secret for the verifier and one for [`sign`](Self::sign). They are the same but for
    /// SendGrid, which has a pair of keys.
    #[doc(hidden)]
    #[must_use]
    pub fn test_secrets(self) -> [&'static str; 2] {
        match self {
            Self::StandardWebhooks | Self::Svix => ["whsec_YSBzZWNyZXQgZm9yIHRlc3Rz"; 2],
            Self::Adyen => ["6120736563726574"; 2],
            Self::SendGrid => [PUBLIC_KEY, PRIVATE_KEY],
            _ => ["a_secret_for_tests"; 2],
        }
    }

    /// Signs a request as the sender does: sets the headers with time and signature. Adyen's signature
    /// is in the body.
    ///
    /// `public_url` is the one of [`verifier_at`](Self::verifier_at). Where the id in a header is
    /// signed, the request must have that header.
    ///
    /// # Errors
    ///
    /// If the secret, the URL or the body is malformed, or a header is missing.
    #[doc(hidden)]
    pub fn sign(
        self,
        secret: &str,
        public_url: Option<&str>,
        now: SystemTime,
        request: Request<Bytes>,
    ) -> Result<Request<Bytes>, BoxError> {
        let url = public_url.map(PublicUrl::parse).transpose()?;
        let key = if self == Self::SendGrid { Vec::new() } else { self.key(secret)? };
        let (head, body) = request.into_parts();
        let mut signing = Signing { head, body, key, now: unix(now) };
        signing.sign(self, secret, url.as_ref())?;
        Ok(Request::from_parts(signing.head, signing.body))
    }
}

struct Signing {
    head: Parts,
    body: Bytes,
    key: Vec<u8>,
    now: i64,
}

impl Signing {
    fn sign(
        &mut self,
        scheme: Scheme,
        secret: &str,
        url: Option<&PublicUrl>,
    ) -> Result<(), BoxError> {
        let [header, _] = scheme.in_words();
        let now = self.now.to_string();
        let body = self.body.clone();
        let signature = match scheme {
            Scheme::StandardWebhooks => self.webhook("webhook-id", "webhook-timestamp")?,
            Scheme::Svix => self.webhook("svix-id", "svix-timestamp")?,
            Scheme::GitHub | Scheme::Meta => format!("sha256={}", self.hex(&[&body])?),
            Scheme::Gitea => self.hex(&[&body])?,
            Scheme::CircleCi => format!("v1={}", self.hex(&[&body])?),
            Scheme::Shopify => self.base64(&[&body])?,
            Scheme::Stripe => {
                format!("t={now},v1={}", self.hex(&[now.as_bytes(), b".", &body])?)
            }
            Scheme::Paddle => {
                format!("ts={now};h1={}", self.hex(&[now.as_bytes(), b":", &body])?)
            }
            Scheme::Slack => {
                self.set("x-slack-request-timestamp", &now)?;
                format!("v0={}", self.hex(&[b"v0:", now.as_bytes(), b":", &body])?)
            }
            Scheme::Twitch => {
                let (id, time) = (self.get("twitch-eventsub-message-id")?, time::format(self.now));
                self.set("twitch-eventsub-message-timestamp", &time)?;
                format!("sha256={}", self.hex(&[id.as_bytes(), time.as_bytes(), &body])?)
            }
            Scheme::Box => {
                let time = time::format(self.now);
                self.set("box-delivery-timestamp", &time)?;
                self.base64(&[&body, time.as_bytes()])?
            }
            Scheme::Twilio => {
                let url = public(url)?.as_str().as_bytes();
                let request =
                    Received { head: &self.head, body: &body, now: 0, tolerance: 0, url: None };
                let text = url::twilio_text(&request)?;
                self.base64_by::<Hmac<Sha1>>(&[url, text.as_bytes()])?
            }
            Scheme::Square => {
                let url = [public(url)?.as_str(), target(&self.head.uri)].concat();
                self.base64(&[url.as_bytes(), &body])?
            }
            Scheme::HubSpot => {
                let time = format!("{now}000");
                self.set("x-hubspot-request-timestamp", &time)?;
                let url = [public(url)?.as_str(), target(&self.head.uri)].concat();
                let method = self.head.method.as_str().as_bytes();
                self.base64(&[method, url.as_bytes(), &body, time.as_bytes()])?
            }
            Scheme::GitLab | Scheme::Telegram => secret.to_owned(),
            Scheme::SendGrid => {
                self.set("x-twilio-email-event-webhook-timestamp", &now)?;
                ecdsa(secret, &[now.as_bytes(), &body].concat())?
            }
            Scheme::Adyen => return self.adyen(),
        };
        self.set(header, &signature)
    }

    fn webhook(&mut self, id: &'static str, time: &'static str) -> Result<String, BoxError> {
        let (id, now) = (self.get(id)?, self.now.to_string());
        self.set(time, &now)?;
        Ok(format!("v1,{}", self.base64(&webhooks::text(&id, &now, &self.body))?))
    }

    /// Signs every item of the body.
    fn adyen(&mut self) -> Result<(), BoxError> {
        let mut body: Value = serde_json::from_slice(&self.body)?;
        let list = body["notificationItems"].as_array_mut().ok_or("no notificationItems")?;
        for (item, bytes) in list.iter_mut().zip(adyen::items_of(&self.body)?) {
            let signature = self.base64(&[adyen::text(&self.head, &bytes)?.as_bytes()])?;
            item["NotificationRequestItem"]["additionalData"]["hmacSignature"] = signature.into();
        }
        self.body = serde_json::to_vec(&body)?.into();
        Ok(())
    }

    fn get(&self, name: &'static str) -> Result<String, BoxError> {
        let value = self.head.headers.get(name).ok_or(name)?;
        Ok(value.to_str()?.to_owned())
    }

    fn set(&mut self, name: &'static str, value: &str) -> Result<(), BoxError> {
        self.head.headers.insert(name, HeaderValue::from_str(value)?);
        Ok(())
    }

    fn hex(&self, parts: &[&[u8]]) -> Result<String, BoxError> {
        let mac: HmacSha256 = mac(&self.key, parts).ok_or("no key")?;
        Ok(base16ct::lower::encode_string(&mac.finalize().into_bytes()))
    }

    fn base64(&self, parts: &[&[u8]]) -> Result<String, BoxError> {
        self.base64_by::<HmacSha256>(parts)
    }

    fn base64_by<M: Mac + KeyInit>(&self, parts: &[&[u8]]) -> Result<String, BoxError> {
        let mac: M = mac(&self.key, parts).ok_or("no key")?;
        Ok(STANDARD.encode(mac.finalize().into_bytes()))
    }
}

fn public(url: Option<&PublicUrl>) -> Result<&PublicUrl, VerifierError> {
    url.ok_or(VerifierError::NoPublicUrl)
}

#[cfg(feature = "verify-ecdsa")]
fn ecdsa(private_key: &str, text: &[u8]) -> Result<String, BoxError> {
    use p256::ecdsa::signature::Signer;
    use p256::ecdsa::{Signature, SigningKey};

    let scalar = super::received::hex(private_key).ok_or("the private key is not hexadecimal")?;
    let signature: Signature = SigningKey::from_slice(&scalar)?.sign(text);
    Ok(STANDARD.encode(signature.to_der()))
}

#[cfg(not(feature = "verify-ecdsa"))]
fn ecdsa(_: &str, _: &[u8]) -> Result<String, BoxError> {
    Err(VerifierError::FeatureDisabled { feature: "verify-ecdsa" }.into())
}
