//! Presets: the right key for a sender, with what else deduplication must know about it.
//!
//! A preset carries the key, the methods by which the sender delivers, how long it may deliver an
//! event again (the *retention floor*), whether it retries at all, and whether its signature
//! covers the id. The key of a preset never changes once it is released: another key would run
//! stored events again.
//!
//! | preset | key | again within | retries by itself | id is signed |
//! |---|---|---|---|---|
//! | [`STANDARD_WEBHOOKS`] | header `webhook-id` | 151 h 10 min | yes | yes |
//! | [`GITHUB`] | header `X-GitHub-Delivery` | 3 days | no | no |
//! | [`STRIPE`] | JSON `/id` | 30 days | yes | yes |
//! | [`TWILIO`] | `AccountSid`, `MessageSid` or `CallSid`, status | 1 day | on connection failure | yes |
//!
//! # Example
//!
//! ```
//! use tower_dedup::key::KeyExtractor;
//! use tower_dedup::provider;
//!
//! assert_eq!(provider::GITHUB.namespace(), "github");
//! // Two accounts that number their events alike: a namespace for each.
//! let second_account = KeyExtractor::from(provider::STRIPE).namespace("stripe-eu");
//! # let _ = second_account;
//! ```

use std::fmt;
use std::time::Duration;

use http::Method;

use crate::key::{self, KeyExtractor, KeyPart};

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

/// What is known about one sender.
#[derive(Clone, Copy)]
pub struct Preset {
    name: &'static str,
    key: fn() -> KeyPart,
    methods: &'static [Method],
    retention_floor: Duration,
    retries: Retries,
    signed_id: bool,
    source: &'static str,
}

/// Whether a sender delivers again by itself what was not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retries {
    /// Anything but a 2xx is retried on a schedule.
    Automatic,
    /// Only a failed connection is retried: an answer, whatever its status, ends the delivery.
    ConnectionFailure,
    /// Never: a delivery that is not acknowledged is lost unless a person sends it again.
    Never,
}

impl Preset {
    /// The preset's name, in lower case with hyphens: `standard-webhooks`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The namespace of its keys: the preset's name.
    #[must_use]
    pub const fn namespace(&self) -> &'static str {
        self.name
    }

    /// The methods by which the sender delivers.
    #[must_use]
    pub const fn methods(&self) -> &'static [Method] {
        self.methods
    }

    /// How long an event may be delivered again: the larger of twice the automatic retry window
    /// and the window in which a person can send it again.
    #[must_use]
    pub const fn retention_floor(&self) -> Duration {
        self.retention_floor
    }

    /// Whether the sender retries by itself.
    #[must_use]
    pub const fn retries(&self) -> Retries {
        self.retries
    }

    /// Whether the sender's signature covers the id. Where it does not, whoever can read one
    /// signed delivery can send its body again under another id.
    #[must_use]
    pub const fn signed_id(&self) -> bool {
        self.signed_id
    }

    /// Where the facts come from.
    #[must_use]
    pub const fn source(&self) -> &'static str {
        self.source
    }

    /// The key without its namespace, to be composed further.
    #[must_use]
    pub fn key(&self) -> KeyPart {
        (self.key)()
    }
}

impl From<Preset> for KeyExtractor {
    fn from(preset: Preset) -> Self {
        preset
            .key()
            .namespace(preset.name)
            .methods(preset.methods.iter().cloned())
            .retention_floor(preset.retention_floor)
    }
}

impl fmt::Debug for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Preset")
            .field("name", &self.name)
            .field("key", &self.key())
            .field("methods", &self.methods)
            .field("retention_floor", &self.retention_floor)
            .field("retries", &self.retries)
            .field("signed_id", &self.signed_id)
            .field("source", &self.source)
            .finish()
    }
}

/// Standard Webhooks: the header `webhook-id`, which stays the same however often a message is
/// retried, and is part of what is signed.
///
/// The specification's example schedule makes ten attempts over 75 h 35 min; the floor is twice
/// that. (Its "save the ids for five minutes" is shorter than its own schedule.)
pub const STANDARD_WEBHOOKS: Preset = Preset {
    name: "standard-webhooks",
    key: || key::header("webhook-id"),
    methods: &[Method::POST],
    retention_floor: Duration::from_secs(2 * (75 * 3_600 + 35 * 60)),
    retries: Retries::Automatic,
    signed_id: true,
    source: "https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md",
};

/// GitHub: the header `X-GitHub-Delivery`, one value per event.
///
/// GitHub never retries by itself; a person can send a delivery again for three days, and it keeps
/// its id: to let such a redelivery run, [`forget`](crate::adapter::Maintain::forget) the key. All
/// webhooks that subscribe to an event share the value: where a repository's and an organisation's
/// webhook post to one URL and both must be handled, give each its own route and namespace. The
/// signature covers the body, not this header.
pub const GITHUB: Preset = Preset {
    name: "github",
    key: || key::header("x-github-delivery"),
    methods: &[Method::POST],
    retention_floor: DAY.saturating_mul(3),
    retries: Retries::Never,
    signed_id: false,
    source: "https://docs.github.com/en/webhooks/using-webhooks/best-practices-for-using-webhooks",
};

/// Stripe: the event's `id` (`evt_…`) in the body, of snapshot and of thin events.
///
/// Live events are retried for three days; the command line tool sends one again for thirty.
/// Stripe may report one change by two events of different ids:
/// [`second_identity`](KeyExtractor::second_identity) on `/data/object/id` and `/type` catches
/// those, at its price.
pub const STRIPE: Preset = Preset {
    name: "stripe",
    key: || key::json("/id"),
    methods: &[Method::POST],
    retention_floor: DAY.saturating_mul(30),
    retries: Retries::Automatic,
    signed_id: true,
    source: "https://docs.stripe.com/webhooks",
};

/// Twilio: the account, the message or call, and its status, as form fields or, for webhooks that
/// are configured as GET, as query parameters.
///
/// One message reports several statuses under one `MessageSid`, so the id alone would swallow
/// `delivered` after `sent`. The key is
///
/// - `AccountSid|MessageSid|MessageStatus` (or `SmsStatus`), or
/// - `AccountSid|CallSid|CallStatus|SequenceNumber|RecordingSid|RecordingStatus`,
///
/// where everything but the two ids is an empty part if the request does not carry it.
///
/// This is the key of *callbacks*. The turns of a conversation (the `action` of a `<Gather>` or
/// `<Record>`) are answered by the body of the response, and repeat one `CallSid` in one status
/// when a menu asks again: leave such routes out, or key them on what Twilio sends with the retries
/// of one request: `key::header("i-twilio-idempotency-token")`.
///
/// No retry window is documented for messaging and voice; the floor of a day is a margin of ours.
pub const TWILIO: Preset = Preset {
    name: "twilio",
    key: || twilio(key::form).or(twilio(key::query)),
    methods: &[Method::POST, Method::GET],
    retention_floor: HOUR.saturating_mul(24),
    retries: Retries::ConnectionFailure,
    signed_id: true,
    source: "https://www.twilio.com/docs/usage/webhooks",
};

fn twilio(field: fn(&str) -> KeyPart) -> KeyPart {
    let message = field("AccountSid")
        .optional()
        .and(field("MessageSid"))
        .and(field("MessageStatus").or(field("SmsStatus")).optional());
    let call = field("AccountSid")
        .optional()
        .and(field("CallSid"))
        .and(field("CallStatus").optional())
        .and(field("SequenceNumber").optional())
        .and(field("RecordingSid").optional())
        .and(field("RecordingStatus").optional());
    message.or(call)
}

/// Every preset, in the order of the table above.
pub const ALL: &[Preset] = &[STANDARD_WEBHOOKS, GITHUB, STRIPE, TWILIO];
