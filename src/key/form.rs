//! A field of an `application/x-www-form-urlencoded` body.

use std::borrow::Cow;

use http::{HeaderMap, header};

use crate::error::{KeyError, KeyErrorKind};

/// Returns the field's decoded value. A body with another content type has no fields.
pub(super) fn read<'r>(
    headers: &HeaderMap,
    body: &'r [u8],
    name: &str,
) -> Result<Option<Cow<'r, str>>, KeyError> {
    if is_form(headers) { field(body, name, "form field") } else { Ok(None) }
}

/// Returns the decoded value of `name` among `name=value` pairs joined by `&`.
///
/// The parser replaces invalid UTF-8 by U+FFFD, so that different ids could become equal. A value
/// with a U+FFFD is therefore malformed.
pub(super) fn field<'r>(
    pairs: &'r [u8],
    name: &str,
    place: &str,
) -> Result<Option<Cow<'r, str>>, KeyError> {
    let mut found = None;
    for (key, value) in form_urlencoded::parse(pairs) {
        if key != name {
            continue;
        }
        if found.is_some() {
            return Err(KeyError::new(KeyErrorKind::Repeated, format!("{place} {name}")));
        }
        found = Some(value);
    }
    let Some(value) = found else { return Ok(None) };
    let fault = |kind| Err(KeyError::new(kind, format!("{place} {name}")));
    if value.is_empty() {
        return fault(KeyErrorKind::Empty);
    }
    if value.contains(char::REPLACEMENT_CHARACTER) {
        return fault(KeyErrorKind::NotUtf8);
    }
    if value.contains('\0') {
        return fault(KeyErrorKind::Nul);
    }
    Ok(Some(value))
}

/// Returns `true` for a form, and for a request without a content type: senders may omit it.
fn is_form(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/x-www-form-urlencoded")
}
