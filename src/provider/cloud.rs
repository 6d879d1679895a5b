//! Queues and event buses of cloud providers.

use std::sync::LazyLock;

use super::challenge::{Answer, Challenge, Field, POSTED, WEB_HOOK};
use super::preset::{DAY, DEFAULTS, HOUR, MIB, Preset};
use super::read::{cloud_events_or, header_is, joined, lacks, value};
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{self, EachKey, Events, Extracted, KeyPart, RequestRef, Rule};

/// Amazon SNS: topic and message, from the signed body.
///
/// 1. The confirmation that a subscription begins or ends has an id, too. It is a handshake by the
///    body's `/Type`, because the header is not signed.
/// 2. A raw delivery has no envelope and no signature, so its key is read from headers. If the body
///    is a signed envelope, the key is read from the body, whatever the headers say.
/// 3. The content type is `text/plain` and is ignored.
pub const AWS_SNS: Preset = Preset {
    name: "aws-sns",
    rule: || Rule::part(key::from_fn(sns)),
    bypass: Some(is_sns_confirmation),
    floor: 2 * HOUR, // twice the 1 h that a delivery policy may take
    signed_id: Some(true),
    sample_headers: &[("content-type", "text/plain; charset=UTF-8")],
    sample: r#"{"Type":"Notification","MessageId":"{id}","Message":"sample","TopicArn":"arn:aws:sns:us-east-1:123456789012:sample"}"#,
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

/// Google Cloud Pub/Sub, push: subscription and message, from the body; of an unwrapped push, from
/// headers.
///
/// An [unwrapped] push needs the option *write metadata*: without it, the request has no id. If the
/// body is a wrapped message, the key is read from the body, whatever the headers say.
///
/// `/deliveryAttempt` changes from one attempt to the next. A publisher that retries makes a new
/// message; to recognise it, put your own id into the message's attributes. The token of a push
/// signs no part of the body.
///
/// [unwrapped]: https://docs.cloud.google.com/pubsub/docs/payload-unwrapping
pub const GOOGLE_PUBSUB: Preset = Preset {
    name: "google-pubsub",
    rule: || Rule::part(key::from_fn(unwrapped).or(WRAPPED.clone())),
    floor: 14 * DAY, // twice the 7 days for which messages are kept
    max_body: Some(14 * MIB),
    sample: r#"{"subscription":"projects/sample/subscriptions/sample","message":{"messageId":"{id}","data":"c2FtcGxl"}}"#,
    signed_id: Some(false),
    ..DEFAULTS
};

static WRAPPED: LazyLock<KeyPart> =
    LazyLock::new(|| joined(key::json, "/subscription|/message/messageId"));

/// Reads the key of a push without an envelope, whose body is the publisher's own.
fn unwrapped(request: &RequestRef<'_>) -> Result<Option<String>, KeyError> {
    static HEADERS: LazyLock<KeyPart> = LazyLock::new(|| {
        joined(key::header, "x-goog-pubsub-subscription-name|x-goog-pubsub-message-id")
    });
    if !request.headers().contains_key("x-goog-pubsub-message-id") {
        return Ok(None);
    }
    match WRAPPED.read(request) {
        Ok(Some(_)) => return Ok(None),
        Err(error) if error.kind() != KeyErrorKind::InvalidJson && !error.kind().is_no_id() => {
            return Err(error);
        }
        _ => {}
    }
    Ok(HEADERS.read(request)?.map(std::borrow::Cow::into_owned))
}

/// Azure Event Grid: topic and id of each event; in the CloudEvents schema, source and id.
///
/// The validation of a subscription is a handshake, because the response carries the code. In the
/// CloudEvents schema the validation is an OPTIONS. [`AZURE_EVENT_GRID.echo(None)`](Preset::echo)
/// answers both. Event Grid does not retry after 400, 401, 403 or 413. So it loses events without
/// an id, unless [`on_missing_key`](crate::DedupLayer::on_missing_key) is set. It signs nothing.
pub const AZURE_EVENT_GRID: Preset = Preset {
    name: "azure-event-grid",
    rule: || Rule::Reader(event_grid),
    challenges: &[
        Challenge {
            marks: &[(Field::Header("aeg-event-type"), Some("SubscriptionValidation"))],
            answer: Answer::Member("validationResponse", Field::Body("/0/data/validationCode")),
            ..POSTED
        },
        WEB_HOOK,
    ],
    floor: 48 * HOUR, // twice the 24 h of the schedule
    sample: r#"[{"topic":"/subscriptions/sample","id":"{id}","eventType":"Sample.Created","data":{}}]"#,
    signed_id: Some(false),
    ..DEFAULTS
};

fn event_grid(events: Events<'_>) -> Result<Extracted, KeyError> {
    static EACH: LazyLock<EachKey> = LazyLock::new(|| {
        key::each("", key::json("/topic").and(key::json("/id"))).event_type(key::json("/eventType"))
    });
    cloud_events_or(events, |events| EACH.read(events))
}

/// Microsoft Graph: for each notification, subscription, resource, change and the ETag of the
/// resource; without an ETag, subscription and `/id`.
///
/// `/id` is optional, and drives and lifecycle notifications have no ETag. **A list with a
/// notification that has neither is not deduplicated**, and all of it reaches the handler each
/// time: two changes of a drive may have the same bytes. Let such a handler read the changes from
/// its last delta link.
///
/// Before a subscription begins, Graph sends a POST with `?validationToken=…` and without a body.
/// It is a handshake, because the response has to be this token, decoded, as `text/plain`.
/// [`MICROSOFT_GRAPH.echo(None)`](Preset::echo) answers it.
///
/// Graph signs nothing. Each notification has the `/clientState` of its subscription, which the
/// handler, or a layer outside, has to compare.
pub const MICROSOFT_GRAPH: Preset = Preset {
    name: "microsoft-graph",
    rule: || Rule::Reader(graph),
    challenges: &[Challenge { answer: Answer::Text(Field::Query("validationToken")), ..POSTED }],
    floor: 8 * HOUR, // twice the 4 h of the schedule
    sample: r#"{"value":[{"subscriptionId":"sample","changeType":"created","resource":"users/sample/messages/sample","resourceData":{"@odata.etag":"{id}"}}]}"#,
    signed_id: Some(false),
    ..DEFAULTS
};

fn graph(events: Events<'_>) -> Result<Extracted, KeyError> {
    static EACH: LazyLock<EachKey> = LazyLock::new(|| {
        let change = "/subscriptionId|/resource|/changeType|/resourceData/@odata.etag";
        let key = joined(key::json, change).or(joined(key::json, "/subscriptionId|/id"));
        key::each("/value", key).event_type(joined(key::json, "/changeType or /lifecycleEvent"))
    });
    let request = events.request;
    Ok(match EACH.read(events)? {
        // A notification has no identity.
        Extracted::Missing if !lacks(&request, "/value") => Extracted::Bypass,
        found => found,
    })
}
