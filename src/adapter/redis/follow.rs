//! [`Follower`]: the task that looks for writes that the store has lost.
//!
//! The first call of an adapter starts the task on the runtime of that call. The task ends with the adapter,
//! with `close` and with that runtime; a later call on another runtime starts it again, also if the first
//! runtime exists and is not driven. It does nothing while tokio's clock is paused.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join;

use super::super::background::{BackgroundTask, is_clock_paused};
use super::connections::Connections;
use super::losses::{LossLog, StoreLoss, StoredLoss};
use super::options::RedisOptions;
use super::rounds::Rounds;
use super::topology::CONTEXT;
use crate::error::{Error, ErrorKind};
use crate::observe;

/// Longer than the bounds of the calls. It ends a round in which a call hangs.
const ROUND_TIMEOUT: Duration = Duration::from_secs(10);

/// At most one task at a time. It ends when this is dropped or stopped.
pub(super) struct Follower {
    /// `None` if nothing is followed.
    every: Option<Duration>,
    prefix: String,
    log: Arc<LossLog>,
    task: BackgroundTask,
}

impl Follower {
    pub(super) fn new(options: &RedisOptions) -> Self {
        Self {
            every: options.follow_every,
            prefix: options.prefix.clone(),
            log: Arc::new(LossLog::new(&options.prefix)),
            task: BackgroundTask::new(options.follow_every.is_none()),
        }
    }

    /// Starts the task on the current runtime, unless one exists. The task does not own the connections.
    pub(super) fn ensure(&self, connections: &Arc<Connections>) {
        if self.task.is_running() {
            return;
        }
        let Some(every) = self.every else { return };
        self.task.ensure(|stop| {
            let connections = Arc::downgrade(connections);
            let rounds = Rounds::new(self.prefix.clone(), Arc::clone(&self.log));
            async move {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = follow(rounds, every, &connections) => {}
                }
            }
        });
    }

    /// Returns the losses that this process has found, the newest last.
    pub(super) fn losses(&self) -> Vec<StoreLoss> {
        self.log.found()
    }

    /// Returns the losses that all processes have found, the newest last.
    pub(super) async fn stored_losses(
        &self,
        connections: &Connections,
    ) -> Result<Vec<StoredLoss>, Error> {
        self.log.stored(connections).await
    }

    /// Ends the task at once, for good.
    pub(super) fn stop(&self) {
        self.task.stop();
    }
}

async fn follow(mut rounds: Rounds, every: Duration, connections: &Weak<Connections>) {
    let mut is_failing = false;
    while !is_clock_paused() {
        let Some(strong) = connections.upgrade() else { return };
        // A server that may not be used has a record of its own.
        let both = join(rounds.run(&strong), strong.check());
        let round = tokio::time::timeout(ROUND_TIMEOUT, both).await.map(|(round, _)| round);
        drop(strong);
        let timeout = |_| Err(Error::new(ErrorKind::Timeout, CONTEXT));
        let round = round.unwrap_or_else(timeout);
        match &round {
            Ok(()) if is_failing => observe::losses_followed_again(),
            Err(error) if !is_failing => observe::losses_not_followed(error),
            _ => {}
        }
        is_failing = round.is_err();
        tokio::time::sleep(every).await;
    }
}
