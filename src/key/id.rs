//! [`DedupKey`] and the sets of them that one delivery carries.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::digest::sha256_hex;
use super::list::List;
use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// The longest id, in bytes, that is stored as it is; a longer one is replaced by its SHA-256.
pub const MAX_ID_LEN: usize = 255;

pub(super) const MAX_NAMESPACE_LEN: usize = 64;

/// What makes two deliveries the same event: a namespace and an id.
///
/// Cloning is cheap and makes another handle to the same key. `Debug` shows the first 16 hex
/// digits of the id's SHA-256, not the id: ids of some senders are personal data.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DedupKey {
    /// The namespace, a NUL and the id: one piece of memory, to be hashed at one go. Neither holds a
    /// NUL, and a namespace nothing that sorts before it.
    text: Arc<str>,
    id_at: usize,
}

impl DedupKey {
    /// A key for code outside the layer: [`forget`](crate::adapter::MaintenanceAdapter::forget), a queue
    /// worker, a test.
    ///
    /// An id over [`MAX_ID_LEN`] bytes is replaced by its SHA-256, as the layer does.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the id is empty or holds a NUL, or if the namespace is not 1 to 64 bytes
    /// without control characters.
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
        Self::in_namespace(namespace, id)
    }

    /// Like [`new`](Self::new) with a namespace that is already checked.
    pub(crate) fn in_namespace(namespace: &str, id: &str) -> Result<Self, KeyError> {
        if id.is_empty() {
            return Err(KeyError::new(KeyErrorKind::Empty, "the id"));
        }
        if id.contains('\0') {
            return Err(KeyError::new(KeyErrorKind::Nul, "the id"));
        }
        let id = stored(id);
        let id_at = namespace.len() + 1;
        let len = id_at + id.len();
        // Put together on the stack, for shared text is copied to where it stays.
        let mut text = [0; MAX_NAMESPACE_LEN + 1 + MAX_ID_LEN];
        text[..namespace.len()].copy_from_slice(namespace.as_bytes());
        text[id_at..len].copy_from_slice(id.as_bytes());
        let text = std::str::from_utf8(&text[..len])
            .map_err(|_| KeyError::new(KeyErrorKind::NotUtf8, "the id"))?;
        Ok(Self { text: text.into(), id_at })
    }

    /// Namespace and id, in bytes that no other key has.
    #[cfg(feature = "memory")]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// The provider or endpoint that the id belongs to.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.text[..self.id_at - 1]
    }

    /// The id, as it is stored.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.text[self.id_at..]
    }

    /// The first 16 hex digits of the id's SHA-256: what logs carry unless they are told to carry
    /// ids. `printf %s "$ID" | sha256sum | cut -c1-16` computes the same.
    #[must_use]
    pub fn log_id(&self) -> String {
        let mut hex = sha256_hex(self.id().as_bytes());
        hex.truncate(16);
        hex
    }
}

impl fmt::Debug for DedupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DedupKey({} #{})", self.namespace(), self.log_id())
    }
}

/// One event of a delivery: its key and, for some senders, a second identity.
///
/// It is a duplicate if *any* of its identities is complete, in flight if any is, and all of them
/// are claimed and completed together.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Event {
    key: DedupKey,
    second: Option<DedupKey>,
    payload: Option<Bytes>,
}

impl Event {
    /// An event with one identity.
    #[must_use]
    pub fn new(key: DedupKey) -> Self {
        Self { key, second: None, payload: None }
    }

    /// Adds the second identity. One that is the key itself adds nothing.
    #[must_use]
    pub fn with_second_identity(mut self, second: DedupKey) -> Self {
        self.second = (second != self.key).then_some(second);
        self
    }

    /// Adds the event's own bytes of a batch's body, to be told from another event of the same
    /// key where the layer compares payloads. The layer hashes them and lets them go: a handler's
    /// events carry none.
    #[must_use]
    pub fn with_payload(mut self, payload: Bytes) -> Self {
        self.payload = Some(payload);
        self
    }

    /// The key that the event is known by.
    #[must_use]
    pub fn key(&self) -> &DedupKey {
        &self.key
    }

    /// The second identity, if it has one.
    #[must_use]
    pub fn second_identity(&self) -> Option<&DedupKey> {
        self.second.as_ref()
    }

    /// The event's own bytes of a batch's body, if the extractor has said which they are.
    #[must_use]
    pub fn payload(&self) -> Option<&Bytes> {
        self.payload.as_ref()
    }

    /// All its identities, the key first.
    pub fn identities(&self) -> impl Iterator<Item = &DedupKey> {
        std::iter::once(&self.key).chain(&self.second)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Payloads carry secrets.
        f.debug_struct("Event")
            .field("key", &self.key)
            .field("second", &self.second)
            .field("payload_len", &self.payload.as_ref().map(Bytes::len))
            .finish()
    }
}

/// The events of one delivery: at least one, in the order of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    events: List<Event>,
    batch: bool,
}

impl Keys {
    /// The keys of a delivery that carries one event.
    #[must_use]
    pub fn one(key: DedupKey) -> Self {
        Event::new(key).into()
    }

    /// The keys of a batch; `None` if there is no event.
    #[must_use]
    pub fn new(events: Vec<Event>) -> Option<Self> {
        (!events.is_empty()).then(|| Self { events: events.into(), batch: true })
    }

    /// The same kind of delivery, with this event for its one.
    pub(super) fn with_only(&self, event: Event) -> Self {
        Self { events: List::one(event), batch: self.batch }
    }

    /// The same keys without the events' bytes, each of which keeps the whole body alive.
    pub(crate) fn without_payloads(mut self) -> Self {
        for event in &mut *self.events {
            event.payload = None;
        }
        self
    }

    /// Whether the request carried a list of events, be it of one.
    #[must_use]
    pub fn is_batch(&self) -> bool {
        self.batch
    }

    /// The events, in the order of the request.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The first event's key, which logs and spans name.
    #[must_use]
    pub fn first(&self) -> &DedupKey {
        // No constructor makes an empty list.
        self.events[0].key()
    }

    /// How many identities all events have together.
    #[must_use]
    pub fn identity_count(&self) -> usize {
        self.events.iter().map(|event| event.identities().count()).sum()
    }
}

/// The keys of a delivery that carries this one event.
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

impl From<Event> for Keys {
    fn from(event: Event) -> Self {
        Self { events: List::one(event), batch: false }
    }
}

/// The id as it is stored: hashed if it is long.
pub(super) fn stored(id: &str) -> Cow<'_, str> {
    if id.len() > MAX_ID_LEN { sha256_hex(id.as_bytes()).into() } else { id.into() }
}

/// A namespace is 1 to 64 bytes without control characters.
pub(crate) fn check_namespace(namespace: &str) -> Result<(), ConfigError> {
    let fits = (1..=MAX_NAMESPACE_LEN).contains(&namespace.len())
        && !namespace.chars().any(char::is_control);
    if fits { Ok(()) } else { Err(ConfigError::InvalidNamespace) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_255_bytes_is_kept_and_one_of_256_is_hashed() {
        let kept = "k".repeat(255);
        assert_eq!(DedupKey::new("n", &kept).unwrap().id(), kept);
        let hashed = DedupKey::new("n", &"k".repeat(256)).unwrap();
        assert_eq!(hashed.id(), sha256_hex("k".repeat(256).as_bytes()));
        assert_ne!(hashed, DedupKey::new("n", &"k".repeat(257)).unwrap());
    }

    #[test]
    fn keys_sort_by_namespace_and_then_by_id() {
        let parts = ["a", "a ", "a.b", "ab", "b", "\u{e9}"];
        let sorted: Vec<(&str, &str)> =
            parts.iter().flat_map(|namespace| parts.map(|id| (*namespace, id))).collect();
        let keys: Vec<DedupKey> =
            sorted.iter().map(|(namespace, id)| DedupKey::new(namespace, id).unwrap()).collect();
        assert!(sorted.is_sorted() && keys.is_sorted());
        for (key, parts) in keys.iter().zip(sorted) {
            assert_eq!((key.namespace(), key.id()), parts);
        }
    }

    #[test]
    fn the_longest_namespace_and_the_longest_id_make_a_key() {
        let (namespace, id) = ("n".repeat(64), "\u{1d11e}".repeat(63));
        let key = DedupKey::new(&namespace, &id).unwrap();
        assert_eq!((key.namespace(), key.id()), (&*namespace, &*id));
        let id = "i".repeat(255);
        assert_eq!(DedupKey::new(&namespace, &id).unwrap().id(), id);
    }

    #[test]
    fn debug_output_never_shows_the_id() {
        let key = DedupKey::new("twilio", "+15005550006").unwrap();
        let shown = format!("{key:?} {:?}", Keys::one(key.clone()));
        assert!(!shown.contains("15005550006"), "{shown}");
        assert!(shown.contains(&key.log_id()), "{shown}");
    }

    #[test]
    fn a_nul_or_nothing_is_refused() {
        assert_eq!(DedupKey::new("n", "a\0b").unwrap_err().kind(), KeyErrorKind::Nul);
        assert_eq!(DedupKey::new("n", "").unwrap_err().kind(), KeyErrorKind::Empty);
        for namespace in ["", "a\nb", &"x".repeat(65)] {
            let refused = DedupKey::new(namespace, "a").unwrap_err();
            assert_eq!(refused.kind(), KeyErrorKind::InvalidNamespace);
        }
    }
}
