//! [`Rounds`]: the rounds of a [`Follower`](super::follow::Follower), over all primaries of a store.
//!
//! 1. Each round asks every primary for its replication state, and then reads and writes its canary. The
//!    canary comes last: it finds a loss that is too late for the offset of its round. A primary whose
//!    replication id has changed in between does not take the canary's number.
//! 2. A round decides nothing about a primary that it does not reach. The next round compares with the last
//!    one that reached it.
//! 3. In a cluster, a primary that is gone has a successor: the one that continues its history, else the
//!    one that is new and owns the slot of its canary.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;

use super::canary::CanaryKey;
use super::connections::Connections;
use super::history::{Canary, History};
use super::losses::{LossLog, StoreLoss};
use super::moment::Moment;
use super::topology::{CONTEXT, Info, Node, Questions, nodes};
use crate::error::{Error, ErrorKind};

/// How long a primary that has left the cluster is remembered, in case that its successor appears.
const REMEMBERED: Duration = Duration::from_secs(600);

pub(super) struct Rounds {
    prefix: String,
    log: Arc<LossLog>,
    questions: Questions,
    shards: Vec<Shard>,
}

/// A primary, and those that took its place.
struct Shard {
    address: String,
    /// The slots at the last poll.
    slots: Vec<(u16, u16)>,
    history: History,
    canary: Option<CanaryKey>,
    /// The last poll after which nothing was untold.
    intact_at: Moment,
    gone_at: Option<Instant>,
}

impl Shard {
    /// Returns `true` for ranges of slots that this primary did not have.
    fn gains(&self, slots: &[(u16, u16)]) -> bool {
        let had = |&(first, last): &(u16, u16)| {
            self.slots.iter().any(|&(from, to)| from <= first && last <= to)
        };
        !slots.iter().all(had)
    }
}

impl Rounds {
    pub(super) fn new(prefix: String, log: Arc<LossLog>) -> Self {
        let questions = Questions::default();
        Self { prefix, log, questions, shards: Vec::new() }
    }

    /// Polls every primary once.
    ///
    /// # Errors
    ///
    /// The first error of a primary. The other primaries were polled.
    pub(super) async fn run(&mut self, connections: &Connections) -> Result<(), Error> {
        let nodes = nodes(connections).await?;
        let infos = nodes.iter().map(|node| self.questions.info(connections, &node.primary));
        let infos = join_all(infos).await;
        let nodes: Vec<_> = nodes.into_iter().zip(infos).collect();
        self.assign(&nodes);
        let poller = Poller {
            prefix: &self.prefix,
            log: &self.log,
            questions: &self.questions,
            connections,
        };
        let polls = self.shards.iter_mut().filter_map(|shard| {
            let node = nodes.iter().find(|(node, _)| node.primary.address == shard.address)?;
            let info = node.1.as_ref().ok()?;
            Some(poller.poll(shard, &node.0, info))
        });
        let result = join_all(polls).await.into_iter().collect();
        self.log.store(connections).await;
        let unreached = nodes.into_iter().find_map(|(_, info)| info.err());
        unreached.map_or(result, Err)
    }

    /// Gives each shard its primary.
    fn assign(&mut self, nodes: &[(Node, Result<Info, Error>)]) {
        let is_taken = |shards: &[Shard], node: &Node| {
            shards.iter().any(|shard| shard.address == node.primary.address)
        };
        let mut free: Vec<_> =
            nodes.iter().filter(|(node, _)| !is_taken(&self.shards, node)).collect();
        for shard in &mut self.shards {
            if nodes.iter().any(|(node, _)| node.primary.address == shard.address) {
                shard.gone_at = None;
                continue;
            }
            let slot = shard.canary.as_ref().map(CanaryKey::slot);
            let continues = free.iter().position(|(_, info)| {
                let Ok(Info::Primary(now)) = info else { return false };
                shard.history.is_continued_by(now)
            });
            let owns = |(node, _): &&(Node, _)| slot.is_some_and(|slot| node.owns(slot));
            if let Some(at) = continues.or_else(|| free.iter().position(owns)) {
                shard.address.clone_from(&free.remove(at).0.primary.address);
                shard.gone_at = None;
            } else {
                shard.gone_at.get_or_insert_with(Instant::now);
            }
        }
        self.shards.retain(|shard| shard.gone_at.is_none_or(|gone| gone.elapsed() < REMEMBERED));
        // A node that was not reached may turn out to be a successor.
        for (node, _) in free.into_iter().filter(|(_, info)| info.is_ok()) {
            self.shards.push(Shard {
                address: node.primary.address.clone(),
                slots: node.slots.clone(),
                history: History::default(),
                canary: None,
                intact_at: Moment::now(),
                gone_at: None,
            });
        }
    }
}

struct Poller<'a> {
    prefix: &'a str,
    log: &'a LossLog,
    questions: &'a Questions,
    connections: &'a Connections,
}

impl Poller<'_> {
    /// Checks the canary of a primary, decides, and tells.
    async fn poll(&self, shard: &mut Shard, node: &Node, info: &Info) -> Result<(), Error> {
        if shard.gains(&node.slots) {
            shard.history.gain_slots(Moment::now());
        }
        shard.slots.clone_from(&node.slots);
        // A slot that moves takes its keys along, so a canary that has moved is no loss.
        if !shard.canary.as_ref().is_some_and(|canary| node.owns(canary.slot())) {
            shard.canary = CanaryKey::new(self.prefix, self.log.process(), &node.slots);
        }
        let Some(canary) = &mut shard.canary else { return Ok(()) };
        let mut now = match info {
            Info::Primary(now) => Some(now.clone()),
            Info::Refused => None,
        };
        let polled_at = now.as_ref().map_or_else(Moment::now, |now| now.at);
        let id = now.as_ref().map(|now| now.id.clone());
        let number = self.log.next_number();
        let checked = canary.check(self.connections, number, id.as_deref()).await?;
        let found = checked.unwrap_or(Canary::New);
        if found.is_bad() {
            // If the primary was replaced since, the canary stays as it is, for the next round.
            let (primary, slot) = (&node.primary, canary.slot());
            let nodes = nodes(self.connections).await?;
            if !nodes.iter().any(|node| node.primary == *primary && node.owns(slot)) {
                return Ok(());
            }
            if now.is_some() {
                // The server may have evicted the canary since.
                now = match self.questions.info(self.connections, primary).await? {
                    Info::Primary(now) => Some(now),
                    Info::Refused => None,
                };
                if now.as_ref().is_some_and(|now| Some(&now.id) != id.as_ref()) {
                    return Ok(());
                }
            }
        }
        let found_at = Moment::now();
        let loss = shard.history.judge(now.as_ref(), found).map(|verdict| StoreLoss {
            kind: verdict.kind,
            primary: shard.address.clone(),
            since: verdict
                .since
                .map_or(SystemTime::UNIX_EPOCH, |since| since.by_clock_of(found_at)),
            last_intact: shard.intact_at.by_clock_of(found_at),
            found_at: found_at.by_clock_of(found_at),
        });
        // Without `INFO`, evictions do not show.
        let knows_evictions = now.is_some() || !shard.history.has_polls();
        if let Some(now) = now {
            shard.history.record(now, loss.as_ref().map(|loss| loss.kind));
        }
        if checked.is_some() && knows_evictions && !shard.history.has_unreported_evictions() {
            shard.intact_at = polled_at;
        }
        if let Some(loss) = &loss {
            self.log.tell(loss);
        }
        if found.is_bad() {
            canary.restart();
            // At once: until it is written again, another loss would not show.
            let _ = canary.check(self.connections, self.log.next_number(), id.as_deref()).await;
        }
        checked.map(drop).ok_or_else(|| Error::new(ErrorKind::Refused, CONTEXT))
    }
}
