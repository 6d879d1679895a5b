//! What a sender wants to hear before it delivers events.

use axum::Json;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

/// The answer to a request that sets an endpoint up; `None` for every other request.
///
/// - Slack's `url_verification` and Twitch's `webhook_callback_verification` want the challenge
///   back, as text;
/// - Event Grid's `SubscriptionValidation` wants its code back, as JSON.
///
/// All others are content with a 200.
pub(crate) fn answer(headers: &HeaderMap, body: &[u8]) -> Option<Response> {
    if says(headers, "aeg-event-type", "SubscriptionValidation") {
        let events: Value = serde_json::from_slice(body).ok()?;
        let code = events.pointer("/0/data/validationCode")?.as_str()?;
        return Some(Json(json!({ "validationResponse": code })).into_response());
    }
    let twitch = says(headers, "twitch-eventsub-message-type", "webhook_callback_verification");
    let Challenge { challenge, kind } = serde_json::from_slice(body).ok()?;
    (twitch || kind.as_deref() == Some("url_verification")).then(|| challenge.into_response())
}

#[derive(Deserialize)]
struct Challenge {
    challenge: String,
    #[serde(rename = "type")]
    kind: Option<String>,
}

fn says(headers: &HeaderMap, name: &str, value: &str) -> bool {
    headers.get(name).is_some_and(|header| header == value)
}
