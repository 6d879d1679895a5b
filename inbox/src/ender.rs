//! [`Ender`]: writes what became of rows, many at a time, and renews the turns of the rows that run.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::inbox::{Runs, locked};
use crate::observe;
use crate::row::{Change, Fate, Place};
use crate::table::{Changed, Table};

/// The largest batch.
const CHANGES: usize = 512;
/// How long a change that nobody waits for waits for others.
const GATHER: Duration = Duration::from_millis(20);
/// How many changes may wait. Beyond them, the turns of the rows lapse, and the ledger is asked again.
const QUEUE: usize = 65_536;
/// How long a change is tried. Then the turn of its row lapses.
const BOUND: Duration = Duration::from_secs(30);
/// How long a change waits for a row that another statement has locked.
const LOCKED: Duration = Duration::from_secs(2);

pub(crate) struct Ender {
    table: Arc<dyn Table>,
    runs: Runs,
    turn: Duration,
    queue: Mutex<Option<mpsc::Sender<Waiting>>>,
    /// The changes that are not written yet.
    pending: TaskTracker,
}

struct Waiting {
    change: Change,
    reply: Option<oneshot::Sender<Changed>>,
    since: Instant,
    _pending: TaskTrackerToken,
}

impl Ender {
    pub(crate) fn new(table: &Arc<dyn Table>, runs: &Runs, turn: Duration) -> Self {
        let pending = TaskTracker::new();
        pending.close();
        let (table, runs) = (Arc::clone(table), Arc::clone(runs));
        Self { table, runs, turn, queue: Mutex::default(), pending }
    }

    /// Changes a row. Returns `None` if the table did not answer in time.
    pub(crate) async fn change(&self, change: Change) -> Option<Changed> {
        let (reply, changed) = oneshot::channel();
        self.send(change, Some(reply));
        // Nobody waits longer for the answer to a sender.
        tokio::time::timeout(LOCKED, changed).await.ok()?.ok()
    }

    pub(crate) fn change_later(&self, change: Change) {
        self.send(change, None);
    }

    /// Waits until every change is written, or given up.
    pub(crate) async fn flush(&self) {
        self.pending.wait().await;
    }

    fn send(&self, change: Change, reply: Option<oneshot::Sender<Changed>>) {
        let since = Instant::now();
        let waiting = Waiting { change, reply, since, _pending: self.pending.token() };
        if let Err(full) = self.queue().try_send(waiting) {
            end_run(&self.runs, &full.into_inner().change);
        }
    }

    fn queue(&self) -> mpsc::Sender<Waiting> {
        let mut queue = locked(&self.queue);
        if let Some(sender) = queue.as_ref().filter(|sender| !sender.is_closed()) {
            return sender.clone();
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(write(Arc::clone(&self.table), Arc::clone(&self.runs), receiver));
        tokio::spawn(renew(Arc::downgrade(&self.table), Arc::downgrade(&self.runs), self.turn));
        *queue = Some(sender.clone());
        sender
    }

    /// Starts the task that renews turns.
    pub(crate) fn start(&self) {
        drop(self.queue());
    }
}

/// Ends the run of a change: its turn is not renewed any more.
fn end_run(runs: &Runs, change: &Change) {
    if change.fate != Fate::Keep {
        let mut runs = locked(runs);
        if runs.get(&change.at.seq).is_some_and(|run| run.turn == change.at.turn) {
            runs.remove(&change.at.seq);
        }
    }
}

async fn write(table: Arc<dyn Table>, runs: Runs, mut queue: mpsc::Receiver<Waiting>) {
    let mut batch: Vec<Waiting> = Vec::new();
    loop {
        if batch.is_empty() && queue.recv_many(&mut batch, CHANGES).await == 0 {
            return;
        }
        let gathered = Instant::now() + GATHER;
        while batch.len() < CHANGES && batch.iter().all(|it| it.reply.is_none()) {
            match timeout_at(gathered, queue.recv()).await {
                Ok(Some(next)) => batch.push(next),
                Ok(None) | Err(_) => break,
            }
        }
        // Two changes of one row follow each other.
        let mut later = Vec::new();
        for it in std::mem::take(&mut batch) {
            let is_second = batch.iter().any(|first| first.change.at.seq == it.change.at.seq);
            if is_second { later.push(it) } else { batch.push(it) }
        }
        let changes: Vec<Change> = batch.iter().map(|it| it.change.clone()).collect();
        match table.change(&changes).await {
            Ok(replies) => {
                for (it, changed) in std::mem::take(&mut batch).into_iter().zip(replies) {
                    if changed == Changed::Locked && it.since.elapsed() < LOCKED {
                        later.push(it);
                        continue;
                    }
                    end_run(&runs, &it.change);
                    if let Some(reply) = it.reply {
                        let _ = reply.send(changed);
                    }
                }
            }
            Err(error) => {
                observe::table_failed("what became of rows is not written", &error);
                sleep(Duration::from_millis(500)).await;
                for it in std::mem::take(&mut batch) {
                    if it.since.elapsed() < BOUND {
                        later.push(it);
                    } else {
                        end_run(&runs, &it.change);
                    }
                }
            }
        }
        batch = later;
        if !batch.is_empty() {
            sleep(GATHER).await;
        }
    }
}

/// Renews the turns of the runs of this process, until the inbox is dropped.
async fn renew(
    table: Weak<dyn Table>,
    runs: Weak<Mutex<std::collections::HashMap<i64, Place>>>,
    turn: Duration,
) {
    let mut ticks = interval(turn / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (Some(table), Some(runs)) = (table.upgrade(), runs.upgrade()) else { return };
        let alive: Vec<Place> = locked(&runs).values().copied().collect();
        for part in alive.chunks(CHANGES) {
            if let Err(error) = table.renew(part, turn).await {
                observe::table_failed("turns are not renewed", &error);
            }
        }
    }
}
