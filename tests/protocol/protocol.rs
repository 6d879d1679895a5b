//! [`Protocol`]: the states, the steps, and the rules of the ledger.

use std::collections::BTreeSet;

use stateright::{Model, Property};

use super::delivery::{Delivery, Job, Late, Phase, Process};
use super::properties;
use super::store::{Call, Key, Reply, Row, Store, Token};

const PROCESSES: Process = 2;
/// How often a sender sends.
const ATTEMPTS: u8 = 2;

/// How many faults of each kind a run may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Faults {
    /// Calls whose reply is lost, or that are executed late, twice or not at all.
    pub(crate) calls: u8,
    pub(crate) crashes: u8,
    pub(crate) lapses: u8,
    pub(crate) expiries: u8,
    pub(crate) failovers: u8,
}

/// The rules that are broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    ClaimRespectsLeases,
    CompleteIsADuplicate,
    CompletionCountsAfterTheLease,
    FailureIsReleased,
    InFlightIsNoDuplicate,
    ReleaseNeedsTheToken,
    RenewalRespectsOthers,
    SuccessIsCompleted,
}

#[derive(Debug, Clone)]
pub(crate) struct Protocol {
    /// The identities of each delivery's event, sorted.
    pub(crate) deliveries: Vec<Vec<Key>>,
    pub(crate) faults: Faults,
    pub(crate) broken: Option<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) store: Store,
    pub(crate) deliveries: Vec<Delivery>,
    pub(crate) jobs: BTreeSet<Job>,
    pub(crate) late: BTreeSet<Late>,
    /// The faults that may still happen.
    pub(crate) left: Faults,
}

/// What becomes of one call for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Replied,
    /// The client repeats it; the reply to the second execution arrives.
    Repeated,
    ReplyLost,
    NotExecuted,
    /// The caller has given up, and the store executes the call later.
    Late,
}

const UNKNOWN: [Fate; 3] = [Fate::ReplyLost, Fate::NotExecuted, Fate::Late];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Deliver(usize, Process),
    Call(usize, Fate),
    Handler(usize, bool),
    Renew(usize),
    Job(Job, Fate),
    /// A job ends without success, after its bound.
    GiveUp(Job),
    Arrive(Late),
    Lapse(Key),
    Expire(Key),
    Crash(Process),
    Replicate,
    FailOver,
}

impl Protocol {
    pub(crate) fn of(deliveries: &[&[Key]]) -> Self {
        let deliveries = deliveries.iter().map(|keys| keys.to_vec()).collect();
        Self { deliveries, faults: Faults::default(), broken: None }
    }

    fn holds(&self, rule: Rule) -> bool {
        self.broken != Some(rule)
    }

    fn keys(&self) -> BTreeSet<Key> {
        self.deliveries.iter().flatten().copied().collect()
    }

    /// The sender sends once more, to this process.
    fn deliver(&self, state: &mut State, index: usize, process: Process) {
        let delivery = &mut state.deliveries[index];
        let number = Token::try_from(index).expect("few deliveries");
        let token = number * ATTEMPTS + ATTEMPTS - delivery.attempts;
        delivery.attempts -= 1;
        delivery.phase = Phase::Calling { process, token, call: Call::Claim, replies: Vec::new() };
        self.skip_pending(state, index);
    }

    /// A key whose completion is pending in this process is complete for it, without a call.
    fn skip_pending(&self, state: &mut State, index: usize) {
        while let Phase::Calling { process, call: Call::Claim, replies, .. } =
            &mut state.deliveries[index].phase
        {
            let Some(key) = self.deliveries[index].get(replies.len()) else { break };
            let is_pending =
                |job: &Job| (job.process, job.call, job.key) == (*process, Call::Complete, *key);
            if !state.jobs.iter().any(is_pending) {
                return;
            }
            replies.push(Reply::Duplicate);
        }
        self.end_of_call(state, index);
    }

    fn call(&self, state: &mut State, index: usize, fate: Fate) {
        let Phase::Calling { process, token, call, replies } = &state.deliveries[index].phase
        else {
            return;
        };
        let (process, token, call, place) = (*process, *token, *call, replies.len());
        let key = self.deliveries[index][place];
        let reply = match fate {
            Fate::Replied => Some(state.store.execute(call, token, key, self.broken)),
            Fate::Repeated => {
                state.store.execute(call, token, key, self.broken);
                Some(state.store.execute(call, token, key, self.broken))
            }
            Fate::ReplyLost => {
                state.store.execute(call, token, key, self.broken);
                None
            }
            Fate::NotExecuted => None,
            Fate::Late => {
                state.late.insert(Late { call, token, key });
                None
            }
        };
        let Some(reply) = reply else { return self.unknown(state, index, process, token, call) };
        if let Phase::Calling { replies, .. } = &mut state.deliveries[index].phase {
            replies.push(reply);
        }
        self.skip_pending(state, index);
    }

    /// The outcome of a call is unknown. The keys after the current one were not asked for.
    fn unknown(&self, state: &mut State, index: usize, process: Process, token: Token, call: Call) {
        // A claim and a release are released in the background, a completion is completed.
        let again = if call == Call::Complete { Call::Complete } else { Call::Release };
        for key in &self.deliveries[index] {
            state.jobs.insert(Job { process, call: again, token, key: *key });
        }
        state.deliveries[index].phase = match call {
            // The handler has succeeded: its response is the answer.
            Call::Complete => Phase::Acknowledged { duplicate: false },
            _ => Phase::Idle { in_flight: false },
        };
    }

    fn end_of_call(&self, state: &mut State, index: usize) {
        let keys = &self.deliveries[index];
        let Phase::Calling { process, token, call, replies } = &state.deliveries[index].phase
        else {
            return;
        };
        if replies.len() < keys.len() {
            return;
        }
        let (process, token, call, replies) = (*process, *token, *call, replies.clone());
        let claimed = |place: &usize| matches!(replies[*place], Reply::First { .. });
        let in_flight = replies.contains(&Reply::InFlight);
        let is_duplicate = replies.contains(&Reply::Duplicate)
            || (in_flight && !self.holds(Rule::InFlightIsNoDuplicate));
        state.deliveries[index].phase = match call {
            Call::Claim if is_duplicate => {
                for place in (0..keys.len()).filter(claimed) {
                    // It was handled under its second identity; nothing was handled under that one.
                    let call = if place == 0 { Call::Complete } else { Call::Release };
                    state.jobs.insert(Job { process, call, token, key: keys[place] });
                }
                Phase::Acknowledged { duplicate: true }
            }
            Call::Claim if in_flight => {
                for place in (0..keys.len()).filter(claimed) {
                    let key = keys[place];
                    state.jobs.insert(Job { process, call: Call::Release, token, key });
                }
                Phase::Idle { in_flight: true }
            }
            Call::Claim => {
                let takeover = replies.contains(&Reply::First { takeover: true });
                Phase::Running { process, token, takeover }
            }
            Call::Complete => Phase::Acknowledged { duplicate: false },
            Call::Release | Call::Renew => Phase::Idle { in_flight: false },
        };
    }

    fn handler(&self, state: &mut State, index: usize, success: bool) {
        let delivery = &mut state.deliveries[index];
        let Phase::Running { process, token, .. } = delivery.phase else { return };
        delivery.successes = (delivery.successes + u8::from(success)).min(3);
        let rule = if success { Rule::SuccessIsCompleted } else { Rule::FailureIsReleased };
        let call = if success == self.holds(rule) { Call::Complete } else { Call::Release };
        delivery.phase = Phase::Calling { process, token, call, replies: Vec::new() };
    }

    fn job(&self, state: &mut State, job: Job, fate: Fate) {
        state.store.execute(job.call, job.token, job.key, self.broken);
        // Otherwise it stays, and is repeated.
        if fate == Fate::Replied {
            state.jobs.remove(&job);
        }
    }

    fn crash(&self, state: &mut State, process: Process) {
        state.jobs.retain(|job| job.process != process);
        for (delivery, keys) in state.deliveries.iter_mut().zip(&self.deliveries) {
            if delivery.phase.process() != Some(process) {
                continue;
            }
            // The call that is under way may be executed.
            if let Phase::Calling { token, call, replies, .. } = &delivery.phase {
                let (token, call, key) = (*token, *call, keys[replies.len()]);
                state.late.insert(Late { call, token, key });
            }
            delivery.phase = Phase::Idle { in_flight: false };
        }
    }

    /// Renews the leases of a delivery that runs or completes. Returns `false` if that changes nothing.
    fn renew(&self, state: &mut State, index: usize) -> bool {
        let token = match &state.deliveries[index].phase {
            Phase::Running { token, .. } | Phase::Calling { token, call: Call::Complete, .. } => {
                *token
            }
            _ => return false,
        };
        let before = state.store.rows();
        for key in &self.deliveries[index] {
            state.store.execute(Call::Renew, token, *key, self.broken);
        }
        before != state.store.rows()
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let delivery =
            Delivery { attempts: ATTEMPTS, successes: 0, phase: Phase::Idle { in_flight: false } };
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
            match delivery.phase {
                Phase::Idle { .. } if delivery.attempts > 0 => {
                    // The processes are alike, so the first attempt goes to the first of them.
                    let is_first = index == 0 && delivery.attempts == ATTEMPTS;
                    let processes = if is_first { 1 } else { PROCESSES };
                    steps.extend((0..processes).map(|process| Step::Deliver(index, process)));
                }
                Phase::Calling { .. } => {
                    steps.push(Step::Call(index, Fate::Replied));
                    if left.calls > 0 {
                        steps.push(Step::Call(index, Fate::Repeated));
                        steps.extend(UNKNOWN.map(|fate| Step::Call(index, fate)));
                    }
                }
                Phase::Running { .. } => {
                    steps.extend([true, false].map(|success| Step::Handler(index, success)));
                }
                Phase::Idle { .. } | Phase::Acknowledged { .. } => {}
            }
            steps.push(Step::Renew(index));
        }
        for job in &state.jobs {
            steps.push(Step::Job(*job, Fate::Replied));
            steps.push(Step::GiveUp(*job));
            if left.calls > 0 {
                steps.push(Step::Job(*job, Fate::ReplyLost));
            }
        }
        steps.extend(state.late.iter().copied().map(Step::Arrive));
        for key in self.keys() {
            match state.store.row(key) {
                Row::Leased(_) if left.lapses > 0 => steps.push(Step::Lapse(key)),
                Row::Complete if left.expiries > 0 => steps.push(Step::Expire(key)),
                _ => {}
            }
        }
        if left.crashes > 0 {
            steps.extend((0..PROCESSES).map(Step::Crash));
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
            Step::Handler(index, success) => self.handler(&mut state, index, success),
            Step::Renew(index) => {
                if !self.renew(&mut state, index) {
                    return None;
                }
            }
            Step::Job(job, fate) => {
                state.left.calls -= u8::from(fate != Fate::Replied);
                self.job(&mut state, job, fate);
            }
            // A completion is given up after ten minutes only: the lease lapses then.
            Step::GiveUp(job) => {
                if job.call == Call::Complete {
                    state.left.lapses = state.left.lapses.checked_sub(1)?;
                }
                state.jobs.remove(&job);
            }
            Step::Arrive(late) => {
                state.late.remove(&late);
                state.store.execute(late.call, late.token, late.key, self.broken);
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
        // Without a failover, nobody sees what the replica lacks.
        if state.left.failovers == 0 {
            state.store.replicate();
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::of(self)
    }
}
