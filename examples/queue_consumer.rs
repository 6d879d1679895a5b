//! A queue consumer: each message takes effect once, although a queue delivers at least once.
//!
//! Messages are lines of JSON on stdin, which stand for the queue of your broker.

use std::collections::VecDeque;
use std::{env, time::Duration};

use serde::Deserialize;
use tower_dedup::provider::STRIPE;
use tower_dedup::{BoxError, DedupKey, Deduplicator, RunOutcome, adapter};

#[derive(Deserialize)]
struct Message {
    /// The id of the event.
    id: String,
    amount: i64,
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let url = env::var("DATABASE_URL").unwrap_or("sqlite://queue.db".to_owned());
    let store = adapter::connect(&url).await?;
    let dedup = Deduplicator::new(store);

    let mut queue: VecDeque<String> = std::io::stdin().lines().collect::<Result<_, _>>()?;
    while let Some(message) = queue.pop_front() {
        if !is_done(&dedup, &message).await {
            // The queue delivers the message again, later.
            tokio::time::sleep(Duration::from_millis(100)).await;
            queue.push_back(message);
        }
    }
    // Completions that have not reached the store yet.
    dedup.drain().await;
    Ok(())
}

/// Returns `true` if the message may be acknowledged.
async fn is_done(dedup: &Deduplicator, message: &str) -> bool {
    let (key, message) = match read(message) {
        Ok(read) => read,
        // A broker would park it: it would fail again.
        Err(error) => {
            tracing::error!(%error, message, "malformed");
            return true;
        }
    };
    match dedup.run(&key, async |_| handle(&message).await).await {
        Ok(RunOutcome::First(())) => true,
        Ok(RunOutcome::Duplicate(_)) => {
            println!("duplicate: {}", message.id);
            true
        }
        // In flight elsewhere, failed, or the store is away: the message may still have to run.
        other => {
            tracing::warn!(?other, "not handled");
            false
        }
    }
}

fn read(message: &str) -> Result<(DedupKey, Message), BoxError> {
    let message: Message = serde_json::from_str(message)?;
    // The layer's key of the same event, if it comes by webhook too; of a connected account, that is `account|id`.
    Ok((DedupKey::new(STRIPE.name(), &message.id)?, message))
}

/// If it writes to the store's database, use `Deduplicator::transactional`: then the closure of `run` begins with
/// `event.begin(&pool)`, and ends with `tx.commit()`.
async fn handle(message: &Message) -> Result<(), BoxError> {
    println!("once: {}, {}", message.id, message.amount);
    Ok(())
}
