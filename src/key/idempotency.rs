//! The header `Idempotency-Key`, and the ids of requests that carry it.
//!
//! 1. The header is an Item whose value is a String (draft-ietf-httpapi-idempotency-key-header,
//!    section 2.1; RFC 9651, section 3.3.3): `"8e03978e"`.
//! 2. The value without quotes is accepted too, because many clients send it so. Both forms of one
//!    value give one key.
//! 3. Parameters (`"8e03978e";x=1`) are malformed. The draft defines none, so a client that sends
//!    one expects an effect that it does not get.
//! 4. An id has four parts: the scope, the method, the path and the value of the header. A client
//!    chooses its keys, so a key means nothing outside its client and its operation.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};

use super::id::{MAX_ID_LEN, is_blank};
use super::part::{KeyPart, compose, from_fn};
use super::request::RequestRef;
use super::{digest, field};
use crate::error::{KeyError, KeyErrorKind};

const NAME: HeaderName = HeaderName::from_static("idempotency-key");

/// Returns the value of the header.
fn read(headers: &HeaderMap) -> Result<Option<Cow<'_, str>>, KeyErrorKind> {
    let Some(text) = field::header(headers, &NAME)? else { return Ok(None) };
    let value = match text.strip_prefix('"') {
        Some(rest) => quoted(rest),
        None => text.bytes().all(is_bare).then_some(Cow::Borrowed(text)),
    };
    let value = value.ok_or(KeyErrorKind::InvalidString)?;
    match value.len() {
        _ if is_blank(&value) => Err(KeyErrorKind::Empty),
        ..=MAX_ID_LEN => Ok(Some(value)),
        _ => Err(KeyErrorKind::TooLong),
    }
}

/// Returns the value of a String whose first quote was read.
fn quoted(rest: &str) -> Option<Cow<'_, str>> {
    let inner = rest.strip_suffix('"')?;
    if !inner.bytes().all(|byte| (0x20..=0x7E).contains(&byte)) {
        return None;
    }
    if !inner.contains(['"', '\\']) {
        return Some(Cow::Borrowed(inner));
    }
    let mut value = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(char) = chars.next() {
        value.push(match char {
            '"' => return None,
            '\\' => chars.next().filter(|escaped| matches!(escaped, '"' | '\\'))?,
            plain => plain,
        });
    }
    Some(Cow::Owned(value))
}

/// Returns `true` for a byte of a value without quotes. A comma may join two headers, and a
/// semicolon begins parameters.
fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b',' | b';')
}

/// Reads the id of a request.
pub(super) fn find(scope: &KeyPart, request: &RequestRef<'_>) -> Result<Option<String>, KeyError> {
    let fault = |kind| KeyError::new(kind, format!("header {NAME}"));
    let key = read(request.headers()).map_err(fault)?;
    key.map(|key| id(scope, request, &key)).transpose()
}

/// Returns the id of a request by its scope, its operation and its key.
pub(super) fn id(scope: &KeyPart, request: &RequestRef<'_>, key: &str) -> Result<String, KeyError> {
    let scope = scope.read(request)?;
    let scope = scope.ok_or_else(|| KeyError::new(KeyErrorKind::MissingScope, "the scope"))?;
    let (method, path) = (request.method().as_str(), request.uri().path());
    Ok(compose(&[Some(&*scope), Some(method), Some(path), Some(key)]))
}

/// Reads what has to be the same under one key: the query string and the body.
pub(crate) fn whole_payload() -> KeyPart {
    from_fn(|request| {
        let body = digest::body_id(request.body());
        Ok(Some(compose(&[request.uri().query(), Some(&body)])))
    })
}
