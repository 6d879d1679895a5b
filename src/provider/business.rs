//! E-mail services and business tools.

use super::preset::{DAY, DEFAULTS, HOUR, MIB, Preset, Retries};
use super::read::{joined, lacks, value};
use super::scheme::Part::{Body, Fixed, ItemMillis, Method, Millis, Rfc3339, Seconds, Text, Url};
use super::scheme::{Proof, Scheme};
use crate::key::{self, Rule};

/// SendGrid's Event Webhook: `/sg_event_id` of each event; the digest of an event without one.
///
/// A retry may group events differently, so a key of the whole request would miss duplicates.
///
/// SendGrid's documentation says that the id is for deduplication. A public report, [issue 1435 of
/// `sendgrid/sendgrid-nodejs`][report], says that duplicates came with another id and with the same
/// address, event, time and message. The report has no confirmation and no denial. If a handler
/// must not run for such a duplicate, add these values as an alias. Then two clicks on one
/// link within one second are one event.
///
/// [report]: https://github.com/sendgrid/sendgrid-nodejs/issues/1435
///
/// ```
/// use tower_dedup::{key, provider};
///
/// let values = key::json("/sg_message_id")
///     .and(key::json("/event"))
///     .and(key::json("/timestamp"))
///     .and(key::json("/email").optional())
///     .and(key::json("/url").optional());
/// let extractor = provider::SENDGRID.extractor().alias("values", values);
/// # assert!(extractor.checked().is_ok());
/// ```
///
/// [Signature][signature]: ECDSA over time and body, which has the ids. The secret is the public
/// key that SendGrid shows. It needs the feature `verify-ecdsa`.
///
/// [signature]: https://www.twilio.com/docs/sendgrid/for-developers/tracking-events/getting-started-event-webhook-security-features
pub const SENDGRID: Preset = Preset {
    name: "sendgrid",
    rule: || Rule::Each(key::each("", key::json("/sg_event_id").or(key::body_digest()))),
    event_type: Some(|| key::json("/event")),
    floor: 48 * HOUR, // twice the 24 h of the schedule
    scheme: Some(Scheme {
        text: &[Seconds("x-twilio-email-event-webhook-timestamp"), Body],
        ..Scheme::new("x-twilio-email-event-webhook-signature", Proof::P256)
            .base64()
            .base64_secret()
    }),
    signed_id: Some(true),
    sample: r#"[{"sg_event_id":"{id}","sg_message_id":"sample","event":"delivered"}]"#,
    ..DEFAULTS
};

/// Postmark: the record's type and `/ID`; without `/ID`, the values that differ between the records
/// of one message, or of one recipient.
///
/// People open and click one message many times, and its recipient may unsubscribe and resubscribe.
/// With `/MessageID` alone, all but the first record would be duplicates. An inbound message has no
/// type; its key is `/MessageID`. A change of a subscription that belongs to no message
/// (`/MessageID` is null) has server, stream, recipient, time, origin, reason and the new state.
/// Any other record is known by the header `X-PM-Webhook-Trace-Id`.
///
/// Postmark sends this header when it can, and it is the same on every retry. It does not precede
/// the fields, because keys that are stored would run again. Postmark signs nothing. An inbound
/// message carries its attachments, up to 35 MB, in base64; a route for the other records can have
/// a smaller [`body_limit`](crate::DedupLayer::body_limit). After a 4xx other than 408 and 429,
/// Postmark does not send an event of an outbound message again.
pub const POSTMARK: Preset = Preset {
    name: "postmark",
    rule: || {
        let by_id = joined(key::json, "/RecordType|/ID");
        let by_message = "/RecordType?|/MessageID|/Recipient or /Email?\
            |/DeliveredAt or /BouncedAt or /ReceivedAt or /ChangedAt?|/OriginalLink?|/SuppressSending?";
        let by_recipient = "/RecordType|/ServerID?|/MessageStream?|/Recipient|/ChangedAt|/Origin?\
            |/SuppressionReason?|/SuppressSending?";
        let [by_message, by_recipient] = [by_message, by_recipient].map(|it| joined(key::json, it));
        let by_trace = key::header("x-pm-webhook-trace-id");
        Rule::part(by_id.or(by_message).or(by_recipient).or(by_trace))
    },
    event_type: Some(|| key::json("/RecordType")),
    floor: 7 * DAY, // our estimate: a person can send an inbound message again at any time
    max_body: Some(64 * MIB), // 35 MB of attachments in base64, two texts and the headers
    sample: r#"{"RecordType":"Bounce","ID":{number}}"#,
    signed_id: Some(false),
    ..DEFAULTS
};

/// HubSpot: for each event, all of its values that identify it, without `/attemptNumber`.
///
/// `/eventId` is "not guaranteed to be unique". `/attemptNumber` changes on every retry, and with
/// it the bytes of the event.
///
/// [Signature](https://developers.hubspot.com/docs/api/webhooks/validating-requests), version 3:
/// HMAC-SHA256 over method, public URL, body, which has the ids, and time.
pub const HUBSPOT: Preset = Preset {
    name: "hubspot",
    rule: || {
        let key =
            "/portalId|/appId|/subscriptionId|/eventId|/objectId?|/occurredAt?|/propertyName?";
        Rule::Each(key::each("", joined(key::json, key)).without_payload())
    },
    event_type: Some(|| key::json("/subscriptionType")),
    floor: 6 * DAY, // twice the 3 days of the schedule
    scheme: Some(Scheme {
        decodes_query: true,
        ..Scheme::hmac_sha256(
            "x-hubspot-signature-v3",
            &[Method, Url, Body, Millis("x-hubspot-request-timestamp")],
        )
        .base64()
    }),
    signed_id: Some(true),
    sample: r#"[{"portalId":1,"appId":1,"subscriptionId":1,"eventId":{number},"objectId":1,"occurredAt":1700000000000,"subscriptionType":"contact.creation","attemptNumber":0}]"#,
    ..DEFAULTS
};

/// Box (webhooks V2): `/id` in the body.
///
/// The header `BOX-DELIVERY-ID` is no key, because it changes on a retry.
///
/// [Signature](https://developer.box.com/guides/webhooks/v2/signatures-v2/): HMAC-SHA256 over body,
/// which has the id, and time. Box recommends a tolerance of 10 min. If two keys are configured at
/// Box, one of them is enough.
pub const BOX: Preset = Preset {
    name: "box",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/trigger")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    scheme: Some(Scheme {
        other_header: "box-signature-secondary",
        ..Scheme::hmac_sha256(
            "box-signature-primary",
            &[
                Fixed("box-signature-version", "1"),
                Fixed("box-signature-algorithm", "HmacSHA256"),
                Body,
                Rfc3339("box-delivery-timestamp"),
            ],
        )
        .base64()
    }),
    signed_id: Some(true),
    sample: r#"{"id":"{id}","type":"webhook_event","trigger":"FILE.UPLOADED"}"#,
    ..DEFAULTS
};

/// Notion: `/id` in the body.
///
/// `/attempt_number` changes on a retry, and with it the bytes of the body: do not
/// [compare](crate::DedupLayer::compare_payload) the whole body.
///
/// The first request to a new webhook has only `/verification_token`, which a person enters in
/// Notion. It is a handshake: let the handler show the token. The token is also the secret, so this
/// request comes before a [`VerifyLayer`](crate::verify::VerifyLayer) can have it: receive it on a
/// route without one.
///
/// [Signature](https://developers.notion.com/reference/webhooks): HMAC-SHA256 over the body, which
/// has the id. No time is signed.
pub const NOTION: Preset = Preset {
    name: "notion",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/type")),
    bypass: Some(|request| {
        value(request, "/verification_token").is_some() && lacks(request, "/id")
    }),
    floor: 48 * HOUR, // twice the 24 h of the schedule
    scheme: Some(Scheme::hmac_sha256("x-notion-signature", &[Body]).prefix("sha256=")),
    signed_id: Some(true),
    sample: r#"{"id":"{id}","type":"page.content_updated","attempt_number":1}"#,
    ..DEFAULTS
};

/// Intercom: `/id` in the body (`notif_…`).
///
/// `/delivery_attempts` may change on a retry, and with it the bytes of the body: do not
/// [compare](crate::DedupLayer::compare_payload) the whole body. The layer answers the `ping` that
/// a new webhook gets.
///
/// [Signature](https://developers.intercom.com/docs/webhooks): HMAC-SHA1 over the body, which has
/// the id. No time is signed. The secret is the client secret of the app.
pub const INTERCOM: Preset = Preset {
    name: "intercom",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/topic")),
    handshake: Some(|request| value(request, "/topic").as_deref() == Some("ping")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    retries: Retries::Undocumented,
    scheme: Some(Scheme::hmac_sha1("x-hub-signature", &[Body]).prefix("sha1=")),
    signed_id: Some(true),
    sample: r#"{"type":"notification_event","id":"{id}","topic":"conversation.user.created"}"#,
    ..DEFAULTS
};

/// WorkOS: `/id` in the body.
///
/// [Signature](https://workos.com/docs/events/data-syncing/webhooks): HMAC-SHA256 over the time, in
/// milliseconds, and the body, which has the id. The libraries of WorkOS use a tolerance of 3 min.
pub const WORKOS: Preset = Preset {
    name: "workos",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/event")),
    floor: 7 * DAY, // our estimate: no schedule was found
    scheme: Some(
        Scheme::hmac_sha256("workos-signature", &[ItemMillis("t="), Text("."), Body])
            .separated_by(&[',', ' '])
            .prefix("v1="),
    ),
    signed_id: Some(true),
    sample: r#"{"id":"{id}","event":"dsync.user.created"}"#,
    ..DEFAULTS
};
