//! The callers, the store, and the worlds in which they meet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use shuttle::rand::{Rng, thread_rng};

use crate::error::{StoreError, StoreErrorKind};

use super::batcher::{BatchExecutor, BatchItem, Batcher, Bounds};
use super::runtime;

pub(super) const MAX_BATCH_KEYS: usize = 4;
const MAX_QUEUED_KEYS: usize = 12;

/// Calls of one kind join.
#[derive(Clone)]
pub(super) struct Item {
    pub(super) number: usize,
    pub(super) kind: u8,
}

impl BatchItem for Item {
    type Reply = usize;

    fn can_join(&self, other: &Self) -> bool {
        self.kind == other.kind
    }

    fn is_bounded(&self) -> bool {
        true
    }
}

/// A store that checks the rules of the queue.
#[derive(Default)]
struct Store {
    world: World,
    /// How often each call was sent.
    sent: Vec<AtomicUsize>,
    workers: AtomicUsize,
    /// How many callers are done.
    done: AtomicUsize,
    /// How many guards were taken that no batch has used.
    unused_guards: AtomicUsize,
}

/// Ends the sending of a batch, also if the batch is dropped.
struct Sending<'s> {
    store: &'s Store,
    ended: bool,
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.store.workers.fetch_sub(1, Ordering::SeqCst);
        let panics = std::thread::panicking();
        assert!(
            self.ended || self.store.world.stops > 0 || panics,
            "dropped while it was being sent"
        );
    }
}

impl BatchExecutor<Item> for Store {
    type SendGuard = ();

    async fn send_guard(self: &Arc<Self>) -> Result<(), StoreError> {
        shuttle::future::yield_now().await;
        self.unused_guards.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn execute(self: &Arc<Self>, (): (), batch: Vec<Item>) -> Vec<Result<usize, StoreError>> {
        self.unused_guards.fetch_sub(1, Ordering::SeqCst);
        assert!(batch.len() <= MAX_BATCH_KEYS, "{} keys in one batch", batch.len());
        assert!(batch.iter().all(|item| item.can_join(&batch[0])), "calls that cannot join");
        let max_workers = self.world.workers * if self.world.late { 2 } else { 1 };
        assert!(self.workers.fetch_add(1, Ordering::SeqCst) < max_workers, "too many workers");
        let mut sending = Sending { store: self, ended: false };
        for item in &batch {
            let before = self.sent[item.number].fetch_add(1, Ordering::SeqCst);
            assert_eq!(before, 0, "sent twice");
        }
        for _ in 0..thread_rng().gen_range(0..4) {
            shuttle::future::yield_now().await;
        }
        if self.world.hangs && batch.iter().any(|item| item.number == 0) {
            self.all_others_are_done().await;
        }
        sending.ended = true;
        match if self.world.fails { thread_rng().gen_range(0..4) } else { 3 } {
            0 => batch
                .iter()
                .map(|_| Err(StoreError::new(StoreErrorKind::Refused, "the store")))
                .collect(),
            // Too few replies, as after a panic.
            1 => Vec::new(),
            _ => batch.iter().map(|item| Ok(item.number)).collect(),
        }
    }
}

impl Store {
    async fn all_others_are_done(&self) {
        while self.done.load(Ordering::SeqCst) < self.world.callers - 1 {
            shuttle::future::yield_now().await;
        }
    }
}

#[derive(Clone, Copy, Default)]
struct World {
    callers: usize,
    workers: usize,
    /// How many batches may be dropped early, as by runtimes that end.
    stops: u32,
    fails: bool,
    leaves: bool,
    /// Whether the first caller stops polling its call until all others are done.
    stalls: bool,
    /// Whether batches may be late.
    late: bool,
    /// Whether the first caller's call gets its reply only after all others are done, as on a connection that has
    /// fallen silent.
    hangs: bool,
}

/// How many calls a caller makes.
const CALLS: usize = 3;

/// Submits a call, and stops polling it until all others are done.
async fn stall(batcher: Arc<Batcher<Item>>, store: Arc<Store>) {
    let item = Item { number: 0, kind: 0 };
    let mut reply = Box::pin(batcher.submit(&store, item));
    for _ in 0..thread_rng().gen_range(0..6) {
        if reply.as_mut().now_or_never().is_some() {
            return;
        }
        shuttle::future::yield_now().await;
    }
    store.all_others_are_done().await;
    assert_eq!(reply.await.unwrap(), 0);
}

async fn call(batcher: &Batcher<Item>, store: &Arc<Store>, number: usize) {
    let world = store.world;
    // No other call has the kind of a call that hangs, and joins its batch.
    let kind = thread_rng().gen_range(0..if world.hangs { 2 } else { 3 });
    let item = Item { number, kind };
    let mut reply = Box::pin(batcher.submit(store, item));
    if world.leaves && thread_rng().gen_bool(0.4) {
        for _ in 0..thread_rng().gen_range(0..6) {
            if let Some(reply) = reply.as_mut().now_or_never() {
                assert!(reply.is_err() || reply.unwrap() == number);
                return;
            }
            shuttle::future::yield_now().await;
        }
        return;
    }
    let sent = || store.sent[number].load(Ordering::SeqCst);
    match reply.await {
        Ok(reply) => assert_eq!((reply, sent()), (number, 1), "the reply of another call"),
        Err(error) if error.kind() == StoreErrorKind::Overloaded => assert_eq!(sent(), 0),
        Err(error) => {
            assert!(world.fails || world.stops > 0, "{error:?}");
            assert_eq!(sent(), 1, "{error:?}");
        }
    }
    assert!(batcher.waiting().unwrap_or_default() <= MAX_QUEUED_KEYS, "too many calls wait");
}

fn check(world: World) {
    shuttle::check_random(
        move || {
            runtime::STOPS.set(world.stops);
            runtime::LATE.set(world.late);
            let batcher = Arc::new(Batcher::new(Bounds {
                workers: world.workers,
                max_batch_keys: MAX_BATCH_KEYS,
                max_queued_keys: MAX_QUEUED_KEYS,
            }));
            let store = Arc::new(Store {
                world,
                sent: (0..world.callers * CALLS).map(|_| AtomicUsize::new(0)).collect(),
                ..Store::default()
            });
            let callers: Vec<_> = (0..world.callers)
                .map(|caller| {
                    let (batcher, store) = (Arc::clone(&batcher), Arc::clone(&store));
                    shuttle::future::spawn(async move {
                        if world.stalls && caller == 0 {
                            return stall(batcher, store).await;
                        }
                        if world.hangs && caller == 0 {
                            let item = Item { number: 0, kind: 2 };
                            assert_eq!(batcher.submit(&store, item).await.unwrap(), 0);
                            return;
                        }
                        for round in 0..CALLS {
                            call(&batcher, &store, caller * CALLS + round).await;
                        }
                        store.done.fetch_add(1, Ordering::SeqCst);
                    })
                })
                .collect();
            shuttle::future::block_on(async {
                for caller in callers {
                    caller.await.unwrap();
                }
                // Ends only if all workers end and nothing is left behind.
                while batcher.waiting().is_some() {
                    shuttle::future::yield_now().await;
                }
            });
            assert_eq!(store.workers.load(Ordering::SeqCst), 0);
            // Two workers may wait for one call. A worker alone takes a guard only if a call waits.
            if world.workers == 1 && !world.leaves && !world.late {
                assert_eq!(store.unused_guards.load(Ordering::SeqCst), 0);
            }
        },
        2_000,
    );
}

fn calm() -> World {
    World { callers: 4, workers: 2, ..World::default() }
}

#[test]
fn every_caller_gets_its_own_reply() {
    check(calm());
    check(World { workers: 1, ..calm() });
}

#[test]
fn dropped_callers_and_failed_batches_disturb_nobody() {
    check(World { leaves: true, fails: true, ..calm() });
    check(World { leaves: true, fails: true, callers: 6, ..calm() });
}

#[test]
fn dropped_worker_leaves_no_caller_waiting() {
    check(World { stops: 2, ..calm() });
    check(World { stops: 2, leaves: true, fails: true, ..calm() });
}

#[test]
fn caller_that_stops_polling_delays_nobody() {
    check(World { stalls: true, ..calm() });
    check(World { stalls: true, leaves: true, ..calm() });
    check(World { stalls: true, leaves: true, workers: 1, ..calm() });
}

#[test]
fn late_batches_start_workers_and_every_caller_gets_its_own_reply() {
    check(World { late: true, ..calm() });
    check(World { late: true, stops: 2, leaves: true, fails: true, ..calm() });
}

#[test]
fn hanging_batch_delays_no_other_batch() {
    check(World { late: true, hangs: true, ..calm() });
    check(World { late: true, hangs: true, workers: 1, ..calm() });
}
