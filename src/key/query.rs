//! A parameter of the request's query string.

use std::borrow::Cow;

use http::Uri;

use super::form;
use crate::error::KeyError;

/// Returns the parameter's decoded value.
pub(super) fn read<'r>(uri: &'r Uri, name: &str) -> Result<Option<Cow<'r, str>>, KeyError> {
    match uri.query() {
        Some(query) => form::field(query.as_bytes(), name, "query parameter"),
        None => Ok(None),
    }
}
