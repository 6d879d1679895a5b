//! [`Scheme::sign`]: signs requests, for tests.

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chrono::{DateTime, SecondsFormat};
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use http::{HeaderValue, Request};
use serde_json::Value;
use sha1::Sha1;

#[cfg(not(all(feature = "verify-ecdsa", feature = "verify-ed25519")))]
use super::error::VerifierError;
use super::key::{Key, WEBHOOK_ED25519};
use super::public_url::{PublicUrl, target};
use super::received::{HmacSha256, Received, base64, hex, mac};
use super::schemes::{adyen, data, url};
use super::verifier::unix;
use crate::error::BoxError;
use crate::provider::scheme::{Part, Proof, Scheme};

impl Scheme {
    /// Signs a request as the sender does: sets the headers with time and signature. Adyen's signature
    /// is in the body.
    ///
    /// `public_url` is the one of [`verifier_at`](Self::verifier_at). Where a header is signed, the request must have
    /// that header.
    ///
    /// # Errors
    ///
    /// If the secret, the URL or the body is malformed, or a header is missing.
    #[doc(hidden)]
    pub fn sign(
        &self,
        secret: &str,
        public_url: Option<&str>,
        now: SystemTime,
        request: Request<Bytes>,
    ) -> Result<Request<Bytes>, BoxError> {
        if let Some(rule) = self.fault() {
            return Err(rule.into());
        }
        let url = public_url.map(PublicUrl::parse).transpose()?;
        let (head, body) = request.into_parts();
        let mut signing = Signing { scheme: self, secret, head, body, url, now: unix(now) };
        let signature = match self.proof {
            Proof::Token => secret.to_owned(),
            Proof::Twilio => STANDARD.encode(signing.twilio()?),
            Proof::Adyen => {
                signing.adyen()?;
                return Ok(Request::from_parts(signing.head, signing.body));
            }
            _ => signing.item()?,
        };
        signing.set(self.header, &signature)?;
        Ok(Request::from_parts(signing.head, signing.body))
    }
}

struct Signing<'a> {
    scheme: &'a Scheme,
    secret: &'a str,
    head: Parts,
    body: Bytes,
    url: Option<PublicUrl>,
    now: i64,
}

impl Signing<'_> {
    /// Sets the header of the time. Returns the value of the header with the code.
    fn item(&mut self) -> Result<String, BoxError> {
        let scheme = self.scheme;
        let mut before = String::new();
        for part in scheme.text {
            match *part {
                Part::Seconds(header) => self.set(header, &self.now.to_string())?,
                Part::Millis(header) => self.set(header, &format!("{}000", self.now))?,
                Part::Rfc3339(header) => {
                    let time = DateTime::from_timestamp(self.now, 0).ok_or("no date")?;
                    self.set(header, &time.to_rfc3339_opts(SecondsFormat::Secs, true))?;
                }
                Part::Item(prefix) => {
                    let separator = scheme.separators.first().ok_or("no separator")?;
                    before = format!("{prefix}{}{separator}", self.now);
                    self.set(scheme.header, &before)?;
                }
                _ => {}
            }
        }
        let text = data::text(&self.received())?.parts.concat();
        let (prefix, code) = match (scheme.proof, self.secret.strip_prefix("whsk_")) {
            (Proof::P256, _) => (scheme.prefix, ecdsa(self.secret, &text)?),
            (Proof::Ed25519, _) => (scheme.prefix, ed25519(hex(self.secret).as_deref(), &text)?),
            (_, Some(private)) => (WEBHOOK_ED25519, ed25519(base64(private).as_deref(), &text)?),
            (Proof::HmacSha1, _) => (scheme.prefix, self.code::<Hmac<Sha1>>(&[&text])?),
            _ => (scheme.prefix, self.code::<HmacSha256>(&[&text])?),
        };
        let code = if scheme.is_base64 {
            STANDARD.encode(code)
        } else {
            base16ct::lower::encode_string(&code)
        };
        Ok([&*before, prefix, &code].concat())
    }

    fn twilio(&self) -> Result<Vec<u8>, BoxError> {
        let request = self.received();
        let (url, text) = (request.public_url()?, url::twilio_text(&request)?);
        self.code::<Hmac<Sha1>>(&[url.as_str().as_bytes(), text.as_bytes()])
    }

    fn received(&self) -> Received<'_> {
        let (scheme, head, url) = (self.scheme, &self.head, self.url.as_ref());
        let target = target(&head.uri);
        Received { scheme, head, body: &self.body, now: self.now, tolerance: 0, url, target }
    }

    /// Signs every item of the body.
    fn adyen(&mut self) -> Result<(), BoxError> {
        let mut body: Value = serde_json::from_slice(&self.body)?;
        let list = body["notificationItems"].as_array_mut().ok_or("no notificationItems")?;
        for (item, bytes) in list.iter_mut().zip(adyen::items_of(&self.body)?) {
            let code = self.code::<HmacSha256>(&[adyen::text(&self.head, &bytes)?.as_bytes()])?;
            let signature = STANDARD.encode(code);
            item["NotificationRequestItem"]["additionalData"]["hmacSignature"] = signature.into();
        }
        self.body = serde_json::to_vec(&body)?.into();
        Ok(())
    }

    fn set(&mut self, name: &'static str, value: &str) -> Result<(), BoxError> {
        self.head.headers.insert(name, HeaderValue::from_str(value)?);
        Ok(())
    }

    fn code<M: Mac + KeyInit>(&self, parts: &[&[u8]]) -> Result<Vec<u8>, BoxError> {
        #[cfg_attr(
            not(any(feature = "verify-ecdsa", feature = "verify-ed25519")),
            expect(irrefutable_let_patterns, reason = "there is no other kind of key")
        )]
        let Key::Shared(key) = Key::new(self.scheme, self.secret)? else {
            return Err("a public key signs nothing".into());
        };
        let mac: M = mac(&key, parts).ok_or("no key")?;
        Ok(mac.finalize().into_bytes().to_vec())
    }
}

#[cfg(feature = "verify-ecdsa")]
fn ecdsa(private_key: &str, text: &[u8]) -> Result<Vec<u8>, BoxError> {
    use p256::ecdsa::signature::Signer;
    use p256::ecdsa::{Signature, SigningKey};

    let scalar = hex(private_key).ok_or("the private key is not hexadecimal")?;
    let signature: Signature = SigningKey::from_slice(&scalar)?.sign(text);
    Ok(signature.to_der().as_bytes().to_vec())
}

#[cfg(not(feature = "verify-ecdsa"))]
fn ecdsa(_: &str, _: &[u8]) -> Result<Vec<u8>, BoxError> {
    Err(VerifierError::FeatureDisabled { feature: "verify-ecdsa" }.into())
}

/// Signs with a private key, which the public key may follow.
#[cfg(feature = "verify-ed25519")]
fn ed25519(private_key: Option<&[u8]>, text: &[u8]) -> Result<Vec<u8>, BoxError> {
    use ed25519_dalek::{Signer, SigningKey};

    let key = private_key.and_then(<[u8]>::first_chunk);
    let key = SigningKey::from_bytes(key.ok_or("the private key is malformed")?);
    Ok(key.sign(text).to_bytes().to_vec())
}

#[cfg(not(feature = "verify-ed25519"))]
fn ed25519(_: Option<&[u8]>, _: &[u8]) -> Result<Vec<u8>, BoxError> {
    Err(VerifierError::FeatureDisabled { feature: "verify-ed25519" }.into())
}
