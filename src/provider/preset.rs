//! [`Preset`]: what is known about one sender.

use std::fmt;
use std::time::Duration;

use http::Method;

use crate::key::{Batch, KeyExtractor, KeyPart, Reader, RequestRef};

pub(super) const MINUTE: u64 = 60;
pub(super) const HOUR: u64 = 60 * MINUTE;
pub(super) const DAY: u64 = 24 * HOUR;

pub(super) const POST: &[Method] = &[Method::POST];

/// What is known about one sender.
#[derive(Clone, Copy)]
pub struct Preset {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) aliases: &'static [&'static str],
    pub(super) key: &'static str,
    pub(super) rule: Rule,
    pub(super) handshake: Option<Handshake>,
    pub(super) methods: &'static [Method],
    pub(super) floor: Floor,
    pub(super) retries: Retries,
    pub(super) how: &'static str,
    pub(super) signed_id: bool,
    pub(super) answer_matters: bool,
    pub(super) source: &'static str,
    pub(super) unverified: &'static str,
}

/// How the key is read.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    Part(fn() -> KeyPart),
    Batch(fn() -> Batch),
    /// Batches, but for some requests of some senders.
    Reader(fn() -> Reader),
}

/// Which requests are no events.
#[derive(Clone, Copy)]
pub(super) struct Handshake {
    pub(super) words: &'static str,
    pub(super) is: fn(&RequestRef<'_>) -> bool,
}

/// The shortest retention, and why.
#[derive(Clone, Copy)]
pub(super) struct Floor(pub(super) u64, pub(super) &'static str);

/// Whether a sender delivers again by itself what was not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retries {
    /// What is not acknowledged is retried.
    Automatic,
    /// Only a failed connection is retried: an answer, whatever its status, ends the delivery.
    ConnectionFailure,
    /// Never: a delivery that is not acknowledged is lost unless a person sends it again. Such a
    /// handler should write a job down and answer at once, as the example `ack_fast` does.
    Never,
    /// It is not documented, or differs from one sender of this format to the next: expect both
    /// repeated and lost deliveries.
    Undocumented,
}

impl Preset {
    /// The preset's name, in lower case with hyphens: `standard-webhooks`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The sender's name as it writes it: `Standard Webhooks`.
    #[must_use]
    pub const fn title(&self) -> &'static str {
        self.title
    }

    /// Other names for it: senders that deliver in the same way.
    #[must_use]
    pub const fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    /// The namespace of its keys: the preset's name.
    #[must_use]
    pub const fn namespace(&self) -> &'static str {
        self.name
    }

    /// The key in words (Markdown): header names, and JSON pointers into the body or the event.
    /// `?` marks a part that may be missing.
    #[must_use]
    pub const fn key_in_words(&self) -> &'static str {
        self.key
    }

    /// The key without its namespace, to be composed further; `None` for a sender of batches.
    ///
    /// It knows nothing of handshakes and methods: [`extractor`](Self::extractor) does.
    #[must_use]
    pub fn key(&self) -> Option<KeyPart> {
        match self.rule {
            Rule::Part(part) => Some(part()),
            Rule::Batch(_) | Rule::Reader(_) => None,
        }
    }

    /// What the layer takes: the key in the preset's namespace, its methods, its retention floor
    /// and its handshakes.
    #[must_use]
    pub fn extractor(&self) -> KeyExtractor {
        let keys = match self.rule {
            Rule::Part(part) => part().namespace(self.name),
            Rule::Batch(batch) => batch().namespace(self.name),
            Rule::Reader(reader) => KeyExtractor::from_reader(self.name, reader()),
        };
        let keys =
            keys.methods(self.methods.iter().cloned()).retention_floor(self.retention_floor());
        match self.handshake {
            Some(handshake) => keys.bypass_when(handshake.is),
            None => keys,
        }
    }

    /// Whether one request may carry many events, each with a key of its own.
    #[must_use]
    pub const fn is_batch(&self) -> bool {
        !matches!(self.rule, Rule::Part(_))
    }

    /// The methods by which the sender delivers.
    #[must_use]
    pub const fn methods(&self) -> &'static [Method] {
        self.methods
    }

    /// How long an event may be delivered again: the larger of twice the automatic retry window
    /// and the window in which a person can send it again. Where neither is documented, a margin
    /// of ours.
    #[must_use]
    pub const fn retention_floor(&self) -> Duration {
        Duration::from_secs(self.floor.0)
    }

    /// Where the retention floor comes from, in words.
    #[must_use]
    pub const fn floor_basis(&self) -> &'static str {
        self.floor.1
    }

    /// Whether the sender retries by itself.
    #[must_use]
    pub const fn retries(&self) -> Retries {
        self.retries
    }

    /// How it retries, in words.
    #[must_use]
    pub const fn retries_how(&self) -> &'static str {
        self.how
    }

    /// Whether the sender's signature covers the id. Where it does not, whoever can read one
    /// signed delivery can send its body again under another id.
    ///
    /// `false` also where there is no signature, or where the signed bytes are not documented.
    #[must_use]
    pub const fn signed_id(&self) -> bool {
        self.signed_id
    }

    /// The requests that are no events and reach the handler undeduplicated, in words.
    #[must_use]
    pub const fn handshakes(&self) -> Option<&'static str> {
        match self.handshake {
            Some(handshake) => Some(handshake.words),
            None => None,
        }
    }

    /// Whether the sender reads the body of the answer to an event, so that an empty 200 to a
    /// duplicate is not the same as what the first delivery was answered.
    #[must_use]
    pub const fn answer_matters(&self) -> bool {
        self.answer_matters
    }

    /// Where the facts come from.
    #[must_use]
    pub const fn source(&self) -> &'static str {
        self.source
    }

    /// What the sender's own documentation does not say, in words.
    #[must_use]
    pub const fn unverified(&self) -> Option<&'static str> {
        if self.unverified.is_empty() { None } else { Some(self.unverified) }
    }
}

impl From<Preset> for KeyExtractor {
    fn from(preset: Preset) -> Self {
        preset.extractor()
    }
}

impl fmt::Debug for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Preset")
            .field("name", &self.name)
            .field("key", &self.key)
            .field("methods", &self.methods)
            .field("retention_floor", &self.retention_floor())
            .field("retries", &self.retries)
            .field("signed_id", &self.signed_id)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
