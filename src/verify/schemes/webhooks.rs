//! Standard Webhooks and Svix: id, time and body.

use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, signed};

/// HMAC-SHA256 in base64 over id, time and body; one `v1,` for each secret of the sender.
pub(in crate::verify) fn standard(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let id = request.header("webhook-id")?;
    let time = request.header("webhook-timestamp")?;
    verify(key, request, id, time, request.header("webhook-signature")?)
}

/// The same in Svix's own headers, in the standard headers, or in both.
pub(in crate::verify) fn svix(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let either = |own, standard| match (request.optional(own)?, request.optional(standard)?) {
        // The signature covers one of them, and a service downstream may read the other.
        (Some(one), Some(other)) if one != other => Err(Refusal::Ambiguous(own)),
        (Some(value), _) | (None, Some(value)) => Ok(value),
        (None, None) => Err(Refusal::Missing(own)),
    };
    let id = either("svix-id", "webhook-id")?;
    let time = either("svix-timestamp", "webhook-timestamp")?;
    verify(key, request, id, time, either("svix-signature", "webhook-signature")?)
}

fn verify(
    key: &[u8],
    request: &Received<'_>,
    id: &str,
    time: &str,
    signatures: &str,
) -> Result<(), Refusal> {
    request.in_time("webhook-timestamp", time)?;
    let signatures = signatures.split(' ').filter_map(|item| base64(item.strip_prefix("v1,")?));
    signed::<HmacSha256>(key, &text(id, time, request.body), signatures)
}

pub(in crate::verify) fn text<'a>(id: &'a str, time: &'a str, body: &'a [u8]) -> [&'a [u8]; 5] {
    [id.as_bytes(), b".", time.as_bytes(), b".", body]
}
