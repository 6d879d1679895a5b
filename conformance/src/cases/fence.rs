//! A release is a fence: a call whose message reaches the server after the release has returned has no effect.
//!
//! A case holds each message of a call in turn, from the first one on, and drops the call.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply,
};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::{DedupKey, StoreError};

use crate::case::Case;
use crate::driver::{
    FIRST, RETENTION, SLACK, complete_at_once, is_duplicate, key, leased, prepare, rows,
};
use crate::proxy::{Cut, Proxy};
use crate::trace::Traced;

const BOTH: [fn() -> CallTerms; 2] = [leased, complete_at_once];
/// How long after a release its claim arrives.
const WAITS: [Duration; 2] = [Duration::ZERO, PURGE_GRACE.saturating_sub(SLACK)];
/// More messages than one call sends.
const MANY: usize = 32;

/// A store with a second adapter: its messages go through a proxy.
struct World {
    store: Case,
    adapter: Arc<Traced>,
    proxy: Proxy,
    late: Arc<Traced>,
    /// A call that is not held ends in this time: on a busy machine it is longer.
    patience: Duration,
}

/// What became of a call whose message was to be held.
#[derive(Debug, PartialEq)]
enum Held {
    /// A message of it is held.
    Late,
    /// The call has ended: it has fewer messages.
    Ended,
    /// The call has ended beside a message that was none of it, as a test whether a connection is alive.
    Beside,
}

impl World {
    async fn new(store: Case) -> Self {
        let (host, port) = store.server();
        let proxy = Proxy::to(&host, port).await;
        let (adapter, late) = (store.adapter(), store.connect(proxy.port()).await);
        // Opens connections and prepares statements: the messages of the cases are those of the calls.
        let mut five_calls = Duration::ZERO;
        for terms in BOTH {
            let (key, mine) = (key("prepared"), terms());
            for _ in 0..2 {
                let begun = Instant::now();
                late.claim(&key, &mine).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.claim(&key, &terms()).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.forget(&key).await.unwrap();
                five_calls = begun.elapsed();
            }
            late.renew(&key, &mine).await.unwrap();
        }
        let patience = five_calls.max(Duration::from_millis(25));
        Self { store, adapter, proxy, late, patience }
    }

    /// Makes a row of another token.
    async fn prepare(&self, row: &str, key: &DedupKey) {
        prepare(&self.store, row, &[(key.clone(), leased())]).await;
    }

    /// Makes a call by the late adapter until its message after `spared` others is held.
    async fn hold<T>(
        &self,
        spared: usize,
        call: &mut (impl Future<Output = Result<T, StoreError>> + Unpin),
    ) -> Held {
        self.proxy.set(spared, Cut::Late);
        let held = async {
            self.proxy.until_held(spared).await;
            // A call whose message it is cannot end.
            tokio::time::sleep(self.patience).await;
        };
        tokio::select! {
            biased;
            reply = call => assert!(reply.is_ok(), "a call that is not held: {:?}", reply.err()),
            () = held => return Held::Late,
        }
        if self.proxy.sprung().is_none() {
            return Held::Ended;
        }
        self.proxy.deliver().await;
        Held::Beside
    }

    /// Holds each message of a call in turn, and drops the call; each time the key is another one. `check` follows while
    /// the message is held.
    async fn each_message<T>(
        &self,
        name: &str,
        begin: impl AsyncFn(&DedupKey),
        call: impl AsyncFn(&DedupKey) -> Result<T, StoreError>,
        check: impl AsyncFn(&DedupKey),
    ) {
        let (mut late, mut spared, mut beside) = (0, 0, 0);
        while spared < MANY {
            let key = &key(&format!("{name}, message {spared}, beside {beside}"));
            begin(key).await;
            let mut call = Box::pin(call(key));
            match self.hold(spared, &mut call).await {
                Held::Ended => break,
                // The message was none of the call: the same place again.
                Held::Beside if beside < MANY => beside += 1,
                Held::Beside => spared += 1,
                Held::Late => {
                    drop(call);
                    late += 1;
                    spared += 1;
                    check(key).await;
                }
            }
        }
        assert!(late > 0, "{name}: no message passed the proxy: see `RemoteStore::connect`");
    }

    /// Delivers the message that is held. Work that the late adapter does for it is over then.
    async fn deliver(&self, held: &DedupKey) {
        self.proxy.deliver().await;
        let probe = key(&format!("{}, probe", held.id()));
        for _ in 0..3 {
            self.late.claim(&probe, &leased()).await.unwrap();
        }
    }

    /// Asserts that the key is free, and claims it.
    async fn is_free(&self, key: &DedupKey, next: &CallTerms) {
        let claimed = self.adapter.claim(key, next).await.unwrap();
        let is_first = matches!(claimed, ClaimReply::First { .. });
        assert!(is_first, "{:?} is free, but {claimed:?}", key.id());
    }

    async fn renews(&self, key: &DedupKey, terms: &CallTerms, expected: RenewReply) {
        assert_eq!(self.adapter.renew(key, terms).await.unwrap(), expected, "{:?}", key.id());
    }
}

/// A claim whose message arrives after its release, at once or an hour later, leaves the key free: whatever the row was,
/// under both permanences. The release keeps an expired row for that hour.
pub(super) async fn late_claim_has_no_effect_after_its_release(store: Case) {
    let world = World::new(store).await;
    for (terms, waits) in BOTH.into_iter().flat_map(|terms| WAITS.map(|waits| (terms, waits))) {
        for row in ["none", "released", "lapsed", "expired lapsed"] {
            let mine = &terms();
            let name = format!("{row}, {:?}, released {waits:?} ago", mine.permanence());
            let begin = async |key: &DedupKey| {
                world.prepare(row, key).await;
                if row.starts_with("expired") {
                    world.store.advance(PURGE_GRACE / 2).await;
                }
            };
            let check = async |key: &DedupKey| {
                world.adapter.release(key, mine).await.unwrap();
                if !waits.is_zero() {
                    world.store.advance(waits).await;
                    world.adapter.purge(1_000).await.unwrap();
                }
                world.deliver(key).await;
                world.is_free(key, &terms()).await;
                world.renews(key, mine, RenewReply::Lost).await;
            };
            let call = async |key: &DedupKey| world.late.claim(key, mine).await;
            world.each_message(&name, begin, call, check).await;
        }
    }
}

/// A renewal whose message arrives after the release does not take the key back.
pub(super) async fn late_renewal_has_no_effect_after_its_release(store: Case) {
    let world = World::new(store).await;
    for row in ["none", "leased", "lapsed"] {
        let mine = &leased();
        let begin = async |key: &DedupKey| {
            prepare(&world.store, row, &[(key.clone(), mine.clone())]).await;
        };
        let check = async |key: &DedupKey| {
            world.adapter.release(key, mine).await.unwrap();
            world.deliver(key).await;
            world.renews(key, mine, RenewReply::Lost).await;
            world.is_free(key, &leased()).await;
        };
        let call = async |key: &DedupKey| world.late.renew(key, mine).await;
        world.each_message(row, begin, call, check).await;
    }
}

/// A forgotten key is released for every token: a claim that has met the row before does not take it.
pub(super) async fn late_claim_of_a_forgotten_key_has_no_effect(store: Case) {
    let world = World::new(store).await;
    for (terms, row) in
        BOTH.into_iter().flat_map(|terms| ["released", "lapsed"].map(|row| (terms, row)))
    {
        let (mine, removed) = (&terms(), Cell::new(false));
        let name = format!("{row}, {:?}", mine.permanence());
        let check = async |key: &DedupKey| {
            let forgotten = world.adapter.forget(key).await.unwrap();
            world.deliver(key).await;
            // A claim that has taken effect before it is forgotten is not late.
            if forgotten != ForgetReply::InFlight {
                assert_eq!(forgotten, ForgetReply::Removed, "{:?}", key.id());
                world.is_free(key, &terms()).await;
                removed.set(true);
            }
        };
        let begin = async |key: &DedupKey| world.prepare(row, key).await;
        let call = async |key: &DedupKey| world.late.claim(key, mine).await;
        world.each_message(&name, begin, call, check).await;
        assert!(removed.get(), "{name}: every claim has taken effect before its key is forgotten");
    }
}

/// An operator's call that is late must not let an event run again that was completed after it.
pub(super) async fn late_forget_undoes_no_later_completion(store: Case) {
    let world = World::new(store).await;
    for row in ["lapsed", "complete"] {
        let removed = Cell::new(false);
        let begin = async |key: &DedupKey| world.prepare(row, key).await;
        let check = async |key: &DedupKey| {
            let (adapter, mine) = (&world.adapter, leased());
            let forgotten = adapter.forget(key).await.unwrap();
            // The late call has taken effect before, if the key is missing.
            let is_late = forgotten == ForgetReply::Removed;
            assert!(is_late || forgotten == ForgetReply::Missing, "{:?}: {forgotten:?}", key.id());
            removed.set(removed.get() || is_late);
            assert_eq!(adapter.claim(key, &mine).await.unwrap(), FIRST, "{:?}", key.id());
            assert_eq!(adapter.complete(key, &mine).await.unwrap(), CompleteReply::Held);
            world.deliver(key).await;
            let again = adapter.claim(key, &leased()).await.unwrap();
            assert!(is_duplicate(&again), "{:?} is complete, but {again:?}", key.id());
        };
        let call = async |key: &DedupKey| world.late.forget(key).await;
        world.each_message(row, begin, call, check).await;
        assert!(removed.get(), "{row}: every call has taken effect before");
    }
}

/// The version of a row that was purged does not come back with the next row of its key: a late claim would take it, and
/// two handlers would run.
pub(super) async fn late_take_of_a_purged_row_takes_no_other_row(store: Case) {
    let (world, mine) = (World::new(store).await, &leased());
    let begin = async |key: &DedupKey| world.prepare("expired lapsed", key).await;
    let check = async |key: &DedupKey| {
        world.store.advance(PURGE_GRACE).await;
        world.adapter.purge(1_000).await.unwrap();
        let holder = leased();
        world.is_free(key, &holder).await;
        world.deliver(key).await;
        world.renews(key, &holder, RenewReply::Held).await;
    };
    let call = async |key: &DedupKey| world.late.claim(key, mine).await;
    world.each_message("purged", begin, call, check).await;
}

/// A release in two steps, an update and then an insertion, lets a claim of its token in between.
pub(super) async fn release_is_one_step(store: Case) {
    let world = World::new(store).await;
    for terms in BOTH {
        for spared in 0..MANY {
            let mine = &terms();
            let key = &key(&format!("{:?}, message {spared}", mine.permanence()));
            let mut release = world.late.release(key, mine);
            match world.hold(spared, &mut release).await {
                Held::Ended => break,
                Held::Beside => {}
                Held::Late => {
                    // It was called before the release, and arrives now.
                    world.adapter.claim(key, mine).await.unwrap();
                    tokio::join!(release, world.proxy.deliver()).0.unwrap();
                }
            }
            world.is_free(key, &terms()).await;
        }
    }
}

/// A purge leaves the row of a release for an hour: one that the release has made, and one of others that had expired
/// 59 minutes before.
pub(super) async fn release_keeps_every_row_for_an_hour(store: Case) {
    let adapter = store.adapter();
    let terms = [leased(), complete_at_once()];
    let old = ["old leased", "old at once"].map(key);
    for key in &old {
        adapter.claim(key, &complete_at_once()).await.unwrap();
    }
    store.advance(RETENTION + PURGE_GRACE - SLACK).await;
    for (old, mine) in old.iter().zip(&terms) {
        adapter.release(old, mine).await.unwrap();
        adapter.release(&key(&format!("new {:?}", mine.permanence())), mine).await.unwrap();
    }
    store.advance(PURGE_GRACE - SLACK).await;
    adapter.purge(100).await.unwrap();
    assert_eq!(rows(&adapter).await, 4, "the rows of four releases that returned 59 minutes ago");
    store.advance(2 * SLACK).await;
    adapter.purge(100).await.unwrap();
    assert_eq!(rows(&adapter).await, 0, "an hour later");
}
