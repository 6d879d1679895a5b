//! [`Completion`]: one event whose handler commits its effect and the key in a transaction of its own.
//!
//! The rule:
//!
//! 1. The claim is that of the lease ledger. With two identities, the second identity is claimed first. If it is
//!    complete for the key of this very delivery, the key is claimed all the same, and decides.
//! 2. The handler opens a transaction, writes its effect, executes the completion (one statement) and sends COMMIT.
//!    The completion writes all rows that the delivery holds. It is refused if one of them is missing or complete,
//!    and aborts the transaction. It looks at no lease: the first COMMIT wins. It gives a row that has expired its
//!    retention anew.
//! 3. A completion outside of the handler's transaction is refused.
//! 4. From the completion to COMMIT or ROLLBACK, the transaction holds the rows. A held row is *in flight* for a claim
//!    that could take it. A renewal passes over it. A release and another completion wait for it.
//! 5. A handler that succeeded is answered with success if the flag "committed" is set, or if all rows that the
//!    delivery holds are complete by its token. A COMMIT that returned sets the flag, and nothing else does. If the
//!    completion was executed early, `commit` first reads in the transaction that it still stands.
//! 6. Every other delivery is released. If the completion was refused and all rows are complete, it is a duplicate.
//!
//! Every interleaving is checked. The reply to a COMMIT may be lost, or the COMMIT itself. A handler may be dropped, or
//! its process may die, at any moment. The server rolls back a transaction without a handler some time later. A server
//! that crashes rolls every transaction back, and loses the leases, because claims commit asynchronously.
//!
//! A claim, a renewal and a release are one step here: `fence.rs` has their messages.

use stateright::{Model, Property};

use super::protocol::{Ledger, Rule};
use super::store::{self, Action, KEYS, Key, NOBODY, Reply, Row, Token};

pub(crate) const EFFECT: &str =
    "an event has at most one effect within its retention, unless an operator forgets its key";
pub(crate) const TOLD: &str = "nobody is told done or duplicate without a committed effect";
pub(crate) const SETTLED: &str =
    "when nothing is under way, a key is complete with its effect, or free";
pub(crate) const FORGOTTEN: &str =
    "an event whose key an operator forgot is no duplicate by its own second identity";

/// A configuration. The numbers say how often a step may happen; that of renewals is for each delivery.
#[derive(Debug, Clone)]
pub(crate) struct Completion {
    /// The identities of each delivery, in the order in which they are claimed: the key is the last one. All
    /// deliveries report one event.
    pub(crate) deliveries: Vec<Vec<Key>>,
    /// How often a sender sends.
    pub(crate) attempts: u8,
    pub(crate) left: Left,
    pub(crate) broken: Option<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Left {
    pub(crate) renewals: u8,
    pub(crate) lapses: u8,
    pub(crate) deaths: u8,
    pub(crate) forgets: u8,
    /// Retentions that end.
    pub(crate) expiries: u8,
    /// Crashes of the server.
    pub(crate) crashes: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Stored {
    row: Row,
    /// The key for which a second identity is complete.
    completed_for: Option<Key>,
    is_expired: bool,
}

/// A delivery, over all attempts of its sender. Its place is the token of its current attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Delivery {
    phase: Phase,
    transaction: Transaction,
    /// One bit for each identity that it holds, and has not released.
    held: u8,
    attempts: u8,
    renewals: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// The sender waits before it sends, or has given up. Or the process has died.
    Idle,
    /// Claims the identity at this place next.
    Claims(u8),
    /// The handler runs.
    Runs,
    /// Its answer is given, and its identities are being released.
    Releases { is_acknowledged: bool },
    /// Answered with 2xx.
    Acknowledged,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Transaction {
    /// There is none, or it has ended and nobody asks for it.
    None,
    /// The effect is written.
    Open,
    /// The completion was refused: the transaction is aborted.
    Refused,
    /// The completion is executed: the transaction holds the rows.
    Holds,
    /// The completion was executed. Since then the transaction was aborted, or ended by a ROLLBACK that the crate does
    /// not see.
    Undone,
    /// COMMIT is under way.
    Commits,
    /// COMMIT has taken effect, and its reply is lost.
    Unheard,
    /// COMMIT has returned: the flag is set.
    Committed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    rows: [Stored; KEYS],
    deliveries: Vec<Delivery>,
    left: Left,
    /// The effects that were committed; at most 2.
    effects: u8,
    /// One bit for each key that an effect has completed, until its retention ends or an operator forgets it.
    kept: u8,
    /// The property that this history violates.
    violated: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Claims the next identity. The first claim begins an attempt.
    Claim(usize),
    /// The handler opens a transaction and writes its effect.
    Begin(usize),
    /// The handler executes the completion in its transaction.
    Complete(usize),
    /// The handler executes the completion on another connection, or after its transaction has ended.
    CompleteOutside(usize),
    /// After the completion, the transaction is aborted or rolled back, and the handler goes on.
    Undo(usize),
    SendCommit(usize),
    /// The server executes COMMIT. `true`: the reply arrives.
    Commit(usize, bool),
    /// COMMIT does not arrive, or is refused.
    CommitFails(usize),
    /// The handler ends. `true`: with a success.
    Handler(usize, bool),
    Release(usize, Key),
    Renew(usize),
    /// The process dies.
    Die(usize),
    /// The server rolls back a transaction whose handler has ended.
    RollBack(usize),
    Lapse(Key),
    Expire(Key),
    Forget(Key),
    /// The server crashes.
    Crash,
}

fn bit(place: usize) -> u8 {
    1 << place
}

fn token(index: usize) -> Token {
    Token::try_from(index).expect("few deliveries")
}

impl State {
    fn row(&mut self, key: Key) -> &mut Stored {
        &mut self.rows[usize::from(key)]
    }
}

impl Delivery {
    /// Returns `true` if the transaction holds the rows.
    fn holds_rows(self) -> bool {
        matches!(self.transaction, Transaction::Holds | Transaction::Commits)
    }

    fn is_under_way(self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Acknowledged) || self.holds_rows()
    }
}

impl Completion {
    fn holds(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    /// Returns the keys that a delivery holds.
    fn held(&self, index: usize, delivery: Delivery) -> impl Iterator<Item = Key> {
        let keys = self.deliveries[index].iter().enumerate();
        keys.filter(move |(place, _)| delivery.held & bit(*place) != 0).map(|(_, key)| *key)
    }

    fn key_of(&self, index: usize) -> Key {
        let keys = &self.deliveries[index];
        keys[keys.len() - 1]
    }

    /// Returns the delivery whose transaction holds the row of this key.
    fn holder(&self, state: &State, key: Key) -> Option<usize> {
        let mut deliveries = state.deliveries.iter().enumerate();
        let holder = deliveries.find(|(index, delivery)| {
            delivery.holds_rows() && self.held(*index, **delivery).any(|held| held == key)
        });
        holder.map(|(index, _)| index)
    }

    fn decide(&self, row: Row, action: Action, index: usize) -> (Row, Reply) {
        store::decide(Ledger::Lease, action, row, token(index), self.broken)
    }

    fn claim(&self, state: &mut State, index: usize) {
        let delivery = &mut state.deliveries[index];
        let place = if let Phase::Claims(place) = delivery.phase {
            usize::from(place)
        } else {
            (delivery.attempts, delivery.renewals) = (delivery.attempts - 1, self.left.renewals);
            0
        };
        let keys = &self.deliveries[index];
        let is_last = place + 1 == keys.len();
        let (key, stored) = (keys[place], *state.row(keys[place]));
        // A live lease does not expire.
        let is_none = stored.is_expired && !matches!(stored.row, Row::Leased(_));
        let row = if is_none { Row::Absent } else { stored.row };
        let (row, reply) = match self.decide(row, Action::Claim, index) {
            (_, Reply::First { .. }) if self.holder(state, key).is_some() => (row, Reply::InFlight),
            other => other,
        };
        let next = if is_last { Phase::Runs } else { Phase::Claims(token(place + 1)) };
        let is_same_key = stored.completed_for == Some(self.key_of(index));
        match reply {
            Reply::First { .. } => {
                *state.row(key) = Stored { row, ..Stored::default() };
                state.deliveries[index].held |= bit(place);
                state.deliveries[index].phase = next;
            }
            Reply::Duplicate if !is_last && is_same_key && self.holds(Rule::SecondNamesItsKey) => {
                state.deliveries[index].phase = next;
            }
            Reply::Duplicate => {
                let own = state.row(self.key_of(index)).row;
                if is_same_key && !matches!(own, Row::Complete(_)) {
                    state.violated = Some(FORGOTTEN);
                }
                self.answer(state, index, true);
            }
            _ => self.answer(state, index, false),
        }
    }

    /// Answers the delivery: with 2xx, or with an error. Then its identities are released.
    fn answer(&self, state: &mut State, index: usize, is_acknowledged: bool) {
        if is_acknowledged && state.effects == 0 {
            state.violated = Some(TOLD);
        }
        state.deliveries[index].phase = Phase::Releases { is_acknowledged };
    }

    /// Returns `true` if the completion of this delivery writes the row of the key.
    fn can_complete(&self, state: &State, index: usize, key: Key) -> bool {
        let row = state.rows[usize::from(key)].row;
        store::complete_in_transaction(row, token(index), self.broken).is_some()
    }

    /// The statement is executed. Its writes become visible with COMMIT.
    fn complete(&self, state: &mut State, index: usize) {
        let delivery = state.deliveries[index];
        let keys = self.deliveries[index].iter().enumerate();
        let writes = keys
            .filter(|(place, key)| {
                delivery.held & bit(*place) != 0 && self.can_complete(state, index, **key)
            })
            .fold(0, |writes, (place, _)| writes | bit(place));
        let delivery = &mut state.deliveries[index];
        delivery.transaction = if writes == delivery.held {
            Transaction::Holds
        } else if self.holds(Rule::RefusalAborts) {
            Transaction::Refused
        } else {
            delivery.held = writes;
            Transaction::Holds
        };
    }

    /// The completion of a delivery is committed.
    fn write_completion(&self, state: &mut State, index: usize) {
        let (delivery, key_of) = (state.deliveries[index], self.key_of(index));
        for key in self.held(index, delivery) {
            let stored = state.row(key);
            let after = store::complete_in_transaction(stored.row, token(index), self.broken);
            let completed_for = (key != key_of).then_some(key_of);
            let is_expired = stored.is_expired && !self.holds(Rule::RetentionBeginsAnew);
            let row = after.unwrap_or(stored.row);
            *stored = Stored { row, completed_for, is_expired };
        }
    }

    /// COMMIT takes effect.
    fn commit(&self, state: &mut State, index: usize) {
        self.write_completion(state, index);
        let identities = self.deliveries[index].iter();
        let of_event = identities.fold(0, |keys, key| keys | bit(usize::from(*key)));
        if state.kept & of_event != 0 {
            state.violated = Some(EFFECT);
        }
        state.effects = (state.effects + 1).min(2);
        let delivery = state.deliveries[index];
        for key in self.held(index, delivery) {
            state.kept |= bit(usize::from(key));
        }
    }

    /// From now on, the event of this key may have another effect. A second identity that is complete for the key says
    /// nothing of the event either.
    fn end_effect(&self, state: &mut State, key: Key) {
        for other in self.keys() {
            if other == key || state.row(other).completed_for == Some(key) {
                state.kept &= !bit(usize::from(other));
            }
        }
    }

    /// The handler ends, and its delivery is answered. A transaction that holds rows is rolled back later.
    fn handler(&self, state: &mut State, index: usize, success: bool) {
        let delivery = state.deliveries[index];
        let mut rows = self.held(index, delivery).map(|key| state.rows[usize::from(key)].row);
        let is_told = if success {
            let has_flag = delivery.transaction == Transaction::Committed
                || delivery.transaction == Transaction::Holds
                    && !self.holds(Rule::FlagNeedsTheCommit);
            has_flag
                || !self.holds(Rule::UncommittedIsNoSuccess)
                || rows.all(|row| row == Row::Complete(token(index)))
        } else {
            let was_refused = delivery.transaction == Transaction::Refused;
            was_refused && rows.all(|row| matches!(row, Row::Complete(_)))
        };
        self.answer(state, index, is_told);
    }

    fn release(&self, state: &mut State, index: usize, key: Key) {
        let stored = *state.row(key);
        let (row, _) = self.decide(stored.row, Action::Release, index);
        let is_inserted = stored.row == Row::Absent;
        let is_expired = stored.is_expired || is_inserted;
        let completed_for = stored.completed_for.filter(|_| row == stored.row);
        *state.row(key) = Stored { row, completed_for, is_expired };
        let place = self.deliveries[index].iter().position(|other| *other == key);
        state.deliveries[index].held &= !bit(place.expect("the key is one of the delivery"));
    }

    /// Makes states equal that differ in nothing that matters: so there are fewer.
    fn normalize(&self, mut state: State) -> State {
        for index in 0..state.deliveries.len() {
            let delivery = &mut state.deliveries[index];
            let has_ended = !delivery.holds_rows();
            if has_ended && delivery.phase != Phase::Runs {
                delivery.transaction = Transaction::None;
            }
            if let Phase::Releases { is_acknowledged } = delivery.phase
                && has_ended
                && delivery.held == 0
            {
                delivery.phase = if is_acknowledged { Phase::Acknowledged } else { Phase::Idle };
            }
            if delivery.phase == Phase::Acknowledged {
                (delivery.attempts, delivery.renewals) = (0, 0);
            }
            if !delivery.is_under_way() {
                (delivery.held, delivery.renewals) = (0, 0);
                Self::rename(&mut state.rows, |by| if by == token(index) { NOBODY } else { by });
            }
        }
        // Deliveries with the same identities are alike.
        let places = 0..state.deliveries.len();
        let pairs =
            places.clone().flat_map(|index| places.clone().map(move |other| (index, other)));
        for (before, index) in pairs.filter(|(before, index)| before < index) {
            if self.deliveries[before] == self.deliveries[index]
                && state.deliveries[before] > state.deliveries[index]
            {
                state.deliveries.swap(before, index);
                let (a, b) = (token(before), token(index));
                Self::rename(&mut state.rows, |by| {
                    if by == a {
                        b
                    } else if by == b {
                        a
                    } else {
                        by
                    }
                });
            }
        }
        state
    }

    fn rename(rows: &mut [Stored; KEYS], name: impl Fn(Token) -> Token) {
        for stored in rows {
            if let Row::Leased(by) | Row::Lapsed(by) | Row::Complete(by) = &mut stored.row {
                *by = name(*by);
            }
        }
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        (0..).take(KEYS).filter(|key| self.deliveries.iter().any(|keys| keys.contains(key)))
    }

    fn steps_of(&self, state: &State, index: usize, steps: &mut Vec<Step>) {
        let delivery = state.deliveries[index];
        let is_free = |key: Key| self.holder(state, key).is_none_or(|holder| holder == index);
        match delivery.phase {
            Phase::Idle => {
                if delivery.attempts > 0 && !delivery.is_under_way() {
                    steps.push(Step::Claim(index));
                }
            }
            Phase::Claims(_) => steps.push(Step::Claim(index)),
            Phase::Runs => {
                match delivery.transaction {
                    Transaction::None => steps.push(Step::Begin(index)),
                    Transaction::Open if self.held(index, delivery).all(is_free) => {
                        steps.push(Step::Complete(index));
                    }
                    Transaction::Holds => {
                        steps.extend([Step::SendCommit(index), Step::Undo(index)]);
                    }
                    // With the rule, `commit` finds that the completion does not stand, and fails.
                    Transaction::Undone if !self.holds(Rule::EarlyCommitIsRead) => {
                        steps.push(Step::SendCommit(index));
                    }
                    _ => {}
                }
                // With the rule, the statement is refused, and changes nothing.
                if !self.holds(Rule::CompletionIsInItsTransaction)
                    && matches!(delivery.transaction, Transaction::Open | Transaction::None)
                    && self
                        .held(index, delivery)
                        .all(|key| is_free(key) && self.can_complete(state, index, key))
                {
                    steps.push(Step::CompleteOutside(index));
                }
                steps.extend([true, false].map(|success| Step::Handler(index, success)));
                if delivery.renewals > 0 {
                    steps.push(Step::Renew(index));
                }
            }
            Phase::Releases { .. } => {
                let keys = self.held(index, delivery);
                let keys = keys.filter(|key| self.holder(state, *key).is_none());
                steps.extend(keys.map(|key| Step::Release(index, key)));
            }
            Phase::Acknowledged => {}
        }
        let may_die = !matches!(delivery.phase, Phase::Idle | Phase::Acknowledged);
        if may_die && state.left.deaths > 0 {
            steps.push(Step::Die(index));
        }
        match delivery.transaction {
            Transaction::Commits => steps.extend([
                Step::Commit(index, true),
                Step::Commit(index, false),
                Step::CommitFails(index),
            ]),
            Transaction::Holds if delivery.phase != Phase::Runs => {
                steps.push(Step::RollBack(index));
            }
            _ => {}
        }
    }
}

impl Model for Completion {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let (phase, transaction, attempts) = (Phase::Idle, Transaction::None, self.attempts);
        let delivery = Delivery { phase, transaction, held: 0, attempts, renewals: 0 };
        vec![State {
            rows: Default::default(),
            deliveries: vec![delivery; self.deliveries.len()],
            left: self.left,
            effects: 0,
            kept: 0,
            violated: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.violated.is_some() {
            return;
        }
        for index in 0..state.deliveries.len() {
            self.steps_of(state, index, steps);
        }
        let left = state.left;
        for key in self.keys() {
            let Stored { row, is_expired, .. } = state.rows[usize::from(key)];
            let is_held = self.holder(state, key).is_some();
            match row {
                Row::Absent => {}
                Row::Leased(_) => steps.extend((left.lapses > 0).then_some(Step::Lapse(key))),
                // No retention ends between a completion and its COMMIT.
                _ if is_held => {}
                Row::Lapsed(_) | Row::Released | Row::Complete(_) => {
                    if left.expiries > 0 && !is_expired {
                        steps.push(Step::Expire(key));
                    }
                    let is_a_key =
                        (0..self.deliveries.len()).any(|index| self.key_of(index) == key);
                    if left.forgets > 0 && is_a_key {
                        steps.push(Step::Forget(key));
                    }
                }
            }
        }
        if left.crashes > 0 {
            steps.push(Step::Crash);
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Claim(index) => self.claim(&mut state, index),
            Step::Begin(index) => state.deliveries[index].transaction = Transaction::Open,
            Step::Complete(index) => self.complete(&mut state, index),
            Step::CompleteOutside(index) => self.write_completion(&mut state, index),
            Step::Undo(index) => state.deliveries[index].transaction = Transaction::Undone,
            Step::SendCommit(index) => {
                let transaction = &mut state.deliveries[index].transaction;
                // A COMMIT without a transaction, or of an aborted one, returns as any other.
                *transaction = match transaction {
                    Transaction::Holds => Transaction::Commits,
                    _ => Transaction::Committed,
                };
            }
            Step::Commit(index, is_replied) => {
                self.commit(&mut state, index);
                state.deliveries[index].transaction =
                    if is_replied { Transaction::Committed } else { Transaction::Unheard };
            }
            Step::CommitFails(index) => {
                state.deliveries[index].transaction = Transaction::None;
                if state.deliveries[index].phase == Phase::Runs {
                    self.handler(&mut state, index, false);
                }
            }
            Step::Handler(index, success) => self.handler(&mut state, index, success),
            Step::Release(index, key) => self.release(&mut state, index, key),
            Step::Renew(index) => {
                state.deliveries[index].renewals -= 1;
                for key in self.held(index, before.deliveries[index]) {
                    let stored = before.rows[usize::from(key)];
                    let (row, _) = self.decide(stored.row, Action::Renew, index);
                    let is_renewed = row == Row::Leased(token(index));
                    if is_renewed && self.holder(before, key).is_none() {
                        *state.row(key) = Stored { row, ..Stored::default() };
                    }
                }
            }
            Step::Die(index) => {
                state.left.deaths -= 1;
                let phase = &mut state.deliveries[index].phase;
                *phase = match phase {
                    Phase::Releases { is_acknowledged: true } => Phase::Acknowledged,
                    _ => Phase::Idle,
                };
            }
            Step::RollBack(index) => state.deliveries[index].transaction = Transaction::None,
            Step::Lapse(key) => {
                state.left.lapses -= 1;
                if let Row::Leased(by) = state.row(key).row {
                    state.row(key).row = Row::Lapsed(by);
                }
            }
            Step::Expire(key) => {
                state.left.expiries -= 1;
                state.row(key).is_expired = true;
                self.end_effect(&mut state, key);
            }
            Step::Forget(key) => {
                state.left.forgets -= 1;
                let row = Row::Released;
                *state.row(key) = Stored { row, completed_for: None, is_expired: true };
                self.end_effect(&mut state, key);
            }
            Step::Crash => {
                state.left.crashes -= 1;
                for stored in &mut state.rows {
                    if matches!(stored.row, Row::Leased(_)) {
                        *stored = Stored::default();
                    }
                }
                for (index, delivery) in before.deliveries.iter().enumerate() {
                    let is_open =
                        delivery.holds_rows() || delivery.transaction == Transaction::Open;
                    if is_open {
                        state.deliveries[index].transaction = Transaction::None;
                    }
                    if is_open && delivery.phase == Phase::Runs {
                        self.handler(&mut state, index, false);
                    }
                }
            }
        }
        let state = self.normalize(state);
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(EFFECT, |_, state: &State| state.violated != Some(EFFECT)),
            Property::always(TOLD, |_, state: &State| state.violated != Some(TOLD)),
            Property::always(FORGOTTEN, |_, state: &State| state.violated != Some(FORGOTTEN)),
            Property::always(SETTLED, is_settled),
            Property::sometimes("all deliveries are acknowledged", |_, state: &State| {
                state.deliveries.iter().all(|delivery| delivery.phase == Phase::Acknowledged)
            }),
            Property::sometimes("a COMMIT whose reply is lost has taken effect", |_, state| {
                any(state, |delivery| delivery.transaction == Transaction::Unheard)
            }),
            Property::sometimes("a release waits for the COMMIT of its own token", |_, state| {
                any(state, |delivery| {
                    matches!(delivery.phase, Phase::Releases { .. }) && delivery.holds_rows()
                })
            }),
        ];
        if self.left.lapses > 0 {
            properties.extend([
                Property::sometimes("a late run is refused after its takeover", |_, state| {
                    any(state, |delivery| delivery.transaction == Transaction::Refused)
                }),
                Property::sometimes(
                    "a late run commits before its takeover",
                    |_, state: &State| {
                        let runs = |delivery: &Delivery| delivery.phase == Phase::Runs;
                        let committed =
                            |delivery: &Delivery| delivery.transaction == Transaction::Committed;
                        state.deliveries.iter().filter(|delivery| runs(delivery)).count() > 1
                            && state.deliveries.iter().any(committed)
                    },
                ),
            ]);
        }
        if self.left.forgets + self.left.expiries > 0 {
            properties.push(Property::sometimes(
                "an event has a second effect after its retention, or after it was forgotten",
                |_, state: &State| state.effects > 1,
            ));
        }
        properties
    }
}

fn any(state: &State, is: fn(&Delivery) -> bool) -> bool {
    state.deliveries.iter().any(is)
}

/// Returns `true` if something is under way, or if each key is complete with its effect, or free.
fn is_settled(protocol: &Completion, state: &State) -> bool {
    let is_under_way = state.deliveries.iter().any(|delivery| delivery.is_under_way());
    is_under_way
        || protocol.keys().all(|key| {
            let stored = state.rows[usize::from(key)];
            let is_complete = matches!(stored.row, Row::Complete(_)) && !stored.is_expired;
            let is_kept = state.kept & bit(usize::from(key)) != 0;
            if is_complete { state.effects > 0 } else { !is_kept }
        })
}
