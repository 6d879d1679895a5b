//! [`StoreLoss`]: acknowledged writes that the store has lost, as far as they show; and [`LossLog`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::connections::Connections;
use super::script::{PUSH_LOSS, ScriptCall};
use crate::error::{Error, ErrorKind};
use crate::observe;

/// How many losses a process keeps, and how many records the store keeps.
const MAX_LOSSES: usize = 64;
/// How long the store keeps its records after the last one.
const LIFETIME: Duration = Duration::from_secs(30 * 86_400);

/// Writes that the store had acknowledged and does not have any more, or may not have.
///
/// Under the lease ledger, no event is lost by it: an event of this time may run a second time.
///
/// A loss is found by polling. Writes of the moment between the first call of an adapter and its first
/// poll are not covered. Keys that move to another primary of a cluster while it fails over are not
/// covered either. If two servers are primary at the same time, writes to the one that is demoted later
/// may come after `found_at`: the processes that wrote them report a loss of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreLoss {
    /// How the loss shows.
    pub kind: LossKind,
    /// The address of the primary that does not have the writes.
    pub primary: String,
    /// Writes acknowledged from this time on may be lost, by this machine's clock. The Unix epoch if
    /// writes of any age may be lost: always for `Emptied` and `Evicted`, after a restart if the canary
    /// was new, and in a cluster if slots have come to the primary since. The earlier one of two times if
    /// the clock was set back meanwhile.
    pub since: SystemTime,
    /// The loss happened after this poll, by this machine's clock. Polls after an eviction do not count
    /// until the eviction is told. The earlier one of two times if the clock was set back meanwhile.
    pub last_intact: SystemTime,
    /// When the loss was found, by this machine's clock.
    pub found_at: SystemTime,
}

/// How a loss shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossKind {
    /// The store has an older state than the one it had acknowledged. For example, a new primary's history
    /// ends before writes that the old primary had acknowledged.
    Rewound,
    /// The canary, a key that this process had written, is gone: the store was flushed, or restarted empty.
    Emptied,
    /// The server evicted keys to free memory. They may be keys of another program. Told once a minute at
    /// most, unless the canary is gone too. After a failover, evictions of the new primary's past count.
    Evicted,
    /// The replication history is a new one, so a loss can neither be shown nor excluded.
    Suspected,
}

impl LossKind {
    const ALL: [Self; 4] = [Self::Rewound, Self::Emptied, Self::Evicted, Self::Suspected];

    /// Returns a short name for logs and metric labels.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rewound => "rewound",
            Self::Emptied => "emptied",
            Self::Evicted => "evicted",
            Self::Suspected => "suspected",
        }
    }
}

/// A loss in the list that all processes of a store share.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredLoss {
    /// The adapter that has found the loss: a random text, new with each adapter. Several adapters report
    /// the same loss.
    pub process: String,
    /// The loss. Its times are those of that adapter's machine, in milliseconds.
    pub loss: StoreLoss,
}

/// The losses that this process has found.
#[derive(Debug)]
pub(super) struct LossLog {
    process: String,
    /// The last number of a canary.
    number: AtomicU64,
    /// The key of the shared list.
    key: Vec<u8>,
    found: Mutex<VecDeque<StoreLoss>>,
    /// The losses that the shared list does not have yet.
    unstored: Mutex<VecDeque<StoreLoss>>,
}

impl LossLog {
    pub(super) fn new(prefix: &str) -> Self {
        let process = format!("{:016x}", rand::random::<u64>());
        let key = format!("{prefix}::losses").into_bytes();
        let number = AtomicU64::new(0);
        Self { process, number, key, found: Mutex::default(), unstored: Mutex::default() }
    }

    /// Returns the name of this adapter.
    pub(super) fn process(&self) -> &str {
        &self.process
    }

    /// Returns a number for a canary. The numbers of this adapter grow, over all its canaries.
    pub(super) fn next_number(&self) -> u64 {
        self.number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the losses, the newest last.
    pub(super) fn found(&self) -> Vec<StoreLoss> {
        locked(&self.found).iter().cloned().collect()
    }

    /// Reports a loss and keeps it.
    pub(super) fn tell(&self, loss: &StoreLoss) {
        let is_certain = matches!(loss.kind, LossKind::Rewound | LossKind::Emptied);
        let (since, intact) = (millis(loss.since), millis(loss.last_intact));
        observe::store_loss(loss.kind.as_str(), is_certain, &loss.primary, since, intact);
        for mut losses in [locked(&self.found), locked(&self.unstored)] {
            if losses.len() == MAX_LOSSES {
                losses.pop_front();
            }
            losses.push_back(loss.clone());
        }
    }

    /// Adds the losses to the list in the store that it does not have yet, until one call fails.
    pub(super) async fn store(&self, connections: &Connections) {
        loop {
            let first = locked(&self.unstored).front().cloned();
            let Some(loss) = first else { return };
            if self.push(connections, &loss).await.is_err() {
                return;
            }
            locked(&self.unstored).pop_front();
        }
    }

    async fn push(&self, connections: &Connections, loss: &StoreLoss) -> Result<(), Error> {
        let record = json!({
            "process": self.process,
            "kind": loss.kind.as_str(),
            "primary": loss.primary,
            "since": millis(loss.since),
            "last_intact": millis(loss.last_intact),
            "found_at": millis(loss.found_at),
        });
        let call = ScriptCall::new(&PUSH_LOSS, self.key.clone())
            .arg(record.to_string())
            .arg(MAX_LOSSES)
            .arg(LIFETIME.as_millis().to_string());
        connections.run_at_once(&call, "storing a loss").await.map(drop)
    }

    /// Returns the losses in the store, the newest last. Skips records of a version that this one cannot
    /// read.
    pub(super) async fn stored(&self, connections: &Connections) -> Result<Vec<StoredLoss>, Error> {
        let context = "reading the losses";
        let mut command = redis::cmd("LRANGE");
        command.arg(&self.key).arg(0).arg(-1);
        let reply = connections.send(&command, context).await?;
        let records: Vec<Vec<u8>> = redis::from_redis_value(reply)
            .map_err(|error| Error::new(ErrorKind::Corrupt, context).with_source(error))?;
        Ok(records.iter().rev().filter_map(|record| read(record)).collect())
    }
}

fn locked(losses: &Mutex<VecDeque<StoreLoss>>) -> MutexGuard<'_, VecDeque<StoreLoss>> {
    losses.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(record: &[u8]) -> Option<StoredLoss> {
    let record: serde_json::Value = serde_json::from_slice(record).ok()?;
    let text = |name: &str| record[name].as_str();
    let time = |name: &str| UNIX_EPOCH.checked_add(Duration::from_millis(record[name].as_u64()?));
    Some(StoredLoss {
        process: text("process")?.to_owned(),
        loss: StoreLoss {
            kind: LossKind::ALL.into_iter().find(|kind| Some(kind.as_str()) == text("kind"))?,
            primary: text("primary")?.to_owned(),
            since: time("since")?,
            last_intact: time("last_intact")?,
            found_at: time("found_at")?,
        },
    })
}

/// Rounds down, so that `since` stays a bound.
fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
