//! The fence: messages that arrive at Redis after the release of their token has returned.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::inspect::MaintenanceAdapter;
use tower_dedup::adapter::{RedisAdapter, RedisOptions};

use crate::support::proxy::{Cut, Proxy};
use crate::support::redis::{Server, command};
use crate::support::time_travel::{milliseconds, shift_redis};
use crate::support::{dedup_key, on_claim, terms};

const BOUND: Duration = Duration::from_secs(10);
const MINUTE: Duration = Duration::from_secs(60);

/// A process whose message is late, and another process.
struct Fence {
    proxy: Proxy,
    slow: RedisAdapter,
    adapter: RedisAdapter,
    server: Server,
}

impl Fence {
    async fn new() -> Self {
        let server = Server::start();
        let proxy = Proxy::to("127.0.0.1", server.port()).await;
        let connect = async |port| {
            let options = RedisOptions::new().call_timeout(BOUND);
            let options = options.response_timeout(BOUND / 2);
            let url = format!("redis://127.0.0.1:{port}");
            RedisAdapter::connect_with(&url, options).await.unwrap()
        };
        let (slow, adapter) = (connect(proxy.port()).await, connect(server.port()).await);
        let fence = Self { proxy, slow, adapter, server };
        fence.warm().await;
        fence
    }

    /// The server knows all scripts, and the connections are open.
    async fn warm(&self) {
        let (keys, mine) = (dedup_key("warm"), terms());
        self.slow.claim(&keys, &mine).await.unwrap();
        self.slow.renew(&keys, &mine).await.unwrap();
        self.slow.release(&keys, &mine).await.unwrap();
        self.slow.forget(&keys).await.unwrap();
    }

    /// Makes a call whose message is held back after `spared` messages. Its caller goes away.
    async fn holds_back<T: std::fmt::Debug>(&self, spared: usize, call: impl Future<Output = T>) {
        self.proxy.set(spared, Cut::Late);
        tokio::select! {
            reply = call => panic!("not held back: {reply:?}"),
            () = self.proxy.until_held(spared) => {}
        }
    }

    fn pass(&self, time: Duration) {
        shift_redis(&mut self.server.connection().unwrap(), "dedup", -milliseconds(time));
    }

    fn value(&self, key: &DedupKey) -> Vec<u8> {
        let name = format!("dedup:test:{}", key.id());
        command(&["GET", &name]).query(&mut self.server.connection().unwrap()).unwrap()
    }

    /// The row before the claim.
    async fn prepare(&self, row: Row, keys: &DedupKey) {
        let other = terms();
        if row == Row::Missing {
            return;
        }
        self.adapter.claim(keys, &other).await.unwrap();
        match row {
            Row::Missing => {}
            Row::Released => self.adapter.release(keys, &other).await.unwrap(),
            Row::Lapsed => self.pass(2 * MINUTE),
            Row::Expired => {
                self.adapter.complete(keys, &other).await.unwrap();
                self.pass(61 * MINUTE);
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Row {
    Missing,
    Released,
    Lapsed,
    Expired,
}

const ROWS: [Row; 4] = [Row::Missing, Row::Released, Row::Lapsed, Row::Expired];

/// A claim was repeated after an error of the connection, and its first message arrives after the release.
#[tokio::test]
async fn late_copy_of_a_claim_changes_nothing() {
    let fence = Fence::new().await;
    for of_terms in [terms, || on_claim(&terms())] {
        for row in ROWS {
            let (keys, mine) = (dedup_key("copied"), of_terms());
            fence.prepare(row, &keys).await;
            fence.holds_back(0, fence.slow.claim(&keys, &mine)).await;
            let claimed = fence.adapter.claim(&keys, &mine).await.unwrap();
            assert!(matches!(claimed, ClaimReply::First { .. }), "{row:?}: {claimed:?}");
            fence.adapter.release(&keys, &mine).await.unwrap();
            let before = fence.value(&keys);
            fence.proxy.deliver().await;
            assert_eq!(fence.value(&keys), before, "{row:?}");
            let claimed = fence.adapter.claim(&keys, &of_terms()).await.unwrap();
            assert!(matches!(claimed, ClaimReply::First { .. }), "{row:?}: {claimed:?}");
            fence.server.run::<()>(&["FLUSHDB"]);
        }
    }
}

/// A release changes only the version of the row of another token.
#[tokio::test]
async fn release_of_another_token_raises_the_version_only() {
    let fence = Fence::new().await;
    let payloads = |key: &DedupKey| [(key.clone(), [7; 32])];
    for (id, is_complete) in [("leased", false), ("complete", true)] {
        let (keys, mine) = (dedup_key(id), terms());
        let mine = mine.with_event_types([(keys.clone(), "order.paid")]);
        fence.adapter.claim(&keys, &mine).await.unwrap();
        if is_complete {
            let done = mine.with_payloads(payloads(&keys));
            fence.adapter.complete(&keys, &done).await.unwrap();
        }
        for other in [terms(), on_claim(&terms())] {
            let before = fence.value(&keys);
            fence.adapter.release(&keys, &other).await.unwrap();
            let after = fence.value(&keys);
            let version = |value: &[u8]| {
                value[23..28].iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
            };
            assert_eq!(version(&after), version(&before) + 1, "{id}");
            assert_eq!((&after[..23], &after[28..]), (&before[..23], &before[28..]), "{id}");
        }
    }
}

/// Versions have five bytes. The one after the last is 0, and a claim names it as any other.
#[tokio::test]
async fn row_of_the_last_version_is_released_and_claimed() {
    let fence = Fence::new().await;
    let keys = dedup_key("a");
    fence.prepare(Row::Released, &keys).await;
    let mut value = fence.value(&keys);
    value[23..28].fill(0xff);
    let mut set = command(&["SET", "dedup:test:a"]);
    set.arg(&value).exec(&mut fence.server.connection().unwrap()).unwrap();
    fence.adapter.release(&keys, &terms()).await.unwrap();
    assert_eq!(fence.value(&keys)[23..28], [0; 5]);
    let claimed = fence.adapter.claim(&keys, &terms()).await.unwrap();
    assert_eq!(claimed, ClaimReply::first(2, false));
    assert_eq!(fence.value(&keys)[23..28], [0, 0, 0, 0, 1]);
}

/// A row that changes before each write leaves the outcome unknown, and not in flight.
#[tokio::test]
async fn claim_of_a_row_that_changes_each_time_is_of_unknown_outcome() {
    let fence = Fence::new().await;
    let (keys, mine) = (dedup_key("a"), terms());
    fence.prepare(Row::Released, &keys).await;
    let mut claim = Box::pin(fence.slow.claim(&keys, &mine));
    for number in 0..6 {
        fence.proxy.set(0, Cut::Late);
        tokio::select! {
            reply = &mut claim => panic!("after {number}: {reply:?}"),
            () = fence.proxy.until_held(0) => {}
        }
        fence.adapter.release(&keys, &terms()).await.unwrap();
        fence.proxy.deliver().await;
    }
    let error = timeout(BOUND, claim).await.unwrap().unwrap_err();
    assert!(error.is_transient() && error.kind() == tower_dedup::StoreErrorKind::Unavailable);
    fence.adapter.claim(&keys, &terms()).await.unwrap();
}
