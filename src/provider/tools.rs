//! Business tools.

use super::preset::{DAY, DEFAULTS, Preset, Rule};
use super::scheme::Part::{Body, Fixed, Rfc3339};
use super::scheme::{Own, Scheme, base64};
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
    event_type: Some(|| key::json("/subscriptionType")),
    floor: 6 * DAY, // twice the 3 days of the schedule
    scheme: Some(Scheme::own("x-hubspot-signature-v3", Own::HubSpot)),
    signed_id: true,
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
    rule: Rule::Part(|| key::json("/id")),
    event_type: Some(|| key::json("/trigger")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    scheme: Some(Scheme::signed(
        "box-signature-primary",
        base64("").or_in("box-signature-secondary"),
        &[
            Fixed("box-signature-version", "1"),
            Fixed("box-signature-algorithm", "HmacSHA256"),
            Body,
            Rfc3339("box-delivery-timestamp"),
        ],
    )),
    signed_id: true,
    ..DEFAULTS
};
