//! Layers for the header `Idempotency-Key`: the cases of the draft, scopes and operations, and the answers
//! as problem details. `replay` and `compare_payload` have every store.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE, LOCATION, RETRY_AFTER, SET_COOKIE,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_dedup::adapter::contract::{Abilities, DedupAdapter};
use tower_dedup::adapter::{MemoryAdapter, SqliteAdapter};
use tower_dedup::key::{self, KeyPart};
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{
    BoxError, DedupAnswer, DedupLayer, OnMismatch, OnMissingKey, ResponseBody, provider,
};

use crate::hooked::{Hooked, NO_STORED_DATA};
use crate::replay::numbered;
use support::{Body, Handler, faulty, send, sqlite_url};

const UUID: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";
const DOCS: &str = "https://api.example.com/docs";

/// What an authenticating layer inserts.
#[derive(Clone)]
struct Principal(&'static str);

fn principal() -> KeyPart {
    key::from_fn(|request| {
        Ok(request.extensions().get::<Principal>().map(|principal| principal.0.to_owned()))
    })
}

fn layer(store: impl DedupAdapter) -> DedupLayer {
    DedupLayer::idempotency_key(principal(), store)
}

/// A payment of `alice` under this key.
fn pay(key: &str) -> Request<Body> {
    by(Principal("alice"), Request::post("/payments").header("idempotency-key", key))
}

fn by(principal: Principal, request: http::request::Builder) -> Request<Body> {
    request.extension(principal).body(Full::from("amount=5")).unwrap()
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
    result: Option<DedupAnswer>,
}

impl Answer {
    /// The status, and the number of the run that responded.
    fn run(&self) -> (u16, u64) {
        assert_eq!(self.header(CONTENT_TYPE), Some("application/json"));
        let body: Value = serde_json::from_slice(&self.body).unwrap();
        let run = body["run"].as_u64().unwrap();
        assert_eq!(self.header(LOCATION), Some(&*format!("/runs/{run}")));
        (self.status, run)
    }

    fn is_replayed(&self) -> bool {
        let replayed = self.header("idempotent-replayed") == Some("true");
        assert_eq!(self.header("x-dedup-result") == Some("duplicate"), replayed);
        assert_eq!(self.result == Some(DedupAnswer::Duplicate), replayed);
        assert_eq!(self.headers.contains_key(SET_COOKIE), !replayed);
        replayed
    }

    /// The status and the `type` of a problem of the layer.
    fn problem(&self) -> (u16, &str) {
        assert!(!self.headers.contains_key("idempotent-replayed"));
        assert_eq!(self.header(CONTENT_TYPE), Some("application/problem+json"));
        assert_eq!(self.header(CONTENT_LANGUAGE), Some("en"));
        let body: Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(body["status"], self.status);
        let result = self.result.unwrap().as_str();
        assert_eq!(self.header("x-dedup-result"), Some(result));
        (self.status, result)
    }

    fn header(&self, name: impl http::header::AsHeaderName) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// Returns the status, the number of the run that responded, and whether its response was replayed.
async fn paid<S>(service: &S, request: Request<Body>) -> (u16, u64, bool)
where
    S: Service<Request<Body>, Response = Response<ResponseBody<Body>>, Error = Infallible> + Clone,
{
    let answer = ask(service, request).await;
    let (status, run) = answer.run();
    (status, run, answer.is_replayed())
}

async fn ask<S>(service: &S, request: Request<Body>) -> Answer
where
    S: Service<Request<Body>, Response = Response<ResponseBody<Body>>, Error = Infallible> + Clone,
{
    let (head, body) = send(service, request).await.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let result = head.extensions.get().copied();
    Answer { status: head.status.as_u16(), headers: head.headers, body, result }
}

/// After a server error, or a request for the same request again, the retry runs.
#[tokio::test]
async fn retry_after_a_client_error_gets_the_first_response_and_after_a_server_error_it_runs() {
    let store = Arc::new(MemoryAdapter::new());
    let client = [400, 402, 403, 404, 422].map(|status| (status, true));
    let server = [101, 103, 401, 407, 408, 409, 421, 423, 425, 429, 500, 502, 503, 504, 600];
    for (status, is_kept) in client.into_iter().chain(server.map(|status| (status, false))) {
        let handler = Handler::default().then(status);
        let service = layer(Arc::clone(&store)).layer(numbered(&handler));
        let key = status.to_string();
        assert_eq!(paid(&service, pay(&key)).await, (status, 1, false));
        if is_kept {
            assert_eq!(paid(&service, pay(&key)).await, (status, 1, true));
            continue;
        }
        assert_eq!(paid(&service, pay(&key)).await, (201, 2, false));
        assert_eq!(handler.last().attempt(), 2);
        assert_eq!(paid(&service, pay(&key)).await, (201, 2, true));
    }
}

#[tokio::test(start_paused = true)]
async fn concurrent_request_is_409() {
    let handler = Handler::default();
    let service = layer(MemoryAdapter::new()).layer(numbered(&handler));
    handler.hold();
    let first = tokio::spawn(service.clone().oneshot(pay(UUID)));
    handler.running(1).await;
    for request in [pay(UUID), pay(&format!("\"{UUID}\""))] {
        let asked = Instant::now();
        let second = ask(&service, request).await;
        assert_eq!((second.problem(), asked.elapsed()), ((409, "in-flight"), Duration::ZERO));
        assert_eq!(second.header(RETRY_AFTER), Some("1"));
    }
    handler.release();
    assert_eq!(first.await.unwrap().unwrap().status(), 201);
    assert_eq!(paid(&service, pay(UUID)).await, (201, 1, true));
}

#[tokio::test]
async fn other_payload_is_422() {
    let handler = Handler::default();
    let service = layer(MemoryAdapter::new()).layer(numbered(&handler));
    assert_eq!(ask(&service, pay(UUID)).await.run(), (201, 1));
    let (mut body, mut empty, mut query) = (pay(UUID), pay(UUID), pay(UUID));
    *body.body_mut() = Full::from("amount=500");
    *empty.body_mut() = Full::default();
    *query.uri_mut() = "/payments?amount=5".parse().unwrap();
    for request in [body, empty, query] {
        assert_eq!(ask(&service, request).await.problem(), (422, "mismatch"));
    }
    assert_eq!(ask(&service, pay(UUID)).await.run(), (201, 1));
    assert_eq!(handler.runs(), 1);
}

#[tokio::test]
async fn transactional_layer_has_the_same_answers() {
    let (dir, handler) = (tempfile::tempdir().unwrap(), Handler::default().then(402));
    let store = SqliteAdapter::connect(&sqlite_url(dir.path())).await.unwrap();
    let layer = DedupLayer::transactional_idempotency_key(principal(), store);
    let service = layer.layer(numbered(&handler));
    assert_eq!(ask(&service, pay(UUID)).await.run(), (402, 1));
    assert_eq!(paid(&service, pay(UUID)).await, (201, 2, false));
    assert_eq!(paid(&service, pay(&format!("\"{UUID}\""))).await, (201, 2, true));
    let mut other = pay(UUID);
    *other.body_mut() = Full::from("amount=500");
    assert_eq!(ask(&service, other).await.problem(), (422, "mismatch"));

    handler.hold();
    let running = tokio::spawn(service.clone().oneshot(pay("b")));
    handler.running(1).await;
    assert_eq!(ask(&service, pay("b")).await.problem(), (409, "in-flight"));
    handler.release();
    assert_eq!(running.await.unwrap().unwrap().status(), 201);
}

#[tokio::test]
async fn missing_key_is_400_unless_it_passes_through() {
    let handler = Handler::default();
    let layer = layer(MemoryAdapter::new());
    let service = layer.clone().layer(numbered(&handler));
    let without = || by(Principal("alice"), Request::post("/payments"));
    assert_eq!(ask(&service, without()).await.problem(), (400, "invalid-key"));
    assert_eq!(handler.runs(), 0);

    let optional = layer.clone().on_missing_key(OnMissingKey::PassThrough);
    let service = optional.layer(numbered(&handler));
    for run in 1..3 {
        assert_eq!(paid(&service, without()).await, (201, run, false));
    }
    // A key that is sent counts, and a malformed one is not a missing one.
    assert_eq!(ask(&service, pay(UUID)).await.run(), (201, 3));
    assert!(ask(&service, pay(UUID)).await.is_replayed());
    let mut repeated = pay(UUID);
    repeated.headers_mut().append("idempotency-key", UUID.parse().unwrap());
    for malformed in [pay("\""), pay("a, b"), pay(&"x".repeat(256)), repeated] {
        assert_eq!(ask(&service, malformed).await.problem(), (400, "invalid-key"));
    }
    assert_eq!(handler.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn key_expires_after_24_hours() {
    let handler = Handler::default();
    let service = layer(MemoryAdapter::new()).layer(numbered(&handler));
    assert_eq!(ask(&service, pay(UUID)).await.run(), (201, 1));
    tokio::time::advance(Duration::from_secs(86_400 - 1)).await;
    assert_eq!(paid(&service, pay(UUID)).await, (201, 1, true));
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(paid(&service, pay(UUID)).await, (201, 2, false));
}

#[tokio::test]
async fn post_and_patch_are_deduplicated_and_other_methods_are_not() {
    let handler = Handler::default();
    let service = layer(MemoryAdapter::new()).layer(numbered(&handler));
    for (method, is_replayed) in [
        (Method::POST, true),
        (Method::PATCH, true),
        (Method::GET, false),
        (Method::HEAD, false),
        (Method::PUT, false),
        (Method::DELETE, false),
    ] {
        let request = || {
            let request = Request::builder().method(&method).uri("/payments");
            by(Principal("alice"), request.header("idempotency-key", UUID))
        };
        assert!(!ask(&service, request()).await.is_replayed());
        assert_eq!(ask(&service, request()).await.is_replayed(), is_replayed, "{method}");
    }
    assert_eq!(handler.runs(), 2 + 4 * 2);
}

/// The client must not take an empty 200 for the response, and its library must not repeat the request.
#[tokio::test]
async fn duplicate_whose_response_was_not_stored_is_422() {
    let long = "x".repeat(256 * 1024 + 1);
    for (kind, coding, body) in [
        ("text/plain", None, long),
        ("text/event-stream", None, "data: 1".to_owned()),
        // By a layer inside, for a client that takes it: the next one may not.
        ("text/plain", Some("gzip"), "\u{1f}\u{8b}".to_owned()),
    ] {
        let (handler, sent) = (Handler::default(), Bytes::from(body));
        let respond = sent.clone();
        let inner = handler.service().map_response(move |mut response: Response<Body>| {
            response.headers_mut().insert(CONTENT_TYPE, kind.parse().unwrap());
            let coding = coding.map(|coding| coding.parse().unwrap());
            response.headers_mut().extend(coding.map(|coding| (CONTENT_ENCODING, coding)));
            response.map(|_| Full::from(respond.clone()))
        });
        let layer = layer(MemoryAdapter::new());
        let service = layer.clone().problem_docs(DOCS).layer(inner.clone());
        let first = ask(&service, pay(UUID)).await;
        assert_eq!((first.status, first.body), (200, sent));
        let again = ask(&service, pay(UUID)).await;
        assert_eq!(again.problem(), (422, "response-not-stored"), "{kind}");
        let problem: Value = serde_json::from_slice(&again.body).unwrap();
        assert_eq!(problem["type"], format!("{DOCS}#response-not-stored"));
        // By choice, a 2xx, which is no problem.
        let service = layer.duplicate_status(StatusCode::ACCEPTED).layer(inner);
        let again = ask(&service, pay(UUID)).await;
        assert_eq!((again.status, again.header(CONTENT_TYPE), again.body.len()), (202, None, 0));
        assert_eq!((again.header("x-dedup-result"), handler.runs()), (Some("duplicate"), 1));
    }
}

/// A client needs all of them to read the body, and no list of them is complete.
#[tokio::test]
async fn every_header_that_describes_the_content_is_replayed() {
    let described = [
        ("content-disposition", "attachment; filename=\"invoice.pdf\""),
        ("content-digest", "sha-256=:4REjxQ4yrqUVicfSKYNO/cF9zNj5ANbzgDZt3/h3Qxo=:"),
        ("content-security-policy", "default-src 'none'"),
        ("content-language", "en"),
        ("content-location", "/invoices/1"),
        ("content-range", "bytes 0-6/7"),
        ("etag", "\"1\""),
    ];
    let inner = Handler::default().service().map_response(move |mut response: Response<Body>| {
        for (name, value) in described {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
        response.headers_mut().append("content-language", "de".parse().unwrap());
        response.headers_mut().insert("content-length", "7".parse().unwrap());
        response.headers_mut().insert("x-content-id", "1".parse().unwrap());
        response.map(|_| Full::from("invoice"))
    });
    let service = layer(MemoryAdapter::new()).layer(inner);
    ask(&service, pay(UUID)).await;
    let again = ask(&service, pay(UUID)).await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    for (name, value) in described {
        assert_eq!(again.header(name), Some(value));
    }
    assert_eq!(again.headers.get_all("content-language").iter().count(), 2);
    for name in ["content-length", "x-content-id"] {
        assert_eq!(again.header(name), None);
    }
}

/// The first run has failed and its key is free, so the client's library may repeat the request.
#[tokio::test]
async fn response_whose_body_breaks_is_500_and_the_repetition_runs() {
    let handler = Handler::default();
    let layer = layer(MemoryAdapter::new()).problem_docs(DOCS);
    let broken = handler.service().map_response(|response: Response<Body>| {
        let frames = [Ok(Frame::data(Bytes::from("a"))), Err(BoxError::from("broken"))];
        response.map(|_| StreamBody::new(futures_util::stream::iter(frames)))
    });
    let answer = layer.layer(broken).oneshot(pay(UUID)).await.unwrap();
    assert_eq!(answer.headers()["x-dedup-result"], "broken-response");
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let problem: Value = serde_json::from_slice(&body).unwrap();
    let kind = format!("{DOCS}#broken-response");
    assert_eq!((&problem["status"], &problem["type"]), (&json!(500), &json!(kind)));
    assert_eq!(ask(&layer.layer(numbered(&handler)), pay(UUID)).await.run(), (201, 2));
}

#[tokio::test]
async fn problem_has_type_title_status_and_detail() {
    let layer = layer(MemoryAdapter::new());
    for (layer, kind, title) in [
        (
            layer.clone().problem_docs(DOCS),
            "https://api.example.com/docs#invalid-key",
            "The Idempotency-Key is missing or malformed",
        ),
        // RFC 9457, section 4.2.1: the title of `about:blank` is the status's.
        (layer, "about:blank", "Bad Request"),
    ] {
        let answer = ask(&layer.layer(numbered(&Handler::default())), pay("\"")).await;
        let mut problem: Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(problem["detail"].take().is_string());
        let detail = Value::Null;
        let expected = json!({
            "type": kind, "title": title, "status": 400, "detail": detail, "retryable": false,
        });
        assert_eq!(problem, expected);
    }
}

/// No answer names the store, its error, the scope, the key or the payload.
#[tokio::test(start_paused = true)]
async fn problem_names_nothing_internal() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let layer = layer(Arc::clone(&store)).problem_docs(DOCS);
    let layer = layer.body_limit(100).handler_timeout(Duration::from_secs(1));
    let service = layer.clone().layer(numbered(&handler));
    let mut answers = Vec::new();
    for fault in [Fault::Fail, Fault::Hang, Fault::ExecuteAndFail] {
        store.set(StoreCall::Claim, fault);
        let answer = ask(&service, pay(UUID)).await;
        assert_eq!(answer.problem(), (503, "unavailable"));
        assert_eq!(answer.header(RETRY_AFTER), Some("30"));
        answers.push(answer);
    }
    store.set(StoreCall::Claim, Fault::None);
    let mut large = pay("large");
    *large.body_mut() = Full::from("x".repeat(101));
    answers.push(ask(&service, large).await);
    assert_eq!(answers[3].problem(), (413, "too-large"));
    answers.push(ask(&service, by(Principal("alice"), Request::post("/payments"))).await);
    assert_eq!(answers[4].problem(), (400, "invalid-key"));
    handler.hold();
    answers.push(ask(&service, pay("slow")).await);
    assert_eq!(answers[5].problem(), (504, "handler-timeout"));
    let strict = layer.require_verified().layer(numbered(&handler));
    answers.push(ask(&strict, pay("unverified")).await);
    assert_eq!(answers[6].problem(), (500, "unverified"));
    for answer in answers {
        let text = String::from_utf8(answer.body.to_vec()).unwrap().to_lowercase();
        let problem: Value = serde_json::from_slice(&answer.body).unwrap();
        let members: Vec<_> = problem.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(members, ["detail", "retryable", "status", "title", "type"]);
        assert_eq!(problem["retryable"], [503, 504].contains(&answer.status));
        for word in
            ["store", "claim", "faulty", "database", "alice", "scope", "amount", "verified", UUID]
        {
            // The fragment of the type is the public name of the result.
            let told = text.replace("#unverified", "");
            assert!(!told.contains(word), "{word}: {text}");
        }
    }
}

#[tokio::test]
async fn webhook_answers_have_no_problem_details_and_no_mark() {
    let handler = Handler::default();
    let layer = DedupLayer::new(provider::STANDARD_WEBHOOKS, MemoryAdapter::new());
    let service = layer.clone().replay(tower_dedup::Replay::new()).layer(numbered(&handler));
    let request = || Request::post("/").header("webhook-id", "a").body(Full::default()).unwrap();
    assert_eq!(ask(&service, request()).await.status, 201);
    let again = ask(&service, request()).await;
    assert_eq!(again.header("x-dedup-result"), Some("duplicate"));
    assert!(!again.headers.contains_key("idempotent-replayed"));
    let missing = ask(&service, Request::post("/").body(Full::default()).unwrap()).await;
    assert_eq!((missing.status, missing.body.len()), (400, 0));
    assert!(!missing.headers.contains_key(CONTENT_TYPE));
    assert!(!missing.headers.contains_key(CONTENT_LANGUAGE));

    let refused = layer.problem_docs(DOCS).checked().unwrap_err();
    assert!(refused.to_string().starts_with("`problem_docs` must be"), "{refused}");
}

#[tokio::test]
async fn settings_without_meaning_are_refused() {
    let layer = layer(MemoryAdapter::new());
    for url in [
        "",
        "not a url",
        "x",
        "*",
        "/docs/idempotency",
        "api.example.com:443",
        "javascript:alert(1)",
        "data:text/html,x",
        "ftp://api.example.com/docs",
        "https:api.example.com",
        "https://api.example.com/docs#section",
    ] {
        let refused = layer.clone().problem_docs(url).checked().unwrap_err();
        let rule = "`problem_docs` must be an http or https URL without a fragment, not ";
        assert_eq!(refused.to_string(), format!("{rule}{url:?}"));
    }
    for url in ["http://localhost/docs", "HTTPS://api.example.com/docs?page=1"] {
        assert!(layer.clone().problem_docs(url).checked().is_ok(), "{url}");
    }

    const NO_DATA: &str = "the adapter does not support stored data";
    let without = |lacks: fn(&mut Abilities)| {
        let mut store = Hooked::default();
        store.lacks = Some(lacks);
        Arc::new(store)
    };
    let no_leases: fn(&mut Abilities) = |it| it.leases = false;
    for (lacks, rule) in
        [(NO_STORED_DATA, NO_DATA), (no_leases, "the adapter does not support leases")]
    {
        let layer = DedupLayer::idempotency_key(principal(), without(lacks));
        assert_eq!(layer.checked().unwrap_err().to_string(), rule);
    }
    let on_arrival = DedupLayer::on_arrival(provider::STANDARD_WEBHOOKS, without(NO_STORED_DATA));
    let refused = on_arrival.compare_payload(key::body_digest(), OnMismatch::Refuse);
    assert_eq!(refused.checked().unwrap_err().to_string(), NO_DATA);
}
