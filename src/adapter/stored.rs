//! The data that a store holds with a complete key: a payload digest, a response.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
use http::{HeaderName, HeaderValue};

#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
use crate::error::{BoxError, StoreError, StoreErrorKind};

/// The stored data that a duplicate carries.
///
/// Responses are large: those of all keys of one request may be hundreds of megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Fetch {
    /// Nothing.
    #[default]
    Nothing,
    /// The payload's SHA-256, without the response.
    Digest,
    /// The payload's SHA-256 and the response.
    DigestAndResponse,
}

/// The data that is stored with a complete key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredData {
    /// The SHA-256 of the payload that was handled, if the layer compares payloads or the event has
    /// a [content identity](crate::KeyExtractor::content_identity). In the row of a second
    /// identity, this is the SHA-256 of the namespace, a zero byte and the id of the event's key.
    pub payload_sha256: Option<[u8; 32]>,
    /// The handler's response, if the layer replays responses.
    pub response: Option<Arc<StoredResponse>>,
}

impl StoredData {
    /// The stored data of this payload and this response.
    #[must_use]
    pub const fn new(
        payload_sha256: Option<[u8; 32]>,
        response: Option<Arc<StoredResponse>>,
    ) -> Self {
        Self { payload_sha256, response }
    }

    /// Returns the part of a row's stored data that a duplicate carries.
    #[cfg(feature = "memory")]
    pub(super) fn fetched(stored: Option<&Arc<Self>>, fetch: Fetch) -> Option<Arc<Self>> {
        match (fetch, stored) {
            (Fetch::Nothing, _) => None,
            (_, None) => Some(Arc::default()),
            (Fetch::Digest, Some(stored)) if stored.response.is_some() => {
                Some(Arc::new(Self::new(stored.payload_sha256, None)))
            }
            (_, Some(stored)) => Some(Arc::clone(stored)),
        }
    }
}

/// A handler's response, as it is stored and replayed.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers that are stored.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

impl StoredResponse {
    /// A response of these parts.
    #[must_use]
    pub const fn new(status: StatusCode, headers: HeaderMap, body: Bytes) -> Self {
        Self { status, headers, body }
    }
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values of headers and bodies may be personal data.
        f.debug_struct("StoredResponse")
            .field("status", &self.status)
            .field("headers", &self.headers.keys().collect::<Vec<_>>())
            .field("body_len", &self.body.len())
            .finish()
    }
}

/// The form of a stored response in the stores of this crate.
#[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
impl StoredResponse {
    /// Returns the headers as a JSON array of pairs of strings. A value that is not UTF-8 is left
    /// out; the layer stores no response with such a value.
    pub(crate) fn headers_json(&self) -> String {
        let pairs = self.headers.iter().filter_map(|(name, value)| {
            Some((name.as_str(), std::str::from_utf8(value.as_bytes()).ok()?))
        });
        // Pairs of strings always serialize.
        serde_json::to_string(&pairs.collect::<Vec<_>>()).unwrap_or_default()
    }

    /// Makes a response of the parts that a store holds. The error is
    /// [`StoreErrorKind::Corrupt`](crate::StoreErrorKind::Corrupt) if the status or the headers are
    /// unreadable.
    pub(crate) fn from_stored(
        status: i64,
        headers_json: &str,
        body: Vec<u8>,
    ) -> Result<Self, StoreError> {
        let read = || -> Result<Self, BoxError> {
            let status = StatusCode::from_u16(status.try_into()?)?;
            let pairs: Vec<(String, String)> = serde_json::from_str(headers_json)?;
            let mut headers = HeaderMap::with_capacity(pairs.len());
            for (name, value) in pairs {
                headers.append(HeaderName::try_from(name)?, HeaderValue::try_from(value)?);
            }
            Ok(Self::new(status, headers, body.into()))
        };
        let corrupt = || StoreError::new(StoreErrorKind::Corrupt, "reading a stored response");
        read().map_err(|error| corrupt().with_source(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(any(feature = "postgres", feature = "redis", feature = "sqlite"))]
    #[test]
    fn response_comes_back_as_it_was_stored() {
        let mut headers = HeaderMap::new();
        headers.append("content-type", HeaderValue::from_static("text/xml"));
        headers.append("link", HeaderValue::from_static("<a>"));
        headers.append("link", HeaderValue::from_bytes("<\u{e9}>\t\"b\"".as_bytes()).unwrap());
        let stored =
            StoredResponse::new(StatusCode::CREATED, headers, Bytes::from_static(b"\0\xff"));
        let again = StoredResponse::from_stored(201, &stored.headers_json(), b"\0\xff".to_vec());
        assert_eq!(again.unwrap(), stored);
        for (status, headers) in [(20, "[]"), (200, "{}"), (200, r#"[["a b","c"]]"#)] {
            let corrupt = StoredResponse::from_stored(status, headers, Vec::new()).unwrap_err();
            assert_eq!(corrupt.kind(), StoreErrorKind::Corrupt, "{status} {headers}");
        }
    }

    #[test]
    fn debug_output_of_a_response_shows_no_content() {
        let mut headers = HeaderMap::new();
        headers.append("x-token", "secret".parse().unwrap());
        let stored = StoredResponse::new(StatusCode::OK, headers, Bytes::from_static(b"private"));
        let shown = format!("{stored:?}");
        assert!(!shown.contains("secret") && !shown.contains("private"), "{shown}");
    }
}
