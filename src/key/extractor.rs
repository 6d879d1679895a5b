//! [`KeyExtractor`]: from a request to its keys.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, request};

use super::digest::body_id;
use super::id::{DedupKey, Keys, check_namespace};
use super::part::KeyPart;
use crate::error::{ConfigError, KeyError};

type ExtractFn = dyn Fn(&RequestRef<'_>) -> Result<Extracted, KeyError> + Send + Sync;
type BypassFn = dyn Fn(&RequestRef<'_>) -> bool + Send + Sync;

/// What an extractor reads: the head of a request and its whole body.
#[derive(Clone, Copy)]
pub struct RequestRef<'r> {
    head: &'r request::Parts,
    body: &'r Bytes,
}

impl<'r> RequestRef<'r> {
    /// A view of this head and this body.
    #[must_use]
    pub fn new(head: &'r request::Parts, body: &'r Bytes) -> Self {
        Self { head, body }
    }

    /// The request's method.
    #[must_use]
    pub fn method(&self) -> &'r Method {
        &self.head.method
    }

    /// The request's target. Behind a nested router, the part that is left of it.
    #[must_use]
    pub fn uri(&self) -> &'r Uri {
        &self.head.uri
    }

    /// The request's headers.
    #[must_use]
    pub fn headers(&self) -> &'r HeaderMap {
        &self.head.headers
    }

    /// What outer layers left for inner ones.
    #[must_use]
    pub fn extensions(&self) -> &'r http::Extensions {
        &self.head.extensions
    }

    /// The raw body, all of it.
    #[must_use]
    pub fn body(&self) -> &'r Bytes {
        self.body
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

/// What an extractor found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extracted {
    /// The delivery's keys.
    Keys(Keys),
    /// A handshake or a ping: it reaches the handler undeduplicated.
    Bypass,
    /// There is no key where one was expected: the layer's policy decides.
    Missing,
}

/// Reads the keys of a delivery from its head and its body.
///
/// Made from a [`KeyPart`] by [`KeyPart::namespace`], from a closure by
/// [`KeyExtractor::from_fn`], or from a preset of [`provider`](crate::provider). Cloning is cheap.
#[derive(Clone)]
pub struct KeyExtractor {
    namespace: Arc<str>,
    rule: Rule,
    second: Option<(Arc<str>, KeyPart)>,
    bypass: Option<Arc<BypassFn>>,
    methods: Option<Arc<[Method]>>,
    retention_floor: Option<Duration>,
}

#[derive(Clone)]
enum Rule {
    Part(KeyPart),
    Fn(Arc<ExtractFn>),
}

impl KeyExtractor {
    pub(super) fn from_part(namespace: Arc<str>, part: KeyPart) -> Self {
        Self::from_rule(namespace, Rule::Part(part))
    }

    fn from_rule(namespace: Arc<str>, rule: Rule) -> Self {
        Self { namespace, rule, second: None, bypass: None, methods: None, retention_floor: None }
    }

    /// An extractor that a closure implements: batches, and whatever parts cannot say.
    ///
    /// `namespace` is where the layer puts a body digest; the closure names the namespace of every
    /// key it makes.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidNamespace`].
    ///
    /// # Example
    ///
    /// ```
    /// use tower_dedup::key::{DedupKey, Element, Extracted, KeyExtractor, Keys};
    ///
    /// // One event per line of the body, known by its first word.
    /// let lines = KeyExtractor::from_fn("lines", |request| {
    ///     let body = String::from_utf8_lossy(request.body());
    ///     let elements = body
    ///         .lines()
    ///         .filter_map(|line| line.split_whitespace().next())
    ///         .map(|id| DedupKey::new("lines", id).map(Element::new))
    ///         .collect::<Result<Vec<_>, _>>()?;
    ///     Ok(Keys::new(elements).map_or(Extracted::Missing, Extracted::Keys))
    /// })?;
    /// # let _ = lines;
    /// # Ok::<(), tower_dedup::ConfigError>(())
    /// ```
    pub fn from_fn<F>(namespace: &str, extract: F) -> Result<Self, ConfigError>
    where
        F: Fn(&RequestRef<'_>) -> Result<Extracted, KeyError> + Send + Sync + 'static,
    {
        check_namespace(namespace)?;
        Ok(Self::from_rule(namespace.into(), Rule::Fn(Arc::new(extract))))
    }

    /// Moves the keys to another namespace: one per endpoint, tenant or account, wherever ids are
    /// unique only there.
    ///
    /// The keys of an extractor made by [`from_fn`](Self::from_fn) keep the namespace that its
    /// closure gave them.
    ///
    /// # Panics
    ///
    /// If the namespace, or that of a second identity below it, is not 1 to 64 bytes without
    /// control characters.
    #[must_use]
    #[track_caller]
    pub fn namespace(mut self, namespace: &str) -> Self {
        let check = |namespace: &str| {
            check_namespace(namespace).unwrap_or_else(|error| panic!("{namespace:?}: {error}"));
        };
        check(namespace);
        if let Some((second, _)) = &mut self.second {
            let label = second.rsplit('.').next().unwrap_or_default();
            let moved = format!("{namespace}.{label}");
            check(&moved);
            *second = moved.into();
        }
        self.namespace = namespace.into();
        self
    }

    /// Gives every element a second identity: it is a duplicate if *either* is complete.
    ///
    /// For senders that report one change by two events of different ids. The second identity
    /// lives in the namespace `{namespace}.{label}`. A delivery without that value has one
    /// identity; so have the elements of a batch, whose closure gives them theirs. Mind that a later, legitimate change of the same object shares the second
    /// identity and is taken for a duplicate until the retention ends.
    ///
    /// # Panics
    ///
    /// If `label` is empty, holds a `.` or a control character, or makes the namespace longer than
    /// 64 bytes.
    #[must_use]
    #[track_caller]
    pub fn second_identity(mut self, label: &str, part: KeyPart) -> Self {
        let namespace = format!("{}.{label}", self.namespace);
        let fits = !label.is_empty() && !label.contains('.');
        assert!(fits && check_namespace(&namespace).is_ok(), "{label:?}: not a label");
        self.second = Some((namespace.into(), part));
        self
    }

    /// Lets the requests that `is_handshake` recognises reach the handler undeduplicated.
    #[must_use]
    pub fn bypass_when<F>(mut self, is_handshake: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> bool + Send + Sync + 'static,
    {
        self.bypass = Some(match self.bypass.take() {
            None => Arc::new(is_handshake),
            Some(earlier) => Arc::new(move |request| earlier(request) || is_handshake(request)),
        });
        self
    }

    /// The methods by which this sender delivers; the layer's default otherwise.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.methods = Some(methods.into_iter().collect());
        self
    }

    /// How long the sender may still deliver an event again: a layer whose retention is shorter
    /// warns when it is built, and the default retention is raised to it.
    #[must_use]
    pub fn retention_floor(mut self, floor: Duration) -> Self {
        self.retention_floor = Some(floor);
        self
    }

    /// Reads the keys of a request.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if a value is malformed: the layer answers 400.
    pub fn extract(&self, request: &RequestRef<'_>) -> Result<Extracted, KeyError> {
        if self.bypass.as_ref().is_some_and(|is_handshake| is_handshake(request)) {
            return Ok(Extracted::Bypass);
        }
        let keys = match &self.rule {
            Rule::Part(part) => match part.read(request)? {
                Some(id) => Keys::one(DedupKey::in_namespace(&self.namespace, &id)?),
                None => return Ok(Extracted::Missing),
            },
            Rule::Fn(extract) => match extract(request)? {
                Extracted::Keys(keys) => keys,
                other => return Ok(other),
            },
        };
        match (&self.second, keys.elements()) {
            (Some((namespace, part)), [element]) if element.second_identity().is_none() => {
                let Some(id) = part.read(request)? else { return Ok(Extracted::Keys(keys)) };
                let second = DedupKey::in_namespace(namespace, &id)?;
                let element = element.clone().with_second_identity(second);
                Ok(Keys::new(vec![element]).map_or(Extracted::Missing, Extracted::Keys))
            }
            _ => Ok(Extracted::Keys(keys)),
        }
    }

    /// The key of a delivery that is known by its raw body only.
    pub(crate) fn body_digest(&self, body: &[u8]) -> Result<Keys, KeyError> {
        Ok(Keys::one(DedupKey::in_namespace(&self.namespace, &body_id(body))?))
    }

    pub(crate) fn allowed_methods(&self) -> Option<&Arc<[Method]>> {
        self.methods.as_ref()
    }

    pub(crate) fn floor(&self) -> Option<Duration> {
        self.retention_floor
    }

    pub(crate) fn namespace_str(&self) -> &Arc<str> {
        &self.namespace
    }
}

impl fmt::Debug for KeyExtractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KeyExtractor");
        out.field("namespace", &self.namespace);
        match &self.rule {
            Rule::Part(part) => out.field("key", part),
            Rule::Fn(_) => out.field("key", &"closure"),
        };
        if let Some((_, part)) = &self.second {
            out.field("second_identity", part);
        }
        out.field("methods", &self.methods)
            .field("retention_floor", &self.retention_floor)
            .finish_non_exhaustive()
    }
}
