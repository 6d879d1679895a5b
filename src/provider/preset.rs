//! [`Preset`]: the facts about one sender.

use std::fmt;
use std::time::Duration;

use http::Method;

use super::scheme::Scheme;
use crate::key::{self, EachKey, IntoKeyExtractor, KeyExtractor, KeyPart, Reader, RequestRef};

pub(super) const MINUTE: u64 = 60;
pub(super) const HOUR: u64 = 60 * MINUTE;
pub(super) const DAY: u64 = 24 * HOUR;
pub(super) const MIB: usize = 1024 * 1024;

/// The facts about one sender: its key, and other facts that deduplication depends on.
#[derive(Clone, Copy)]
pub struct Preset {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) aliases: &'static [&'static str],
    pub(super) key: &'static str,
    pub(super) rule: Rule,
    pub(super) event_type: EventType,
    pub(super) handshake: Option<Handshake>,
    pub(super) methods: &'static [Method],
    pub(super) floor: Floor,
    pub(super) body: Option<LargestBody>,
    pub(super) retries: Retries,
    pub(super) how: &'static str,
    /// How the sender signs; `None` if this crate does not know it.
    pub(crate) scheme: Option<Scheme>,
    pub(super) signed_id: bool,
    pub(super) answer_matters: bool,
    pub(super) source: &'static str,
    pub(super) unverified: &'static str,
}

/// The defaults of the fields that a preset does not state.
pub(super) const DEFAULTS: Preset = Preset {
    name: "",
    title: "",
    aliases: &[],
    key: "",
    rule: Rule::Part(key::body_digest),
    event_type: EventType("", None),
    handshake: None,
    methods: &[Method::POST],
    floor: Floor(0, ""),
    body: None,
    retries: Retries::Automatic,
    how: "",
    scheme: None,
    signed_id: false,
    answer_matters: false,
    source: "",
    unverified: "",
};

/// How the key is read.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    Part(fn() -> KeyPart),
    Each(fn() -> EachKey),
    /// A list of events in most requests, but not in all.
    Reader(fn() -> Reader),
}

/// Where the type of an event stands, and how it is read: `None` if the rule reads it with the key, or if the sender
/// has no such field.
#[derive(Clone, Copy)]
pub(super) struct EventType(pub(super) &'static str, pub(super) Option<fn() -> KeyPart>);

/// Which requests carry no event.
#[derive(Clone, Copy)]
pub(super) struct Handshake {
    pub(super) words: &'static str,
    pub(super) is: fn(&RequestRef<'_>) -> bool,
    /// Whether the sender needs no more than a 2xx, so that the layer answers.
    pub(super) needs_only_2xx: bool,
}

/// The shortest retention, and why.
#[derive(Clone, Copy)]
pub(super) struct Floor(pub(super) u64, pub(super) &'static str);

/// The largest body, in bytes, and where the sender documents it.
#[derive(Clone, Copy)]
pub(super) struct LargestBody(pub(super) usize, pub(super) &'static str);

/// When a sender retries a delivery by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retries {
    /// The sender retries every delivery that is not acknowledged.
    Automatic,
    /// The sender retries after a failed connection only. A response of any status ends the delivery.
    ConnectionFailure,
    /// The sender never retries: a delivery that is not acknowledged is lost unless a person sends
    /// it again. The handler should commit a job and answer at once, as in the example `ack_fast`.
    Never,
    /// Retries are not documented, or senders of this format differ. Expect repeated deliveries and
    /// lost deliveries.
    Undocumented,
}

impl Preset {
    /// Returns the preset's name, in lower case with hyphens: `standard-webhooks`. It is the namespace of the keys.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns other names for the preset: senders that deliver in the same way.
    #[must_use]
    pub const fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    /// Returns the key without its namespace, to compose it further; `None` for a sender of
    /// multi-event deliveries: one request may carry several events, each with its own key.
    ///
    /// The part ignores handshakes and methods. [`extractor`](Self::extractor) includes them.
    #[must_use]
    pub fn key(&self) -> Option<KeyPart> {
        match self.rule {
            Rule::Part(part) => Some(part()),
            Rule::Each(_) | Rule::Reader(_) => None,
        }
    }

    /// Returns the extractor, which the layer takes: the key in the preset's namespace, the
    /// methods, the retention floor and the handshakes.
    #[must_use]
    pub fn extractor(&self) -> KeyExtractor {
        let keys = match self.rule {
            Rule::Part(part) => part().namespace(self.name),
            Rule::Each(each) => each().namespace(self.name),
            Rule::Reader(reader) => KeyExtractor::from_reader(self.name, reader()),
        };
        let keys = match self.event_type.1 {
            Some(part) => keys.event_type(part()),
            None => keys,
        };
        let mut keys =
            keys.methods(self.methods.iter().cloned()).retention_floor(self.retention_floor());
        keys.max_body = self.max_body();
        keys.unsigned_id = !self.signed_id;
        keys.tried_once = matches!(self.retries, Retries::Never | Retries::ConnectionFailure);
        match self.handshake {
            Some(handshake) if handshake.needs_only_2xx => keys.handshake_when(handshake.is),
            Some(handshake) => keys.bypass_when(handshake.is),
            None => keys,
        }
    }

    /// Returns the methods by which the sender delivers.
    #[must_use]
    pub const fn methods(&self) -> &'static [Method] {
        self.methods
    }

    /// Returns how long an event may be delivered again. This is twice the automatic retry window,
    /// or the window in which a person can send the event again, if that is longer. If neither is
    /// documented, it is an estimate of this crate.
    #[must_use]
    pub const fn retention_floor(&self) -> Duration {
        Duration::from_secs(self.floor.0)
    }

    /// Returns the largest body that the sender sends, in bytes; `None` if the sender does not document
    /// it. The default [`body_limit`](crate::DedupLayer::body_limit) is not below it.
    #[must_use]
    pub const fn max_body(&self) -> Option<usize> {
        match self.body {
            Some(body) => Some(body.0),
            None => None,
        }
    }

    /// Returns when the sender retries by itself.
    #[must_use]
    pub const fn retries(&self) -> Retries {
        self.retries
    }

    /// Returns `true` if the sender's signature covers the id. If it does not, an attacker who has
    /// read one signed delivery can send its body again under another id.
    ///
    /// Returns `false` also if nothing is signed, or if the signed bytes are not documented.
    #[must_use]
    pub const fn signed_id(&self) -> bool {
        self.signed_id
    }

    /// Returns `true` if the feature `verify` verifies the requests of this sender.
    #[must_use]
    pub const fn has_verifier(&self) -> bool {
        self.scheme.is_some()
    }

    /// Returns, in words, which requests carry no event, and `true` if the layer answers them.
    #[doc(hidden)]
    #[must_use]
    pub const fn handshakes(&self) -> Option<(&'static str, bool)> {
        match self.handshake {
            Some(handshake) => Some((handshake.words, handshake.needs_only_2xx)),
            None => None,
        }
    }

    /// Returns `true` if the sender reads the response body. Then an empty 200 to a duplicate
    /// differs from the response to the first delivery.
    #[must_use]
    pub const fn answer_matters(&self) -> bool {
        self.answer_matters
    }

    /// Returns the texts of the guide's table: the name as the sender writes it, the key, where the event's type
    /// stands, the reasons for the retention floor and for the largest body, the schedule of retries, the page with
    /// the facts, and the facts that the sender's own documentation does not state. A text is empty if there is
    /// none.
    #[doc(hidden)]
    #[must_use]
    pub fn texts(&self) -> [&'static str; 8] {
        let body = self.body.map_or("", |body| body.1);
        let event_type = self.event_type.0;
        let [title, key, floor] = [self.title, self.key, self.floor.1];
        [title, key, event_type, floor, body, self.how, self.source, self.unverified]
    }
}

/// By name, which is unique.
impl PartialEq for Preset {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Preset {}

impl IntoKeyExtractor for Preset {}

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
            .field("max_body", &self.max_body())
            .field("retries", &self.retries)
            .field("signed_id", &self.signed_id)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
