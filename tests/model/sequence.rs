//! Calls that follow each other, as [`follows`] compares them with the model.
//!
//! A store may delete an expired key at any time, and some calls can see it. So the model holds all
//! rows that may be stored, for every key. A reply must be that of one of them. Rows with other
//! replies are dropped.

use std::collections::BTreeSet;

use super::backends::Backend;
use super::call::{Call, KEYS};
use super::contract::{Contract, Reply, Row};
use super::driver::{Replies, STEP, execute};

/// All rows of a key that may be stored.
pub(crate) type Rows = BTreeSet<Option<Row>>;

/// An expired row may have been deleted.
pub(crate) fn clear(rows: &mut Rows, now: u32) {
    if rows.iter().flatten().any(|row| row.is_expired(now)) {
        rows.insert(None);
    }
}

/// Checks that an empty store follows the contract in this schedule, and says where it does not.
/// The calls go to its adapters in turn.
pub(crate) async fn follows<W: Backend>(backend: &mut W, schedule: &[Call]) -> Result<(), String> {
    backend.empty().await;
    let (adapters, mut model) = (backend.adapters(), Model::new(W::CONTRACT));
    for (number, call) in schedule.iter().enumerate() {
        if let Call::Advance(steps) = call {
            backend.advance(STEP * *steps).await;
            model.now += steps;
            continue;
        }
        for rows in &mut model.keys {
            clear(rows, model.now);
        }
        let replied = execute(&adapters[number % adapters.len()], call).await;
        replied
            .and_then(|replied| model.replied(call, replied))
            .map_err(|fault| format!("call {number}, {call:?}: {fault}"))?;
    }
    Ok(())
}

struct Model {
    contract: Contract,
    now: u32,
    keys: Vec<Rows>,
}

impl Model {
    fn new(contract: Contract) -> Self {
        Self { contract, now: 0, keys: vec![BTreeSet::from([None]); KEYS] }
    }

    fn replied(&mut self, call: &Call, replied: Replies) -> Result<(), String> {
        match (call, replied) {
            (Call::Purge(limit), Replies::Number(purged)) => self.purged(*limit, purged),
            (_, Replies::Number(count)) => self.counted(count),
            (_, Replies::Keys(replies)) => {
                replies.iter().try_for_each(|(key, reply)| self.answered(call, *key, reply))
            }
        }
    }

    fn answered(&mut self, call: &Call, key: usize, reply: &Reply) -> Result<(), String> {
        let outcomes =
            self.keys[key].iter().map(|row| (self.contract)(call, row.clone(), self.now));
        let (right, wrong): (Vec<_>, Vec<_>) = outcomes.partition(|(right, _)| right == reply);
        if right.is_empty() {
            let allowed: Vec<_> = wrong.into_iter().map(|(reply, _)| reply).collect();
            return Err(format!("key {key}: {reply:?}, but the contract says {allowed:?}"));
        }
        self.keys[key] = right.into_iter().map(|(_, row)| row).collect();
        Ok(())
    }

    fn purged(&mut self, limit: u32, purged: u64) -> Result<(), String> {
        let now = self.now;
        let goes = |row: &Option<Row>| row.as_ref().is_some_and(|row| row.is_purged(now));
        let most = self.keys.iter().filter(|rows| rows.iter().any(goes)).count() as u64;
        if purged > most.min(limit.into()) {
            return Err(format!("{purged} were purged, but at most {most} expired a step ago"));
        }
        // Fewer than the limit: there are no more.
        if purged < limit.into() {
            for rows in &mut self.keys {
                rows.retain(|row| !goes(row));
            }
        }
        Ok(())
    }

    fn counted(&self, count: u64) -> Result<(), String> {
        let stored = |all: bool| {
            let is_stored = |rows: &&Rows| {
                if all { !rows.contains(&None) } else { rows.iter().any(Option::is_some) }
            };
            self.keys.iter().filter(is_stored).count() as u64
        };
        let (least, most) = (stored(true), stored(false));
        if (least..=most).contains(&count) {
            return Ok(());
        }
        Err(format!("{count} were counted, but there are {least} to {most}"))
    }
}
