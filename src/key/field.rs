//! A value of a header, of the query or of a form.

use std::borrow::Cow;

use http::header::{HeaderMap, HeaderName};

use super::id::{check_value, is_blank};
use super::json::without_mark;
use super::request::RequestRef;
use crate::error::KeyErrorKind;

/// Returns the header's value without the white space around it, which is not part of a field
/// value (RFC 9110, section 5.5). Two headers of one name are malformed, because proxies differ in
/// which of them they forward. No header has a NUL.
pub(super) fn header<'r>(
    headers: &'r HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'r str>, KeyErrorKind> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(KeyErrorKind::Repeated);
    }
    match std::str::from_utf8(value.as_bytes().trim_ascii()) {
        Ok(value) if is_blank(value) => Err(KeyErrorKind::Empty),
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(KeyErrorKind::NotUtf8),
    }
}

/// Returns the field's decoded value. A body with another content type has no fields.
pub(super) fn form<'r>(
    request: &RequestRef<'r>,
    name: &str,
) -> Result<Option<Cow<'r, str>>, KeyErrorKind> {
    if request.may_be_form() { pair(without_mark(request.body()), name) } else { Ok(None) }
}

/// Returns the decoded value of `name` among `name=value` pairs joined by `&`.
///
/// The parser replaces invalid UTF-8 by U+FFFD, so that different ids could become equal. A value
/// with a U+FFFD is therefore malformed.
pub(super) fn pair<'r>(pairs: &'r [u8], name: &str) -> Result<Option<Cow<'r, str>>, KeyErrorKind> {
    let mut found = None;
    for (key, value) in form_urlencoded::parse(pairs) {
        if key != name {
            continue;
        }
        if found.is_some() {
            return Err(KeyErrorKind::Repeated);
        }
        found = Some(value);
    }
    let Some(value) = found else { return Ok(None) };
    if value.contains(char::REPLACEMENT_CHARACTER) {
        return Err(KeyErrorKind::NotUtf8);
    }
    check_value(&value)?;
    Ok(Some(value))
}
