//! [`KeyPart`]: one value of a request, and how values are composed.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use super::id::check_value;
use super::json::{Pointer, Pointers};
use super::request::RequestRef;
use super::{digest, field, json as json_value};
use crate::error::{ConfigError, KeyError, KeyErrorKind};

type ReadFn = dyn Fn(&RequestRef<'_>) -> Result<Option<String>, KeyError> + Send + Sync;

/// Reads one value of a request: a building block of a [`KeyExtractor`](super::KeyExtractor).
///
/// A part returns a value, `None` (the value is *missing*), or an error (the value is malformed).
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
    /// The result of a part that has been read already.
    Known(Result<Option<String>, KeyError>),
    Invalid(ConfigError),
}

/// Reads a request header.
///
/// A header that occurs twice, is empty or blank, or is not UTF-8 is malformed. A text that is not
/// a header name makes an [invalid](super::KeyExtractor::checked) key.
#[must_use]
pub fn header(name: &str) -> KeyPart {
    let invalid =
        |_| KeyPart::invalid(ConfigError::value("header", "the name of an HTTP header", &name));
    name.parse().map_or_else(invalid, |name| KeyPart(Node::Header(name)))
}

/// Reads the value at a JSON pointer (RFC 6901) in the body: a string, a boolean or a 64-bit
/// integer.
///
/// A body that is not JSON, a name that occurs twice in the path, a value of another kind, and a
/// string that is empty or blank are malformed. `null` is missing. A byte order mark before the
/// JSON is skipped.
///
/// A pointer is empty or starts with `/`, and contains `~` only in `~0` and `~1`. Any other text
/// makes an [invalid](super::KeyExtractor::checked) key.
#[must_use]
pub fn json(pointer: &str) -> KeyPart {
    Pointer::parse(pointer).map_or_else(KeyPart::invalid, |it| KeyPart(Node::Json(it)))
}

/// Reads a field of an `application/x-www-form-urlencoded` body and decodes its value.
///
/// The value is missing if the request has another content type. A field that occurs twice, or is
/// empty or blank, is malformed. A byte order mark before the form is skipped.
#[must_use]
pub fn form(field: &str) -> KeyPart {
    KeyPart(Node::Form(field.into()))
}

/// Reads a parameter of the query string and decodes its value. A parameter that occurs twice, or
/// is empty or blank, is malformed.
#[must_use]
pub fn query(parameter: &str) -> KeyPart {
    KeyPart(Node::Query(parameter.into()))
}

/// Returns `body_` and the SHA-256 of the raw body in hex. The value is missing if the body is
/// empty, because all empty bodies would be one event.
///
/// Use this only if the event has no id. Many senders put an attempt counter or a time into the
/// body of a retry, and some send two real events with the same bytes.
#[must_use]
pub fn body_digest() -> KeyPart {
    KeyPart(Node::BodyDigest)
}

/// Reads a value with a closure, which returns `None` if the value is missing.
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
    pub(super) fn invalid(fault: ConfigError) -> Self {
        Self(Node::Invalid(fault))
    }

    /// Returns the fault of an invalid part, or of a part of it.
    pub(crate) fn fault(&self) -> Option<&ConfigError> {
        match &self.0 {
            Node::Invalid(fault) => Some(fault),
            _ => self.inner().iter().find_map(Self::fault),
        }
    }

    /// Reads both values and joins them with `|`, in the order of the calls. The result is
    /// malformed if either value is malformed, else missing if either value is missing.
    ///
    /// `a.and(b).and(c)` is one list of three parts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let mut parts = if let Node::And(parts) = self.0 { parts } else { vec![self] };
        parts.push(other);
        Self(Node::And(parts))
    }

    /// Reads the first value that is present.
    ///
    /// A value that is blank, or a JSON value that is not an id, counts as missing, because another
    /// alternative may have the id. If none has it, the result is malformed. Any other malformed
    /// value makes the result malformed: the next alternative is not tried.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let mut parts = if let Node::Or(parts) = self.0 { parts } else { vec![self] };
        parts.push(other);
        Self(Node::Or(parts))
    }

    /// Turns a missing value inside an [`and`](Self::and) into an empty part; otherwise it would
    /// make the whole key missing. A blank value is missing, too: some senders write `""` for a
    /// value that they do not have. Outside an `and`, a missing value stays missing, because an id
    /// is never empty.
    ///
    /// A JSON value that is not an id stays malformed, because two events that differ only there
    /// would have one id.
    #[must_use]
    pub fn optional(self) -> Self {
        Self(Node::Optional(Box::new(self)))
    }

    /// Returns the SHA-256 of the value; for a body digest, that of the raw body, even an empty
    /// one. A missing value has the digest of the empty text, which no present value is.
    pub(crate) fn sha256(&self, request: &RequestRef<'_>) -> Result<[u8; 32], KeyError> {
        if self.is_body_digest() {
            return Ok(digest::sha256(request.body()));
        }
        Ok(digest::sha256(self.read_or_empty(request)?.as_bytes()))
    }

    /// Reads the value. A missing or blank value, also inside an `and`, is empty.
    fn read_or_empty<'r>(&self, request: &RequestRef<'r>) -> Result<Cow<'r, str>, KeyError> {
        match &self.0 {
            Node::And(parts) => {
                let (id, is_id) = join(parts, request)?;
                unless_blank(is_id.map(Some)).map(|_| id.into())
            }
            Node::Optional(part) => part.read_or_empty(request),
            _ => Ok(self.read_unless_blank(request)?.unwrap_or_default()),
        }
    }

    /// Reads the value in a place where none is needed: a blank value is missing.
    pub(crate) fn read_unless_blank<'r>(
        &self,
        request: &RequestRef<'r>,
    ) -> Result<Option<Cow<'r, str>>, KeyError> {
        unless_blank(self.read(request))
    }

    /// Returns `true` for [`body_digest`].
    pub(crate) fn is_body_digest(&self) -> bool {
        matches!(self.0, Node::BodyDigest)
    }

    /// Returns `true` if a digest of the body is a part of the value.
    pub(super) fn reads_body_digest(&self) -> bool {
        self.is_body_digest() || self.inner().iter().any(Self::reads_body_digest)
    }

    /// Reads the value.
    ///
    /// # Panics
    ///
    /// If the part is invalid.
    pub(crate) fn read<'r>(
        &self,
        request: &RequestRef<'r>,
    ) -> Result<Option<Cow<'r, str>>, KeyError> {
        let value = match &self.0 {
            Node::Header(name) => {
                field::header(request.headers(), name).map(|value| value.map(Cow::Borrowed))
            }
            Node::Json(pointer) => json_value::read(request.body(), request.values(), pointer),
            Node::Form(name) => field::form(request, name),
            Node::Query(parameter) => {
                let query = request.uri().query().unwrap_or_default();
                field::pair(query.as_bytes(), parameter)
            }
            Node::BodyDigest => {
                let body = request.body();
                Ok((!body.is_empty()).then(|| digest::body_id(body).into()))
            }
            Node::Fn(read) => {
                let Some(value) = read(request)? else { return Ok(None) };
                check_value(&value).map(|()| Some(Cow::Owned(value)))
            }
            Node::And(parts) => {
                let (id, is_id) = join(parts, request)?;
                return Ok(is_id?.then_some(Cow::Owned(id)));
            }
            Node::Or(parts) => {
                let mut fault = None;
                for part in parts {
                    match part.read(request) {
                        Ok(None) => {}
                        Err(error) if error.kind().is_no_id() => drop(fault.get_or_insert(error)),
                        value => return value,
                    }
                }
                return fault.map_or(Ok(None), Err);
            }
            Node::Optional(part) => return part.read_unless_blank(request),
            Node::Known(result) => return result.clone().map(|value| value.map(Cow::Owned)),
            Node::Invalid(fault) => panic!("{fault}"),
        };
        value.map_err(|kind| self.error(kind))
    }

    /// Returns an error about the value, which names its place.
    fn error(&self, kind: KeyErrorKind) -> KeyError {
        match &self.0 {
            Node::Json(pointer) => pointer.error(kind),
            _ => KeyError::new(kind, self.place()),
        }
    }

    /// Returns the place of the value; of several, joined as in the guide's table of senders.
    pub(crate) fn place(&self) -> String {
        let all = |by: &str| self.inner().iter().map(Self::place).collect::<Vec<_>>().join(by);
        match &self.0 {
            Node::Header(name) => format!("header {name}"),
            Node::Json(pointer) => format!("JSON value {}", pointer.as_str()),
            Node::Form(field) => format!("form field {field}"),
            Node::Query(parameter) => format!("query parameter {parameter}"),
            Node::BodyDigest => "the body".to_owned(),
            Node::And(_) => all("|"),
            Node::Or(_) => all(" or "),
            Node::Optional(part) => part.place() + "?",
            _ => "the extracted value".to_owned(),
        }
    }

    /// Returns the parts that this part is composed of.
    fn inner(&self) -> &[Self] {
        match &self.0 {
            Node::And(parts) | Node::Or(parts) => parts,
            Node::Optional(part) => std::slice::from_ref(part),
            _ => &[],
        }
    }

    /// Adds all JSON pointers.
    pub(super) fn add_pointers(&self, pointers: &mut Pointers) {
        if let Node::Json(pointer) = &self.0 {
            pointers.add(pointer);
        }
        self.inner().iter().for_each(|part| part.add_pointers(pointers));
    }

    /// Reads what the part reads from the head, so that a multi-event delivery reads it once
    /// instead of once for each event.
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

/// Takes a blank value for a missing one.
fn unless_blank<T>(value: Result<Option<T>, KeyError>) -> Result<Option<T>, KeyError> {
    match value {
        Err(error) if error.kind() == KeyErrorKind::Empty => Ok(None),
        value => value,
    }
}

/// Returns the values of an `and`, joined, and whether they are an id, or why a value is none. Such
/// a value, and a missing one, is empty.
fn join(
    parts: &[KeyPart],
    request: &RequestRef<'_>,
) -> Result<(String, Result<bool, KeyError>), KeyError> {
    let mut id = String::new();
    let (mut any, mut missing, mut fault) = (false, false, None);
    // All parts are read even if one is missing or no id, because every other fault is reported
    // first.
    for (index, part) in parts.iter().enumerate() {
        let value = match part.read(request) {
            Err(error) if error.kind().is_no_id() => {
                // A blank value may be missing, another one never.
                if fault.as_ref().is_none_or(|it: &KeyError| it.kind() == KeyErrorKind::Empty) {
                    fault = Some(error);
                }
                None
            }
            value => value?,
        };
        any |= value.is_some();
        missing |= value.is_none() && !matches!(part.0, Node::Optional(_));
        push_part(&mut id, index, value.as_deref());
    }
    // With all parts optional and missing, an id of separators only would name many events.
    Ok((id, fault.map_or(Ok(any && !missing), Err)))
}

/// Returns the id of a list of parts, as an [`and`](KeyPart::and) of optional parts writes it.
pub(crate) fn compose(parts: &[Option<&str>]) -> String {
    let mut id = String::new();
    for (index, part) in parts.iter().enumerate() {
        push_part(&mut id, index, *part);
    }
    id
}

/// Appends a part with `|` and `%` escaped, so that the parts can be separated again. A missing
/// part is empty.
fn push_part(id: &mut String, index: usize, part: Option<&str>) {
    if index > 0 {
        id.push('|');
    }
    for char in part.unwrap_or_default().chars() {
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
            // It holds a part of a key.
            Node::Known(_) => f.write_str("known(..)"),
            Node::Invalid(fault) => write!(f, "invalid({fault})"),
        }
    }
}
