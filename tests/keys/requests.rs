//! Requests, and how the tests read keys from them.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use bytes::Bytes;
use http::{HeaderValue, Request};
use sha2::{Digest, Sha256};
use tower_dedup::key::{Extracted, KeyPart, RequestRef};
use tower_dedup::{DedupKey, KeyErrorKind};

pub(crate) const FORM: &str = "application/x-www-form-urlencoded";

/// An id, nothing, or the reason why it is malformed.
pub(crate) type ReadId = Result<Option<String>, KeyErrorKind>;

pub(crate) const MISSING: ReadId = Ok(None);

pub(crate) fn id(text: &str) -> ReadId {
    Ok(Some(text.to_owned()))
}

pub(crate) fn read<B: Into<Bytes>>(part: &KeyPart, request: Request<B>) -> ReadId {
    let (head, body) = request.into_parts();
    let extractor = part.clone().namespace("n");
    match extractor.extract(&RequestRef::new(&head, &body.into())) {
        Ok(Extracted::Keys(keys)) => {
            let [event] = keys.events() else { panic!("not one event: {keys:?}") };
            assert_eq!(
                (event.key().namespace(), event.alias().or(event.content_identity())),
                ("n", None)
            );
            id(event.key().id())
        }
        Ok(Extracted::Missing) => MISSING,
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.kind()),
    }
}

pub(crate) fn with_headers(values: &[&[u8]]) -> Request<&'static str> {
    let mut request = Request::post("/").body("").unwrap();
    for value in values {
        request.headers_mut().append("x-id", HeaderValue::from_bytes(value).unwrap());
    }
    request
}

pub(crate) fn with_form<B>(body: B) -> Request<B> {
    Request::post("/").header("content-type", FORM).body(body).unwrap()
}

pub(crate) fn with_body<B>(body: B) -> Request<B> {
    Request::post("/").body(body).unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A request with these headers, of one letter each.
pub(crate) fn letters(values: &[(&str, &str)]) -> Request<&'static str> {
    let mut request = Request::post("/").body("").unwrap();
    for (name, value) in values {
        let name: http::HeaderName = name.parse().unwrap();
        request.headers_mut().append(name, value.parse().unwrap());
    }
    request
}

pub(crate) fn dedup_key(namespace: &str, id: &str) -> DedupKey {
    DedupKey::new(namespace, id).unwrap()
}
