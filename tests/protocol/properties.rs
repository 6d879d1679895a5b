//! What must hold in every state, and what must be reachable.
//!
//! What the guide admits must be reachable: this shows that the model reaches the faults.

use stateright::Property;

use super::delivery::{Delivery, Phase};
use super::protocol::{Faults, Ledger, Protocol, State};
use super::store::{Action, Call, Reply, Row};

pub(crate) const RAN: &str = "an event that was acknowledged has run";
pub(crate) const ONCE: &str =
    "without a crash, a lapse, an expiry or a failover, an event runs once";
pub(crate) const AT_MOST_ONCE: &str = "without an expiry or a failover, an event runs at most once";
pub(crate) const KEPT: &str = "a completed key is not claimed before its retention has ended";
pub(crate) const HELD: &str = "a live lease does not go to another token";
pub(crate) const STORED: &str =
    "an identity of an acknowledged event is complete in the store, or its completion is pending";
pub(crate) const RUNS: &str = "an event that was acknowledged has run, or its claim will run it";
pub(crate) const PENDING: &str = "no event runs in a process that has to complete it";

/// Returns the properties; those of reachability only where the model allows them.
pub(crate) fn of(protocol: &Protocol) -> Vec<Property<Protocol>> {
    let mut properties = vec![
        Property::always(KEPT, |_, state: &State| !state.store.forgot),
        Property::sometimes("a duplicate is acknowledged", |_, state| {
            any(state, |phase| *phase == Phase::Acknowledged { duplicate: true })
        }),
        Property::sometimes("all deliveries are acknowledged", |_, state| {
            !any(state, |phase| !matches!(phase, Phase::Acknowledged { .. }))
        }),
    ];
    match protocol.ledger {
        Ledger::Lease => lease(protocol, &mut properties),
        Ledger::OnArrival => on_arrival(protocol, &mut properties),
    }
    properties
}

fn lease(protocol: &Protocol, properties: &mut Vec<Property<Protocol>>) {
    let Faults { calls, crashes, lapses, expiries, failovers, outages } = protocol.faults;
    properties.extend([
        Property::always(RAN, has_run),
        Property::always(ONCE, runs_once),
        Property::always(HELD, |_, state: &State| !state.store.stole),
        Property::always(PENDING, |_, state| {
            let runs =
                |phase: &Phase| matches!(phase, Phase::Running { view, .. } if view.pending > 0);
            !any(state, runs)
        }),
        Property::always(STORED, is_stored),
        Property::sometimes("an event is in flight", |_, state| {
            any(state, |phase| *phase == Phase::Idle { in_flight: true })
        }),
    ]);
    if calls > 0 {
        properties.push(Property::sometimes("a completion is pending", |_, state: &State| {
            state.jobs.iter().any(|job| job.call.action == Action::Complete)
        }));
    }
    // guide.md, "What is not guaranteed", 2: a process dies, or hangs for longer than its lease.
    // An event with two identities is a takeover after two lapses.
    if lapses > 0 && protocol.deliveries[0].len() == 1 {
        properties.extend([
            Property::sometimes("a second run is a takeover", |_, state| runs_again(state, true)),
            // `Delivery::is_takeover` tells of the last claim only.
            Property::sometimes("a run after a takeover that failed is no takeover", {
                |_, state| runs_again(state, false)
            }),
            Property::sometimes("a completion finds the lease of another token", lost_lease),
        ]);
    }
    // The same: it loses its store for longer than a completion is repeated.
    if outages > 0 && lapses > 0 && crashes == 0 {
        properties.push(Property::sometimes(
            "the process whose handler succeeded runs it again",
            {
                |_, state| {
                    any(state, |phase| *phase == Phase::Acknowledged { duplicate: false })
                        && any(state, Phase::is_running)
                }
            },
        ));
    }
    // The same, and redis.md, "Losses": the store has lost the key.
    if failovers + expiries > 0 {
        properties.push(Property::sometimes("a second run is no takeover", |_, state| {
            runs_again(state, false)
        }));
    }
    // A crash alone leaves a lease that nobody takes over.
    if lapses + expiries + failovers > 0 {
        properties.push(Property::sometimes("an event runs twice", |_, state| runs(state) > 1));
    }
}

fn on_arrival(protocol: &Protocol, properties: &mut Vec<Property<Protocol>>) {
    let Faults { calls, crashes, expiries, failovers, outages, .. } = protocol.faults;
    properties.extend([
        Property::always(AT_MOST_ONCE, runs_at_most_once),
        // guarantees.md, A4.
        Property::sometimes("a duplicate is acknowledged while the handler runs", |_, state| {
            any(state, Phase::is_running)
                && any(state, |phase| *phase == Phase::Acknowledged { duplicate: true })
        }),
        // guarantees.md, A2 and A3.
        Property::sometimes("an event whose handler failed is acknowledged", |_, state| {
            runs(state) > 0 && only_duplicates(state)
        }),
    ]);
    let may_lose_claim =
        calls > 0 && (protocol.processes > 1 || protocol.slow) || crashes + outages > 0;
    if may_lose_claim {
        // guide.md, "What is not guaranteed", 3; frameworks.md; incidents.md, "gave up in the background".
        properties
            .push(Property::sometimes("an event that never ran is acknowledged", |_, state| {
                runs(state) == 0 && only_duplicates(state)
            }));
    } else {
        properties.push(Property::always(RUNS, will_run));
    }
    // redis.md, "What is promised".
    if failovers + expiries > 0 {
        properties.push(Property::sometimes("an event runs twice", |_, state| runs(state) > 1));
    }
    if calls > 0 {
        properties.push(Property::sometimes("an event is in flight", |_, state| {
            any(state, |phase| *phase == Phase::Idle { in_flight: true })
        }));
    }
}

fn any(state: &State, is: impl Fn(&Phase) -> bool) -> bool {
    state.deliveries.iter().any(|delivery| is(&delivery.phase))
}

fn runs(state: &State) -> u8 {
    state.deliveries.iter().map(|delivery| delivery.runs).sum()
}

/// Returns `true` if there are acknowledged deliveries, and all of them are duplicates.
fn only_duplicates(state: &State) -> bool {
    any(state, |phase| *phase == Phase::Acknowledged { duplicate: true })
        && !any(state, |phase| {
            phase.is_running() || *phase == Phase::Acknowledged { duplicate: false }
        })
}

fn runs_again(state: &State, as_takeover: bool) -> bool {
    let runs_now = |phase: &Phase| matches!(phase, Phase::Running { takeover, .. } if *takeover == as_takeover);
    runs(state) > 0 && any(state, runs_now)
}

fn lost_lease(protocol: &Protocol, state: &State) -> bool {
    state.deliveries.iter().zip(&protocol.deliveries).any(|(delivery, keys)| {
        let Phase::Calling { token, action: Action::Complete, .. } = &delivery.phase else {
            return false;
        };
        matches!(state.store.row(keys[0]), Row::Leased(holder) if holder != *token)
    })
}

/// Returns `true` if each acknowledged event has one of these deliveries, which share an identity with it.
fn each_event_has(protocol: &Protocol, state: &State, has: impl Fn(&Delivery) -> bool) -> bool {
    let mut all = state.deliveries.iter().enumerate();
    all.all(|(index, delivery)| {
        let mut others = state.deliveries.iter().enumerate();
        !matches!(delivery.phase, Phase::Acknowledged { .. })
            || others.any(|(other, it)| protocol.share_an_identity(index, other) && has(it))
    })
}

fn has_run(protocol: &Protocol, state: &State) -> bool {
    each_event_has(protocol, state, |delivery| delivery.runs > 0)
}

/// On arrival a key is complete before its handler runs.
fn will_run(protocol: &Protocol, state: &State) -> bool {
    each_event_has(protocol, state, |delivery| {
        let has_claimed = |replies: &[Reply]| replies.contains(&Reply::First { takeover: false });
        delivery.runs > 0
            || matches!(&delivery.phase, Phase::Calling { replies, .. } if has_claimed(replies))
    })
}

fn runs_once(protocol: &Protocol, state: &State) -> bool {
    let (all, left) = (protocol.faults, state.left);
    let is_faulty = (all.crashes, all.lapses, all.expiries, all.failovers)
        != (left.crashes, left.lapses, left.expiries, left.failovers);
    is_faulty || has_one_run(protocol, state)
}

/// Returns `true` if no event has two runs. On arrival, the runs include the one that goes on.
fn has_one_run(protocol: &Protocol, state: &State) -> bool {
    let is_lease = protocol.ledger == Ledger::Lease;
    let runs =
        |delivery: &Delivery| delivery.runs + u8::from(is_lease && delivery.phase.is_running());
    let all = &state.deliveries;
    (0..all.len()).all(|a| {
        let others = (0..all.len()).filter(|b| a != *b && protocol.share_an_identity(a, *b));
        runs(&all[a]) == 0 || runs(&all[a]) == 1 && others.map(|b| runs(&all[b])).sum::<u8>() == 0
    })
}

/// Also with crashes, handlers that fail, and calls of any fate.
fn runs_at_most_once(protocol: &Protocol, state: &State) -> bool {
    let (all, left) = (protocol.faults, state.left);
    (all.expiries, all.failovers) != (left.expiries, left.failovers) || has_one_run(protocol, state)
}

/// Returns `true` if an identity of each acknowledged event is complete, or its completion is pending. A process
/// that dies, a completion that is given up, and a store that forgets make this untrue.
fn is_stored(protocol: &Protocol, state: &State) -> bool {
    let (all, left) = (protocol.faults, state.left);
    let may_be_lost = (all.crashes, all.expiries, all.failovers, all.outages)
        != (left.crashes, left.expiries, left.failovers, left.outages);
    let is_known = |key| {
        let completes = |call: &Call| (call.action, call.key) == (Action::Complete, key);
        matches!(state.store.row(key), Row::Complete(_))
            || state.jobs.iter().any(|job| completes(&job.call))
    };
    may_be_lost
        || state.deliveries.iter().zip(&protocol.deliveries).all(|(delivery, keys)| {
            !matches!(delivery.phase, Phase::Acknowledged { .. })
                || keys.iter().copied().any(is_known)
        })
}
