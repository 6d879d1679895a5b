//! Svix: Standard Webhooks, in headers of its own too.

use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, signed};
use crate::verify::schemes::data::seconds;

/// HMAC-SHA256 in base64 over id, time and body; one `v1,` for each secret of the sender. The headers are Svix's
/// own, the standard ones, or both.
pub(in crate::verify) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let either = |own, standard| match (request.optional(own)?, request.optional(standard)?) {
        // The signature covers one of them, and a service downstream may read the other.
        (Some(one), Some(other)) if one != other => Err(Refusal::Ambiguous(own)),
        (Some(value), _) | (None, Some(value)) => Ok(value),
        (None, None) => Err(Refusal::Missing(own)),
    };
    let id = either("svix-id", "webhook-id")?;
    let time = either("svix-timestamp", "webhook-timestamp")?;
    let signatures = either("svix-signature", "webhook-signature")?;
    request.within_tolerance(seconds("svix-timestamp", time)?)?;
    let signatures = signatures.split(' ').filter_map(|item| base64(item.strip_prefix("v1,")?));
    signed::<HmacSha256>(key, &text(id, time, request.body), signatures)
}

pub(in crate::verify) fn text<'a>(id: &'a str, time: &'a str, body: &'a [u8]) -> [&'a [u8]; 5] {
    [id.as_bytes(), b".", time.as_bytes(), b".", body]
}
