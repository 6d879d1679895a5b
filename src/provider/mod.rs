//! Presets: the key for a sender, and other facts that deduplication depends on.
//!
//! 1. A preset has the key, the methods by which the sender delivers, and the handshakes. It states
//!    how long the sender may deliver an event again (the *retention floor*), whether the sender
//!    retries, and whether the signature covers the id.
//! 2. The key of a preset never changes after its release, because stored events would run again
//!    under another key.
//! 3. A handshake carries no event. The layer answers it if the sender needs no more than a 2xx. A
//!    layer of [`Preset::echo`] answers one whose sender wants an echo; any other handshake reaches
//!    the handler. If the header that marks a handshake is not signed, the signed body must agree.
//!    So a forged header cannot take an event past the layer.
//! 4. A preset's namespace is its name. Many senders deliver one event with one id to every
//!    subscribed endpoint. If two handlers have to see the event, each needs
//!    [its own namespace](crate::guide::keys#several-endpoints-of-one-sender).
//! 5. The table of presets lists the facts that the sender's own documentation does not confirm.
//!
//! [The guide](crate::guide::providers) lists all presets, and keys for senders without one.
//! [`find`] takes a name or an alias.
//!
//! # Example
//!
//! ```
//! use tower_dedup::{KeyExtractor, provider};
//!
//! assert_eq!(provider::GITHUB.name(), "github");
//! // Two endpoints that receive one event, or two accounts with the same ids, need two namespaces.
//! let billing = KeyExtractor::from(provider::STRIPE).namespace("stripe-billing");
//! let tax = KeyExtractor::from(provider::STRIPE).namespace("stripe-tax");
//! # let _ = (billing, tax);
//! ```

mod business;
#[cfg_attr(not(feature = "verify"), expect(dead_code, reason = "the feature `verify` reads it"))]
pub(crate) mod challenge;
mod chat;
mod cloud;
mod code;
mod messenger;
mod money;
mod preset;
mod read;
#[cfg_attr(
    not(feature = "verify"),
    expect(dead_code, unreachable_pub, reason = "the feature `verify` reads it")
)]
pub(crate) mod scheme;
mod standard;
mod twilio;
mod whatsapp;

pub use preset::Preset;

/// Exports presets, and lists them in `ALL`.
macro_rules! presets {
    ($($file:ident: $($preset:ident),+;)+) => {
        $(pub use $file::{$($preset),+};)+

        /// All presets, in the order of the [table](crate::guide::providers).
        pub const ALL: &[Preset] = &[$($($preset),+),+];
    };
}

presets! {
    standard: STANDARD_WEBHOOKS, SVIX, CLOUDEVENTS;
    code: GITHUB, GITLAB, GITEA, CIRCLECI;
    money: STRIPE, SHOPIFY, SQUARE, PADDLE, ADYEN;
    chat: SLACK, DISCORD;
    twilio: TWILIO;
    whatsapp: WHATSAPP;
    chat: TELEGRAM, TWITCH;
    business: SENDGRID, POSTMARK;
    cloud: AWS_SNS, GOOGLE_PUBSUB, AZURE_EVENT_GRID;
    business: HUBSPOT, BOX;
    cloud: MICROSOFT_GRAPH;
    messenger: MESSENGER;
    chat: LINE, ZOOM;
    money: QUICKBOOKS, XERO, RAZORPAY, MOLLIE, GOCARDLESS;
    business: NOTION, INTERCOM, WORKOS;
}

/// Returns the preset with this name or alias; upper case and `_` for `-` are accepted.
///
/// ```
/// use tower_dedup::provider;
///
/// assert_eq!(provider::find("forgejo").unwrap().name(), "gitea");
/// assert!(provider::find("unknown").is_none());
/// ```
#[must_use]
pub fn find(name: &str) -> Option<Preset> {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let named = |preset: &&Preset| preset.name() == name || preset.aliases().contains(&&*name);
    ALL.iter().find(named).copied()
}
