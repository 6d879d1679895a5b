//! Payments and shops.

use super::preset::{DAY, DEFAULTS, HOUR, Preset, Retries};
use super::read::{has_no_events, joined};
use super::scheme::Part::{Body, Item, Text, Url};
use super::scheme::{Proof, Scheme};
use crate::key::{self, Rule};

/// Stripe: the event's `id` (`evt_…`) in the body, of snapshot and of thin events. For events of
/// connected accounts, the account precedes the id.
///
/// Stripe retries live events for three days; a person can send an event again for thirty days with
/// the command line tool. Stripe may report one change by two events with different ids. A
/// [`alias`](crate::KeyExtractor::alias) of `/data/object/id` and `/type`
/// recognises them; its documentation states the cost. Every subscribed endpoint receives an event
/// under the same id: [two endpoints](crate::guide::keys#several-endpoints-of-one-sender) need two
/// namespaces.
///
/// [Signature](https://docs.stripe.com/webhooks): HMAC-SHA256 over time and body, which has the id.
/// The key is the whole secret, including `whsec_`.
pub const STRIPE: Preset = Preset {
    name: "stripe",
    rule: || Rule::part(key::json("/account").and(key::json("/id")).or(key::json("/id"))),
    event_type: Some(|| key::json("/type")),
    floor: 30 * DAY, // redelivery by a person
    scheme: Some(
        Scheme::hmac_sha256("stripe-signature", &[Item("t="), Text("."), Body])
            .separated_by(&[','])
            .prefix("v1="),
    ),
    signed_id: Some(true),
    sample: r#"{"id":"{id}","object":"event","type":"payment_intent.succeeded","data":{"object":{"id":"pi_sample","object":"payment_intent"}}}"#,
    ..DEFAULTS
};

/// Shopify: shop and webhook id (the id of a delivery), from headers.
///
/// Without a webhook id, the key is shop, topic and event id. A delivery without a shop, such as a
/// compliance topic, has its webhook id.
///
/// The event id alone is not a key: all deliveries of one action of a merchant share it, even two
/// of one topic, such as `inventory_levels/update` of two items. Two subscriptions to one topic
/// send a change twice, under two webhook ids. To handle the change once, remove one subscription,
/// or see [two subscriptions](crate::guide::keys#two-subscriptions-to-one-topic).
///
/// [Signature](https://shopify.dev/docs/apps/build/webhooks): HMAC-SHA256 over the body. Neither
/// the id nor a time is signed.
///
/// **Before you add a [content identity](crate::KeyExtractor::content_identity)**, give each topic
/// its own route and namespace. The topic is not in the body, and `orders/create` and `orders/paid`
/// of one order may have the same bytes. In one namespace the second of them would be a duplicate.
pub const SHOPIFY: Preset = Preset {
    name: "shopify",
    rule: || {
        let delivery = "x-shopify-shop-domain|x-shopify-webhook-id";
        let event = "x-shopify-shop-domain|x-shopify-topic|x-shopify-event-id";
        let [delivery, event] = [delivery, event].map(|parts| joined(key::header, parts));
        Rule::part(delivery.or(event).or(key::header("x-shopify-webhook-id")))
    },
    event_type: Some(|| key::header("x-shopify-topic")),
    floor: 8 * HOUR, // twice the 4 h of the schedule
    scheme: Some(Scheme::hmac_sha256("x-shopify-hmac-sha256", &[Body]).base64()),
    sample_headers: &[
        ("x-shopify-shop-domain", "sample.myshopify.com"),
        ("x-shopify-topic", "orders/create"),
        ("x-shopify-webhook-id", "{id}"),
    ],
    signed_id: Some(false),
    ..DEFAULTS
};

/// Square: `/event_id` in the body, which its documentation recommends for this purpose.
///
/// [Signature](https://developer.squareup.com/docs/webhooks/step3validate): HMAC-SHA256 over the
/// public URL and the body, which has the id. No time is signed.
pub const SQUARE: Preset = Preset {
    name: "square",
    rule: || Rule::part(key::json("/event_id")),
    event_type: Some(|| key::json("/type")),
    floor: 48 * HOUR, // twice the 24 h of the schedule
    scheme: Some(Scheme::hmac_sha256("x-square-hmacsha256-signature", &[Url, Body]).base64()),
    signed_id: Some(true),
    sample: r#"{"event_id":"{id}","type":"payment.created"}"#,
    ..DEFAULTS
};

/// Paddle Billing: `/event_id` in the body, which its documentation recommends for this purpose.
///
/// Do not use `/notification_id` as the key: each destination has its own, and a replay gets a new
/// one.
///
/// [Signature](https://developer.paddle.com/webhooks/signature-verification): HMAC-SHA256 over time
/// and body, which has the id. Paddle's libraries use a tolerance of 5 s.
pub const PADDLE: Preset = Preset {
    name: "paddle",
    rule: || Rule::part(key::json("/event_id")),
    event_type: Some(|| key::json("/event_type")),
    floor: 6 * DAY, // twice the 3 days of the schedule
    scheme: Some(
        Scheme::hmac_sha256("paddle-signature", &[Item("ts="), Text(":"), Body])
            .separated_by(&[';'])
            .prefix("h1="),
    ),
    signed_id: Some(true),
    sample: r#"{"event_id":"{id}","event_type":"transaction.completed"}"#,
    ..DEFAULTS
};

/// Adyen (standard notifications in JSON): for each item, the merchant account, the PSP reference,
/// the event code and the success flag.
///
/// **A later notification with the same four values and newer data is a duplicate** and does not
/// run, because Adyen has no event id. If newer data (`/eventDate`, `/additionalData`) matter, let
/// the handler query the state, or compose your own key with [`each`](key::each).
///
/// Older accounts expect the body `[accepted]` in every response. SOAP is not supported.
///
/// [Signature](https://docs.adyen.com/development-resources/webhooks/verify-hmac-signatures/):
/// HMAC-SHA256 over eight values of each item: `pspReference`, `originalReference`,
/// `merchantAccountCode`, `merchantReference`, value and currency of the amount, `eventCode` and
/// `success`. Nothing else is signed: not the time, `paymentMethod` or `additionalData`. The secret
/// is hexadecimal.
pub const ADYEN: Preset = Preset {
    name: "adyen",
    rule: || {
        let field = |name: &str| key::json(&format!("/NotificationRequestItem/{name}"));
        let key = joined(field, "merchantAccountCode?|pspReference|eventCode|success");
        Rule::Each(key::each("/notificationItems", key))
    },
    event_type: Some(|| key::json("/NotificationRequestItem/eventCode")),
    floor: 60 * DAY, // twice the 30 days of the schedule
    scheme: Some(Scheme::new("", Proof::Adyen).hex_secret()),
    signed_id: Some(true),
    sample: r#"{"live":"false","notificationItems":[{"NotificationRequestItem":{"merchantAccountCode":"SampleAccount","pspReference":"{id}","eventCode":"AUTHORISATION","success":"true"}}]}"#,
    ..DEFAULTS
};

/// QuickBooks Online: `/source` and `/id` of each event; the digest of an event without them.
///
/// The body is a list of CloudEvents. In the form of before 2026 (`/eventNotifications`), entities
/// have no id, and the body is malformed. QuickBooks expects 200 within 3 s, and may hold later
/// events back until it has one.
///
/// [Signature](https://developer.intuit.com/app/developer/qbo/docs/develop/webhooks): HMAC-SHA256
/// over the body, which has the ids. No time is signed. The secret is the verifier token.
pub const QUICKBOOKS: Preset = Preset {
    name: "quickbooks",
    rule: || {
        let key = joined(key::json, "/source|/id").or(key::body_digest());
        Rule::Each(key::each("", key))
    },
    event_type: Some(|| key::json("/type")),
    floor: 7 * DAY, // our estimate: the schedule has no documented end
    scheme: Some(Scheme::hmac_sha256("intuit-signature", &[Body]).base64()),
    signed_id: Some(true),
    sample: r#"[{"specversion":"1.0","id":"{id}","source":"intuit.sample","type":"qbo.customer.created.v1","intuitentityid":"1","intuitaccountid":"1"}]"#,
    ..DEFAULTS
};

/// Xero: for each event, tenant, category, resource, type and time; the digest of an event without
/// one of them.
///
/// Events have no id. `/eventDateUtc` is the time of the event, not of the delivery.
///
/// To check the URL (*intent to receive*), Xero sends lists without events, some of them with a
/// wrong signature. The layers answer them as it expects: the verifying layer 401, and the
/// deduplicating layer 200, without a body. Xero also expects 200 without body and cookies, within
/// 5 s, for each delivery. A duplicate gets this answer; let your handler return `StatusCode::OK`.
///
/// [Signature](https://developer.xero.com/documentation/webhooks/configuring-your-server):
/// HMAC-SHA256 over the body, which has the values of the key. The secret is the webhook key, whose
/// text is the key.
pub const XERO: Preset = Preset {
    name: "xero",
    rule: || {
        let event = "/tenantId|/eventCategory|/resourceId|/eventType|/eventDateUtc";
        Rule::Each(key::each("/events", joined(key::json, event).or(key::body_digest())))
    },
    event_type: Some(|| key::json("/eventCategory")),
    handshake: Some(has_no_events),
    floor: 48 * HOUR, // twice the 24 h of the schedule
    scheme: Some(Scheme::hmac_sha256("x-xero-signature", &[Body]).base64()),
    signed_id: Some(true),
    sample: r#"{"events":[{"tenantId":"sample","eventCategory":"INVOICE","resourceId":"{id}","eventType":"UPDATE","eventDateUtc":"2026-01-02T03:04:05.678"}]}"#,
    ..DEFAULTS
};

/// Razorpay: the header `X-Razorpay-Event-Id`, which its documentation recommends for this purpose.
///
/// The id is not signed: a [content identity](crate::KeyExtractor::content_identity) recognises a
/// body that somebody sends again under another id. Each body has the time of its event
/// (`/created_at`), so few real events have equal bytes. A person can send events again that are up
/// to [7 days old](https://razorpay.com/docs/webhooks/replay-events). After a change of the secret,
/// keep the old one by [`or_secret`](crate::verify::Verifier::or_secret): retries of older events
/// are signed with it.
///
/// [Signature](https://razorpay.com/docs/webhooks/validate-test): HMAC-SHA256 over the body.
/// Neither the id nor a time is signed.
pub const RAZORPAY: Preset = Preset {
    name: "razorpay",
    rule: || Rule::part(key::header("x-razorpay-event-id")),
    event_type: Some(|| key::json("/event")),
    floor: 7 * DAY, // redelivery by a person
    scheme: Some(Scheme::hmac_sha256("x-razorpay-signature", &[Body])),
    sample_headers: &[("x-razorpay-event-id", "{id}")],
    sample: r#"{"entity":"event","event":"payment.captured"}"#,
    signed_id: Some(false),
    ..DEFAULTS
};

/// Mollie's [next-gen webhooks](https://docs.mollie.com/reference/webhooks-new): `/id` of the event
/// in the body.
///
/// Do not use `/entityId`, which many events share. Classic webhooks, a form with the id of the
/// payment, have no key here: see [the guide](crate::guide::keys#traps).
///
/// [Signature](https://docs.mollie.com/reference/webhooks-new): HMAC-SHA256 over the body, which
/// has the id. No time is signed.
pub const MOLLIE: Preset = Preset {
    name: "mollie",
    rule: || Rule::part(key::json("/id")),
    event_type: Some(|| key::json("/type")),
    floor: 7 * DAY, // our estimate: no schedule is documented
    retries: Retries::Undocumented,
    scheme: Some(Scheme::hmac_sha256("x-mollie-signature", &[Body]).prefix("sha256=")),
    signed_id: Some(true),
    sample: r#"{"resource":"event","id":"{id}","type":"payment-link.paid","entityId":"pl_sample"}"#,
    ..DEFAULTS
};

/// GoCardless: `/id` of each event; the digest of an event without one.
///
/// `/meta/webhook_id` identifies the delivery. For a wrong signature, its documentation asks for
/// the status 498; 401 is a failed delivery, too.
///
/// [Signature](https://developer.gocardless.com/getting-started/partners/staying-up-to-date-with-webhooks/):
/// HMAC-SHA256 over the body, which has the ids. No time is signed.
pub const GOCARDLESS: Preset = Preset {
    name: "gocardless",
    rule: || Rule::Each(key::each("/events", key::json("/id").or(key::body_digest()))),
    event_type: Some(|| joined(key::json, "/resource_type|/action")),
    floor: 7 * DAY, // our estimate: the times of the retries are not documented, and a person can retry
    scheme: Some(Scheme::hmac_sha256("webhook-signature", &[Body])),
    signed_id: Some(true),
    sample: r#"{"events":[{"id":"{id}","resource_type":"payments","action":"confirmed"}],"meta":{"webhook_id":"sample"}}"#,
    ..DEFAULTS
};
