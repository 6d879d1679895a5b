//! A field of an `application/x-www-form-urlencoded` body.

use std::borrow::Cow;

use http::{HeaderMap, header};

use crate::error::{KeyError, KeyErrorKind};

/// The field's decoded value. A body that says it is something else than a form has no fields.
pub(super) fn read<'r>(
    headers: &HeaderMap,
    body: &'r [u8],
    name: &str,
) -> Result<Option<Cow<'r, str>>, KeyError> {
    if is_form(headers) { field(body, name, "form field") } else { Ok(None) }
}

/// The decoded value of `name` among `name=value` pairs joined by `&`.
///
/// The parser replaces what is not UTF-8 by U+FFFD, which would make one id of many: a value that
/// holds one is malformed.
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

/// No content type counts as a form: the sender may have left it out.
fn is_form(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/x-www-form-urlencoded")
}
