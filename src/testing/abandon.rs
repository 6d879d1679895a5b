//! A process that dies.

use std::collections::BTreeSet;
use std::fmt;

use bytes::Bytes;
use http::Request;
use http_body::Body;

use super::redeliver::buffered;
use crate::adapter::contract::ClaimReply;
use crate::key::{Extracted, RequestRef};
use crate::layer::DedupLayer;
use crate::ledger::Ledger;

/// Claims the keys of a request like a process that dies afterwards. No process renews, completes
/// or releases the keys.
///
/// The keys are in flight until the layer's [`lease`](DedupLayer::lease) lapses. The delivery after
/// that runs as a takeover. [`MemoryAdapter`](crate::adapter::MemoryAdapter) follows tokio's paused
/// time, so a test may advance it past the lease. With another store, give the layer a short lease
/// and wait. On arrival, the keys are complete, and the event is lost.
///
/// Panics if the request has no key, or if the store does not claim each key for the first time.
///
/// ```
/// # #[cfg(feature = "memory")]
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use axum::{Router, routing::post};
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::{DedupLayer, DedupAnswer, Delivery, provider, testing};
///
/// # tokio::time::pause();
/// let dedup = DedupLayer::new(provider::GITHUB, MemoryAdapter::new());
/// let dedup = dedup.wait(Duration::ZERO);
/// let event = || testing::request(provider::GITHUB, "/", "5b1f");
/// testing::abandon(&dedup, event()).await;
///
/// let handler = async |delivery: Delivery| delivery.is_takeover().to_string();
/// let app: Router = Router::new().route("/", post(handler).layer(dedup));
/// let early = testing::redeliver(app.clone(), event(), 1).await;
/// assert_eq!(early.count(DedupAnswer::InFlight), 1);
///
/// tokio::time::advance(Duration::from_secs(61)).await;
/// let late = testing::redeliver(app, event(), 1).await;
/// assert_eq!(late.get(0).body(), "true");
/// # });
/// ```
pub async fn abandon<L: Ledger, I, B>(layer: &DedupLayer<L, I>, request: Request<B>)
where
    B: Body<Data = Bytes, Error: fmt::Debug>,
{
    let (head, body) = buffered(request).await;
    let (adapter, key, terms) = layer.claim_parts();
    let keys = match key.extract(&RequestRef::new(&head, &body)) {
        Ok(Extracted::Keys(keys)) => keys,
        Ok(_) => panic!("the request has no key"),
        Err(error) => panic!("the key of the request cannot be read: {error}"),
    };
    let identities: BTreeSet<_> =
        keys.events().iter().flat_map(|event| event.identities()).collect();
    for identity in identities {
        match adapter.claim(identity, &terms).await {
            Ok(ClaimReply::First { .. }) => {}
            Ok(reply) => panic!("the keys of the request were claimed before: {reply:?}"),
            Err(error) => panic!("the store returned an error: {error}"),
        }
    }
}
