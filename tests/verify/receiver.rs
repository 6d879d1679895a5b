//! The secrets and handshakes of the example `receiver`.

#[path = "../../examples/receiver/src/handshake.rs"]
mod handshake;
#[path = "../../examples/receiver/src/secrets.rs"]
mod secrets;

use std::collections::BTreeMap;

use axum::body::to_bytes;
use http::{HeaderName, HeaderValue, header};
use tower_dedup::provider;
use tower_dedup::verify::Verifier;

use crate::vectors::{VECTORS, at, case, cases};

fn verifiers(
    variables: &[(&str, &str)],
    public_url: Option<&str>,
) -> Result<BTreeMap<&'static str, Verifier>, String> {
    let variables = variables.iter().map(|(name, secret)| ((*name).into(), (*secret).into()));
    secrets::verifiers(variables, public_url)
}

#[test]
fn receiver_finds_the_scheme_of_each_secret() {
    let secrets = [
        ("PATH", "/bin"),
        ("WEBHOOK_SECRET_GITHUB", "new"),
        ("WEBHOOK_SECRET_GITHUB_PREVIOUS", "mysecret"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
    ];
    let found = verifiers(&secrets, None).unwrap();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), ["github", "standard-webhooks"]);
    let vector = cases(VECTORS[2].1).remove(1);
    let (head, body) = (vector.head(), vector.body_utf8.as_bytes());
    assert_eq!(found["github"].verify(&head, body, at(0)), Ok(()));

    for (variable, secret, public_url, why) in [
        ("WEBHOOK_SECRET_NOBODY", "secret", None, "it knows WEBHOOK_SECRET_STANDARD_WEBHOOKS, "),
        ("WEBHOOK_SECRET_", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_github", "secret", None, "cannot verify such a sender"),
        ("WEBHOOK_SECRET_GITHUB", "", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_", None, "is empty"),
        ("WEBHOOK_SECRET_STANDARD_WEBHOOKS", "whsec_secret!", None, "base64"),
        ("WEBHOOK_SECRET_TWILIO", "secret", None, "--public-url"),
    ] {
        let said = verifiers(&[(variable, secret)], public_url).expect_err(variable);
        assert!(said.contains(why) && said.contains(variable), "{said}");
        assert!(
            secret.is_empty() || !said.contains("secret!"),
            "the message contains no secret: {said}"
        );
    }
    assert_eq!(verifiers(&[], None).unwrap().len(), 0);
    assert!(verifiers(&[("WEBHOOK_SECRET_TWILIO", "x")], Some("https://example.com")).is_ok());
}

async fn shake(headers: &[(&'static str, &'static str)], body: &str) -> Option<(String, String)> {
    let headers = headers
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let response = handshake::response(&headers.collect(), body.as_bytes())?;
    assert_eq!(response.status(), 200);
    let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    Some((kind, String::from_utf8(body.to_vec()).unwrap()))
}

#[tokio::test]
async fn handshakes_are_answered_as_their_senders_expect() {
    let text = |text: &str| Some(("text/plain; charset=utf-8".to_owned(), text.to_owned()));
    let slack = case(provider::SLACK, "url_verification");
    let challenge = "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P";
    assert_eq!(shake(&[], &slack.body_utf8).await, text(challenge));

    let twitch = r#"{"challenge":"pogchamp","subscription":{"type":"channel.follow"}}"#;
    let kind = "twitch-eventsub-message-type";
    assert_eq!(shake(&[(kind, "webhook_callback_verification")], twitch).await, text("pogchamp"));
    assert_eq!(shake(&[(kind, "notification")], twitch).await, None);

    let grid = r#"[{"id":"1","data":{"validationCode":"512d38b6"}}]"#;
    let json = r#"{"validationResponse":"512d38b6"}"#;
    let kind = "aeg-event-type";
    let expected = Some(("application/json".to_owned(), json.to_owned()));
    assert_eq!(shake(&[(kind, "SubscriptionValidation")], grid).await, expected);
    assert_eq!(shake(&[(kind, "Notification")], grid).await, None);

    let signed = [("x-signature-ed25519", "00")];
    let pong = Some(("application/json".to_owned(), r#"{"type":1}"#.to_owned()));
    assert_eq!(shake(&signed, r#"{"type":1,"id":"1"}"#).await, pong);
    assert_eq!(shake(&signed, r#"{"type":1,"event":{}}"#).await, None);
    let headers = [(HeaderName::from_static(signed[0].0), HeaderValue::from_static("00"))];
    let ping = handshake::response(&headers.into_iter().collect(), br#"{"type":0}"#).unwrap();
    assert_eq!((ping.status().as_u16(), ping.headers().contains_key("content-type")), (204, true));

    for body in [r#"{"type":"event_callback","challenge":"x"}"#, r#"{"challenge":"x"}"#, "x", ""] {
        assert_eq!(shake(&[], body).await, None, "{body}");
    }
}
