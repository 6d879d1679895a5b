//! [`State`]: the inbox's table, the keys of the ledger, and all runs of the handler.

use super::world::{ATTEMPTS, Fault, Left};

/// A set of small numbers.
pub(crate) type Mask = u8;

pub(crate) const EVENTS: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// The keys of the events. Those that a new version reads come after the others.
    pub(crate) keys: [Key; 2 * EVENTS],
    pub(crate) events: [Event; EVENTS],
    pub(crate) rows: Vec<Row>,
    /// The deliveries, and then the loop of each process: it has one slot.
    pub(crate) runs: Vec<Run>,
    pub(crate) next_seq: u8,
    pub(crate) left: Left,
    /// For each process: its layers that are switched from `Enforce` to another mode.
    pub(crate) switched: [Mask; 2],
    /// The processes that have the new version of the application.
    pub(crate) deployed: [bool; 2],
    /// The purge has read this row in this version, and deletes it next.
    pub(crate) purges: Option<(u8, u8)>,
    pub(crate) violation: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Free,
    /// Under a lease of this run. A lease that has lapsed is free: the first COMMIT wins.
    Held(usize),
    /// By an effect of this body.
    Complete(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Event {
    /// Committed effects since the key was forgotten, at most 2.
    pub(crate) effects: u8,
    /// The bodies that have an effect.
    pub(crate) bodies: Mask,
    /// An operator forgot the key, or the event ran unprotected. A second effect is no violation.
    pub(crate) is_excused: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Row {
    pub(crate) seq: u8,
    /// The delivery whose request it has.
    pub(crate) of: usize,
    pub(crate) place: Place,
    pub(crate) fails: u8,
    pub(crate) deaths: u8,
    pub(crate) misroutes: u8,
    pub(crate) version: u8,
    pub(crate) answered: Answered,
    /// Its handler has begun.
    pub(crate) has_run: bool,
    /// Its insertion waited for the disk.
    pub(crate) is_durable: bool,
    /// All keys were complete when it was inserted.
    pub(crate) is_late: bool,
    /// It has keys of the new version.
    pub(crate) is_rekeyed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Place {
    #[default]
    Due,
    /// After a delay.
    Later,
    /// Taken by this run.
    Held(usize),
    /// Taken, and the process does not know it: the reply was lost.
    Unheard,
    Parked(Reason),
    /// Deleted. A crash of the database brings it back.
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    Failed,
    Died,
    Misrouted,
    Mismatch,
    /// Without an alert.
    Refused,
    Expired,
}

/// Whether *stored* has left for this row: a column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) enum Answered {
    #[default]
    No,
    /// Written, and lost if the database crashes.
    Volatile,
    Yes,
}

/// A delivery, or the redelivery that a loop makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Run {
    pub(crate) phase: Phase,
    /// The delivery whose request it has.
    pub(crate) of: usize,
    /// Its row, and the version in which it was taken.
    pub(crate) row: Option<(u8, u8)>,
    /// Only without [`Rule::AnsweredIsRead`](super::world::Rule): `answered` when the row was taken.
    pub(crate) was_answered: bool,
    /// A redelivery: its row has keys of the new version.
    pub(crate) is_rekeyed: bool,
    /// The keys that it has claimed.
    pub(crate) claimed: Mask,
    /// The end after a success, if not all events are complete.
    pub(crate) instead: Option<End>,
    /// Its statement for `answer_within` was sent.
    pub(crate) is_early: bool,
    /// The sender has a 2xx.
    pub(crate) is_acknowledged: bool,
    /// The sender has *stored*, and the event must have its effect, or be parked.
    pub(crate) is_owed: bool,
    /// `dedup` was asked.
    pub(crate) has_asked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Phase {
    /// A delivery that was not sent, or a free slot of a loop.
    #[default]
    Idle,
    /// A redelivery is under way to the layer.
    Calls,
    /// `dedup` reads its mode, and asks the ledger.
    Claims,
    Runs,
    /// The handler runs in a layer that is in shadow or off. `true`: a second effect is no violation.
    Unprotected(bool),
    /// `dedup` has answered, and the row is written next.
    Ends(End),
    Done,
    Dead,
    /// The sender had a reason not to send.
    Unsent,
}

/// The end of a run: `DeliveryEnd`, and what `around` and the loop add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum End {
    Complete,
    Mismatch,
    /// `Released` with a 4xx that says that another attempt is in vain.
    Refused,
    Released,
    InFlight,
    /// `true`: the handler succeeded.
    Undecided(bool),
    /// A redelivery that calls no handler, or none that reports. `true`: a handler without `around` may have run.
    Misrouted(bool),
}

impl State {
    pub(crate) fn new(deliveries: usize, left: Left) -> Self {
        Self {
            keys: [Key::Free; 2 * EVENTS],
            events: [Event::default(); EVENTS],
            rows: Vec::new(),
            runs: (0..deliveries).chain([0, 0]).map(Run::of).collect(),
            next_seq: 0,
            left,
            switched: [0; 2],
            deployed: [false; 2],
            purges: None,
            violation: None,
        }
    }

    /// Returns the state after something that may happen a bounded number of times.
    pub(crate) fn paying(&self, fault: Fault) -> Option<Self> {
        let mut left = self.left;
        left[fault as usize] = left[fault as usize].checked_sub(1)?;
        Some(Self { left, ..self.clone() })
    }

    pub(crate) fn row(&mut self, seq: u8) -> Option<&mut Row> {
        self.rows.iter_mut().find(|row| row.seq == seq && row.place != Place::Gone)
    }

    /// A COMMIT waits for the disk. It makes the earlier ones durable, too.
    pub(crate) fn flush(&mut self) {
        self.rows.retain(|row| row.place != Place::Gone);
        for row in &mut self.rows {
            row.is_durable = true;
            row.answered = if row.answered == Answered::No { Answered::No } else { Answered::Yes };
        }
    }

    pub(crate) fn delete(&mut self, seq: u8) {
        if self.left[Fault::Crash as usize] > 0 {
            self.row(seq).expect("the row exists").place = Place::Gone;
        } else {
            self.rows.retain(|row| row.seq != seq);
        }
    }

    pub(crate) fn is_alive(&self, run: usize) -> bool {
        let phase = self.runs[run].phase;
        !matches!(phase, Phase::Idle | Phase::Done | Phase::Dead | Phase::Unsent)
    }

    pub(crate) fn release(&mut self, run: usize) {
        let claimed = std::mem::take(&mut self.runs[run].claimed);
        for key in members(claimed) {
            if self.keys[key] == Key::Held(run) {
                self.keys[key] = Key::Free;
            }
        }
    }
}

/// Returns the numbers of a set.
pub(crate) fn members(mask: Mask) -> impl Iterator<Item = usize> {
    (0..8).filter(move |place| mask & 1 << place != 0)
}

impl Run {
    fn of(of: usize) -> Self {
        Self { of, ..Self::default() }
    }

    pub(crate) fn say_stored(&mut self) {
        (self.is_acknowledged, self.is_owed) = (true, true);
        self.rest(Phase::Done);
    }

    /// Forgets what a run knows that has ended.
    pub(crate) fn rest(&mut self, phase: Phase) {
        let Self { of, is_acknowledged, is_owed, has_asked, .. } = *self;
        let run = Self::of(if phase == Phase::Idle { 0 } else { of });
        let has_asked = has_asked && phase != Phase::Idle && !is_acknowledged;
        *self = Self { phase, is_acknowledged, is_owed, has_asked, ..run };
    }
}

impl Row {
    /// Makes a waiting or parked row due, with one more attempt at least.
    pub(crate) fn wake(&mut self) {
        self.place = Place::Due;
        if self.fails + self.deaths >= ATTEMPTS {
            (self.fails, self.deaths) = (ATTEMPTS - 1, 0);
        }
        self.misroutes = self.misroutes.min(ATTEMPTS - 1);
    }
}
