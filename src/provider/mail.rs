//! E-mail services.

use super::preset::{DAY, DEFAULTS, HOUR, Preset, Rule};
use super::scheme::Part::{Body, Seconds};
use super::scheme::{Scheme, Secret, base64};
use crate::key;

/// SendGrid's Event Webhook: `/sg_event_id` of each event; the digest of an event without one.
///
/// A retry may group events differently, so a key of the whole request would miss duplicates.
///
/// SendGrid's documentation says that the id is for deduplication. A public report, [issue 1435 of
/// `sendgrid/sendgrid-nodejs`][report], says that duplicates came with another id and with the same
/// address, event, time and message. The report has no confirmation and no denial. If a handler
/// must not run for such a duplicate, add these values as a second identity. Then two clicks on one
/// link within one second are one event.
///
/// [report]: https://github.com/sendgrid/sendgrid-nodejs/issues/1435
///
/// ```
/// use http::Request;
/// use tower_dedup::key::{self, Extracted, RequestRef};
/// use tower_dedup::provider;
///
/// let values = key::json("/sg_message_id")
///     .and(key::json("/event"))
///     .and(key::json("/timestamp"))
///     .and(key::json("/email").optional())
///     .and(key::json("/url").optional());
/// let extractor = provider::SENDGRID.extractor().second_identity("values", values);
///
/// let identities = |id: &str| {
///     let body = format!(
///         r#"[{{"sg_event_id":"{id}","sg_message_id":"m1","event":"delivered","timestamp":17}}]"#
///     );
///     let (head, body) = Request::post("/").body(body.into()).unwrap().into_parts();
///     let Ok(Extracted::Keys(keys)) = extractor.extract(&RequestRef::new(&head, &body)) else {
///         panic!("keys");
///     };
///     let event = &keys.events()[0];
///     (event.key().clone(), event.second_identity().unwrap().clone())
/// };
/// let (first, again) = (identities("a"), identities("b"));
/// assert_ne!(first.0, again.0);
/// assert_eq!(first.1, again.1);
/// assert_eq!(first.1.id(), "m1|delivered|17||");
/// ```
///
/// [Signature][signature]: ECDSA over time and body, which has the ids. The secret is the public key that SendGrid shows.
/// It needs the feature `verify-ecdsa`.
///
/// [signature]: https://www.twilio.com/docs/sendgrid/for-developers/tracking-events/getting-started-event-webhook-security-features
pub const SENDGRID: Preset = Preset {
    name: "sendgrid",
    rule: Rule::Each(|| key::each("", key::json("/sg_event_id").or(key::body_digest()))),
    event_type: Some(|| key::json("/event")),
    floor: 48 * HOUR, // twice the 24 h of the schedule
    scheme: Some(
        Scheme::signed(
            "x-twilio-email-event-webhook-signature",
            base64(""),
            &[Seconds("x-twilio-email-event-webhook-timestamp"), Body],
        )
        .with_secret(Secret::PublicKey),
    ),
    signed_id: true,
    ..DEFAULTS
};

/// Postmark: the record's type and `/ID`; without `/ID`, the values that differ between the records of
/// one message.
///
/// People open and click one message many times, and its recipient may unsubscribe and resubscribe.
/// With `/MessageID` alone, all but the first record would be duplicates. An inbound message has no
/// type; its key is `/MessageID`. Postmark signs nothing.
pub const POSTMARK: Preset = Preset {
    name: "postmark",
    rule: Rule::Part(|| {
        let by_id = key::json("/RecordType").and(key::json("/ID"));
        let time = key::json("/DeliveredAt")
            .or(key::json("/BouncedAt"))
            .or(key::json("/ReceivedAt"))
            .or(key::json("/ChangedAt"));
        let by_message = key::json("/RecordType")
            .optional()
            .and(key::json("/MessageID"))
            .and(key::json("/Recipient").or(key::json("/Email")).optional())
            .and(time.optional())
            .and(key::json("/OriginalLink").optional())
            .and(key::json("/SuppressSending").optional());
        by_id.or(by_message)
    }),
    event_type: Some(|| key::json("/RecordType")),
    floor: 7 * DAY, // our estimate: only the 10.5 h of inbound messages are documented
    ..DEFAULTS
};
