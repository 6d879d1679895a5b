//! [`KeyExtractor`]: from a request to its keys.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, request};

use super::batch::{Batch, Item, check_id_bytes};
use super::digest::{body_id, sha256_hex};
use super::id::{DedupKey, Event, Keys, MAX_NAMESPACE_LEN, check_namespace};
use super::part::KeyPart;
use crate::error::{ConfigError, KeyError, KeyErrorKind};

type ExtractFn = dyn Fn(&RequestRef<'_>) -> Result<Extracted, KeyError> + Send + Sync;
type NamespaceFn = dyn Fn(&RequestRef<'_>) -> Option<String> + Send + Sync;
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

    /// The raw body, all of it. Within a [`Batch`], that of the event.
    #[must_use]
    pub fn body(&self) -> &'r Bytes {
        self.body
    }

    /// The same head with another body: for a batch that is wrapped in something else.
    #[must_use]
    pub fn with_body<'b>(&self, body: &'b Bytes) -> RequestRef<'b>
    where
        'r: 'b,
    {
        RequestRef { head: self.head, body }
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

/// What a rule found, before it is put into a namespace.
#[derive(Debug)]
pub(crate) enum Found {
    One(String),
    /// At least one.
    Each(Vec<Item>),
    Bypass,
    Missing,
}

/// A rule that neither parts nor a batch can say.
pub(crate) type Reader = Arc<dyn Fn(&RequestRef<'_>) -> Result<Found, KeyError> + Send + Sync>;

/// Reads the keys of a delivery from its head and its body.
///
/// Made from a [`KeyPart`] by [`KeyPart::namespace`], from a [`Batch`] by [`Batch::namespace`],
/// from a closure by [`KeyExtractor::from_fn`], or from a preset of
/// [`provider`](crate::provider). Cloning is cheap.
#[derive(Clone)]
pub struct KeyExtractor {
    namespace: Arc<str>,
    namespace_by: Option<Arc<NamespaceFn>>,
    rule: Rule,
    second: Option<(Arc<str>, KeyPart)>,
    bypass: Option<Arc<BypassFn>>,
    methods: Option<Arc<[Method]>>,
    retention_floor: Option<Duration>,
}

#[derive(Clone)]
enum Rule {
    Part(KeyPart),
    Batch(Batch),
    Reader(Reader),
    Fn(Arc<ExtractFn>),
}

impl KeyExtractor {
    pub(super) fn from_part(namespace: Arc<str>, part: KeyPart) -> Self {
        Self::from_rule(namespace, Rule::Part(part))
    }

    pub(super) fn from_batch(namespace: Arc<str>, batch: Batch) -> Self {
        Self::from_rule(namespace, Rule::Batch(batch))
    }

    pub(crate) fn from_reader(namespace: &'static str, reader: Reader) -> Self {
        Self::from_rule(namespace.into(), Rule::Reader(reader))
    }

    fn from_rule(namespace: Arc<str>, rule: Rule) -> Self {
        Self {
            namespace,
            namespace_by: None,
            rule,
            second: None,
            bypass: None,
            methods: None,
            retention_floor: None,
        }
    }

    /// An extractor that a closure implements: whatever neither parts nor [`each`](super::each) can
    /// say.
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
    /// use tower_dedup::key::{DedupKey, Event, Extracted, KeyExtractor, Keys};
    ///
    /// // One event per line of the body, known by its first word.
    /// let lines = KeyExtractor::from_fn("lines", |request| {
    ///     let body = String::from_utf8_lossy(request.body());
    ///     let events = body
    ///         .lines()
    ///         .filter_map(|line| line.split_whitespace().next())
    ///         .map(|id| DedupKey::new("lines", id).map(Event::new))
    ///         .collect::<Result<Vec<_>, _>>()?;
    ///     Ok(Keys::new(events).map_or(Extracted::Missing, Extracted::Keys))
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

    /// Moves the keys to another namespace: one for each handler that has to see the event, and
    /// for each account whose ids are unique only there. Several senders, Stripe among them, send
    /// one event under one id to every endpoint that is subscribed to it: in one namespace, the
    /// second endpoint's delivery is a duplicate of the first one's, and its handler never runs.
    ///
    /// The keys of an extractor made by [`from_fn`](Self::from_fn) keep the namespace that its
    /// closure gave them.
    ///
    /// # Panics
    ///
    /// If the namespace, or that of a second identity below it, is not 1 to 64 bytes without
    /// control characters; under [`namespace_by`](Self::namespace_by), 1 to 47 bytes.
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
        self.check_room();
        self
    }

    /// Adds what a closure reads from the request to the namespace, `{namespace}:{value}`: the
    /// route, where one layer goes around several routes and each route's handler has to see an
    /// event that comes to all of them.
    ///
    /// A value with which the namespace would be longer than 64 bytes, or that holds a control
    /// character, is replaced by the first 16 hex digits of its SHA-256. Without a value, or with
    /// an empty one, the layer answers 400: a key in the wrong namespace would lose the event. A
    /// value is part of the key: a route that is renamed has no keys. The keys of an extractor made
    /// by [`from_fn`](Self::from_fn) keep the namespace that its closure gave them.
    ///
    /// # Panics
    ///
    /// If the namespace, or that of a second identity, is longer than 47 bytes.
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "memory")]
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// use axum::{Router, body::Body, extract::MatchedPath, http::Request, routing::post};
    /// use tower::ServiceExt;
    /// use tower_dedup::adapter::MemoryAdapter;
    /// use tower_dedup::{DedupLayer, provider};
    ///
    /// let by_route = provider::STRIPE.extractor().namespace_by(|request| {
    ///     Some(request.extensions().get::<MatchedPath>()?.as_str().to_owned())
    /// });
    /// let app: Router = Router::new()
    ///     .route("/stripe/billing", post(async || "billed"))
    ///     .route("/stripe/tax", post(async || "taxed"))
    ///     .layer(DedupLayer::new(by_route, MemoryAdapter::new()));
    /// for (path, result) in [
    ///     ("/stripe/billing", None),
    ///     ("/stripe/tax", None), // the same event, for another handler
    ///     ("/stripe/billing", Some("duplicate")),
    /// ] {
    ///     let event = Request::post(path).body(Body::from(r#"{"id": "evt_1"}"#)).unwrap();
    ///     let response = app.clone().oneshot(event).await?;
    ///     let found = response.headers().get("x-dedup-result");
    ///     assert_eq!(found.map(|found| found.as_bytes()), result.map(str::as_bytes));
    /// }
    /// # Ok::<(), std::convert::Infallible>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    #[track_caller]
    pub fn namespace_by<F>(mut self, read: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> Option<String> + Send + Sync + 'static,
    {
        self.namespace_by = Some(Arc::new(read));
        self.check_room();
        self
    }

    /// Panics if a value of [`namespace_by`](Self::namespace_by) may not fit.
    #[track_caller]
    fn check_room(&self) {
        let second = self.second.as_ref().map(|(namespace, _)| namespace);
        for namespace in std::iter::once(&self.namespace).chain(second) {
            let fits = self.namespace_by.is_none() || namespace.len() <= MAX_SCOPED_LEN;
            assert!(fits, "{namespace:?}: longer than {MAX_SCOPED_LEN} bytes");
        }
    }

    /// Gives every event a second identity: it is a duplicate if *either* is complete.
    ///
    /// For senders that report one change by two events of different ids. The second identity
    /// lives in the namespace `{namespace}.{label}`. In a [`Batch`] it is read from the event, as
    /// the key is; a closure ([`from_fn`](Self::from_fn)) gives the events of a batch theirs. An
    /// event without that value has one identity. Mind that a later, legitimate change of the
    /// same object shares the second identity and is taken for a duplicate until the retention
    /// ends.
    ///
    /// # Panics
    ///
    /// If `label` is empty, holds a `.` or a control character, or makes the namespace longer than
    /// 64 bytes, or 47 under [`namespace_by`](Self::namespace_by).
    #[must_use]
    #[track_caller]
    pub fn second_identity(mut self, label: &str, part: KeyPart) -> Self {
        let namespace = format!("{}.{label}", self.namespace);
        let fits = !label.is_empty() && !label.contains('.');
        assert!(fits && check_namespace(&namespace).is_ok(), "{label:?}: not a label");
        self.second = Some((namespace.into(), part));
        self.check_room();
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
        let found = match &self.rule {
            Rule::Part(part) => match part.read(request)? {
                Some(id) => return self.one(&id, request),
                None => Found::Missing,
            },
            Rule::Batch(batch) => batch.read(request)?,
            Rule::Reader(read) => read(request)?,
            Rule::Fn(extract) => return self.with_second_of_one(extract(request)?, request),
        };
        Ok(match found {
            Found::One(id) => return self.one(&id, request),
            Found::Each(items) => {
                let events = self.events(items, request)?;
                Keys::new(events).map_or(Extracted::Missing, Extracted::Keys)
            }
            Found::Bypass => Extracted::Bypass,
            Found::Missing => Extracted::Missing,
        })
    }

    /// The namespaces of a request's keys, and of their second identities.
    fn namespaces(&self, request: &RequestRef<'_>) -> Result<Namespaces<'_>, KeyError> {
        let second = self.second.as_ref().map_or("", |(namespace, _)| namespace);
        let Some(read) = &self.namespace_by else {
            return Ok(Namespaces { key: Cow::Borrowed(&self.namespace), second: second.into() });
        };
        let value = read(request).filter(|value| !value.is_empty());
        let value =
            value.ok_or_else(|| KeyError::new(KeyErrorKind::Missing, "the namespace's value"))?;
        Ok(Namespaces { key: scoped(&self.namespace, &value), second: scoped(second, &value) })
    }

    /// The event of a delivery of one event, with all its identities.
    fn one(&self, id: &str, request: &RequestRef<'_>) -> Result<Extracted, KeyError> {
        let namespaces = self.namespaces(request)?;
        let event = Event::new(DedupKey::in_namespace(&namespaces.key, id)?);
        let Some((_, part)) = &self.second else {
            return Ok(Extracted::Keys(event.into()));
        };
        let second = part.read(request)?;
        Ok(Extracted::Keys(with_second(event, &namespaces.second, second)?.into()))
    }

    /// The events of a batch, with all their identities.
    fn events(&self, items: Vec<Item>, request: &RequestRef<'_>) -> Result<Vec<Event>, KeyError> {
        let namespaces = self.namespaces(request)?;
        let second = self.second.as_ref().map(|(_, part)| part.with_head_of(request));
        let mut id_bytes = 0;
        let event = |item: Item| {
            let mut event = Event::new(DedupKey::in_namespace(&namespaces.key, &item.id)?);
            if let Some(part) = &second {
                let id = part.read(&request.with_body(&item.body))?;
                id_bytes += id.as_ref().map_or(0, |id| id.len());
                check_id_bytes(id_bytes)?;
                event = with_second(event, &namespaces.second, id)?;
            }
            Ok(if item.payload { event.with_payload(item.body) } else { event })
        };
        items.into_iter().map(event).collect()
    }

    /// What a closure found, with the second identity if it is one event that has none.
    fn with_second_of_one(
        &self,
        extracted: Extracted,
        request: &RequestRef<'_>,
    ) -> Result<Extracted, KeyError> {
        let Extracted::Keys(keys) = &extracted else { return Ok(extracted) };
        let (Some((_, part)), [event]) = (&self.second, keys.events()) else {
            return Ok(extracted);
        };
        if event.second_identity().is_some() {
            return Ok(extracted);
        }
        let namespace = self.namespaces(request)?.second;
        let event = with_second(event.clone(), &namespace, part.read(request)?)?;
        Ok(Extracted::Keys(keys.with_only(event)))
    }

    /// The key of a delivery that is known by its raw body only.
    ///
    /// # Errors
    ///
    /// The body is empty: all empty bodies have one digest.
    pub(crate) fn body_digest(&self, request: &RequestRef<'_>) -> Result<Keys, KeyError> {
        if request.body().is_empty() {
            return Err(KeyError::new(KeyErrorKind::Missing, "the body"));
        }
        let namespace = self.namespaces(request)?.key;
        Ok(Keys::one(DedupKey::in_namespace(&namespace, &body_id(request.body()))?))
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

/// The namespaces of one request.
struct Namespaces<'e> {
    key: Cow<'e, str>,
    /// Of second identities; empty if there are none.
    second: Cow<'e, str>,
}

/// The longest namespace to which a value can be added.
const MAX_SCOPED_LEN: usize = MAX_NAMESPACE_LEN - 1 - VALUE_DIGITS;
const VALUE_DIGITS: usize = 16;

fn scoped(namespace: &str, value: &str) -> Cow<'static, str> {
    let scoped = format!("{namespace}:{value}");
    match check_namespace(&scoped) {
        Ok(()) => scoped.into(),
        Err(_) => format!("{namespace}:{}", &sha256_hex(value.as_bytes())[..VALUE_DIGITS]).into(),
    }
}

fn with_second(event: Event, namespace: &str, id: Option<Cow<'_, str>>) -> Result<Event, KeyError> {
    let Some(id) = id else { return Ok(event) };
    Ok(event.with_second_identity(DedupKey::in_namespace(namespace, &id)?))
}

impl fmt::Debug for KeyExtractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KeyExtractor");
        out.field("namespace", &self.namespace);
        match &self.rule {
            Rule::Part(part) => out.field("key", part),
            Rule::Batch(batch) => out.field("key", batch),
            Rule::Reader(_) => out.field("key", &"reader"),
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
