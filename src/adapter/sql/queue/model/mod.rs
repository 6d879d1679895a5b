//! The batcher among callers that come and go, batches that fail and lanes that are stopped, in
//! many thousand interleavings: the same source over a modelled runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::FutureExt;
use shuttle::rand::{Rng, thread_rng};

use super::batching;
use crate::error::{Error, ErrorKind};

#[path = "../gather.rs"]
mod gather;
#[path = "../led.rs"]
mod led;
mod tasks;

use batching::Batching;
use gather::{Ask, Batcher, Carry};

const KEYS: usize = 4;
const MOST_ROWS: usize = 4;
const MOST_WAITING: usize = 12;

/// Of kind 0, which shares its keys, or 1, which does not and goes with it, or 2, which does neither.
struct Asked {
    number: usize,
    kind: u8,
    keys: Vec<u64>,
}

impl Ask for Asked {
    type Answer = usize;

    fn goes_with(&self, other: &Self) -> bool {
        (self.kind == 2) == (other.kind == 2)
    }

    fn keys(&self) -> &[u64] {
        &self.keys
    }

    fn shares_keys(&self) -> bool {
        self.kind == 0
    }
}

/// A store that holds the batcher to its rules.
#[derive(Default)]
struct Store {
    /// How often each ask was sent.
    sent: Vec<AtomicUsize>,
    /// How many lanes have each key on the wire.
    wire: [AtomicUsize; KEYS],
    lanes: AtomicUsize,
    most_lanes: usize,
    fails: bool,
    /// Whether batches may be dropped half-way, as by runtimes that end.
    stops: bool,
    /// The first call hangs, as on a connection that has fallen silent, until so many callers are
    /// done.
    hangs: Option<usize>,
    done: AtomicUsize,
}

/// Off the wire, however it ends.
struct OnWire<'s> {
    store: &'s Store,
    keys: Vec<u64>,
    ended: bool,
}

impl Drop for OnWire<'_> {
    fn drop(&mut self) {
        for key in &self.keys {
            self.store.wire[index(*key)].fetch_sub(1, Ordering::SeqCst);
        }
        self.store.lanes.fetch_sub(1, Ordering::SeqCst);
        let panics = std::thread::panicking();
        assert!(self.ended || self.store.stops || panics, "dropped while it was on the wire");
    }
}

fn index(key: u64) -> usize {
    usize::try_from(key).unwrap()
}

impl Carry<Asked> for Store {
    type Turn = ();

    async fn turn(&self) -> Result<(), Error> {
        shuttle::future::yield_now().await;
        Ok(())
    }

    async fn carry(&self, (): (), batch: Vec<Asked>) -> Vec<Result<usize, Error>> {
        let rows: usize = batch.iter().map(|ask| ask.keys.len()).sum();
        assert!(batch.len() == 1 || rows <= MOST_ROWS, "{rows} rows in one batch");
        assert!(batch.iter().all(|ask| ask.goes_with(&batch[0])), "what does not go together");
        let mut keys: Vec<u64> = batch.iter().flat_map(|ask| ask.keys.clone()).collect();
        keys.sort_unstable();
        keys.dedup();
        let named_by = |key: &u64, alone: bool| {
            let asks = batch.iter().filter(|ask| ask.keys.contains(key));
            asks.filter(|ask| (ask.kind != 0) == alone).count()
        };
        let once =
            |key: &u64| named_by(key, true) == 0 || named_by(key, true) + named_by(key, false) == 1;
        assert!(keys.iter().all(once), "a key twice in one batch");
        assert!(self.lanes.fetch_add(1, Ordering::SeqCst) < self.most_lanes, "too many lanes");
        for key in &keys {
            let others = self.wire[index(*key)].fetch_add(1, Ordering::SeqCst);
            assert_eq!(others, 0, "a key on two wires");
        }
        let mut on_wire = OnWire { store: self, keys, ended: false };
        for ask in &batch {
            let before = self.sent[ask.number].fetch_add(1, Ordering::SeqCst);
            assert_eq!(before, 0, "sent twice");
        }
        for _ in 0..thread_rng().gen_range(0..4) {
            shuttle::future::yield_now().await;
        }
        let hangs = self.hangs.filter(|_| batch.iter().any(|ask| ask.number == 0));
        while hangs.is_some_and(|callers| self.done.load(Ordering::SeqCst) < callers) {
            shuttle::future::yield_now().await;
        }
        on_wire.ended = true;
        match if self.fails { thread_rng().gen_range(0..4) } else { 3 } {
            0 => batch.iter().map(|_| Err(Error::new(ErrorKind::Refused, "the store"))).collect(),
            // As a panic, and too few answers.
            1 => Vec::new(),
            _ => batch.iter().map(|ask| Ok(ask.number)).collect(),
        }
    }
}

#[derive(Clone, Copy)]
struct World {
    callers: usize,
    calls: usize,
    lanes: usize,
    stops: u32,
    fails: bool,
    leaves: bool,
    /// Whether the first caller leaves its first call alone until all others are done.
    stalls: bool,
    /// Whether batches may be late.
    late: bool,
    /// Whether the first caller's call hangs until all others are done.
    hangs: bool,
}

/// Asks for a key, and does not look after it before `done`.
async fn stall(batcher: Arc<Batcher<Asked>>, store: Arc<Store>, all: usize) {
    let ask = Asked { number: 0, kind: 0, keys: vec![0] };
    let mut answer = Box::pin(batcher.submit(&store, ask));
    for _ in 0..thread_rng().gen_range(0..6) {
        if answer.as_mut().now_or_never().is_some() {
            return;
        }
        shuttle::future::yield_now().await;
    }
    while store.done.load(Ordering::SeqCst) < all {
        shuttle::future::yield_now().await;
    }
    assert_eq!(answer.await.unwrap(), 0);
}

async fn call(world: World, batcher: Arc<Batcher<Asked>>, store: Arc<Store>, number: usize) {
    // A call that hangs has its key, and its kind, to itself.
    let hangs = usize::from(world.hangs);
    let any = || u64::try_from(thread_rng().gen_range(hangs..KEYS)).unwrap();
    let (one, more) = (any(), any());
    let keys = if thread_rng().gen_bool(0.3) && more != one { vec![one, more] } else { vec![one] };
    let kind = thread_rng().gen_range(0..if world.hangs { 2 } else { 3 });
    let ask = Asked { number, kind, keys };
    let mut answer = Box::pin(batcher.submit(&store, ask));
    if world.leaves && thread_rng().gen_bool(0.4) {
        for _ in 0..thread_rng().gen_range(0..6) {
            if let Some(answer) = answer.as_mut().now_or_never() {
                assert!(answer.is_err() || answer.unwrap() == number);
                return;
            }
            shuttle::future::yield_now().await;
        }
        return;
    }
    let sent = || store.sent[number].load(Ordering::SeqCst);
    match answer.await {
        Ok(answer) => assert_eq!((answer, sent()), (number, 1), "another's answer"),
        Err(error) if error.kind() == ErrorKind::Overloaded => assert_eq!(sent(), 0),
        Err(error) => {
            assert!(world.fails || world.stops > 0, "{error:?}");
            assert_eq!(sent(), 1, "{error:?}");
        }
    }
    // And one call that came back from its caller.
    assert!(batcher.waiting().unwrap_or_default() <= MOST_WAITING + 2, "too much waits");
}

fn check(world: World) {
    shuttle::check_random(
        move || {
            tasks::STOPS.set(world.stops);
            tasks::LATE.set(world.late);
            let batching = Batching::new().rows(MOST_ROWS).queue(MOST_WAITING);
            let batcher = Arc::new(Batcher::new(world.lanes, batching));
            let store = Arc::new(Store {
                sent: (0..world.callers * world.calls).map(|_| AtomicUsize::new(0)).collect(),
                most_lanes: world.lanes * if world.late { 2 } else { 1 },
                fails: world.fails,
                stops: world.stops > 0,
                hangs: world.hangs.then_some(world.callers - 1),
                ..Store::default()
            });
            let callers: Vec<_> = (0..world.callers)
                .map(|caller| {
                    let (batcher, store) = (Arc::clone(&batcher), Arc::clone(&store));
                    shuttle::future::spawn(async move {
                        if world.stalls && caller == 0 {
                            return stall(batcher, store, world.callers - 1).await;
                        }
                        if world.hangs && caller == 0 {
                            let ask = Asked { number: 0, kind: 2, keys: vec![0] };
                            assert_eq!(batcher.submit(&store, ask).await.unwrap(), 0);
                            return;
                        }
                        for round in 0..world.calls {
                            let number = caller * world.calls + round;
                            call(world, Arc::clone(&batcher), Arc::clone(&store), number).await;
                        }
                        store.done.fetch_add(1, Ordering::SeqCst);
                    })
                })
                .collect();
            shuttle::future::block_on(async {
                for caller in callers {
                    caller.await.unwrap();
                }
                // The lanes end, and nothing is left behind: else this goes on for ever.
                while batcher.waiting().is_some() {
                    shuttle::future::yield_now().await;
                }
            });
            assert_eq!(store.lanes.load(Ordering::SeqCst), 0);
        },
        2_000,
    );
}

const CALM: World = World {
    callers: 4,
    calls: 3,
    lanes: 2,
    stops: 0,
    fails: false,
    leaves: false,
    stalls: false,
    late: false,
    hangs: false,
};

#[test]
fn every_caller_has_its_own_answer() {
    check(CALM);
    check(World { lanes: 1, ..CALM });
}

#[test]
fn callers_that_go_away_and_batches_that_fail_disturb_nobody() {
    check(World { leaves: true, fails: true, ..CALM });
    check(World { leaves: true, fails: true, callers: 8, calls: 2, ..CALM });
}

#[test]
fn a_lane_that_is_stopped_strands_nobody() {
    check(World { stops: 2, ..CALM });
    check(World { stops: 2, leaves: true, fails: true, ..CALM });
}

#[test]
fn a_caller_that_looks_away_holds_up_nobody() {
    check(World { stalls: true, ..CALM });
    check(World { stalls: true, leaves: true, ..CALM });
    check(World { stalls: true, leaves: true, lanes: 1, ..CALM });
}

#[test]
fn late_batches_open_lanes_and_every_caller_has_its_own_reply() {
    check(World { late: true, ..CALM });
    check(World { late: true, stops: 2, leaves: true, fails: true, ..CALM });
}

#[test]
fn a_batch_that_hangs_holds_up_no_other_key() {
    check(World { late: true, hangs: true, ..CALM });
    check(World { late: true, hangs: true, lanes: 1, ..CALM });
}
