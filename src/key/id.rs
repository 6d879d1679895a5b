//! [`DedupKey`], and the events of one delivery with their keys.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::convert::Infallible;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use super::digest::{hex, sha256, sha256_hex, sha256_of_body_id};
use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// A list that allocates only for more than one item, because most deliveries carry one event.
pub(crate) type List<T> = SmallVec<[T; 1]>;

/// The longest id in bytes that is stored unchanged; a longer id is replaced by its SHA-256.
pub(crate) const MAX_ID_LEN: usize = 255;

pub(super) const MAX_NAMESPACE_LEN: usize = 64;

/// How log records name an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogIds {
    /// Log the id itself, with control characters escaped. Ids of some senders are personal data.
    #[default]
    Plain,
    /// Log the first 16 hex digits of the id's SHA-256
    /// ([`DedupKey::log_id`](crate::DedupKey::log_id)).
    Hashed,
}

/// Names an event by a namespace and an id: two deliveries with equal keys carry the same event.
///
/// Cloning is cheap and makes another handle to the same key. `Debug` shows the first 16 hex
/// digits of the id's SHA-256 instead of the id, because ids of some senders are personal data.
#[derive(Clone)]
pub struct DedupKey {
    /// The namespace, a NUL and the id in one allocation, so that one call hashes all of it.
    /// Neither part holds a NUL. A namespace holds no control character, so keys sort by namespace
    /// first.
    text: Arc<str>,
    /// At most 65.
    id_at: u8,
}

impl DedupKey {
    /// Makes a key outside the layer: for
    /// [`forget`](crate::adapter::maintenance::MaintenanceAdapter::forget), a queue worker or a
    /// test.
    ///
    /// An id over 255 bytes is replaced by its SHA-256, as in the layer.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the id is empty, blank or holds a NUL, or if the namespace is not 1 to 64
    /// bytes without control characters.
    ///
    /// # Example
    ///
    /// ```
    /// use tower_dedup::DedupKey;
    ///
    /// let key = DedupKey::new("github", "72d3162e-cc78-11e3-81ab-4c9367dc0958")?;
    /// assert_eq!(key.namespace(), "github");
    /// assert_eq!(DedupKey::new("github", &"x".repeat(256))?.id().len(), 64);
    /// assert!(DedupKey::new("github", "").is_err());
    /// # Ok::<(), tower_dedup::KeyError>(())
    /// ```
    pub fn new(namespace: &str, id: &str) -> Result<Self, KeyError> {
        check_namespace(namespace)
            .map_err(|_| KeyError::new(KeyErrorKind::InvalidNamespace, "the namespace"))?;
        if id.contains('\0') {
            return Err(KeyError::new(KeyErrorKind::Nul, "the id"));
        }
        Self::in_namespace(namespace, id)
    }

    /// Does the same as [`new`](Self::new), with a namespace that is already checked, and an id
    /// without a NUL. No value of a part has a NUL.
    pub(crate) fn in_namespace(namespace: &str, id: &str) -> Result<Self, KeyError> {
        if is_blank(id) {
            return Err(KeyError::new(KeyErrorKind::Empty, "the id"));
        }
        debug_assert!(!id.contains('\0'), "a NUL in an id");
        let id = shortened(id);
        let id_at = namespace.len() + 1;
        let len = id_at + id.len();
        // Composed on the stack, because `Arc<str>` copies its text in any case.
        let mut text = [0; MAX_NAMESPACE_LEN + 1 + MAX_ID_LEN];
        text[..namespace.len()].copy_from_slice(namespace.as_bytes());
        text[id_at..len].copy_from_slice(id.as_bytes());
        let text = std::str::from_utf8(&text[..len])
            .map_err(|_| KeyError::new(KeyErrorKind::NotUtf8, "the id"))?;
        let id_at = u8::try_from(id_at).unwrap_or_default();
        Ok(Self { text: text.into(), id_at })
    }

    /// Returns bytes that no other key has.
    #[cfg(feature = "memory")]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// Returns the SHA-256 of the namespace, a zero byte and the id. Stores hold it, so it never
    /// changes.
    pub(crate) fn sha256(&self) -> [u8; 32] {
        sha256(self.text.as_bytes())
    }

    /// Returns the namespace: the provider or endpoint that the id belongs to.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.text[..usize::from(self.id_at) - 1]
    }

    /// Returns the id as it is stored.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.text[self.id_at.into()..]
    }

    /// Returns the first 16 hex digits of the id's SHA-256. Log records carry this instead of the
    /// id under [`LogIds::Hashed`](crate::LogIds::Hashed).
    /// `printf %s "$ID" | sha256sum | cut -c1-16` computes the same.
    #[must_use]
    pub fn log_id(&self) -> String {
        hex(&sha256(self.id().as_bytes())[..8])
    }

    /// Returns the namespace as log records show it: it may have the name of a tenant, which comes
    /// from outside.
    pub(crate) fn shown_namespace(&self) -> Cow<'_, str> {
        escaped(self.namespace())
    }

    /// Returns the id as log records show it.
    pub(crate) fn shown_id(&self, ids: LogIds) -> Cow<'_, str> {
        match ids {
            LogIds::Plain => escaped(self.id()),
            LogIds::Hashed => self.log_id().into(),
        }
    }
}

impl PartialEq for DedupKey {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for DedupKey {}

impl PartialOrd for DedupKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DedupKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl Hash for DedupKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl fmt::Debug for DedupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DedupKey({} #{})", self.shown_namespace(), self.log_id())
    }
}

/// One event of a delivery: its key and, for some senders, a second identity.
///
/// The second identity is claimed first, then the key. An event is a duplicate if *either* is
/// complete, and in flight if either is in flight. A second identity that is complete for the same
/// key is ignored: the key decides. If the event runs, the identities that it has claimed are
/// completed in one call. If it does not run, they are released.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Event {
    key: DedupKey,
    pub(super) second: Option<DedupKey>,
    /// Whether the second identity is a digest of the body.
    is_content: bool,
    pub(super) payload: Option<Payload>,
    pub(super) event_type: Option<Arc<str>>,
}

/// The payload of an event, or what is left of it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Payload {
    Bytes(Bytes),
    Sha256([u8; 32]),
}

/// The longest type of an event, in bytes.
const MAX_TYPE_LEN: usize = 100;

/// Returns `text` if it is the type of an event: 1 to 100 bytes without control characters.
pub(crate) fn event_type(text: &str) -> Option<Arc<str>> {
    let fits = (1..=MAX_TYPE_LEN).contains(&text.len()) && !text.contains(is_hidden);
    fits.then(|| text.into())
}

/// Returns `true` for control characters, and for those that break or reorder a line (Unicode
/// Standard Annex 9). A text that a terminal shows, and that may be unverified, has none.
pub(crate) fn is_hidden(char: char) -> bool {
    let is_direction = matches!(char,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    char.is_control() || is_direction
}

/// Escapes the hidden characters of an outside text, so that it makes no further line and reorders
/// none.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for char in text.chars() {
        if is_hidden(char) { shown.extend(char.escape_default()) } else { shown.push(char) }
    }
    shown.into()
}

impl Event {
    /// Makes an event with one identity.
    #[must_use]
    pub fn new(key: DedupKey) -> Self {
        Self { key, second: None, is_content: false, payload: None, event_type: None }
    }

    /// Adds an alias: another name of this event. An alias that equals the key is ignored.
    ///
    /// A digest of the body is not an alias: see
    /// [`content_identity`](super::KeyExtractor::content_identity).
    ///
    /// # Example
    ///
    /// Changes a key: the header `webhook-id` in the namespace `acme` was the key.
    ///
    /// ```
    /// use tower_dedup::key::{Event, Extracted, RequestRef};
    /// use tower_dedup::{DedupKey, KeyExtractor};
    ///
    /// let new = KeyExtractor::from_fn("acme-v2", |request| {
    ///     let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    ///     let (Some(id), Some(old)) = (header("event-id"), header("webhook-id")) else {
    ///         return Ok(Extracted::Missing);
    ///     };
    ///     let event = Event::new(DedupKey::new("acme-v2", id)?);
    ///     Ok(Extracted::Keys(event.with_alias(DedupKey::new("acme", old)?).into()))
    /// });
    /// # let request = http::Request::post("/").header("webhook-id", "1").header("event-id", "e1");
    /// # let (head, body) = request.body(Default::default()).unwrap().into_parts();
    /// # let found = new.extract(&RequestRef::new(&head, &body));
    /// # let Ok(Extracted::Keys(keys)) = found else { panic!("keys") };
    /// # assert_eq!(keys.events()[0].alias(), DedupKey::new("acme", "1").ok().as_ref());
    /// ```
    #[must_use]
    pub fn with_alias(mut self, alias: DedupKey) -> Self {
        self.set_second(alias, false);
        self
    }

    pub(super) fn set_second(&mut self, second: DedupKey, is_content: bool) {
        self.second = (second != self.key).then_some(second);
        self.is_content = is_content;
    }

    /// Adds the event's own bytes within the body of a multi-event delivery. A layer that compares
    /// payloads hashes these bytes and drops them: the events of a handler carry none.
    #[must_use]
    pub fn with_payload(mut self, payload: Bytes) -> Self {
        self.payload = Some(Payload::Bytes(payload));
        self
    }

    /// Adds the event's type, as the sender names it: `invoice.paid`. Operators and handlers read
    /// it; it is no part of the key.
    ///
    /// A text that is empty, longer than 100 bytes, or has a control character is ignored, because
    /// a label must not make a delivery fail.
    #[must_use]
    pub fn with_event_type(mut self, event_type: &str) -> Self {
        self.event_type = self::event_type(event_type);
        self
    }

    /// Returns the event's type, as the sender names it.
    #[must_use]
    pub fn event_type(&self) -> Option<&str> {
        self.event_type.as_deref()
    }

    pub(crate) fn shared_event_type(&self) -> Option<&Arc<str>> {
        self.event_type.as_ref()
    }

    /// Returns the event's key.
    #[must_use]
    pub fn key(&self) -> &DedupKey {
        &self.key
    }

    /// Returns the second identity, of either kind.
    pub(crate) fn second_identity(&self) -> Option<&DedupKey> {
        self.second.as_ref()
    }

    /// Returns the other name of the event, if it has [one](super::KeyExtractor::alias).
    #[must_use]
    pub fn alias(&self) -> Option<&DedupKey> {
        self.second.as_ref().filter(|_| !self.is_content)
    }

    /// Returns the digest of the event's bytes as a key, if it is an identity of the event: see
    /// [`KeyExtractor::content_identity`](super::KeyExtractor::content_identity).
    #[must_use]
    pub fn content_identity(&self) -> Option<&DedupKey> {
        self.second.as_ref().filter(|_| self.is_content)
    }

    /// Returns the SHA-256 of the event's bytes, if they are its second identity.
    pub(crate) fn content_sha256(&self) -> Option<[u8; 32]> {
        sha256_of_body_id(self.content_identity()?.id())
    }

    /// Returns the event's own bytes within the body of a multi-event delivery, if the extractor
    /// has set them.
    #[must_use]
    pub fn payload(&self) -> Option<&Bytes> {
        if let Some(Payload::Bytes(bytes)) = &self.payload { Some(bytes) } else { None }
    }

    /// Returns the SHA-256 of the event's payload, once it is [known](Keys::with_digests).
    pub(crate) fn payload_sha256(&self) -> Option<[u8; 32]> {
        if let Some(Payload::Sha256(sha256)) = self.payload { Some(sha256) } else { None }
    }

    /// Returns all identities of the event, the key first.
    pub(crate) fn identities(&self) -> impl Iterator<Item = &DedupKey> + Clone {
        std::iter::once(&self.key).chain(&self.second)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Payloads carry secrets.
        f.debug_struct("Event")
            .field("key", &self.key)
            .field("second", &self.second)
            .field("event_type", &self.event_type)
            .field("payload_len", &self.payload().map(Bytes::len))
            .finish()
    }
}

/// The events of one delivery with their keys: at least one event, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// Empty for [`Keys::none`] only.
    pub(super) events: List<Event>,
    multi_event: bool,
}

impl Keys {
    /// Makes the keys of a multi-event delivery, or returns `None` if `events` is empty.
    #[must_use]
    pub fn new(events: Vec<Event>) -> Option<Self> {
        (!events.is_empty()).then(|| Self { events: events.into(), multi_event: true })
    }

    /// Returns the keys of a request without an event. Only the layer's way of a delivery knows
    /// such keys.
    pub(crate) fn none() -> Self {
        Self { events: List::new(), multi_event: false }
    }

    /// Returns `true` for [`none`](Self::none).
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Replaces the bytes of each event by the SHA-256 that is compared, or drops them: each slice
    /// holds the memory of the whole body.
    pub(crate) fn with_digests<E>(
        mut self,
        sha256: impl Fn(&Event) -> Result<Option<[u8; 32]>, E>,
    ) -> Result<Self, E> {
        for event in &mut *self.events {
            event.payload = sha256(event)?.map(Payload::Sha256);
        }
        Ok(self)
    }

    /// Drops the bytes of the events.
    pub(crate) fn without_payloads(self) -> Self {
        let Ok(keys) = self.with_digests(|_| Ok::<_, Infallible>(None));
        keys
    }

    /// Returns `true` if the request carried a list of events, even a list of one.
    #[must_use]
    pub fn is_multi_event(&self) -> bool {
        self.multi_event
    }

    /// Returns the events in the order of the request.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the first event's key, which log records name.
    #[must_use]
    pub fn first(&self) -> &DedupKey {
        // No public constructor makes an empty list.
        self.events[0].key()
    }

    /// Returns the number of identities that all events have together.
    #[must_use]
    pub(crate) fn identity_count(&self) -> usize {
        self.events.iter().map(|event| event.identities().count()).sum()
    }
}

impl From<DedupKey> for Event {
    fn from(key: DedupKey) -> Self {
        Self::new(key)
    }
}

impl From<&DedupKey> for Event {
    fn from(key: &DedupKey) -> Self {
        Self::new(key.clone())
    }
}

/// Makes the keys of a delivery that carries this one event.
impl From<Event> for Keys {
    fn from(event: Event) -> Self {
        Self { events: List::from([event]), multi_event: false }
    }
}

/// Returns `true` for a text without a visible character: all events with it would be one.
pub(super) fn is_blank(text: &str) -> bool {
    // Zero-width characters are no white space in Unicode.
    let shows_nothing = |char: char| {
        let is_zero_width = matches!(char, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}');
        char.is_whitespace() || is_hidden(char) || is_zero_width
    };
    text.chars().all(shows_nothing)
}

/// Refuses a text that no part of an id may be.
pub(super) fn check_value(text: &str) -> Result<(), KeyErrorKind> {
    if text.contains('\0') {
        return Err(KeyErrorKind::Nul);
    }
    if is_blank(text) {
        return Err(KeyErrorKind::Empty);
    }
    Ok(())
}

/// Returns the id as it is stored: a long id is replaced by its SHA-256.
pub(super) fn shortened(id: &str) -> Cow<'_, str> {
    if id.len() > MAX_ID_LEN { sha256_hex(id.as_bytes()).into() } else { id.into() }
}

/// Refuses a namespace that is not 1 to 64 bytes without control characters.
pub(crate) fn check_namespace(namespace: &str) -> Result<(), ConfigError> {
    let fits = (1..=MAX_NAMESPACE_LEN).contains(&namespace.len())
        && !namespace.chars().any(char::is_control);
    if fits {
        Ok(())
    } else {
        let rule = "1 to 64 bytes without control characters";
        Err(ConfigError::value("namespace", rule, &namespace))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_namespace_and_then_by_id() {
        let parts = ["a", "a ", "a.b", "ab", "b", "\u{e9}"];
        let sorted: Vec<(&str, &str)> =
            parts.iter().flat_map(|namespace| parts.map(|id| (*namespace, id))).collect();
        let keys: Vec<DedupKey> =
            sorted.iter().map(|(namespace, id)| DedupKey::new(namespace, id).unwrap()).collect();
        assert!(sorted.is_sorted() && keys.is_sorted_by(|one, other| one.text < other.text));
        for (key, parts) in keys.iter().zip(sorted) {
            assert_eq!((key.namespace(), key.id()), parts);
        }
    }

    #[test]
    fn debug_of_a_key_never_shows_the_id() {
        let key = DedupKey::new("twilio", "+15005550006").unwrap();
        let shown = format!("{key:?} {:?}", Keys::from(Event::from(&key)));
        assert!(!shown.contains("15005550006"), "{shown}");
        assert!(shown.contains(&key.log_id()), "{shown}");
    }

    #[test]
    fn shown_id_is_the_id_escaped_or_its_digest() {
        let key = |id| DedupKey::new("n", id).unwrap();
        let shown = |id| key(id).shown_id(LogIds::Plain).into_owned();
        assert_eq!(shown("a b\u{e9}%\\"), "a b\u{e9}%\\");
        assert_eq!(shown("a\nb\u{202e}\u{1b}\u{61c}"), r"a\nb\u{202e}\u{1b}\u{61c}");
        // FIPS 180-4, the one-block example.
        assert_eq!(key("abc").shown_id(LogIds::Hashed), "ba7816bf8f01cfea");
    }

    #[test]
    fn event_type_that_is_empty_or_hides_text_is_ignored() {
        for text in ["", "a\u{7f}", "a\u{202e}b", "\u{2066}a"] {
            assert_eq!(event_type(text), None, "{text:?}");
        }
    }

    #[test]
    fn new_takes_the_longest_parts_and_refuses_an_empty_id_a_nul_and_an_invalid_namespace() {
        let (namespace, id) = ("n".repeat(64), "i".repeat(255));
        let key = DedupKey::new(&namespace, &id).unwrap();
        assert_eq!((key.namespace(), key.id()), (&*namespace, &*id));
        let kind = |namespace, id| DedupKey::new(namespace, id).unwrap_err().kind();
        assert_eq!((kind("n", "a\0b"), kind("n", "")), (KeyErrorKind::Nul, KeyErrorKind::Empty));
        for namespace in ["", "a\nb", &"x".repeat(65)] {
            assert_eq!(kind(namespace, "a"), KeyErrorKind::InvalidNamespace);
        }
    }
}
