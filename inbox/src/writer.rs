//! [`Writer`]: stores deliveries. The deliveries that arrive while a batch is written form the next
//! batch.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::observe::{NotStored, locked};
use crate::row::NewRow;
use crate::table::{Stored, Table};

/// The largest batch.
const ROWS: usize = 256;
/// The largest batch, in bytes. A larger row goes alone.
const BYTES: usize = 4 << 20;
/// How many deliveries may wait for the writer.
const QUEUE: usize = 4_096;
/// How long a delivery waits for its row. Then it goes to the layer without one.
const BOUND: Duration = Duration::from_secs(1);
/// How long the table is not asked after a batch that failed.
const PAUSE: Duration = Duration::from_secs(5);

pub(crate) struct Writer {
    task: Arc<Task>,
    /// The queue of the task, which ends with its runtime.
    queue: Mutex<Option<mpsc::Sender<Waiting>>>,
}

/// What the task shares with its writer.
struct Task {
    table: Arc<dyn Table>,
    /// The table is not asked until then.
    paused_until: Mutex<Option<Instant>>,
}

struct Waiting {
    row: NewRow,
    reply: oneshot::Sender<Result<Stored, NotStored>>,
}

impl Writer {
    pub(crate) fn new(table: &Arc<dyn Table>) -> Self {
        let task = Task { table: Arc::clone(table), paused_until: Mutex::default() };
        Self { task: Arc::new(task), queue: Mutex::default() }
    }

    /// Stores a row. If the future is dropped, the row may be stored: its turn lapses then.
    pub(crate) async fn store(&self, row: NewRow) -> Result<Stored, NotStored> {
        if locked(&self.task.paused_until).is_some_and(|until| Instant::now() < until) {
            return Err(NotStored::Paused);
        }
        let (reply, stored) = oneshot::channel();
        self.queue().try_send(Waiting { row, reply }).map_err(|_| NotStored::Busy)?;
        match timeout(BOUND, stored).await {
            Ok(Ok(stored)) => stored,
            Ok(Err(_)) | Err(_) => Err(NotStored::TimedOut),
        }
    }

    fn queue(&self) -> mpsc::Sender<Waiting> {
        let mut queue = locked(&self.queue);
        if let Some(sender) = queue.as_ref().filter(|sender| !sender.is_closed()) {
            return sender.clone();
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(Arc::clone(&self.task).run(receiver));
        *queue = Some(sender.clone());
        sender
    }
}

impl Task {
    async fn run(self: Arc<Self>, mut queue: mpsc::Receiver<Waiting>) {
        let mut waiting: Vec<Waiting> = Vec::new();
        loop {
            if waiting.is_empty() && queue.recv_many(&mut waiting, ROWS).await == 0 {
                return;
            }
            while waiting.len() < 2 * ROWS
                && let Ok(next) = queue.try_recv()
            {
                waiting.push(next);
            }
            let batch = next_batch(&mut waiting);
            self.store(batch).await;
        }
    }

    async fn store(&self, batch: Vec<Waiting>) {
        let end = Instant::now() + BOUND;
        let is_large = batch.iter().map(|it| it.row.size()).sum::<usize>() > BYTES;
        let (rows, replies): (Vec<_>, Vec<_>) =
            batch.into_iter().map(|it| (it.row, it.reply)).unzip();
        let error = match self.table.store(&rows).await {
            Ok(stored) => {
                for (reply, stored) in replies.into_iter().zip(stored) {
                    let _ = reply.send(Ok(stored));
                }
                return;
            }
            Err(error) => Arc::new(error),
        };
        if error.is_of_a_row && rows.len() > 1 {
            for (row, reply) in rows.iter().zip(replies) {
                let row = std::slice::from_ref(row);
                let left = end.saturating_duration_since(Instant::now());
                let stored = timeout(left, self.table.store(row)).await;
                let stored = match stored {
                    Ok(Ok(stored)) => stored.first().copied().ok_or(NotStored::TimedOut),
                    Ok(Err(error)) => Err(NotStored::Failed(Arc::new(error))),
                    Err(_elapsed) => Err(NotStored::TimedOut),
                };
                let _ = reply.send(stored);
            }
            return;
        }
        // A row that is too large or refused must not turn the inbox off for the others.
        if !is_large && !error.is_of_a_row {
            *locked(&self.paused_until) = Some(Instant::now() + PAUSE);
        }
        for reply in replies {
            let _ = reply.send(Err(NotStored::Failed(Arc::clone(&error))));
        }
    }
}

/// Takes a batch of distinct keys from what waits, in its order. A key that stands there twice
/// waits for the next batch: Postgres refuses a statement that meets one row twice.
fn next_batch(waiting: &mut Vec<Waiting>) -> Vec<Waiting> {
    let (mut keys, mut bytes) = (HashSet::new(), 0);
    let (mut batch, mut left) = (Vec::new(), Vec::new());
    for it in waiting.drain(..).filter(|it| !it.reply.is_closed()) {
        let size = it.row.size();
        let fits = batch.is_empty() || (batch.len() < ROWS && bytes + size <= BYTES);
        if fits && keys.insert(it.row.key) {
            bytes += size;
            batch.push(it);
        } else {
            left.push(it);
        }
    }
    *waiting = left;
    batch
}
