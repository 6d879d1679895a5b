//! A value from a request header.

use http::{HeaderMap, HeaderName};

use crate::error::KeyErrorKind;

/// Returns the header's value without the white space around it, which is not part of a field
/// value (RFC 9110, section 5.5). Two headers of one name are malformed, because proxies differ in
/// which of them they forward. No header has a NUL.
pub(super) fn read<'r>(
    headers: &'r HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'r str>, KeyErrorKind> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(KeyErrorKind::Repeated);
    }
    match std::str::from_utf8(value.as_bytes().trim_ascii()) {
        Ok("") => Err(KeyErrorKind::Empty),
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(KeyErrorKind::NotUtf8),
    }
}
