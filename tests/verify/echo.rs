//! Handshakes that need an echo, and requests that resemble them.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::routing::post;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::provider::{
    self, AZURE_EVENT_GRID, CLOUDEVENTS, DISCORD, MESSENGER, MICROSOFT_GRAPH, Preset, SLACK,
    TWITCH, WHATSAPP, ZOOM,
};
use tower_dedup::verify::{EchoLayer, VerifyLayer};
use tower_dedup::{DedupLayer, Verified, testing};

use crate::vectors::case;
use support::log::Log;

const TOKEN: &str = "meatyhamhock";
const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";

/// A request: its method and target, its headers as lines, and its body.
type Sent = (&'static str, &'static str, &'static str);

fn request((target, headers, body): Sent) -> Request<Body> {
    let (method, uri) = target.split_once(' ').unwrap();
    let mut request = Request::builder().method(method).uri(uri);
    for line in headers.lines() {
        let (name, value) = line.split_once(": ").unwrap();
        request = request.header(name, value);
    }
    request.body(Body::from(body)).unwrap()
}

fn echo(sender: Preset) -> EchoLayer {
    let secret = match sender.name() {
        "whatsapp" | "messenger" => Some(TOKEN),
        "zoom" => Some("zoom_secret_for_tests"),
        _ => None,
    };
    sender.echo(secret).unwrap()
}

/// Sends a request through the layer to a handler that answers 202 with what it got.
async fn send(layer: EchoLayer, request: Request<Body>) -> (StatusCode, HeaderMap, String) {
    let handler = service_fn(async |request: Request<Body>| {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await;
        let body = body.map_or("a broken body".to_owned(), |body| format!("{body:?}"));
        let mut response =
            Response::new(Body::from(format!("{} {} {body}", head.method, head.uri)));
        *response.status_mut() = StatusCode::ACCEPTED;
        Ok::<_, Infallible>(response)
    });
    let (head, body) = layer.layer(handler).oneshot(request).await.unwrap().into_parts();
    let body = to_bytes(Body::new(body), usize::MAX).await.unwrap();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

const OF_TWITCH: &str = "twitch-eventsub-message-type: webhook_callback_verification";
const OF_GRID: &str = "aeg-event-type: SubscriptionValidation";

const ZOOMS: &str = r#"{"payload":{"plainToken":"qgg8vlvZRS6UYooatFL8Aw"},"event_ts":1654503849680,"event":"endpoint.url_validation"}"#;

/// The sender, its handshake, and the media type and the text of the answer.
const HANDSHAKES: &[(Preset, Sent, &str, &str)] = &[
    (
        SLACK,
        ("POST /", "", r#"{"token":"t","challenge":"3eZbrw1aBm2","type":"url_verification"}"#),
        TEXT,
        "3eZbrw1aBm2",
    ),
    (
        WHATSAPP,
        ("GET /?hub.mode=subscribe&hub.challenge=1158201444&hub.verify_token=meatyhamhock", "", ""),
        TEXT,
        "1158201444",
    ),
    // The names and the values may be encoded, and `+` is a space.
    (
        WHATSAPP,
        (
            "GET /?hub%2Emode=subscribe&hub.verify_token=meaty%68amhock&hub.challenge=a+b%2Bc%C3%A9",
            "",
            "",
        ),
        TEXT,
        "a b+cé",
    ),
    // A browser must not run it.
    (
        WHATSAPP,
        (
            "GET /?hub.mode=subscribe&hub.verify_token=meatyhamhock&hub.challenge=%3Cscript%3E",
            "",
            "",
        ),
        TEXT,
        "<script>",
    ),
    (
        MESSENGER,
        ("GET /?hub.mode=subscribe&hub.challenge=1&hub.verify_token=meatyhamhock", "", ""),
        TEXT,
        "1",
    ),
    (
        MICROSOFT_GRAPH,
        (
            "POST /?validationToken=Validation%3a+Testing+client+application+reachability+%3c%2Fa%3e",
            "content-type: text/plain; charset=utf-8",
            "",
        ),
        TEXT,
        "Validation: Testing client application reachability </a>",
    ),
    // Verified. The code is of `openssl dgst -sha256 -hmac`.
    (
        ZOOM,
        ("POST /", "", ZOOMS),
        JSON,
        r#"{"encryptedToken":"4be9cfed84ca1d18972cfc84be68c77407b1fc271ee48c90e62010fa6b8c69aa","plainToken":"qgg8vlvZRS6UYooatFL8Aw"}"#,
    ),
    (
        TWITCH,
        (
            "POST /",
            OF_TWITCH,
            r#"{"challenge":"pogchamp-kappa","subscription":{"type":"channel.follow"}}"#,
        ),
        TEXT,
        "pogchamp-kappa",
    ),
    (
        AZURE_EVENT_GRID,
        ("POST /", OF_GRID, r#"[{"id":"1","data":{"validationCode":"512d38b6"}}]"#),
        JSON,
        r#"{"validationResponse":"512d38b6"}"#,
    ),
    (AZURE_EVENT_GRID, ("OPTIONS /", "webhook-request-origin: eventgrid.azure.net", ""), TEXT, ""),
    (
        CLOUDEVENTS,
        ("OPTIONS /", "webhook-request-origin: a.example.com\nwebhook-request-rate: 120", ""),
        TEXT,
        "",
    ),
    (DISCORD, ("POST /", "", r#"{"type":1,"id":"1","token":"t"}"#), JSON, r#"{"type":1}"#),
    (DISCORD, ("POST /", "", r#"{"version":1,"application_id":"1","type":0}"#), JSON, ""),
];

#[tokio::test]
async fn handshake_is_answered_as_its_sender_expects() {
    for (sender, sent, kind, text) in HANDSHAKES {
        let mut request = request(*sent);
        if *sender == ZOOM {
            request.extensions_mut().insert(Verified);
        }
        let (status, headers, body) = send(echo(*sender), request).await;
        let expected = if sent.2.ends_with(r#""type":0}"#) { 204 } else { 200 };
        assert_eq!((status.as_u16(), &*body), (expected, *text), "{sent:?}");
        assert_eq!(headers["content-type"], kind, "{sent:?}");
        assert_eq!(headers["x-content-type-options"], "nosniff", "{sent:?}");
        let origin =
            sent.1.strip_prefix("webhook-request-origin: ").and_then(|it| it.lines().next());
        let allowed = headers.get("webhook-allowed-origin").map(|origin| origin.to_str().unwrap());
        assert_eq!(allowed, origin, "{sent:?}");
        let rate = headers.get("webhook-allowed-rate").is_some_and(|rate| rate == "*");
        assert_eq!(rate, origin.is_some(), "{sent:?}");
    }
    let with_challenge = provider::ALL
        .iter()
        .filter(|sender| sender.echo(None).is_ok() || sender.echo(Some("secret")).is_ok());
    for sender in with_challenge {
        assert!(HANDSHAKES.iter().any(|(tested, ..)| tested == sender), "{sender:?}");
    }
}

/// A value of so many bytes, and one more.
const LONGEST: usize = 4 * 1024;

#[tokio::test]
async fn request_that_merely_resembles_a_handshake_reaches_the_handler_as_it_is() {
    let event = r#"{"challenge":"c","event":{"user_name":"x"},"subscription":{}}"#;
    let drops = r#"{"challenge":"c","events":[{"id":"1"}]}"#;
    let of_meta = "GET /?hub.mode=subscribe&hub.verify_token=meatyhamhock";
    let meta = |more: &str| -> &'static str { Box::leak(format!("{of_meta}{more}").into()) };
    let long = "a".repeat(LONGEST + 1);
    let slack = |challenge: &str| -> &'static str {
        let body = format!(r#"{{"type":"url_verification","challenge":{challenge}}}"#);
        Box::leak(body.into())
    };
    for (sender, sent) in [
        // Events.
        (SLACK, ("POST /", "", r#"{"type":"event_callback","event_id":"1","challenge":"c"}"#)),
        (SLACK, ("POST /", "", r#"{"event":{"type":"url_verification","challenge":"c"}}"#)),
        (SLACK, ("POST /", "", r#"[{"type":"url_verification","challenge":"c"}]"#)),
        (SLACK, ("POST /", "", "type=url_verification&challenge=c")),
        (SLACK, ("POST /?type=url_verification&challenge=c", "", "{}")),
        (SLACK, ("POST /", "", "")),
        (
            WHATSAPP,
            ("POST /?hub.mode=subscribe&hub.verify_token=meatyhamhock&hub.challenge=c", "", "{}"),
        ),
        (TWITCH, ("POST /", OF_TWITCH, event)),
        (TWITCH, ("POST /", OF_TWITCH, drops)),
        (TWITCH, ("POST /", "twitch-eventsub-message-type: notification", r#"{"challenge":"c"}"#)),
        (TWITCH, ("POST /", "", r#"{"challenge":"c"}"#)),
        (
            AZURE_EVENT_GRID,
            ("POST /", "aeg-event-type: Notification", r#"[{"data":{"validationCode":"c"}}]"#),
        ),
        (DISCORD, ("POST /", "", r#"{"type":1,"event":{"type":"APPLICATION_AUTHORIZED"}}"#)),
        (DISCORD, ("POST /", "", r#"{"type":2,"id":"1"}"#)),
        (CLOUDEVENTS, ("OPTIONS /", "webhook-request-origin: a.example.com", r#"{"id":"1"}"#)),
        (MICROSOFT_GRAPH, ("POST /?validationToken=c", "", r#"{"value":[{"id":"1"}]}"#)),
        (MICROSOFT_GRAPH, ("POST /", "", r#"{"value":[],"validationTokens":["c"]}"#)),
        (MICROSOFT_GRAPH, ("POST /?validationtoken=c", "", "")),
        (ZOOM, ("POST /", "", r#"{"event":"meeting.started","payload":{"plainToken":"c"}}"#)),
        (ZOOM, ("POST /", "", r#"{"event":"endpoint.url_validation","payload":{}}"#)),
        // Another method, another mode.
        (SLACK, ("PUT /", "", slack(r#""c""#))),
        (CLOUDEVENTS, ("POST /", "webhook-request-origin: a.example.com", "{}")),
        (CLOUDEVENTS, ("OPTIONS /", "access-control-request-method: POST", "")),
        (
            WHATSAPP,
            ("GET /?hub.mode=unsubscribe&hub.verify_token=meatyhamhock&hub.challenge=c", "", ""),
        ),
        (WHATSAPP, ("GET /?hub.verify_token=meatyhamhock&hub.challenge=c", "", "")),
        (MICROSOFT_GRAPH, ("GET /?validationToken=c", "", "")),
        // A value that cannot be sent back: repeated, missing, empty, of another type, not UTF-8, too long.
        (WHATSAPP, (meta("&hub.challenge=a&hub.challenge=b"), "", "")),
        (WHATSAPP, (meta("&hub.mode=subscribe&hub.challenge=a"), "", "")),
        (WHATSAPP, (meta(""), "", "")),
        (WHATSAPP, (meta("&hub.challenge="), "", "")),
        (WHATSAPP, (meta("&hub.challenge=%FF"), "", "")),
        (MICROSOFT_GRAPH, ("POST /?validationToken=a&validationToken=b", "", "")),
        (MICROSOFT_GRAPH, ("POST /?validationToken=", "", "")),
        (MICROSOFT_GRAPH, ("POST /?validationToken=a%00", "", "")),
        (WHATSAPP, (meta(&format!("&hub.challenge={long}")), "", "")),
        (SLACK, ("POST /", "", slack(r#""a","challenge":"b""#))),
        (SLACK, ("POST /", "", slack(r#"{"a":1}"#))),
        (SLACK, ("POST /", "", slack("null"))),
        (SLACK, ("POST /", "", slack(r#""""#))),
        (SLACK, ("POST /", "", slack(&format!("\"{long}\"")))),
        (SLACK, ("POST /", "", slack(&format!("\"{}\"", "a".repeat(10_000))))),
        (AZURE_EVENT_GRID, ("POST /", OF_GRID, r#"[{"data":{}}]"#)),
    ] {
        let (status, _, body) = send(echo(sender), request(sent)).await;
        let expected = format!("{} {:?}", sent.0, Bytes::from(sent.2));
        assert_eq!((status.as_u16(), body), (202, expected), "{sender:?}");
    }
    let longest = slack(&format!("\"{}\"", "a".repeat(LONGEST)));
    let (status, _, body) = send(echo(SLACK), request(("POST /", "", longest))).await;
    assert_eq!((status.as_u16(), body.len()), (200, LONGEST));
}

/// Meta's GET is not signed: only the token tells it from others.
#[tokio::test]
async fn wrong_verify_token_is_refused() {
    let (log, _guard) = Log::of_this_thread();
    for token in [
        "",
        "&hub.verify_token=",
        "&hub.verify_token=meatyhamhoc",
        "&hub.verify_token=meatyhamhock2",
        "&hub.verify_token=Meatyhamhock",
        "&hub.verify_token=+meatyhamhock",
        "&hub.verify_token=meatyhamhock&hub.verify_token=meatyhamhock",
        "&hub.verify_token=meatyhamhock%FF",
    ] {
        let uri = format!("/hook?hub.mode=subscribe&hub.challenge=c{token}");
        let request = Request::get(uri).body(Body::empty()).unwrap();
        let (status, _, body) = send(echo(WHATSAPP), request).await;
        assert_eq!((status.as_u16(), &*body), (403, ""), "{token}");
    }
    let record = log.last("handshake refused");
    assert_eq!((&*record["preset"], &*record["path"]), ("whatsapp", "/hook"));
    assert_eq!(record["reason"], "the verify token does not match");
    assert_eq!(log.all("handshake refused").len(), 8);
    assert!(!format!("{:?}", echo(WHATSAPP)).contains(TOKEN));
}

/// The answer is a code by the secret: of a token like this, it would be the signature of another request.
#[tokio::test]
async fn code_of_zoom_is_for_verified_requests_only() {
    let (log, _guard) = Log::of_this_thread();
    let forged =
        r#"{"event":"endpoint.url_validation","payload":{"plainToken":"v0:1626230692:{}"}}"#;
    for body in [ZOOMS, forged] {
        let (status, _, answer) = send(echo(ZOOM), request(("POST /", "", body))).await;
        assert_eq!((status.as_u16(), &*answer), (401, ""), "{body}");
    }
    let record = log.last("handshake refused");
    assert!(record["reason"].starts_with("it is not verified: "), "{record:?}");
}

/// Slack and Zoom sign their handshakes; Meta and Graph do not.
#[tokio::test]
async fn layers_of_a_route_are_in_the_order_of_the_guide() {
    let runs = Arc::new(Mutex::new(0));
    let secret = "zoom_secret_for_tests";
    for sender in [SLACK, ZOOM, WHATSAPP, MICROSOFT_GRAPH] {
        let handler = {
            let runs = Arc::clone(&runs);
            post(async move || *runs.lock().unwrap() += 1)
        };
        let (echo, dedup) = (echo(sender), DedupLayer::new(sender, MemoryAdapter::new()));
        let verify = || VerifyLayer::new(sender.verifier(secret).unwrap());
        let route = match sender.name() {
            "microsoft-graph" => handler.layer((echo, dedup)),
            "whatsapp" => handler.layer((echo, verify(), dedup.require_verified())),
            _ => handler.layer((verify(), echo, dedup.require_verified())),
        };
        let app = Router::new().route("/", route);
        let answer = async |request: Request<Body>| {
            let (head, body) = app.clone().oneshot(request).await.unwrap().into_parts();
            let body = to_bytes(body, usize::MAX).await.unwrap();
            (head.status.as_u16(), String::from_utf8(body.to_vec()).unwrap())
        };
        let signed = |request: Request<Body>| match sender.name() {
            "microsoft-graph" => request,
            _ => testing::sign(request, sender, secret).map(Body::new),
        };
        let (_, sent, _, text) = HANDSHAKES.iter().find(|(of, ..)| *of == sender).unwrap();
        let is_signed = [SLACK, ZOOM].contains(&sender);
        let expected = if is_signed { (401, "") } else { (200, *text) };
        assert_eq!(answer(request(*sent)).await, (expected.0, expected.1.to_owned()));
        assert_eq!(answer(signed(request(*sent))).await, (200, (*text).to_owned()));
        assert_eq!(*runs.lock().unwrap(), 0, "{sender:?}");
        // An event runs once, and a forged one does not.
        let event = || testing::request(sender, "/", "1").map(Body::new);
        if sender != MICROSOFT_GRAPH {
            assert_eq!(answer(event()).await.0, 401, "{sender:?}");
        }
        for _ in 0..2 {
            assert_eq!(answer(signed(event())).await.0, 200, "{sender:?}");
        }
        assert_eq!(std::mem::take(&mut *runs.lock().unwrap()), 1, "{sender:?}");
    }
}

/// A body whose length is not known is not read, and neither is one that is too long for a handshake.
#[tokio::test]
async fn body_of_another_length_is_passed_on() {
    let handshake = &case(SLACK, "url_verification").body_utf8;
    let chunked = |chunks: Vec<Result<Bytes, io::Error>>| {
        Request::post("/").body(Body::from_stream(stream::iter(chunks))).unwrap()
    };
    let chunks = handshake.as_bytes().chunks(10).map(|chunk| Ok(Bytes::copy_from_slice(chunk)));
    let of_length = |length| format!("{handshake:<length$}");
    let (longest, long) = (of_length(16 * 1024), of_length(16 * 1024 + 1));
    let (status, ..) =
        send(echo(SLACK), Request::post("/").body(Body::from(longest)).unwrap()).await;
    assert_eq!(status, 200);
    let broken = [Ok(Bytes::from("{")), Err(io::Error::other("broken"))];
    for (request, expected) in [
        (chunked(chunks.collect()), format!("POST / {:?}", Bytes::from(handshake.clone()))),
        (
            Request::post("/").body(Body::from(long.clone())).unwrap(),
            format!("POST / {:?}", Bytes::from(long)),
        ),
        (chunked(broken.into()), "POST / a broken body".to_owned()),
    ] {
        let (status, _, body) = send(echo(SLACK), request).await;
        assert_eq!((status.as_u16(), body), (202, expected));
    }
}

/// A handshake without a body may have one of unknown length, which is empty. In any other, there is an event.
#[tokio::test]
async fn body_of_a_handshake_without_one_is_read_if_its_length_is_unknown() {
    let long = Body::from(" ".repeat(16 * 1024 + 1));
    let long = Request::post("/?validationToken=c").body(long).unwrap();
    assert_eq!(send(echo(MICROSOFT_GRAPH), long).await.0, 202, "not read");
    let chunked = |chunks: &'static [&'static str]| {
        let chunks = chunks.iter().map(|chunk| Ok::<_, io::Error>(Bytes::from(*chunk)));
        let body = Body::from_stream(stream::iter(chunks));
        Request::post("/?validationToken=c").body(body).unwrap()
    };
    let event = r#"POST /?validationToken=c b"{\"value\":[]}""#;
    for (chunks, expected) in [
        (&[] as &[_], (200, "c")),
        (&["", ""], (200, "c")),
        (&[r#"{"value":"#, "[]}"], (202, event)),
    ] {
        let (status, _, body) = send(echo(MICROSOFT_GRAPH), chunked(chunks)).await;
        assert_eq!((status.as_u16(), &*body), expected, "{chunks:?}");
    }
}

/// A body that announces its length, and never arrives, or breaks off.
struct Announced(Option<io::Error>);

impl From<Bytes> for Announced {
    fn from(_: Bytes) -> Self {
        Self(None)
    }
}

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, io::Error>>> {
        match self.0.take() {
            Some(error) => std::task::Poll::Ready(Some(Err(error))),
            None => std::task::Poll::Pending,
        }
    }

    fn size_hint(&self) -> http_body::SizeHint {
        http_body::SizeHint::with_exact(10)
    }
}

#[tokio::test(start_paused = true)]
async fn body_that_does_not_arrive_is_refused() {
    let handler = service_fn(async |_: Request<Announced>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let service = echo(SLACK).layer(handler);
    for (body, status) in [(None, 408), (Some(io::Error::other("broken")), 400)] {
        let request = Request::post("/").body(Announced(body)).unwrap();
        let answer =
            tokio::time::timeout(Duration::from_secs(11), service.clone().oneshot(request));
        assert_eq!(answer.await.unwrap().unwrap().status(), status);
    }
}

#[test]
fn echo_says_what_it_needs() {
    for (sender, secret, expected) in [
        (
            provider::GITHUB,
            None,
            "the echo of `github` is not needed: it has no handshake of this kind",
        ),
        (
            provider::GITHUB,
            Some("x"),
            "the echo of `github` is not needed: it has no handshake of this kind",
        ),
        (WHATSAPP, None, "the echo of `whatsapp` needs the verify token"),
        (
            WHATSAPP,
            Some(""),
            "the echo of `whatsapp` needs a verify token without white space around it",
        ),
        (
            WHATSAPP,
            Some("a\n"),
            "the echo of `whatsapp` needs a verify token without white space around it",
        ),
        (ZOOM, None, "the echo of `zoom` needs the secret"),
        (SLACK, Some("x"), "the echo of `slack` needs no secret"),
    ] {
        assert_eq!(sender.echo(secret).unwrap_err().to_string(), expected);
    }
}

/// The layers compile around a hyper service.
#[test]
fn echo_layer_fits_around_a_hyper_service() {
    fn serves<S: Service<Request<Incoming>> + Clone + Send + 'static>(_: &S) {}
    let inner = service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let dedup = DedupLayer::new(SLACK, MemoryAdapter::new());
    serves(&dedup.clone().layer(echo(SLACK).layer(inner)));
    let verify = VerifyLayer::new(SLACK.verifier("secret").unwrap());
    serves(&verify.layer(echo(SLACK).layer(dedup.layer(inner))));
}

/// The layer calls the service that it polled ready.
#[tokio::test]
async fn echo_layer_calls_the_service_that_is_ready() {
    let mut service = ServiceBuilder::new()
        .layer(echo(SLACK))
        .layer(ConcurrencyLimitLayer::new(1))
        .service(service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
    let handshake = r#"{"type":"url_verification","challenge":"c"}"#;
    for sent in
        [("POST /", "", "{}"), ("POST /", "", handshake), ("GET /", "", ""), ("GET /", "", "")]
    {
        let response = tokio::time::timeout(Duration::from_secs(10), async {
            let ready = ServiceExt::<Request<Body>>::ready(&mut service).await.unwrap();
            ready.call(request(sent)).await.unwrap()
        });
        assert_eq!(response.await.expect("the limit is not used up").status(), 200);
    }
}
