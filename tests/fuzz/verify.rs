//! Signatures: nothing is verified that the sender did not sign.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, ServiceExt, service_fn};
use tower_dedup::provider::{self, Preset};
use tower_dedup::testing;
use tower_dedup::verify::{EchoLayer, Verifier};

use crate::fuzz::fuzz;
use crate::input::Input;
use support::secrets::test_secrets;

const URL: &str = "https://example.com";
/// The headers of a signed request of each sender, in alphabetic order.
static NAMES: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
    let signed = |sender: Preset| {
        let private = test_secrets(sender.scheme())[1];
        testing::sign_at(testing::request(sender, "/hook", "1"), sender, URL, private)
    };
    let requests = senders().into_iter().map(signed);
    let names: BTreeSet<_> = requests
        .flat_map(|request| request.headers().keys().map(ToString::to_string).collect::<Vec<_>>())
        .collect();
    names.iter().map(|name| name.parse().unwrap()).collect()
});

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_753_900_006)
}

/// The senders with a known scheme.
fn senders() -> Vec<Preset> {
    provider::ALL.iter().copied().filter(|preset| preset.scheme().is_some()).collect()
}

fn verifier(sender: Preset) -> Verifier {
    sender.verifier_at(URL, test_secrets(sender.scheme())[0]).unwrap()
}

/// Any headers and any body are refused, because nobody signed them.
#[test]
fn verify_any() {
    fuzz("verify_any", 4_000, &[], |input| {
        let mut input = Input(input);
        let sender = *input.pick(&senders());
        let mut request = Request::post("/hook?a=b").body(()).unwrap();
        for _ in 0..input.byte() % 6 {
            let name = input.pick(&NAMES).clone();
            if let Ok(value) = HeaderValue::from_bytes(input.bytes()) {
                request.headers_mut().append(name, value);
            }
        }
        let (head, ()) = request.into_parts();
        assert!(verifier(sender).verify(&head, input.0, now()).is_err(), "{sender:?}");
    });
}

/// Beginnings of bodies.
const HANDSHAKES: [&str; 4] = [
    r#"{"type":"url_verification","challenge":"c"}"#,
    r#"{"event":"endpoint.url_validation","payload":{"plainToken":"c"}}"#,
    r#"[{"data":{"validationCode":"c"}}]"#,
    r#"{"type":1}"#,
];
const QUERIES: [&str; 3] = ["a=b", "validationToken=c", "hub.mode=subscribe&hub.challenge=c"];
static ECHOES: LazyLock<Vec<EchoLayer>> = LazyLock::new(|| {
    let echo = |sender: &Preset| sender.echo(None).or_else(|_| sender.echo(Some("token"))).ok();
    provider::ALL.iter().filter_map(echo).collect()
});

/// A request is answered, and no browser takes the answer for a page, or it reaches the handler as it is.
#[test]
fn echo_any() {
    fuzz("echo_any", 4_000, &[], |input| {
        let mut input = Input(input);
        let echo = input.pick(&ECHOES).clone();
        let method = *input.pick(&["POST", "GET", "OPTIONS"]);
        let query = [input.pick(&QUERIES), "&hub.verify_token=", *input.pick(&["token", "x"])];
        let headers = [
            ("twitch-eventsub-message-type", "webhook_callback_verification"),
            ("aeg-event-type", "SubscriptionValidation"),
            ("webhook-request-origin", "example.com"),
        ];
        let (name, value) = *input.pick(&headers);
        let request = Request::builder().method(method).uri(["/hook?", &query.concat()].concat());
        let mut body = Vec::new();
        if input.byte() % 2 == 0 {
            body.extend(input.pick(&HANDSHAKES).bytes());
        }
        // Somewhere in the handshake.
        let at = usize::from(input.byte()) % (body.len() + 1);
        body.splice(at..at, input.0.iter().copied());
        let body = Bytes::from(body);
        let request = request.header(name, value).body(Full::new(body.clone())).unwrap();
        let handler = service_fn(async |request: Request<Full<Bytes>>| {
            let mut response = Response::new(request.into_body());
            *response.status_mut() = http::StatusCode::ACCEPTED;
            Ok::<_, Infallible>(response)
        });
        let answer = echo.layer(handler).oneshot(request).now_or_never().expect("nothing waits");
        let (head, answer) = answer.unwrap().into_parts();
        let text = answer.collect().now_or_never().unwrap().unwrap().to_bytes();
        match head.status.as_u16() {
            202 => assert_eq!(text, body),
            200 | 204 => assert_eq!(head.headers["x-content-type-options"], "nosniff"),
            status => assert!([401, 403].contains(&status) && text.is_empty(), "{status}"),
        }
    });
}
