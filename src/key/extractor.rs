//! [`KeyExtractor`]: from a request to its keys.

use std::borrow::Cow;
#[cfg(feature = "verify")]
use std::cell::OnceCell;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Method;

use super::digest::body_id;
use super::each::EachKey;
use super::event_part::{EventPart, FoundId};
use super::events::{Events, Extracted};
use super::id::{DedupKey, Event, Keys, check_namespace};
use super::idempotency;
use super::naming::Naming;
use super::part::{KeyPart, body_digest};
use super::request::RequestRef;
use crate::error::{ConfigError, KeyError, KeyErrorKind, valid};

type ExtractFn = dyn Fn(&RequestRef<'_>) -> Result<Extracted, KeyError> + Send + Sync;
type ConditionFn = dyn Fn(&RequestRef<'_>) -> bool + Send + Sync;

/// A key that a layer takes: a [`KeyExtractor`], or a [`Preset`](crate::provider::Preset).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the key of a layer",
    label = "a `KeyExtractor` or a `Preset` is wanted",
    note = "a `KeyPart` or an `EachKey` becomes a `KeyExtractor` by its namespace: add `.namespace(\"acme\")`"
)]
pub trait IntoKeyExtractor: Into<KeyExtractor> {}

impl IntoKeyExtractor for KeyExtractor {}

/// A rule that neither a part nor an [`EachKey`] can express.
pub(crate) type Reader = fn(Events<'_>) -> Result<Extracted, KeyError>;

/// Reads the keys of a delivery from its head and its body.
///
/// It is made by [`KeyPart::namespace`], [`EachKey::namespace`] or [`KeyExtractor::from_fn`], or
/// from a preset of [`provider`](crate::provider). Cloning is cheap.
///
/// A preset also has the methods of its sender, and how long the sender may deliver an event again.
/// For a sender of your own, set [`methods`](crate::DedupLayer::methods) and
/// [`retention`](crate::DedupLayer::retention) of the layer.
///
/// ```
/// use tower_dedup::{KeyExtractor, key, provider};
///
/// let own = key::header("webhook-id").or(key::json("/event/id")).namespace("acme");
/// let of_preset = KeyExtractor::from(provider::GITHUB).namespace("code");
/// # let _ = (own, of_preset);
/// ```
#[derive(Clone)]
pub struct KeyExtractor {
    pub(crate) namespace: Arc<str>,
    rule: Rule,
    naming: Naming,
    bypass: Vec<Arc<ConditionFn>>,
    handshake: Vec<Arc<ConditionFn>>,
    /// The methods by which the sender delivers.
    pub(crate) methods: &'static [Method],
    /// How long the sender may deliver an event again.
    pub(crate) retention_floor: Option<Duration>,
    /// The largest body that the sender sends, in bytes.
    pub(crate) max_body: Option<usize>,
    /// The sender signs its requests.
    pub(crate) is_signed: bool,
    /// The sender's signature does not cover the id.
    pub(crate) unsigned_id: bool,
    /// The sender does not deliver again after a response, whatever the response is.
    pub(crate) tried_once: bool,
}

/// How the keys of a request are read.
#[derive(Clone)]
pub(crate) enum Rule {
    Part(EventPart),
    Each(EachKey),
    /// A list of events in most requests, but not in all.
    Reader(Reader),
    Fn(Arc<ExtractFn>),
    /// The header `Idempotency-Key` within this scope.
    IdempotencyKey(KeyPart),
}

impl Rule {
    pub(crate) fn part(part: KeyPart) -> Self {
        Self::Part(EventPart::new(part))
    }
}

impl KeyPart {
    /// Makes an extractor of keys in this [namespace](KeyExtractor::namespace), which the layer
    /// takes.
    #[must_use]
    pub fn namespace(self, namespace: &str) -> KeyExtractor {
        KeyExtractor::new(namespace, Rule::part(self))
    }
}

impl EachKey {
    /// Makes an extractor of keys in this [namespace](KeyExtractor::namespace), which the layer
    /// takes.
    #[must_use]
    pub fn namespace(self, namespace: &str) -> KeyExtractor {
        KeyExtractor::new(namespace, Rule::Each(self))
    }
}

impl KeyExtractor {
    pub(crate) fn new(namespace: &str, rule: Rule) -> Self {
        Self {
            namespace: namespace.into(),
            rule,
            naming: Naming::default(),
            bypass: Vec::new(),
            handshake: Vec::new(),
            methods: &[Method::POST, Method::PUT, Method::PATCH, Method::DELETE],
            retention_floor: None,
            max_body: None,
            is_signed: false,
            unsigned_id: false,
            tried_once: false,
        }
    }

    /// Makes the extractor of requests with the header `Idempotency-Key`.
    pub(crate) fn idempotency_key(scope: KeyPart) -> Self {
        let methods = &[Method::POST, Method::PATCH];
        Self { methods, ..Self::new("idempotency-key", Rule::IdempotencyKey(scope)) }
    }

    /// Makes an extractor from a closure, for keys that neither a part nor [`each`](super::each)
    /// can express.
    ///
    /// The closure gives every key its namespace. `namespace` is used for body digests only. If it
    /// is [refused](Self::namespace), the key is [invalid](Self::checked).
    ///
    /// # Example
    ///
    /// ```
    /// use tower_dedup::key::{Event, Extracted, Keys};
    /// use tower_dedup::{DedupKey, KeyExtractor};
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
    /// });
    /// # let _ = lines;
    /// ```
    pub fn from_fn<F>(namespace: &str, extract: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> Result<Extracted, KeyError> + Send + Sync + 'static,
    {
        Self::new(namespace, Rule::Fn(Arc::new(extract)))
    }

    /// Returns the extractor, if it is valid. [`DedupLayer::checked`](crate::DedupLayer::checked)
    /// does the same for the key of a layer.
    ///
    /// ```
    /// use tower_dedup::key;
    ///
    /// let refused = key::json("id").namespace("acme").checked().unwrap_err();
    /// let text = "`pointer` must be a JSON pointer (RFC 6901), not \"id\"";
    /// assert_eq!(refused.to_string(), text);
    /// ```
    ///
    /// # Errors
    ///
    /// - A namespace that is not 1 to 64 bytes without control characters. For a second identity,
    ///   the length includes `.` and the label. Under [`namespace_by`](Self::namespace_by), each of
    ///   them is at most 47 bytes long once it is escaped.
    /// - A namespace that ends with `.body`, because those of content identities do.
    /// - A label of an [alias](Self::alias) that is empty or holds a `.`, and an alias
    ///   that reads a [`body_digest`](super::body_digest), which is a content identity.
    /// - An invalid name of a header, and an invalid JSON pointer.
    pub fn checked(self) -> Result<Self, ConfigError> {
        self.check()?;
        Ok(self)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_namespace(&self.namespace)?;
        self.naming.check(&self.namespace)?;
        let of_rule = match &self.rule {
            Rule::Part(part) => part.fault(),
            Rule::Each(each) => each.fault(),
            Rule::IdempotencyKey(scope) => scope.fault(),
            Rule::Reader(_) | Rule::Fn(_) => None,
        };
        of_rule.map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Moves the keys to another namespace. Use one namespace for each handler that has to see the
    /// event, and one for each account whose ids are unique only there.
    ///
    /// Several senders, Stripe among them, send one event with one id to every subscribed endpoint.
    /// If two endpoints share a namespace, the second endpoint's delivery is a duplicate, and the
    /// second handler never runs.
    ///
    /// A namespace is 1 to 64 bytes without control characters. The closure of an extractor made by
    /// [`from_fn`](Self::from_fn) gives its keys their namespace: neither this setter nor
    /// [`namespace_by`](Self::namespace_by) changes them.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Adds a value that a closure reads from the request to the namespace: `{namespace}:{value}`.
    ///
    /// The value can be the route. This is for one layer over several routes that receive one
    /// event, if each route's handler has to see the event. If the value is missing, empty or
    /// blank, the layer answers 400, because a key in the wrong namespace would lose the event. The
    /// value is part of the key: a renamed route has no keys.
    ///
    /// Two different pairs of namespace and value never give one namespace:
    ///
    /// 1. In the namespace, `%` becomes `%25` and `:` becomes `%3A`. The value stays as it is.
    /// 2. The first 16 hex digits of its SHA-256 replace a value with a control character, and a
    ///    value that makes the namespace longer than 64 bytes.
    /// 3. They also replace a value of 16 digits from `0` to `9` and `a` to `f`, which could be the
    ///    digest of another value.
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
    pub fn namespace_by<F>(mut self, read: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> Option<String> + Send + Sync + 'static,
    {
        self.naming.by = Some(Arc::new(read));
        self
    }

    /// Gives every event another name, an *alias*: the event is a duplicate if *either* of its
    /// identities is complete.
    ///
    /// This is for senders that report one change by two events with different ids. For a sender
    /// that does not sign the id, see [`content_identity`](Self::content_identity). The alias is in
    /// the namespace `{namespace}.{label}`. An [`EachKey`] reads it from the event, as it reads the
    /// key. A closure ([`from_fn`](Self::from_fn)) sets the aliases of a multi-event delivery
    /// itself. An event without the value has one identity.
    ///
    /// A later, real change of the same object may share the alias. It is then a
    /// duplicate until the retention ends.
    ///
    /// [`checked`](Self::checked) says which labels and parts are refused.
    #[must_use]
    pub fn alias(mut self, label: &str, part: KeyPart) -> Self {
        self.naming.set_second(label, part, false);
        self
    }

    /// Makes the SHA-256 of the body a second identity of every event: an event is a duplicate if
    /// its key *or* its body is complete.
    ///
    /// This is for senders that sign the body and not the id
    /// ([`Preset::signed_id`](crate::provider::Preset::signed_id)). An attacker who has read a
    /// delivery, and cannot sign, may send it again under another id. It is then a duplicate by its
    /// body, and the other id stays free. Two real events with the same bytes are one event.
    ///
    /// With the key, the store keeps the SHA-256 of the body. A complete key that comes with
    /// another body is a duplicate and is reported as a payload mismatch, as
    /// [`compare_payload`](crate::DedupLayer::compare_payload) of the body does. [The
    /// guide](crate::guide::keys#an-id-that-is-not-signed) says what an attacker can do, and what
    /// the identity costs.
    ///
    /// The identity is `body_` and 64 hex digits in the namespace `{namespace}.body`. An
    /// [`EachKey`] takes the bytes of each event. An empty body has no digest.
    /// [`Delivery::idempotency_key`](crate::Delivery::idempotency_key) does not derive from it.
    ///
    /// # Example
    ///
    /// ```
    /// use tower_dedup::key;
    ///
    /// let orders = key::header("x-id").namespace("orders").content_identity();
    /// # let request = http::Request::post("/").header("x-id", "1").body("{}".into())?;
    /// # let (head, body) = request.into_parts();
    /// # let found = orders.extract(&tower_dedup::key::RequestRef::new(&head, &body));
    /// # let Ok(tower_dedup::key::Extracted::Keys(keys)) = found else { panic!("keys") };
    /// # let second = keys.events()[0].content_identity().unwrap();
    /// # assert_eq!(second.namespace(), "orders.body");
    /// # assert!(second.id().starts_with("body_44136fa3"));
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn content_identity(mut self) -> Self {
        self.naming.set_second("body", body_digest(), true);
        self
    }

    /// Reads the type of an event with `part`: the name that the sender gives to this kind of
    /// event.
    ///
    /// Operators see it, and [`Delivery::event_type`](crate::Delivery::event_type) returns it. It
    /// is not a part of the key. A header is seldom signed: read the type from the signed body if
    /// the body has it. A type that is missing, malformed or longer than 100 bytes is ignored. An
    /// [`EachKey`] reads it from the event, as it reads the key.
    ///
    /// ```
    /// use tower_dedup::key;
    ///
    /// let orders = key::json("/id").namespace("orders").event_type(key::json("/kind"));
    /// # let body = r#"{"id": 1, "kind": "order.paid"}"#;
    /// # let (head, body) = http::Request::post("/").body(body.into())?.into_parts();
    /// # let found = orders.extract(&key::RequestRef::new(&head, &body));
    /// # let Ok(key::Extracted::Keys(keys)) = found else { panic!("keys") };
    /// # assert_eq!(keys.events()[0].event_type(), Some("order.paid"));
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn event_type(mut self, part: KeyPart) -> Self {
        match self.rule {
            Rule::Part(rule) => self.rule = Rule::Part(rule.with_event_type(part)),
            Rule::Each(rule) => self.rule = Rule::Each(rule.event_type(part)),
            Rule::Reader(_) | Rule::Fn(_) | Rule::IdempotencyKey(_) => {
                self.naming.event_type = Some(part);
            }
        }
        self
    }

    /// Lets the requests for which `is_no_event` returns `true` reach the handler without
    /// deduplication. A second call adds to the first.
    ///
    /// For requests that carry no event and need the handler's response. For the challenges of the
    /// presets' senders, there is a [layer](crate::guide::verification#handshakes).
    #[must_use]
    pub fn bypass_when<F>(mut self, is_no_event: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> bool + Send + Sync + 'static,
    {
        self.bypass.push(Arc::new(is_no_event));
        self
    }

    /// Lets the layer answer the requests for which `is_handshake` returns `true`: 200, with the
    /// result `handshake`. A second call adds to the first.
    ///
    /// For requests that carry no event and need no more than a 2xx, such as the ping of GitHub. So
    /// a handler that takes a [`Delivery`](crate::Delivery) serves the hook from its first request
    /// on. The layer makes no call to the store, so `is_handshake` must look at what the sender
    /// signs.
    ///
    /// [`require_verified`](crate::DedupLayer::require_verified) applies before the answer. In
    /// [shadow](crate::Mode::Shadow), the request reaches the handler as under
    /// [`bypass_when`](Self::bypass_when). A request for which both return `true` always does, for
    /// example to learn of a new hook: the handler then takes an
    /// `Option<`[`Delivery`](crate::Delivery)`>`.
    #[must_use]
    pub fn handshake_when<F>(mut self, is_handshake: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> bool + Send + Sync + 'static,
    {
        self.handshake.push(Arc::new(is_handshake));
        self
    }

    /// Returns `true` for a request that the layer answers by itself.
    pub(crate) fn is_handshake(&self, request: &RequestRef<'_>) -> bool {
        any_holds(&self.handshake, request) && !any_holds(&self.bypass, request)
    }

    /// Reads the keys of a request.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if a value is malformed: the layer answers 400.
    ///
    /// # Panics
    ///
    /// If the extractor is [invalid](Self::checked).
    #[track_caller]
    pub fn extract(&self, request: &RequestRef<'_>) -> Result<Extracted, KeyError> {
        valid(self.check());
        self.read(request)
    }

    /// Reads the keys of a request, for a layer, which is checked.
    pub(crate) fn read(&self, request: &RequestRef<'_>) -> Result<Extracted, KeyError> {
        self.read_events(request, self.events(request))
    }

    /// Reads the key of a request, or that of the first event of a list. Nothing is read of the
    /// events after it.
    #[cfg(feature = "verify")]
    pub(crate) fn read_first(&self, request: &RequestRef<'_>) -> Option<DedupKey> {
        let first = OnceCell::new();
        let found = self.read_events(request, self.events(request).until_first(&first));
        let alone = match &found {
            Ok(Extracted::Keys(keys)) => keys.events().first().map(|event| event.key().clone()),
            _ => None,
        };
        first.into_inner().or(alone)
    }

    fn read_events(
        &self,
        request: &RequestRef<'_>,
        events: Events<'_>,
    ) -> Result<Extracted, KeyError> {
        if any_holds(&self.bypass, request) || any_holds(&self.handshake, request) {
            return Ok(Extracted::Bypass);
        }
        match &self.rule {
            Rule::Part(part) => events.one_of(part),
            Rule::Each(each) => each.read(events),
            Rule::Reader(read) => read(events),
            Rule::Fn(extract) => events.of_closure(extract(request)?),
            Rule::IdempotencyKey(scope) => {
                events.one(idempotency::find(scope, request)?.map(FoundId::from))
            }
        }
    }

    /// Returns no event, and what makes events of ids.
    fn events<'e>(&'e self, request: &RequestRef<'e>) -> Events<'e> {
        Events::new(request, &self.naming, &self.namespace)
    }

    /// Returns the digest of the body, as the key of a request that has no other one and reaches
    /// its handler.
    ///
    /// # Errors
    ///
    /// If the body is empty, because all empty bodies have one digest.
    pub(crate) fn body_digest(&self, request: &RequestRef<'_>) -> Result<Keys, KeyError> {
        if request.body().is_empty() {
            return Err(KeyError::new(KeyErrorKind::Missing, "the body"));
        }
        let [namespace, _] = self.naming.namespaces(&self.namespace, request)?;
        let digest = body_id(request.body());
        let id = match &self.rule {
            Rule::IdempotencyKey(scope) => idempotency::id(scope, request, &digest)?,
            _ => digest,
        };
        Ok(Event::new(DedupKey::in_namespace(&namespace, &id)?).into())
    }

    /// Returns where the key is looked for, for the error of a request without it.
    pub(crate) fn place(&self) -> Cow<'static, str> {
        match &self.rule {
            Rule::Part(part) => format!("the key ({})", part.id().place()).into(),
            Rule::IdempotencyKey(_) => "the key (header idempotency-key)".into(),
            Rule::Each(_) | Rule::Reader(_) | Rule::Fn(_) => "the key".into(),
        }
    }

    pub(crate) fn has_second_identity(&self) -> bool {
        self.naming.second.is_some()
    }

    /// Returns `true` for an extractor with a [`content_identity`](Self::content_identity).
    pub(crate) fn has_content_identity(&self) -> bool {
        self.naming.second.as_ref().is_some_and(|second| second.is_content)
    }

    /// Returns `true` if nothing that the sender signs identifies the event.
    pub(crate) fn is_replayable(&self) -> bool {
        self.unsigned_id && !self.has_second_identity()
    }
}

fn any_holds(conditions: &[Arc<ConditionFn>], request: &RequestRef<'_>) -> bool {
    conditions.iter().any(|holds| holds(request))
}

impl fmt::Debug for KeyExtractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KeyExtractor");
        out.field("namespace", &self.namespace);
        match &self.rule {
            Rule::Part(part) => out.field("key", part.id()),
            Rule::Each(each) => out.field("key", each),
            Rule::Reader(_) => out.field("key", &"reader"),
            Rule::Fn(_) => out.field("key", &"closure"),
            Rule::IdempotencyKey(scope) => out.field("scope", scope),
        };
        if let Some(second) = &self.naming.second {
            out.field("second_identity", &second.part);
        }
        out.field("methods", &self.methods)
            .field("retention_floor", &self.retention_floor)
            .field("max_body", &self.max_body)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "verify"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use http::Request;

    use super::*;
    use crate::key::each::each;
    use crate::key::part::from_fn;

    /// A sender that cannot sign must not make the server read a list.
    #[test]
    fn read_first_reads_one_event_of_a_list_and_read_reads_all() {
        let count = Arc::new(AtomicUsize::new(0));
        let reads = Arc::clone(&count);
        let part = from_fn(move |request| {
            reads.fetch_add(1, Ordering::Relaxed);
            Ok(std::str::from_utf8(request.body()).ok().map(str::to_owned))
        });
        let keys = each("", part).namespace("n");
        let (head, ()) = Request::new(()).into_parts();
        let body = Bytes::from(format!("[7{}]", ",8".repeat(999)));
        let request = RequestRef::new(&head, &body);
        assert_eq!(keys.read_first(&request).unwrap().id(), "7");
        assert_eq!(count.swap(0, Ordering::Relaxed), 1);
        assert!(matches!(keys.read(&request), Ok(Extracted::Keys(_))));
        assert_eq!(count.load(Ordering::Relaxed), 1_000);
        assert_eq!(keys.read_first(&RequestRef::new(&head, &"[]".into())), None);
    }
}
