//! Messages, calls and streams.

use http::Method;

use super::preset::{DAY, DEFAULTS, Floor, HOUR, Handshake, MINUTE, Preset, Retries, Rule};
use super::read::{header_is, lacks, media_type, value};
use crate::key::{self, KeyPart, RequestRef};

/// Slack's Events API: `/event_id` in the body, which is unique across all workspaces.
///
/// `url_verification` and `app_rate_limited` have no id and are handshakes. So are the forms of
/// slash commands and interactivity, which have no id of an event either: where such a handler must
/// run once, key it on `key::form("trigger_id")`.
pub const SLACK: Preset = Preset {
    name: "slack",
    title: "Slack",
    key: "`/event_id`",
    rule: Rule::Part(|| key::json("/event_id")),
    handshake: Some(Handshake {
        words: "`/type` is `url_verification` or `app_rate_limited`; forms (slash commands, \
                interactivity)",
        is: is_no_slack_event,
    }),
    floor: Floor(12 * MINUTE, "twice the 6 min of the schedule"),
    how: "three times: at once, after 1 min and after 5 min",
    signed_id: true,
    source: "https://docs.slack.dev/apis/events-api/",
    unverified: "the schedule (third parties)",
    ..DEFAULTS
};

/// The content type is not signed: what it calls a form must not be the JSON of an event.
fn is_no_slack_event(request: &RequestRef<'_>) -> bool {
    if media_type(request) == "application/x-www-form-urlencoded" {
        return !request.body().trim_ascii_start().starts_with(b"{");
    }
    let kind = value(request, "/type");
    matches!(kind.as_deref(), Some("url_verification" | "app_rate_limited"))
}

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
/// when a menu asks again: leave such routes out, or take [`TWILIO_BY_TOKEN`] with
/// [`replay`](crate::DedupLayer::replay).
///
/// The fields are signed without anything between them, so that an overheard delivery can be cut
/// into other fields, and another key: see [verification](crate::guide::verification#who-signs-what).
///
/// No retry window is documented for messaging and voice; the floor of a day is a margin of ours.
pub const TWILIO: Preset = Preset {
    name: "twilio",
    title: "Twilio",
    key: "form or query `AccountSid?|MessageSid|MessageStatus or SmsStatus?`, else \
          `AccountSid?|CallSid|CallStatus?|SequenceNumber?|RecordingSid?|RecordingStatus?`",
    rule: Rule::Part(twilio_fields),
    handshake: Some(Handshake { words: "a HEAD without a key", is: is_head_without_fields }),
    methods: &[Method::POST, Method::GET],
    floor: Floor(DAY, "a margin of ours: no schedule is documented"),
    retries: Retries::ConnectionFailure,
    how: "once; more often where the webhook's URL says so (`#rc=`)",
    signed_id: true,
    answer_matters: true,
    source: "https://www.twilio.com/docs/usage/webhooks",
    unverified: "the one retry (third parties)",
    ..DEFAULTS
};

/// Twilio by the header that it sends with all retries of one request, `I-Twilio-Idempotency-Token`,
/// else by the fields of [`TWILIO`].
///
/// For the turns of a conversation, which repeat one `CallSid` in one status. The signature does
/// not cover the header, and its official definition was not found.
pub const TWILIO_BY_TOKEN: Preset = Preset {
    name: "twilio-by-token",
    title: "Twilio, by token",
    key: "header `I-Twilio-Idempotency-Token`, else as `twilio`",
    rule: Rule::Part(twilio_by_token),
    handshake: Some(Handshake { words: "a HEAD without a key", is: is_head_without_token }),
    signed_id: false,
    unverified: "what the token means (third parties); the one retry (third parties)",
    ..TWILIO
};

fn twilio_fields() -> KeyPart {
    twilio(key::form).or(twilio(key::query))
}

fn twilio_by_token() -> KeyPart {
    key::header("i-twilio-idempotency-token").or(twilio(key::form)).or(twilio(key::query))
}

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

/// Routers answer HEAD by the handler of GET: a probe of the URL is no event.
fn is_head_without_fields(request: &RequestRef<'_>) -> bool {
    request.method() == Method::HEAD && matches!(twilio_fields().read(request), Ok(None))
}

fn is_head_without_token(request: &RequestRef<'_>) -> bool {
    request.method() == Method::HEAD && matches!(twilio_by_token().read(request), Ok(None))
}

/// Telegram: `/update_id` in the body.
///
/// It is unique **per bot only**: give every bot a route and a namespace of its own. After a quiet
/// week Telegram goes on from a random number, so an old one may come again: keep the retention to
/// days, not months: `.retention(Duration::from_secs(3 * 86_400))`. The default of 30 days is too long
/// here.
pub const TELEGRAM: Preset = Preset {
    name: "telegram",
    title: "Telegram",
    key: "`/update_id`",
    rule: Rule::Part(|| key::json("/update_id")),
    floor: Floor(48 * HOUR, "twice the 24 h for which updates are stored"),
    how: "\"a reasonable amount of attempts\"",
    answer_matters: true,
    source: "https://core.telegram.org/bots/api#setwebhook",
    unverified: "the 24 h (third parties)",
    ..DEFAULTS
};

/// Twitch EventSub: the header `Twitch-Eventsub-Message-Id`, which is signed.
///
/// The header that tells a verification and a revocation from an event is not signed; they are
/// handshakes only if the signed body has no `/event`.
pub const TWITCH: Preset = Preset {
    name: "twitch",
    title: "Twitch EventSub",
    key: "header `Twitch-Eventsub-Message-Id`",
    rule: Rule::Part(|| key::header("twitch-eventsub-message-id")),
    handshake: Some(Handshake {
        words: "`Twitch-Eventsub-Message-Type` is `webhook_callback_verification` or \
                `revocation`, and the body has no `/event`",
        is: is_no_twitch_event,
    }),
    floor: Floor(7 * DAY, "a margin of ours: no schedule is documented"),
    how: "when it is not sure that the message arrived",
    signed_id: true,
    source: "https://dev.twitch.tv/docs/eventsub/handling-webhook-events/",
    unverified: "the schedule",
    ..DEFAULTS
};

fn is_no_twitch_event(request: &RequestRef<'_>) -> bool {
    let is = |kind| header_is(request, "twitch-eventsub-message-type", kind);
    (is("webhook_callback_verification") || is("revocation")) && lacks(request, "/event")
}
