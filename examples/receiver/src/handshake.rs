//! Handshakes: the responses that a sender expects before it delivers events.

use axum::Json;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

/// Returns the response to a handshake, or `None` for any other request.
///
/// - Slack's `url_verification` and Twitch's `webhook_callback_verification` expect the challenge as
///   text;
/// - Event Grid's `SubscriptionValidation` expects its code as JSON;
/// - Discord's `PING` expects 204, or its type as JSON if it is of interactions.
///
/// All other senders accept a 200.
pub(crate) fn response(headers: &HeaderMap, body: &[u8]) -> Option<Response> {
    if has_header(headers, "aeg-event-type", "SubscriptionValidation") {
        let events: Value = serde_json::from_slice(body).ok()?;
        let code = events.pointer("/0/data/validationCode")?.as_str()?;
        return Some(Json(json!({ "validationResponse": code })).into_response());
    }
    if headers.contains_key("x-signature-ed25519") {
        let ping: Value = serde_json::from_slice(body).ok()?;
        let json = [(header::CONTENT_TYPE, "application/json")];
        return match ping["type"].as_u64()? {
            0 => Some((StatusCode::NO_CONTENT, json).into_response()),
            1 if ping["event"].is_null() => Some(Json(json!({ "type": 1 })).into_response()),
            _ => None,
        };
    }
    let twitch =
        has_header(headers, "twitch-eventsub-message-type", "webhook_callback_verification");
    let Challenge { challenge, kind } = serde_json::from_slice(body).ok()?;
    (twitch || kind.as_deref() == Some("url_verification")).then(|| challenge.into_response())
}

#[derive(Deserialize)]
struct Challenge {
    challenge: String,
    #[serde(rename = "type")]
    kind: Option<String>,
}

fn has_header(headers: &HeaderMap, name: &str, value: &str) -> bool {
    headers.get(name).is_some_and(|header| header == value)
}
