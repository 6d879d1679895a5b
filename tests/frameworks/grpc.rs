//! A tonic method calls a `Deduplicator`. The layer is no substitute: a failed call has the HTTP status 200.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::{Router, extract::Request, routing::post};
use tonic::{Code, Status, client, server};
use tonic_prost::ProstCodec;
use tower::service_fn;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupKey, DedupLayer, Deduplicator, RunOutcome, key};

const METHOD: &str = "/orders.Orders/Place";

type Calls = Arc<AtomicU32>;

/// Fails at the first call.
async fn place(calls: &Calls) -> Result<String, Status> {
    match calls.fetch_add(1, Ordering::Relaxed) {
        0 => Err(Status::internal("no stock")),
        _ => Ok("placed".to_owned()),
    }
}

async fn on_order(dedup: &Deduplicator, calls: &Calls, id: &str) -> Result<String, Status> {
    let key = DedupKey::new("orders", id).map_err(|_| Status::invalid_argument("the id"))?;
    match dedup.run(&key, async |_| place(calls).await).await {
        Ok(RunOutcome::First(reply)) => Ok(reply),
        Ok(RunOutcome::Duplicate(_)) => Ok("duplicate".to_owned()),
        // In flight elsewhere, or failed: it may still have to run.
        _ => Err(Status::unavailable("deliver again")),
    }
}

/// The router that tonic's generated code makes of a method.
fn routes<F>(method: impl Fn(String) -> F + Clone + Send + Sync + 'static) -> Router
where
    F: Future<Output = Result<String, Status>> + Send + 'static,
{
    let handler = async move |request: Request| {
        let method = service_fn(move |request: tonic::Request<String>| {
            let reply = method(request.into_inner());
            async { reply.await.map(tonic::Response::new) }
        });
        let mut grpc = server::Grpc::new(ProstCodec::<String, String>::default());
        Ok::<_, Infallible>(grpc.unary(method, request).await)
    };
    Router::new().route(METHOD, post(handler))
}

async fn call(router: &Router, id: &str) -> Result<String, Code> {
    let mut client = client::Grpc::new(tonic::service::Routes::from(router.clone()));
    client.ready().await.unwrap();
    let mut request = tonic::Request::new(id.to_owned());
    request.metadata_mut().insert("event-id", id.parse().unwrap());
    let codec = ProstCodec::<String, String>::default();
    let reply = client.unary(request, METHOD.parse().unwrap(), codec).await;
    reply.map(tonic::Response::into_inner).map_err(|status| status.code())
}

#[tokio::test]
async fn method_with_a_deduplicator_runs_again_after_a_failure_and_then_never() {
    let (dedup, calls) = (Deduplicator::new(MemoryAdapter::new()), Calls::default());
    let counted = calls.clone();
    let router = routes(move |id| {
        let (dedup, calls) = (dedup.clone(), calls.clone());
        async move { on_order(&dedup, &calls, &id).await }
    });
    assert_eq!(call(&router, "order_17").await, Err(Code::Unavailable));
    assert_eq!(call(&router, "order_17").await.as_deref(), Ok("placed"));
    assert_eq!(call(&router, "order_17").await.as_deref(), Ok("duplicate"));
    assert_eq!(counted.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn layer_takes_a_failed_call_for_a_success() {
    let calls = Calls::default();
    let counted = calls.clone();
    let router = routes(move |_| {
        let calls = calls.clone();
        async move { place(&calls).await }
    });
    let key = key::header("event-id").namespace("orders");
    let router = router.layer(DedupLayer::new(key, MemoryAdapter::new()));
    assert_eq!(call(&router, "order_17").await, Err(Code::Internal));
    // A duplicate's answer is empty, which is no message of gRPC.
    assert!(call(&router, "order_17").await.is_err());
    assert_eq!(counted.load(Ordering::Relaxed), 1);
}
