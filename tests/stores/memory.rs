//! The memory adapter: its memory, its capacity and its clock.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::sync::Arc;
use std::time::Duration;

use allocation_counter::AllocationInfo;
use futures_util::FutureExt;
use http::{HeaderMap, StatusCode};
use support::rows;
use tower_dedup::adapter::MemoryAdapter;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, StoredResponse, Token,
};
use tower_dedup::adapter::maintenance::{MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};

use super::observed::observed;

const KEYS: usize = 100_000;
const RETENTION: Duration = Duration::from_secs(1_000);
const LEASE: Duration = Duration::from_secs(10);
const FIRST: ClaimReply = ClaimReply::first(1, false);

fn key(id: usize) -> DedupKey {
    DedupKey::new("memory", &format!("evt_{id:020}")).unwrap()
}

fn keys(ids: std::ops::Range<usize>) -> Vec<DedupKey> {
    ids.map(key).collect()
}

fn terms() -> CallTerms {
    leased_for(LEASE)
}

fn leased_for(lease: Duration) -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, lease)
}

fn on_claim() -> CallTerms {
    CallTerms::on_claim(Token::random(), RETENTION)
}

fn now<T>(call: impl Future<Output = T>) -> T {
    call.now_or_never().expect("the memory adapter never waits")
}

/// Claims a key that is complete at once.
fn remember(adapter: &MemoryAdapter, key: &DedupKey) -> Result<ClaimReply, StoreError> {
    now(adapter.claim(key, &on_claim()))
}

fn is_full<T>(reply: Result<T, StoreError>) -> bool {
    reply.is_err_and(|error| error.kind() == StoreErrorKind::Full)
}

fn measure(run: impl FnOnce()) -> AllocationInfo {
    allocation_counter::measure(run)
}

fn roomy() -> MemoryAdapter {
    // Shards fill unevenly: with a tenth of room, one run in 200 would fill a shard.
    MemoryAdapter::with_capacity(KEYS + KEYS / 8)
}

/// Claims leave nothing behind, whether one key is claimed at a time or all are.
#[test]
fn complete_key_takes_140_bytes_at_most() {
    for at_a_time in [1, KEYS] {
        let adapter = roomy();
        let info = measure(|| {
            for start in (0..KEYS).step_by(at_a_time) {
                let (keys, mine) = (keys(start..start + at_a_time), terms());
                for key in &keys {
                    assert_eq!(now(adapter.claim(key, &mine)).unwrap(), FIRST);
                }
                for key in &keys {
                    assert_eq!(now(adapter.complete(key, &mine)).unwrap(), CompleteReply::Held);
                }
            }
        });
        assert_eq!(now(rows(&adapter)), KEYS as u64);
        let bytes = info.bytes_current as f64 / KEYS as f64;
        assert!((80.0..140.0).contains(&bytes), "{bytes}");
    }
}

#[test]
fn purge_frees_memory_in_every_cycle() {
    let adapter = roomy();
    let cycle = |start: usize| {
        let info = measure(|| {
            for id in start..start + KEYS {
                remember(&adapter, &key(id)).unwrap();
            }
            adapter.advance(RETENTION + PURGE_GRACE);
            assert_eq!(now(adapter.purge(u32::MAX)).unwrap(), KEYS as u64);
        });
        assert!(info.bytes_max < 140 * KEYS as u64, "{}", info.bytes_max);
        info.bytes_current
    };
    assert_eq!([0, KEYS, 2 * KEYS].map(cycle), [0, 0, 0]);
}

#[test]
fn insertions_reuse_the_memory_of_expired_keys() {
    const FEW: usize = KEYS / 4;
    // Shards fill unevenly, in every cycle.
    let adapter = MemoryAdapter::with_capacity(FEW + FEW / 8);
    let fill = |start: usize| {
        let info = measure(|| {
            for id in start..start + FEW {
                remember(&adapter, &key(id)).unwrap();
            }
        });
        adapter.advance(RETENTION);
        info.bytes_current
    };
    let most = fill(0) / 20;
    for cycle in 1..4 {
        let grown = fill(cycle * FEW);
        assert!(grown < most, "{cycle}: {grown}");
    }
}

#[test]
fn call_allocates_its_future_and_little_else() {
    let (adapter, keys) = (roomy(), keys(0..10_000));
    let allocations = |call: &dyn Fn(&DedupKey)| {
        measure(|| keys.iter().for_each(call)).count_total as f64 / keys.len() as f64
    };
    let mine = terms();
    let claims = allocations(&|key| drop(now(adapter.claim(key, &mine))));
    let completions = allocations(&|key| drop(now(adapter.complete(key, &mine))));
    let duplicates = allocations(&|key| drop(remember(&adapter, key)));
    // One box for the future.
    assert!(claims < 1.2 && completions < 1.1, "{claims} {completions}");
    assert_eq!(duplicates.to_bits(), 1_f64.to_bits());
}

#[test]
fn full_adapter_refuses_only_the_keys_without_room() {
    let without_a_limit = MemoryAdapter::with_capacity(usize::MAX);
    assert_eq!(remember(&without_a_limit, &key(0)).unwrap(), FIRST);
    for (asked, held) in [(0, 1), (1, 1), (2, 2), (17, 17), (2_047, 2_047)] {
        let adapter = MemoryAdapter::with_capacity(asked);
        for key in keys(0..held) {
            assert_eq!(remember(&adapter, &key).unwrap(), FIRST, "{asked}");
        }
        let new = key(held);
        assert!(is_full(remember(&adapter, &new)), "{asked}");
        assert!(is_full(now(adapter.claim(&new, &terms()))), "{asked}");
        assert!(is_full(now(adapter.renew(&new, &terms()))), "{asked}");
        assert!(is_full(now(adapter.complete(&new, &terms()))), "{asked}");
        // No key has made room for the new one.
        for key in keys(0..held) {
            let again = remember(&adapter, &key).unwrap();
            assert!(matches!(again, ClaimReply::Duplicate(_)), "{asked}");
        }
        assert_eq!(now(adapter.get(&new)).unwrap(), None, "{asked}");
        // The room of an expired key is free.
        adapter.advance(RETENTION);
        assert_eq!(remember(&adapter, &new).unwrap(), FIRST, "{asked}");
    }
}

#[test]
fn sharded_adapters_hold_at_least_85_per_cent_of_their_capacity() {
    for capacity in [2_048, 5_000, 20_000, 100_000] {
        let adapter = MemoryAdapter::with_capacity(capacity);
        let first_refused =
            (0..=capacity).find(|id| is_full(remember(&adapter, &key(*id)))).unwrap();
        assert!(first_refused > capacity * 85 / 100, "{capacity}: {first_refused}");
    }
}

#[test]
fn stored_responses_are_bounded_in_bytes() {
    let adapter = MemoryAdapter::with_capacity(100).max_stored_bytes(10_000);
    let body = vec![b'x'; 3_000];
    let response = StoredResponse::new(StatusCode::OK, HeaderMap::new(), body.into());
    let (mine, response) = (terms(), Arc::new(response));
    let complete =
        |id| now(adapter.complete(&key(id), &mine.clone().with_response(response.clone())));
    for id in 0..4 {
        assert_eq!(now(adapter.claim(&key(id), &mine)).unwrap(), FIRST);
        assert_eq!(complete(id).unwrap(), CompleteReply::Held);
    }
    assert!(is_full(now(adapter.claim(&key(4), &mine))));
    assert!(is_full(complete(4)));
    // A row that is there keeps its reply, and a removed row frees its bytes.
    assert_eq!(complete(0).unwrap(), CompleteReply::Held);
    now(adapter.forget(&key(0))).unwrap();
    assert_eq!(now(adapter.claim(&key(4), &mine)).unwrap(), FIRST);
    assert_eq!(complete(4).unwrap(), CompleteReply::Held);
    adapter.advance(RETENTION);
    for id in 10..14 {
        assert_eq!(remember(&adapter, &key(id)).unwrap(), FIRST, "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn leases_and_retention_follow_paused_time() {
    let adapter = MemoryAdapter::new();
    let (key, mine) = (key(0), terms());
    adapter.claim(&key, &mine).await.unwrap();
    tokio::time::advance(LEASE - Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&key, &terms()).await.unwrap(), ClaimReply::InFlight);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&key, &terms()).await.unwrap(), ClaimReply::first(2, true));
    adapter.complete(&key, &mine).await.unwrap();
    // A claim sets a new `expires_at`, so the retention counts from the takeover.
    tokio::time::advance(RETENTION - Duration::from_millis(1)).await;
    assert!(matches!(adapter.claim(&key, &terms()).await.unwrap(), ClaimReply::Duplicate(_)));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(adapter.claim(&key, &terms()).await.unwrap(), FIRST);
}

#[test]
fn threads_without_a_runtime_use_real_time() {
    let adapter = MemoryAdapter::new();
    let brief = leased_for(Duration::from_millis(1));
    now(adapter.claim(&key(0), &brief)).unwrap();
    // The lease lapses by the real clock.
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(now(adapter.claim(&key(0), &terms())).unwrap(), ClaimReply::first(2, true));
}

#[test]
fn key_claimed_many_times_takes_the_memory_of_one() {
    let adapter = MemoryAdapter::with_capacity(10);
    let info = measure(|| {
        for _ in 0..20_000 {
            let mine = terms();
            now(adapter.claim(&key(0), &mine)).unwrap();
            now(adapter.release(&key(0), &mine)).unwrap();
            adapter.advance(Duration::from_millis(1));
        }
    });
    assert!(info.bytes_current < 1_500, "{}", info.bytes_current);
    adapter.advance(RETENTION + PURGE_GRACE);
    assert_eq!(now(adapter.purge(10)).unwrap(), 1);
}

const NEARLY_FULL: &str = "nearly full: the memory store has reached four fifths of its capacity";

fn record(adapter: &MemoryAdapter, ids: std::ops::Range<usize>) {
    for key in keys(ids) {
        assert_eq!(remember(adapter, &key).unwrap(), FIRST);
    }
}

#[test]
fn adapter_that_is_four_fifths_full_is_logged_once_an_hour() {
    observed(async |log, _| {
        let adapter = MemoryAdapter::with_capacity(10);
        record(&adapter, 0..8);
        assert_eq!(log.all(NEARLY_FULL).len(), 0);
        record(&adapter, 8..10);
        assert_eq!(log.all(NEARLY_FULL).len(), 1);
        // A forgotten key leaves a row, which the next new keys replace.
        let forget = |ids| keys(ids).iter().for_each(|key| _ = now(adapter.forget(key)).unwrap());
        forget(0..10);
        record(&adapter, 10..20);
        assert_eq!(log.all(NEARLY_FULL).len(), 1);
        forget(10..20);
        adapter.advance(Duration::from_secs(3_601));
        record(&adapter, 20..30);
        assert_eq!(log.all(NEARLY_FULL).len(), 2);
    });
}

/// A subscriber that calls the store, which is allowed because no lock is held.
struct Asks(Arc<MemoryAdapter>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Asks {
    fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        assert!(now(self.0.stats()).unwrap().rows > 0);
    }
}

#[test]
fn adapter_logs_while_it_holds_no_lock() {
    use tracing_subscriber::layer::SubscriberExt;
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let adapter = Arc::new(MemoryAdapter::with_capacity(5));
        let subscriber = tracing_subscriber::registry().with(Asks(Arc::clone(&adapter)));
        tracing::subscriber::with_default(subscriber, || record(&adapter, 0..5));
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(20)).expect("the subscriber waits for a lock");
}
