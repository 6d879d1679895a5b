//! Schemes that sign a time and the body: HMAC-SHA256.

use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, hex, signed};
use crate::verify::time;

/// Stripe: `t=TIME,v1=HEX`, with one `v1` for each secret of the sender.
pub(in crate::verify) fn stripe(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const HEADER: &str = "stripe-signature";
    let (time, signatures) = fields(request, HEADER, ',', ["t", "v1"])?;
    signed::<HmacSha256>(key, &[time.as_bytes(), b".", request.body], signatures)
}

/// Paddle: `ts=TIME;h1=HEX`, with one `h1` for each secret of the sender.
pub(in crate::verify) fn paddle(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const HEADER: &str = "paddle-signature";
    let (time, signatures) = fields(request, HEADER, ';', ["ts", "h1"])?;
    signed::<HmacSha256>(key, &[time.as_bytes(), b":", request.body], signatures)
}

/// Reads a header with one time and any number of signatures.
fn fields<'a>(
    request: &Received<'a>,
    header: &'static str,
    separator: char,
    [time_name, signature_name]: [&str; 2],
) -> Result<(&'a str, Vec<Vec<u8>>), Refusal> {
    let (mut times, mut signatures) = (Vec::new(), Vec::new());
    for item in request.header(header)?.split(separator) {
        match item.split_once('=') {
            Some((name, time)) if name == time_name => times.push(time),
            Some((name, signature)) if name == signature_name => signatures.extend(hex(signature)),
            // Signatures of other versions.
            _ => {}
        }
    }
    let [time] = times[..] else { return Err(Refusal::Malformed(header)) };
    request.in_time(header, time)?;
    Ok((time, signatures))
}

/// Slack: version, time and body.
pub(in crate::verify) fn slack(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const TIME: &str = "x-slack-request-timestamp";
    let time = request.header(TIME)?;
    request.in_time(TIME, time)?;
    let signature = request.header("x-slack-signature")?.strip_prefix("v0=").and_then(hex);
    signed::<HmacSha256>(key, &[b"v0:", time.as_bytes(), b":", request.body], signature)
}

/// Twitch: id, time and body without separators. The time has one form only, so the boundaries cannot
/// move.
pub(in crate::verify) fn twitch(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let id = request.header("twitch-eventsub-message-id")?;
    let time = rfc3339(request, "twitch-eventsub-message-timestamp")?;
    let signature = request.header("twitch-eventsub-message-signature")?;
    let signature = signature.strip_prefix("sha256=").and_then(hex);
    signed::<HmacSha256>(key, &[id.as_bytes(), time.as_bytes(), request.body], signature)
}

/// Box: body and time, signed with two keys. One valid signature is enough, so that one key can change.
pub(in crate::verify) fn box_(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    for (header, expected) in
        [("box-signature-version", "1"), ("box-signature-algorithm", "HmacSHA256")]
    {
        if request.optional(header)?.is_some_and(|value| value != expected) {
            return Err(Refusal::Malformed(header));
        }
    }
    let time = rfc3339(request, "box-delivery-timestamp")?;
    let primary = request.optional("box-signature-primary")?;
    let secondary = request.optional("box-signature-secondary")?;
    if primary.or(secondary).is_none() {
        return Err(Refusal::Missing("box-signature-primary"));
    }
    let signatures = primary.into_iter().chain(secondary).filter_map(base64);
    signed::<HmacSha256>(key, &[request.body, time.as_bytes()], signatures)
}

fn rfc3339<'a>(request: &Received<'a>, header: &'static str) -> Result<&'a str, Refusal> {
    let time = request.header(header)?;
    request.within_tolerance(time::parse(time).ok_or(Refusal::Malformed(header))?)?;
    Ok(time)
}
