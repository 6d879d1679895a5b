//! Payments and shops.

use super::preset::{DAY, DEFAULTS, HOUR, Preset};
use super::read::joined;
use super::scheme::Part::{Body, Item, Text, Url};
use super::scheme::{Proof, Scheme};
use crate::key::{self, Rule};

/// Stripe: the event's `id` (`evt_…`) in the body, of snapshot and of thin events. For events of
/// connected accounts, the account precedes the id.
///
/// Stripe retries live events for three days; a person can send an event again for thirty days with
/// the command line tool. Stripe may report one change by two events with different ids. A
/// [`alias`](crate::KeyExtractor::alias) of `/data/object/id` and `/type`
/// recognises them; its documentation states the cost. Every subscribed endpoint receives one event
/// with one id: [two endpoints](crate::guide::keys#several-endpoints-of-one-sender) need two namespaces.
///
/// [Signature](https://docs.stripe.com/webhooks): HMAC-SHA256 over time and body, which has the id. The key is the whole
/// secret, including `whsec_`.
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
/// Without a webhook id, the key is shop, topic and event id. A delivery without a shop, such as a compliance topic,
/// has its webhook id.
///
/// The event id alone is no key: all deliveries of one action of a merchant share it, also two of one topic, such as
/// `inventory_levels/update` of two items. Two subscriptions to one topic send one change twice, under two webhook ids.
/// To handle it once, unsubscribe one, or see [two subscriptions](crate::guide::keys#two-subscriptions-to-one-topic).
///
/// [Signature](https://shopify.dev/docs/apps/build/webhooks): HMAC-SHA256 over the body. Neither the
/// id nor a time is signed.
///
/// **Before you add a [content identity](crate::KeyExtractor::content_identity)**, give each topic its
/// own route and namespace. The topic is not in the body, and `orders/create` and `orders/paid` of one
/// order may have the same bytes. In one namespace the second of them would be a duplicate.
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
/// [Signature](https://developer.squareup.com/docs/webhooks/step3validate): HMAC-SHA256 over the public URL and the body,
/// which has the id. No time is signed.
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
/// `/notification_id` is no key: each destination has its own, and a replay gets a new one.
///
/// [Signature](https://developer.paddle.com/webhooks/signature-verification): HMAC-SHA256 over time and body, which has
/// the id. Paddle's libraries use a tolerance of 5 s.
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

/// Adyen (standard notifications in JSON): for each item, the merchant account, the PSP reference, the
/// event code and the success flag.
///
/// **A later notification with the same four values and newer data is a duplicate** and does not run,
/// because Adyen has no event id. If newer data (`/eventDate`, `/additionalData`) matter, let the
/// handler query the state, or compose your own key with [`each`](key::each).
///
/// Older accounts expect the body `[accepted]` in every response. SOAP is not supported.
///
/// [Signature](https://docs.adyen.com/development-resources/webhooks/verify-hmac-signatures/): HMAC-SHA256 over eight
/// values of each item: `pspReference`, `originalReference`, `merchantAccountCode`, `merchantReference`, value and
/// currency of the amount, `eventCode` and `success`. Nothing else is signed: not the time, `paymentMethod` or
/// `additionalData`. The secret is hexadecimal.
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
