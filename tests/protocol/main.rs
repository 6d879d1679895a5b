//! A model check of the lease protocol: every interleaving of two deliveries, two processes and one store,
//! within a bounded number of faults.
//!
//! The store executes one key of a call at a time, as Redis does; a SQL store, which executes all keys of a
//! call at once, has a part of these interleavings. Faults: a reply is lost, a call is not executed, executed
//! twice or executed late, a process dies, a lease lapses, a retention ends, and the store fails over to a
//! replica that lacks the last writes.
//!
//! The rules of the store and of the ledger are written here from their contract, not called: the model
//! shows that the rules suffice. `tests/model` shows that the stores follow them. Each rule is broken once
//! ([`Rule`]), and the check must find it.

mod delivery;
mod properties;
mod protocol;
mod store;

use std::time::Duration;

use protocol::{Faults, Protocol, Rule};
use stateright::{Checker, Model};

/// Checks every state. Prints how many there are.
fn check(name: &str, protocol: Protocol) {
    let start = std::time::Instant::now();
    let checker = protocol.checker().threads(2).timeout(Duration::from_secs(300)).spawn_bfs();
    let checker = checker.join();
    let states = checker.unique_state_count();
    println!("{name}: {states} states in {:.1} s", start.elapsed().as_secs_f64());
    assert!(checker.is_done(), "{name}: not every state was reached in time");
    checker.assert_properties();
}

/// Checks that a broken rule violates this property.
fn check_broken(rule: Rule, protocol: Protocol, property: &'static str) {
    let protocol = Protocol { broken: Some(rule), ..protocol };
    let checker = protocol.checker().threads(2).timeout(Duration::from_secs(300)).spawn_bfs();
    let found = checker.join().discovery(property);
    assert!(found.is_some(), "{rule:?} is broken, and `{property}` holds");
}

/// Two deliveries of one event with one identity.
fn one_key() -> Protocol {
    Protocol::of(&[&[0], &[0]])
}

/// Two events with an identity of their own, and with a second identity that they share.
fn shared_identity() -> Protocol {
    Protocol::of(&[&[0, 2], &[1, 2]])
}

#[test]
fn one_key_without_faults() {
    check("one key, no faults", one_key());
}

#[test]
fn one_key_with_lost_late_and_repeated_calls() {
    let faults = Faults { calls: 3, ..Faults::default() };
    check("one key, calls fail", Protocol { faults, ..one_key() });
}

#[test]
fn one_key_with_crashes_and_lapses() {
    let faults = Faults { calls: 1, crashes: 2, lapses: 2, ..Faults::default() };
    check("one key, crashes and lapses", Protocol { faults, ..one_key() });
}

#[test]
fn one_key_with_the_end_of_its_retention() {
    let faults = Faults { calls: 1, lapses: 1, expiries: 1, ..Faults::default() };
    check("one key, expiry", Protocol { faults, ..one_key() });
}

#[test]
fn one_key_with_failovers() {
    let faults = Faults { calls: 1, lapses: 1, failovers: 1, ..Faults::default() };
    check("one key, a failover", Protocol { faults, ..one_key() });
    let faults = Faults { crashes: 1, failovers: 2, ..Faults::default() };
    check("one key, a crash and two failovers", Protocol { faults, ..one_key() });
}

#[test]
fn shared_identity_with_each_fault() {
    for (name, faults) in [
        ("calls fail", Faults { calls: 1, ..Faults::default() }),
        ("a crash and a lapse", Faults { crashes: 1, lapses: 1, ..Faults::default() }),
        ("a failover", Faults { failovers: 1, ..Faults::default() }),
    ] {
        check(&format!("shared identity, {name}"), Protocol { faults, ..shared_identity() });
    }
}

#[test]
fn each_broken_rule_is_found() {
    let calls = Faults { calls: 2, ..Faults::default() };
    let lapses = Faults { lapses: 1, ..Faults::default() };
    for (rule, faults, property) in [
        (Rule::ClaimRespectsLeases, Faults::default(), properties::ONCE),
        (Rule::InFlightIsNoDuplicate, Faults::default(), properties::RAN),
        (Rule::CompleteIsADuplicate, Faults::default(), properties::KEPT),
        (Rule::ReleaseNeedsTheToken, calls, properties::ONCE),
        (Rule::CompletionCountsAfterTheLease, lapses, properties::KEPT),
        (Rule::SuccessIsCompleted, Faults::default(), properties::ONCE),
        (Rule::FailureIsReleased, Faults::default(), properties::RAN),
        (Rule::RenewalRespectsOthers, lapses, properties::HELD),
    ] {
        check_broken(rule, Protocol { faults, ..one_key() }, property);
    }
}
