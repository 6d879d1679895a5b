//! [`Model`]: the steps of deliveries and loops, and what must hold at the end.

use super::state::{
    Answered, EVENTS, End, Key, Mask, Phase, Place, Reason, Row, Run, State, members,
};
use super::world::{ATTEMPTS, Answers, Deploy, Fault, Mode, Rule, With, World};

pub(crate) const DOUBLED: &str = "doubled: an event has a second effect";
pub(crate) const LOST: &str =
    "lost: an event was acknowledged, has no effect, and waits for nobody";
pub(crate) const BLOCKED: &str = "blocked: a row is left that nobody takes";
pub(crate) const NEVER_RAN: &str = "parked as failed, and its handler never ran";
pub(crate) const HAS_A_ROUTE: &str = "parked as misrouted, and its layer is there";
pub(crate) const STAYS_PARKED: &str = "answered stored, and its row stays parked";
pub(crate) const REFUSED: &str = "refused by the inbox: without one, its handler had run";

#[derive(Debug)]
pub(crate) struct Model<'a> {
    pub(crate) world: &'a World,
    pub(crate) left_out: Option<Rule>,
}

/// A step to the next state. `is_paid`: it happens a bounded number of times, and need not happen.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) who: Option<usize>,
    pub(crate) what: &'static str,
    pub(crate) state: State,
    pub(crate) is_paid: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Steps(pub(crate) Vec<Step>);

impl Steps {
    pub(crate) fn free(&mut self, who: impl Into<Option<usize>>, what: &'static str, state: State) {
        self.0.push(Step { who: who.into(), what, state, is_paid: false });
    }

    pub(crate) fn paid(&mut self, who: impl Into<Option<usize>>, what: &'static str, state: State) {
        self.0.push(Step { who: who.into(), what, state, is_paid: true });
    }
}

impl Model<'_> {
    pub(crate) fn holds(&self, rule: Rule) -> bool {
        self.left_out != Some(rule)
    }

    /// Returns `true` if the run is a redelivery of a loop.
    pub(crate) fn is_loop(&self, who: usize) -> bool {
        who >= self.world.deliveries.len()
    }

    pub(crate) fn process(&self, who: usize) -> usize {
        let deliveries = self.world.deliveries.len();
        let delivery = self.world.deliveries.get(who);
        delivery.map_or_else(|| who - deliveries, |delivery| delivery.process)
    }

    pub(crate) fn events(&self, of: usize) -> Mask {
        self.world.deliveries[of].events
    }

    fn body(&self, of: usize) -> u8 {
        self.world.deliveries[of].body
    }

    fn is_old(&self, of: usize) -> bool {
        self.world.with == With::OldBody && self.body(of) == 0
    }

    fn reads_other_keys(&self, state: &State, who: usize) -> bool {
        self.world.deploy == Deploy::OtherKeys && state.deployed[self.process(who)]
    }

    fn keys(&self, state: &State, who: usize) -> Mask {
        let events = self.events(state.runs[who].of);
        if self.reads_other_keys(state, who) { events << EVENTS } else { events }
    }

    fn is_switched(&self, state: &State, who: usize) -> bool {
        let is_second = self.world.with == With::TwoLayers && self.events(state.runs[who].of) != 1;
        state.switched[self.process(who)] & (1 << u8::from(is_second)) != 0
    }

    /// Returns the `seq` of the row that has the key of this request.
    fn find(&self, state: &State, who: usize) -> Option<u8> {
        let (of, is_rekeyed) = (state.runs[who].of, self.reads_other_keys(state, who));
        let key = |of| {
            let events = self.events(of);
            let first = events & events.wrapping_neg();
            let has_service = self.world.with != With::TwoServices || self.holds(Rule::Service);
            (
                if self.holds(Rule::WholeKey) { events } else { first } * u8::from(has_service),
                if self.holds(Rule::BodyInKey) { self.body(of) } else { 0 },
            )
        };
        let mut rows = state.rows.iter().filter(|row| row.place != Place::Gone);
        let row = rows.find(|row| row.is_rekeyed == is_rekeyed && key(row.of) == key(of))?;
        Some(row.seq)
    }

    pub(crate) fn steps(&self, state: &State) -> Vec<Step> {
        let mut steps = Steps::default();
        for who in 0..state.runs.len() {
            let phase = state.runs[who].phase;
            match phase {
                Phase::Idle if self.is_loop(who) => self.take(state, who, &mut steps),
                Phase::Idle => self.deliver(state, who, &mut steps),
                Phase::Calls => self.call(state, who, &mut steps),
                Phase::Claims => self.claim(state, who, &mut steps),
                Phase::Runs => self.run(state, who, &mut steps),
                Phase::Unprotected(is_excused) => {
                    self.run_unprotected(state, who, is_excused, &mut steps);
                }
                Phase::Ends(end) => self.end(state, who, end, &mut steps),
                Phase::Done | Phase::Dead | Phase::Unsent => {}
            }
            self.answer_within(state, who, &mut steps);
        }
        self.time(state, &mut steps);
        self.people(state, &mut steps);
        steps.0
    }

    // Deliveries.

    fn deliver(&self, state: &State, who: usize, steps: &mut Steps) {
        let phase_of = |phase| {
            let mut next = state.clone();
            next.runs[who].phase = phase;
            next
        };
        if self.world.one_by_one && who > 0 && !state.runs[who - 1].is_acknowledged {
            if !state.is_alive(who - 1) && state.runs[who - 1].phase != Phase::Idle {
                steps.free(who, "is not sent", phase_of(Phase::Unsent));
            }
            return;
        }
        if state.deployed[self.process(who)] && self.world.deploy != Deploy::OtherKeys {
            steps.free(who, "is sent to a version without its route", phase_of(Phase::Unsent));
            return;
        }
        if self.is_switched(state, who) {
            steps.free(who, "passes: the mode", phase_of(Phase::Claims));
            return;
        }
        let is_first = self.world.answers == Answers::First;
        let (mut next, seq, is_new) = self.store(state, who, Place::Held(who));
        if is_new && !is_first {
            next.runs[who].phase = Phase::Claims;
            next.runs[who].row = Some((seq, 0));
            for other in (0..self.world.deliveries.len()).filter(|other| *other != who) {
                let is_in_batch = state.runs[other].phase == Phase::Idle
                    && self.process(other) == self.process(who)
                    && !self.world.one_by_one
                    && self.find(&next, other) == Some(seq);
                if is_in_batch {
                    let mut next = next.clone();
                    if self.holds(Rule::AnsweredInBatch) {
                        next.row(seq).expect("inserted").answered = Answered::Yes;
                    }
                    next.runs[other].say_stored();
                    steps.free(who, "is inserted; another one of its batch: stored", next);
                }
            }
            steps.free(who, "is inserted", next);
        } else {
            next.runs[who].say_stored();
            if matches!(next.row(seq).expect("written").place, Place::Parked(_)) {
                next.violation = Some(STAYS_PARKED);
            }
            steps.free(who, "its row is there: stored", next);
        }
        let Some(faulty) = state.paying(Fault::Call) else { return };
        let (executed, ..) = self.store(&faulty, who, Place::Unheard);
        for (what, mut next) in
            [("the table fails", faulty), ("the table's reply is lost", executed)]
        {
            if self.holds(Rule::CommitFirst) {
                let passes = self.holds(Rule::Passes);
                next.runs[who].phase = if passes { Phase::Claims } else { Phase::Done };
            } else {
                next.runs[who].say_stored();
            }
            steps.paid(who, what, next);
        }
    }

    /// Inserts the row at this place, or answers for the one that is there. Returns its `seq`, and whether it is new.
    fn store(&self, state: &State, who: usize, place: Place) -> (State, u8, bool) {
        let mut next = state.clone();
        if let Some(seq) = self.find(state, who) {
            self.answer(&mut next, seq);
            return (next, seq, false);
        }
        let is_first = self.world.answers == Answers::First;
        let (seq, of) = (state.next_seq, state.runs[who].of);
        if self.holds(Rule::Durable) {
            next.flush();
        }
        let mut events = members(self.events(of));
        next.rows.push(Row {
            seq,
            of,
            place: if is_first { Place::Due } else { place },
            answered: if is_first { Answered::Yes } else { Answered::No },
            is_durable: self.holds(Rule::Durable),
            is_late: self.world.left[Fault::Expiry as usize] > 0
                && events.all(|event| matches!(state.keys[event], Key::Complete(_))),
            is_rekeyed: self.reads_other_keys(state, who),
            ..Row::default()
        });
        next.next_seq += 1;
        (next, seq, true)
    }

    /// The statement before *stored*.
    fn answer(&self, state: &mut State, seq: u8) {
        if self.holds(Rule::DurableAnswer) {
            state.flush();
        }
        self.set_answered(state, seq);
        let row = state.row(seq).expect("found");
        row.version += u8::from(self.holds(Rule::Versions));
        let wakes = match row.place {
            Place::Parked(Reason::Expired) => self.holds(Rule::Renews),
            Place::Later | Place::Parked(_) => self.holds(Rule::Wakes),
            _ => false,
        };
        if wakes {
            row.wake();
        }
    }

    fn set_answered(&self, state: &mut State, seq: u8) {
        let row = state.row(seq).expect("found");
        if self.holds(Rule::Answered) {
            let is_durable = self.holds(Rule::DurableAnswer);
            let answered = if is_durable { Answered::Yes } else { Answered::Volatile };
            row.answered = row.answered.max(answered);
        }
    }

    /// `answer_within` has passed. The handler goes on, or has just ended.
    fn answer_within(&self, state: &State, who: usize, steps: &mut Steps) {
        let run = state.runs[who];
        let Some((seq, version)) = run.row.filter(|_| !self.is_loop(who) && !run.is_early) else {
            return;
        };
        if self.world.answers != Answers::Within {
            return;
        }
        let written = |mut next: State, is_heard: bool| {
            if next.row(seq).is_some() {
                self.answer(&mut next, seq);
            } else if self.holds(Rule::StillThere) {
                return None;
            }
            let now = next.row(seq).map_or(0, |row| row.version);
            let run = &mut next.runs[who];
            run.is_early = true;
            if is_heard {
                let own = version + u8::from(self.holds(Rule::Versions));
                run.row = Some((seq, if self.holds(Rule::OwnVersion) { own } else { now }));
                run.is_owed |= !run.is_acknowledged;
                run.is_acknowledged = true;
            }
            Some(next)
        };
        if let Some(next) = written(state.clone(), true) {
            steps.free(who, "is answered stored, and goes on", next);
        }
        let faulty = state.paying(Fault::Call);
        if let Some(next) = faulty.and_then(|faulty| written(faulty, false)) {
            steps.paid(who, "writes stored, and the reply is lost", next);
        }
    }

    // Loops.

    fn take(&self, state: &State, who: usize, steps: &mut Steps) {
        let (process, world) = (self.process(who), self.world);
        for row in state.rows.iter().filter(|row| row.place == Place::Due) {
            let is_foreign = world.with == With::OneRoute && process == 1;
            let is_of_another_service = world.with == With::TwoServices && row.of != process;
            if is_foreign && self.holds(Rule::OwnRows)
                || is_of_another_service && self.holds(Rule::Service)
                || state.switched[process] != 0 && self.holds(Rule::AllEnforce)
            {
                continue;
            }
            let seq = row.seq;
            let mut next = state.clone();
            next.row(seq).expect("it is due").place = Place::Held(who);
            let run = &mut next.runs[who];
            run.phase = Phase::Calls;
            run.row = Some((seq, row.version));
            // The service calls its own route.
            run.of = if world.with == With::TwoServices { process } else { row.of };
            run.is_rekeyed = row.is_rekeyed;
            run.was_answered = !self.holds(Rule::AnsweredIsRead) && row.answered != Answered::No;
            steps.free(who, "takes a row", next);
            if let Some(mut next) = state.paying(Fault::Call) {
                next.row(seq).expect("it is due").place = Place::Unheard;
                steps.paid(who, "takes a row, and the reply is lost", next);
            }
        }
    }

    /// The redelivery goes through the application to `around`.
    fn call(&self, state: &State, who: usize, steps: &mut Steps) {
        let world = self.world;
        let process = self.process(who);
        let (seq, _) = state.runs[who].row.expect("taken");
        let next = |phase| {
            let mut next = state.clone();
            next.runs[who].phase = phase;
            next
        };
        let misrouted = |at_once| next(Phase::Ends(End::Misrouted(at_once)));
        let (is_deployed, reports) = (state.deployed[process], self.holds(Rule::Report));
        let answers_404 = is_deployed && world.deploy == Deploy::NoRoute
            || world.with == With::OneRoute && process == 1;
        if answers_404 {
            steps.free(who, "is answered 404: there is no route", misrouted(false));
            return;
        }
        if is_deployed && world.deploy == Deploy::Fallback {
            let complete = next(Phase::Ends(End::Complete));
            let ended = if reports { misrouted(true) } else { complete };
            steps.free(who, "is answered 200 by a fallback", ended);
            return;
        }
        if let Some(mut unmarked) = state.paying(Fault::LostMark) {
            unmarked.runs[who].phase = Phase::Ends(End::Misrouted(false));
            steps.paid(who, "loses its mark, and is unverified: 401", unmarked.clone());
            if unmarked.row(seq).is_some() {
                self.answer(&mut unmarked, seq);
                unmarked.runs[who].phase = Phase::Ends(End::Misrouted(true));
                steps.paid(who, "loses its mark: its row exists: stored", unmarked);
            }
        }
        let is_rekeyed = state.runs[who].is_rekeyed;
        if is_rekeyed != self.reads_other_keys(state, who) && self.holds(Rule::SameKeys) {
            steps.free(who, "has other keys than the row", misrouted(false));
        } else if !self.is_switched(state, who) {
            steps.free(who, "reaches its layer", next(Phase::Claims));
        } else if self.holds(Rule::CallsNothing) {
            steps.free(who, "reaches a layer in another mode", misrouted(false));
        } else {
            let mut next = state.clone();
            self.begin_unprotected(&mut next, who, false);
            steps.free(who, "runs unprotected", next);
        }
    }

    // The ledger and the handler.

    fn claim(&self, state: &State, who: usize, steps: &mut Steps) {
        let mut next = state.clone();
        next.runs[who].has_asked = !self.is_loop(who);
        if self.is_switched(state, who) {
            self.begin_unprotected(&mut next, who, true);
            steps.free(who, "runs unprotected", next);
            return;
        }
        if let Some(mut unavailable) = next.paying(Fault::Call) {
            unavailable.runs[who].phase = Phase::Ends(End::InFlight);
            steps.paid(who, "cannot reach the key store", unavailable);
        }
        let (keys, body) = (self.keys(state, who), self.body(state.runs[who].of));
        let refuses = self.world.with == With::Refusal;
        let (mut new, mut is_busy, mut is_mismatch) = (0, false, false);
        for key in members(keys) {
            match state.keys[key] {
                Key::Free => new |= 1 << key,
                Key::Held(_) => is_busy = true,
                Key::Complete(by) => is_mismatch |= refuses && by != body,
            }
        }
        let mismatch = is_mismatch.then_some(End::Mismatch);
        let instead = if is_busy { Some(End::InFlight) } else { mismatch };
        new = if self.holds(Rule::Ledger) { new } else { keys };
        let is_old = self.is_old(state.runs[who].of);
        if new == 0 || is_old {
            let end = instead.filter(|_| !is_old).unwrap_or(End::Complete);
            self.set_end(&mut next, who, end);
            steps.free(who, end.as_str(), next);
            return;
        }
        self.hold(&mut next, who, new);
        next.runs[who].phase = Phase::Runs;
        next.runs[who].instead = instead;
        steps.free(who, "claims its keys", next);
    }

    /// The handler begins, and its keys are claimed.
    fn hold(&self, state: &mut State, who: usize, keys: Mask) {
        for key in members(keys).filter(|_| self.holds(Rule::Ledger)) {
            state.keys[key] = Key::Held(who);
        }
        state.runs[who].claimed = keys;
        if let Some((seq, _)) = state.runs[who].row
            && let Some(row) = state.row(seq)
        {
            row.has_run = true;
        }
    }

    /// The layer is in shadow or off. In shadow it claims what is free.
    fn begin_unprotected(&self, state: &mut State, who: usize, is_excused: bool) {
        let is_free = |key: &usize| state.keys[*key] == Key::Free;
        let free = members(self.keys(state, who)).filter(is_free);
        let free = free.fold(0, |keys, key| keys | 1 << key);
        self.hold(state, who, if self.world.mode == Mode::Shadow { free } else { 0 });
        state.runs[who].phase = Phase::Unprotected(is_excused);
    }

    fn run(&self, state: &State, who: usize, steps: &mut Steps) {
        let run = state.runs[who];
        if self.world.with == With::DeadlyEvent && self.events(run.of) & 1 != 0 {
            let mut next = state.clone();
            self.kill(&mut next, self.process(who));
            steps.free(who, "kills its process", next);
            return;
        }
        let (mut next, body) = (state.clone(), self.body(run.of));
        let claimed = || members(run.claimed).map(|key| state.keys[key]);
        let is_refused = claimed().any(|key| matches!(key, Key::Complete(_)));
        let end = if is_refused && self.holds(Rule::Ledger) {
            // The first COMMIT wins. It is a duplicate if all events are complete, and by this body.
            let refuses = self.world.with == With::Refusal;
            let is_known = |key| matches!(key, Key::Complete(by) if !refuses || by == body);
            next.release(who);
            let is_duplicate = claimed().all(is_known);
            if is_duplicate { run.instead.unwrap_or(End::Complete) } else { End::Released }
        } else {
            self.commit(&mut next, who, run.claimed, false);
            run.instead.unwrap_or(End::Complete)
        };
        self.set_end(&mut next, who, end);
        steps.free(who, "commits, or finds that another run has", next);
        if let Some(mut failed) = state.paying(Fault::Fail) {
            failed.release(who);
            let mut uncommitted = failed.clone();
            self.set_end(&mut failed, who, End::Released);
            steps.paid(who, "its handler fails", failed);
            if !self.holds(Rule::LedgersWord) {
                self.set_end(&mut uncommitted, who, End::Complete);
                steps.paid(who, "its handler answers 2xx without a COMMIT", uncommitted);
            }
        }
        if let Some(mut refused) = state.paying(Fault::Refusal) {
            refused.release(who);
            self.set_end(&mut refused, who, End::Refused);
            steps.paid(who, "its handler answers 422", refused);
        }
    }

    /// The handler's effect is committed.
    fn commit(&self, state: &mut State, who: usize, keys: Mask, is_excused: bool) {
        let run = state.runs[who];
        let (body, is_transaction) = (self.body(run.of), run.phase == Phase::Runs);
        for key in members(keys) {
            let event = &mut state.events[key % EVENTS];
            event.is_excused |= is_excused;
            if event.effects > 0 && !event.is_excused {
                state.violation = Some(DOUBLED);
            }
            event.effects = (event.effects + 1).min(2);
            event.bodies |= 1 << body;
        }
        let claimed = std::mem::take(&mut state.runs[who].claimed);
        for key in members(claimed).filter(|_| self.holds(Rule::Ledger)) {
            // In a transaction the first COMMIT wins, whoever has the lease. In shadow, the layer completes by lease.
            let is_own = matches!(state.keys[key], Key::Free) || state.keys[key] == Key::Held(who);
            if is_own || is_transaction {
                state.keys[key] = Key::Complete(body);
            }
        }
    }

    fn run_unprotected(&self, state: &State, who: usize, is_excused: bool, steps: &mut Steps) {
        let mut next = state.clone();
        self.commit(&mut next, who, self.keys(state, who), is_excused);
        self.set_end(&mut next, who, End::Undecided(true));
        steps.free(who, "its handler succeeds, unprotected", next);
        if let Some(mut failed) = state.paying(Fault::Fail) {
            failed.release(who);
            self.set_end(&mut failed, who, End::Undecided(false));
            steps.paid(who, "its handler fails, unprotected", failed);
        }
    }

    /// `dedup` has answered. A response that is no *stored* leaves at once.
    fn set_end(&self, state: &mut State, who: usize, end: End) {
        let run = &mut state.runs[who];
        run.phase = Phase::Ends(end);
        if matches!(end, End::Complete | End::Undecided(true)) && !self.is_loop(who) {
            run.is_acknowledged = true;
            let of = run.of;
            let mut events = members(self.events(of));
            let is_lost = |event: usize| {
                !state.events[event].is_excused && !self.has_effect(state, of, event)
            };
            if events.any(is_lost) {
                state.violation = Some(LOST);
            }
        }
    }

    // The end of a run.

    fn end(&self, state: &State, who: usize, end: End, steps: &mut Steps) {
        let mut next = state.clone();
        let says_stored = self.end_row(&mut next, who, end);
        self.leave(&mut next, who, says_stored);
        steps.free(who, end.as_str(), next);
        if let Some(mut faulty) = state.paying(Fault::Call) {
            let mut executed = faulty.clone();
            self.end_row(&mut executed, who, end);
            let says_stored = self.says_stored_without_a_row(state, who, end);
            self.leave(&mut executed, who, says_stored);
            steps.paid(who, "writes its end, and the reply is lost", executed);
            self.leave(&mut faulty, who, says_stored);
            steps.paid(who, "cannot write its end", faulty);
        }
    }

    fn says_stored_without_a_row(&self, state: &State, who: usize, end: End) -> bool {
        !self.holds(Rule::StillThere)
            && state.runs[who].row.is_some()
            && matches!(end, End::Released | End::InFlight)
    }

    /// The delivery is answered, or the slot of the loop is free.
    fn leave(&self, state: &mut State, who: usize, says_stored: bool) {
        let is_loop = self.is_loop(who);
        let run = &mut state.runs[who];
        if says_stored && !is_loop && !run.is_acknowledged {
            run.say_stored();
        }
        run.rest(if is_loop { Phase::Idle } else { Phase::Done });
    }

    /// Writes the row at the end of a run. Returns `true` if *stored* leaves then.
    fn end_row(&self, state: &mut State, who: usize, end: End) -> bool {
        let run = state.runs[who];
        let is_loop = self.is_loop(who);
        let Some((taken, version)) = run.row else { return false };
        let seq = if self.holds(Rule::BySeq) { Some(taken) } else { self.find(state, who) };
        let Some(row) = seq.and_then(|seq| state.row(seq)) else {
            return self.says_stored_without_a_row(state, who, end);
        };
        let seq = row.seq;
        let has_turn = row.place == Place::Held(who) || !self.holds(Rule::ByTurn);
        let was_answered = if self.holds(Rule::AnsweredIsRead) {
            row.answered != Answered::No
        } else {
            run.was_answered
        };
        let was_answered = was_answered || !is_loop && run.is_owed;
        let is_deleted = match end {
            End::Complete => true,
            End::Mismatch => !was_answered || !self.holds(Rule::MismatchParks),
            End::Undecided(_) => !is_loop && !was_answered || !self.holds(Rule::Undecided),
            End::InFlight => !self.holds(Rule::InFlightWaits),
            End::Refused | End::Released | End::Misrouted(_) => false,
        };
        if is_deleted {
            if row.version == version || !self.holds(Rule::Versions) {
                state.delete(seq);
            } else if has_turn {
                row.place = Place::Due;
            }
            return end == End::InFlight;
        }
        let is_refused = end == End::Refused && !was_answered;
        let says_stored = match end {
            End::Released | End::InFlight => !is_loop,
            End::Refused => !is_loop && was_answered,
            _ => false,
        };
        if has_turn {
            let counts = match end {
                End::Released | End::Refused => !is_refused,
                End::InFlight | End::Undecided(_) => !self.holds(Rule::NoAttempt),
                _ => false,
            };
            row.fails += u8::from(counts);
            row.misroutes =
                (row.misroutes + u8::from(matches!(end, End::Misrouted(_)))).min(ATTEMPTS);
            let is_last = counts && row.fails + row.deaths >= ATTEMPTS;
            let gives_up = end == End::Misrouted(true) || row.misroutes >= ATTEMPTS;
            row.place = match end {
                End::Mismatch => Place::Parked(Reason::Mismatch),
                End::Misrouted(_) if gives_up && self.holds(Rule::GivesUp) => {
                    Place::Parked(Reason::Misrouted)
                }
                End::Refused if is_refused => Place::Parked(Reason::Refused),
                _ if is_last => Place::Parked(Reason::Failed),
                _ => Place::Later,
            };
            let place = row.place;
            if place == Place::Parked(Reason::Failed) && !row.has_run && row.deaths == 0 {
                state.violation = Some(NEVER_RAN);
            }
            let has_happened = |fault| state.left[fault as usize] < self.world.left[fault as usize];
            let has_route = !has_happened(Fault::Deploy) && !has_happened(Fault::LostMark);
            if place == Place::Parked(Reason::Misrouted) && has_route {
                state.violation = Some(HAS_A_ROUTE);
            }
            if says_stored {
                self.set_answered(state, seq);
            }
        } else if says_stored {
            self.answer(state, seq);
        }
        if says_stored && self.holds(Rule::DurableAnswer) {
            state.flush();
        }
        says_stored
    }

    /// Returns `true` if the request has had its effect on this event.
    fn has_effect(&self, state: &State, of: usize, event: usize) -> bool {
        let event = state.events[event];
        let is_by_body = self.world.with == With::Refusal;
        let by_body = event.bodies & 1 << self.body(of) != 0;
        self.is_old(of) || if is_by_body { by_body } else { event.effects > 0 }
    }

    /// Returns what is violated when nothing is left to do.
    pub(crate) fn at_the_end(&self, state: &State) -> Option<&'static str> {
        let is_by_body = self.world.with == With::Refusal;
        let waits_for_a_person = |of: usize, event: usize| {
            state.rows.iter().any(|row| {
                matches!(row.place, Place::Parked(reason) if reason != Reason::Refused)
                    && self.events(row.of) & 1 << event != 0
                    && (!is_by_body || self.body(row.of) == self.body(of))
            })
        };
        let deliveries = || state.runs.iter().take(self.world.deliveries.len());
        let is_lost = |run: &Run| {
            run.is_owed
                && members(self.events(run.of)).any(|event| {
                    !self.has_effect(state, run.of, event) && !waits_for_a_person(run.of, event)
                })
        };
        let is_refused =
            |run: &Run| run.phase == Phase::Done && !run.is_acknowledged && !run.has_asked;
        let has_ended = |row: &Row| matches!(row.place, Place::Parked(_) | Place::Gone);
        if deliveries().any(is_lost) {
            Some(LOST)
        } else if deliveries().any(is_refused) {
            Some(REFUSED)
        } else {
            (!state.rows.iter().all(has_ended)).then_some(BLOCKED)
        }
    }
}

impl End {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "is complete",
            Self::Mismatch => "is refused: a mismatch",
            Self::Refused => "was refused by its handler",
            Self::Released => "has failed",
            Self::InFlight => "is in flight elsewhere",
            Self::Undecided(_) => "is undecided",
            Self::Misrouted(_) => "is misrouted",
        }
    }
}
