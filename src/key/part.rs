//! [`KeyPart`]: one value of a request, and how values are composed.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use super::extractor::{KeyExtractor, RequestRef};
use super::json::Pointer;
use super::{digest, form as form_field, header as header_value, json as json_value};
use super::{id::check_namespace, query as query_parameter};
use crate::error::{ConfigError, KeyError, KeyErrorKind};

type ReadFn = dyn Fn(&RequestRef<'_>) -> Result<Option<String>, KeyError> + Send + Sync;

/// Reads one value of a request: a building block of a [`KeyExtractor`].
///
/// A part answers a value, nothing (it is *missing*), or that the value is malformed.
///
/// # Why one type and not a trait?
///
/// A trait per kind of part would put the whole composition into the layer's type. One enum
/// behind one type keeps `DedupLayer<L>` readable, and [`from_fn`] is open to everything else.
#[derive(Clone)]
pub struct KeyPart(Node);

#[derive(Clone)]
enum Node {
    Header(HeaderName),
    Json(Pointer),
    Form(Arc<str>),
    Query(Arc<str>),
    BodyDigest,
    Fn(Arc<ReadFn>),
    And(Vec<KeyPart>),
    Or(Vec<KeyPart>),
    Optional(Box<KeyPart>),
    /// A part that has been read already.
    Known(Result<Option<String>, KeyError>),
}

/// The value of a request header: [`KeyPart::header`] for a name that is surely one.
///
/// # Panics
///
/// If `name` is not the name of an HTTP header; [`KeyPart::header`] answers an error instead.
#[must_use]
#[track_caller]
pub fn header(name: &str) -> KeyPart {
    KeyPart::header(name).unwrap_or_else(|error| panic!("{name:?}: {error}"))
}

/// The value at a JSON pointer in the body: [`KeyPart::json`] for a pointer that is surely one.
///
/// # Panics
///
/// If `pointer` is no JSON pointer; [`KeyPart::json`] answers an error instead.
#[must_use]
#[track_caller]
pub fn json(pointer: &str) -> KeyPart {
    KeyPart::json(pointer).unwrap_or_else(|error| panic!("{pointer:?}: {error}"))
}

/// The decoded value of a field of an `application/x-www-form-urlencoded` body.
///
/// Missing if the request names another content type; a field that occurs twice is malformed.
#[must_use]
pub fn form(field: &str) -> KeyPart {
    KeyPart(Node::Form(field.into()))
}

/// The decoded value of a parameter of the query string; one that occurs twice is malformed.
#[must_use]
pub fn query(parameter: &str) -> KeyPart {
    KeyPart(Node::Query(parameter.into()))
}

/// `body_` and the SHA-256 of the raw body in hex. Missing if the body is empty: all empty bodies
/// have one digest, and would be one event.
///
/// A last resort: many senders put an attempt counter or a time into the body of a retry, and some
/// send two real events with the same bytes.
#[must_use]
pub fn body_digest() -> KeyPart {
    KeyPart(Node::BodyDigest)
}

/// A value that a closure reads. It answers `None` where the value is missing.
///
/// ```
/// use tower_dedup::key;
///
/// // The last segment of the path.
/// let part = key::from_fn(|request| {
///     Ok(request.uri().path().rsplit('/').next().filter(|id| !id.is_empty()).map(str::to_owned))
/// });
/// # let _ = part.namespace("by-path");
/// ```
pub fn from_fn<F>(read: F) -> KeyPart
where
    F: Fn(&RequestRef<'_>) -> Result<Option<String>, KeyError> + Send + Sync + 'static,
{
    KeyPart(Node::Fn(Arc::new(read)))
}

impl KeyPart {
    /// The value of a request header.
    ///
    /// A header that occurs twice, is empty, or is not UTF-8 is malformed.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidHeaderName`].
    pub fn header(name: &str) -> Result<Self, ConfigError> {
        let name = name.parse().map_err(|_| ConfigError::InvalidHeaderName)?;
        Ok(Self(Node::Header(name)))
    }

    /// The value at a JSON pointer (RFC 6901) in the body: a string, a boolean or a 64-bit
    /// integer.
    ///
    /// A body that is not JSON, a name that occurs twice on the way, another kind of value, or an
    /// empty string is malformed; `null` is missing.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidPointer`].
    pub fn json(pointer: &str) -> Result<Self, ConfigError> {
        Ok(Self(Node::Json(Pointer::new(pointer)?)))
    }

    /// Both values: malformed if either is, missing if either is, else joined with `|` in the order
    /// of the calls.
    ///
    /// `a.and(b).and(c)` is one list of three parts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match self.0 {
            Node::And(mut parts) => {
                parts.push(other);
                Self(Node::And(parts))
            }
            node => Self(Node::And(vec![Self(node), other])),
        }
    }

    /// The first value that is present.
    ///
    /// A malformed value is malformed, and is not passed over for the next.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match self.0 {
            Node::Or(mut parts) => {
                parts.push(other);
                Self(Node::Or(parts))
            }
            node => Self(Node::Or(vec![Self(node), other])),
        }
    }

    /// Inside an [`and`](Self::and): a missing value is an empty part, instead of making the whole
    /// key missing. On its own it changes nothing: an id is never empty.
    #[must_use]
    pub fn optional(self) -> Self {
        Self(Node::Optional(Box::new(self)))
    }

    /// The extractor of keys in this namespace: what the layer takes.
    ///
    /// # Panics
    ///
    /// If the namespace is not 1 to 64 bytes without control characters;
    /// [`try_namespace`](Self::try_namespace) answers an error instead.
    #[must_use]
    #[track_caller]
    pub fn namespace(self, namespace: &str) -> KeyExtractor {
        self.try_namespace(namespace).unwrap_or_else(|error| panic!("{namespace:?}: {error}"))
    }

    /// The extractor of keys in this namespace.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidNamespace`].
    pub fn try_namespace(self, namespace: &str) -> Result<KeyExtractor, ConfigError> {
        check_namespace(namespace)?;
        Ok(KeyExtractor::from_part(namespace.into(), self))
    }

    /// The SHA-256 of the value: of the raw body, for the body's digest.
    pub(crate) fn sha256(&self, request: &RequestRef<'_>) -> Result<Option<[u8; 32]>, KeyError> {
        if let Node::BodyDigest = self.0 {
            return Ok(Some(digest::sha256(request.body())));
        }
        Ok(self.read(request)?.map(|value| digest::sha256(value.as_bytes())))
    }

    /// Reads the value.
    pub(crate) fn read<'r>(
        &self,
        request: &RequestRef<'r>,
    ) -> Result<Option<Cow<'r, str>>, KeyError> {
        match &self.0 {
            Node::Header(name) => header_value::read(request.headers(), name),
            Node::Json(pointer) => Ok(json_value::read(request.body(), pointer)?.map(Cow::Owned)),
            Node::Form(field) => form_field::read(request.headers(), request.body(), field),
            Node::Query(parameter) => query_parameter::read(request.uri(), parameter),
            Node::BodyDigest => {
                let body = request.body();
                Ok((!body.is_empty()).then(|| digest::body_id(body).into()))
            }
            Node::Fn(read) => match read(request)? {
                Some(value) if value.is_empty() => {
                    Err(KeyError::new(KeyErrorKind::Empty, "the extracted value"))
                }
                Some(value) if value.contains('\0') => {
                    Err(KeyError::new(KeyErrorKind::Nul, "the extracted value"))
                }
                value => Ok(value.map(Cow::Owned)),
            },
            Node::And(parts) => all_of(parts, request),
            Node::Or(parts) => {
                for part in parts {
                    if let Some(value) = part.read(request)? {
                        return Ok(Some(value));
                    }
                }
                Ok(None)
            }
            Node::Optional(part) => part.read(request),
            Node::Known(answer) => answer.clone().map(|value| value.map(Cow::Owned)),
        }
    }

    /// The same part with what it reads from the head read already: what does not change from one
    /// event of a batch to the next is not looked for again in each.
    pub(super) fn with_head_of(&self, request: &RequestRef<'_>) -> Self {
        let all = |parts: &[Self]| parts.iter().map(|part| part.with_head_of(request)).collect();
        Self(match &self.0 {
            Node::Header(_) | Node::Query(_) => {
                Node::Known(self.read(request).map(|value| value.map(Cow::into_owned)))
            }
            Node::And(parts) => Node::And(all(parts)),
            Node::Or(parts) => Node::Or(all(parts)),
            Node::Optional(part) => Node::Optional(Box::new(part.with_head_of(request))),
            of_body => of_body.clone(),
        })
    }
}

fn all_of<'r>(
    parts: &[KeyPart],
    request: &RequestRef<'r>,
) -> Result<Option<Cow<'r, str>>, KeyError> {
    let mut id = String::new();
    let (mut any, mut missing) = (false, false);
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            id.push('|');
        }
        // To the end even if one is missing: what is malformed is malformed, and not merely
        // missing, whichever comes first.
        match part.read(request)? {
            Some(value) => {
                any = true;
                push_escaped(&mut id, &value);
            }
            None => missing |= !matches!(part.0, Node::Optional(_)),
        }
    }
    // All parts optional and none there: an id of separators only would be one id for many events.
    Ok((any && !missing).then_some(Cow::Owned(id)))
}

/// The id of a list of parts, as an [`and`](KeyPart::and) of optional ones writes it.
pub(crate) fn compose(parts: &[Option<&str>]) -> String {
    let mut id = String::new();
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            id.push('|');
        }
        push_escaped(&mut id, part.unwrap_or_default());
    }
    id
}

/// Escapes the separator, and the escape itself: what lets the parts be told apart again.
fn push_escaped(id: &mut String, part: &str) {
    for char in part.chars() {
        match char {
            '%' => id.push_str("%25"),
            '|' => id.push_str("%7C"),
            plain => id.push(plain),
        }
    }
}

impl fmt::Debug for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Node::Header(name) => write!(f, "header({name})"),
            Node::Json(pointer) => write!(f, "json({})", pointer.as_str()),
            Node::Form(field) => write!(f, "form({field})"),
            Node::Query(parameter) => write!(f, "query({parameter})"),
            Node::BodyDigest => f.write_str("body_digest()"),
            Node::Fn(_) => f.write_str("from_fn(..)"),
            Node::And(parts) => f.debug_tuple("and").field(parts).finish(),
            Node::Or(parts) => f.debug_tuple("or").field(parts).finish(),
            Node::Optional(part) => f.debug_tuple("optional").field(part).finish(),
            // What it holds is what a key is made of.
            Node::Known(_) => f.write_str("known(..)"),
        }
    }
}
