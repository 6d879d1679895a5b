//! ECDSA over P-256 and SHA-256, with the sender's key pair.

use p256::ecdsa::signature::hazmat::PrehashVerifier;
use p256::ecdsa::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};

use crate::verify::error::Refusal;
use crate::verify::received::base64;

/// Succeeds if any of the signatures, in DER, is one of the text.
pub(in crate::verify) fn signed(
    key: &[u8],
    text: &[&[u8]],
    mut signatures: impl Iterator<Item = Vec<u8>>,
) -> Result<(), Refusal> {
    let key = VerifyingKey::from_sec1_bytes(key).map_err(|_| Refusal::Forged)?;
    let digest = text.iter().fold(Sha256::new(), Digest::chain_update).finalize();
    let matches = |signature| key.verify_prehash(&digest, &signature).is_ok();
    let is_signed = signatures.any(|der| Signature::from_der(&der).is_ok_and(matches));
    is_signed.then_some(()).ok_or(Refusal::Forged)
}

/// Returns the point of a public key (`SubjectPublicKeyInfo` in DER and base64), which SendGrid shows.
pub(in crate::verify) fn public_key(text: &str) -> Option<Vec<u8>> {
    /// The algorithm and the curve: all public keys on P-256 begin with these bytes.
    const P256: [u8; 26] = [
        0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08,
        0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
    ];
    let der = base64(text)?;
    let point = der.strip_prefix(&P256)?;
    VerifyingKey::from_sec1_bytes(point).ok().map(|_| point.to_vec())
}
