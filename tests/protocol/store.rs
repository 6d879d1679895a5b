//! The store: one row for each key, and the rules by which calls change it.

use super::protocol::Rule;

/// The name of one claim.
pub(crate) type Token = u8;
pub(crate) type Key = u8;

pub(crate) const KEYS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) enum Row {
    #[default]
    Absent,
    Leased(Token),
    Lapsed(Token),
    Released,
    Complete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Call {
    Claim,
    Renew,
    Complete,
    Release,
}

/// The reply to a claim; the other calls have no reply that matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reply {
    First { takeover: bool },
    Duplicate,
    InFlight,
    Done,
}

pub(crate) type Rows = [Row; KEYS];

/// The rows of the primary, and what is checked about them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Store {
    /// The primary's rows after each write that the replica lacks. The first are the replica's rows, and the
    /// last the primary's.
    history: Vec<Rows>,
    /// The keys that were completed, and have neither expired nor been lost since.
    completed: [bool; KEYS],
    /// A completed key was claimed.
    pub(crate) forgot: bool,
    /// A live lease went to another token.
    pub(crate) stole: bool,
}

/// How many writes the replica may lack.
const MOST_LAG: usize = 2;

impl Store {
    pub(crate) fn new() -> Self {
        Self { history: vec![Rows::default()], ..Self::default() }
    }

    pub(crate) fn row(&self, key: Key) -> Row {
        self.rows()[usize::from(key)]
    }

    pub(crate) fn rows(&self) -> Rows {
        self.history.last().copied().unwrap_or_default()
    }

    /// Executes a call for one key.
    pub(crate) fn execute(
        &mut self,
        call: Call,
        token: Token,
        key: Key,
        broken: Option<Rule>,
    ) -> Reply {
        let holds = |rule| broken != Some(rule);
        let row = self.row(key);
        let is_mine = matches!(row, Row::Leased(holder) | Row::Lapsed(holder) if holder == token);
        let leased = Row::Leased(token);
        let first = |takeover| (leased, Reply::First { takeover });
        let (after, reply) = match (call, row) {
            (Call::Claim, Row::Complete) if holds(Rule::CompleteIsADuplicate) => {
                (row, Reply::Duplicate)
            }
            (Call::Claim, Row::Leased(_)) if !is_mine && holds(Rule::ClaimRespectsLeases) => {
                (row, Reply::InFlight)
            }
            (Call::Claim, Row::Lapsed(_)) => first(!is_mine),
            (Call::Claim, _) => first(false),
            (Call::Renew, Row::Absent) => (leased, Reply::Done),
            (Call::Renew, _) if is_mine => (leased, Reply::Done),
            (Call::Renew, Row::Leased(_)) if !holds(Rule::RenewalRespectsOthers) => {
                (leased, Reply::Done)
            }
            (Call::Complete, _) if is_mine || holds(Rule::CompletionCountsAfterTheLease) => {
                (Row::Complete, Reply::Done)
            }
            (Call::Release, Row::Leased(_) | Row::Lapsed(_))
                if is_mine || !holds(Rule::ReleaseNeedsTheToken) =>
            {
                (Row::Released, Reply::Done)
            }
            _ => (row, Reply::Done),
        };
        let place = usize::from(key);
        self.forgot |= matches!(reply, Reply::First { .. }) && self.completed[place];
        self.stole |= matches!((row, after), (Row::Leased(a), Row::Leased(b)) if a != b);
        // Also if the row does not show it: the caller was told.
        self.completed[place] |= call == Call::Complete;
        self.write(key, after);
        reply
    }

    /// Changes a row without a call: a lease lapses, a retention ends.
    pub(crate) fn write(&mut self, key: Key, row: Row) {
        let mut rows = self.rows();
        if rows[usize::from(key)] == row {
            return;
        }
        rows[usize::from(key)] = row;
        self.history.push(rows);
        if self.history.len() > MOST_LAG + 1 {
            self.history.remove(0);
        }
    }

    pub(crate) fn expire(&mut self, key: Key) {
        self.completed[usize::from(key)] = false;
        self.write(key, Row::Absent);
    }

    /// Returns `true` if the replica lacks a write.
    pub(crate) fn is_ahead(&self) -> bool {
        self.history.len() > 1
    }

    /// The replica has every write now.
    pub(crate) fn replicate(&mut self) {
        let rows = self.rows();
        self.history = vec![rows];
    }

    /// The replica becomes the primary: the writes that it lacks are lost.
    pub(crate) fn fail_over(&mut self) {
        self.history.truncate(1);
        let rows = self.rows();
        for (completed, row) in self.completed.iter_mut().zip(rows) {
            *completed &= row == Row::Complete;
        }
    }
}
