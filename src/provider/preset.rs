//! [`Preset`]: the facts about one sender.

use std::fmt;
use std::time::Duration;

use http::Method;

use super::challenge::{Challenge, Handshake};
use super::scheme::Scheme;
use crate::key::{self, IntoKeyExtractor, KeyExtractor, KeyPart, RequestRef, Rule};

pub(super) const MINUTE: u64 = 60;
pub(super) const HOUR: u64 = 60 * MINUTE;
pub(super) const DAY: u64 = 24 * HOUR;
pub(super) const MIB: usize = 1024 * 1024;

/// The facts about one sender: its key, and other facts that deduplication depends on.
///
/// The [table](crate::guide::providers) in the guide has the page of the sender that states each
/// fact.
#[derive(Clone, Copy)]
pub struct Preset {
    pub(super) name: &'static str,
    pub(super) aliases: &'static [&'static str],
    /// How the key is read.
    pub(super) rule: fn() -> Rule,
    /// `None` if the rule reads the type with the key, or if the sender has no such field.
    pub(super) event_type: Option<fn() -> KeyPart>,
    /// The requests without an event whose sender needs no more than a 2xx: the layer answers them.
    pub(super) handshake: Option<Condition>,
    /// The requests without an event whose sender wants an echo: a layer of `verify` answers them,
    /// or the handler.
    pub(crate) challenges: &'static [Challenge],
    /// The other requests without an event: the handler answers them.
    pub(super) bypass: Option<Condition>,
    pub(super) methods: &'static [Method],
    /// The shortest retention, in seconds.
    pub(super) floor: u64,
    /// In bytes.
    pub(crate) max_body: Option<usize>,
    pub(crate) retries: Retries,
    /// How the sender signs; `None` if this crate does not know it.
    pub(crate) scheme: Option<Scheme>,
    pub(super) signed_id: Option<bool>,
    /// The headers of the sample, among them a content type other than JSON.
    #[cfg_attr(not(feature = "testing"), expect(dead_code, reason = "`testing` sends them"))]
    pub(crate) sample_headers: &'static [(&'static str, &'static str)],
    /// The body of a request with an event, for tests. `{id}` is the id; in JSON, `{number}` is a
    /// number if the id is one.
    #[cfg_attr(not(feature = "testing"), expect(dead_code, reason = "`testing` sends it"))]
    pub(crate) sample: &'static str,
}

/// The defaults of the fields that a preset does not state.
pub(super) const DEFAULTS: Preset = Preset {
    name: "",
    aliases: &[],
    rule: || Rule::part(key::body_digest()),
    event_type: None,
    handshake: None,
    challenges: &[],
    bypass: None,
    methods: &[Method::POST],
    floor: 0,
    max_body: None,
    retries: Retries::Automatic,
    scheme: None,
    signed_id: None,
    sample_headers: &[],
    sample: "{}",
};

type Condition = fn(&RequestRef<'_>) -> bool;

/// When a sender retries a delivery by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retries {
    /// The sender retries every delivery that is not acknowledged.
    Automatic,
    /// The sender retries after a failed connection only. A response of any status ends the
    /// delivery.
    ConnectionFailure,
    /// The sender never retries: a delivery that is not acknowledged is lost unless a person sends
    /// it again. An inbox around the layer delivers it again.
    Never,
    /// Retries are not documented, or senders of this format differ. Expect repeated deliveries and
    /// lost deliveries.
    Undocumented,
}

impl Preset {
    /// Returns the preset's name, in lower case with hyphens: `standard-webhooks`. It is the
    /// namespace of the keys.
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
        if let Rule::Part(part) = (self.rule)() { Some(part.id().clone()) } else { None }
    }

    /// Returns the extractor, which the layer takes: the key in the preset's namespace, the
    /// methods, the retention floor and the handshakes.
    #[must_use]
    pub fn extractor(&self) -> KeyExtractor {
        let mut keys = KeyExtractor::new(self.name, (self.rule)());
        keys.methods = self.methods;
        keys.retention_floor = Some(self.retention_floor());
        keys.max_body = self.max_body;
        keys.is_signed = self.scheme.is_some();
        keys.unsigned_id = self.signed_id != Some(true);
        keys.tried_once = matches!(self.retries, Retries::Never | Retries::ConnectionFailure);
        if let Some(part) = self.event_type {
            keys = keys.event_type(part());
        }
        if let Some(is_handshake) = self.handshake {
            keys = keys.handshake_when(is_handshake);
        }
        if !self.challenges.is_empty() {
            let all = self.handshakes();
            keys = keys.bypass_when(move |it| all.iter().any(|one| one.is(it)));
        }
        if let Some(is_no_event) = self.bypass {
            keys = keys.bypass_when(is_no_event);
        }
        keys
    }

    /// Returns the handshakes whose sender wants an echo.
    pub(crate) fn handshakes(&self) -> Vec<Handshake> {
        self.challenges.iter().map(Handshake::new).collect()
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
        Duration::from_secs(self.floor)
    }

    /// Returns whether the sender's signature covers the id; `None` if that is not known, or
    /// depends on the sender. If it does not, an attacker who has read one signed delivery can send
    /// its body again under another id.
    ///
    /// Returns `Some(false)` also if the sender signs nothing.
    #[must_use]
    pub const fn signed_id(&self) -> Option<bool> {
        self.signed_id
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
        f.debug_tuple("Preset").field(&self.name).finish()
    }
}
