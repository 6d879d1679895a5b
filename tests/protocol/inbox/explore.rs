//! [`explore`]: a breadth-first search of all states of a world.
//!
//! It is not stateright's, because it also checks that from every state an end can be reached without a further fault.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::model::{Model, Step};
use super::state::State;

pub(crate) const FOR_EVER: &str = "for ever: from here no end is reached";

/// What a search has found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) states: usize,
    pub(crate) violation: Option<&'static str>,
    /// The steps to the violation: the fewest.
    pub(crate) history: Vec<String>,
}

pub(crate) fn explore(model: &Model<'_>) -> Found {
    let start = State::new(model.world.deliveries.len(), model.world.left);
    let digest = |state: &State| {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        hasher.finish()
    };
    let mut numbers = HashMap::from([(digest(&start), 0)]);
    // For each state: the state before it, and the place of the step.
    let mut origins = vec![(0, 0)];
    // For each state: those that reach it by a step that is not paid.
    let mut befores: Vec<Vec<u32>> = vec![Vec::new()];
    let mut ends = Vec::new();
    let mut todo = VecDeque::from([(0_u32, start)]);
    while let Some((number, state)) = todo.pop_front() {
        assert!(origins.len() < 4_000_000, "{}: too many states", model.world.name);
        let steps = model.steps(&state);
        let is_end = steps.iter().all(|step| step.is_paid);
        let at_the_end = is_end.then(|| model.at_the_end(&state)).flatten();
        if let Some(violation) = state.violation.or(at_the_end) {
            let history = history(model, &origins, number);
            return Found { states: origins.len(), violation: Some(violation), history };
        }
        if is_end {
            ends.push(number);
        }
        for (place, Step { state, is_paid, .. }) in steps.into_iter().enumerate() {
            let next = origins.len().try_into().expect("few states");
            let known = *numbers.entry(digest(&state)).or_insert(next);
            if known == next {
                origins.push((number, place));
                befores.push(Vec::new());
                todo.push_back((next, state));
            }
            if !is_paid {
                befores[known as usize].push(number);
            }
        }
    }
    let mut leads = vec![false; origins.len()];
    while let Some(number) = ends.pop() {
        if !std::mem::replace(&mut leads[number as usize], true) {
            ends.append(&mut befores[number as usize]);
        }
    }
    let stuck = leads.iter().position(|leads| !leads);
    let history = stuck.map(|stuck| history(model, &origins, stuck.try_into().expect("few")));
    let history = history.unwrap_or_default();
    Found { states: origins.len(), violation: stuck.map(|_| FOR_EVER), history }
}

fn history(model: &Model<'_>, origins: &[(u32, usize)], mut number: u32) -> Vec<String> {
    let mut places = Vec::new();
    while number != 0 {
        let (before, place) = origins[number as usize];
        places.push(place);
        number = before;
    }
    let mut state = State::new(model.world.deliveries.len(), model.world.left);
    let mut history = Vec::new();
    for place in places.into_iter().rev() {
        let step = model.steps(&state).swap_remove(place);
        let name = |who: usize| {
            let kind = if model.is_loop(who) { "the loop of process" } else { "delivery" };
            let number = if model.is_loop(who) { model.process(who) } else { who };
            format!("{kind} {number} ")
        };
        history.push(format!("{}{}", step.who.map(name).unwrap_or_default(), step.what));
        state = step.state;
    }
    history
}
