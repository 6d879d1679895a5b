//! A model check of the protocols of the ledgers, in three parts that share one table of what a call does to a row
//! ([`store::decide`]).
//!
//! - [`Fence`]: one key in one store, with every message of two or three callers. A message arrives at any time
//!   within an hour, or never. A batch whose connection broke sends its messages twice. Leases lapse and are
//!   renewed, rows expire, and an operator forgets and purges them. Transactions of handlers hold the row. A process
//!   that dies is a caller that sends nothing more.
//! - [`Protocol`]: every interleaving of two or three deliveries, two processes and one store. Faults: a reply is
//!   lost, a call is not executed, executed twice or executed late, a process dies, a lease lapses, a retention
//!   ends, the store fails over to a replica that lacks the last writes, and an outage is so long that a background
//!   write is given up. A late call arrives at any time until a release of its token has returned.
//! - [`Completion`]: every interleaving of two or three deliveries of one event under the lease ledger, whose handler
//!   commits its effect and the key in a transaction of its own. Faults: a COMMIT or its reply is lost, a statement
//!   aborts the transaction, a handler is dropped, a process dies, a lease lapses, a retention ends, an operator
//!   forgets the key, and the server crashes and loses the leases.
//!
//! The second and the third part execute a call at one instant. This is sound because the first part shows it of the
//! messages:
//!
//! - a claim has its effect in its insert or in its take, and there the table allows it (`TABLE`);
//! - a claim that was answered has no further effect, and holds nothing unless it was first (`ANSWERED`);
//! - a claim or a renewal has no effect after a release of its token has returned (`FENCE`). The second part drops
//!   late calls only for this reason; without it, its broken rule `ReleaseIsAFence` loses an event. The third part has
//!   no late calls.
//!
//! A message names one key and changes one row. So what holds for one key holds for each key of a delivery, in every
//! order of the messages of different keys.
//!
//! The rules of the store and of the ledgers are written here from their contract, not called: the model
//! shows that the rules suffice. `tests/model` shows that the stores follow them. Each rule of the table is
//! broken once ([`Rule`]), and the check must find it by the named property. The same protocol with all
//! rules, or one with more faults, is checked as well.
//!
//! The rule of the row is in `fence.rs`:
//!
//! | rule of the row | broken: found by |
//! |---|---|
//! | a release inserts a released row where there is none | `FENCE` |
//! | a release raises the version of another's row | `FENCE` |
//! | a take is sent only for a caller that still waits | `FENCE` |
//! | a take names the version that was read | `TABLE` |
//! | a release keeps `expires_at` at now or later | `FENCE` |
//! | `forget` leaves a released row | `FENCE` |
//! | a new row starts at the store's clock | `TABLE` |
//! | a release spares a completion under a lease | `SPARED` |
//! | after the last read, the outcome is unknown, not *in flight* | `ANSWERED` |
//! | a release waits for a transaction that holds the row | `FENCE` |
//! | a claim that finds its own lease is first, although the row is held | `ANSWERED` |
//! | a take that passes over a held row after a lost reply is of unknown outcome, not *in flight* | `ANSWERED` |
//!
//! The rule of a completion in the handler's transaction is in `completion.rs`:
//!
//! | rule of a completion | broken: found by |
//! |---|---|
//! | a completion refuses a complete row: the first COMMIT wins | `EFFECT` |
//! | a refused completion aborts its transaction, and completes no other row of the delivery | `EFFECT` |
//! | a completion gives a row that has expired its retention anew | `EFFECT` |
//! | a release spares a completion, also if the reply to the COMMIT was lost | `EFFECT`, `SETTLED` |
//! | a completion outside of the handler's transaction is refused | `TOLD` |
//! | only a COMMIT sets the flag "committed", not the end of a savepoint | `TOLD` |
//! | a COMMIT after an early completion first reads that the completion stands | `TOLD` |
//! | a success without the flag is none, unless all rows are complete by its token | `TOLD` |
//! | a second identity that is complete for the key of the delivery is no duplicate | `FORGOTTEN` |
//!
//! Two choices are safe either way, and no property needs them: a completion needs its row, and it looks at no lease.
//!
//! | rule of the lease ledger | code | broken: found by |
//! |---|---|---|
//! | a claim respects the live lease of another token | `claim.lua`, `row.rs` | `ONCE` |
//! | a claim of a complete key is a duplicate | `claim.lua`, `row.rs` | `KEPT` |
//! | in flight is no duplicate | `Resolution::all_complete` | `RAN` |
//! | a success is completed, a failure is released | `Claim::settle` | `ONCE`, `RAN` |
//! | a release needs the token | `release.lua`, `release.sql` | `ONCE` |
//! | a late release does not undo a completion, which keeps the holder's token | the same | `KEPT` |
//! | a completion counts after its lease | `complete.lua`, `complete.sql` | `KEPT` |
//! | a renewal respects the lease of another token | `renew.lua`, `renew.sql` | `HELD` |
//! | a late renewal does not undo a completion | the same | `KEPT` |
//! | a completion of unknown outcome is repeated | the drop of `Claim`, `RetryJob` | `STORED` |
//! | a key whose completion is pending is complete in its process | `Pending::split` in `Claims::claim` | `PENDING` |
//! | a duplicate releases the identities that it has claimed | `Claims::resolve` | `RAN` |
//!
//! The lease ledger also releases a claim of unknown outcome. This frees the key sooner. No property needs it, so
//! the table has no row for it.
//!
//! | rule of the on-arrival ledger | code | broken: found by |
//! |---|---|---|
//! | a claim is complete at once | `claim.lua`, `claim_complete_*.sql` | `AT_MOST_ONCE` |
//! | a claim of a complete key is a duplicate | the same | `AT_MOST_ONCE` |
//! | a claim that is repeated with its own token is first again | the same | `RUNS` |
//! | a release needs the token | `release.lua`, `release.sql` | `AT_MOST_ONCE` |
//! | a claim of unknown outcome is released | the drop of `Claims` | `RUNS` |
//! | a release is a fence | the rule of the row | `RUNS` |
//! | the release waits for a replica | `wait_replicas` in `redis/slot.rs`, `release.sql` | `RUNS` |
//! | a key in release is in flight in its process | `Doubt::apply` | `RUNS` |
//! | so is a key whose release ended during the claim | `Pending::removals` | `RUNS` |
//!
//! What differs from the code:
//!
//! - A release in the background is one job for each key, and ends for each key by itself. The code
//!   ends it for all keys at once: a key is in release for longer.
//! - A lease lapses for each key by itself.
//! - A second identity that is complete for the very key of an event says nothing in the code, and the key decides as
//!   if it were the only identity. The second part has no operator who forgets the key: such an event is a duplicate.
//! - In the third part, a sender sends again once the transaction of its last attempt has ended. Its other deliveries
//!   do not wait for it. No retention ends between a completion and its COMMIT.
//! - The code releases what it has claimed before it answers. The model releases it at any time later.
//! - A completion that is refused on SQLite undoes its statement only: there, the handler must return the error.
//! - Not in the model: deliveries of several events, runs without protection, stored data, a failover
//!   together with the messages of the fence or with a handler's transaction, handlers with nothing to write, and a
//!   message that is under way for longer than an hour.

mod completion;
mod delivery;
mod fence;
mod ledger;
mod properties;
mod protocol;
mod store;

use std::fmt::Debug;
use std::hash::Hash;
use std::time::{Duration, Instant};

use completion::Completion;
use fence::{Fence, Left};
use protocol::{Faults, Ledger, Protocol, Rule};
use stateright::{Checker, HasDiscoveries, Model, Path};
use store::{Key, NOBODY, Row};

const NO_FAULTS: Faults =
    Faults { calls: 0, crashes: 0, lapses: 0, expiries: 0, failovers: 0, outages: 0 };

/// Checks every state. Prints how many there are.
fn check<M>(name: &str, model: M)
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync> + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let start = Instant::now();
    let checker = model.checker().threads(2).timeout(Duration::from_secs(300)).spawn_bfs();
    let checker = checker.join();
    let states = checker.unique_state_count();
    println!("{name}: {states} states in {:.1} s", start.elapsed().as_secs_f64());
    assert!(checker.is_done(), "{name}: not every state was reached in time");
    checker.assert_properties();
}

/// Checks that a model with a broken rule violates this property.
fn check_broken<M>(rule: Rule, model: M, property: &'static str)
where
    M: Model<State: Clone + Debug + Hash + PartialEq + Send + Sync> + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let until = HasDiscoveries::AnyOf([property].into());
    // One thread finds the same history in each run.
    let checker = model.checker().timeout(Duration::from_secs(300));
    let checker = checker.finish_when(until).spawn_bfs().join();
    let states = checker.unique_state_count();
    let history = checker.discovery(property).map(Path::into_actions);
    let history = history.unwrap_or_else(|| panic!("{rule:?} is broken, and `{property}` holds"));
    println!("{rule:?} is broken: {} steps, {states} states", history.len());
}

/// Two deliveries of one event with one identity.
fn one_key(faults: Faults) -> Protocol {
    Protocol { faults, ..Protocol::of(Ledger::Lease, &[&[0], &[0]]) }
}

/// Two events with an identity of their own, and with a second identity that they share.
fn shared_identity(faults: Faults) -> Protocol {
    Protocol { faults, ..Protocol::of(Ledger::Lease, &[&[2, 0], &[2, 1]]) }
}

/// Two deliveries of one event with two identities.
fn two_identities(faults: Faults) -> Protocol {
    Protocol { faults, ..Protocol::of(Ledger::Lease, &[&[1, 0], &[1, 0]]) }
}

/// An event without a second identity, the same with one, and another event with this one.
fn second_identity_once() -> Protocol {
    Protocol { attempts: 1, ..Protocol::of(Ledger::Lease, &[&[0], &[2, 0], &[2, 1]]) }
}

/// A body that was handled, sent again under the key of another event, and this event.
fn replayed_body(faults: Faults) -> Protocol {
    Protocol { attempts: 1, faults, ..Protocol::of(Ledger::Lease, &[&[2, 0], &[2, 1], &[1]]) }
}

fn one_attempt(protocol: Protocol) -> Protocol {
    Protocol { attempts: 1, ..protocol }
}

fn on_arrival(protocol: Protocol) -> Protocol {
    Protocol { ledger: Ledger::OnArrival, ..protocol }
}

fn in_one_process(protocol: Protocol) -> Protocol {
    Protocol { processes: 1, ..protocol }
}

const EACH: Left = Left { reads: 2, repeats: 0, releases: 1, completions: 1, renewals: 0 };

/// Two callers of one key in one store.
fn fence(ledger: Ledger, each: Left) -> Fence {
    Fence {
        ledger,
        callers: 2,
        retention: 9,
        ticks: 0,
        lapses: 0,
        forgets: 0,
        holds: 0,
        earlier_holds: 0,
        old_row: Row::Absent,
        each,
        broken: None,
    }
}

#[test]
fn fence_of_leases() {
    let renewal = Left { renewals: 1, ..EACH };
    let repeat = Left { repeats: 1, ..EACH };
    let both = Left { repeats: 1, ..renewal };
    let lease = |each| Fence { lapses: 1, ..fence(Ledger::Lease, each) };
    for (name, model) in [
        ("a lapse, a renewal, time", Fence { retention: 1, ticks: 3, ..lease(renewal) }),
        ("a lapse, a repeat, time", Fence { retention: 1, ticks: 2, ..lease(repeat) }),
        ("a lapse, a repeat, a renewal", lease(both)),
        ("3 callers, a lapse, a renewal", Fence { callers: 3, ..lease(renewal) }),
        ("3 callers, a lapse, a forget", Fence { callers: 3, forgets: 1, ..lease(EACH) }),
        ("3 callers, a lapse, time", Fence { callers: 3, retention: 1, ticks: 2, ..lease(EACH) }),
        ("2 lapses, a repeat, a renewal, a forget", Fence { lapses: 2, forgets: 1, ..lease(both) }),
    ] {
        check(&format!("fence, lease, {name}"), model);
    }
}

/// Transactions of handlers hold the row: one of a caller, and one of an earlier run.
fn held_fence(each: Left) -> Fence {
    Fence { lapses: 2, holds: 1, earlier_holds: 1, ..fence(Ledger::Lease, each) }
}

#[test]
fn fence_with_held_rows() {
    let renewal = Left { renewals: 1, ..EACH };
    let repeat = Left { repeats: 1, ..EACH };
    let old_row = Row::Lapsed(NOBODY);
    for (name, model) in [
        ("a lapse, a repeat", Fence { lapses: 1, ..held_fence(repeat) }),
        ("2 lapses, a renewal, a forget", Fence { forgets: 1, ..held_fence(renewal) }),
        ("2 lapses, a renewal, an earlier row", Fence { old_row, ..held_fence(renewal) }),
        (
            "a lapse, a renewal, time",
            Fence { lapses: 1, retention: 1, ticks: 2, holds: 0, ..held_fence(renewal) },
        ),
        ("3 callers, a lapse", Fence { callers: 3, lapses: 1, holds: 0, ..held_fence(EACH) }),
    ] {
        check(&format!("fence, held rows, {name}"), model);
    }
}

#[test]
fn fence_on_arrival() {
    let repeat = Left { repeats: 1, ..EACH };
    let releases = Left { releases: 2, ..repeat };
    let arrival = |each| fence(Ledger::OnArrival, each);
    let old_row = Row::Complete(NOBODY);
    for (name, model) in [
        ("3 callers", Fence { callers: 3, ..arrival(EACH) }),
        ("a repeat, an old row", Fence { old_row, ..arrival(repeat) }),
        ("3 callers, an old row", Fence { callers: 3, old_row, ..arrival(EACH) }),
        ("a repeat, 2 releases, time", Fence { retention: 1, ticks: 2, ..arrival(releases) }),
        ("a forget, time", Fence { retention: 1, ticks: 3, forgets: 1, ..arrival(EACH) }),
        ("3 callers, a repeat", Fence { callers: 3, ..arrival(repeat) }),
    ] {
        check(&format!("fence, on arrival, {name}"), model);
    }
}

/// The two largest spaces: four million states.
#[test]
#[ignore = "it takes a minute of a core; scripts/faults runs it"]
fn fence_of_three_callers() {
    let lease = fence(Ledger::Lease, Left { repeats: 1, ..EACH });
    check("fence, lease, 3 callers, a lapse, a repeat", Fence { callers: 3, lapses: 1, ..lease });
    let arrival = fence(Ledger::OnArrival, Left { releases: 2, ..EACH });
    let arrival = Fence { callers: 3, retention: 1, ticks: 2, ..arrival };
    check("fence, on arrival, 3 callers, 2 releases, time", arrival);
}

#[test]
fn fence_with_a_broken_rule_is_found() {
    let renewal = Left { renewals: 1, ..EACH };
    let lease = Fence { lapses: 1, ..fence(Ledger::Lease, renewal) };
    let timed = Fence { retention: 1, ticks: 3, ..lease };
    let repeat = Left { repeats: 1, ..EACH };
    let arrival = Fence { callers: 3, ..fence(Ledger::OnArrival, repeat) };
    for (rule, model, property) in [
        (Rule::ReleaseInserts, timed, fence::FENCE),
        (Rule::ReleaseRaisesOthers, timed, fence::FENCE),
        (Rule::TakeNeedsItsCaller, timed, fence::FENCE),
        (Rule::TakeNamesTheVersion, timed, fence::TABLE),
        (Rule::ReleaseKeepsTheRow, timed, fence::FENCE),
        (Rule::ForgetKeepsTheRow, Fence { lapses: 2, forgets: 1, ..lease }, fence::FENCE),
        (Rule::VersionStartsAtTheClock, timed, fence::TABLE),
        (Rule::ReleaseSparesCompletions, timed, fence::SPARED),
        (Rule::LastReadIsUnknown, arrival, fence::ANSWERED),
        (Rule::ReleaseWaitsForTheRow, held_fence(renewal), fence::FENCE),
        (Rule::OwnHeldRowIsFirst, held_fence(repeat), fence::ANSWERED),
        (Rule::SkipAfterALossIsUnknown, held_fence(repeat), fence::ANSWERED),
    ] {
        check_broken(rule, Fence { broken: Some(rule), ..model }, property);
    }
}

#[test]
fn lease_of_one_key_without_faults() {
    check("one key, no faults", one_key(NO_FAULTS));
}

#[test]
fn lease_of_one_key_with_lost_late_and_repeated_calls() {
    check("one key, 2 calls fail", one_key(Faults { calls: 2, ..NO_FAULTS }));
}

#[test]
fn lease_of_one_key_with_crashes_and_lapses() {
    check("one key, 2 crashes, 2 lapses", one_key(Faults { crashes: 2, lapses: 2, ..NO_FAULTS }));
    let faults = Faults { calls: 1, crashes: 1, lapses: 1, ..NO_FAULTS };
    check("one key, a call fails, a crash, a lapse", one_key(faults));
    let faults = Faults { calls: 1, lapses: 1, outages: 1, ..NO_FAULTS };
    check("one key, a call fails, a lapse, an outage", one_key(faults));
}

#[test]
fn lease_of_one_key_with_the_end_of_its_retention() {
    let faults = Faults { calls: 1, lapses: 1, expiries: 1, ..NO_FAULTS };
    check("one key, expiry", one_key(faults));
}

#[test]
fn lease_of_one_key_with_failovers() {
    let faults = Faults { lapses: 1, failovers: 1, ..NO_FAULTS };
    check("one key, a lapse, a failover", one_key(faults));
    let faults = Faults { calls: 1, failovers: 1, ..NO_FAULTS };
    check("one key, a call fails, a failover", one_key(faults));
    let faults = Faults { crashes: 1, failovers: 2, ..NO_FAULTS };
    check("one key, a crash, 2 failovers", one_key(faults));
}

#[test]
fn lease_of_two_identities_with_each_fault() {
    let call = Faults { calls: 1, ..NO_FAULTS };
    check("shared identity, a call fails", shared_identity(call));
    check("two identities, a call fails", two_identities(call));
    let crash = Faults { crashes: 1, ..NO_FAULTS };
    check("shared identity, a crash", shared_identity(crash));
    let lapse = Faults { lapses: 1, ..NO_FAULTS };
    check("shared identity, a lapse", shared_identity(lapse));
    check("two identities, 2 lapses", two_identities(Faults { lapses: 2, ..NO_FAULTS }));
    let failover = Faults { failovers: 1, ..NO_FAULTS };
    check("shared identity, a failover", shared_identity(failover));
    check("second identity once", second_identity_once());
    check("shared identity, one attempt", one_attempt(shared_identity(NO_FAULTS)));
    check("replayed body", replayed_body(NO_FAULTS));
    check("replayed body, a call fails", replayed_body(call));
}

#[test]
fn on_arrival_in_two_processes() {
    for (name, faults) in [
        ("no faults", NO_FAULTS),
        ("2 calls fail", Faults { calls: 2, ..NO_FAULTS }),
        ("a call fails, 2 crashes", Faults { calls: 1, crashes: 2, ..NO_FAULTS }),
        ("a call fails, an expiry", Faults { calls: 1, expiries: 1, ..NO_FAULTS }),
        ("a call fails, an outage", Faults { calls: 1, outages: 1, ..NO_FAULTS }),
        ("a call fails, a failover", Faults { calls: 1, failovers: 1, ..NO_FAULTS }),
    ] {
        check(&format!("on arrival, one key, {name}"), on_arrival(one_key(faults)));
    }
}

#[test]
fn on_arrival_in_one_process_runs_what_is_acknowledged() {
    let calls = Faults { calls: 2, ..NO_FAULTS };
    check("on arrival, one process", on_arrival(in_one_process(one_key(calls))));
    let faults = Faults { calls: 2, failovers: 1, ..NO_FAULTS };
    check("on arrival, one process, a failover", on_arrival(in_one_process(one_key(faults))));
    let faults = Faults { calls: 1, ..NO_FAULTS };
    let slow = Protocol { slow: true, ..in_one_process(one_key(faults)) };
    check("on arrival, one process, a duplicate before the time-out", on_arrival(slow));
}

#[test]
fn lease_with_a_broken_rule_is_found() {
    let calls = |calls| Faults { calls, ..NO_FAULTS };
    let lapse = Faults { lapses: 1, ..NO_FAULTS };
    let both = Faults { lapses: 1, ..calls(1) };
    for (rule, protocol, property) in [
        (Rule::ClaimRespectsLeases, one_key(NO_FAULTS), properties::ONCE),
        (Rule::InFlightIsNoDuplicate, one_key(NO_FAULTS), properties::RAN),
        (Rule::CompleteIsADuplicate, one_key(NO_FAULTS), properties::KEPT),
        (Rule::SuccessIsCompleted, one_key(NO_FAULTS), properties::ONCE),
        (Rule::FailureIsReleased, one_key(NO_FAULTS), properties::RAN),
        (Rule::ReleaseNeedsTheToken, one_key(calls(2)), properties::ONCE),
        (Rule::ReleaseSparesCompletions, one_key(lapse), properties::KEPT),
        (Rule::CompletionCountsAfterTheLease, one_key(lapse), properties::KEPT),
        (Rule::RenewalRespectsOthers, one_key(lapse), properties::HELD),
        (Rule::RenewalSparesCompletions, one_key(both), properties::KEPT),
        (Rule::LostCompletionIsRepeated, one_key(calls(1)), properties::STORED),
        (Rule::PendingIsADuplicate, one_key(both), properties::PENDING),
        (Rule::DuplicateReleasesItsClaims, second_identity_once(), properties::RAN),
    ] {
        check_broken(rule, Protocol { broken: Some(rule), ..protocol }, property);
    }
}

#[test]
fn on_arrival_with_a_broken_rule_is_found() {
    let calls = |calls| Faults { calls, ..NO_FAULTS };
    let failover = Faults { failovers: 1, ..calls(1) };
    let one = |faults| in_one_process(one_key(faults));
    for (rule, protocol, property) in [
        (Rule::ClaimIsCompleteAtOnce, one_key(NO_FAULTS), properties::AT_MOST_ONCE),
        (Rule::CompleteIsADuplicate, one_key(NO_FAULTS), properties::AT_MOST_ONCE),
        (Rule::ReleaseNeedsTheToken, one_key(calls(2)), properties::AT_MOST_ONCE),
        (Rule::RepeatedClaimIsFirst, one(calls(1)), properties::RUNS),
        (Rule::UnknownClaimIsReleased, one(calls(1)), properties::RUNS),
        (Rule::ReleasingIsInFlight, one(calls(1)), properties::RUNS),
        (Rule::ReleaseIsAFence, one(calls(1)), properties::RUNS),
        (Rule::ReleaseIsReplicated, one(failover), properties::RUNS),
        (Rule::RemovalIsNoticed, one(calls(2)), properties::RUNS),
    ] {
        let protocol = Protocol { broken: Some(rule), ..on_arrival(protocol) };
        check_broken(rule, protocol, property);
    }
}

/// A lapse and a death.
const FEW: completion::Left =
    completion::Left { renewals: 0, lapses: 1, deaths: 1, forgets: 0, expiries: 0, crashes: 0 };
const EACH_ONCE: completion::Left =
    completion::Left { renewals: 1, lapses: 1, deaths: 1, forgets: 1, expiries: 1, crashes: 1 };

/// Deliveries of one event, with these identities.
fn completion(deliveries: &[&[Key]], left: completion::Left) -> Completion {
    let deliveries = deliveries.iter().map(|keys| keys.to_vec()).collect();
    Completion { deliveries, attempts: 2, left, broken: None }
}

const ONE_KEY: &[&[Key]] = &[&[0], &[0]];
const ONE_KEY_3_TIMES: &[&[Key]] = &[&[0], &[0], &[0]];
/// Two keys, and a second identity that they share.
const TWINS: &[&[Key]] = &[&[2, 0], &[2, 1]];
const TWINS_AND_ONE: &[&[Key]] = &[&[2, 0], &[2, 0], &[2, 1]];
const SAME_IDENTITIES: &[&[Key]] = &[&[2, 0], &[2, 0]];

#[test]
fn completion_in_the_handlers_transaction() {
    let lapses = |lapses| completion::Left { lapses, ..FEW };
    let renewals = |left| completion::Left { renewals: 1, ..left };
    let crash = completion::Left { crashes: 1, deaths: 3, ..lapses(3) };
    let once = |model| Completion { attempts: 1, ..model };
    for (name, model) in [
        ("one key, each fault once", completion(ONE_KEY, EACH_ONCE)),
        ("one key, 2 lapses, a renewal", completion(ONE_KEY, renewals(lapses(2)))),
        ("3 deliveries, 3 lapses, a renewal", completion(ONE_KEY_3_TIMES, renewals(lapses(3)))),
        ("3 deliveries, 3 lapses, 3 deaths, a crash", completion(ONE_KEY_3_TIMES, crash)),
        ("twins, 4 lapses", completion(TWINS, lapses(4))),
        ("twins, each fault once, one attempt", once(completion(TWINS, EACH_ONCE))),
        ("twins and one more, 3 lapses, one attempt", once(completion(TWINS_AND_ONE, lapses(3)))),
        ("same identities, 2 lapses", completion(SAME_IDENTITIES, lapses(2))),
        (
            "same identities, each fault once, one attempt",
            once(completion(SAME_IDENTITIES, EACH_ONCE)),
        ),
    ] {
        check(&format!("completion, {name}"), model);
    }
}

#[test]
fn completion_with_a_broken_rule_is_found() {
    let one_key = || completion(ONE_KEY, FEW);
    let twins = || completion(TWINS, FEW);
    let forget = completion::Left { forgets: 1, ..FEW };
    for (rule, model, property) in [
        (Rule::FirstCommitWins, one_key(), completion::EFFECT),
        (Rule::RefusalAborts, one_key(), completion::EFFECT),
        (Rule::RefusalAborts, twins(), completion::EFFECT),
        (Rule::RetentionBeginsAnew, completion(ONE_KEY, forget), completion::EFFECT),
        (Rule::ReleaseSparesCompletions, one_key(), completion::EFFECT),
        (Rule::ReleaseSparesCompletions, one_key(), completion::SETTLED),
        (Rule::ReleaseSparesCompletions, twins(), completion::SETTLED),
        (Rule::CompletionIsInItsTransaction, one_key(), completion::TOLD),
        (Rule::FlagNeedsTheCommit, one_key(), completion::TOLD),
        (Rule::EarlyCommitIsRead, one_key(), completion::TOLD),
        (Rule::UncommittedIsNoSuccess, one_key(), completion::TOLD),
        (Rule::SecondNamesItsKey, completion(SAME_IDENTITIES, forget), completion::FORGOTTEN),
    ] {
        check_broken(rule, Completion { broken: Some(rule), ..model }, property);
    }
}
