//! Responses that are stored and replayed, under every ledger that can replay.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, ETAG, LOCATION, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tower::{Layer, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::StoredData;
use tower_dedup::adapter::maintenance::KeyState;
use tower_dedup::testing::{Fault, StoreCall};
use tower_dedup::{BoxError, DedupAnswer, DedupLayer, Replay};

use support::ledgers::{Inner, Replaying, Setup};
use support::log::Log;
use support::words::by_word;
use support::{
    Body, Handler, answered, by_header, dedup_key, faulty, request, send, state, stored_data, until,
};

type Boxed = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

async fn layer<S: Setup<Ledger: Replaying>>(setup: &S) -> DedupLayer<S::Ledger> {
    S::Ledger::replaying(setup.layer(by_header()).await)
}

/// A handler whose responses have the number of the run, some headers, and 201 in place of 200.
pub(crate) fn numbered(handler: &Handler) -> impl Inner {
    let runs = handler.clone();
    handler.service().map_response(move |mut response: Response<Body>| {
        if response.status() == 200 {
            *response.status_mut() = StatusCode::CREATED;
        }
        let (run, headers) = (runs.runs(), response.headers_mut());
        headers.insert(LOCATION, format!("/runs/{run}").parse().unwrap());
        for (name, value) in
            [(CONTENT_TYPE, "application/json"), (SET_COOKIE, "session=secret"), (ETAG, "\"1\"")]
        {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response.map(|_| Full::from(format!("{{\"run\":{run}}}")))
    })
}

/// The status, result header, content type and body.
async fn seen<B>(response: Response<B>) -> (u16, Option<String>, Option<String>, Bytes)
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
    let (result, kind) = (
        response.headers().get("x-dedup-result").map(text),
        response.headers().get(CONTENT_TYPE).map(text),
    );
    let status = response.status().as_u16();
    (status, result, kind, response.into_body().collect().await.unwrap().to_bytes())
}

fn first(run: u8) -> (u16, Option<String>, Option<String>, Bytes) {
    (201, None, Some("application/json".to_owned()), format!("{{\"run\":{run}}}").into())
}

fn again(run: u8) -> (u16, Option<String>, Option<String>, Bytes) {
    let (status, _, kind, body) = first(run);
    (status, Some("duplicate".to_owned()), kind, body)
}

fn empty() -> (u16, Option<String>, Option<String>, Bytes) {
    (200, Some("duplicate".to_owned()), None, Bytes::new())
}

async fn duplicate_gets_the_first_response<S: Setup<Ledger: Replaying>>(setup: S) {
    let handler = Handler::default();
    let inner = numbered(&handler);
    let service = layer(&setup).await.layer(inner.clone());
    let answer = send(&service, request("a")).await;
    assert_eq!(answer.headers()[SET_COOKIE], "session=secret", "the first has all of it");
    assert_eq!(seen(answer).await, first(1));
    for _ in 0..2 {
        let answer = send(&service, request("a")).await;
        assert!(!answer.headers().contains_key(SET_COOKIE), "a cookie is for one client");
        assert!(!answer.headers().contains_key(ETAG), "not one of the chosen headers");
        assert_eq!(answer.extensions().get(), Some(&DedupAnswer::Duplicate));
        assert_eq!(seen(answer).await, again(1));
    }
    // Another process, another event.
    let other = layer(&setup).await.layer(inner);
    let answer = other.clone().oneshot(request("a")).await.unwrap();
    assert_eq!(seen(answer).await, again(1));
    let answer = other.oneshot(request("b")).await.unwrap();
    assert_eq!(seen(answer).await, first(2));
    assert_eq!(handler.runs(), 2);
}

async fn delivery_that_waited_gets_the_first_response<S: Setup<Ledger: Replaying>>(setup: S) {
    let (handler, layer) = (Handler::default(), layer(&setup).await);
    handler.hold();
    let (handle, service) = (layer.handle(), layer.layer(numbered(&handler)));
    let one = tokio::spawn(service.clone().oneshot(request("a")));
    handler.running(1).await;
    let two = tokio::spawn(service.oneshot(request("a")));
    until(|| handle.waiting() == 1).await;
    handler.release();
    assert_eq!(seen(one.await.unwrap().unwrap()).await, first(1));
    assert_eq!(seen(two.await.unwrap().unwrap()).await, again(1));
}

support::on_ledgers!(
    [lease_memory = OnMemory, transactional_sqlite = InSqlite, transactional_postgres = InPostgres,],
    duplicate_gets_the_first_response,
    delivery_that_waited_gets_the_first_response,
);

/// The text of a body, the body, and whether it is stored.
type BodyOfSize = (&'static str, fn() -> Boxed, bool);

/// Returns a service that answers with this body.
fn with_body(
    body: impl Fn() -> Boxed + Clone + Send + 'static,
) -> impl tower::Service<
    Request<Body>,
    Response = Response<Boxed>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<Boxed>, Infallible>> + Send,
> + Clone
+ Send
+ 'static {
    tower::service_fn(move |_: Request<Body>| {
        let response = Response::new(body());
        async move { Ok::<_, Infallible>(response) }
    })
}

/// Returns a body of these frames, without a size hint.
fn frames(frames: Vec<Result<Frame<Bytes>, BoxError>>) -> Boxed {
    BodyExt::boxed_unsync(StreamBody::new(futures_util::stream::iter(frames)))
}

fn data(bytes: &'static str) -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(Bytes::from_static(bytes.as_bytes())))
}

fn replaying(adapter: &Arc<MemoryAdapter>, replay: Replay) -> DedupLayer {
    DedupLayer::new(by_header(), Arc::clone(adapter)).replay(replay)
}

#[tokio::test]
async fn body_at_the_limit_is_stored_and_a_larger_one_is_not() {
    fn announced(body: &'static str) -> Boxed {
        BodyExt::boxed_unsync(Full::from(body).map_err(|never| match never {}))
    }
    let bodies: [BodyOfSize; 4] = [
        ("abcdef", || frames(vec![data("abc"), data("def")]), true),
        ("abcdefghijk", || frames(vec![data("abc"), data("defg"), data("hij"), data("k")]), false),
        ("abcdef", || announced("abcdef"), true),
        // A body that announces a larger length is not read at all.
        ("abcdefg", || announced("abcdefg"), false),
    ];
    for (text, body, is_stored) in bodies {
        let layer = replaying(&Arc::new(MemoryAdapter::new()), Replay::new().body_limit(6));
        let service = layer.layer(with_body(body));
        assert_eq!(seen(send(&service, request("a")).await).await.3, text);
        let again = seen(service.oneshot(request("a")).await.unwrap()).await;
        let expected = if is_stored { text } else { "" };
        assert_eq!((again.1.as_deref(), &again.3[..]), (Some("duplicate"), expected.as_bytes()));
    }
}

/// The second identity is complete for another event: the delivery is a duplicate of that event, and its key is not
/// looked at.
#[tokio::test]
async fn response_of_the_event_that_the_second_identity_names_is_replayed() {
    let (handler, keys) = (Handler::default(), by_header().content_identity());
    let service =
        DedupLayer::new(keys, MemoryAdapter::new()).replay(Replay::new()).layer(numbered(&handler));
    let event = |id: &str, body: &'static str| request(id).map(|_| Body::from(body));
    for (id, body, expected) in [
        ("k1", "one", first(1)),
        ("k2", "two", first(2)),
        ("k1", "one", again(1)),
        ("k1", "two", again(2)),
        ("k1", "three", again(1)),
        ("k3", "one", again(1)),
    ] {
        assert_eq!(seen(service.clone().oneshot(event(id, body)).await.unwrap()).await, expected);
    }
    assert_eq!(handler.runs(), 2);
}

#[tokio::test]
async fn response_with_trailers_reaches_the_first_delivery_whole_and_is_not_stored() {
    let adapter = Arc::new(MemoryAdapter::new());
    let service = replaying(&adapter, Replay::new()).layer(with_body(|| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("1"));
        frames(vec![data("abc"), Ok(Frame::trailers(trailers))])
    }));
    let answer = send(&service, request("a")).await;
    // Otherwise a server would announce a length, and send no trailers.
    assert_eq!(http_body::Body::size_hint(answer.body()).exact(), None);
    let collected = answer.into_body().collect().await.unwrap();
    assert_eq!(collected.trailers().unwrap()["x-checksum"], "1");
    assert_eq!(collected.to_bytes(), "abc");
    assert_eq!(seen(service.oneshot(request("a")).await.unwrap()).await, empty());
}

/// The head leaves at once, because its client reads such a body as it comes, and it may never end.
#[tokio::test(start_paused = true)]
async fn stream_is_not_read_and_not_stored() {
    let accel = HeaderName::from_static("x-accel-buffering");
    for (name, value, is_stream) in [
        (CONTENT_TYPE, "text/event-stream", true),
        (CONTENT_TYPE, "Text/Event-Stream; charset=utf-8", true),
        (CONTENT_TYPE, "multipart/x-mixed-replace;boundary=a", true),
        (accel.clone(), "no", true),
        (accel, "yes", false),
        (CONTENT_TYPE, "text/event-streams", false),
        (CONTENT_TYPE, "application/json", false),
    ] {
        let (log, _guard) = Log::of_this_thread();
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel::<&'static str>();
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let header = name.clone();
        let inner = tower::service_fn(move |_: Request<Body>| {
            let frames = futures_util::stream::unfold(Arc::clone(&receiver), async |receiver| {
                let event = receiver.lock().await.recv().await?;
                Some((data(event), receiver))
            });
            let response = Response::builder().header(&header, value);
            let response = response.body(BodyExt::boxed_unsync(StreamBody::new(frames))).unwrap();
            async move { Ok::<_, Infallible>(response) }
        });
        let service = replaying(&Arc::new(MemoryAdapter::new()), Replay::new()).layer(inner);
        let send_all = || {
            events.send("data: 1").unwrap();
            events.send("data: 2").unwrap();
            drop(events);
        };
        let started = tokio::time::Instant::now();
        let first = if is_stream {
            // Nothing was sent yet.
            let first = send(&service, request("a")).await;
            send_all();
            first
        } else {
            send_all();
            send(&service, request("a")).await
        };
        assert_eq!(started.elapsed(), Duration::ZERO, "{name}: {value}");
        assert_eq!(first.headers()[&name], value);
        assert_eq!(seen(first).await.3, "data: 1data: 2");
        let again = seen(service.oneshot(request("a")).await.unwrap()).await;
        if is_stream {
            assert_eq!(again, empty(), "{name}: {value}");
            assert_eq!(log.beginning("response not stored")[0]["why"], "its body is a stream");
        } else {
            assert_eq!(again.3, "data: 1data: 2", "{name}: {value}");
        }
    }
}

/// A body that ends in an error or a panic counts as a failed handler: the retry runs.
#[tokio::test]
async fn response_body_that_breaks_is_a_failure() {
    struct Panics;
    impl http_body::Body for Panics {
        type Data = Bytes;
        type Error = BoxError;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            panic!("the body was told to panic")
        }
    }
    let adapter = Arc::new(MemoryAdapter::new());
    let layer = replaying(&adapter, Replay::new());
    let broken = layer.layer(with_body(|| frames(vec![data("abc"), Err("broken".into())])));
    let answer = broken.oneshot(request("a")).await.unwrap();
    assert_eq!(answered(&answer), (500, Some("broken-response")));
    assert_eq!(answer.extensions().get(), Some(&DedupAnswer::BrokenResponse));
    assert_eq!(state(&adapter, "a").await, Some(KeyState::Released));

    let panics = layer.layer(with_body(|| BodyExt::boxed_unsync(Panics)));
    assert!(tokio::spawn(panics.oneshot(request("a"))).await.unwrap_err().is_panic());
    assert_eq!(state(&adapter, "a").await, Some(KeyState::Released));

    let whole = layer.layer(with_body(|| frames(vec![data("abc")])));
    assert_eq!(&seen(whole.clone().oneshot(request("a")).await.unwrap()).await.3[..], b"abc");
    assert_eq!(&seen(whole.oneshot(request("a")).await.unwrap()).await.3[..], b"abc");
}

/// A body without an end delays neither the completion nor the answer.
#[tokio::test(start_paused = true)]
async fn response_that_takes_too_long_is_completed_without_it() {
    let adapter = Arc::new(MemoryAdapter::new());
    let layer = replaying(&adapter, Replay::new()).body_timeout(Duration::from_secs(3));
    let service = layer.layer(with_body(|| {
        let frames = futures_util::stream::unfold(0, |tick| async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            (tick < 5).then(|| (data("tick "), tick + 1))
        });
        BodyExt::boxed_unsync(StreamBody::new(Box::pin(frames)))
    }));
    let started = tokio::time::Instant::now();
    let answer = send(&service, request("a")).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(&seen(answer).await.3[..], b"tick tick tick tick tick ");
    assert_eq!(seen(service.oneshot(request("a")).await.unwrap()).await, empty());
}

/// While a completion is on its way to the store, this process answers from memory.
#[tokio::test(start_paused = true)]
async fn response_is_replayed_while_its_completion_is_pending() {
    let store = faulty(MemoryAdapter::new());
    let handler = Handler::default();
    let layer = DedupLayer::new(by_header(), Arc::clone(&store))
        .replay(Replay::new())
        .store_timeout(Duration::from_millis(50));
    let handle = layer.handle();
    let service = layer.layer(numbered(&handler));
    store.set(StoreCall::Complete, Fault::Fail);
    let answer = send(&service, request("a")).await;
    assert_eq!(seen(answer).await, first(1));
    assert_eq!(stored_data(&*store, &dedup_key("a")).await, None);
    let answer = send(&service, request("a")).await;
    assert_eq!(seen(answer).await, again(1));
    store.set(StoreCall::Complete, Fault::None);
    handle.drain().await;
    let answer = service.oneshot(request("a")).await.unwrap();
    assert_eq!(seen(answer).await, again(1));
    assert_eq!(handler.runs(), 1);
}

/// A response to a multi-event delivery is the answer to other events, too. A response to one event
/// with two identities is not.
#[tokio::test]
async fn response_to_a_multi_event_delivery_is_not_stored_and_either_identity_replays() {
    let handler = Handler::default();
    let service = DedupLayer::new(by_word(), MemoryAdapter::new())
        .replay(Replay::new())
        .layer(numbered(&handler));
    let deliver = async |words: &'static str| {
        let request = Request::post("/").body(Body::from(words)).unwrap();
        seen(service.clone().oneshot(request).await.unwrap()).await
    };
    assert_eq!(deliver("a b").await, first(1));
    assert_eq!(deliver("a b").await, empty());
    assert_eq!(deliver("a").await, empty());
    assert_eq!(deliver("evt_1=paid").await, first(2));
    assert_eq!(deliver("evt_2=paid").await, again(2));
    assert_eq!(deliver("evt_1").await, again(2));
    // A stored response answers for its own event, not for a delivery with other events.
    assert_eq!(deliver("evt_1 a").await, empty());
}

#[tokio::test]
async fn chosen_headers_are_stored_with_all_their_values_if_they_are_text() {
    let adapter = Arc::new(MemoryAdapter::new());
    let names = ["link", "x-odd"].map(HeaderName::from_static);
    let layer = replaying(&adapter, Replay::new().headers(names));
    let respond = |odd: &'static [u8]| {
        tower::service_fn(move |_: Request<Body>| async move {
            let response = Response::builder()
                .header(CONTENT_TYPE, "text/plain")
                .header("link", "<a>")
                .header("link", "<b>")
                .header("x-odd", HeaderValue::from_bytes(odd).unwrap());
            Ok::<_, Infallible>(response.body(Body::from("x")).unwrap())
        })
    };
    let service = layer.layer(respond("\u{e9}".as_bytes()));
    send(&service, request("a")).await;
    let answer = service.oneshot(request("a")).await.unwrap();
    let links: Vec<_> = answer.headers().get_all("link").iter().collect();
    assert_eq!(links, ["<a>", "<b>"]);
    assert_eq!(answer.headers()["x-odd"].as_bytes(), "\u{e9}".as_bytes());
    assert!(!answer.headers().contains_key(CONTENT_TYPE));
    // A header that is no text is not stored in part.
    let service = layer.layer(respond(b"\xff"));
    service.clone().oneshot(request("b")).await.unwrap();
    assert_eq!(seen(service.oneshot(request("b")).await.unwrap()).await, empty());
}

/// A response to HEAD has no body, but the response to the event has one.
#[tokio::test]
async fn response_to_a_head_request_is_not_stored() {
    let adapter = Arc::new(MemoryAdapter::new());
    let service = DedupLayer::new(by_header(), Arc::clone(&adapter))
        .methods([Method::GET])
        .replay(Replay::new())
        .layer(with_body(|| frames(Vec::new())));
    let mut head = request("a");
    *head.method_mut() = Method::HEAD;
    assert_eq!(seen(service.clone().oneshot(head).await.unwrap()).await.0, 200);
    let stored = stored_data(&*adapter, &dedup_key("a")).await;
    assert_eq!(stored, Some(StoredData::default()));
}

#[test]
fn headers_of_one_client_or_connection_are_refused() {
    for name in [
        "set-cookie",
        "content-encoding",
        "content-length",
        "transfer-encoding",
        "connection",
        "date",
    ] {
        let replay = Replay::new().headers([CONTENT_TYPE, HeaderName::from_static(name)]);
        let layer = DedupLayer::new(by_header(), MemoryAdapter::new()).replay(replay);
        let error = layer.checked().unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "`replay` must be without headers of one client or one connection, not [{name:?}]"
            )
        );
    }
}
