//! [`Protocol`]: the states and the steps. `ledger` has the rules of the ledgers.

use std::collections::BTreeSet;

use stateright::{Model, Property};

use super::delivery::{Delivery, Job, Phase, Process, View};
use super::properties;
use super::store::{Action, Call, Key, Reply, Row, Store, Token};

/// Which of the ledgers the deliveries use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ledger {
    Lease,
    OnArrival,
}

/// How many faults of each kind a run may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Faults {
    /// Calls whose reply is lost, or that are executed late, twice or not at all.
    pub(crate) calls: u8,
    pub(crate) crashes: u8,
    pub(crate) lapses: u8,
    pub(crate) expiries: u8,
    pub(crate) failovers: u8,
    /// Outages of the store of ten minutes, after which a background write is given up.
    pub(crate) outages: u8,
}

/// The rules that are broken on purpose. The table in `check.rs` has each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    ClaimIsCompleteAtOnce,
    ClaimRespectsLeases,
    CompleteIsADuplicate,
    CompletionCountsAfterTheLease,
    CompletionIsInItsTransaction,
    DuplicateReleasesItsClaims,
    EarlyCommitIsRead,
    FailureIsReleased,
    FirstCommitWins,
    FlagNeedsTheCommit,
    ForgetKeepsTheRow,
    InFlightIsNoDuplicate,
    LastReadIsUnknown,
    LostCompletionIsRepeated,
    OwnHeldRowIsFirst,
    PendingIsADuplicate,
    RefusalAborts,
    ReleaseInserts,
    ReleaseIsAFence,
    ReleaseIsReplicated,
    ReleaseKeepsTheRow,
    ReleaseNeedsTheToken,
    ReleaseRaisesOthers,
    ReleaseSparesCompletions,
    ReleaseWaitsForTheRow,
    ReleasingIsInFlight,
    RemovalIsNoticed,
    RenewalRespectsOthers,
    RenewalSparesCompletions,
    RepeatedClaimIsFirst,
    RetentionBeginsAnew,
    SecondNamesItsKey,
    SkipAfterALossIsUnknown,
    SuccessIsCompleted,
    TakeNamesTheVersion,
    TakeNeedsItsCaller,
    UncommittedIsNoSuccess,
    UnknownClaimIsReleased,
    VersionStartsAtTheClock,
}

#[derive(Debug, Clone)]
pub(crate) struct Protocol {
    pub(crate) ledger: Ledger,
    /// The identities of each delivery's event, in the order in which they are claimed: the key is the last one.
    pub(crate) deliveries: Vec<Vec<Key>>,
    pub(crate) processes: Process,
    /// How often a sender sends.
    pub(crate) attempts: u8,
    /// Other deliveries may come between a lost reply and the end of its `store_timeout`.
    pub(crate) slow: bool,
    pub(crate) faults: Faults,
    pub(crate) broken: Option<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) store: Store,
    pub(crate) deliveries: Vec<Delivery>,
    pub(crate) jobs: BTreeSet<Job>,
    /// Calls that nobody waits for any more, and that the store may still execute.
    pub(crate) late: BTreeSet<Call>,
    /// The faults that may still happen.
    pub(crate) left: Faults,
}

/// What becomes of one call for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Replied,
    /// The reply arrives later.
    Slow,
    /// The client repeats it; the reply to the second execution arrives.
    Repeated,
    ReplyLost,
    /// As `ReplyLost`, but the caller still waits.
    Hangs,
    NotExecuted,
    /// The caller has given up, and the store executes the call later.
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Deliver(usize, Process),
    Call(usize, Fate),
    /// A slow reply arrives.
    Reply(usize),
    /// The caller of a call that hangs gives up.
    TimeOut(usize),
    Handler(usize, bool),
    Renew(usize),
    /// A renewal is executed late.
    RenewLate(usize),
    Job(Job, Fate),
    /// The lease of a pending completion is renewed.
    RenewJob(Job),
    /// A job ends without success, after its bound.
    GiveUp(Job),
    Arrive(Call),
    Lapse(Key),
    Expire(Key),
    Crash(Process),
    Replicate,
    FailOver,
}

impl Protocol {
    /// Two processes, and one delivery of an event with each of these lists of identities.
    pub(crate) fn of(ledger: Ledger, deliveries: &[&[Key]]) -> Self {
        Self {
            ledger,
            deliveries: deliveries.iter().map(|keys| keys.to_vec()).collect(),
            processes: 2,
            attempts: 2,
            slow: false,
            faults: Faults::default(),
            broken: None,
        }
    }

    pub(crate) fn holds(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    pub(crate) fn execute(&self, state: &mut State, call: Call) -> Reply {
        state.store.execute(call, self.ledger, self.broken)
    }

    /// Two deliveries with a common identity report one event.
    pub(crate) fn share_an_identity(&self, a: usize, b: usize) -> bool {
        self.deliveries[a].iter().any(|key| self.deliveries[b].contains(key))
    }

    fn keys(&self) -> BTreeSet<Key> {
        self.deliveries.iter().flatten().copied().collect()
    }

    /// The sender sends once more, to this process.
    fn deliver(&self, state: &mut State, index: usize, process: Process) {
        let view = View { pending: self.pending(state, index, process), removed: false };
        let delivery = &mut state.deliveries[index];
        let number = Token::try_from(index).expect("few deliveries");
        let token = number * self.attempts + self.attempts - delivery.attempts;
        delivery.attempts -= 1;
        let (action, replies) = (Action::Claim, Vec::new());
        delivery.phase = Phase::Calling { process, token, action, replies, view };
        self.skip_pending(state, index);
    }

    /// A key whose completion is pending in this process is complete for it, without a call.
    fn skip_pending(&self, state: &mut State, index: usize) {
        if let Phase::Calling { action: Action::Claim, replies, view, .. } =
            &mut state.deliveries[index].phase
        {
            let count = self.deliveries[index].len();
            while self.holds(Rule::PendingIsADuplicate)
                && replies.len() < count
                && view.pending & 1 << replies.len() != 0
            {
                replies.push(Reply::Duplicate);
            }
        }
        self.end_of_call(state, index);
    }

    /// Returns the call that is under way.
    fn current(&self, delivery: &Delivery, keys: &[Key]) -> Option<Call> {
        let Phase::Calling { token, action, replies, .. } = &delivery.phase else {
            return None;
        };
        if self.ends_early(*action, replies) {
            return None;
        }
        let key = *keys.get(replies.len())?;
        Some(Call { action: *action, token: *token, key })
    }

    fn call(&self, state: &mut State, index: usize, fate: Fate) {
        let keys = &self.deliveries[index];
        let Some(call) = self.current(&state.deliveries[index], keys) else { return };
        let reply = match fate {
            Fate::Replied | Fate::Slow => Some(self.execute(state, call)),
            Fate::Repeated => {
                self.execute(state, call);
                Some(self.execute(state, call))
            }
            Fate::Hangs => {
                self.execute(state, call);
                Some(Reply::Lost)
            }
            Fate::ReplyLost => {
                self.execute(state, call);
                None
            }
            Fate::NotExecuted => None,
            Fate::Late => {
                state.late.insert(call);
                None
            }
        };
        let Some(reply) = reply else { return self.unknown(state, index) };
        if reply != Reply::Lost {
            self.fence(state, call);
        }
        if let Phase::Calling { replies, .. } = &mut state.deliveries[index].phase {
            replies.push(reply);
        }
        if reply != Reply::Lost && fate != Fate::Slow {
            self.skip_pending(state, index);
        }
    }

    fn job(&self, state: &mut State, job: Job, fate: Fate) {
        if fate == Fate::Late {
            state.late.insert(job.call);
            return;
        }
        self.execute(state, job.call);
        if fate != Fate::Replied {
            return;
        }
        if self.waits_for_replica() {
            state.store.replicate();
        }
        self.fence(state, job.call);
        self.end_job(state, job);
    }

    /// A call has returned. After a release, no claim and no renewal of its token has an effect: `fence::FENCE`. A
    /// release that the replica lacks is none after a failover.
    fn fence(&self, state: &mut State, call: Call) {
        let may_be_lost = state.left.failovers > 0 && state.store.is_ahead();
        let has_returned = call.action == Action::Release && !may_be_lost;
        if has_returned && self.holds(Rule::ReleaseIsAFence) {
            state.late.retain(|late| {
                (late.token, late.key) != (call.token, call.key)
                    || matches!(late.action, Action::Complete | Action::Release)
            });
        }
    }

    fn crash(&self, state: &mut State, process: Process) {
        // The calls that are under way may be executed.
        let jobs = state.jobs.iter().filter(|job| job.process == process).map(|job| job.call);
        state.late.extend(jobs);
        state.jobs.retain(|job| job.process != process);
        for (delivery, keys) in state.deliveries.iter_mut().zip(&self.deliveries) {
            if delivery.phase.process() == Some(process) {
                state.late.extend(self.current(delivery, keys));
                delivery.phase = Phase::Idle { in_flight: false };
            }
        }
    }

    /// Returns one bit for each token with which calls may still come.
    fn used_tokens(state: &State) -> u16 {
        let held = state.deliveries.iter().filter_map(|delivery| delivery.phase.token());
        let jobs = state.jobs.iter().map(|job| job.call.token);
        let tokens = held.chain(jobs).chain(state.late.iter().map(|call| call.token));
        tokens.fold(0, |used, token| used | 1 << token)
    }

    /// Makes states equal that differ in nothing that matters: so there are fewer.
    fn normalize(&self, mut state: State) -> State {
        // Without a failover, nobody sees what the replica lacks.
        if state.left.failovers == 0 {
            state.store.replicate();
        }
        let used = Self::used_tokens(&state);
        state.store.forget_tokens(|token| used & 1 << token != 0);
        // The processes are alike: the first that has anything to do is number 0.
        let in_phases = state.deliveries.iter().find_map(|delivery| delivery.phase.process());
        let first = in_phases.or_else(|| state.jobs.first().map(|job| job.process));
        if first.is_some_and(|process| process != 0) {
            for delivery in &mut state.deliveries {
                if let Phase::Calling { process, .. } | Phase::Running { process, .. } =
                    &mut delivery.phase
                {
                    *process = 1 - *process;
                }
            }
            let jobs = state.jobs.iter();
            state.jobs = jobs.map(|job| Job { process: 1 - job.process, ..*job }).collect();
        }
        state
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let phase = Phase::Idle { in_flight: false };
        let delivery = Delivery { attempts: self.attempts, runs: 0, phase };
        vec![State {
            store: Store::new(),
            deliveries: vec![delivery; self.deliveries.len()],
            jobs: BTreeSet::new(),
            late: BTreeSet::new(),
            left: self.faults,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let left = state.left;
        for (index, delivery) in state.deliveries.iter().enumerate() {
            match &delivery.phase {
                Phase::Idle { .. } if delivery.attempts > 0 => {
                    steps.extend((0..self.processes).map(|process| Step::Deliver(index, process)));
                }
                Phase::Calling { replies, .. } if replies.last() == Some(&Reply::Lost) => {
                    steps.push(Step::TimeOut(index));
                }
                Phase::Calling { .. }
                    if self.current(delivery, &self.deliveries[index]).is_none() =>
                {
                    steps.push(Step::Reply(index));
                }
                Phase::Calling { .. } => {
                    steps.push(Step::Call(index, Fate::Replied));
                    if left.calls > 0 {
                        let lost = if self.slow { Fate::Hangs } else { Fate::ReplyLost };
                        let fates =
                            [Fate::Repeated, Fate::Slow, lost, Fate::NotExecuted, Fate::Late];
                        steps.extend(fates.map(|fate| Step::Call(index, fate)));
                    }
                }
                Phase::Running { .. } => {
                    steps.extend([true, false].map(|success| Step::Handler(index, success)));
                }
                Phase::Idle { .. } | Phase::Acknowledged { .. } => {}
            }
            if self.renewed(state, index).is_some() {
                steps.push(Step::Renew(index));
                if left.calls > 0 {
                    steps.push(Step::RenewLate(index));
                }
            }
        }
        for job in &state.jobs {
            steps.push(Step::Job(*job, Fate::Replied));
            if self.loses_nothing(*job) || left.outages > 0 {
                steps.push(Step::GiveUp(*job));
            }
            if left.calls > 0 {
                steps.extend([Fate::ReplyLost, Fate::Late].map(|fate| Step::Job(*job, fate)));
            }
            if job.call.action == Action::Complete && left.lapses < self.faults.lapses {
                steps.push(Step::RenewJob(*job));
            }
        }
        steps.extend(state.late.iter().copied().map(Step::Arrive));
        for key in self.keys() {
            match state.store.row(key) {
                Row::Leased(_) if left.lapses > 0 => steps.push(Step::Lapse(key)),
                Row::Complete(_) if left.expiries > 0 => steps.push(Step::Expire(key)),
                _ => {}
            }
        }
        if left.crashes > 0 {
            steps.extend((0..self.processes).map(Step::Crash));
        }
        if left.failovers > 0 && state.store.is_ahead() {
            steps.extend([Step::Replicate, Step::FailOver]);
        }
    }

    fn next_state(&self, before: &State, step: Step) -> Option<State> {
        let mut state = before.clone();
        match step {
            Step::Deliver(index, process) => self.deliver(&mut state, index, process),
            Step::Call(index, fate) => {
                state.left.calls -= u8::from(fate != Fate::Replied);
                self.call(&mut state, index, fate);
            }
            Step::Reply(index) => self.skip_pending(&mut state, index),
            Step::TimeOut(index) => self.unknown(&mut state, index),
            Step::Handler(index, success) => self.handler(&mut state, index, success),
            Step::Renew(index) => {
                let token = self.renewed(before, index)?;
                for key in self.deliveries[index].iter().copied() {
                    self.execute(&mut state, Call { action: Action::Renew, token, key });
                }
            }
            Step::RenewLate(index) => {
                state.left.calls -= 1;
                let (token, key) = (self.renewed(before, index)?, self.deliveries[index][0]);
                state.late.insert(Call { action: Action::Renew, token, key });
            }
            Step::Job(job, fate) => {
                state.left.calls -= u8::from(fate != Fate::Replied);
                self.job(&mut state, job, fate);
            }
            Step::RenewJob(job) => {
                self.execute(&mut state, Call { action: Action::Renew, ..job.call });
            }
            Step::GiveUp(job) => {
                state.left.outages -= u8::from(!self.loses_nothing(job));
                self.end_job(&mut state, job);
            }
            Step::Arrive(call) => {
                state.late.remove(&call);
                self.execute(&mut state, call);
            }
            Step::Lapse(key) => {
                state.left.lapses -= 1;
                if let Row::Leased(token) = state.store.row(key) {
                    state.store.write(key, Row::Lapsed(token));
                }
            }
            Step::Expire(key) => {
                state.left.expiries -= 1;
                state.store.expire(key);
            }
            Step::Crash(process) => {
                state.left.crashes -= 1;
                self.crash(&mut state, process);
            }
            Step::Replicate => state.store.replicate(),
            Step::FailOver => {
                state.left.failovers -= 1;
                state.store.fail_over();
            }
        }
        let state = self.normalize(state);
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::of(self)
    }
}
