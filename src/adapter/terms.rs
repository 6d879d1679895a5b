//! The caller's token and the terms of a call to a store.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::stored::{Fetch, StoredData, StoredResponse};
use crate::key::{DedupKey, event_type};

/// The name of one claim: 128 random bits. The caller makes them *before* the call, so that a call
/// whose reply was lost can be repeated or released.
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

/// The terms of a call to a store, which names one key.
///
/// Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTerms {
    shared: Terms,
    pub(crate) payload_sha256: Option<[u8; 32]>,
    pub(crate) event_type: Option<Arc<str>>,
    response: Option<Arc<StoredResponse>>,
    pub(crate) note: Option<DuplicateNote>,
}

/// The terms that all keys of a claim share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) token: Token,
    pub(crate) retention: Duration,
    pub(crate) permanence: Permanence,
    pub(crate) fetch: Fetch,
    pub(crate) handled_at: Option<SystemTime>,
}

/// A key, and the terms of its calls.
#[derive(Debug, Clone)]
pub(crate) struct KeyedTerms {
    pub(crate) key: DedupKey,
    /// Boxed, because lists of keys are moved often.
    pub(crate) terms: Box<CallTerms>,
}

/// Set once the store has returned that a key is complete. The caller reads it after an error or a
/// timeout of the rest of the call.
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

impl Terms {
    /// Returns terms without stored data to fetch.
    pub(crate) const fn new(token: Token, retention: Duration, permanence: Permanence) -> Self {
        Self { token, retention, permanence, fetch: Fetch::Nothing, handled_at: None }
    }

    /// Returns how long a claim holds without a renewal; zero under [`Permanence::OnClaim`].
    pub(crate) const fn lease(&self) -> Duration {
        match self.permanence {
            Permanence::OnClaim => Duration::ZERO,
            Permanence::OnCompletion { lease } => lease,
        }
    }
}

impl CallTerms {
    /// Returns terms under [`Permanence::OnClaim`].
    #[must_use]
    pub const fn on_claim(token: Token, retention: Duration) -> Self {
        Self::new(Terms::new(token, retention, Permanence::OnClaim))
    }

    /// Returns terms under [`Permanence::OnCompletion`] with this lease.
    #[must_use]
    pub const fn on_completion(token: Token, retention: Duration, lease: Duration) -> Self {
        Self::new(Terms::new(token, retention, Permanence::OnCompletion { lease }))
    }

    /// Returns the terms of a key with which nothing is stored.
    pub(crate) const fn new(shared: Terms) -> Self {
        Self { shared, payload_sha256: None, event_type: None, response: None, note: None }
    }

    /// Sets the stored data that a duplicate carries.
    #[must_use]
    pub const fn with_fetch(mut self, fetch: Fetch) -> Self {
        self.shared.fetch = fetch;
        self
    }

    /// Adds the SHA-256 of the payload, which the store holds with the key once it is complete.
    #[must_use]
    pub const fn with_payload_sha256(mut self, sha256: [u8; 32]) -> Self {
        self.payload_sha256 = Some(sha256);
        self
    }

    /// Adds the type of the event, which a store with the ability
    /// [`inspection`](super::contract::Abilities::inspection) holds with a new key. A text that is
    /// no [type](crate::key::Event::with_event_type) is ignored.
    #[must_use]
    pub fn with_event_type(self, event_type: &str) -> Self {
        Self { event_type: self::event_type(event_type), ..self }
    }

    /// Returns the type of the event; `None` if it has none.
    #[must_use]
    pub fn event_type(&self) -> Option<&str> {
        self.event_type.as_deref()
    }

    /// Adds the handler's response, which the store holds with the key once it is complete.
    #[must_use]
    pub fn with_response(mut self, response: Arc<StoredResponse>) -> Self {
        self.response = Some(response);
        self
    }

    /// Sets when the event was handled, for a claim under [`Permanence::OnClaim`] of an event that
    /// another program has handled: the key was completed then, a new key was first seen then, and
    /// the retention counts from then on. A time in the future counts as now.
    #[must_use]
    pub const fn with_handled_at(mut self, time: SystemTime) -> Self {
        self.shared.handled_at = Some(time);
        self
    }

    /// Returns when the event was handled; `None` if it is handled now.
    pub(crate) const fn handled_at(&self) -> Option<SystemTime> {
        self.shared.handled_at
    }

    /// Returns when the event was handled, in milliseconds since the Unix epoch, at most 1,000
    /// years; `None` if it is handled now.
    #[must_use]
    pub fn handled_at_ms(&self) -> Option<i64> {
        self.handled_at().map(|at| saturating_ms(at.duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    /// Returns the SHA-256 of the payload to store with the key once it is complete; `None` if
    /// there is none.
    #[must_use]
    pub const fn payload_sha256(&self) -> Option<[u8; 32]> {
        self.payload_sha256
    }

    /// Returns the response to store with the key once it is complete; `None` if there is none.
    #[must_use]
    pub fn response(&self) -> Option<&StoredResponse> {
        self.response.as_deref()
    }

    /// Returns the data to store with the key once it is complete; `None` if there is none.
    #[must_use]
    pub fn stored_data(&self) -> Option<StoredData> {
        self.stores_data().then(|| StoredData::new(self.payload_sha256, self.response.clone()))
    }

    /// Returns `true` if there is data to store with the key.
    pub(crate) const fn stores_data(&self) -> bool {
        self.payload_sha256.is_some() || self.response.is_some()
    }

    /// Returns the caller's token.
    #[must_use]
    pub const fn token(&self) -> Token {
        self.shared.token
    }

    /// Returns how long the key is remembered: from its claim on, or from
    /// [`handled_at_ms`](Self::handled_at_ms) on.
    #[must_use]
    pub const fn retention(&self) -> Duration {
        self.shared.retention
    }

    /// Returns when the key becomes permanent.
    #[must_use]
    pub const fn permanence(&self) -> Permanence {
        self.shared.permanence
    }

    /// Returns which stored data a duplicate carries.
    #[must_use]
    pub const fn fetch(&self) -> Fetch {
        self.shared.fetch
    }

    /// Returns how long a claim holds without a renewal; zero under [`Permanence::OnClaim`].
    pub(crate) const fn lease(&self) -> Duration {
        self.shared.lease()
    }

    /// Returns the retention in whole milliseconds, at most 1,000 years: added to the present it
    /// overflows the times of no store.
    #[must_use]
    pub fn retention_ms(&self) -> i64 {
        saturating_ms(self.shared.retention)
    }

    /// Returns how long a claim holds without a renewal, in whole milliseconds, at most 1,000
    /// years; zero under [`Permanence::OnClaim`].
    #[must_use]
    pub fn lease_ms(&self) -> i64 {
        saturating_ms(self.lease())
    }

    /// Notes that the key of a claim is complete, before its stored data is read in a second step:
    /// no handler runs for a known duplicate, also if this step fails or the layer drops the call.
    pub fn note_duplicate(&self) {
        if let Some(note) = &self.note {
            let _ = note.set(());
        }
    }
}

/// The longest time of the stores is that of Redis: 2^48 milliseconds since the Unix epoch, in the
/// year 10889.
pub(super) fn saturating_ms(duration: Duration) -> i64 {
    const MOST: i64 = 1_000 * 365 * 86_400_000;
    i64::try_from(duration.as_millis()).map_or(MOST, |ms| ms.min(MOST))
}
