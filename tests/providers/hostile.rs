//! The reasons of malformed bodies. `tests/fuzz` gives each preset any body.

use bytes::Bytes;
use http::Request;
use tower_dedup::KeyErrorKind;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider;

fn kind(preset: provider::Preset, body: impl Into<Bytes>) -> Result<Extracted, KeyErrorKind> {
    let request = Request::post("/hook").header("content-type", "application/json");
    let ((head, ()), body) = (request.body(()).unwrap().into_parts(), body.into());
    preset.extractor().extract(&RequestRef::new(&head, &body)).map_err(|error| error.kind())
}

#[test]
fn malformed_body_has_its_reason() {
    for (preset, body, expected) in [
        (provider::STRIPE, r#"{"id":"a","id":"b"}"#, KeyErrorKind::Repeated),
        (provider::STRIPE, r#"{"account":"a","account":"b","id":"c"}"#, KeyErrorKind::Repeated),
        (provider::TELEGRAM, r#"{"update_id":18446744073709551616}"#, KeyErrorKind::NotAnId),
        (provider::TELEGRAM, r#"{"update_id":1e3}"#, KeyErrorKind::NotAnId),
        (provider::SQUARE, r#"{"event_id":[]}"#, KeyErrorKind::NotAnId),
        (provider::SQUARE, r#"{"event_id":""}"#, KeyErrorKind::Empty),
        (provider::SENDGRID, r#"{"sg_event_id":"a"}"#, KeyErrorKind::NotAnArray),
        (provider::HUBSPOT, r#"[{"portalId":1,"portalId":1}]"#, KeyErrorKind::Repeated),
        (provider::WHATSAPP, r#"{"entry":[],"entry":[]}"#, KeyErrorKind::Repeated),
        (provider::WHATSAPP, r#"{"entry":[{"changes":7}]}"#, KeyErrorKind::NotAnArray),
        (provider::WHATSAPP, r#"{"entry":{}}"#, KeyErrorKind::NotAnArray),
        (provider::ADYEN, "live=false", KeyErrorKind::InvalidJson),
    ] {
        assert_eq!(kind(preset, body), Err(expected), "{preset:?}: {body}");
    }
    // Malformed is reported before missing.
    let body = r#"[{"eventId":1},{"portalId":[]}]"#;
    assert_eq!(kind(provider::HUBSPOT, body), Err(KeyErrorKind::NotAnId));
}

/// The header that marks a revocation is not signed, and the body of drops is a list of events.
#[test]
fn list_of_drops_is_no_handshake_of_twitch() {
    let drops = r#"{"subscription": {"type": "drop.entitlement.grant"}, "events": [{"id": "1"}]}"#;
    let revoked = r#"{"subscription": {"status": "authorization_revoked"}}"#;
    for (body, is_event) in [(drops, true), (revoked, false)] {
        let request = Request::post("/hook")
            .header("twitch-eventsub-message-id", "m1")
            .header("twitch-eventsub-message-type", "revocation");
        let ((head, ()), body) = (request.body(()).unwrap().into_parts(), Bytes::from(body));
        let found = provider::TWITCH.extractor().extract(&RequestRef::new(&head, &body)).unwrap();
        assert_eq!(matches!(found, Extracted::Keys(_)), is_event, "{body:?}");
    }
}

/// The sum of all arrays counts, although no single array is too long.
#[test]
fn updates_of_all_entries_together_are_bounded() {
    let messages = vec![r#"{"id":1}"#; 40_000].join(",");
    let change = format!(r#"{{"changes":[{{"value":{{"messages":[{messages}]}}}}]}}"#);
    let body = format!(r#"{{"entry":[{change},{change}]}}"#);
    assert_eq!(kind(provider::WHATSAPP, body), Err(KeyErrorKind::TooMany));
}
