use axum::{Router, routing::post};
use tower_dedup::{DedupLayer, adapter::MemoryAdapter, key};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let dedup = DedupLayer::new(key::header("webhook-id").namespace("acme"), MemoryAdapter::new());
    let app = Router::new().route("/acme", post(on_event).layer(dedup));
    axum::serve(tokio::net::TcpListener::bind("127.0.0.1:3000").await?, app).await
}

async fn on_event(body: String) {
    println!("once: {body}");
}
