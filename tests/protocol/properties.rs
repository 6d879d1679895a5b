//! What must hold in every state, and what must be reachable.

use stateright::Property;

use super::delivery::Phase;
use super::protocol::{Faults, Protocol, State};
use super::store::Call;

pub(crate) const RAN: &str = "an event that was acknowledged has run";
pub(crate) const ONCE: &str =
    "without a crash, a lapse, an expiry or a failover, an event runs once";
pub(crate) const KEPT: &str = "a completed key is not claimed before its retention has ended";
pub(crate) const HELD: &str = "a live lease does not go to another token";

/// Returns the properties; those of reachability only where the faults of the model allow them.
pub(crate) fn of(protocol: &Protocol) -> Vec<Property<Protocol>> {
    let mut properties = vec![
        Property::always(RAN, has_run),
        Property::always(ONCE, runs_once),
        Property::always(KEPT, |_, state: &State| !state.store.forgot),
        Property::always(HELD, |_, state: &State| !state.store.stole),
        Property::sometimes("a duplicate is acknowledged", |_, state| {
            any(state, |phase| *phase == Phase::Acknowledged { duplicate: true })
        }),
        Property::sometimes("an event is in flight", |_, state| {
            any(state, |phase| *phase == Phase::Idle { in_flight: true })
        }),
        Property::sometimes("both deliveries are acknowledged", |_, state| {
            !any(state, |phase| !matches!(phase, Phase::Acknowledged { .. }))
        }),
    ];
    let Faults { calls, crashes, lapses, expiries, failovers } = protocol.faults;
    if lapses > 0 {
        properties.push(Property::sometimes("a lapsed lease is taken over", |_, state| {
            any(state, |phase| matches!(phase, Phase::Running { takeover: true, .. }))
        }));
    }
    if calls > 0 {
        properties.push(Property::sometimes("a completion is pending", |_, state: &State| {
            state.jobs.iter().any(|job| job.call == Call::Complete)
        }));
    }
    // What the guide admits: with these faults an event may run twice.
    if lapses + crashes + expiries + failovers > 0 {
        properties.push(Property::sometimes("an event runs twice", |_, state: &State| {
            state.deliveries.iter().map(|delivery| delivery.successes).sum::<u8>() > 1
        }));
    }
    properties
}

fn any(state: &State, is: impl Fn(&Phase) -> bool) -> bool {
    state.deliveries.iter().any(|delivery| is(&delivery.phase))
}

/// Two deliveries with a common identity report one event.
fn has_run(protocol: &Protocol, state: &State) -> bool {
    let shares = |a: usize, b: usize| {
        protocol.deliveries[a].iter().any(|key| protocol.deliveries[b].contains(key))
    };
    state.deliveries.iter().enumerate().all(|(index, delivery)| {
        !matches!(delivery.phase, Phase::Acknowledged { .. })
            || (0..state.deliveries.len())
                .any(|other| shares(index, other) && state.deliveries[other].successes > 0)
    })
}

fn runs_once(protocol: &Protocol, state: &State) -> bool {
    let (all, left) = (protocol.faults, state.left);
    let is_faulty = (all.crashes, all.lapses, all.expiries, all.failovers)
        != (left.crashes, left.lapses, left.expiries, left.failovers);
    let running = state
        .deliveries
        .iter()
        .filter(|delivery| matches!(delivery.phase, Phase::Running { .. }))
        .count();
    let successes: u8 = state.deliveries.iter().map(|delivery| delivery.successes).sum();
    is_faulty || (successes <= 1 && running <= 1)
}
