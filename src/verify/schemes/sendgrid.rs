//! SendGrid: time and body, signed with the sender's key pair.

use p256::ecdsa::signature::hazmat::PrehashVerifier;
use p256::ecdsa::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};

use crate::verify::error::Refusal;
use crate::verify::received::{Received, base64};
use crate::verify::schemes::data::seconds;

/// ECDSA over P-256 and SHA-256; the signature is DER in base64.
pub(in crate::verify) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const TIME: &str = "x-twilio-email-event-webhook-timestamp";
    const SIGNATURE: &str = "x-twilio-email-event-webhook-signature";
    let time = request.header(TIME)?;
    request.within_tolerance(seconds(TIME, time)?)?;
    let signature = base64(request.header(SIGNATURE)?);
    let signature = signature.and_then(|der| Signature::from_der(&der).ok());
    let key = VerifyingKey::from_sec1_bytes(key).map_err(|_| Refusal::Forged)?;
    let digest = Sha256::new().chain_update(time).chain_update(request.body).finalize();
    signature.and_then(|it| key.verify_prehash(&digest, &it).ok()).ok_or(Refusal::Forged)
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
