//! Calls that follow each other, as [`follows`] holds them to the model.
//!
//! A store may clear an expired key away whenever it likes, and some calls can tell. So the model
//! keeps, for every key, all that may be stored: an answer has to be that of one of them, and those
//! that would have answered otherwise are dropped.

use std::collections::BTreeSet;

use super::backends::World;
use super::call::{Call, KEYS};
use super::contract::{Answer, Row, contract};
use super::driver::{STEP, Told, ask};

/// All that may be stored of a key.
pub(crate) type Rows = BTreeSet<Option<Row>>;

/// What expired may have been cleared away.
pub(crate) fn clear(rows: &mut Rows, now: u32) {
    if rows.iter().flatten().any(|row| row.is_expired(now)) {
        rows.insert(None);
    }
}

/// Whether an empty store answers this schedule as the contract says, and if not, where it fails.
/// Each of its adapters is asked in turn.
pub(crate) async fn follows<W: World>(world: &mut W, schedule: &[Call]) -> Result<(), String> {
    world.empty().await;
    let (adapters, mut model) = (world.adapters(), Model::new());
    for (number, call) in schedule.iter().enumerate() {
        if let Call::Advance(steps) = call {
            world.advance(STEP * *steps).await;
            model.now += steps;
            continue;
        }
        for rows in &mut model.keys {
            clear(rows, model.now);
        }
        let told = ask(&adapters[number % adapters.len()], call).await;
        told.and_then(|told| model.told(call, told))
            .map_err(|fault| format!("call {number}, {call:?}: {fault}"))?;
    }
    Ok(())
}

struct Model {
    now: u32,
    keys: Vec<Rows>,
}

impl Model {
    fn new() -> Self {
        Self { now: 0, keys: vec![BTreeSet::from([None]); KEYS] }
    }

    fn told(&mut self, call: &Call, told: Told) -> Result<(), String> {
        match (call, told) {
            (Call::Purge(limit), Told::Number(purged)) => self.purged(*limit, purged),
            (_, Told::Number(count)) => self.counted(count),
            (_, Told::Keys(answers)) => {
                answers.iter().try_for_each(|(key, answer)| self.answered(call, *key, answer))
            }
        }
    }

    fn answered(&mut self, call: &Call, key: usize, answer: &Answer) -> Result<(), String> {
        let outcomes = self.keys[key].iter().map(|row| contract(call, row.clone(), self.now));
        let (right, wrong): (Vec<_>, Vec<_>) = outcomes.partition(|(right, _)| right == answer);
        if right.is_empty() {
            let allowed: Vec<_> = wrong.into_iter().map(|(answer, _)| answer).collect();
            return Err(format!("key {key}: {answer:?}, but the contract says {allowed:?}"));
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
        // Fewer than it might have: there are no more.
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
