//! Calls that are under way at the same time, as [`is_explained`] holds them to the model.
//!
//! 1. A schedule is made of waves. In a wave several callers each make their calls, one after the
//!    other, and nobody waits for anybody else; then time may pass.
//! 2. The contract is about each key on its own, so what was asked of each key is a history by
//!    itself. There has to be *some* order of its calls in which every answer is that of the
//!    contract, with no call before one that had ended when it began.
//! 3. All such orders are followed, for they leave different rows behind: the next wave begins with
//!    any of them.
//! 4. A database's adapter makes some calls in several statements, between which somebody else may
//!    change the key. What then is told otherwise stands in [`is_sent_again`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use proptest::prelude::*;

use super::backends::World;
use super::call::{Call, asked, purge};
use super::contract::{Answer, Row, contract};
use super::driver::{STEP, Told, ask};
use super::sequence::{Rows, clear};

/// Few, so that callers meet.
const KEYS: usize = 2;

#[derive(Clone)]
pub(crate) struct Wave {
    /// The calls of each.
    callers: Vec<Vec<Call>>,
    /// All in one task, which asks for the first call of each before anything is sent: they share a
    /// batch. Else each in its own.
    together: bool,
    steps: u32,
}

impl fmt::Debug for Wave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.together { "in one task" } else { "each in a task" };
        write!(f, "{how}, then {} steps pass:", self.steps)?;
        self.callers.iter().try_for_each(|calls| write!(f, "\n    {calls:?}"))
    }
}

pub(crate) fn waves() -> impl Strategy<Value = Vec<Wave>> {
    let call = || prop_oneof![25 => asked(KEYS), 1 => purge()];
    let caller = prop::collection::vec(call(), 1..3);
    let steps = prop_oneof![1 => Just(0), 2 => 1_u32..4];
    let wave = (prop::collection::vec(caller, 1..7), any::<bool>(), steps)
        .prop_map(|(callers, together, steps)| Wave { callers, together, steps });
    prop::collection::vec(wave, 1..5)
}

/// What a caller was told of one key.
struct Event {
    key: usize,
    caller: usize,
    call: Call,
    answer: Answer,
    /// By a clock of the wave.
    began: usize,
    ended: usize,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { caller, call, answer, began, ended, .. } = self;
        write!(f, "\n  {began:2} to {ended:2}, caller {caller}: {call:?}: {answer:?}")
    }
}

/// Whether an empty store explains what all callers are told. They are spread over its adapters.
pub(crate) async fn is_explained<W: World>(world: &mut W, schedule: &[Wave]) -> Result<(), String> {
    world.empty().await;
    let mut now = 0;
    let mut past = vec![String::new(); KEYS];
    let mut keys = vec![Rows::from([None]); KEYS];
    for (number, wave) in schedule.iter().enumerate() {
        let events = run(world, wave).await?;
        for (key, rows) in keys.iter_mut().enumerate() {
            let events: Vec<_> = events.iter().filter(|event| event.key == key).collect();
            past[key] += &format!("\nwave {number}, at step {now}: {events:?}");
            *rows = explain(rows, &events, now, W::IN_SEVERAL_STATEMENTS).ok_or_else(|| {
                format!("key {key}: no order explains the last wave, after {rows:?}{}", past[key])
            })?;
        }
        world.advance(STEP * wave.steps).await;
        now += wave.steps;
    }
    Ok(())
}

async fn run<W: World>(world: &W, wave: &Wave) -> Result<Vec<Event>, String> {
    let (adapters, clock) = (world.adapters(), Arc::new(AtomicUsize::new(0)));
    let callers = wave.callers.iter().cloned().enumerate().map(|(caller, calls)| {
        let adapter = Arc::clone(&adapters[caller % adapters.len()]);
        let clock = Arc::clone(&clock);
        async move {
            let tick = || clock.fetch_add(1, Ordering::SeqCst);
            let mut events = Vec::new();
            for call in calls {
                let began = tick();
                let told = ask(&adapter, &call).await;
                let ended = tick();
                // What was purged shows in what others are told.
                if let Told::Keys(answers) = told.map_err(|fault| format!("{call:?}: {fault}"))? {
                    events.extend(answers.into_iter().map(|(key, answer)| Event {
                        key,
                        caller,
                        call: call.clone(),
                        answer,
                        began,
                        ended,
                    }));
                }
            }
            Ok(events)
        }
    });
    let told: Vec<Result<Vec<Event>, String>> = if wave.together {
        join_all(callers).await
    } else {
        let tasks: Vec<_> = callers.map(tokio::spawn).collect();
        join_all(tasks).await.into_iter().map(Result::unwrap).collect()
    };
    let told: Vec<Vec<Event>> = told.into_iter().collect::<Result<_, _>>()?;
    Ok(told.into_iter().flatten().collect())
}

/// What may be stored in the end. Loosely: see [`is_sent_again`].
fn explain(stored: &Rows, events: &[&Event], now: u32, loosely: bool) -> Option<Rows> {
    let before: Vec<u32> =
        events.iter().map(|event| mask(events, |other| other.ended < event.began)).collect();
    // By which of the events have been, as bits.
    let mut reached = BTreeMap::from([(0_u32, stored.clone())]);
    for _ in events {
        let mut next: BTreeMap<u32, Rows> = BTreeMap::new();
        for (been, mut rows) in reached {
            clear(&mut rows, now);
            let may_begin = |place: usize| been >> place & 1 == 0 && before[place] & !been == 0;
            for (place, event) in events.iter().enumerate() {
                if loosely && may_begin(place) {
                    let granted = rows.iter().filter_map(|row| is_sent_again(event, row, now));
                    rows.extend(granted.collect::<Vec<_>>());
                }
            }
            for (place, event) in events.iter().enumerate() {
                if !may_begin(place) {
                    continue;
                }
                for row in &rows {
                    let (answer, left) = contract(&event.call, row.clone(), now);
                    if answer == event.answer || (loosely && is_read_apart(&answer, event)) {
                        next.entry(been | 1 << place).or_default().insert(left);
                    }
                }
            }
        }
        reached = next;
    }
    reached.into_values().next()
}

fn mask(events: &[&Event], such: impl Fn(&Event) -> bool) -> u32 {
    events.iter().enumerate().map(|(place, event)| u32::from(such(event)) << place).sum()
}

/// Stored data is read by a statement of its own: a key that was complete in one statement, and not in
/// the other, is in flight.
fn is_read_apart(answer: &Answer, event: &Event) -> bool {
    matches!((answer, &event.answer), (Answer::Duplicate(_, Some(_)), Answer::InFlight))
}

/// A claim of several keys may be sent again because of one of them: what the first
/// sending has left behind, if it was granted this one.
fn is_sent_again(event: &Event, row: &Option<Row>, now: u32) -> Option<Option<Row>> {
    let (Call::Claim(keys, _) | Call::ClaimAtOnce(keys, _)) = &event.call else { return None };
    let (answer, left) = contract(&event.call, row.clone(), now);
    let granted = matches!(answer, Answer::Granted(..));
    (keys.len() > 1 && granted).then_some(left)
}
