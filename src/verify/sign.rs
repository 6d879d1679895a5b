//! [`Scheme::sign`]: signs requests, for tests.

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chrono::{DateTime, SecondsFormat};
use http::request::Parts;
use http::{HeaderValue, Request};
use serde_json::Value;

use super::key::{Key, WEBHOOK_ED25519};
use super::public_url::{PublicUrl, target};
use super::received::{Received, base64, code, hex};
use super::verifier::unix;
use super::{adyen, data, twilio};
use crate::error::BoxError;
use crate::key;
use crate::provider::scheme::{Part, Proof, Scheme};

impl Scheme {
    /// Signs a request as the sender does at this time: sets the headers with time and signature.
    /// Adyen's signature is in the body. It needs the feature `testing`.
    ///
    /// For tests of a stale signature, and for programs that must not panic:
    /// [`testing::sign`](crate::testing::sign) is shorter. `secret` is the secret of the verifier;
    /// for SendGrid and Ed25519 it is the private key, as 64 hexadecimal digits or after `whsk_`.
    /// `public_url` is that of [`verifier_at`](Self::verifier_at); schemes that sign no URL ignore
    /// it.
    ///
    /// # Errors
    ///
    /// If the scheme, the secret, the URL or the body is malformed, or if a signed header is
    /// missing.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use bytes::Bytes;
    /// use http::Request;
    /// use tower_dedup::provider;
    ///
    /// let scheme = provider::STRIPE.scheme().ok_or("no scheme")?;
    /// let hour_ago = SystemTime::now() - Duration::from_secs(60 * 60);
    /// let event = Request::post("/stripe").body(Bytes::from_static(b"{}"))?;
    /// let stale = scheme.sign("whsec_test", None, hour_ago, event)?;
    /// assert!(stale.headers().contains_key("stripe-signature"));
    /// # Ok::<(), tower_dedup::BoxError>(())
    /// ```
    pub fn sign(
        &self,
        secret: &str,
        public_url: Option<&str>,
        at: SystemTime,
        request: Request<Bytes>,
    ) -> Result<Request<Bytes>, BoxError> {
        if let Some(rule) = self.fault() {
            return Err(rule.into());
        }
        let (url, now) = (public_url.map(PublicUrl::parse).transpose()?, unix(at));
        let (mut head, body) = request.into_parts();
        if self.proof == Proof::Adyen {
            let body = self.sign_items(secret, &head, &body)?;
            return Ok(Request::from_parts(head, body));
        }
        let before = self.set_time(&mut head, now)?;
        let (url, target) = (url.as_ref(), target(&head.uri));
        let of =
            Received { scheme: self, head: &head, body: &body, now, tolerance: 0, url, target };
        let signature = match self.proof {
            Proof::Token => secret.to_owned(),
            Proof::Twilio => {
                let parts = [of.public_url()?.as_str(), &twilio::text(&of)?].concat();
                STANDARD.encode(self.code(secret, parts.as_bytes())?)
            }
            _ => {
                let texts = data::texts(&of)?;
                let text = texts.first().ok_or("no text")?;
                before + &self.item(secret, &text.parts.concat())?
            }
        };
        head.headers.insert(self.header, HeaderValue::from_str(&signature)?);
        Ok(Request::from_parts(head, body))
    }

    /// Sets the header of the time. Returns what precedes the code in the header of the signature.
    fn set_time(&self, head: &mut Parts, now: i64) -> Result<String, BoxError> {
        let mut before = String::new();
        for part in self.text {
            let (header, value) = match *part {
                Part::Seconds(header) => (header, now.to_string()),
                Part::Millis(header) => (header, format!("{now}000")),
                Part::Rfc3339(header) => {
                    let time = DateTime::from_timestamp(now, 0).ok_or("no date")?;
                    (header, time.to_rfc3339_opts(SecondsFormat::Secs, true))
                }
                Part::Item(prefix) | Part::ItemMillis(prefix) => {
                    let separator = self.separators.first().ok_or("no separator")?;
                    let millis = if matches!(part, Part::ItemMillis(_)) { "000" } else { "" };
                    before = format!("{prefix}{now}{millis}{separator}");
                    (self.header, before.clone())
                }
                _ => continue,
            };
            head.headers.insert(header, HeaderValue::from_str(&value)?);
        }
        Ok(before)
    }

    /// Returns an item with the code of a text.
    fn item(&self, secret: &str, text: &[u8]) -> Result<String, BoxError> {
        let (prefix, code) = match (self.proof, secret.strip_prefix("whsk_")) {
            (Proof::P256, _) => (self.prefix, ecdsa(secret, text)?),
            (Proof::Ed25519, _) => (self.prefix, ed25519(hex(secret).as_deref(), text)?),
            (_, Some(private)) => (WEBHOOK_ED25519, ed25519(base64(private).as_deref(), text)?),
            _ => (self.prefix, self.code(secret, text)?),
        };
        let encode: fn(&[u8]) -> String =
            if self.is_base64 { |code| STANDARD.encode(code) } else { key::hex };
        Ok([prefix, &encode(&code)].concat())
    }

    /// Signs every item of the body.
    fn sign_items(&self, secret: &str, head: &Parts, bytes: &Bytes) -> Result<Bytes, BoxError> {
        let mut body: Value = serde_json::from_slice(bytes)?;
        let list = body["notificationItems"].as_array_mut().ok_or("no notificationItems")?;
        for (item, bytes) in list.iter_mut().zip(adyen::items_of(bytes)?) {
            let code = self.code(secret, adyen::text(head, &bytes)?.as_bytes())?;
            let signature = STANDARD.encode(code);
            item["NotificationRequestItem"]["additionalData"]["hmacSignature"] = signature.into();
        }
        Ok(serde_json::to_vec(&body)?.into())
    }

    fn code(&self, secret: &str, text: &[u8]) -> Result<Vec<u8>, BoxError> {
        #[cfg_attr(
            not(any(feature = "verify-ecdsa", feature = "verify-ed25519")),
            expect(irrefutable_let_patterns, reason = "there is no other kind of key")
        )]
        let Key::Shared(key) = Key::new(self, secret)? else {
            return Err("a public key signs nothing".into());
        };
        Ok(code(self.proof, &key, &[text]).ok_or("no key")?)
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
    Err(super::error::VerifierError::FeatureDisabled("verify-ecdsa").into())
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
    Err(super::error::VerifierError::FeatureDisabled("verify-ed25519").into())
}
