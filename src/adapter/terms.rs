//! The caller's token and the terms of a call to a store.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::stored::{Fetch, StoredData, StoredResponse};
use crate::key::{DedupKey, event_type};

/// The name of one claim: 128 random bits. The caller makes them *before* the call, so that a call whose
/// reply was lost can be repeated or released.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// Returns a new random token.
    #[must_use]
    pub fn random() -> Self {
        // An array of bytes would take four times as many from the generator.
        Self(rand::random::<u128>().to_ne_bytes())
    }

    /// Returns the token's bytes, for a store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl From<[u8; 16]> for Token {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:08x}..)", u128::from_be_bytes(self.0) >> 96)
    }
}

/// The terms of a call to a store.
///
/// Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTerms {
    pub(crate) token: Token,
    retention: Duration,
    permanence: Permanence,
    pub(crate) fetch: Fetch,
    pub(crate) payloads: Option<Payloads>,
    pub(crate) event_types: Option<EventTypes>,
    response: Option<Arc<StoredResponse>>,
    handled_at: Option<SystemTime>,
    pub(crate) duplicate_note: Option<DuplicateNote>,
    /// How long a handler may hold its transaction, in milliseconds. Zero for no bound.
    pub(crate) handler_bound_ms: i32,
}

/// Set once the store has returned that a key of the call is complete. The caller reads it after an
/// error or a timeout of the rest of the call.
pub(crate) type DuplicateNote = Arc<OnceLock<()>>;

/// When a claimed key becomes permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Permanence {
    /// The claim is complete at once.
    OnClaim,
    /// The key is permanent once it is completed. Until then a lease holds the key.
    OnCompletion {
        /// How long the claim holds without a renewal.
        lease: Duration,
    },
}

/// The SHA-256 of each key's payload, sorted by key.
pub(crate) type Payloads = Arc<[(DedupKey, [u8; 32])]>;

/// The type of each key's event, sorted by key.
pub(crate) type EventTypes = Arc<[(DedupKey, Arc<str>)]>;

impl CallTerms {
    /// Returns terms under [`Permanence::OnClaim`].
    #[must_use]
    pub const fn on_claim(token: Token, retention: Duration) -> Self {
        Self::new(token, retention, Permanence::OnClaim)
    }

    /// Returns terms under [`Permanence::OnCompletion`] with this lease.
    #[must_use]
    pub const fn on_completion(token: Token, retention: Duration, lease: Duration) -> Self {
        Self::new(token, retention, Permanence::OnCompletion { lease })
    }

    const fn new(token: Token, retention: Duration, permanence: Permanence) -> Self {
        Self {
            token,
            retention,
            permanence,
            fetch: Fetch::Nothing,
            payloads: None,
            event_types: None,
            response: None,
            handled_at: None,
            duplicate_note: None,
            handler_bound_ms: 0,
        }
    }

    /// Sets the stored data that a duplicate carries.
    #[must_use]
    pub const fn with_fetch(mut self, fetch: Fetch) -> Self {
        self.fetch = fetch;
        self
    }

    /// Adds the SHA-256 of each key's payload, which the store holds with the key once it is complete. Of
    /// several payloads of one key, the first counts.
    #[must_use]
    pub fn with_payloads(
        mut self,
        payloads: impl IntoIterator<Item = (DedupKey, [u8; 32])>,
    ) -> Self {
        let mut payloads: Vec<_> = payloads.into_iter().collect();
        payloads.sort_by(|(one, _), (other, _)| one.cmp(other));
        payloads.dedup_by(|(later, _), (earlier, _)| later == earlier);
        self.payloads = Some(payloads.into());
        self
    }

    /// Adds the type of each key's event, which a store with the ability
    /// [`inspection`](super::contract::Abilities::inspection) holds with a new key. A text that is no
    /// [type](crate::key::Event::with_event_type) is ignored.
    #[must_use]
    pub fn with_event_types<T: AsRef<str>>(
        mut self,
        types: impl IntoIterator<Item = (DedupKey, T)>,
    ) -> Self {
        let types =
            types.into_iter().filter_map(|(key, text)| Some((key, event_type(text.as_ref())?)));
        let mut types: Vec<_> = types.collect();
        types.sort_unstable();
        self.event_types = Some(types.into());
        self
    }

    /// Returns the type of this key's event; `None` if it has none.
    #[must_use]
    pub fn event_type_for(&self, key: &DedupKey) -> Option<&str> {
        let types = self.event_types.as_deref()?;
        let index = types.binary_search_by(|(other, _)| other.cmp(key)).ok()?;
        Some(&types[index].1)
    }

    #[cfg(feature = "postgres")]
    pub(super) const fn has_event_types(&self) -> bool {
        self.event_types.is_some()
    }

    /// Adds the handler's response, which the store holds with every key of a completion.
    #[must_use]
    pub fn with_response(mut self, response: Arc<StoredResponse>) -> Self {
        self.response = Some(response);
        self
    }

    /// Sets when the event was handled, for a claim under [`Permanence::OnClaim`] of an event that another program has
    /// handled: the key was completed then, a new key was first seen then, and the retention counts from then on. A time
    /// in the future counts as now.
    #[must_use]
    pub const fn with_handled_at(mut self, time: SystemTime) -> Self {
        self.handled_at = Some(time);
        self
    }

    /// Returns when the event was handled; `None` if it is handled now.
    #[must_use]
    pub const fn handled_at(&self) -> Option<SystemTime> {
        self.handled_at
    }

    /// Returns when the event was handled, in milliseconds since the Unix epoch, at most 1,000 years; `None` if it is
    /// handled now.
    #[must_use]
    pub fn handled_at_ms(&self) -> Option<i64> {
        self.handled_at.map(|at| saturating_ms(at.duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    /// Returns `true` if nothing is stored with this key, now or later.
    #[cfg(feature = "postgres")]
    pub(super) fn stores_nothing_with(&self, key: &DedupKey) -> bool {
        self.fetch != Fetch::DigestAndResponse && self.stored_data_for(key).is_none()
    }

    /// Returns the response to store.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn response(&self) -> Option<&StoredResponse> {
        self.response.as_deref()
    }

    /// Returns the data to store with this key once it is complete; `None` if there is none.
    #[must_use]
    pub fn stored_data_for(&self, key: &DedupKey) -> Option<StoredData> {
        let payload = self.payloads.as_deref().and_then(|payloads| {
            let index = payloads.binary_search_by(|(other, _)| other.cmp(key)).ok()?;
            Some(payloads[index].1)
        });
        let is_some = payload.is_some() || self.response.is_some();
        is_some.then(|| StoredData::new(payload, self.response.clone()))
    }

    /// Returns `true` if there is data to store with any key.
    pub(crate) const fn stores_data(&self) -> bool {
        self.payloads.is_some() || self.response.is_some()
    }

    /// Returns the caller's token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.token
    }

    /// Returns how long the key is remembered: from its claim on, or from [`handled_at`](Self::handled_at) on.
    #[must_use]
    pub const fn retention(&self) -> Duration {
        self.retention
    }

    /// Returns when the key becomes permanent.
    #[must_use]
    pub const fn permanence(&self) -> Permanence {
        self.permanence
    }

    /// Returns which stored data a duplicate carries.
    #[must_use]
    pub const fn fetch(&self) -> Fetch {
        self.fetch
    }

    /// Returns how long a claim holds without a renewal; zero under [`Permanence::OnClaim`].
    #[must_use]
    pub const fn lease(&self) -> Duration {
        match self.permanence {
            Permanence::OnClaim => Duration::ZERO,
            Permanence::OnCompletion { lease } => lease,
        }
    }

    /// Returns the retention in whole milliseconds, at most 1,000 years: added to the present it overflows the times of no
    /// store.
    #[must_use]
    pub fn retention_ms(&self) -> i64 {
        saturating_ms(self.retention)
    }

    /// Returns the lease in whole milliseconds, at most 1,000 years.
    #[must_use]
    pub fn lease_ms(&self) -> i64 {
        saturating_ms(self.lease())
    }

    /// Notes that the key of a claim is complete, before its stored data is read in a second step: no handler runs for a
    /// known duplicate, also if this step fails or the layer drops the call.
    pub fn note_duplicate(&self) {
        if let Some(note) = &self.duplicate_note {
            let _ = note.set(());
        }
    }
}

/// The longest time of the stores is that of Redis: 2^48 milliseconds since the Unix epoch, in the year 10889.
fn saturating_ms(duration: Duration) -> i64 {
    const MOST: i64 = 1_000 * 365 * 86_400_000;
    i64::try_from(duration.as_millis()).map_or(MOST, |ms| ms.min(MOST))
}
