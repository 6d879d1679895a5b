//! [`Senders`]: who may send statements, and how many statements were *abandoned*: those that took too long, or whose
//! caller was dropped.
//!
//! The server may still run an abandoned statement: its session waits for a lock, until the server notices that the
//! client has gone; or for a disk or a standby. The adapter does not look for that session. Without a bound, each
//! call would leave one more.
//!
//! 1. An abandoned statement is counted until one succeeds that may wait for as much: see [`Work`].
//! 2. From [`MOST`] on, only one session sends at a time, the *probe*, and the others wait for its end. Those that were
//!    sending before may be abandoned too. So there are at most as many sessions as this number and the connections,
//!    and the probe.
//! 3. A probe waits for as long as there have been so many, because one that is abandoned leaves one more session. If
//!    its connection falls silent meanwhile, the adapter waits in vain for that long.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// How many statements may be abandoned before only one session sends.
const MOST: usize = 8;
/// A probe has at least so many times as long as another statement.
const PROBE: u32 = 12;
/// How many sessions send beside the batches: those of operators, purges, and reads of stored responses.
pub(super) const OTHERS: usize = 4;

/// What a statement may wait for. Each waits for what those before it wait for, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Waits for a lock of the table.
    Read,
    /// Waits for locks of rows, and for a synchronous standby.
    Write,
    /// Waits for the disk of the server.
    DurableWrite,
}

/// What sends statements.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sender {
    /// A worker of the queue. There are few.
    Batch,
    /// A call that waits for its row, beside the batches.
    Alone,
    Other,
}

/// The permission to send statements, one at a time.
pub(super) struct Permission {
    _bounded: Option<OwnedSemaphorePermit>,
    /// Of the probe, which has this time for a statement.
    probe: Option<(OwnedSemaphorePermit, Duration)>,
}

impl Permission {
    /// Returns how long a statement may take.
    pub(super) fn bound(&self, usual: Duration) -> Duration {
        self.probe.as_ref().map_or(usual, |(_, bound)| usual.max(*bound))
    }
}

pub(super) struct Senders {
    alone: Arc<Semaphore>,
    others: Arc<Semaphore>,
    probe: Arc<Semaphore>,
    /// The least time of a probe.
    probe_timeout: Duration,
    abandoned: Mutex<Abandoned>,
}

#[derive(Default)]
struct Abandoned {
    /// By [`Work`].
    counts: [usize; 3],
    /// Since when they are too many.
    since: Option<Instant>,
}

impl Abandoned {
    fn are_too_many(&self) -> bool {
        self.counts.iter().sum::<usize>() >= MOST
    }
}

impl Senders {
    pub(super) fn new(alone: usize, statement_timeout: Duration) -> Self {
        let of = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        let [alone, others, probe] = [alone, OTHERS, 1].map(of);
        let probe_timeout = statement_timeout.saturating_mul(PROBE);
        Self { alone, others, probe, probe_timeout, abandoned: Mutex::default() }
    }

    /// Waits until this sender may send.
    pub(super) async fn permission(&self, sender: Sender) -> Permission {
        // No semaphore is ever closed.
        let acquire = async |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned().await.ok();
        let bounded = match sender {
            Sender::Batch => None,
            Sender::Alone => acquire(&self.alone).await,
            Sender::Other => acquire(&self.others).await,
        };
        if !self.abandoned().are_too_many() {
            return Permission { _bounded: bounded, probe: None };
        }
        let probe = acquire(&self.probe).await;
        let abandoned = self.abandoned();
        let lasted = abandoned.since.map_or(Duration::ZERO, |since| since.elapsed());
        let probe = probe.filter(|_| abandoned.are_too_many());
        let probe = probe.map(|permit| (permit, self.probe_timeout.max(lasted)));
        Permission { _bounded: bounded, probe }
    }

    pub(super) fn abandoned_one(&self, work: Work) {
        let mut abandoned = self.abandoned();
        abandoned.counts[work as usize] += 1;
        if abandoned.are_too_many() {
            abandoned.since.get_or_insert_with(Instant::now);
        }
    }

    /// Notes that a statement has succeeded: no statement that may wait for no more than this one is held up any longer.
    pub(super) fn succeeded(&self, work: Work) {
        let mut abandoned = self.abandoned();
        abandoned.counts[..=work as usize].fill(0);
        if !abandoned.are_too_many() {
            abandoned.since = None;
        }
    }

    fn abandoned(&self) -> MutexGuard<'_, Abandoned> {
        self.abandoned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn only_one_session_sends_after_many_were_abandoned_until_one_succeeds() {
        // An answer to a read says nothing of writes, nor one to a write that does not wait for the disk of those that do.
        for (lost, succeeded, is_over) in [
            (Work::Read, Work::Read, true),
            (Work::Read, Work::DurableWrite, true),
            (Work::Write, Work::Read, false),
            (Work::Write, Work::Write, true),
            (Work::DurableWrite, Work::Write, false),
            (Work::DurableWrite, Work::DurableWrite, true),
        ] {
            let senders = Senders::new(1, SECOND);
            for _ in 0..MOST {
                let permission = senders.permission(Sender::Batch).await;
                assert_eq!(permission.bound(SECOND), SECOND);
                senders.abandoned_one(lost);
            }
            let probe = senders.permission(Sender::Batch).await;
            assert_eq!(probe.bound(SECOND), 12 * SECOND);
            let mut waiting = Box::pin(senders.permission(Sender::Other));
            assert!(waiting.as_mut().now_or_never().is_none(), "{lost:?}");
            tokio::time::advance(60 * SECOND).await;
            senders.succeeded(succeeded);
            let others = senders.permission(Sender::Batch).now_or_never();
            assert_eq!(others.is_some(), is_over, "{lost:?} {succeeded:?}");
            drop(probe);
            let bound = waiting.await.bound(SECOND);
            assert_eq!(bound, if is_over { SECOND } else { 60 * SECOND }, "{lost:?}");
        }
    }

    /// Otherwise a connection that falls silent would keep the service down for all these days.
    #[tokio::test(start_paused = true)]
    async fn a_probe_waits_no_longer_than_there_were_too_many_abandoned_statements() {
        let senders = Senders::new(1, SECOND);
        for _ in 0..MOST {
            tokio::time::advance(86_400 * SECOND).await;
            senders.abandoned_one(Work::DurableWrite);
        }
        let bound = senders.permission(Sender::Batch).await.bound(SECOND);
        assert_eq!(bound, 12 * SECOND);
        tokio::time::advance(60 * SECOND).await;
        let bound = senders.permission(Sender::Batch).await.bound(SECOND);
        assert_eq!(bound, 60 * SECOND);
    }
}
