//! Formats that many senders share.

use std::sync::LazyLock;

use super::challenge::WEB_HOOK;
use super::preset::{DAY, DEFAULTS, HOUR, MINUTE, Preset, Retries};
use super::read::{cloud_events_or, is_batch_of_cloud_events};
use super::scheme::Part::{Body, Header, Seconds, Text};
use super::scheme::{Part, Scheme, Secret};
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{self, EventPart, Events, Extracted, KeyPart, RequestRef, Rule};

/// Standard Webhooks: the header `webhook-id`, which is signed and stays the same on every retry.
///
/// The specification's example schedule makes ten attempts over 75 h 35 min; the floor is twice
/// that. The specification also says "save the ids for five minutes", which is shorter than its own
/// schedule. OpenAI retries for up to 72 hours. Supabase signs its auth hooks in this way, and
/// reads their answers. It does not sign its database webhooks. Every subscribed endpoint receives
/// a message under the same id: [two endpoints](crate::guide::keys#several-endpoints-of-one-sender)
/// need two namespaces.
///
/// [Signature][s]: over id, time and body. `v1` is HMAC-SHA256, with a secret of at least 16 bytes
/// in base64, after `whsec_` or without it; if a sender's secret is text, encode it in base64.
/// `v1a` is Ed25519, with a public key after `whpk_`, and needs the feature `verify-ed25519`.
///
/// [s]: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
pub const STANDARD_WEBHOOKS: Preset = Preset {
    name: "standard-webhooks",
    aliases: &["openai", "replicate", "supabase"],
    rule: || Rule::part(key::header("webhook-id")),
    floor: 2 * (75 * HOUR + 35 * MINUTE), // twice the 75 h 35 min of the specification
    scheme: Some(standard(
        "webhook-signature",
        &[Header("webhook-id"), Text("."), Seconds("webhook-timestamp"), Text("."), Body],
    )),
    signed_id: Some(true),
    sample_headers: &[("webhook-id", "{id}")],
    ..DEFAULTS
};

const fn standard(header: &'static str, text: &'static [Part]) -> Scheme {
    let scheme = Scheme::hmac_sha256(header, text).separated_by(&[' ']).prefix("v1,").base64();
    scheme.with_secret(Secret::Webhook)
}

/// Svix: the header `svix-id` or, from newer senders, `webhook-id`, which is signed.
///
/// If both headers are present and differ, the delivery is malformed. An attacker could have added
/// one of them, which would make a signed message a new event. Do not use `/data/email_id` as the
/// key, because many events of Resend share it. Every subscribed endpoint receives a message under
/// the same id, as under [`STANDARD_WEBHOOKS`].
///
/// [Signature](https://docs.svix.com/receiving/verifying-payloads/how-manual): like Standard
/// Webhooks, with headers that begin with `svix-` or `webhook-`. If both are present, they must be
/// equal.
pub const SVIX: Preset = Preset {
    name: "svix",
    aliases: &["clerk", "resend"],
    rule: || Rule::part(key::from_fn(svix_id)),
    floor: 2 * (27 * HOUR + 35 * MINUTE + 5), // twice the 27 h 35 min 5 s of the schedule
    scheme: Some(Scheme {
        twin: ("svix-", "webhook-"),
        ..standard(
            "svix-signature",
            &[Header("svix-id"), Text("."), Seconds("svix-timestamp"), Text("."), Body],
        )
    }),
    signed_id: Some(true),
    sample_headers: &[("svix-id", "{id}")],
    ..DEFAULTS
};

fn svix_id(request: &RequestRef<'_>) -> Result<Option<String>, KeyError> {
    let svix = key::header("svix-id").read(request)?;
    let webhook = key::header("webhook-id").read(request)?;
    match (svix, webhook) {
        (Some(svix), Some(webhook)) if svix != webhook => {
            Err(KeyError::new(KeyErrorKind::Repeated, "the id of headers svix-id and webhook-id"))
        }
        (svix, webhook) => Ok(svix.or(webhook).map(std::borrow::Cow::into_owned)),
    }
}

/// CloudEvents over HTTP: `source` and `id`, in the structured, batched and binary modes.
///
/// The content type gives the mode: `application/cloudevents-batch+json` is a list of events,
/// `application/cloudevents+json` is one event. With any other content type, the attributes are the
/// headers `ce-source` and `ce-id`. In these headers, an escape is decoded if the HTTP binding
/// requires it (`%20`, `%22`, `%25`, and bytes that are not printable ASCII), so that an event has
/// one key in every mode. Every other escape belongs to the value, because the SDKs of
/// [Go](https://github.com/cloudevents/sdk-go/issues/1331) and
/// [Java](https://github.com/cloudevents/sdk-java/issues/748) encode nothing. If one of their
/// sources or ids contains one of these four, the event has another key in the other modes. A list
/// of events with another content type is malformed, because the ids are those of its events. The
/// format has no signature. Retries differ between senders.
/// [`CLOUDEVENTS.echo(None)`](Preset::echo) answers the OPTIONS by which a sender asks for
/// permission.
pub const CLOUDEVENTS: Preset = Preset {
    name: "cloudevents",
    rule: || Rule::Reader(cloud_events),
    challenges: &[WEB_HOOK],
    floor: 7 * DAY, // our estimate: the format has no schedule
    retries: Retries::Undocumented,
    sample_headers: &[("content-type", "application/cloudevents+json")],
    sample: r#"{"specversion":"1.0","type":"com.example.sample","source":"/sample","id":"{id}"}"#,
    ..DEFAULTS
};

fn cloud_events(events: Events<'_>) -> Result<Extracted, KeyError> {
    static HEADERS: LazyLock<EventPart> = LazyLock::new(|| {
        EventPart::new(attribute("ce-source").and(attribute("ce-id")))
            .with_event_type(attribute("ce-type"))
    });
    cloud_events_or(events, |events| {
        // The content type is not signed. With ids in headers, handled events could run again.
        if is_batch_of_cloud_events(&events.request) {
            return Err(KeyError::new(KeyErrorKind::Repeated, "the id, in headers and in a list,"));
        }
        events.one_of(&HEADERS)
    })
}

/// Reads an attribute of an event from a header: unquoted, then decoded once (HTTP protocol binding
/// 1.0.2, section 3.1.3.2).
fn attribute(name: &'static str) -> KeyPart {
    let header = key::header(name);
    key::from_fn(move |request| {
        let Some(value) = header.read(request)? else { return Ok(None) };
        let fault = |kind| KeyError::new(kind, format!("header {name}"));
        decode(&unquote(&value)).map(Some).map_err(fault)
    })
}

/// Returns a quoted string (RFC 7230, section 3.2.6) without its quotes and escapes.
fn unquote(value: &str) -> String {
    let inner = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let Some(inner) = inner else { return value.to_owned() };
    let mut plain = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(char) = chars.next() {
        plain.push(if char == '\\' { chars.next().unwrap_or(char) } else { char });
    }
    plain
}

/// Decodes what a sender has to encode: a space, `"`, `%` and what is no printable ASCII. Any other
/// escape is a part of the value, and so is a `%` without two digits: the SDKs of Go and Java
/// encode nothing, and a source is a URI, which has escapes of its own. Bytes that are not UTF-8
/// are malformed, as the binding says.
fn decode(value: &str) -> Result<String, KeyErrorKind> {
    let is_encoded = |byte: &u8| !byte.is_ascii_graphic() || matches!(byte, b'"' | b'%');
    let mut plain = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let byte = escaped(rest).filter(is_encoded);
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &rest[3..] } else { after };
    }
    String::from_utf8(plain).map_err(|_| KeyErrorKind::NotUtf8)
}

/// Returns the byte of an escape at the beginning of `text`: `%2F`.
fn escaped(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else { return None };
    let digit = |hex: &u8| char::from(*hex).to_digit(16).and_then(|it| u8::try_from(it).ok());
    Some(16 * digit(high)? + digit(low)?)
}
