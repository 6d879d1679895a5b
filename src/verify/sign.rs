//! [`Preset::sign`]: signs requests, for tests.

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

use super::error::VerifierError;
use super::public_url::{PublicUrl, targets};
use super::received::{HmacSha256, Received, mac};
use super::schemes::{adyen, data, url};
use super::secret::key_of;
use super::verifier::unix;
use crate::error::BoxError;
use crate::provider::{Codes, Part, Preset, Proof, Secret};

/// A pair of keys for SendGrid, made for tests.
const PUBLIC_KEY: &str = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEu5xywnLmdP135pgu4+Dc2H5LxIKJ9mfI/yUcDPuw\
                          7yzWLtSakZA8TdMXds5+v2yDLy+3LTNtYVC4Nyf6Qdh+JQ==";
const PRIVATE_KEY: &str = "e2acd3efd495d6cdef46bc897e6ed2d6ac305f0b76d7b5fb7cf8acf8f0efb89b";

impl Preset {
    /// Returns a secret for the verifier and one for [`sign`](Self::sign). They are the same but for
    /// SendGrid, which has a pair of keys.
    #[doc(hidden)]
    #[must_use]
    pub fn test_secrets(&self) -> [&'static str; 2] {
        match self.scheme.map(|scheme| scheme.secret) {
            Some(Secret::Webhook) => ["whsec_YSBzZWNyZXQgZm9yIHRlc3Rz"; 2],
            Some(Secret::Hex) => ["6120736563726574"; 2],
            Some(Secret::PublicKey) => [PUBLIC_KEY, PRIVATE_KEY],
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
    /// If there is no scheme, if the secret, the URL or the body is malformed, or a header is missing.
    #[doc(hidden)]
    pub fn sign(
        &self,
        secret: &str,
        public_url: Option<&str>,
        now: SystemTime,
        request: Request<Bytes>,
    ) -> Result<Request<Bytes>, BoxError> {
        let scheme = self.scheme.ok_or(VerifierError::NoScheme { preset: self.name() })?;
        let url = public_url.map(PublicUrl::parse).transpose()?;
        let key = match scheme.secret {
            Secret::PublicKey => Vec::new(),
            form => key_of(form, secret)?,
        };
        let (head, body) = request.into_parts();
        let mut signing = Signing { head, body, key, url, now: unix(now) };
        let signature = match scheme.proof {
            Proof::Signed(codes, parts) => {
                let (before, text) = signing.text(scheme.header, codes, parts)?;
                let code = match scheme.secret {
                    Secret::PublicKey => ecdsa(secret, &text)?,
                    _ => signing.code::<HmacSha256>(&[&text])?,
                };
                let code = if codes.is_base64 {
                    STANDARD.encode(code)
                } else {
                    base16ct::lower::encode_string(&code)
                };
                format!("{before}{}{code}", codes.prefix)
            }
            Proof::Token => secret.to_owned(),
            Proof::HubSpot => STANDARD.encode(signing.hubspot()?),
            Proof::Twilio => STANDARD.encode(signing.twilio()?),
            Proof::Adyen => {
                signing.adyen()?;
                return Ok(Request::from_parts(signing.head, signing.body));
            }
        };
        signing.set(scheme.header, &signature)?;
        Ok(Request::from_parts(signing.head, signing.body))
    }
}

struct Signing {
    head: Parts,
    body: Bytes,
    key: Vec<u8>,
    url: Option<PublicUrl>,
    now: i64,
}

impl Signing {
    /// Sets the header of the time. Returns the items before the code in the header, and the signed text.
    fn text(
        &mut self,
        header: &'static str,
        codes: Codes,
        parts: &[Part],
    ) -> Result<(String, Vec<u8>), BoxError> {
        let mut before = String::new();
        for part in parts {
            match *part {
                Part::Seconds(header) => self.set(header, &self.now.to_string())?,
                Part::Rfc3339(header) => {
                    let time = DateTime::from_timestamp(self.now, 0).ok_or("no date")?;
                    self.set(header, &time.to_rfc3339_opts(SecondsFormat::Secs, true))?;
                }
                Part::Item(prefix) => {
                    before = format!("{prefix}{}{}", self.now, codes.separators[0]);
                    self.set(header, &before)?;
                }
                _ => {}
            }
        }
        let text = data::text(header, codes, parts, &self.received())?.parts.concat();
        Ok((before, text))
    }

    fn hubspot(&mut self) -> Result<Vec<u8>, BoxError> {
        let time = format!("{}000", self.now);
        self.set("x-hubspot-request-timestamp", &time)?;
        let request = self.received();
        let url = [request.public_url()?.as_str(), request.target].concat();
        let method = self.head.method.as_str().as_bytes();
        self.code::<HmacSha256>(&[method, url.as_bytes(), &self.body, time.as_bytes()])
    }

    fn twilio(&self) -> Result<Vec<u8>, BoxError> {
        let request = self.received();
        let (url, text) = (request.public_url()?, url::twilio_text(&request)?);
        self.code::<Hmac<Sha1>>(&[url.as_str().as_bytes(), text.as_bytes()])
    }

    fn received(&self) -> Received<'_> {
        let (head, body, url) = (&self.head, &self.body, self.url.as_ref());
        let target = targets(&head.uri).next().unwrap_or_default();
        Received { head, body, now: self.now, tolerance: 0, url, target }
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
        let mac: M = mac(&self.key, parts).ok_or("no key")?;
        Ok(mac.finalize().into_bytes().to_vec())
    }
}

#[cfg(feature = "verify-ecdsa")]
fn ecdsa(private_key: &str, text: &[u8]) -> Result<Vec<u8>, BoxError> {
    use p256::ecdsa::signature::Signer;
    use p256::ecdsa::{Signature, SigningKey};

    let scalar = super::received::hex(private_key).ok_or("the private key is not hexadecimal")?;
    let signature: Signature = SigningKey::from_slice(&scalar)?.sign(text);
    Ok(signature.to_der().as_bytes().to_vec())
}

#[cfg(not(feature = "verify-ecdsa"))]
fn ecdsa(_: &str, _: &[u8]) -> Result<Vec<u8>, BoxError> {
    Err(VerifierError::FeatureDisabled { feature: "verify-ecdsa" }.into())
}
