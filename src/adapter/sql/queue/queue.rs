//! [`Batcher`]: what waits, and the lanes that carry it. It knows nothing of stores.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::{Future, poll_fn};
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, LazyLock, PoisonError};
use std::task::Poll;

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::batching::Batching;
use super::led::{Led, Slot};
use super::tasks::{Mutex, Place, here, late, spawn, yield_now};
use crate::error::{Error, ErrorKind};

/// So many rows wait when another lane opens, or a full batch of fewer: below, they are cheaper as
/// a part of the next batch.
const WORTH_A_LANE: usize = 32;
/// How far beyond what it can take a lane looks for more, in batches.
const LOOKS_AHEAD: usize = 4;
/// How often a call is sent anew whose lane ended before it was sent.
const SENDINGS: usize = 4;

/// Numbers that stand for keys. They are hashes already.
type Numbers = HashSet<u64, BuildHasherDefault<AsItIs>>;

/// Takes a number for its hash, but for a factor.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, number: u64) {
        // Nobody can choose ids whose numbers meet in one place.
        static FACTOR: LazyLock<u64> = LazyLock::new(|| rand::random::<u64>() | 1);
        self.0 = number.wrapping_mul(*FACTOR).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// What a caller asks.
pub(in crate::adapter) trait Ask: Send + 'static {
    type Answer: Send + 'static;

    /// Whether one statement does for both.
    fn goes_with(&self, other: &Self) -> bool;

    /// Numbers that stand for its keys, the same for the same key. Two keys of one number wait for
    /// each other in vain, and no worse.
    fn keys(&self) -> &[u64];

    /// Whether it may name a key together with others that may, in one batch.
    fn shares_keys(&self) -> bool;
}

/// Takes batches to the store.
pub(in crate::adapter) trait Carry<A: Ask>: Send + Sync + 'static {
    /// Whether a caller that finds no lane open sends its call in its own task. Not where others than
    /// the callers of this batcher wait for a turn: a caller may leave its future unpolled, with the
    /// turn in it.
    const LEADS: bool = true;

    /// What a lane waits for before it gathers a batch, so that nothing is on its way while it
    /// cannot be sent.
    type Turn: Send;

    /// An error is the answer to all who wait by then.
    fn turn(&self) -> impl Future<Output = Result<Self::Turn, Error>> + Send;

    /// One answer for each, in their order.
    fn carry(
        &self,
        turn: Self::Turn,
        batch: Vec<A>,
    ) -> impl Future<Output = Vec<Result<A::Answer, Error>>> + Send;
}

/// Gathers what is asked while batches are on the wire.
pub(in crate::adapter) struct Batcher<A: Ask>(Arc<Shared<A>>);

struct Shared<A: Ask> {
    lanes: usize,
    most_rows: usize,
    most_waiting: usize,
    state: Mutex<State<A>>,
}

struct State<A: Ask> {
    /// One for each runtime that has callers: a lane ends with its runtime, and one that is not
    /// run for a while must not hold up the callers of another.
    queues: HashMap<Place, Queue<A>>,
    /// In all queues.
    rows: usize,
}

struct Queue<A: Ask> {
    waiting: VecDeque<Waiting<A>>,
    rows: usize,
    /// The keys of what is on the wire.
    wire: Numbers,
    lanes: usize,
    /// How many of the lanes wait for a batch that is late.
    late: usize,
    /// The one that may be in a caller's own task.
    led: Option<Arc<Slot>>,
}

struct Waiting<A: Ask> {
    ask: A,
    reply: oneshot::Sender<Reply<A>>,
}

/// A batch, and who is to hear of it.
type Taken<A> = (Vec<A>, Vec<oneshot::Sender<Reply<A>>>);

/// Where the answer comes, and the sending that is the caller's own.
type Pushed<A> = (oneshot::Receiver<Reply<A>>, Option<Led>);

enum Reply<A: Ask> {
    Answer(Result<A::Answer, Error>),
    /// It was not sent, and will not be: here it is again.
    Unsent(A),
}

impl<A: Ask> Batcher<A> {
    /// `lanes` at a time.
    pub(in crate::adapter) fn new(lanes: usize, batching: Batching) -> Self {
        let state = Mutex::new(State { queues: HashMap::new(), rows: 0 });
        let (most_rows, most_waiting) = (batching.most_rows(), batching.most_waiting());
        Self(Arc::new(Shared { lanes, most_rows, most_waiting, state }))
    }

    /// Waits for the answer of the batch that carries this. Dropped, it disturbs nobody: its
    /// outcome is unknown then.
    pub(in crate::adapter) async fn submit<C: Carry<A>>(
        &self,
        carrier: &Arc<C>,
        mut ask: A,
    ) -> Result<A::Answer, Error> {
        for _ in 0..SENDINGS {
            let (mut answer, led) = self.push(carrier, ask)?;
            let answer = match led {
                None => answer.await,
                Some(mut led) => {
                    let mut has_left_others = false;
                    let answer = poll_fn(|context| {
                        has_left_others |= matches!(led.poll_unpin(context), Poll::Ready(true));
                        answer.poll_unpin(context)
                    });
                    let answer = answer.await;
                    if has_left_others {
                        // Their task may wait for this thread, where a handler may come next.
                        yield_now().await;
                    }
                    answer
                }
            };
            match answer {
                Ok(Reply::Answer(answer)) => return answer,
                Ok(Reply::Unsent(again)) => ask = again,
                Err(_) => return Err(unanswered()),
            }
        }
        Err(Error::new(ErrorKind::Refused, "sending a batch: its runtime is ending"))
    }

    /// The rows that wait; none if no lane is open.
    #[cfg(test)]
    #[allow(dead_code, reason = "the model asks, which has a copy of its own of this file")]
    pub(super) fn waiting(&self) -> Option<usize> {
        let state = lock(&self.0.state);
        (!state.queues.is_empty()).then_some(state.rows)
    }

    /// Lets it wait; or lets its caller send it, if nothing was under way.
    fn push<C: Carry<A>>(&self, carrier: &Arc<C>, ask: A) -> Result<Pushed<A>, Error> {
        let (place, rows) = (here(), ask.keys().len());
        let (reply, answer) = oneshot::channel();
        let lane = |wire, own: Option<Waiting<A>>| Lane {
            shared: Arc::clone(&self.0),
            carrier: Arc::clone(carrier),
            place,
            wire,
            open: true,
            late: false,
            own,
        };
        let (opens, led) = {
            let mut state = lock(&self.0.state);
            if !state.has_room(rows, self.0.most_waiting) {
                return Err(Error::new(ErrorKind::Overloaded, "waiting for a batch"));
            }
            let State { queues, rows: all } = &mut *state;
            let queue = queues.entry(place).or_default();
            if queue.lanes == 0 && C::LEADS {
                let (slot, wire) = (Slot::new(), ask.keys().to_vec());
                queue.lanes = 1;
                queue.led = Some(Arc::clone(&slot));
                queue.wire.extend(&wire);
                let sending = Box::pin(lane(wire, Some(Waiting { ask, reply })).lead());
                return Ok((answer, Some(Led::new(slot, sending))));
            }
            *all += rows;
            queue.rows += rows;
            queue.waiting.push_back(Waiting { ask, reply });
            let enough = WORTH_A_LANE.min(self.0.most_rows);
            let is_urgent = queue.lanes == 0 || queue.late > 0;
            let least = if is_urgent { rows.min(1) } else { enough };
            let opens = queue.opens(self.0.lanes, least);
            (opens, queue.led.take())
        };
        if let Some(led) = led {
            led.want();
        }
        if opens {
            spawn(lane(Vec::new(), None).run());
        }
        Ok((answer, None))
    }
}

/// What carries one batch after the other, and what it has on the wire. Dropped before its time, as
/// by a runtime that ends, it leaves no caller waiting.
struct Lane<A: Ask, C: Carry<A>> {
    shared: Arc<Shared<A>>,
    carrier: Arc<C>,
    place: Place,
    wire: Vec<u64>,
    open: bool,
    /// Whether its batch is late.
    late: bool,
    /// The call of the caller that leads it, until it is sent.
    own: Option<Waiting<A>>,
}

impl<A: Ask, C: Carry<A>> Lane<A, C> {
    /// For the caller that found nothing under way: sends its call, if no other has come by then. All
    /// others are for a task, since a caller may not look after its future. Whether there are any.
    async fn lead(mut self) -> bool {
        // Those who were woken together come together.
        yield_now().await;
        let turn = self.carrier.turn().await;
        if let Some(own) = self.alone() {
            self.send(turn, vec![own.ask], vec![own.reply]).await;
        }
        if self.open {
            self.hand_over();
            return true;
        }
        false
    }

    /// In a task of its own.
    async fn run(mut self) {
        while self.open {
            yield_now().await;
            let turn = self.carrier.turn().await;
            let Some((asks, replies)) = self.take() else { return };
            self.send(turn, asks, replies).await;
        }
    }

    async fn send(
        &mut self,
        turn: Result<C::Turn, Error>,
        asks: Vec<A>,
        replies: Vec<oneshot::Sender<Reply<A>>>,
    ) {
        let answers = match turn {
            Ok(turn) => {
                let carrier = Arc::clone(&self.carrier);
                let carried = AssertUnwindSafe(carrier.carry(turn, asks)).catch_unwind();
                self.unless_late(carried).await.unwrap_or_default()
            }
            Err(error) => {
                let error = error.shared();
                asks.iter().map(|_| Err(error())).collect()
            }
        };
        // First, for the last caller's runtime may stop running tasks once it has its answer.
        self.land();
        let mut answers = answers.into_iter();
        for reply in replies {
            // Without an answer, as after a panic, the outcome is unknown.
            let answer = answers.next().unwrap_or_else(|| Err(unanswered()));
            // It may be gone.
            let _ = reply.send(Reply::Answer(answer));
        }
    }

    /// Waits for the batch; if it is late, other lanes take what waits meanwhile. The batch may be on
    /// a connection that has fallen silent, and what waits need not wait for that to be found out.
    async fn unless_late<T>(&mut self, batch: impl Future<Output = T>) -> T {
        let (mut batch, mut is_late) = (pin!(batch), pin!(late()));
        poll_fn(|context| {
            if let Poll::Ready(batch) = batch.as_mut().poll(context) {
                return Poll::Ready(batch);
            }
            if !self.late && is_late.as_mut().poll(context).is_ready() {
                self.is_late();
            }
            Poll::Pending
        })
        .await
    }

    fn is_late(&mut self) {
        self.late = true;
        let opens = {
            let mut state = lock(&self.shared.state);
            let Some(queue) = state.queues.get_mut(&self.place) else { return };
            queue.late += 1;
            queue.opens(self.shared.lanes, 1)
        };
        if opens {
            spawn(self.another().run());
        }
    }

    /// A lane beside this one, which is counted already.
    fn another(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            carrier: Arc::clone(&self.carrier),
            place: self.place,
            wire: Vec::new(),
            own: None,
            open: true,
            late: false,
        }
    }

    /// The caller's own call, if nothing else waits; else it waits too, before the others.
    fn alone(&mut self) -> Option<Waiting<A>> {
        let own = self.own.take()?;
        let mut state = lock(&self.shared.state);
        let State { queues, rows } = &mut *state;
        match queues.get_mut(&self.place) {
            Some(queue) if !queue.waiting.is_empty() || own.reply.is_closed() => {
                for key in self.wire.drain(..) {
                    queue.wire.remove(&key);
                }
                *rows += own.ask.keys().len();
                queue.rows += own.ask.keys().len();
                queue.waiting.push_front(own);
                None
            }
            _ => Some(own),
        }
    }

    /// Leaves what waits to a task.
    fn hand_over(&mut self) {
        self.open = false;
        spawn(self.another().run());
    }

    /// Takes the next batch, or closes the lane.
    fn take(&mut self) -> Option<Taken<A>> {
        let mut state = lock(&self.shared.state);
        let State { queues, rows } = &mut *state;
        let queue = queues.get_mut(&self.place)?;
        let before = queue.rows;
        // One that was opened beside a late batch is not needed any more.
        let surplus = queue.lanes > queue.most(self.shared.lanes);
        let batch = if surplus { Vec::new() } else { queue.take(self.shared.most_rows) };
        *rows -= before - queue.rows;
        if batch.is_empty() {
            // What still waits, waits for what another lane has on the wire.
            self.open = false;
            state.close(self.place);
            return None;
        }
        self.wire = batch.iter().flat_map(|waiting| waiting.ask.keys()).copied().collect();
        queue.wire.extend(&self.wire);
        drop(state);
        Some(batch.into_iter().map(|waiting| (waiting.ask, waiting.reply)).unzip())
    }

    /// The batch is off the wire. If nothing waits, the lane is closed.
    fn land(&mut self) {
        let mut state = lock(&self.shared.state);
        let Some(queue) = state.queues.get_mut(&self.place) else { return };
        for key in self.wire.drain(..) {
            queue.wire.remove(&key);
        }
        queue.late -= usize::from(std::mem::take(&mut self.late));
        if queue.waiting.is_empty() {
            self.open = false;
            state.close(self.place);
        }
    }
}

impl<A: Ask, C: Carry<A>> Drop for Lane<A, C> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        self.land();
        let mut unsent = VecDeque::new();
        if self.open {
            unsent = lock(&self.shared.state).close(self.place);
        }
        for Waiting { ask, reply } in self.own.take().into_iter().chain(unsent) {
            let _ = reply.send(Reply::Unsent(ask));
        }
    }
}

impl<A: Ask> Default for Queue<A> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            rows: 0,
            wire: Numbers::default(),
            lanes: 0,
            late: 0,
            led: None,
        }
    }
}

impl<A: Ask> State<A> {
    /// Whether so many more may wait, once those are left out that nobody waits for any more.
    fn has_room(&mut self, rows: usize, most: usize) -> bool {
        if self.rows > 0 && self.rows + rows > most {
            for queue in self.queues.values_mut() {
                queue.waiting.retain(|waiting| !waiting.reply.is_closed());
                queue.rows = queue.waiting.iter().map(|waiting| waiting.ask.keys().len()).sum();
            }
            self.rows = self.queues.values().map(|queue| queue.rows).sum();
        }
        self.rows == 0 || self.rows + rows <= most
    }

    /// One lane less. Answers what waits, if it was the last.
    fn close(&mut self, place: Place) -> VecDeque<Waiting<A>> {
        let Some(queue) = self.queues.get_mut(&place) else { return VecDeque::new() };
        queue.lanes -= 1;
        if queue.lanes > 0 {
            return VecDeque::new();
        }
        self.rows -= queue.rows;
        self.queues.remove(&place).map(|queue| queue.waiting).unwrap_or_default()
    }
}

impl<A: Ask> Queue<A> {
    /// One lane that waits for a late batch does not count, up to as many again as there may be.
    fn most(&self, lanes: usize) -> usize {
        lanes.saturating_add(self.late.min(lanes))
    }

    /// Counts another lane, if so many rows wait.
    fn opens(&mut self, most: usize, rows: usize) -> bool {
        let opens = self.lanes < self.most(most) && self.rows >= rows;
        self.lanes += usize::from(opens);
        opens
    }

    /// What may go together, from the front.
    fn take(&mut self, most: usize) -> Vec<Waiting<A>> {
        let (mut batch, mut skipped): (Vec<Waiting<A>>, _) = (Vec::new(), Vec::new());
        let (mut rows, mut looked) = (0, 0);
        // Of the batch, and of what was skipped and must not be overtaken.
        let (mut taken, mut blocked) = (Numbers::default(), Numbers::default());
        // By those that do not share.
        let mut alone = Numbers::default();
        while let Some(waiting) = self.waiting.pop_front() {
            let keys = waiting.ask.keys();
            if waiting.reply.is_closed() {
                self.rows -= keys.len();
                continue;
            }
            if !batch.is_empty() && (rows + keys.len() > most || looked > most * LOOKS_AHEAD) {
                self.waiting.push_front(waiting);
                break;
            }
            let goes = batch.first().is_none_or(|first| waiting.ask.goes_with(&first.ask));
            let shares = waiting.ask.shares_keys();
            let free = |key: &u64| {
                !self.wire.contains(key)
                    && !blocked.contains(key)
                    && !alone.contains(key)
                    && (shares || !taken.contains(key))
            };
            if goes && keys.iter().all(free) {
                if !shares {
                    alone.extend(keys);
                }
                rows += keys.len();
                taken.extend(keys);
                batch.push(waiting);
            } else {
                looked += keys.len();
                blocked.extend(keys.iter().copied());
                skipped.push(waiting);
            }
        }
        self.rows -= rows;
        for waiting in skipped.into_iter().rev() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}

fn lock<T>(state: &Mutex<T>) -> impl std::ops::DerefMut<Target = T> + '_ {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unanswered() -> Error {
    Error::new(ErrorKind::Unavailable, "waiting for a batch that ended without an answer")
}
