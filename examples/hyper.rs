//! The layer on a bare hyper server: no router, no framework.
//!
//! ```text
//! cargo run --example hyper
//! ```
//!
//! The server's request body is hyper's `Incoming`. The handler's is `Full<Bytes>`, because the layer
//! has buffered it. The store is in memory, so a restart loses the keys.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::signal;
use tokio::time::{sleep, timeout};
use tower::{ServiceBuilder, service_fn};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, Delivery, key};

/// Runs for the first delivery of an event only.
async fn on_event(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    // Only deduplicated requests have a `Delivery`. A GET, for example, has none.
    if let Some(delivery) = request.extensions().get::<Delivery>() {
        println!("{:?}, attempt {}", delivery.key(), delivery.attempt());
    }
    Ok(Response::new(Full::from("handled\n")))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new());
    let handle = dedup.handle();
    let service = ServiceBuilder::new().layer(dedup).service(service_fn(on_event));

    let address = SocketAddr::from(([127, 0, 0, 1], 3000));
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("run twice: curl -i http://{address} -H 'webhook-id: msg_1' -d '{{\"paid\": 42}}'");

    let connections = GracefulShutdown::new();
    let mut interrupt = pin!(signal::ctrl_c());
    #[cfg(unix)] // SIGTERM ends a container.
    let mut terminate = signal::unix::signal(signal::unix::SignalKind::terminate())?;
    #[cfg(windows)]
    let mut terminate = signal::windows::ctrl_close()?;
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // For example out of file descriptors, which is temporary.
                    eprintln!("cannot accept: {error}");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            stopped = &mut interrupt => break stopped?,
            _ = terminate.recv() => break,
        };
        let service = TowerToHyperService::new(service.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("connection: {error}");
            }
        });
    }
    drop(listener);

    // Open connections first, since they may still bring deliveries; then those deliveries whose
    // client has hung up.
    let drained = timeout(Duration::from_secs(30), async {
        connections.shutdown().await;
        handle.drain().await;
    });
    if drained.await.is_err() {
        eprintln!("exiting with {} deliveries running", handle.running());
    }
    Ok(())
}
