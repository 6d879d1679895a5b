//! [`Fence`]: one row, and the messages of claims, renewals, completions and releases, whenever they arrive.
//!
//! The rule that every store follows:
//!
//! 1. A row has a version. A new row starts at the store's clock, every write raises the version, and nothing
//!    lowers it. `attempts` is another column, and no rule reads it.
//! 2. A claim inserts. If there is a row, it reads the row. A row that is free is taken in a second message, which
//!    names the version that was read. If the row has changed, the claim reads again. If the row is gone, the claim
//!    inserts again. After the last read the outcome is unknown, as it is after an error.
//! 3. Between the reply to a read and the take, the sender checks that the caller still waits.
//! 4. A release always writes. It raises the version of each row, and inserts a released row where there is none. It
//!    keeps `expires_at` at now or later. `forget` leaves a released row.
//! 5. A purge deletes rows an hour after `expires_at`, and no message is under way for an hour.
//! 6. A handler's transaction that has executed its completion holds the row until its COMMIT or ROLLBACK. Nobody but
//!    a release, and the completion of a lease, waits for a held row. A claim reads the row as it was before. A take
//!    passes over it, and is answered *in flight*. The outcome is unknown instead if the claim has lost a reply: an
//!    earlier message of the claim may still take the row. A claim that finds its own lease is first, although the
//!    row is held. A renewal writes nothing, and is answered *renewed*. `forget` and the purge leave the row.

use stateright::{Model, Property};

use super::protocol::{Ledger, Rule};
use super::store::{self, Action, NOBODY, Reply, Row, Token};

pub(crate) const FENCE: &str =
    "after a release has returned, no claim and no renewal of its token has an effect";
pub(crate) const TABLE: &str = "a take changes a row as the table of the calls says";
pub(crate) const ANSWERED: &str =
    "a claim that was answered has no effect any more, and holds the row only if it was first";
pub(crate) const SPARED: &str = "a release undoes no completion";
pub(crate) const FIRST: &str = "after an acknowledged completion, no claim is first";
pub(crate) const HOLDERS: &str = "two deliveries do not run at the same time";
pub(crate) const RAN: &str = "a duplicate is one of a success";

/// Half an hour is the unit of time.
const HOUR: i8 = 2;

/// A configuration. The numbers say how often a step may happen; those of callers are for each one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) ledger: Ledger,
    pub(crate) callers: u8,
    pub(crate) retention: i8,
    /// How many half hours may pass.
    pub(crate) ticks: i8,
    pub(crate) lapses: u8,
    pub(crate) forgets: u8,
    /// How many transactions of callers hold the row.
    pub(crate) holds: u8,
    /// How many transactions of earlier runs hold the row: their leases lapsed before this history.
    pub(crate) earlier_holds: u8,
    /// The row of an earlier run. A complete row has expired, and may be purged.
    pub(crate) old_row: Row,
    pub(crate) each: Left,
    pub(crate) broken: Option<Rule>,
}

/// How often a caller, or the batch that sends for it, may still do this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Left {
    pub(crate) reads: u8,
    /// The connection breaks, and the claim begins again. Its messages may still arrive.
    pub(crate) repeats: u8,
    pub(crate) releases: u8,
    pub(crate) completions: u8,
    pub(crate) renewals: u8,
}

/// A row that is absent keeps its last version: the clock is past it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Versioned {
    row: Row,
    version: u8,
    expires: i8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    Idle,
    /// Waits for the reply to its claim.
    Waits,
    Runs,
    Succeeded,
    /// Its completion has returned.
    Completed,
    Duplicate,
    InFlight,
    /// Wants no reply any more: it has given up, or its handler has failed.
    Gone,
    /// Its release has returned.
    Released,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Caller {
    phase: Phase,
    /// The batch still works for its claim.
    is_served: bool,
    left: Left,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Insert,
    Read,
    /// Names a version.
    Take(u8),
    Renew,
    Complete,
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Message {
    kind: Kind,
    by: Token,
    sent: i8,
    /// Somebody waits for the reply.
    is_awaited: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    now: i8,
    row: Versioned,
    callers: Vec<Caller>,
    /// Sorted.
    messages: Vec<Message>,
    lapses: u8,
    forgets: u8,
    holds: u8,
    earlier_holds: u8,
    /// Whose transaction holds the row. `NOBODY` is an earlier run.
    holder: Option<Token>,
    /// An earlier run has committed.
    earlier_committed: bool,
    /// When the retention of the last acknowledged completion ends. On arrival, a claim completes.
    complete_until: i8,
    /// The property that this history violates.
    violated: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Claim(Token),
    GiveUp(Token),
    /// The connection of the claim's batch breaks.
    Repeat(Token),
    Handler(Token, bool),
    Send(Token, Kind),
    /// The store executes a message. `true`: the reply arrives.
    Arrive(Message, bool),
    /// A handler executes its completion: its transaction holds the row.
    Hold(Token),
    /// The transaction that holds the row ends. `true`: by its COMMIT.
    EndHold(bool),
    Lapse,
    Forget,
    Purge,
    /// Half an hour passes.
    Tick,
}

impl State {
    fn caller(&mut self, by: Token) -> &mut Caller {
        &mut self.callers[usize::from(by)]
    }

    fn send(&mut self, by: Token, kind: Kind) {
        self.messages.push(Message { kind, by, sent: self.now, is_awaited: true });
    }

    /// Nobody waits for these messages any more. They may still arrive; a read has no effect then.
    fn abandon(&mut self, which: impl Fn(&Message) -> bool) {
        self.messages.retain(|message| !(which(message) && message.kind == Kind::Read));
        let abandoned = self.messages.iter_mut().filter(|message| which(message));
        abandoned.for_each(|message| message.is_awaited = false);
    }

    fn is_expired(&self) -> bool {
        matches!(self.row.row, Row::Complete(_)) && self.now >= self.row.expires
    }
}

impl Message {
    fn is_claim(&self) -> bool {
        matches!(self.kind, Kind::Insert | Kind::Read | Kind::Take(_))
    }
}

impl Fence {
    fn holds(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    /// Returns what a call does to the row, and its reply.
    fn decide(&self, state: &State, action: Action, by: Token) -> (Row, Reply) {
        // An expired row is like none, but not for a renewal: the row may be that of a release.
        let is_none = action != Action::Renew && state.is_expired();
        let row = if is_none { Row::Absent } else { state.row.row };
        store::decide(self.ledger, action, row, by, self.broken)
    }

    fn held(&self, by: Token) -> Row {
        match self.ledger {
            Ledger::Lease => Row::Leased(by),
            Ledger::OnArrival => Row::Complete(by),
        }
    }

    fn write(&self, state: &mut State, row: Row, expires: i8) {
        let starts_again =
            state.row.row == Row::Absent && !self.holds(Rule::VersionStartsAtTheClock);
        let version = if starts_again { 1 } else { state.row.version + 1 };
        state.row = Versioned { row, version, expires };
    }

    /// The store executes a message.
    fn arrive(&self, state: &mut State, message: Message, is_replied: bool) {
        let Message { kind, by, .. } = message;
        let place = state.messages.iter().position(|other| *other == message);
        state.messages.remove(place.expect("the message is under way"));
        if state.holder.is_some() && self.meets_a_held_row(state, message, is_replied) {
            return;
        }
        let (before, is_new) = (state.row, state.row.row == Row::Absent);
        let until = state.now + self.retention;
        let violated = match kind {
            Kind::Read => None,
            Kind::Insert if is_new => self.take(state, by),
            Kind::Take(version)
                if !is_new
                    && (before.version == version || !self.holds(Rule::TakeNamesTheVersion)) =>
            {
                self.take(state, by)
            }
            Kind::Insert | Kind::Take(_) => None,
            Kind::Renew => {
                let (row, _) = self.decide(state, Action::Renew, by);
                let is_executed = row != before.row || row == Row::Leased(by);
                if is_executed {
                    self.write(state, row, if is_new { until } else { before.expires });
                }
                let is_released = state.caller(by).phase == Phase::Released;
                (is_executed && is_released).then_some(FENCE)
            }
            Kind::Complete => {
                let (row, _) = self.decide(state, Action::Complete, by);
                if row != before.row || state.is_expired() {
                    let expires = if before.expires > state.now { before.expires } else { until };
                    self.write(state, row, expires);
                }
                None
            }
            Kind::Release => self.release(state, by),
        };
        state.violated = violated;
        if is_replied {
            self.reply(state, message, before);
        }
    }

    /// Returns `true` if the message ends at the held row. Any other message sees the row as it was before.
    fn meets_a_held_row(&self, state: &mut State, message: Message, is_replied: bool) -> bool {
        let Message { kind, by, .. } = message;
        match kind {
            Kind::Take(version) if version == state.row.version => {
                let has_lost_a_reply = state.caller(by).left.repeats < self.each.repeats;
                let is_unknown = has_lost_a_reply && self.holds(Rule::SkipAfterALossIsUnknown);
                if is_replied {
                    self.answer(state, by, if is_unknown { Phase::Gone } else { Phase::InFlight });
                }
                true
            }
            Kind::Read
                if state.row.row == Row::Leased(by) && !self.holds(Rule::OwnHeldRowIsFirst) =>
            {
                self.answer(state, by, Phase::InFlight);
                true
            }
            // Only if `ReleaseWaitsForTheRow` is broken.
            Kind::Release => {
                if is_replied {
                    self.reply(state, message, state.row);
                }
                true
            }
            Kind::Renew => true,
            Kind::Insert | Kind::Read | Kind::Take(_) | Kind::Complete => false,
        }
    }

    /// Returns `true` if the store executes no such message while a transaction holds the row.
    fn waits(&self, kind: Kind) -> bool {
        match kind {
            Kind::Release => self.holds(Rule::ReleaseWaitsForTheRow),
            Kind::Complete => true,
            Kind::Insert | Kind::Read | Kind::Take(_) | Kind::Renew => false,
        }
    }

    /// The transaction that holds the row ends: the first COMMIT wins, whoever has the lease.
    fn end_hold(&self, state: &mut State, is_committed: bool) {
        let Some(by) = state.holder.take() else { return };
        let completed = store::complete_in_transaction(state.row.row, by, self.broken);
        if let (true, Some(row)) = (is_committed, completed) {
            let (kept, anew) = (state.row.expires, state.now + self.retention);
            let expires = if kept > state.now { kept } else { anew };
            self.write(state, row, expires);
            state.complete_until = state.complete_until.max(expires);
        }
        if by == NOBODY {
            state.earlier_committed |= is_committed;
        } else {
            state.caller(by).phase = if is_committed { Phase::Completed } else { Phase::Gone };
        }
    }

    /// A claim gets the row. Returns the property that this violates.
    fn take(&self, state: &mut State, by: Token) -> Option<&'static str> {
        let (row, reply) = self.decide(state, Action::Claim, by);
        let is_allowed = matches!(reply, Reply::First { .. }) && row == self.held(by);
        self.write(state, self.held(by), state.now + self.retention);
        match state.caller(by).phase {
            Phase::Released => Some(FENCE),
            Phase::Waits | Phase::Gone => (!is_allowed).then_some(TABLE),
            _ => Some(ANSWERED),
        }
    }

    fn release(&self, state: &mut State, by: Token) -> Option<&'static str> {
        let before = state.row;
        if before.row == Row::Absent && !self.holds(Rule::ReleaseInserts) {
            return None;
        }
        let (row, _) = self.decide(state, Action::Release, by);
        let undoes = matches!(before.row, Row::Complete(_)) && !state.is_expired();
        let undoes = undoes && row != before.row && self.ledger == Ledger::Lease;
        let keeps = before.row == Row::Absent || self.holds(Rule::ReleaseKeepsTheRow);
        if row == Row::Released || self.holds(Rule::ReleaseRaisesOthers) {
            let expires = if keeps { before.expires.max(state.now) } else { before.expires };
            self.write(state, row, expires);
        }
        undoes.then_some(SPARED)
    }

    /// The reply of a message arrives at its sender, which goes on.
    fn reply(&self, state: &mut State, message: Message, before: Versioned) {
        let (by, caller) = (message.by, *state.caller(message.by));
        match message.kind {
            Kind::Insert | Kind::Take(_) if state.row != before => self.first(state, by),
            Kind::Insert => state.send(by, Kind::Read),
            Kind::Take(_) => self.again(state, by, Kind::Read),
            Kind::Read => match self.decide(state, Action::Claim, by) {
                _ if before.row == Row::Absent => self.again(state, by, Kind::Insert),
                (_, Reply::Duplicate) => {
                    let ran =
                        |other: &Caller| matches!(other.phase, Phase::Succeeded | Phase::Completed);
                    let is_lost = self.ledger == Ledger::Lease
                        && !state.earlier_committed
                        && caller.phase == Phase::Waits
                        && !state.callers.iter().any(ran);
                    state.violated = state.violated.or(is_lost.then_some(RAN));
                    self.answer(state, by, Phase::Duplicate);
                }
                (_, Reply::InFlight) => self.answer(state, by, Phase::InFlight),
                (row, _) if row == before.row && !state.is_expired() => self.first(state, by),
                _ if caller.phase != Phase::Waits && self.holds(Rule::TakeNeedsItsCaller) => {
                    state.caller(by).is_served = false;
                }
                _ => state.send(by, Kind::Take(before.version)),
            },
            Kind::Release if caller.phase == Phase::Gone => {
                state.caller(by).phase = Phase::Released;
            }
            Kind::Complete => {
                state.caller(by).phase = Phase::Completed;
                state.complete_until = state.complete_until.max(state.row.expires);
            }
            Kind::Release | Kind::Renew => {}
        }
    }

    /// The claim goes on, unless it has had its last read.
    fn again(&self, state: &mut State, by: Token, kind: Kind) {
        let caller = state.caller(by);
        caller.left.reads -= 1;
        if caller.left.reads > 0 {
            return state.send(by, kind);
        }
        let is_unknown = self.holds(Rule::LastReadIsUnknown);
        self.answer(state, by, if is_unknown { Phase::Gone } else { Phase::InFlight });
    }

    fn first(&self, state: &mut State, by: Token) {
        let is_faulty = state.forgets < self.forgets;
        let has_lapsed = state.lapses < self.lapses || state.earlier_holds < self.earlier_holds;
        let is_held = !has_lapsed
            && state
                .callers
                .iter()
                .any(|caller| matches!(caller.phase, Phase::Runs | Phase::Succeeded));
        if state.caller(by).phase == Phase::Waits && !is_faulty {
            let is_complete = state.now < state.complete_until;
            let doubled = is_complete.then_some(FIRST);
            let doubled = doubled.or((is_held && self.ledger == Ledger::Lease).then_some(HOLDERS));
            state.violated = state.violated.or(doubled);
        }
        if state.caller(by).phase == Phase::Waits && self.ledger == Ledger::OnArrival {
            state.complete_until = state.complete_until.max(state.now + self.retention);
        }
        self.answer(state, by, Phase::Runs);
    }

    /// The batch has done its work for the claim.
    fn answer(&self, state: &mut State, by: Token, phase: Phase) {
        let holds_row = state.row.row == self.held(by);
        let caller = state.caller(by);
        caller.is_served = false;
        if caller.phase != Phase::Waits {
            return;
        }
        caller.phase = phase;
        if holds_row && matches!(phase, Phase::Duplicate | Phase::InFlight) {
            state.violated = state.violated.or(Some(ANSWERED));
        }
    }

    /// Callers are alike: makes states equal in which they have changed places.
    fn normalize(&self, mut state: State) -> State {
        state.messages.sort_unstable();
        if state.callers.is_sorted() {
            return state;
        }
        let mut order: Vec<Token> = (0..self.callers).collect();
        order.sort_by_key(|by| state.callers[usize::from(*by)]);
        let mut places = [NOBODY; 16];
        for (place, by) in (0..).zip(&order) {
            places[usize::from(*by)] = place;
        }
        state.callers.sort_unstable();
        state.messages.iter_mut().for_each(|message| message.by = places[usize::from(message.by)]);
        state.messages.sort_unstable();
        let of_row = match &mut state.row.row {
            Row::Leased(by) | Row::Lapsed(by) | Row::Complete(by) => Some(by),
            Row::Absent | Row::Released => None,
        };
        // `NOBODY` keeps its place.
        of_row.into_iter().chain(&mut state.holder).for_each(|by| *by = places[usize::from(*by)]);
        state
    }
}

impl Model for Fence {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let is_complete = matches!(self.old_row, Row::Complete(_));
        let row = Versioned {
            row: self.old_row,
            version: u8::from(self.old_row != Row::Absent),
            expires: if matches!(self.old_row, Row::Lapsed(_)) { HOUR + self.retention } else { 0 },
        };
        let caller = Caller { phase: Phase::Idle, is_served: false, left: self.each };
        vec![State {
            now: HOUR,
            row,
            callers: vec![caller; usize::from(self.callers)],
            messages: Vec::new(),
            lapses: self.lapses,
            forgets: self.forgets,
            holds: self.holds,
            earlier_holds: self.earlier_holds,
            holder: None,
            earlier_committed: is_complete,
            complete_until: 0,
            violated: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.violated.is_some() {
            return;
        }
        let can_complete = store::complete_in_transaction(state.row.row, NOBODY, self.broken);
        let may_hold = state.holder.is_none() && can_complete.is_some();
        for (by, Caller { phase, is_served, left }) in (0..).zip(&state.callers) {
            match phase {
                Phase::Idle => steps.push(Step::Claim(by)),
                Phase::Waits => {
                    steps.push(Step::GiveUp(by));
                    if *is_served && left.repeats > 0 {
                        steps.push(Step::Repeat(by));
                    }
                }
                Phase::Gone if left.releases > 0 => steps.push(Step::Send(by, Kind::Release)),
                Phase::Runs if self.ledger == Ledger::Lease => {
                    // A handler whose transaction holds the row ends with the transaction.
                    if state.holder != Some(by) {
                        steps.extend([Step::Handler(by, true), Step::Handler(by, false)]);
                    }
                    if may_hold && state.holds > 0 {
                        steps.push(Step::Hold(by));
                    }
                    if left.renewals > 0 {
                        steps.push(Step::Send(by, Kind::Renew));
                    }
                }
                Phase::Succeeded if left.completions > 0 => {
                    steps.push(Step::Send(by, Kind::Complete));
                }
                _ => {}
            }
        }
        if may_hold && state.earlier_holds > 0 {
            steps.push(Step::Hold(NOBODY));
        }
        if state.holder.is_some() {
            steps.extend([true, false].map(Step::EndHold));
        }
        let Versioned { row, expires, .. } = state.row;
        match row {
            Row::Absent => {}
            Row::Leased(_) => steps.extend((state.lapses > 0).then_some(Step::Lapse)),
            Row::Lapsed(_) | Row::Released | Row::Complete(_) if state.holder.is_some() => {}
            Row::Lapsed(_) | Row::Released | Row::Complete(_) => {
                steps.extend((state.forgets > 0).then_some(Step::Forget));
                steps.extend((state.now - expires >= HOUR).then_some(Step::Purge));
            }
        }
        if state.now < HOUR + self.ticks
            && state.callers.iter().all(|caller| caller.phase != Phase::Waits)
        {
            steps.push(Step::Tick);
        }
        let mut messages = state.messages.clone();
        messages.dedup();
        for message in messages {
            if state.holder.is_some() && self.waits(message.kind) {
                continue;
            }
            if message.is_awaited {
                steps.push(Step::Arrive(message, true));
            }
            // Without a further call, nobody sees that this reply is lost.
            let left = state.callers[usize::from(message.by)].left;
            let may_be_lost = match message.kind {
                Kind::Insert | Kind::Take(_) => true,
                Kind::Read | Kind::Renew => false,
                Kind::Complete => left.completions > 0,
                Kind::Release => left.releases > 0,
            };
            if may_be_lost || !message.is_awaited {
                steps.push(Step::Arrive(message, false));
            }
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Claim(by) => {
                let caller = state.caller(by);
                (caller.phase, caller.is_served) = (Phase::Waits, true);
                state.send(by, Kind::Insert);
            }
            Step::GiveUp(by) => state.caller(by).phase = Phase::Gone,
            Step::Repeat(by) => {
                state.caller(by).left.repeats -= 1;
                state.abandon(|message| message.by == by && message.is_claim());
                state.send(by, Kind::Insert);
            }
            Step::Handler(by, success) => {
                state.caller(by).phase = if success { Phase::Succeeded } else { Phase::Gone };
            }
            Step::Send(by, kind) => {
                let left = &mut state.caller(by).left;
                match kind {
                    Kind::Renew => left.renewals -= 1,
                    Kind::Complete => left.completions -= 1,
                    _ => left.releases -= 1,
                }
                state.abandon(|message| (message.by, message.kind) == (by, kind));
                state.send(by, kind);
            }
            Step::Arrive(message, is_replied) => self.arrive(&mut state, message, is_replied),
            Step::Hold(by) => {
                let left = if by == NOBODY { &mut state.earlier_holds } else { &mut state.holds };
                *left -= 1;
                state.holder = Some(by);
            }
            Step::EndHold(is_committed) => self.end_hold(&mut state, is_committed),
            Step::Lapse => {
                state.lapses -= 1;
                if let Row::Leased(by) = state.row.row {
                    state.row.row = Row::Lapsed(by);
                }
            }
            // It names the version that it has read. So it is a step.
            Step::Forget => {
                state.forgets -= 1;
                if self.holds(Rule::ForgetKeepsTheRow) {
                    self.write(&mut state, Row::Released, before.now);
                } else {
                    state.row.row = Row::Absent;
                }
            }
            Step::Purge => state.row.row = Row::Absent,
            Step::Tick => {
                state.now += 1;
                state.callers.iter_mut().for_each(|caller| caller.is_served = false);
                state.abandon(Message::is_claim);
                state.messages.retain(|message| before.now + 1 - message.sent < HOUR);
            }
        }
        Some(self.normalize(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn is(state: &State, phase: Phase) -> bool {
            state.callers.iter().any(|caller| caller.phase == phase)
        }
        let mut properties = vec![
            Property::always(FENCE, |_, state: &State| state.violated != Some(FENCE)),
            Property::always(TABLE, |_, state: &State| state.violated != Some(TABLE)),
            Property::always(ANSWERED, |_, state: &State| state.violated != Some(ANSWERED)),
            Property::always(SPARED, |_, state: &State| state.violated != Some(SPARED)),
            Property::always(FIRST, |_, state: &State| state.violated != Some(FIRST)),
            Property::always(HOLDERS, |_, state: &State| state.violated != Some(HOLDERS)),
            Property::always(RAN, |_, state: &State| state.violated != Some(RAN)),
            Property::sometimes(
                "a claim is under way after its release has returned",
                |_, state: &State| {
                    let is_late = |message: &Message| {
                        let phase = state.callers[usize::from(message.by)].phase;
                        message.is_claim() && phase == Phase::Released
                    };
                    state.messages.iter().any(is_late)
                },
            ),
            Property::sometimes("a take names a version that has passed", |_, state: &State| {
                let version = state.row.version;
                let has_passed = |message: &Message| matches!(message.kind, Kind::Take(named) if named < version);
                state.messages.iter().any(has_passed)
            }),
            Property::sometimes("a claim is first after a release", |_, state: &State| {
                is(state, Phase::Released) && is(state, Phase::Runs)
            }),
            Property::sometimes("a duplicate is acknowledged", |_, state: &State| {
                is(state, Phase::Duplicate)
            }),
        ];
        if self.holds + self.earlier_holds > 0 {
            properties.extend([
                Property::sometimes("a release waits for a held row", |_, state: &State| {
                    let is_release = |message: &Message| message.kind == Kind::Release;
                    state.holder.is_some() && state.messages.iter().any(is_release)
                }),
                Property::sometimes("a claim is in flight at a held row", |_, state: &State| {
                    let is_free = !matches!(state.row.row, Row::Leased(_));
                    is_free && state.holder.is_some() && is(state, Phase::InFlight)
                }),
            ]);
        }
        if self.ticks > 0 || matches!(self.old_row, Row::Complete(_)) {
            properties.push(Property::sometimes("a row is purged", |_, state: &State| {
                state.row.row == Row::Absent && state.row.version > 0
            }));
        }
        properties
    }
}
