//! [`Scheme`]: who signs what.

use super::error::{Refusal, VerifierError};
use super::received::{Received, base64, hex};
#[cfg(feature = "verify-ecdsa")]
use super::schemes::sendgrid;
use super::schemes::{adyen, body, timed, token, url, webhooks};

/// A signature scheme of a sender.
///
/// [`Preset::scheme`](crate::provider::Preset::scheme) returns the scheme of a preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// [Standard Webhooks](https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md):
    /// HMAC-SHA256 over id, time and body. The secret is base64, after `whsec_` or without it.
    StandardWebhooks,
    /// [Svix](https://docs.svix.com/receiving/verifying-payloads/how-manual): like Standard Webhooks,
    /// with headers that begin with `svix-` or `webhook-`. If both are present, they must be equal.
    Svix,
    /// [GitHub](https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries):
    /// HMAC-SHA256 over the body. Neither the id nor a time is signed.
    GitHub,
    /// [GitLab](https://docs.gitlab.com/user/project/integrations/webhooks/): the shared *secret
    /// token*. Nothing is signed, so who reads one delivery can forge others. The newer signing token
    /// is not supported.
    GitLab,
    /// [Gitea](https://docs.gitea.com/usage/webhooks) and Forgejo: HMAC-SHA256 over the body. Neither
    /// the id nor a time is signed.
    Gitea,
    /// [CircleCI](https://circleci.com/docs/outbound-webhooks): HMAC-SHA256 over the body, which has
    /// the id. No time is signed.
    CircleCi,
    /// [Stripe](https://docs.stripe.com/webhooks): HMAC-SHA256 over time and body, which has the id.
    /// The key is the whole secret, including `whsec_`.
    Stripe,
    /// [Shopify](https://shopify.dev/docs/apps/build/webhooks): HMAC-SHA256 over the body. Neither the
    /// headers with id, topic and shop nor a time are signed.
    Shopify,
    /// [Square](https://developer.squareup.com/docs/webhooks/step3validate): HMAC-SHA256 over the
    /// public URL and the body, which has the id. No time is signed.
    Square,
    /// [Paddle Billing](https://developer.paddle.com/webhooks/signature-verification): HMAC-SHA256 over
    /// time and body, which has the id. Paddle's libraries use a tolerance of 5 s.
    Paddle,
    /// [Adyen](https://docs.adyen.com/development-resources/webhooks/verify-hmac-signatures/):
    /// HMAC-SHA256 over eight values of each item, among them the four of the key. Nothing else is
    /// signed: not the time, `paymentMethod` or `additionalData`. The secret is hexadecimal.
    Adyen,
    /// [Slack](https://docs.slack.dev/authentication/verifying-requests-from-slack): HMAC-SHA256 over
    /// version, time and body, which has the id.
    Slack,
    /// [Twilio](https://www.twilio.com/docs/usage/security#validating-requests): HMAC-SHA1 over the
    /// public URL and the form fields. No time is signed.
    ///
    /// If the body is no form, the URL has its digest. The signed text has no separators: `a=bc` and
    /// `ab=c` have the same signature, and so have the end of the query and the beginning of the form.
    /// Let the handler refuse an invalid SID or status.
    ///
    /// The method is not signed. So a GET must have `AccountSid=AC…` in its query, and every other
    /// request must not have it in its URL or fields: a captured GET cannot be sent as a POST, nor a
    /// captured POST with an `AccountSid` as a GET. Do not put an `AccountSid` into the URL of a webhook
    /// that Twilio sends by POST.
    Twilio,
    /// [Meta](https://developers.facebook.com/docs/graph-api/webhooks/getting-started), WhatsApp
    /// included: HMAC-SHA256 over the body, which has the ids. No time is signed.
    Meta,
    /// [Telegram](https://core.telegram.org/bots/api#setwebhook): the shared token. Nothing is signed,
    /// so who reads one delivery can forge others.
    Telegram,
    /// [Twitch EventSub](https://dev.twitch.tv/docs/eventsub/handling-webhook-events/): HMAC-SHA256
    /// over id, time and body. Twitch recommends a tolerance of 10 min.
    Twitch,
    /// [SendGrid](https://www.twilio.com/docs/sendgrid/for-developers/tracking-events/getting-started-event-webhook-security-features):
    /// ECDSA over time and body, which has the ids. The secret is the public key that SendGrid shows.
    /// It needs the feature `verify-ecdsa`.
    SendGrid,
    /// [HubSpot, version 3](https://developers.hubspot.com/docs/api/webhooks/validating-requests):
    /// HMAC-SHA256 over method, public URL, body, which has the ids, and time.
    HubSpot,
    /// [Box](https://developer.box.com/guides/webhooks/v2/signatures-v2/): HMAC-SHA256 over body, which
    /// has the id, and time. Box recommends a tolerance of 10 min. If two keys are configured at Box,
    /// one of them is enough.
    Box,
}

/// What a scheme signs.
struct Facts {
    /// The name of the preset.
    name: &'static str,
    header: &'static str,
    signed: &'static str,
    id: bool,
    time: bool,
    url: bool,
}

impl Scheme {
    /// All schemes, in the order of the [presets](crate::provider::ALL).
    pub const ALL: &[Self] = &[
        Self::StandardWebhooks,
        Self::Svix,
        Self::GitHub,
        Self::GitLab,
        Self::Gitea,
        Self::CircleCi,
        Self::Stripe,
        Self::Shopify,
        Self::Square,
        Self::Paddle,
        Self::Adyen,
        Self::Slack,
        Self::Twilio,
        Self::Meta,
        Self::Telegram,
        Self::Twitch,
        Self::SendGrid,
        Self::HubSpot,
        Self::Box,
    ];

    /// The names of all schemes.
    pub(super) const NAMES: &'static [&'static str] = &{
        let mut names = [""; Self::ALL.len()];
        let mut n = 0;
        while n < names.len() {
            names[n] = Self::ALL[n].name();
            n += 1;
        }
        names
    };

    const fn facts(self) -> Facts {
        const fn facts(
            name: &'static str,
            header: &'static str,
            signed: &'static str,
            [id, time, url]: [bool; 3],
        ) -> Facts {
            Facts { name, header, signed, id, time, url }
        }
        const ID: [bool; 3] = [true, false, false];
        const ID_TIME: [bool; 3] = [true, true, false];
        const ID_URL: [bool; 3] = [true, false, true];
        const ALL: [bool; 3] = [true, true, true];
        const NONE: [bool; 3] = [false, false, false];
        match self {
            Self::StandardWebhooks => {
                facts("standard-webhooks", "webhook-signature", "id, time, body", ID_TIME)
            }
            Self::Svix => facts("svix", "svix-signature", "id, time, body", ID_TIME),
            Self::GitHub => facts("github", "x-hub-signature-256", "body", NONE),
            Self::GitLab => facts("gitlab", "x-gitlab-token", "nothing: a shared token", NONE),
            Self::Gitea => facts("gitea", "x-gitea-signature", "body", NONE),
            Self::CircleCi => facts("circleci", "circleci-signature", "body", ID),
            Self::Stripe => facts("stripe", "stripe-signature", "time, body", ID_TIME),
            Self::Shopify => facts("shopify", "x-shopify-hmac-sha256", "body", NONE),
            Self::Square => facts("square", "x-square-hmacsha256-signature", "URL, body", ID_URL),
            Self::Paddle => facts("paddle", "paddle-signature", "time, body", ID_TIME),
            Self::Adyen => facts("adyen", "none: in each item", "eight values of each item", ID),
            Self::Slack => facts("slack", "x-slack-signature", "version, time, body", ID_TIME),
            Self::Twilio => {
                facts("twilio", "x-twilio-signature", "URL, fields of the form", ID_URL)
            }
            Self::Meta => facts("whatsapp", "x-hub-signature-256", "body", ID),
            Self::Telegram => facts(
                "telegram",
                "x-telegram-bot-api-secret-token",
                "nothing: a shared token",
                NONE,
            ),
            Self::Twitch => {
                facts("twitch", "twitch-eventsub-message-signature", "id, time, body", ID_TIME)
            }
            Self::SendGrid => {
                facts("sendgrid", "x-twilio-email-event-webhook-signature", "time, body", ID_TIME)
            }
            Self::HubSpot => {
                facts("hubspot", "x-hubspot-signature-v3", "method, URL, body, time", ALL)
            }
            Self::Box => facts("box", "box-signature-primary", "body, time", ID_TIME),
        }
    }

    /// Returns the name of the preset with this scheme: `standard-webhooks`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns `true` if a signed time limits how long a captured delivery can be sent again.
    #[must_use]
    pub const fn signs_time(self) -> bool {
        self.facts().time
    }

    /// Returns `true` if the sender signs the public URL of the server:
    /// [`verifier_at`](Self::verifier_at) takes it.
    #[must_use]
    pub const fn signs_url(self) -> bool {
        self.facts().url
    }

    /// Returns `true` if the signature covers the id, or the values of the key.
    #[must_use]
    pub const fn signs_id(self) -> bool {
        self.facts().id
    }

    /// Returns, in words, where the signature is and what is signed.
    #[doc(hidden)]
    #[must_use]
    pub const fn in_words(self) -> [&'static str; 2] {
        [self.facts().header, self.facts().signed]
    }

    /// Returns the scheme of the preset with this name.
    pub(super) fn of(preset: &str) -> Option<Self> {
        // Both presets of Twilio are one sender.
        let name = if preset == "twilio-by-token" { "twilio" } else { preset };
        Self::ALL.iter().find(|scheme| scheme.name() == name).copied()
    }

    /// Reads a secret in the sender's own notation.
    pub(super) fn key(self, secret: &str) -> Result<Vec<u8>, VerifierError> {
        let without_prefix = secret.strip_prefix("whsec_").unwrap_or(secret);
        if without_prefix.is_empty() {
            return Err(VerifierError::EmptySecret);
        }
        let malformed = |rule| VerifierError::MalformedSecret { rule };
        // A file or a variable often ends in a line feed, which no signature would match.
        if secret.trim() != secret {
            return Err(malformed("free of white space around it"));
        }
        let key = match self {
            Self::StandardWebhooks | Self::Svix => {
                base64(without_prefix).ok_or(malformed("`whsec_` and base64"))?
            }
            Self::Adyen => hex(secret).ok_or(malformed("hexadecimal"))?,
            Self::Telegram => {
                let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
                if secret.len() > 256 || !secret.bytes().all(is_valid) {
                    return Err(malformed("1 to 256 letters, digits, `_` or `-`"));
                }
                secret.into()
            }
            #[cfg(feature = "verify-ecdsa")]
            Self::SendGrid => {
                sendgrid::public_key(secret).ok_or(malformed("a public key in base64"))?
            }
            #[cfg(not(feature = "verify-ecdsa"))]
            Self::SendGrid => {
                return Err(VerifierError::FeatureDisabled { feature: "verify-ecdsa" });
            }
            _ => secret.into(),
        };
        Ok(key)
    }

    /// Verifies a request with one key.
    pub(super) fn verify(self, key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
        match self {
            Self::StandardWebhooks => webhooks::standard(key, request),
            Self::Svix => webhooks::svix(key, request),
            Self::GitHub | Self::Meta => body::github(key, request),
            Self::Gitea => body::gitea(key, request),
            Self::CircleCi => body::circleci(key, request),
            Self::Shopify => body::shopify(key, request),
            Self::Stripe => timed::stripe(key, request),
            Self::Paddle => timed::paddle(key, request),
            Self::Slack => timed::slack(key, request),
            Self::Twitch => timed::twitch(key, request),
            Self::Box => timed::box_(key, request),
            Self::Twilio => url::twilio(key, request),
            Self::Square => url::square(key, request),
            Self::HubSpot => url::hubspot(key, request),
            Self::Adyen => adyen::verify(key, request),
            Self::GitLab | Self::Telegram => token::verify(key, request, self.facts().header),
            #[cfg(feature = "verify-ecdsa")]
            Self::SendGrid => sendgrid::verify(key, request),
            #[cfg(not(feature = "verify-ecdsa"))]
            Self::SendGrid => Err(Refusal::Forged),
        }
    }
}
