//! The store: one row for each key, and the rules by which calls change it.
//!
//! The code: `src/adapter/redis/lua/*.lua` with `calls.rs`, `src/adapter/sql/row.rs`, and the statements
//! of Postgres and SQLite.

use super::protocol::{Ledger, Rule};

/// The name of one claim.
pub(crate) type Token = u8;
pub(crate) type Key = u8;

pub(crate) const KEYS: usize = 3;
/// A token that no call carries any more.
pub(crate) const NOBODY: Token = 15;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) enum Row {
    #[default]
    Absent,
    Leased(Token),
    Lapsed(Token),
    Released,
    /// A completion keeps the holder's token.
    Complete(Token),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Action {
    Claim,
    Renew,
    Complete,
    Release,
}

/// A call for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Call {
    pub(crate) action: Action,
    pub(crate) token: Token,
    pub(crate) key: Key,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reply {
    First {
        takeover: bool,
    },
    Duplicate,
    InFlight,
    Done,
    /// The store has executed the call, and its reply does not arrive.
    Lost,
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
    pub(crate) fn execute(&mut self, call: Call, ledger: Ledger, broken: Option<Rule>) -> Reply {
        let Call { action, token, key } = call;
        let (row, place) = (self.row(key), usize::from(key));
        let (after, reply) = decide(ledger, action, row, token, broken);
        let is_first = matches!(reply, Reply::First { .. });
        self.forgot |= is_first && self.completed[place] && row != Row::Complete(token);
        self.stole |= matches!((row, after), (Row::Leased(a), Row::Leased(b)) if a != b);
        // Also if the row does not show it: the caller was told.
        self.completed[place] |= match ledger {
            Ledger::Lease => action == Action::Complete,
            Ledger::OnArrival => is_first,
        };
        // The claim of a delivery that was answered with 503, and never ran.
        if ledger == Ledger::OnArrival && action == Action::Release && row == Row::Complete(token) {
            self.completed[place] = false;
        }
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
        self.history.drain(..self.history.len() - 1);
    }

    /// The replica becomes the primary: the writes that it lacks are lost.
    pub(crate) fn fail_over(&mut self) {
        self.history.truncate(1);
        let rows = self.rows();
        for (completed, row) in self.completed.iter_mut().zip(rows) {
            *completed &= matches!(row, Row::Complete(_));
        }
    }

    /// Makes states equal that differ in tokens of which no call comes any more.
    pub(crate) fn forget_tokens(&mut self, is_used: impl Fn(Token) -> bool) {
        for row in self.history.iter_mut().flatten() {
            if let Row::Leased(token) | Row::Lapsed(token) | Row::Complete(token) = row
                && !is_used(*token)
            {
                *token = NOBODY;
            }
        }
    }
}

/// Returns the row after a call, and the reply.
pub(crate) fn decide(
    ledger: Ledger,
    action: Action,
    row: Row,
    token: Token,
    broken: Option<Rule>,
) -> (Row, Reply) {
    match ledger {
        Ledger::Lease => under_lease(action, row, token, broken),
        Ledger::OnArrival => on_arrival(action, row, token, broken),
    }
}

/// Returns the row after a completion in the handler's transaction, or `None` if the completion is refused.
///
/// It needs a row, and looks at no lease: of the rows that are not complete, the first COMMIT wins.
pub(crate) fn complete_in_transaction(row: Row, token: Token, broken: Option<Rule>) -> Option<Row> {
    match row {
        Row::Absent => None,
        Row::Complete(_) if broken != Some(Rule::FirstCommitWins) => None,
        _ => Some(Row::Complete(token)),
    }
}

fn under_lease(action: Action, row: Row, token: Token, broken: Option<Rule>) -> (Row, Reply) {
    let holds = |rule| broken != Some(rule);
    let is_mine = matches!(row, Row::Leased(holder) | Row::Lapsed(holder) if holder == token);
    let leased = Row::Leased(token);
    let first = |takeover| (leased, Reply::First { takeover });
    match (action, row) {
        (Action::Claim, Row::Complete(_)) if holds(Rule::CompleteIsADuplicate) => {
            (row, Reply::Duplicate)
        }
        (Action::Claim, Row::Leased(_)) if !is_mine && holds(Rule::ClaimRespectsLeases) => {
            (row, Reply::InFlight)
        }
        (Action::Claim, Row::Lapsed(_)) => first(!is_mine),
        (Action::Claim, _) => first(false),
        (Action::Renew, Row::Absent) => (leased, Reply::Done),
        (Action::Renew, Row::Complete(_)) if !holds(Rule::RenewalSparesCompletions) => {
            (leased, Reply::Done)
        }
        (Action::Renew, Row::Leased(_)) if !is_mine && !holds(Rule::RenewalRespectsOthers) => {
            (leased, Reply::Done)
        }
        (Action::Renew, _) if is_mine => (leased, Reply::Done),
        (Action::Renew, _) => (row, Reply::Done),
        (Action::Complete, Row::Complete(_)) => (row, Reply::Done),
        (Action::Complete, _) if !is_mine && !holds(Rule::CompletionCountsAfterTheLease) => {
            (row, Reply::Done)
        }
        (Action::Complete, Row::Leased(holder) | Row::Lapsed(holder)) => {
            (Row::Complete(holder), Reply::Done)
        }
        (Action::Complete, Row::Absent) => (Row::Complete(token), Reply::Done),
        (Action::Complete, Row::Released) => (Row::Complete(NOBODY), Reply::Done),
        (Action::Release, Row::Leased(_) | Row::Lapsed(_))
            if is_mine || !holds(Rule::ReleaseNeedsTheToken) =>
        {
            (Row::Released, Reply::Done)
        }
        (Action::Release, Row::Complete(holder))
            if holder == token && !holds(Rule::ReleaseSparesCompletions) =>
        {
            (Row::Released, Reply::Done)
        }
        (Action::Release, Row::Absent) => (Row::Released, Reply::Done),
        (Action::Release, _) => (row, Reply::Done),
    }
}

fn on_arrival(action: Action, row: Row, token: Token, broken: Option<Rule>) -> (Row, Reply) {
    let holds = |rule| broken != Some(rule);
    let is_mine = row == Row::Complete(token);
    match (action, row) {
        (Action::Claim, Row::Complete(_)) if is_mine && holds(Rule::RepeatedClaimIsFirst) => {
            (row, Reply::First { takeover: false })
        }
        (Action::Claim, Row::Complete(_)) if holds(Rule::CompleteIsADuplicate) => {
            (row, Reply::Duplicate)
        }
        (Action::Claim, _) if holds(Rule::ClaimIsCompleteAtOnce) => {
            (Row::Complete(token), Reply::First { takeover: false })
        }
        (Action::Claim, _) => (row, Reply::First { takeover: false }),
        (Action::Release, Row::Complete(_)) if is_mine || !holds(Rule::ReleaseNeedsTheToken) => {
            (Row::Released, Reply::Done)
        }
        (Action::Release, Row::Absent) => (Row::Released, Reply::Done),
        (Action::Release, _) => (row, Reply::Done),
        (Action::Renew | Action::Complete, _) => (row, Reply::Done),
    }
}
