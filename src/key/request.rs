//! [`RequestRef`]: what keys are read from.

use std::fmt;

use super::json::Selected;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header, request};

/// The media type of a form.
pub(crate) const FORM: &str = "application/x-www-form-urlencoded";

/// The head of a request and its whole body.
#[derive(Clone, Copy)]
pub struct RequestRef<'r> {
    head: &'r request::Parts,
    body: &'r Bytes,
    /// The JSON values of the body, if they were read.
    values: Option<&'r Selected<'r>>,
}

impl<'r> RequestRef<'r> {
    /// Returns a view of this head and this body.
    #[must_use]
    pub fn new(head: &'r request::Parts, body: &'r Bytes) -> Self {
        Self { head, body, values: None }
    }

    /// Returns the request's method.
    #[must_use]
    pub fn method(&self) -> &'r Method {
        &self.head.method
    }

    /// Returns the request's target. Inside a nested router, this is the part that is left of it.
    #[must_use]
    pub fn uri(&self) -> &'r Uri {
        &self.head.uri
    }

    /// Returns the request's headers.
    #[must_use]
    pub fn headers(&self) -> &'r HeaderMap {
        &self.head.headers
    }

    /// Returns `true` if the body has this media type.
    pub(crate) fn is_of(&self, media_type: &str) -> bool {
        let value = self.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        let essence = value.unwrap_or_default().split(|byte| *byte == b';').next();
        essence.unwrap_or_default().trim_ascii().eq_ignore_ascii_case(media_type.as_bytes())
    }

    /// Returns `true` if the body may be a form. Senders may omit the content type.
    pub(crate) fn may_be_form(&self) -> bool {
        !self.headers().contains_key(header::CONTENT_TYPE) || self.is_of(FORM)
    }

    /// Returns the extensions that outer layers have inserted.
    #[must_use]
    pub fn extensions(&self) -> &'r http::Extensions {
        &self.head.extensions
    }

    /// Returns the whole raw body. Inside an [`EachKey`](super::EachKey), this is the event's own
    /// bytes.
    #[must_use]
    pub fn body(&self) -> &'r Bytes {
        self.body
    }

    /// Returns the same request, with JSON values of its body that were read.
    pub(super) fn with_values<'v>(&self, values: Option<&'v Selected<'v>>) -> RequestRef<'v>
    where
        'r: 'v,
    {
        RequestRef { head: self.head, body: self.body, values }
    }

    pub(super) fn values(&self) -> Option<&'r Selected<'r>> {
        self.values
    }

    /// Returns the same head with another body, for a list of events inside another format.
    #[must_use]
    pub fn with_body<'b>(&self, body: &'b Bytes) -> RequestRef<'b>
    where
        'r: 'b,
    {
        RequestRef { head: self.head, body, values: None }
    }
}

impl fmt::Debug for RequestRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Headers and bodies carry secrets.
        f.debug_struct("RequestRef")
            .field("method", self.method())
            .field("body_len", &self.body.len())
            .finish_non_exhaustive()
    }
}
