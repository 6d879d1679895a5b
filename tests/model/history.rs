//! Calls that follow each other or run at the same time, as [`is_explained`] compares them with the model.
//!
//! 1. A schedule consists of waves. In a wave, several callers each make their calls one after the
//!    other, without waiting for other callers. Then time may pass. Calls that follow each other are waves of one
//!    caller.
//! 2. The contract is about each key on its own, so the calls of each key are a history of their
//!    own. For each history there must be *some* order in which every reply is that of the
//!    contract. In that order, no call comes before one that had ended when it began.
//! 3. The check follows all such orders, because they leave different rows behind. The next wave
//!    begins with any of these rows. A store may delete an expired key at any time, and some calls can see it.
//! 4. A database's adapter makes some calls in several statements, and another caller may change
//!    the key between them. [`is_sent_again`] says which replies that allows. It passes over rows that another call
//!    holds: see [`is_passed_over`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use proptest::prelude::*;

use tower_dedup::adapter::contract::RenewReply;
use tower_dedup::adapter::maintenance::ForgetReply;

use super::backends::Backend;
use super::call::{Call, KEYS, call};
use super::contract::{Reply, Row, outcome};
use super::driver::{STEP, execute};

/// Few keys, so that callers meet.
const FEW: usize = 2;

/// All rows of a key that may be stored.
type Rows = BTreeSet<Option<Row>>;

/// An expired row may have been deleted.
fn clear(rows: &mut Rows, now: u32) {
    if rows.iter().flatten().any(|row| row.is_expired(now)) {
        rows.insert(None);
    }
}

#[derive(Clone)]
pub(crate) struct Wave {
    /// The calls of each caller.
    callers: Vec<Vec<Call>>,
    /// If true, one task makes the first call of each caller before anything is sent, so that the
    /// calls share a batch. Otherwise each caller has its own task.
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

/// Calls that follow each other.
pub(crate) fn sequence() -> impl Strategy<Value = Vec<Wave>> {
    let wave = (call(KEYS, 2), 0..7, 1_u32..4).prop_map(|(call, choice, steps)| Wave {
        callers: vec![vec![call]],
        together: true,
        steps: if choice == 6 { steps } else { 0 },
    });
    prop::collection::vec(wave, 1..60)
}

pub(crate) fn waves() -> impl Strategy<Value = Vec<Wave>> {
    let caller = prop::collection::vec(call(FEW, 1), 1..3);
    let steps = (0..3, 1_u32..4).prop_map(|(choice, steps)| if choice > 0 { steps } else { 0 });
    let wave = (prop::collection::vec(caller, 1..7), any::<bool>(), steps)
        .prop_map(|(callers, together, steps)| Wave { callers, together, steps });
    prop::collection::vec(wave, 1..5)
}

/// The reply to a caller for one key.
struct Event {
    key: usize,
    caller: usize,
    call: Call,
    reply: Reply,
    /// The time by a clock of the wave.
    began: usize,
    ended: usize,
    /// Whether another caller purges in the same wave.
    beside_purge: bool,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { caller, call, reply, began, ended, .. } = self;
        write!(f, "\n  {began:2} to {ended:2}, caller {caller}: {call:?}: {reply:?}")
    }
}

/// Checks that the replies to all callers are explained, from an empty store on. The callers are
/// spread over the store's adapters.
pub(crate) async fn is_explained<W: Backend>(
    backend: &mut W,
    schedule: &[Wave],
) -> Result<(), String> {
    backend.empty().await;
    let mut now = 0;
    let mut past = vec![String::new(); KEYS];
    let mut keys = vec![Rows::from([None]); KEYS];
    for (number, wave) in schedule.iter().enumerate() {
        let events = run(backend, number, wave).await?;
        let loosely = W::IN_SEVERAL_STATEMENTS && wave.callers.len() > 1;
        for (key, rows) in keys.iter_mut().enumerate() {
            let events: Vec<_> = events.iter().filter(|event| event.key == key).collect();
            if events.is_empty() {
                continue;
            }
            past[key] += &format!("\nwave {number}, at step {now}: {events:?}");
            *rows = explain(rows, &events, now, loosely).ok_or_else(|| {
                format!("key {key}: no order explains the last wave, after {rows:?}{}", past[key])
            })?;
        }
        if wave.steps > 0 {
            backend.advance(STEP * wave.steps).await;
            now += wave.steps;
        }
    }
    Ok(())
}

async fn run<W: Backend>(backend: &W, number: usize, wave: &Wave) -> Result<Vec<Event>, String> {
    let (adapters, clock) = (backend.adapters(), Arc::new(AtomicUsize::new(0)));
    let callers = wave.callers.iter().cloned().enumerate().map(|(caller, calls)| {
        let adapter = Arc::clone(&adapters[(number + caller) % adapters.len()]);
        let clock = Arc::clone(&clock);
        let others = wave.callers.iter().enumerate().filter(|(other, _)| *other != caller);
        let beside_purge =
            others.flat_map(|(_, calls)| calls).any(|call| matches!(call, Call::Purge(_)));
        async move {
            let tick = || clock.fetch_add(1, Ordering::SeqCst);
            let mut events = Vec::new();
            for call in calls {
                let began = tick();
                let replied = execute(&adapter, &call).await;
                let ended = tick();
                // The effect of a purge shows in the replies to other calls.
                let replies = replied.map_err(|fault| format!("{call:?}: {fault}"))?;
                events.extend(replies.into_iter().map(|(key, reply)| Event {
                    key,
                    caller,
                    call: call.clone(),
                    reply,
                    began,
                    ended,
                    beside_purge,
                }));
            }
            Ok(events)
        }
    });
    let replied: Vec<Result<Vec<Event>, String>> = if wave.together {
        join_all(callers).await
    } else {
        let tasks: Vec<_> = callers.map(tokio::spawn).collect();
        join_all(tasks).await.into_iter().map(Result::unwrap).collect()
    };
    let replied: Vec<Vec<Event>> = replied.into_iter().collect::<Result<_, _>>()?;
    Ok(replied.into_iter().flatten().collect())
}

/// Returns the rows that may be stored in the end. For `loosely`, see [`is_sent_again`].
fn explain(stored: &Rows, events: &[&Event], now: u32, loosely: bool) -> Option<Rows> {
    let before: Vec<u32> =
        events.iter().map(|event| mask(events, |other| other.ended < event.began)).collect();
    // The rows that each set of past events (as bits) can leave.
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
                if loosely && is_passed_over(event, events, &rows) {
                    next.entry(been | 1 << place).or_default().extend(rows.clone());
                }
                for row in &rows {
                    let (reply, left) = outcome(&event.call, row.clone(), now);
                    if reply == event.reply || (loosely && is_read_apart(&reply, event)) {
                        next.entry(been | 1 << place).or_default().extend(left);
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

/// Stored data is read by a second statement. A key that is complete in only one of the two
/// statements is in flight.
fn is_read_apart(reply: &Reply, event: &Event) -> bool {
    matches!((reply, &event.reply), (Reply::Duplicate(_, Some(_)), Reply::InFlight))
}

/// A row that another call holds at the same time is passed over: the call changes nothing, and says so. A purge holds
/// only rows that may be away.
fn is_passed_over(event: &Event, events: &[&Event], rows: &Rows) -> bool {
    let says_so = matches!(
        event.reply,
        Reply::InFlight
            | Reply::Renewed(RenewReply::Locked)
            | Reply::Forgotten(ForgetReply::InFlight)
    );
    let is_held_by = |other: &&Event| {
        let is_write = !matches!(other.call, Call::Get(_));
        is_write
            && other.caller != event.caller
            && other.began < event.ended
            && event.began < other.ended
    };
    let is_purged = event.beside_purge && rows.contains(&None);
    says_so && (is_purged || events.iter().any(is_held_by))
}

/// A claim of several keys may be sent again because of one of them. Returns the row after the
/// first sending, if that granted this key.
fn is_sent_again(event: &Event, row: &Option<Row>, now: u32) -> Option<Option<Row>> {
    let Call::Claim(keys, _) = &event.call else { return None };
    let (reply, mut left) = outcome(&event.call, row.clone(), now);
    let granted = matches!(reply, Reply::Granted(..));
    if keys.len() > 1 && granted { left.pop() } else { None }
}
