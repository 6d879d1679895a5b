//! A value from a request header.

use http::{HeaderMap, HeaderName};

use crate::error::{KeyError, KeyErrorKind};

/// Returns the header's value without the white space around it, which is not part of a field
/// value (RFC 9110, section 5.5). Two headers of one name are malformed, because proxies differ in
/// which of them they forward.
pub(super) fn read<'r>(
    headers: &'r HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'r str>, KeyError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let fault = |kind| KeyError::new(kind, format!("header {name}"));
    if values.next().is_some() {
        return Err(fault(KeyErrorKind::Repeated));
    }
    let value = value.as_bytes().trim_ascii();
    if value.is_empty() {
        return Err(fault(KeyErrorKind::Empty));
    }
    let value = std::str::from_utf8(value).map_err(|_| fault(KeyErrorKind::NotUtf8))?;
    Ok(Some(value))
}
