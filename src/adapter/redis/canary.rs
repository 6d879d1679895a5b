//! [`CanaryKey`]: a key that holds a growing number, to find writes that the store has lost.

use std::time::Duration;

use redis::Value;

use super::connections::{Connections, slot};
use super::history::{Canary, Marks};
use super::moment::Moment;
use super::script::{CANARY, ScriptCall};
use super::topology::CONTEXT;
use crate::error::{Error, ErrorKind};

/// The keys of ended processes go after this time.
const LIFETIME: Duration = Duration::from_secs(86_400);
/// A number that was written longer ago may have expired. The store's clock may be ahead.
const TRUSTED: Duration = Duration::from_secs(82_800);

/// A canary's key, and what it has to hold.
#[derive(Debug)]
pub(super) struct CanaryKey {
    key: Vec<u8>,
    slot: u16,
    /// The last number that was sent.
    sent: u64,
    /// The last number that was acknowledged, and when it was sent.
    acknowledged: Option<(u64, Moment)>,
    seeded: Moment,
    /// When each number was sent.
    marks: Marks,
}

impl CanaryKey {
    /// Returns a canary for a primary that owns these slots. `None` for a primary without slots.
    pub(super) fn new(prefix: &str, process: &str, slots: &[(u16, u16)]) -> Option<Self> {
        if slots.is_empty() {
            return None;
        }
        let owns = |slot: u16| slots.iter().any(|&(first, last)| (first..=last).contains(&slot));
        // A primary of one slot needs 16,384 attempts on average.
        let mut keys = (0..1_000_000_u32)
            .map(|tag| format!("{prefix}::canary:{process}:{{{tag}}}").into_bytes());
        let key = keys.find(|key| owns(slot(key)))?;
        Some(Self {
            slot: slot(&key),
            key,
            sent: 0,
            acknowledged: None,
            seeded: Moment::now(),
            marks: Marks::default(),
        })
    }

    pub(super) fn slot(&self) -> u16 {
        self.slot
    }

    /// Reads the number, and writes the next one if the number was not a loss.
    ///
    /// # Errors
    ///
    /// Those of the connections. The next call then accepts the old number and the new one.
    pub(super) async fn check(&mut self, connections: &Connections) -> Result<Canary, Error> {
        let at = Moment::now();
        let expected = self.acknowledged.filter(|(_, then)| then.until(at) < TRUSTED);
        let expected = expected.map_or(0, |(number, _)| number);
        if expected == 0 {
            self.restart();
            self.seeded = at;
        }
        self.sent += 1;
        self.marks.push(at, self.sent);
        let call = ScriptCall::new(&CANARY, self.key.clone())
            .arg(expected)
            .arg(self.sent)
            .arg(LIFETIME.as_millis().to_string());
        let found = match connections.run_at_once(&call, CONTEXT).await? {
            Value::Int(found) => u64::try_from(found).ok(),
            _ => return Err(Error::new(ErrorKind::Corrupt, CONTEXT)),
        };
        let canary = match found {
            _ if expected == 0 => Canary::New,
            None => Canary::Missing(self.seeded),
            Some(found) if found < expected => Canary::Behind(self.marks.last_below(found + 1)),
            Some(found) => Canary::Intact(self.marks.last_below(found + 1).unwrap_or(self.seeded)),
        };
        if !canary.is_bad() {
            self.acknowledged = Some((self.sent, at));
        }
        Ok(canary)
    }

    /// Expects nothing of the next number.
    pub(super) fn restart(&mut self) {
        self.acknowledged = None;
        self.marks = Marks::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canary_lies_in_a_slot_of_its_primary() {
        let canary = CanaryKey::new("dedup", "p", &[(7, 7), (16_383, 16_383)]).unwrap();
        assert!([7, 16_383].contains(&canary.slot()));
        let theirs = redis::cluster_routing::Slot::for_key(&canary.key);
        assert_eq!(redis::cluster_routing::Slot::new(canary.slot()), Some(theirs));
        assert!(CanaryKey::new("dedup", "p", &[]).is_none());
    }
}
