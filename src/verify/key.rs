//! [`Key`]: what a secret contains, in the notation of its sender.

use super::error::VerifierError;
use super::received::{base64, hex, signed};
use crate::provider::scheme::{Proof, Scheme, Secret};

/// A key that verifies.
#[derive(Clone)]
pub(super) enum Key {
    /// The key of a message authentication code, or a token.
    Shared(Box<[u8]>),
    #[cfg(feature = "verify-ecdsa")]
    P256(Box<p256::ecdsa::VerifyingKey>),
    #[cfg(feature = "verify-ed25519")]
    Ed25519(Box<ed25519_dalek::VerifyingKey>),
}

impl Key {
    /// Returns the key that a secret contains.
    pub(super) fn new(scheme: &Scheme, secret: &str) -> Result<Self, VerifierError> {
        // Supabase shows `v1,whsec_…`.
        let bare = secret.strip_prefix("v1,").unwrap_or(secret);
        let public = bare.strip_prefix("whpk_");
        let bare = public.or(bare.strip_prefix("whsec_")).unwrap_or(bare);
        if bare.is_empty() {
            return Err(VerifierError::EmptySecret);
        }
        let malformed = VerifierError::MalformedSecret;
        // A file or a variable often ends in a line feed, which no signature would match.
        if secret.trim() != secret {
            return Err(malformed("free of white space around it"));
        }
        let bytes = match scheme.secret {
            Secret::Text => secret.into(),
            Secret::Webhook => base64(bare).ok_or(malformed("`whsec_` or `whpk_`, and base64"))?,
            Secret::Base64 => base64(secret).ok_or(malformed("base64"))?,
            Secret::Hex => hex(secret).ok_or(malformed("hexadecimal"))?,
            Secret::Token => {
                let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
                let is_token = secret.len() <= 256 && secret.bytes().all(is_valid);
                let rule = "1 to 256 letters, digits, `_` or `-`";
                is_token.then(|| secret.into()).ok_or(malformed(rule))?
            }
        };
        let is_public = scheme.secret == Secret::Webhook && public.is_some();
        let is_encoded = matches!(scheme.secret, Secret::Webhook | Secret::Base64 | Secret::Hex);
        match scheme.proof {
            Proof::P256 => Self::p256(&bytes),
            proof if proof == Proof::Ed25519 || is_public => Self::ed25519(&bytes),
            _ if is_encoded && bytes.len() < MIN_ENCODED => {
                Err(malformed("at least 16 bytes long once it is decoded"))
            }
            _ => Ok(Self::Shared(bytes.into())),
        }
    }

    /// Returns the beginning of an item with a code by this key.
    pub(super) fn prefix(&self, scheme: &Scheme) -> &'static str {
        match self {
            #[cfg(feature = "verify-ed25519")]
            Self::Ed25519(_) if scheme.secret == Secret::Webhook => WEBHOOK_ED25519,
            _ => scheme.prefix,
        }
    }

    /// Returns `true` if any of the codes is one of the text by this key. The text is one of so
    /// many.
    pub(super) fn has_signed(
        &self,
        scheme: &Scheme,
        text: &[&[u8]],
        codes: impl Iterator<Item = Vec<u8>>,
        #[cfg_attr(
            not(feature = "verify-ed25519"),
            expect(unused_variables, reason = "the other keys hash a text once")
        )]
        texts: usize,
    ) -> bool {
        match self {
            Self::Shared(key) => signed(scheme.proof, key, text, codes).is_ok(),
            #[cfg(feature = "verify-ecdsa")]
            Self::P256(key) => {
                use p256::ecdsa::Signature;
                use p256::ecdsa::signature::hazmat::PrehashVerifier;
                use sha2::{Digest, Sha256};

                let digest = text.iter().fold(Sha256::new(), Digest::chain_update).finalize();
                let matches = |signature| key.verify_prehash(&digest, &signature).is_ok();
                let mut codes = codes;
                codes.any(|der| Signature::from_der(&der).is_ok_and(matches))
            }
            #[cfg(feature = "verify-ed25519")]
            Self::Ed25519(key) => {
                use ed25519_dalek::Signature;

                let text = text.concat();
                let matches = |signature| key.verify_strict(&text, &signature).is_ok();
                let mut codes = codes.take(MAX_SIGNATURES / texts);
                codes.any(|code| Signature::from_slice(&code).is_ok_and(matches))
            }
        }
    }

    /// Makes the key of a public key (`SubjectPublicKeyInfo` in DER), which SendGrid shows.
    #[cfg(feature = "verify-ecdsa")]
    fn p256(der: &[u8]) -> Result<Self, VerifierError> {
        /// The algorithm and the curve: all public keys on P-256 begin with these bytes.
        const P256: [u8; 26] = [
            0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06,
            0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
        ];
        let point = der.strip_prefix(&P256);
        let key = point.and_then(|p| p256::ecdsa::VerifyingKey::from_sec1_bytes(p).ok());
        let key = key.ok_or(VerifierError::MalformedSecret("a public key in base64"))?;
        Ok(Self::P256(Box::new(key)))
    }

    #[cfg(not(feature = "verify-ecdsa"))]
    fn p256(_: &[u8]) -> Result<Self, VerifierError> {
        Err(VerifierError::FeatureDisabled("verify-ecdsa"))
    }

    #[cfg(feature = "verify-ed25519")]
    fn ed25519(bytes: &[u8]) -> Result<Self, VerifierError> {
        let key = bytes.try_into().ok();
        let key = key.and_then(|bytes| ed25519_dalek::VerifyingKey::from_bytes(bytes).ok());
        // Of a key of small order, nobody holds the private key, and a signature can hold for any
        // text.
        let key = key.filter(|key| !key.is_weak());
        let rule = "a public key of Ed25519";
        Ok(Self::Ed25519(Box::new(key.ok_or(VerifierError::MalformedSecret(rule))?)))
    }

    #[cfg(not(feature = "verify-ed25519"))]
    fn ed25519(_: &[u8]) -> Result<Self, VerifierError> {
        Err(VerifierError::FeatureDisabled("verify-ed25519"))
    }
}

/// The shortest key, in bytes, in a secret that is encoded. Such a secret is made by a program (of
/// 24 bytes at least, says Standard Webhooks), so a shorter key is what a mistake has left of one.
/// People choose secrets that are text: these have no rule.
const MIN_ENCODED: usize = 16;

/// The beginning of an item with an Ed25519 signature of Standard Webhooks.
#[cfg(any(feature = "verify-ed25519", feature = "testing"))]
pub(super) const WEBHOOK_ED25519: &str = "v1a,";

/// The largest number of Ed25519 signatures that are tried, of all texts together: each hashes the
/// whole body again. A sender whose key changes signs twice.
#[cfg(feature = "verify-ed25519")]
const MAX_SIGNATURES: usize = 8;
