//! [`Senders`]: which sessions may send statements to the server, so that abandoned ones do not use
//! up its sessions.
//!
//! The server may still run an abandoned statement: its session waits for a lock, until the server
//! notices that the client has gone; or for a disk or a standby. The adapter does not look for that
//! session. Without a bound, each call would leave one more. So [`Senders`] counts them:
//!
//! 1. An abandoned statement is counted until a statement succeeds that may wait for the same: see
//!    [`Work`].
//! 2. From [`MOST`] on, only one session sends at a time, the *probe*, and the others wait for its
//!    end. Statements that were sent before may be abandoned, too. Reads continue while no read was
//!    abandoned; after that, they have a probe of their own. So the number of sessions is at most
//!    the sum of [`MOST`], the connections, [`OTHERS`] that read, and the two probes.
//! 3. A probe waits for as long as the count has been that high, because an abandoned probe leaves
//!    one more session.
//! 4. The connection of a probe may become silent meanwhile, as in a failover that ends the fault.
//!    So the adapter asks the server repeatedly, over a new connection, whether it runs the probe.
//!    If not, the probe is abandoned at once, because it leaves no session on this server. If no
//!    answer comes, or the answer may be wrong, the probe continues to wait.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time;

use super::statements::TAG;

/// How many statements may be abandoned before only one session sends.
const MOST: usize = 8;
/// A probe has at least so many times as long as another statement.
const PROBE: u32 = 12;
/// How many sessions send beside the batches: those of operators, purges, and reads of stored
/// responses.
pub(super) const OTHERS: usize = 4;

/// What a statement may wait for. Each kind may also wait for what the kinds before it wait for.
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
    _place: Option<OwnedSemaphorePermit>,
    /// The turn of the probe, which has this time for a statement.
    probe: Option<(OwnedSemaphorePermit, Duration)>,
}

impl Permission {
    pub(super) fn is_probe(&self) -> bool {
        self.probe.is_some()
    }

    /// Returns how long a statement may take.
    pub(super) fn bound(&self, usual: Duration) -> Duration {
        self.probe.as_ref().map_or(usual, |(_, bound)| usual.max(*bound))
    }

    /// Returns the statement as it is sent. That of a probe begins with a mark, by which the server
    /// is asked for it.
    pub(super) fn mark(&self, sql: &Arc<str>) -> (Arc<str>, Option<String>) {
        if !self.is_probe() {
            return (Arc::clone(sql), None);
        }
        let mark = format!("{TAG}/* {:032x} */ ", rand::random::<u128>());
        ([&mark, &**sql].concat().into(), Some(mark))
    }
}

/// Lets sessions send, and counts the statements that were abandoned.
pub(super) struct Senders {
    alone: Arc<Semaphore>,
    others: Arc<Semaphore>,
    probe: Arc<Semaphore>,
    /// Reads have a probe of their own: one that was late, or whose caller has gone, must not hold
    /// up the others for as long as a write waits.
    read_probe: Arc<Semaphore>,
    pub(super) statement_timeout: Duration,
    abandoned: Mutex<Abandoned>,
}

#[derive(Default)]
struct Abandoned {
    /// The abandoned statements, by [`Work`].
    counts: [usize; 3],
    /// The time since which there are too many.
    since: Option<time::Instant>,
}

impl Abandoned {
    fn are_too_many(&self) -> bool {
        self.counts.iter().sum::<usize>() >= MOST
    }

    /// Returns `true` if only the probe may send such a statement.
    fn hold_up(&self, work: Work) -> bool {
        self.are_too_many() && (work != Work::Read || self.counts[Work::Read as usize] > 0)
    }
}

impl Senders {
    pub(super) fn new(alone: usize, statement_timeout: Duration) -> Self {
        let of = |count: usize| Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
        let [alone, others, probe, read_probe] = [alone, OTHERS, 1, 1].map(of);
        let abandoned = Mutex::default();
        Self { alone, others, probe, read_probe, statement_timeout, abandoned }
    }

    /// Waits until this sender may send such a statement, and those that wait for less.
    pub(super) async fn permission(&self, sender: Sender, work: Work) -> Permission {
        // No semaphore is ever closed.
        let acquire = async |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned().await.ok();
        loop {
            // A sender that waits for the turn holds no place, because reads need the places.
            if !self.abandoned().hold_up(work) {
                let place = match sender {
                    Sender::Batch => None,
                    Sender::Alone => acquire(&self.alone).await,
                    Sender::Other => acquire(&self.others).await,
                };
                if !self.abandoned().hold_up(work) {
                    return Permission { _place: place, probe: None };
                }
            }
            let probe = if work == Work::Read { &self.read_probe } else { &self.probe };
            let turn = acquire(probe).await;
            let abandoned = self.abandoned();
            if abandoned.hold_up(work) {
                let lasted = abandoned.since.map_or(Duration::ZERO, |since| since.elapsed());
                let bound = self.statement_timeout.saturating_mul(PROBE).max(lasted);
                return Permission { _place: None, probe: turn.map(|turn| (turn, bound)) };
            }
        }
    }

    /// Returns `true` if writes wait for the probe.
    pub(super) fn hold_up_writes(&self) -> bool {
        self.abandoned().are_too_many()
    }

    pub(super) fn abandoned_one(&self, work: Work) {
        let mut abandoned = self.abandoned();
        abandoned.counts[work as usize] += 1;
        if abandoned.are_too_many() {
            abandoned.since.get_or_insert_with(time::Instant::now);
        }
    }

    /// Notes that a statement has succeeded: no statement that may wait for no more than this one
    /// is held up any longer.
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
    use futures_util::FutureExt;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A read goes on beside the probe, and beside any number of writes that wait for it, unless a
    /// read was abandoned.
    #[tokio::test(start_paused = true)]
    async fn only_one_session_sends_after_many_were_abandoned_until_one_succeeds() {
        // An answer to a read says nothing of writes, nor one to a write that does not wait for the
        // disk of those that do.
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
                let permission = senders.permission(Sender::Batch, Work::DurableWrite).await;
                assert_eq!(permission.bound(SECOND), SECOND);
                senders.abandoned_one(lost);
            }
            let probe = senders.permission(Sender::Batch, Work::DurableWrite).await;
            assert_eq!(probe.bound(SECOND), 12 * SECOND);
            let waits = || Box::pin(senders.permission(Sender::Other, Work::DurableWrite));
            let mut all_waiting: Vec<_> = (0..=OTHERS).map(|_| waits()).collect();
            for waiting in &mut all_waiting {
                assert!(waiting.now_or_never().is_none(), "{lost:?}");
            }
            let read = senders.permission(Sender::Other, Work::Read).now_or_never();
            let beside = read.as_ref().is_some_and(|read| !read.is_probe());
            assert_eq!((beside, senders.hold_up_writes()), (lost != Work::Read, true), "{lost:?}");
            // The probe of reads.
            assert!(read.is_some(), "{lost:?}");
            let waiting = all_waiting.swap_remove(0);
            drop(all_waiting);
            time::advance(60 * SECOND).await;
            senders.succeeded(succeeded);
            let others = senders.permission(Sender::Batch, Work::DurableWrite).now_or_never();
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
            time::advance(86_400 * SECOND).await;
            senders.abandoned_one(Work::DurableWrite);
        }
        let bound = senders.permission(Sender::Batch, Work::DurableWrite).await.bound(SECOND);
        assert_eq!(bound, 12 * SECOND);
        time::advance(60 * SECOND).await;
        let bound = senders.permission(Sender::Batch, Work::DurableWrite).await.bound(SECOND);
        assert_eq!(bound, 60 * SECOND);
    }
}
