//! Both layers over hyper alone, without axum and without the feature `axum`.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::client::conn::http1::handshake;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tower::{ServiceBuilder, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::verify::VerifyLayer;
use tower_dedup::{DedupLayer, Delivery, provider, testing};

const SECRET: &str = "It's a Secret to Everybody";

#[tokio::test]
async fn event_runs_once_on_a_server_of_hyper() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let delivery: &Delivery = request.extensions().get().expect("the layer's extension");
        assert_eq!(delivery.id(), "5b1f");
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("handled")))) }
    });
    let verify = VerifyLayer::new(provider::GITHUB.verifier(SECRET).unwrap());
    let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new()).require_verified();
    let service = ServiceBuilder::new().layer(verify).layer(dedup).service(handler);

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service = TowerToHyperService::new(service);
        http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
    });
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = handshake(stream).await.unwrap();
    tokio::spawn(connection);

    let event = || {
        let event = testing::request(provider::GITHUB, "/hook", "5b1f");
        let mut event = testing::sign(event, provider::GITHUB, SECRET);
        event.headers_mut().insert("host", address.to_string().parse().unwrap());
        event
    };
    let mut forged = event();
    forged.headers_mut().remove("x-hub-signature-256");
    let mut answers = Vec::new();
    for request in [forged, event(), event()] {
        let response = sender.send_request(request).await.unwrap();
        let result = response.headers().get("x-dedup-result").cloned();
        answers
            .push((response.status().as_u16(), result.map(|it| it.to_str().unwrap().to_owned())));
    }
    let duplicate = Some("duplicate".to_owned());
    assert_eq!(answers, [(401, None), (200, None), (200, duplicate)]);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
