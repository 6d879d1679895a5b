//! A release is a fence: a call whose message reaches the server after the release has returned has no effect.
//!
//! A case holds each message of a call in turn, from the first one on, and drops the call.

use std::sync::Arc;
use std::time::Duration;

use super::super::driver::{
    FIRST, LEASE, RETENTION, SLACK, complete_at_once, is_duplicate, key, leased, rows,
};
use super::super::proxy::{Cut, Proxy};
use super::super::store::RemoteStore;
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, StoreFuture,
};
use crate::adapter::inspect::{ForgetReply, MaintenanceAdapter, PURGE_GRACE};
use crate::key::DedupKey;

const ROWS: [&str; 4] = ["none", "released", "lapsed", "expired"];
/// More messages than one call sends.
const MANY: usize = 32;

/// A store with a second adapter: its messages go through a proxy.
struct World<S: RemoteStore> {
    store: S,
    adapter: Arc<S::Adapter>,
    proxy: Proxy,
    late: Arc<S::Adapter>,
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

impl<S: RemoteStore> World<S> {
    async fn new(store: S) -> Self {
        let (host, port) = store.server();
        let proxy = Proxy::to(&host, port).await;
        let (adapter, late) = (store.adapter(), store.connect(proxy.port()).await);
        // Opens connections and prepares statements: the messages of the cases are those of the calls.
        for terms in [leased, complete_at_once] {
            let (key, mine) = (key("prepared"), terms());
            for _ in 0..2 {
                late.claim(&key, &mine).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.claim(&key, &terms()).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.forget(&key).await.unwrap();
            }
            late.renew(&key, &mine).await.unwrap();
        }
        Self { store, adapter, proxy, late }
    }

    /// Makes the row that a call finds.
    async fn prepare(&self, row: &str, key: &DedupKey) {
        let theirs = leased();
        if row != "none" {
            self.adapter.claim(key, &theirs).await.unwrap();
        }
        match row {
            "released" => self.adapter.release(key, &theirs).await.unwrap(),
            "lapsed" => self.store.advance(LEASE + SLACK).await,
            "expired" => self.store.advance(RETENTION + PURGE_GRACE / 2).await,
            _ => {}
        }
    }

    /// Makes a call by the late adapter until its message after `spared` others is held.
    async fn hold<T>(&self, spared: usize, call: &mut StoreFuture<'_, T>) -> Held {
        self.proxy.set(spared, Cut::Late);
        let held = async {
            self.proxy.until_held(spared).await;
            // A call whose message it is cannot end. Any other one ends in this time, also on a busy machine.
            tokio::time::sleep(Duration::from_millis(25)).await;
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

    /// Delivers the message that is held. Work that the late adapter does for it is over then.
    async fn deliver(&self, label: &str) {
        self.proxy.deliver().await;
        let probe = key(&format!("{label}, probe"));
        for _ in 0..3 {
            self.late.claim(&probe, &leased()).await.unwrap();
        }
    }

    /// Asserts that the key is free, and claims it.
    async fn is_free(&self, label: &str, key: &DedupKey, next: &CallTerms) {
        let claimed = self.adapter.claim(key, next).await.unwrap();
        assert!(
            matches!(claimed, ClaimReply::First { .. }),
            "{label}: the key is free, but {claimed:?}"
        );
    }

    async fn renews(&self, label: &str, key: &DedupKey, terms: &CallTerms, expected: RenewReply) {
        assert_eq!(self.adapter.renew(key, terms).await.unwrap(), expected, "{label}");
    }
}

/// Holds each message of a call in turn. `begin` makes the label, `call` the call; `check` follows while the message is
/// held.
macro_rules! each_message {
    ($world:ident, $name:expr, |$key:ident, $label:ident| $begin:block, $call:expr, $check:block) => {
        let (mut late, mut spared, mut beside) = (0, 0, 0);
        while spared < MANY {
            let $label = &format!("{}, message {spared}, beside {beside}", $name);
            let $key = &key($label);
            $begin
            let mut call = $call;
            match $world.hold(spared, &mut call).await {
                Held::Ended => break,
                // The message was none of the call: the same place again.
                Held::Beside if beside < MANY => beside += 1,
                Held::Beside => spared += 1,
                Held::Late => {
                    drop(call);
                    late += 1;
                    spared += 1;
                    $check
                }
            }
        }
        assert!(late > 0, "{}: no message passed the proxy: see `RemoteStore::connect`", $name);
    };
}

/// A claim whose message arrives after its release, at once or an hour later, leaves the key free: whatever the row was,
/// under both permanences. The release keeps an expired row for that hour.
pub(super) async fn late_claim_has_no_effect_after_its_release<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    for terms in [leased, complete_at_once] {
        for waits in [Duration::ZERO, PURGE_GRACE - SLACK] {
            for row in ROWS {
                let mine = &terms();
                let name = format!("{row}, {:?}, released {waits:?} ago", mine.permanence());
                each_message!(
                    world,
                    name,
                    |key, label| {
                        world.prepare(row, key).await;
                    },
                    world.late.claim(key, mine),
                    {
                        world.adapter.release(key, mine).await.unwrap();
                        if !waits.is_zero() {
                            world.store.advance(waits).await;
                            world.adapter.purge(1_000).await.unwrap();
                        }
                        world.deliver(label).await;
                        world.is_free(label, key, &terms()).await;
                        world.renews(label, key, mine, RenewReply::Lost).await;
                    }
                );
            }
        }
    }
}

/// A renewal whose message arrives after the release does not take the key back.
pub(super) async fn late_renewal_has_no_effect_after_its_release<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    for row in ["none", "leased", "lapsed"] {
        let mine = &leased();
        each_message!(
            world,
            row,
            |key, label| {
                if row != "none" {
                    world.adapter.claim(key, mine).await.unwrap();
                }
                if row == "lapsed" {
                    world.store.advance(LEASE + SLACK).await;
                }
            },
            world.late.renew(key, mine),
            {
                world.adapter.release(key, mine).await.unwrap();
                world.deliver(label).await;
                world.renews(label, key, mine, RenewReply::Lost).await;
                world.is_free(label, key, &leased()).await;
            }
        );
    }
}

/// A forgotten key is released for every token: a claim that has met the row before does not take it.
pub(super) async fn late_claim_of_a_forgotten_key_has_no_effect<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    for terms in [leased, complete_at_once] {
        for row in ["released", "lapsed"] {
            let mine = &terms();
            let name = format!("{row}, {:?}", mine.permanence());
            let mut removed = 0;
            each_message!(
                world,
                name,
                |key, label| {
                    world.prepare(row, key).await;
                },
                world.late.claim(key, mine),
                {
                    let forgotten = world.adapter.forget(key).await.unwrap();
                    world.deliver(label).await;
                    // A claim that has taken effect before it is forgotten is not late.
                    if forgotten != ForgetReply::InFlight {
                        assert_eq!(forgotten, ForgetReply::Removed, "{label}");
                        world.is_free(label, key, &terms()).await;
                        removed += 1;
                    }
                }
            );
            assert!(
                removed > 0,
                "{name}: every claim has taken effect before its key is forgotten"
            );
        }
    }
}

/// An operator's call that is late must not let an event run again that was completed after it.
pub(super) async fn late_forget_undoes_no_later_completion<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    for row in ["lapsed", "complete"] {
        each_message!(
            world,
            row,
            |key, label| {
                let theirs = leased();
                world.prepare("lapsed", key).await;
                if row == "complete" {
                    world.adapter.complete(key, &theirs).await.unwrap();
                }
            },
            world.late.forget(key),
            {
                assert_eq!(
                    world.adapter.forget(key).await.unwrap(),
                    ForgetReply::Removed,
                    "{label}"
                );
                let mine = leased();
                assert_eq!(world.adapter.claim(key, &mine).await.unwrap(), FIRST, "{label}");
                assert_eq!(world.adapter.complete(key, &mine).await.unwrap(), CompleteReply::Held);
                world.deliver(label).await;
                let again = world.adapter.claim(key, &leased()).await.unwrap();
                assert!(is_duplicate(&again), "{label}: the key is complete, but {again:?}");
            }
        );
    }
}

/// The version of a row that was purged does not come back with the next row of its key: a late claim would take it, and
/// two handlers would run.
pub(super) async fn late_take_of_a_purged_row_takes_no_other_row<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    let mine = &leased();
    each_message!(
        world,
        "purged",
        |key, label| {
            world.prepare("expired", key).await;
        },
        world.late.claim(key, mine),
        {
            world.store.advance(PURGE_GRACE).await;
            world.adapter.purge(1_000).await.unwrap();
            let holder = leased();
            world.is_free(label, key, &holder).await;
            world.deliver(label).await;
            world.renews(label, key, &holder, RenewReply::Held).await;
        }
    );
}

/// A release in two steps, an update and then an insertion, lets a claim of its token in between.
pub(super) async fn release_is_one_step<S: RemoteStore>(store: S) {
    let world = World::new(store).await;
    for terms in [leased, complete_at_once] {
        for spared in 0..MANY {
            let label = &format!("{:?}, message {spared}", terms().permanence());
            let (key, mine) = (&key(label), &terms());
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
            world.is_free(label, key, &terms()).await;
        }
    }
}

/// A purge leaves the row of a release for an hour: one that the release has made, and one of others that had expired
/// 59 minutes before.
pub(super) async fn release_keeps_every_row_for_an_hour<S: RemoteStore>(store: S) {
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
