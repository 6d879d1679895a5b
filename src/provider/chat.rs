//! Messaging, calls and streams.

use http::StatusCode;

use super::challenge::{Answer, Challenge, Field, POSTED};
use super::preset::{DAY, DEFAULTS, HOUR, MINUTE, Preset, Retries};
use super::read::{contains, has_no_events, header_is, lacks, value};
use super::scheme::Part::{Body, Header, Rfc3339, Seconds, Text};
use super::scheme::{Scheme, Secret};
use crate::key::{self, FORM, RequestRef, Rule, without_mark};

/// Slack's Events API: `/event_id` in the body, which is unique across all workspaces.
///
/// `url_verification` and `app_rate_limited` have no id; they are handshakes.
/// [`SLACK.echo(None)`](Preset::echo) answers the first. The forms of slash commands and
/// interactivity have no event id either, so they are handshakes too. If such a handler must run
/// once, use the key `key::form("trigger_id")`.
///
/// [Signature](https://docs.slack.dev/authentication/verifying-requests-from-slack): HMAC-SHA256
/// over version, time and body, which has the id.
pub const SLACK: Preset = Preset {
    name: "slack",
    rule: || Rule::part(key::json("/event_id")),
    event_type: Some(|| key::json("/event/type")),
    challenges: &[Challenge {
        marks: &[(Field::Body("/type"), Some("url_verification"))],
        answer: Answer::Text(Field::Body("/challenge")),
        ..POSTED
    }],
    bypass: Some(is_no_slack_event),
    floor: 12 * MINUTE, // twice the 6 min of the schedule
    scheme: Some(
        Scheme::hmac_sha256(
            "x-slack-signature",
            &[Text("v0:"), Seconds("x-slack-request-timestamp"), Text(":"), Body],
        )
        .prefix("v0="),
    ),
    signed_id: Some(true),
    sample: r#"{"type":"event_callback","event_id":"{id}","event":{"type":"app_mention"}}"#,
    ..DEFAULTS
};

/// The content type is not signed, so a "form" whose body is a JSON object counts as an event.
fn is_no_slack_event(request: &RequestRef<'_>) -> bool {
    if request.is_of(FORM) {
        return !without_mark(request.body()).trim_ascii_start().starts_with(b"{");
    }
    let text = "app_rate_limited";
    contains(request, text) && value(request, "/type").as_deref() == Some(text)
}

/// Discord: `/id` of an interaction; for a webhook event, which has no id, the digest of the body.
/// The body has the time of the event.
///
/// A `PING` (`/type` is 0, or 1 of an interaction) is a handshake.
/// [`DISCORD.echo(None)`](Preset::echo) answers it: 204 with a content type, and `{"type":1}` to an
/// interaction. Discord reads every answer to an interaction, and sends it once. It sends forged
/// requests on purpose, and removes an endpoint that does not answer them 401.
///
/// [Signature](https://discord.com/developers/docs/events/webhook-events): Ed25519 over time and
/// body, which has the id. The form of the time is not documented, so it is not checked. The secret
/// is the application's public key. It needs the feature `verify-ed25519`.
pub const DISCORD: Preset = Preset {
    name: "discord",
    rule: || Rule::part(key::json("/id").or(key::body_digest())),
    event_type: Some(|| key::json("/event/type")),
    challenges: &[
        Challenge {
            marks: &[(Field::Body("/event"), None), (Field::Body("/type"), Some("0"))],
            ..POSTED
        },
        Challenge {
            marks: &[(Field::Body("/event"), None), (Field::Body("/type"), Some("1"))],
            answer: Answer::Pong(StatusCode::OK, r#"{"type":1}"#),
            ..POSTED
        },
    ],
    floor: 20 * MINUTE, // twice the 10 min of the schedule
    scheme: Some(Scheme::ed25519("x-signature-ed25519", &[Header("x-signature-timestamp"), Body])),
    signed_id: Some(true),
    sample_headers: &[("x-signature-timestamp", "1700000000")],
    sample: r#"{"id":"{id}","type":2}"#,
    ..DEFAULTS
};

/// Telegram: `/update_id` in the body.
///
/// The id is unique **per bot only**: give every bot its own route and namespace. After a week
/// without updates Telegram continues from a random number, so an old id may come again. Set a
/// retention of days, not months: `.retention(Duration::from_secs(3 * 86_400))`. The default of 30
/// days is too long here.
///
/// [Verification](https://core.telegram.org/bots/api#setwebhook) is by the shared token. Nothing is
/// signed, so whoever reads a delivery can forge others.
pub const TELEGRAM: Preset = Preset {
    name: "telegram",
    rule: || Rule::part(key::json("/update_id")),
    floor: 48 * HOUR, // twice the 24 h for which updates are stored
    scheme: Some(Scheme::token("x-telegram-bot-api-secret-token").with_secret(Secret::Token)),
    sample: r#"{"update_id":{number},"message":{"text":"sample"}}"#,
    signed_id: Some(false),
    ..DEFAULTS
};

/// Twitch EventSub: the header `Twitch-Eventsub-Message-Id`, which is signed.
///
/// The headers with the type of the message and of the event are not signed. A verification or a
/// revocation is a handshake only if the signed body has neither an `/event` nor a list of
/// `/events`. [`TWITCH.echo(None)`](Preset::echo) answers a verification. The type of an event is
/// read from the body.
///
/// [Signature](https://dev.twitch.tv/docs/eventsub/handling-webhook-events/): HMAC-SHA256 over id,
/// time and body. Twitch recommends a tolerance of 10 min.
pub const TWITCH: Preset = Preset {
    name: "twitch",
    rule: || Rule::part(key::header("twitch-eventsub-message-id")),
    event_type: Some(|| key::json("/subscription/type")),
    challenges: &[Challenge {
        marks: &[
            (Field::Header("twitch-eventsub-message-type"), Some("webhook_callback_verification")),
            (Field::Body("/event"), None),
            (Field::Body("/events"), None),
        ],
        answer: Answer::Text(Field::Body("/challenge")),
        ..POSTED
    }],
    bypass: Some(is_revocation),
    floor: 7 * DAY, // our estimate: no schedule is documented
    scheme: Some(
        Scheme::hmac_sha256(
            "twitch-eventsub-message-signature",
            &[
                Header("twitch-eventsub-message-id"),
                Rfc3339("twitch-eventsub-message-timestamp"),
                Body,
            ],
        )
        .prefix("sha256="),
    ),
    signed_id: Some(true),
    sample_headers: &[
        ("twitch-eventsub-message-type", "notification"),
        ("twitch-eventsub-message-id", "{id}"),
    ],
    sample: r#"{"event":{}}"#,
    ..DEFAULTS
};

fn is_revocation(request: &RequestRef<'_>) -> bool {
    header_is(request, "twitch-eventsub-message-type", "revocation")
        && ["/event", "/events"].into_iter().all(|pointer| lacks(request, pointer))
}

/// LINE's Messaging API: `/webhookEventId` of each event; the digest of an event without one.
///
/// A redelivered event has the same id, and `/deliveryContext/isRedelivery` is `true`: this value
/// is not a part of the key. LINE delivers again only if *webhook redelivery* is on in its console,
/// and does not say how often. Turn it on: otherwise an event that is answered 503 is lost.
///
/// To check the URL, LINE sends a list without events. The layer answers it.
///
/// [Signature](https://developers.line.biz/en/docs/messaging-api/receiving-messages/): HMAC-SHA256
/// over the body, which has the ids. No time is signed. The secret is the channel secret.
pub const LINE: Preset = Preset {
    name: "line",
    rule: || {
        let key = key::json("/webhookEventId").or(key::body_digest());
        Rule::Each(key::each("/events", key).without_payload())
    },
    event_type: Some(|| key::json("/type")),
    handshake: Some(has_no_events),
    floor: 7 * DAY, // our estimate: no schedule is documented
    retries: Retries::Undocumented,
    scheme: Some(Scheme::hmac_sha256("x-line-signature", &[Body]).base64()),
    signed_id: Some(true),
    sample: r#"{"destination":"sample","events":[{"type":"message","webhookEventId":"{id}","deliveryContext":{"isRedelivery":false}}]}"#,
    ..DEFAULTS
};

/// Zoom: the digest of the body. No event has an id; the body has the time of the event in
/// milliseconds.
///
/// The check of the URL (`endpoint.url_validation`), which arrives every 72 hours, is a handshake:
/// the response has its token, and the token's code by the secret.
/// [`ZOOM.echo(Some(secret))`](Preset::echo) answers it, but only inside the
/// [`VerifyLayer`](crate::verify::VerifyLayer): an attacker who could choose the token would get a
/// code that verifies another request.
///
/// [Signature](https://github.com/zoom/webhook-sample): HMAC-SHA256 over version, time and body.
/// The secret is the secret token of the app.
pub const ZOOM: Preset = Preset {
    name: "zoom",
    event_type: Some(|| key::json("/event")),
    challenges: &[Challenge {
        marks: &[(Field::Body("/event"), Some("endpoint.url_validation"))],
        answer: Answer::Code(Field::Body("/payload/plainToken")),
        ..POSTED
    }],
    floor: 170 * MINUTE, // twice the 85 min of the schedule
    scheme: Some(
        Scheme::hmac_sha256(
            "x-zm-signature",
            &[Text("v0:"), Seconds("x-zm-request-timestamp"), Text(":"), Body],
        )
        .prefix("v0="),
    ),
    signed_id: Some(true),
    sample: r#"{"event":"meeting.started","event_ts":1626230691572,"payload":{"object":{"uuid":"{id}"}}}"#,
    ..DEFAULTS
};
