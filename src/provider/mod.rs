//! Presets: the right key for a sender, with what else deduplication must know about it.
//!
//! 1. A preset carries the key, the methods by which the sender delivers, how long it may deliver
//!    an event again (the *retention floor*) and why that long, whether it retries at all, which
//!    requests are handshakes, and whether its signature covers the id.
//! 2. The key of a preset never changes once it is released: another key would run stored events
//!    again.
//! 3. A handshake reaches the handler undeduplicated. Where what makes it one is not signed, the
//!    signed body must agree: a forged header must not let an event past.
//! 4. A preset's namespace is the sender's name. Many senders deliver one event, under one id, to
//!    every endpoint that is subscribed to it: where two handlers have to see it, each needs a
//!    [namespace of its own](crate::guide::keys#several-endpoints-of-one-sender).
//! 5. What could not be verified in the sender's own documentation is said, in
//!    [`Preset::unverified`].
//!
//! All of them are in [one table](crate::guide::providers); senders without a preset are on
//! [another page](crate::guide::senders). [`find`] takes a name or an alias.
//!
//! # Example
//!
//! ```
//! use tower_dedup::key::KeyExtractor;
//! use tower_dedup::provider;
//!
//! assert_eq!(provider::GITHUB.namespace(), "github");
//! // Two endpoints that are subscribed to one event, or two accounts that number their events
//! // alike: a namespace for each.
//! let billing = KeyExtractor::from(provider::STRIPE).namespace("stripe-billing");
//! let tax = KeyExtractor::from(provider::STRIPE).namespace("stripe-tax");
//! # let _ = (billing, tax);
//! ```

mod chat;
mod cloud;
mod code;
mod mail;
mod money;
mod preset;
mod read;
mod standard;
mod tools;
mod whatsapp;

pub use chat::{SLACK, TELEGRAM, TWILIO, TWILIO_BY_TOKEN, TWITCH};
pub use cloud::{AWS_SNS, AZURE_EVENT_GRID, GOOGLE_PUBSUB};
pub use code::{CIRCLECI, GITEA, GITHUB, GITLAB};
pub use mail::{POSTMARK, SENDGRID};
pub use money::{ADYEN, PADDLE, SHOPIFY, SQUARE, STRIPE};
pub use preset::{Preset, Retries};
pub use standard::{CLOUDEVENTS, STANDARD_WEBHOOKS, SVIX};
pub use tools::{BOX, HUBSPOT};
pub use whatsapp::WHATSAPP;

/// Every preset, in the order of the [table](crate::guide::providers).
pub const ALL: &[Preset] = &[
    STANDARD_WEBHOOKS,
    SVIX,
    CLOUDEVENTS,
    GITHUB,
    GITLAB,
    GITEA,
    CIRCLECI,
    STRIPE,
    SHOPIFY,
    SQUARE,
    PADDLE,
    ADYEN,
    SLACK,
    TWILIO,
    TWILIO_BY_TOKEN,
    WHATSAPP,
    TELEGRAM,
    TWITCH,
    SENDGRID,
    POSTMARK,
    AWS_SNS,
    GOOGLE_PUBSUB,
    AZURE_EVENT_GRID,
    HUBSPOT,
    BOX,
];

/// The preset of this name or alias, in any case and with `_` for `-`.
///
/// ```
/// use tower_dedup::provider;
///
/// assert_eq!(provider::find("forgejo").unwrap().name(), "gitea");
/// assert!(provider::find("nobody").is_none());
/// ```
#[must_use]
pub fn find(name: &str) -> Option<Preset> {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let named = |preset: &&Preset| preset.name() == name || preset.aliases().contains(&&*name);
    ALL.iter().find(named).copied()
}
