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

/// What the script returns if the primary has another replication id.
const ANOTHER_ID: i64 = -2;

/// A canary's key, and what it has to hold.
#[derive(Debug)]
pub(super) struct CanaryKey {
    key: Vec<u8>,
    slot: u16,
    /// The last number that was acknowledged, and when it was sent.
    acknowledged: Option<(u64, Moment)>,
    seeded: Moment,
    /// When each acknowledged number was sent. Where another number has arrived, nobody knows.
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
            acknowledged: None,
            seeded: Moment::now(),
            marks: Marks::default(),
        })
    }

    pub(super) fn slot(&self) -> u16 {
        self.slot
    }

    /// Reads the number, and writes the next one if the number was not a loss. `id` is the replication id
    /// that the primary has named. `number` is larger than all that this process has sent: a slot that
    /// moves away and comes back brings an old canary. Returns `None` if a primary of another replication
    /// id has replied: nothing is read and nothing written.
    ///
    /// # Errors
    ///
    /// Those of the connections. The next call then accepts the old number and the new one.
    pub(super) async fn check(
        &mut self,
        connections: &Connections,
        number: u64,
        id: Option<&str>,
    ) -> Result<Option<Canary>, Error> {
        let at = Moment::now();
        if self.acknowledged.is_none_or(|(_, then)| then.until(at) >= TRUSTED) {
            self.restart();
            self.seeded = at;
        }
        let call = ScriptCall::new(&CANARY, self.key.clone())
            .arg(self.acknowledged.map_or(0, |(number, _)| number))
            .arg(number)
            .arg(LIFETIME.as_millis().to_string())
            .arg(id.unwrap_or_default());
        match connections.run_at_once(&call, CONTEXT).await? {
            Value::Int(ANOTHER_ID) => Ok(None),
            Value::Int(found) => Ok(Some(self.take(u64::try_from(found).ok(), number, at))),
            _ => Err(Error::new(ErrorKind::Corrupt, CONTEXT)),
        }
    }

    /// Takes in what was there when the number was sent.
    fn take(&mut self, found: Option<u64>, number: u64, at: Moment) -> Canary {
        if found > Some(number) {
            // It is not of this process, and the script has written nothing.
            self.restart();
            return Canary::New;
        }
        let canary = match (self.acknowledged, found) {
            (None, _) => Canary::New,
            (Some(_), None) => Canary::Missing(self.seeded),
            (Some((expected, _)), Some(found)) if found < expected => {
                Canary::Behind(self.marks.last_below(found + 1))
            }
            (Some((_, then)), Some(_)) => Canary::Intact(then),
        };
        if !canary.is_bad() {
            self.acknowledged = Some((number, at));
            self.marks.push(at, number);
        }
        canary
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

    #[test]
    fn number_bounds_a_loss_by_the_acknowledged_ones() {
        let begin = Moment::now();
        let time = |second| begin + Duration::from_secs(second);
        // 10 to 30 are acknowledged. The reply of 25 was lost.
        let cases = [
            ("acknowledged", Some(30), Canary::Intact(time(30))),
            ("sent, and its reply was lost", Some(35), Canary::Intact(time(30))),
            ("older", Some(20), Canary::Behind(Some(time(20)))),
            ("older, and its reply was lost", Some(25), Canary::Behind(Some(time(20)))),
            ("before the first", Some(9), Canary::Behind(None)),
            ("gone", None, Canary::Missing(time(10))),
            ("larger than all that were sent", Some(41), Canary::New),
        ];
        for (name, found, expected) in cases {
            let mut canary = CanaryKey::new("dedup", "p", &[(0, 16_383)]).unwrap();
            canary.seeded = time(10);
            for number in [10, 20, 30] {
                canary.take(canary.acknowledged.map(|it| it.0), number, time(number));
            }
            assert_eq!(canary.take(found, 40, time(40)), expected, "{name}");
            let next = match expected {
                Canary::Intact(_) => Some((40, time(40))),
                Canary::New => None,
                _ => Some((30, time(30))),
            };
            assert_eq!(canary.acknowledged, next, "{name}");
        }
    }

    #[test]
    fn first_number_says_nothing_of_what_was_there() {
        for found in [None, Some(1), Some(9)] {
            let mut canary = CanaryKey::new("dedup", "p", &[(0, 16_383)]).unwrap();
            let at = Moment::now();
            assert_eq!(canary.take(found, 10, at), Canary::New);
            assert_eq!(canary.acknowledged, Some((10, at)));
        }
    }
}
