//! A request of a preset's sender.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, header};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::provider::Preset;

/// Returns a request from which the preset's extractor reads a key with this id.
///
/// 1. The id of the key is `id`. If the preset composes its key, `id` is the part of the key that
///    differs between two events; the other parts are the same in every request of this function.
/// 2. The body has the fields that the key needs, and few more. For a preset whose key is a header,
///    another body changes nothing: `request(…).map(|_| Full::from(payload))`.
/// 3. The request has no signature. Sign it after the last change to its body: `sign` does, with the
///    feature `verify`.
/// 4. For HubSpot, Postmark and Telegram, whose ids are numbers, an `id` of digits becomes a number.
///
/// Panics if the path is no path of a URL, or if the preset reads its id from a header and `id` is no
/// value of a header.
///
/// ```
/// use tower_dedup::key::{Extracted, RequestRef};
/// use tower_dedup::{provider, testing};
///
/// let (head, body) = testing::request(provider::STRIPE, "/stripe", "evt_1").into_parts();
/// # let body = tokio::runtime::Runtime::new().unwrap().block_on(async {
/// #     http_body_util::BodyExt::collect(body).await.unwrap().to_bytes()
/// # });
/// let extractor = provider::STRIPE.extractor();
/// let Ok(Extracted::Keys(keys)) = extractor.extract(&RequestRef::new(&head, &body)) else {
///     panic!("no key");
/// };
/// assert_eq!(keys.first().id(), "evt_1");
/// ```
#[must_use]
pub fn request(preset: Preset, path: &str, id: &str) -> Request<Full<Bytes>> {
    let Sample { headers, content_type, body } = sample(preset.name(), id);
    let mut request = Request::new(Full::from(body));
    *request.method_mut() = preset.methods()[0].clone();
    *request.uri_mut() = match path.parse() {
        Ok(uri) => uri,
        Err(error) => panic!("`{path}` is no path: {error}"),
    };
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    for (name, value) in headers {
        let Ok(value) = HeaderValue::from_str(value) else {
            panic!("`{value}` is no value of the header {name}");
        };
        request.headers_mut().insert(HeaderName::from_static(name), value);
    }
    request
}

struct Sample<'i> {
    headers: Vec<(&'static str, &'i str)>,
    content_type: &'static str,
    body: String,
}

const JSON: &str = "application/json";

fn sample<'i>(preset: &str, id: &'i str) -> Sample<'i> {
    let by_header = |headers: &[(&'static str, &'i str)]| Sample {
        headers: headers.to_vec(),
        content_type: JSON,
        body: "{}".to_owned(),
    };
    let by_json =
        |body: Value| Sample { headers: Vec::new(), content_type: JSON, body: body.to_string() };
    match preset {
        "standard-webhooks" => by_header(&[("webhook-id", id)]),
        "svix" => by_header(&[("svix-id", id)]),
        "cloudevents" => Sample {
            content_type: "application/cloudevents+json",
            ..by_json(json!({
                "specversion": "1.0", "type": "com.example.sample", "source": "/sample", "id": id,
            }))
        },
        "github" => by_header(&[("x-github-event", "push"), ("x-github-delivery", id)]),
        "gitlab" => by_header(&[("x-gitlab-event", "Push Hook"), ("idempotency-key", id)]),
        "gitea" => by_header(&[("x-gitea-event", "push"), ("x-gitea-delivery", id)]),
        "circleci" => by_json(json!({ "id": id, "type": "workflow-completed" })),
        "stripe" => by_json(json!({
            "id": id, "object": "event", "type": "payment_intent.succeeded",
            "data": { "object": { "id": "pi_sample", "object": "payment_intent" } },
        })),
        "shopify" => by_header(&[
            ("x-shopify-shop-domain", "sample.myshopify.com"),
            ("x-shopify-topic", "orders/create"),
            ("x-shopify-event-id", id),
        ]),
        "square" => by_json(json!({ "event_id": id, "type": "payment.created" })),
        "paddle" => by_json(json!({ "event_id": id, "event_type": "transaction.completed" })),
        "adyen" => by_json(json!({ "live": "false", "notificationItems": [{
            "NotificationRequestItem": {
                "merchantAccountCode": "SampleAccount", "pspReference": id,
                "eventCode": "AUTHORISATION", "success": "true",
            },
        }] })),
        "slack" => by_json(json!({
            "type": "event_callback", "event_id": id, "event": { "type": "app_mention" },
        })),
        "twilio" => twilio(id),
        "whatsapp" => by_json(json!({ "object": "whatsapp_business_account", "entry": [{
            "id": "sample", "changes": [{ "field": "messages", "value": {
                "messaging_product": "whatsapp", "metadata": { "phone_number_id": "sample" },
                "messages": [{ "id": id, "type": "text", "text": { "body": "sample" } }],
            } }],
        }] })),
        "telegram" => by_json(json!({ "update_id": number(id), "message": { "text": "sample" } })),
        "twitch" => Sample {
            body: json!({ "event": {} }).to_string(),
            ..by_header(&[
                ("twitch-eventsub-message-type", "notification"),
                ("twitch-eventsub-message-id", id),
            ])
        },
        "sendgrid" => by_json(json!([{
            "sg_event_id": id, "sg_message_id": "sample", "event": "delivered",
        }])),
        "postmark" => by_json(json!({ "RecordType": "Bounce", "ID": number(id) })),
        "aws-sns" => Sample {
            content_type: "text/plain; charset=UTF-8",
            ..by_json(json!({
                "Type": "Notification", "MessageId": id, "Message": "sample",
                "TopicArn": "arn:aws:sns:us-east-1:123456789012:sample",
            }))
        },
        "google-pubsub" => by_json(json!({
            "subscription": "projects/sample/subscriptions/sample",
            "message": { "messageId": id, "data": "c2FtcGxl" },
        })),
        "azure-event-grid" => by_json(json!([{
            "topic": "/subscriptions/sample", "id": id, "eventType": "Sample.Created", "data": {},
        }])),
        "hubspot" => by_json(json!([{
            "portalId": 1, "appId": 1, "subscriptionId": 1, "eventId": number(id), "objectId": 1,
            "occurredAt": 1_700_000_000_000_u64, "subscriptionType": "contact.creation",
            "attemptNumber": 0,
        }])),
        "box" => by_json(json!({ "id": id, "type": "webhook_event", "trigger": "FILE.UPLOADED" })),
        other => panic!("the preset `{other}` has no sample"),
    }
}

fn twilio(message: &str) -> Sample<'_> {
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("AccountSid", "AC_sample");
    form.append_pair("MessageSid", message).append_pair("MessageStatus", "delivered");
    Sample {
        headers: Vec::new(),
        content_type: "application/x-www-form-urlencoded",
        body: form.finish(),
    }
}

/// Returns a number if its digits are those of `id`.
fn number(id: &str) -> Value {
    match id.parse::<u64>() {
        Ok(number) if number.to_string() == id => number.into(),
        _ => id.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use http_body_util::BodyExt;

    use super::*;
    use crate::key::{Extracted, RequestRef};
    use crate::provider;

    async fn key(preset: Preset, id: &str) -> String {
        let (head, body) = request(preset, "/hook", id).into_parts();
        assert_eq!(head.uri, "/hook");
        assert!(preset.methods().contains(&head.method), "{}", preset.name());
        let body = body.collect().await.unwrap().to_bytes();
        match preset.extractor().extract(&RequestRef::new(&head, &body)) {
            Ok(Extracted::Keys(keys)) => {
                assert_eq!(keys.events().len(), 1, "{}", preset.name());
                keys.first().id().to_owned()
            }
            other => panic!("{}: {other:?}", preset.name()),
        }
    }

    #[tokio::test]
    async fn request_of_every_preset_has_a_key_with_its_id() {
        // What the key has before and after the id.
        let composed = [
            ("cloudevents", "/sample|", ""),
            ("shopify", "sample.myshopify.com|orders/create|", ""),
            ("adyen", "SampleAccount|", "|AUTHORISATION|true"),
            ("twilio", "AC_sample|", "|delivered"),
            ("whatsapp", "sample|", ""),
            ("postmark", "Bounce|", ""),
            ("aws-sns", "arn:aws:sns:us-east-1:123456789012:sample|", ""),
            ("google-pubsub", "projects/sample/subscriptions/sample|", ""),
            ("azure-event-grid", "/subscriptions/sample|", ""),
            ("hubspot", "1|1|1|", "|1|1700000000000|"),
        ];
        let names: BTreeSet<_> = provider::ALL.iter().map(Preset::name).collect();
        assert!(composed.iter().all(|(name, ..)| names.contains(name)));
        for preset in provider::ALL {
            let around = composed.iter().find(|(name, ..)| *name == preset.name());
            let (before, after) = around.map_or(("", ""), |(_, before, after)| (before, after));
            for id in ["evt_1", "4711", "007", "a b&c\u{7d}\u{22}"] {
                let expected = format!("{before}{id}{after}");
                assert_eq!(key(*preset, id).await, expected, "{}", preset.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "is no value of the header x-github-delivery")]
    fn request_names_the_header_that_cannot_hold_the_id() {
        let _ = request(provider::GITHUB, "/", "a\nb");
    }
}
