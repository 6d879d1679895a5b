//! The on-arrival ledger never sends a claim that it could not release.

use std::sync::Arc;

use tower::Layer;
use tower_dedup::DedupLayer;
use tower_dedup::adapter::{MaintenanceAdapter, MemoryAdapter};
use tower_dedup::testing::{Fault, StoreCall};

use crate::support::{Handler, by_header, dedup_key, faulty, request, result, send};

/// The number of claims that may wait for their reply, or for their release, at once.
const SLOTS: usize = 16_384;

/// If the reply of a claim is lost, and there is no room to release the claim, then the retry is a duplicate of a
/// run that never happened.
#[tokio::test(start_paused = true)]
async fn claim_without_room_for_its_release_is_503_and_is_not_sent() {
    let (store, handler) = (faulty(MemoryAdapter::new()), Handler::default());
    let layer = DedupLayer::on_arrival(by_header(), Arc::clone(&store)).max_running(SLOTS + 1);
    let (handle, service) = (layer.handle(), layer.layer(handler.service()));
    store.set(StoreCall::Claim, Fault::LoseReply);
    store.set(StoreCall::Release, Fault::Fail);
    let start = |id: String| {
        let service = service.clone();
        tokio::spawn(async move { send(&service, request(&id)).await.status() })
    };
    let deliveries: Vec<_> = (0..SLOTS).map(|number| start(number.to_string())).collect();
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap(), 503);
    }
    assert_eq!(handle.pending_writes(), SLOTS);
    assert_eq!(start("a".to_owned()).await.unwrap(), 503);
    assert!(store.get(&dedup_key("a")).await.unwrap().is_none(), "the claim was sent");

    store.set_all(Fault::None);
    handle.drain().await;
    assert_eq!(result(&send(&service, request("a")).await), None);
    assert_eq!(handler.runs(), 1);
}
