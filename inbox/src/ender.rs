//! [`Ender`]: writes the new states of rows, many at a time, and renews the turns of the rows that
//! run.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::observe::{self, locked};
use crate::row::{Change, Fate, Place};
use crate::table::{Changed, Table};

/// The largest batch.
const CHANGES: usize = 512;
/// How long a change that nobody waits for waits for others.
const GATHER: Duration = Duration::from_millis(20);
/// How many changes may wait. Beyond them, the turns of the rows lapse, and the ledger is asked
/// again.
const QUEUE: usize = 65_536;
/// How long a change is tried, because the table does not answer or somebody has locked the row.
/// Then the turn of its row lapses.
const BOUND: Duration = Duration::from_secs(30);
/// How long a sender's answer waits for its change.
const ANSWER: Duration = Duration::from_secs(2);
/// How long the table is left alone after an error.
const PAUSE: Duration = Duration::from_millis(500);

/// The rows that this process runs, by their numbers.
type Runs = Arc<Mutex<HashMap<i64, Place>>>;

/// A run of this process: its turn is renewed until this is dropped.
pub(crate) struct Run {
    runs: Runs,
    at: Place,
}

impl Drop for Run {
    fn drop(&mut self) {
        let mut runs = locked(&self.runs);
        // Another run may have the row by now.
        if runs.get(&self.at.seq).is_some_and(|run| run.turn == self.at.turn) {
            runs.remove(&self.at.seq);
        }
    }
}

pub(crate) struct Ender {
    table: Arc<dyn Table>,
    runs: Runs,
    turn: Duration,
    /// The queue of the task, which ends with its runtime.
    queue: Mutex<Option<mpsc::Sender<Waiting>>>,
    /// The changes that are not written yet.
    pending: TaskTracker,
}

struct Waiting {
    change: Change,
    /// What the change ends. `None` for [`Fate::Keep`].
    _run: Option<Run>,
    reply: Option<oneshot::Sender<Changed>>,
    since: Instant,
    _pending: TaskTrackerToken,
}

impl Waiting {
    /// Returns `false` for a change that only the answer to a sender needed, who got another one.
    fn is_needed(&self) -> bool {
        let is_awaited = self.reply.as_ref().is_some_and(|reply| !reply.is_closed());
        self.change.fate != Fate::Keep || is_awaited
    }
}

impl Ender {
    pub(crate) fn new(table: &Arc<dyn Table>, turn: Duration) -> Self {
        let pending = TaskTracker::new();
        pending.close();
        let table = Arc::clone(table);
        Self { table, runs: Runs::default(), turn, queue: Mutex::default(), pending }
    }

    /// Begins the run of a row: its turn is renewed until the run is dropped, or its change is
    /// written.
    pub(crate) fn begin(&self, at: Place) -> Run {
        locked(&self.runs).insert(at.seq, at);
        drop(self.queue());
        Run { runs: Arc::clone(&self.runs), at }
    }

    /// Changes a row, and waits for the reply. Returns `None` if the table did not answer in time.
    pub(crate) async fn change(&self, change: Change, run: Option<Run>) -> Option<Changed> {
        let (reply, changed) = oneshot::channel();
        self.send(change, run, Some(reply));
        timeout(ANSWER, changed).await.ok()?.ok()
    }

    /// Changes a row in the background.
    pub(crate) fn change_later(&self, change: Change, run: Run) {
        self.send(change, Some(run), None);
    }

    /// Waits until every change is written, or given up.
    pub(crate) async fn flush(&self) {
        self.pending.wait().await;
    }

    fn send(&self, change: Change, run: Option<Run>, reply: Option<oneshot::Sender<Changed>>) {
        let (since, pending) = (Instant::now(), self.pending.token());
        let waiting = Waiting { change, _run: run, reply, since, _pending: pending };
        // If the queue is full, the run ends here.
        drop(self.queue().try_send(waiting));
    }

    fn queue(&self) -> mpsc::Sender<Waiting> {
        let mut queue = locked(&self.queue);
        if let Some(sender) = queue.as_ref().filter(|sender| !sender.is_closed()) {
            return sender.clone();
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(write(Arc::clone(&self.table), receiver));
        tokio::spawn(renew(Arc::downgrade(&self.table), Arc::downgrade(&self.runs), self.turn));
        *queue = Some(sender.clone());
        sender
    }
}

async fn write(table: Arc<dyn Table>, mut queue: mpsc::Receiver<Waiting>) {
    let mut waiting: Vec<Waiting> = Vec::new();
    loop {
        if waiting.is_empty() && queue.recv_many(&mut waiting, CHANGES).await == 0 {
            return;
        }
        let gathered = Instant::now() + GATHER;
        while waiting.len() < CHANGES && waiting.iter().all(|it| it.reply.is_none()) {
            match timeout_at(gathered, queue.recv()).await {
                Ok(Some(next)) => waiting.push(next),
                Ok(None) | Err(_) => break,
            }
        }
        while waiting.len() < CHANGES
            && let Ok(next) = queue.try_recv()
        {
            waiting.push(next);
        }
        // Two changes of one row follow each other.
        let mut seqs = HashSet::new();
        let needed = waiting.drain(..).filter(Waiting::is_needed);
        let (batch, later): (Vec<_>, Vec<_>) = needed.partition(|it| seqs.insert(it.change.at.seq));
        let changes: Vec<Change> = batch.iter().map(|it| it.change.clone()).collect();
        let replies = match table.change(&changes).await {
            Ok(replies) => replies,
            Err(error) => {
                observe::table_failed("what became of rows is not written", &error);
                sleep(PAUSE).await;
                vec![Changed::Locked; batch.len()]
            }
        };
        for (it, changed) in batch.into_iter().zip(replies) {
            if changed == Changed::Locked && it.since.elapsed() < BOUND {
                waiting.push(it);
            } else if let Some(reply) = it.reply {
                let _ = reply.send(changed);
            }
        }
        if !waiting.is_empty() {
            sleep(GATHER).await;
        }
        waiting.extend(later);
    }
}

/// Renews the turns of the runs of this process, until the inbox is dropped.
async fn renew(table: Weak<dyn Table>, runs: Weak<Mutex<HashMap<i64, Place>>>, turn: Duration) {
    let mut ticks = interval(turn / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (Some(table), Some(runs)) = (table.upgrade(), runs.upgrade()) else { return };
        let alive: Vec<Place> = locked(&runs).values().copied().collect();
        for part in alive.chunks(CHANGES) {
            if let Err(error) = table.renew(part).await {
                observe::table_failed("turns are not renewed", &error);
            }
        }
    }
}
