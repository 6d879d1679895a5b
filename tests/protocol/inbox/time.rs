//! The steps of time and of people: what lapses, dies, expires, and what an operator does.

use super::model::{Model, Steps};
use super::state::{Answered, EVENTS, Event, Key, Phase, Place, Reason, Row, State, members};
use super::world::{ATTEMPTS, Fault, Rule, With};

impl Model<'_> {
    pub(super) fn time(&self, state: &State, steps: &mut Steps) {
        for (index, key) in state.keys.iter().enumerate() {
            let Key::Held(who) = *key else { continue };
            let free = |mut next: State| {
                next.keys[index] = Key::Free;
                next
            };
            if state.runs[who].claimed & 1 << index == 0 {
                steps.free(None, "a lease lapses, its run is dead", free(state.clone()));
            } else if let Some(next) = state.paying(Fault::Lapse) {
                steps.paid(None, "a lease lapses under a run", free(next));
            }
        }
        for (index, row) in state.rows.iter().enumerate() {
            self.time_of_row(state, index, row, steps);
        }
        if let Some((seq, version)) = state.purges {
            let mut next = state.clone();
            next.purges = None;
            let row = next.row(seq).map(|row| row.version);
            if row.is_some_and(|now| now == version || !self.holds(Rule::PurgeVersion)) {
                next.delete(seq);
            }
            steps.free(None, "the purge deletes what it has read", next);
        }
        for process in 0..2 {
            if let Some(mut next) = state.paying(Fault::Kill) {
                self.kill(&mut next, process);
                steps.paid(None, ["process 0 is killed", "process 1 is killed"][process], next);
            }
        }
        if let Some(mut next) = state.paying(Fault::Crash) {
            next.rows.retain(|row| row.is_durable);
            for row in &mut next.rows {
                row.place = if row.place == Place::Gone { Place::Due } else { row.place };
                row.answered =
                    if row.answered == Answered::Yes { Answered::Yes } else { Answered::No };
            }
            steps.paid(None, "the database crashes", next);
        }
        for event in 0..EVENTS {
            self.expire(state, event, steps);
        }
    }

    fn time_of_row(&self, state: &State, index: usize, row: &Row, steps: &mut Steps) {
        let put = |mut next: State, place| {
            next.rows[index].place = place;
            next
        };
        let lapse = |mut next: State| {
            let row = &mut next.rows[index];
            row.deaths += u8::from(self.holds(Rule::Deaths));
            let is_last = self.holds(Rule::Deaths) && row.fails + row.deaths >= ATTEMPTS;
            row.place = if is_last { Place::Parked(Reason::Died) } else { Place::Due };
            next
        };
        match row.place {
            Place::Later => {
                steps.free(None, "a delay has passed", put(state.clone(), Place::Due));
            }
            Place::Unheard if self.holds(Rule::RenewsRuns) && self.holds(Rule::TurnLapses) => {
                steps.free(None, "a turn lapses that nobody knows", lapse(state.clone()));
            }
            Place::Held(who) if self.holds(Rule::TurnLapses) => {
                let runs = state.runs[who].row.is_some_and(|(seq, _)| seq == row.seq);
                if !runs {
                    steps.free(None, "a turn lapses, its run is dead", lapse(state.clone()));
                } else if let Some(next) = state.paying(Fault::Lapse) {
                    steps.paid(None, "a turn lapses under a run", lapse(next));
                }
            }
            Place::Parked(Reason::Expired) if state.purges.is_none() => {
                let mut next = state.clone();
                next.purges = Some((row.seq, row.version));
                steps.free(None, "the purge reads an expired row", next);
            }
            _ => {}
        }
        let is_parked = matches!(row.place, Place::Parked(reason) if reason != Reason::Expired);
        if (is_parked || matches!(row.place, Place::Later | Place::Due))
            && let Some(next) = state.paying(Fault::Age)
        {
            let mut next = put(next, Place::Parked(Reason::Expired));
            self.forgive(&mut next, self.events(row.of));
            steps.paid(None, "a row expires", next);
        }
        if is_parked && let Some(mut next) = state.paying(Fault::Retry) {
            next.rows[index].wake();
            steps.paid(None, "an operator retries a row", next);
        }
    }

    /// What was acknowledged until now was seen by a person, or has had its effect.
    fn forgive(&self, state: &mut State, events: u8) {
        for run in state.runs.iter_mut().take(self.world.deliveries.len()) {
            run.is_owed &= self.events(run.of) & events == 0;
        }
    }

    /// Ends the runs of a process, which starts again at once.
    pub(super) fn kill(&self, state: &mut State, process: usize) {
        for who in 0..state.runs.len() {
            if self.process(who) == process && state.is_alive(who) {
                let phase = if self.is_loop(who) { Phase::Idle } else { Phase::Dead };
                state.runs[who].rest(phase);
            }
        }
    }

    /// The retention of a key ends. No run lasts as long, and no sender delivers an event again after it.
    fn expire(&self, state: &State, event: usize, steps: &mut Steps) {
        if !matches!(state.keys[event], Key::Complete(_)) {
            return;
        }
        let Some(mut next) = state.paying(Fault::Expiry) else { return };
        let may_run = |who: usize| {
            let run = state.runs[who];
            let is_sent = self.is_loop(who) || run.phase != Phase::Idle;
            self.events(run.of) & 1 << event != 0 && (state.is_alive(who) || !is_sent)
        };
        if (0..state.runs.len()).any(may_run) {
            return;
        }
        let is_of = |row: &Row| self.events(row.of) & 1 << event != 0;
        let waits = |row: &&Row| is_of(row) && !matches!(row.place, Place::Parked(_) | Place::Gone);
        let mut waiting = state.rows.iter().filter(waits).peekable();
        let has_waiting = waiting.peek().is_some();
        let is_short = !self.holds(Rule::Retention) && waiting.all(|row| row.is_late);
        if self.holds(Rule::ExpiresFirst) && !(has_waiting && is_short) {
            // A row that is older than its key has ended, and no crash brings it back.
            if has_waiting {
                return;
            }
            next.rows.retain(|row| !is_of(row));
            self.forgive(&mut next, 1 << event);
        }
        next.keys[event] = Key::Free;
        steps.paid(None, "a key expires", next);
    }

    pub(super) fn people(&self, state: &State, steps: &mut Steps) {
        for event in 0..EVENTS {
            let is_complete = matches!(state.keys[event], Key::Complete(_));
            let spares = self.holds(Rule::ForgetSpares);
            if (is_complete || !spares && state.keys[event] == Key::Free)
                && let Some(mut next) = state.paying(Fault::Forget)
            {
                if is_complete {
                    next.events[event] = Event { is_excused: true, ..Event::default() };
                    self.forgive(&mut next, 1 << event);
                }
                next.keys[event] = Key::Free;
                next.rows.retain(|row| spares || self.events(row.of) & 1 << event == 0);
                steps.paid(None, "an operator forgets a key", next);
            }
        }
        let layers = if self.world.with == With::TwoLayers { 0b11 } else { 0b1 };
        for process in 0..2 {
            for layer in members(layers) {
                let mut back = state.clone();
                back.switched[process] &= !(1 << layer);
                if back != *state {
                    steps.free(None, "a layer enforces again", back);
                } else if let Some(mut next) = state.paying(Fault::Switch) {
                    next.switched[process] |= 1 << layer;
                    steps.paid(
                        None,
                        ["a layer of process 0 is switched", "a layer of process 1 is switched"]
                            [process],
                        next,
                    );
                }
            }
            if !state.deployed[process]
                && let Some(mut next) = state.paying(Fault::Deploy)
            {
                self.kill(&mut next, process);
                next.deployed[process] = true;
                steps.paid(None, ["process 0 is deployed", "process 1 is deployed"][process], next);
            }
        }
    }
}
