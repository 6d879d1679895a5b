//! What a store keeps with a key beside its name, and [`Recall`], which asks for it again.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// A store that keeps what a [`CallTerms`](super::CallTerms) carries, and answers it again.
///
/// 1. A key that becomes complete keeps what [`CallTerms::stored_data_for`](super::CallTerms::stored_data_for) says of
///    it, from the same atomic step on: by `record`, by `complete`, by the commit of a transaction.
/// 2. A completion of a key that is complete already changes nothing of it.
/// 3. A key that starts anew after its retention has lost what was kept in its former life.
///
/// Layers that compare payloads or replay responses need it; others never call it.
pub trait Recall: Send + Sync + 'static {
    /// What is kept with each key, in the order of the keys; `None` where the key is not complete,
    /// or no longer remembered.
    ///
    /// Of what is not [`Fetch`], nothing is answered, and nothing should be read.
    fn recall(
        &self,
        keys: &[DedupKey],
        wanted: Fetch,
    ) -> impl Future<Output = Result<Vec<Option<StoredData>>, Error>> + Send;
}

/// Both kinds of shared handle forward every method.
macro_rules! forward {
    ($($handle:ident),+) => {$(
        impl<A: Recall + ?Sized> Recall for $handle<A> {
            fn recall(
                &self,
                keys: &[DedupKey],
                wanted: Fetch,
            ) -> impl Future<Output = Result<Vec<Option<StoredData>>, Error>> + Send {
                (**self).recall(keys, wanted)
            }
        }
    )+};
}

forward!(Arc, Box);

/// How much is wanted of what is kept.
///
/// Responses are large: those of all the keys that one request may carry are hundreds of megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fetch {
    /// The payload's SHA-256, and no response.
    Digest,
    /// All of it.
    DigestAndResponse,
}

/// What is kept with a complete key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredData {
    /// The SHA-256 of the payload that was handled, if the layer compares payloads.
    pub payload_sha256: Option<[u8; 32]>,
    /// The handler's response, if the layer replays responses.
    pub response: Option<Arc<StoredResponse>>,
}

impl StoredData {
    /// What is kept of a payload and a response.
    #[must_use]
    pub const fn new(
        payload_sha256: Option<[u8; 32]>,
        response: Option<Arc<StoredResponse>>,
    ) -> Self {
        Self { payload_sha256, response }
    }
}

/// A handler's response, as it is kept to be answered again.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredResponse {
    /// The status.
    pub status: StatusCode,
    /// Those of its headers that were to be kept.
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

    /// The headers as text, for a store: a JSON array of pairs of strings.
    ///
    /// A value that is not UTF-8 has no such form; the layer keeps no response that has one.
    #[must_use]
    pub fn headers_json(&self) -> String {
        let pairs: Vec<(&str, &str)> = self
            .headers
            .iter()
            .filter_map(|(name, value)| {
                Some((name.as_str(), std::str::from_utf8(value.as_bytes()).ok()?))
            })
            .collect();
        // Pairs of strings always serialize.
        serde_json::to_string(&pairs).unwrap_or_default()
    }

    /// A response from what a store has kept of it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Corrupt`] if the status or the headers are none.
    pub fn from_stored(status: i64, headers_json: &str, body: Vec<u8>) -> Result<Self, Error> {
        const CONTEXT: &str = "reading a stored response";
        let corrupt = || Error::new(ErrorKind::Corrupt, CONTEXT);
        let status = u16::try_from(status).ok().and_then(|code| StatusCode::from_u16(code).ok());
        let pairs: Vec<(String, String)> =
            serde_json::from_str(headers_json).map_err(|error| corrupt().with_source(error))?;
        let mut headers = HeaderMap::with_capacity(pairs.len());
        for (name, value) in pairs {
            let name = name.parse::<HeaderName>().map_err(|error| corrupt().with_source(error))?;
            let value = HeaderValue::from_bytes(value.as_bytes())
                .map_err(|error| corrupt().with_source(error))?;
            headers.append(name, value);
        }
        Ok(Self::new(status.ok_or_else(corrupt)?, headers, body.into()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_comes_back_as_it_was_kept() {
        let mut headers = HeaderMap::new();
        headers.append("content-type", HeaderValue::from_static("text/xml"));
        headers.append("link", HeaderValue::from_static("<a>"));
        headers.append("link", HeaderValue::from_bytes("<\u{e9}>\t\"b\"".as_bytes()).unwrap());
        let kept = StoredResponse::new(StatusCode::CREATED, headers, Bytes::from_static(b"\0\xff"));
        let again = StoredResponse::from_stored(201, &kept.headers_json(), b"\0\xff".to_vec());
        assert_eq!(again.unwrap(), kept);
        for (status, headers) in [(20, "[]"), (200, "{}"), (200, r#"[["a b","c"]]"#)] {
            let corrupt = StoredResponse::from_stored(status, headers, Vec::new()).unwrap_err();
            assert_eq!(corrupt.kind(), ErrorKind::Corrupt, "{status} {headers}");
        }
    }

    #[test]
    fn debug_output_shows_no_content() {
        let mut headers = HeaderMap::new();
        headers.append("x-token", HeaderValue::from_static("secret"));
        let kept = StoredResponse::new(StatusCode::OK, headers, Bytes::from_static(b"private"));
        let shown = format!("{kept:?}");
        assert!(!shown.contains("secret") && !shown.contains("private"), "{shown}");
    }
}
