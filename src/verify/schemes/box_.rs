//! Box: body and time, signed with two keys.

use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, signed};
use crate::verify::time;

/// HMAC-SHA256 in base64. One valid signature is enough, so that one key can change.
pub(in crate::verify) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const TIME: &str = "box-delivery-timestamp";
    for (header, expected) in
        [("box-signature-version", "1"), ("box-signature-algorithm", "HmacSHA256")]
    {
        if request.optional(header)?.is_some_and(|value| value != expected) {
            return Err(Refusal::Malformed(header));
        }
    }
    let time = request.header(TIME)?;
    request.within_tolerance(time::parse(time).ok_or(Refusal::Malformed(TIME))?)?;
    let primary = request.optional("box-signature-primary")?;
    let secondary = request.optional("box-signature-secondary")?;
    if primary.or(secondary).is_none() {
        return Err(Refusal::Missing("box-signature-primary"));
    }
    let signatures = primary.into_iter().chain(secondary).filter_map(base64);
    signed::<HmacSha256>(key, &[request.body, time.as_bytes()], signatures)
}
