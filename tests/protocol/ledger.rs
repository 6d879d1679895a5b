//! The rules of the ledgers: what a process does with the replies of the store.
//!
//! The code of each function is in `src/ledger/`, in the file that its comment names.

use super::delivery::{Job, Phase, Process};
use super::protocol::{Ledger, Protocol, Rule, State};
use super::store::{Action, Call, Key, Reply, Token};

impl Protocol {
    /// Returns one bit for each place whose key has a pending completion: `Pending::split` in `Claims::claim`.
    pub(crate) fn pending(&self, state: &State, index: usize, process: Process) -> u8 {
        let is_pending = |key| self.has_job(state, process, Action::Complete, key);
        let keys = self.deliveries[index].iter().enumerate();
        keys.map(|(place, key)| u8::from(is_pending(*key)) << place).sum()
    }

    fn has_job(&self, state: &State, process: Process, action: Action, key: Key) -> bool {
        let is_it =
            |job: &Job| (job.process, job.call.action, job.call.key) == (process, action, key);
        state.jobs.iter().any(is_it)
    }

    /// The outcome of the call is unknown: the drop of `Claims` in `claims.rs`, and of `Claim` in `lease.rs`.
    pub(crate) fn unknown(&self, state: &mut State, index: usize) {
        let Phase::Calling { process, token, action, view, .. } = &state.deliveries[index].phase
        else {
            return;
        };
        let (process, token, action, view) = (*process, *token, *action, *view);
        // A claim and a release are released in the background, a completion is completed.
        let (rule, again) = match action {
            Action::Complete => (Rule::LostCompletionIsRepeated, Action::Complete),
            _ => (Rule::UnknownClaimIsReleased, Action::Release),
        };
        for (place, key) in self.deliveries[index].iter().enumerate() {
            if self.holds(rule) && view.pending & 1 << place == 0 {
                self.spawn(state, process, again, token, *key);
            }
        }
        state.deliveries[index].phase = match action {
            // The handler has succeeded: its response is the answer.
            Action::Complete => Phase::Acknowledged { duplicate: false },
            _ => Phase::Idle { in_flight: false },
        };
    }

    fn spawn(&self, state: &mut State, process: Process, action: Action, token: Token, key: Key) {
        state.jobs.insert(Job { process, call: Call { action, token, key } });
    }

    /// Returns `true` if the key is not claimed after these replies, because its second identity was not:
    /// `Answered::leads_to_key` in `resolve.rs`.
    pub(crate) fn ends_early(&self, action: Action, replies: &[Reply]) -> bool {
        let is_refused = matches!(replies.last(), Some(Reply::Duplicate | Reply::InFlight));
        action == Action::Claim && is_refused
    }

    /// Goes on after the last reply of a call.
    pub(crate) fn end_of_call(&self, state: &mut State, index: usize) {
        let keys = &self.deliveries[index];
        let Phase::Calling { process, token, action, replies, view } =
            &state.deliveries[index].phase
        else {
            return;
        };
        if replies.len() < keys.len() && !self.ends_early(*action, replies) {
            return;
        }
        let (process, token, view) = (*process, *token, *view);
        let phase = match action {
            Action::Complete => Phase::Acknowledged { duplicate: false },
            Action::Release | Action::Renew => Phase::Idle { in_flight: false },
            Action::Claim => {
                let replies = self.adjusted(state, index, process, replies.clone());
                match self.resolve(state, index, (process, token), &replies) {
                    Some(phase) => phase,
                    None => {
                        let takeover = replies.contains(&Reply::First { takeover: true });
                        let runs = u8::from(self.ledger == Ledger::OnArrival);
                        let delivery = &mut state.deliveries[index];
                        delivery.runs = (delivery.runs + runs).min(3);
                        Phase::Running { process, token, takeover, view }
                    }
                }
            }
        };
        state.deliveries[index].phase = phase;
    }

    /// Treats a complete key as in flight if its claim may be released: `Doubt::apply` in `arrival.rs`.
    fn adjusted(
        &self,
        state: &State,
        index: usize,
        process: Process,
        mut replies: Vec<Reply>,
    ) -> Vec<Reply> {
        if self.ledger == Ledger::Lease {
            return replies;
        }
        let keys = &self.deliveries[index];
        let removed = matches!(&state.deliveries[index].phase,
            Phase::Calling { view, .. } if view.removed && self.holds(Rule::RemovalIsNoticed));
        for (key, reply) in keys.iter().zip(&mut replies) {
            let is_releasing = self.has_job(state, process, Action::Release, *key);
            let may_be_released = is_releasing && self.holds(Rule::ReleasingIsInFlight) || removed;
            if *reply == Reply::Duplicate && may_be_released {
                *reply = Reply::InFlight;
            }
        }
        replies
    }

    /// Returns the phase of a delivery whose handler does not run: rules 3 and 5 of `resolve.rs`.
    fn resolve(
        &self,
        state: &mut State,
        index: usize,
        (process, token): (Process, Token),
        replies: &[Reply],
    ) -> Option<Phase> {
        let in_flight = replies.contains(&Reply::InFlight);
        let is_duplicate = replies.contains(&Reply::Duplicate)
            || (in_flight && !self.holds(Rule::InFlightIsNoDuplicate));
        if !is_duplicate && !in_flight {
            return None;
        }
        for (place, key) in self.deliveries[index].iter().enumerate() {
            if !matches!(replies.get(place), Some(Reply::First { .. })) {
                continue;
            }
            let completes = is_duplicate && !self.holds(Rule::DuplicateReleasesItsClaims);
            let action = if completes { Action::Complete } else { Action::Release };
            self.spawn(state, process, action, token, *key);
        }
        Some(if is_duplicate {
            Phase::Acknowledged { duplicate: true }
        } else {
            Phase::Idle { in_flight: true }
        })
    }

    /// Goes on after the handler: `Claim::settle` in `lease.rs`.
    pub(crate) fn handler(&self, state: &mut State, index: usize, success: bool) {
        let delivery = &mut state.deliveries[index];
        let Phase::Running { process, token, .. } = delivery.phase else { return };
        delivery.phase = match self.ledger {
            Ledger::Lease => {
                delivery.runs = (delivery.runs + u8::from(success)).min(3);
                let rule = if success { Rule::SuccessIsCompleted } else { Rule::FailureIsReleased };
                let completes = success == self.holds(rule);
                let action = if completes { Action::Complete } else { Action::Release };
                let (replies, view) = Default::default();
                Phase::Calling { process, token, action, replies, view }
            }
            Ledger::OnArrival if success => Phase::Acknowledged { duplicate: false },
            Ledger::OnArrival => Phase::Idle { in_flight: false },
        };
    }

    /// Returns the token whose leases are renewed, if the handler runs or completes: `renewal.rs`.
    pub(crate) fn renewed(&self, state: &State, index: usize) -> Option<Token> {
        match &state.deliveries[index].phase {
            _ if self.ledger == Ledger::OnArrival => None,
            Phase::Running { token, .. }
            | Phase::Calling { token, action: Action::Complete, .. } => Some(*token),
            _ => None,
        }
    }

    /// Returns `true` if the reply to a release waits for the replica: `wait_replicas` in `redis/slot.rs`.
    ///
    /// A release always writes, so there is always a write to wait for: also if another token holds the row.
    pub(crate) fn waits_for_replica(&self) -> bool {
        self.ledger == Ledger::OnArrival && self.holds(Rule::ReleaseIsReplicated)
    }

    /// Ends a job: the drop of `PendingGuard` in `pending.rs`.
    pub(crate) fn end_job(&self, state: &mut State, job: Job) {
        state.jobs.remove(&job);
        for delivery in &mut state.deliveries {
            if let Phase::Calling { process, action: Action::Claim, view, .. } = &mut delivery.phase
                && self.ledger == Ledger::OnArrival
            {
                view.removed |= *process == job.process;
            }
        }
    }

    /// Returns `true` if a job that ends without success loses and doubles nothing: a lease lapses then.
    pub(crate) fn loses_nothing(&self, job: Job) -> bool {
        self.ledger == Ledger::Lease && job.call.action == Action::Release
    }
}
