//! Lists the events that a sender could not deliver and that the receiver has not handled, and changes nothing. With
//! `--run`, it runs them. Each takes effect once, also if the sender still delivers it later: the receiver answers that
//! delivery as a duplicate.
//!
//! **`--run` completes each event for which `on_event` returns `Ok`, and `on_event` only prints. First put the function
//! of your handler there, or the events are lost.**
//!
//! It reads the sender's own list from stdin: of Stripe `GET /v1/events?delivery_success=false`, of GitHub
//! an array of `GET /repos/OWNER/REPO/hooks/HOOK/deliveries/DELIVERY`.

use std::env;

use axum::body::Bytes;
use axum::http::Request;
use serde_json::Value;
use tower_dedup::adapter::maintenance::KeyState;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider::{GITHUB, STRIPE};
use tower_dedup::{BoxError, Deduplicator, Delivery, RunOutcome, adapter};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args: Vec<_> = env::args().skip(1).collect();
    let (sender, runs) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["stripe"] => (STRIPE, false),
        ["stripe", "--run"] => (STRIPE, true),
        ["github"] => (GITHUB, false),
        ["github", "--run"] => (GITHUB, true),
        _ => return Err("usage: catch_up stripe|github [--run] < LIST".into()),
    };
    // The store of the receiver, so that both have the same keys.
    let url = env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL")?;
    let store = adapter::connect(&url).await?;
    let dedup = Deduplicator::new(store.clone());

    let list: Value = serde_json::from_reader(std::io::stdin())?;
    let list = list.get("data").unwrap_or(&list).as_array().ok_or("the list is no array")?;
    let mut left = 0;
    // The newest is the first in the list.
    for delivery in list.iter().rev() {
        let (head, body) = request(delivery)?.into_parts();
        let found = sender.extractor().extract(&RequestRef::new(&head, &body))?;
        let Extracted::Keys(keys) = found else { continue }; // GitHub's ping is no event
        for event in keys.events() {
            if !runs {
                let state = store.get(event.key()).await?.map(|entry| entry.state);
                if state != Some(KeyState::Complete) {
                    let state = state.map_or("unknown".to_owned(), |state| state.to_string());
                    println!("not handled: {} ({state})", event.key().id());
                }
                continue;
            }
            let run = dedup.run(event.clone(), async |event| on_event(&event, &body).await);
            match run.await {
                Ok(RunOutcome::First(())) => {}
                Ok(RunOutcome::Duplicate(_)) => println!("duplicate: {}", event.key().id()),
                other => {
                    eprintln!("{}: {other:?}", event.key().id());
                    left += 1;
                }
            }
        }
    }
    dedup.drain().await;
    if left > 0 { Err(format!("{left} events are left: run it again").into()) } else { Ok(()) }
}

/// Makes the request by which the sender would deliver the event.
fn request(delivery: &Value) -> Result<Request<Bytes>, BoxError> {
    let mut request = Request::post("/");
    let sent = delivery.pointer("/request/headers").and_then(Value::as_object);
    for (name, value) in sent.into_iter().flatten() {
        request = request.header(name, value.as_str().unwrap_or_default());
    }
    let body = delivery.pointer("/request/payload").unwrap_or(delivery);
    Ok(request.body(body.to_string().into())?)
}

/// Put the function here that the receiver's handler calls. If it writes to the store's database, use
/// `Deduplicator::transactional`, and begin here with `event.begin(&pool)`.
async fn on_event(event: &Delivery, body: &Bytes) -> Result<(), BoxError> {
    let (sender, kind) = (event.key().namespace(), event.event_type().unwrap_or("event"));
    println!("{sender} {} {kind}: {} bytes", event.id(), body.len());
    Ok(())
}
