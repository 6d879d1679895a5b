//! Secrets, in the notation of their sender.

use super::error::VerifierError;
use super::received::{base64, hex};
#[cfg(feature = "verify-ecdsa")]
use super::schemes::ecdsa;
use crate::provider::Secret;

/// Returns the key that a secret contains.
pub(super) fn key_of(form: Secret, secret: &str) -> Result<Vec<u8>, VerifierError> {
    let without_prefix = secret.strip_prefix("whsec_").unwrap_or(secret);
    if without_prefix.is_empty() {
        return Err(VerifierError::EmptySecret);
    }
    let malformed = |rule| VerifierError::MalformedSecret { rule };
    // A file or a variable often ends in a line feed, which no signature would match.
    if secret.trim() != secret {
        return Err(malformed("free of white space around it"));
    }
    match form {
        Secret::Text => Ok(secret.into()),
        Secret::Webhook => base64(without_prefix).ok_or(malformed("`whsec_` and base64")),
        Secret::Hex => hex(secret).ok_or(malformed("hexadecimal")),
        Secret::Token => {
            let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
            let is_token = secret.len() <= 256 && secret.bytes().all(is_valid);
            let rule = "1 to 256 letters, digits, `_` or `-`";
            if is_token { Ok(secret.into()) } else { Err(malformed(rule)) }
        }
        #[cfg(feature = "verify-ecdsa")]
        Secret::PublicKey => ecdsa::public_key(secret).ok_or(malformed("a public key in base64")),
        #[cfg(not(feature = "verify-ecdsa"))]
        Secret::PublicKey => Err(VerifierError::FeatureDisabled { feature: "verify-ecdsa" }),
    }
}
