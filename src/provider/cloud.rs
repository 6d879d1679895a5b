//! Queues and event buses of cloud providers.

use super::preset::{
    DAY, DEFAULTS, EventType, Floor, HOUR, Handshake, LargestBody, MIB, Preset, Rule,
};
use super::read::{cloud_events_or, header_is, value};
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{self, KeyPart, Reader, RequestRef};

/// Amazon SNS: topic and message, from the signed body.
///
/// 1. The confirmation that a subscription begins or ends has an id too. It is a handshake by the
///    body's `/Type`, because the header is not signed.
/// 2. A raw delivery has no envelope and no signature, so its key is read from headers. If the body is
///    a signed envelope, the key is read from the body, whatever the headers say.
/// 3. The content type is `text/plain` and is ignored.
pub const AWS_SNS: Preset = Preset {
    name: "aws-sns",
    title: "Amazon SNS",
    key: "`/TopicArn|/MessageId`; of raw deliveries headers \
          `x-amz-sns-topic-arn|x-amz-sns-message-id`",
    rule: Rule::Part(|| key::from_fn(sns)),
    handshake: Some(Handshake {
        words: "`/Type` is `SubscriptionConfirmation` or `UnsubscribeConfirmation`",
        is: is_sns_confirmation,
        needs_only_2xx: false,
    }),
    floor: Floor(2 * HOUR, "twice the 1 h that a delivery policy may take"),
    how: "three times, 20 s apart; by a delivery policy for up to 1 h",
    signed_id: true,
    source: "https://docs.aws.amazon.com/sns/latest/dg/sns-message-and-json-formats.html",
    unverified: "whether an answer of 4xx is retried",
    ..DEFAULTS
};

fn sns(request: &RequestRef<'_>) -> Result<Option<String>, KeyError> {
    let part: KeyPart = if is_raw(request) {
        key::header("x-amz-sns-topic-arn").and(key::header("x-amz-sns-message-id"))
    } else {
        key::json("/TopicArn").and(key::json("/MessageId"))
    };
    Ok(part.read(request)?.map(std::borrow::Cow::into_owned))
}

fn is_sns_confirmation(request: &RequestRef<'_>) -> bool {
    let kind = value(request, "/Type");
    matches!(kind.as_deref(), Some("SubscriptionConfirmation" | "UnsubscribeConfirmation"))
        && !is_raw(request)
}

/// Returns `true` if the body is the publisher's own: it is not JSON, or JSON without a field of a
/// signed envelope. The header alone does not decide, because an attacker can add it to an envelope
/// to choose another id. The attacker can also break the envelope in an unsigned place.
fn is_raw(request: &RequestRef<'_>) -> bool {
    let lacks = |pointer| match key::json(pointer).read(request) {
        Ok(found) => found.is_none(),
        Err(error) => error.kind() == KeyErrorKind::InvalidJson,
    };
    header_is(request, "x-amz-sns-rawdelivery", "true")
        && ["/TopicArn", "/MessageId", "/Signature"].into_iter().any(lacks)
}

/// Google Cloud Pub/Sub, push: subscription and message.
///
/// `/deliveryAttempt` changes from one attempt to the next. A publisher that retries makes a new
/// message; to recognise it, put your own id into the message's attributes. The token of a push signs
/// no part of the body.
pub const GOOGLE_PUBSUB: Preset = Preset {
    name: "google-pubsub",
    title: "Google Pub/Sub",
    key: "`/subscription|/message/messageId`",
    rule: Rule::Part(|| key::json("/subscription").and(key::json("/message/messageId"))),
    floor: Floor(14 * DAY, "twice the 7 days for which messages are kept"),
    body: Some(LargestBody(
        14 * MIB,
        "a message has [up to 10 MB](https://cloud.google.com/pubsub/quotas) of data, in base64",
    )),
    how: "until it is acknowledged or the message's retention ends",
    source: "https://cloud.google.com/pubsub/docs/push",
    unverified: "the 7 days (the default retention); unwrapped messages",
    ..DEFAULTS
};

/// Azure Event Grid: topic and id of each event; in the CloudEvents schema, source and id.
///
/// The validation of a subscription is a handshake, because the response carries the code. In the
/// CloudEvents schema the validation is an OPTIONS, which the layer does not deduplicate. Event Grid
/// does not retry after 400, 401, 403 or 413. So it loses events without an id, unless
/// [`on_missing_key`](crate::DedupLayer::on_missing_key) is set. It signs nothing.
pub const AZURE_EVENT_GRID: Preset = Preset {
    name: "azure-event-grid",
    title: "Azure Event Grid",
    key: "each: `topic|id`; in the CloudEvents schema `source|id`",
    rule: Rule::Reader(event_grid),
    event_type: EventType("`/eventType` of the event; in the CloudEvents schema `/type`", None),
    handshake: Some(Handshake {
        words: "header `aeg-event-type: SubscriptionValidation` with `/0/data/validationCode` in the \
                body",
        is: |request| {
            header_is(request, "aeg-event-type", "SubscriptionValidation")
                && value(request, "/0/data/validationCode").is_some()
        },
        needs_only_2xx: false,
    }),
    floor: Floor(48 * HOUR, "twice the 24 h of the schedule"),
    how: "for 24 h, but never after a 400, 401, 403 or 413",
    source: "https://learn.microsoft.com/azure/event-grid/delivery-and-retry",
    unverified: "the 24 h (third parties); that the id is the same on retries",
    ..DEFAULTS
};

fn event_grid() -> Reader {
    let events = key::each("", key::json("/topic").and(key::json("/id")))
        .event_type(key::json("/eventType"));
    cloud_events_or(move |request| events.read(request))
}
