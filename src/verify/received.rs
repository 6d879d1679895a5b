//! [`Received`]: a request that a scheme verifies; the message authentication code that most
//! schemes use.

use base64::Engine;
use base64::alphabet::{STANDARD as PLAIN, URL_SAFE};
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use ctutils::CtEq;
use hmac::{Hmac, KeyInit, Mac};
use http::request::Parts;
use sha1::Sha1;
use sha2::{Sha256, Sha512};

use super::error::Refusal;
use super::public_url::PublicUrl;
use crate::provider::scheme::{Proof, Scheme};

/// A request, and what a scheme needs to verify it.
pub(super) struct Received<'a> {
    pub(super) scheme: &'a Scheme,
    pub(super) head: &'a Parts,
    /// The whole body as it arrived.
    pub(super) body: &'a [u8],
    /// The server's time, in seconds since 1970.
    pub(super) now: i64,
    /// In seconds.
    pub(super) tolerance: u64,
    /// `None` if the scheme signs no URL.
    pub(super) url: Option<&'a PublicUrl>,
    /// What follows `url` in the signed URL.
    pub(super) target: &'a str,
}

impl<'a> Received<'a> {
    pub(super) fn header(&self, name: &'static str) -> Result<&'a str, Refusal> {
        self.optional(name)?.ok_or(Refusal::Missing(name))
    }

    pub(super) fn optional(&self, name: &'static str) -> Result<Option<&'a str>, Refusal> {
        // The headers of Standard Webhooks may stand beside those of Svix or in their place.
        let (own, other) = self.scheme.twin;
        let twin = name.strip_prefix(own).filter(|_| !own.is_empty());
        let Some(twin) = twin.map(|rest| [other, rest].concat()) else {
            return self.one(name, name);
        };
        match (self.one(name, name)?, self.one(&twin, name)?) {
            // The signature covers one of them, and a service downstream may read the other.
            (Some(one), Some(other)) if one != other => Err(Refusal::Ambiguous(name)),
            (own, twin) => Ok(own.or(twin)),
        }
    }

    /// Returns the value of a header, which refusals call by `name`.
    fn one(&self, header: &str, name: &'static str) -> Result<Option<&'a str>, Refusal> {
        let mut values = self.head.headers.get_all(header).iter();
        match (values.next(), values.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => value.to_str().map(Some).map_err(|_| Refusal::Malformed(name)),
            // A service downstream may read the other value.
            (Some(_), Some(_)) => Err(Refusal::Malformed(name)),
        }
    }

    /// Checks a time in seconds since 1970.
    pub(super) fn is_within_tolerance(&self, time: i64) -> bool {
        self.now.abs_diff(time) <= self.tolerance
    }

    /// Returns the configured public URL. The verifier of a scheme that signs a URL has one.
    pub(super) fn public_url(&self) -> Result<&'a PublicUrl, Refusal> {
        self.url.ok_or(Refusal::Forged)
    }
}

/// Returns the code of these parts by the HMAC of this proof; `None` never, because HMAC takes a
/// key of any length.
pub(super) fn code(proof: Proof, key: &[u8], parts: &[&[u8]]) -> Option<Vec<u8>> {
    match proof {
        Proof::HmacSha1 | Proof::Twilio => mac::<Hmac<Sha1>>(key, parts),
        Proof::HmacSha512 => mac::<Hmac<Sha512>>(key, parts),
        _ => mac::<Hmac<Sha256>>(key, parts),
    }
}

fn mac<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Option<Vec<u8>> {
    let mut mac = <M as KeyInit>::new_from_slice(key).ok()?;
    parts.iter().for_each(|part| mac.update(part));
    Some(mac.finalize().into_bytes().to_vec())
}

/// Succeeds if any of the signatures is the code of the parts. Each is compared in constant time.
pub(super) fn signed(
    proof: Proof,
    key: &[u8],
    parts: &[&[u8]],
    signatures: impl IntoIterator<Item = Vec<u8>>,
) -> Result<(), Refusal> {
    let code = code(proof, key, parts).ok_or(Refusal::Forged)?;
    let is_code = |signature: Vec<u8>| signature.ct_eq(&code).to_bool();
    signatures.into_iter().any(is_code).then_some(()).ok_or(Refusal::Forged)
}

pub(super) fn hex(text: &str) -> Option<Vec<u8>> {
    base16ct::mixed::decode_vec(text).ok()
}

/// Decodes base64 as senders show their secrets: whole, so that one whose end was not copied is
/// refused.
pub(super) fn base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

/// Decodes a code in base64, in either alphabet of RFC 4648, with or without padding.
pub(super) fn code_in_base64(text: &str) -> Option<Vec<u8>> {
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const ENGINES: [GeneralPurpose; 2] =
        [GeneralPurpose::new(&PLAIN, LENIENT), GeneralPurpose::new(&URL_SAFE, LENIENT)];
    let [plain, url_safe] = &ENGINES;
    if text.contains(['-', '_']) { url_safe } else { plain }.decode(text).ok()
}
