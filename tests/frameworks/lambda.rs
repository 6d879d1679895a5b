//! `lambda_http::run` serves an axum `Router` with the layer on its route.

use std::time::Duration;

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::{Router, routing::post};
use lambda_http::request::LambdaRequest;
use lambda_http::{Adapter, Context, LambdaEvent};
use serde_json::{Value, json};
use tower::{Service, ServiceExt};
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::{DedupLayer, Delivery, key};

/// An event of an HTTP API (payload format 2.0) as Lambda gives it to the runtime.
fn event(id: &str) -> LambdaEvent<LambdaRequest> {
    let event = json!({
        "version": "2.0",
        "routeKey": "POST /webhooks",
        "rawPath": "/webhooks",
        "rawQueryString": "",
        "headers": { "content-type": "application/json", "webhook-id": id },
        "requestContext": {
            "accountId": "123456789012",
            "apiId": "api",
            "domainName": "hooks.example.com",
            "http": {
                "method": "POST",
                "path": "/webhooks",
                "protocol": "HTTP/1.1",
                "sourceIp": "192.0.2.1",
                "userAgent": "test",
            },
            "requestId": "request",
            "routeKey": "POST /webhooks",
            "stage": "$default",
            "time": "12/Mar/2026:19:03:58 +0000",
            "timeEpoch": 1_773_342_238_000_i64,
        },
        "body": "eyJwYWlkIjo0Mn0=",
        "isBase64Encoded": true,
    });
    LambdaEvent::new(serde_json::from_value(event).unwrap(), Context::default())
}

#[tokio::test]
async fn second_event_of_lambda_is_a_duplicate() {
    let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new());
    let handle = dedup.handle();
    let drain = from_fn(move |request: Request, next: Next| {
        let handle = handle.clone();
        async move {
            let response = next.run(request).await;
            let _ = tokio::time::timeout(Duration::from_secs(2), handle.drain()).await;
            response
        }
    });
    let on_event = async |event: Delivery, body: String| format!("{} {body}", event.id());
    let app = Router::new().route("/webhooks", post(on_event).layer(dedup).layer(drain));
    // The service that `lambda_http::run(app)` makes.
    let mut service = Adapter::from(app);
    let mut deliver = async |id| {
        let response = service.ready().await.unwrap().call(event(id)).await.unwrap();
        let response = serde_json::to_value(response).unwrap();
        let result = response["headers"]["x-dedup-result"].clone();
        (response["statusCode"].clone(), result, response["body"].clone())
    };
    let ran = |id: &str| (json!(200), Value::Null, json!(format!("{id} {{\"paid\":42}}")));
    assert_eq!(deliver("msg_1").await, ran("msg_1"));
    let (status, result, _) = deliver("msg_1").await;
    assert_eq!((status, result), (json!(200), json!("duplicate")));
    assert_eq!(deliver("msg_2").await, ran("msg_2"));
}
