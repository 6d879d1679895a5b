//! Business tools.

use super::preset::{DAY, DEFAULTS, EventType, Floor, Preset, Rule};
use super::scheme::{Own, Part, Scheme, base64};
use crate::key;

/// HubSpot: for each event, all of its values that identify it, without `/attemptNumber`.
///
/// `/eventId` is "not guaranteed to be unique". `/attemptNumber` changes on every retry, and with it the
/// bytes of the event.
///
/// [Signature](https://developers.hubspot.com/docs/api/webhooks/validating-requests), version 3: HMAC-SHA256 over method,
/// public URL, body, which has the ids, and time.
pub const HUBSPOT: Preset = Preset {
    name: "hubspot",
    title: "HubSpot",
    key: "each: `portalId|appId|subscriptionId|eventId|objectId?|occurredAt?|propertyName?`",
    rule: Rule::Each(|| {
        let key = key::json("/portalId")
            .and(key::json("/appId"))
            .and(key::json("/subscriptionId"))
            .and(key::json("/eventId"))
            .and(key::json("/objectId").optional())
            .and(key::json("/occurredAt").optional())
            .and(key::json("/propertyName").optional());
        key::each("", key).without_payload()
    }),
    event_type: EventType(
        "`/subscriptionType` of the event",
        Some(|| key::json("/subscriptionType")),
    ),
    floor: Floor(6 * DAY, "twice the 3 days of the schedule"),
    how: "up to ten times over 24 h, or over 3 days",
    scheme: Some(Scheme::own("x-hubspot-signature-v3", "method, URL, body, time", Own::HubSpot)),
    signed_id: true,
    source: "https://developers.hubspot.com/docs/api/webhooks",
    unverified: "the schedule and that ids may repeat (third parties)",
    ..DEFAULTS
};

/// Box (webhooks V2): `/id` in the body.
///
/// The header `BOX-DELIVERY-ID` is no key, because it changes on a retry.
///
/// [Signature](https://developer.box.com/guides/webhooks/v2/signatures-v2/): HMAC-SHA256 over body, which has the id, and
/// time. Box recommends a tolerance of 10 min. If two keys are configured at Box, one of them is enough.
pub const BOX: Preset = Preset {
    name: "box",
    title: "Box",
    key: "`/id`",
    rule: Rule::Part(|| key::json("/id")),
    event_type: EventType("`/trigger`", Some(|| key::json("/trigger"))),
    floor: Floor(7 * DAY, "our estimate: no schedule is documented"),
    how: "the number is not documented",
    scheme: Some(Scheme::signed(
        "box-signature-primary",
        base64("").or_in("box-signature-secondary"),
        "body, time",
        &[
            Part::Fixed("box-signature-version", "1"),
            Part::Fixed("box-signature-algorithm", "HmacSHA256"),
            Part::Body,
            Part::Rfc3339("box-delivery-timestamp"),
        ],
    )),
    signed_id: true,
    source: "https://developer.box.com/guides/webhooks/v2/",
    unverified: "the schedule; the id when a person sends it again",
    ..DEFAULTS
};
