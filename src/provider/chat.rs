//! Messaging, calls and streams.

use http::Method;

use super::preset::{DAY, DEFAULTS, HOUR, MINUTE, Preset, Retries};
use super::read::{header_is, lacks, value};
use super::scheme::Part::{Body, Id, Rfc3339, Seconds, Text};
use super::scheme::{self, Scheme, Secret, hex};
use crate::key::{self, FORM, KeyPart, RequestRef, Rule};

/// Slack's Events API: `/event_id` in the body, which is unique across all workspaces.
///
/// `url_verification` and `app_rate_limited` have no id; they are handshakes. The forms of slash
/// commands and interactivity have no event id either, so they are handshakes too. If such a handler
/// must run once, use the key `key::form("trigger_id")`.
///
/// [Signature](https://docs.slack.dev/authentication/verifying-requests-from-slack): HMAC-SHA256 over version, time and
/// body, which has the id.
pub const SLACK: Preset = Preset {
    name: "slack",
    rule: || Rule::part(key::json("/event_id")),
    event_type: Some(|| key::json("/event/type")),
    bypass: Some(is_no_slack_event),
    floor: 12 * MINUTE, // twice the 6 min of the schedule
    scheme: Some(Scheme::signed(
        "x-slack-signature",
        hex("v0="),
        &[Text("v0:"), Seconds("x-slack-request-timestamp"), Text(":"), Body],
    )),
    signed_id: true,
    ..DEFAULTS
};

/// The content type is not signed, so a "form" whose body is a JSON object counts as an event.
fn is_no_slack_event(request: &RequestRef<'_>) -> bool {
    if request.is_of(FORM) {
        return !request.body().trim_ascii_start().starts_with(b"{");
    }
    let kind = value(request, "/type");
    matches!(kind.as_deref(), Some("url_verification" | "app_rate_limited"))
}

/// Twilio: the account, the message or call, and its status. The values are form fields or, for
/// webhooks that are configured as GET, query parameters.
///
/// One message reports several statuses under one `MessageSid`. With the id alone, `delivered` would
/// be a duplicate of `sent`. The key is
///
/// - `AccountSid|MessageSid|MessageStatus` (or `SmsStatus`), or
/// - `AccountSid|CallSid|CallStatus|SequenceNumber|RecordingSid|RecordingStatus`.
///
/// Every part but `MessageSid` and `CallSid` is empty if the request does not have it.
///
/// This key is for *callbacks*. The turns of a conversation (the `action` of a `<Gather>` or
/// `<Record>`) need the body of the response. They repeat one `CallSid` with one status when a menu
/// asks again. Leave such routes out, or use [`TWILIO_BY_TOKEN`] with
/// [`replay`](crate::DedupLayer::replay). The webhooks of Conversations report several events
/// (`EventType`) under one `MessageSid`, so they need a key of their own.
///
/// [Signature](https://www.twilio.com/docs/usage/security#validating-requests): HMAC-SHA1 over the public URL and the form
/// fields, without separators. If the body is no form, the URL has its digest.
///
/// - `MessageStatus=sent&SmsSid=SM1` and `MessageStatus=sentSmsSidSM1` have one signature, and the second is another
///   key. A field that the key may lack can be hidden in its neighbour, too. Let the handler refuse unknown statuses,
///   values that are no SID, and requests without a field that Twilio always sends, such as `AccountSid`.
/// - The content type is not signed. A form with another content type is refused, because its fields are not read.
/// - The time is not signed, and neither is the method: the text of a GET is also that of a POST with the end of the
///   query in its form. So the verifier takes the method from `AccountSid=AC…` (`AC` and 32 hexadecimal digits). A GET
///   needs it in its query, and no body. Any other request is refused with it in its URL or fields: put no `AccountSid`
///   into the URL of a webhook that Twilio sends by POST. A request without a form is refused with `AccountSidAC…` in
///   its URL. A message whose text has the other spelling is refused, too.
pub const TWILIO: Preset = Preset {
    name: "twilio",
    rule: || Rule::part(twilio_fields()),
    bypass: Some(|request| is_probe(request, twilio_fields)),
    methods: &[Method::POST, Method::GET],
    floor: DAY, // our estimate: no schedule is documented
    retries: Retries::ConnectionFailure,
    scheme: Some(Scheme::new("x-twilio-signature", scheme::Rule::Twilio)),
    signed_id: true,
    ..DEFAULTS
};

/// Twilio, by the header `I-Twilio-Idempotency-Token`, which all retries of one request share; without
/// the header, by the fields of [`TWILIO`].
///
/// This key is for the turns of a conversation, which repeat one `CallSid` with one status. The
/// signature does not cover the header, and a [content identity](crate::KeyExtractor::content_identity)
/// does not help: the signature covers the fields in any order. We did not find the official
/// definition of the header.
pub const TWILIO_BY_TOKEN: Preset = Preset {
    name: "twilio-by-token",
    rule: || Rule::part(twilio_by_token()),
    bypass: Some(|request| is_probe(request, twilio_by_token)),
    signed_id: false,
    ..TWILIO
};

fn twilio_fields() -> KeyPart {
    twilio(key::form).or(twilio(key::query))
}

fn twilio_by_token() -> KeyPart {
    key::header("i-twilio-idempotency-token").or(twilio_fields())
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

/// Routers run the handler of GET for a HEAD; a HEAD without a key is a probe of the URL.
fn is_probe(request: &RequestRef<'_>, key: fn() -> KeyPart) -> bool {
    request.method() == Method::HEAD && matches!(key().read(request), Ok(None))
}

/// Telegram: `/update_id` in the body.
///
/// The id is unique **per bot only**: give every bot its own route and namespace. After a week without
/// updates Telegram continues from a random number, so an old id may come again. Set a retention of
/// days, not months: `.retention(Duration::from_secs(3 * 86_400))`. The default of 30 days is too
/// long here.
///
/// [Verification](https://core.telegram.org/bots/api#setwebhook) is by the shared token. Nothing is signed, so who reads
/// one delivery can forge others.
pub const TELEGRAM: Preset = Preset {
    name: "telegram",
    rule: || Rule::part(key::json("/update_id")),
    floor: 48 * HOUR, // twice the 24 h for which updates are stored
    scheme: Some(
        Scheme::new("x-telegram-bot-api-secret-token", scheme::Rule::Token)
            .with_secret(Secret::Token),
    ),
    ..DEFAULTS
};

/// Twitch EventSub: the header `Twitch-Eventsub-Message-Id`, which is signed.
///
/// The header that marks a verification or a revocation is not signed. Such a request is a handshake
/// only if the signed body has neither an `/event` nor a list of `/events`.
///
/// [Signature](https://dev.twitch.tv/docs/eventsub/handling-webhook-events/): HMAC-SHA256 over id, time and body. Twitch
/// recommends a tolerance of 10 min.
pub const TWITCH: Preset = Preset {
    name: "twitch",
    rule: || Rule::part(key::header("twitch-eventsub-message-id")),
    event_type: Some(|| key::header("twitch-eventsub-subscription-type")),
    bypass: Some(is_no_twitch_event),
    floor: 7 * DAY, // our estimate: no schedule is documented
    scheme: Some(Scheme::signed(
        "twitch-eventsub-message-signature",
        hex("sha256="),
        &[Id("twitch-eventsub-message-id"), Rfc3339("twitch-eventsub-message-timestamp"), Body],
    )),
    signed_id: true,
    ..DEFAULTS
};

fn is_no_twitch_event(request: &RequestRef<'_>) -> bool {
    let is = |kind| header_is(request, "twitch-eventsub-message-type", kind);
    let has_no_event = ["/event", "/events"].into_iter().all(|pointer| lacks(request, pointer));
    (is("webhook_callback_verification") || is("revocation")) && has_no_event
}
