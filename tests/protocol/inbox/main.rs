//! A model check of the rules of an inbox. An inbox is a service around the layer: it stores a delivery, answers
//! *stored*, and calls the application again until the ledger says that every event of the request is complete.
//!
//! # The model
//!
//! Senders make one to three deliveries of one or two events to two processes. Each process has one slot of the loop.
//! The ledger is the transactional one: a claim, a COMMIT of effect and key that the first run wins, a release, and
//! leases that lapse. Each call of the ledger is one step: `completion.rs` has its statements.
//!
//! A handler fails, answers 422, or dies with its process. A call of the inbox's table fails, or is executed and loses
//! its reply. The key store is unavailable. The inbox's database crashes, and loses what was not durable. A turn or a
//! lease lapses under a run. An operator forgets a key, or retries a parked row. A key or a row expires. A layer is
//! switched to shadow or off. A new version of the application has other keys, no route, or a fallback that answers
//! 200.
//!
//! # The properties
//!
//! | property | otherwise |
//! |---|---|
//! | An event that was answered *stored* has its effect, or its row is parked with an alert. | `LOST` |
//! | It has one effect, unless an operator forgets its key, or its layer does not enforce. | `DOUBLED` |
//! | When nothing is left to do, no row is left but parked ones. | `BLOCKED` |
//! | From every state, an end can be reached without a further fault. | `FOR_EVER` |
//! | A row that is parked as failed has run. | `NEVER_RAN` |
//! | The layer of a row that is parked as misrouted is not there, or a layer has lost the mark. | `HAS_A_ROUTE` |
//! | A row that was parked before *stored* leaves is due again. | `STAYS_PARKED` |
//! | The inbox refuses no delivery that the layer would have run. | `REFUSED` |
//!
//! If the layer refuses another body under a complete id, the first property holds for each body. Every world has all
//! properties with all rules. Each [`Rule`] has a world that violates one without it.
//!
//! # Not in the model
//!
//! - The length of delays, `max_waiting`, the statements of a batch, verification, the formats of rows.
//! - Order of the events of one object.
//! - The ledger of leases, under which an event may run twice.
//! - Jitter. A row that was taken beside a deadly event may be parked as died, and may never have run.
//! - A new version that is deployed to one process only may park a row as misrouted, although the other process has the
//!   route. Delays make this improbable.
//! - A switch of the mode between a take and the call of the application counts as one attempt to reach the layer.
//!   Worlds have fewer switches than a row has such attempts.
//! - A switch of the mode between the check of `around` and that of the layer runs a redelivery unprotected. Its second
//!   effect counts as one of the other mode.

mod explore;
mod model;
mod state;
mod time;
mod world;

use std::time::Instant;

use explore::{FOR_EVER, explore};
use model::{BLOCKED, DOUBLED, HAS_A_ROUTE, LOST, Model, NEVER_RAN, REFUSED, STAYS_PARKED};
use world::Fault::{
    self, Age, Call, Crash, Expiry, Fail, Forget, Kill, Lapse, LostMark, Refusal, Retry, Switch,
};
use world::{Answers, Delivery, Deploy, Left, Mode, Rule, With, World, delivery, left};

const ONCE: &[Delivery] = &[delivery(1, 0, 0)];
const TWICE: &[Delivery] = &[delivery(1, 0, 0), delivery(1, 1, 0)];
const TWICE_TO_ONE: &[Delivery] = &[delivery(1, 0, 0), delivery(1, 0, 0)];
const REGROUPED: &[Delivery] = &[delivery(0b11, 0, 0), delivery(0b101, 1, 0)];
const SECOND_PART: &[Delivery] = &[delivery(0b11, 0, 0), delivery(0b10, 1, 0)];
const TWO_BODIES: &[Delivery] = &[delivery(1, 0, 0), delivery(1, 1, 1)];
const NEW_BODY_TWICE: &[Delivery] = &[delivery(1, 0, 0), delivery(1, 1, 1), delivery(1, 1, 1)];
const TWO_EVENTS: &[Delivery] = &[delivery(1, 0, 0), delivery(2, 1, 0)];
const NEIGHBOURS: &[Delivery] = &[delivery(1, 0, 0), delivery(2, 0, 0)];

const NONE: Left = [0; Fault::Deploy as usize + 1];
const EACH: Left = left(NONE, &[(Kill, 1), (Lapse, 1), (Fail, 1), (Call, 1)]);
const NO_FAULT: Left = left(EACH, &[(Call, 0)]);
const NO_LAPSE: Left = left(EACH, &[(Lapse, 0)]);

const fn world(name: &'static str, deliveries: &'static [Delivery], left: Left) -> World {
    World {
        name,
        deliveries,
        one_by_one: false,
        answers: Answers::AtTheEnd,
        with: With::Nothing,
        mode: Mode::Off,
        deploy: Deploy::OtherKeys,
        left,
    }
}

const WORLDS: &[World] = &[
    world("one delivery", ONCE, left(EACH, &[(Kill, 2), (Fail, 2), (Call, 2)])),
    world("two deliveries", TWICE, EACH),
    world("two deliveries, two faults", TWICE, left(EACH, &[(Kill, 0), (Call, 2)])),
    world("stored first", ONCE, left(EACH, &[(Kill, 2), (Call, 2), (Fail, 2)])).first(),
    world("stored first, twice", TWICE, EACH).first(),
    world("stored first, a crash", ONCE, left(EACH, &[(Crash, 1)])).first(),
    world("stored within", ONCE, left(EACH, &[(Fail, 2)])).within(),
    world("stored within, twice", TWICE, NO_FAULT).within(),
    world("stored within, a forget", TWICE, left(NONE, &[(Forget, 1), (Lapse, 1), (Fail, 1)]))
        .one_by_one()
        .within(),
    world("a batch, regrouped", REGROUPED, left(NONE, &[(Fail, 1)])),
    world("a batch, its second part", SECOND_PART, left(NONE, &[(Kill, 1), (Fail, 1)])),
    world("a batch, its second part, within", SECOND_PART, left(NO_FAULT, &[(Kill, 0)])).within(),
    world("a crash, keys expire", ONCE, left(NO_FAULT, &[(Crash, 1), (Expiry, 1)])),
    world("a forget", TWICE, left(NONE, &[(Forget, 1), (Lapse, 1), (Fail, 1)])).one_by_one(),
    world("a lost mark", ONCE, left(NO_FAULT, &[(LostMark, 1)])),
    world("one process has the route", ONCE, EACH).with(With::OneRoute),
    world("parked", TWICE, left(NONE, &[(Fail, 2), (Retry, 1), (Lapse, 1)])).one_by_one(),
    world("an old body", TWO_BODIES, NO_LAPSE).with(With::OldBody),
    world("two services", TWO_EVENTS, left(NONE, &[(Kill, 1), (Fail, 1)])).with(With::TwoServices),
    world("an old key", TWICE, left(NONE, &[(Expiry, 1), (Kill, 1), (Call, 1)])).one_by_one(),
    world(
        "an old key, a refusing layer",
        TWO_BODIES,
        left(NONE, &[(Expiry, 1), (Kill, 1), (Call, 1)]),
    )
    .with(With::Refusal),
    world("expired", TWICE, left(NONE, &[(Age, 1), (Fail, 2)])),
    world("other keys", ONCE, left(NO_LAPSE, &[(Fault::Deploy, 2)])),
    world("no route", ONCE, left(EACH, &[(Fault::Deploy, 2)])).deploy(Deploy::NoRoute),
    world("a fallback", ONCE, left(EACH, &[(Fault::Deploy, 2)])).deploy(Deploy::Fallback),
    world("a refusing handler", TWICE_TO_ONE, left(EACH, &[(Refusal, 2)])),
    world("a refusing layer", TWO_BODIES, NO_FAULT).with(With::Refusal),
    world("a refusing layer, faults", TWO_BODIES, left(NONE, &[(Call, 1), (Fail, 1)]))
        .with(With::Refusal),
    world("a refusing layer, within", TWO_BODIES, left(NONE, &[(Lapse, 1), (Kill, 1)]))
        .with(With::Refusal)
        .within(),
    world("a refusing layer, a crash", TWO_BODIES, left(NONE, &[(Crash, 1), (Fail, 1)]))
        .with(With::Refusal),
    world("a refusing layer, a batch", NEW_BODY_TWICE, left(NONE, &[(Fail, 1)]))
        .with(With::Refusal),
    world("off", ONCE, left(NO_LAPSE, &[(Switch, 1), (Fail, 2)])),
    world("off, within", ONCE, left(NONE, &[(Switch, 1), (Fail, 2), (Kill, 1)])).within(),
    world("off, one of two processes", TWICE, left(NO_FAULT, &[(Switch, 1)])),
    world("off, one of two layers", TWO_EVENTS, left(NONE, &[(Switch, 1), (Fail, 1)]))
        .with(With::TwoLayers),
    world("shadow, one of two processes", TWICE, left(NO_FAULT, &[(Switch, 1)])).shadow(),
    world("shadow, one of two layers", TWO_EVENTS, left(NONE, &[(Switch, 1), (Kill, 1)]))
        .with(With::TwoLayers)
        .shadow(),
    world("a deadly event", NEIGHBOURS, left(NONE, &[(Fail, 1), (Lapse, 1)]))
        .with(With::DeadlyEvent),
];

/// Each rule, and a world that has this violation without it.
const LEFT_OUT: &[(Rule, &str, &str)] = &[
    (Rule::CommitFirst, "one delivery", LOST),
    (Rule::Durable, "stored first, a crash", LOST),
    (Rule::DurableAnswer, "a refusing layer, a crash", LOST),
    (Rule::Answered, "a refusing handler", LOST),
    (Rule::AnsweredIsRead, "a refusing handler", LOST),
    (Rule::AnsweredInBatch, "a refusing layer, a batch", LOST),
    (Rule::Wakes, "two deliveries", STAYS_PARKED),
    (Rule::Versions, "a forget", LOST),
    (Rule::OwnVersion, "stored within, a forget", LOST),
    (Rule::StillThere, "a forget", LOST),
    (Rule::Passes, "one delivery", REFUSED),
    (Rule::WholeKey, "a batch, regrouped", LOST),
    (Rule::BodyInKey, "an old body", LOST),
    (Rule::Service, "two services", LOST),
    (Rule::Ledger, "one delivery", DOUBLED),
    (Rule::LedgersWord, "one delivery", LOST),
    (Rule::InFlightWaits, "one delivery", LOST),
    (Rule::NoAttempt, "one delivery", NEVER_RAN),
    (Rule::Undecided, "off, within", LOST),
    (Rule::MismatchParks, "a refusing layer, within", LOST),
    (Rule::BySeq, "a forget", LOST),
    (Rule::ByTurn, "a forget", LOST),
    (Rule::OwnRows, "one process has the route", HAS_A_ROUTE),
    (Rule::AllEnforce, "off, one of two layers", HAS_A_ROUTE),
    (Rule::CallsNothing, "off", DOUBLED),
    (Rule::SameKeys, "other keys", DOUBLED),
    (Rule::Report, "a fallback", LOST),
    (Rule::GivesUp, "other keys", FOR_EVER),
    (Rule::TurnLapses, "one delivery", BLOCKED),
    (Rule::RenewsRuns, "one delivery", BLOCKED),
    (Rule::Deaths, "a deadly event", FOR_EVER),
    (Rule::ExpiresFirst, "a crash, keys expire", DOUBLED),
    (Rule::Retention, "an old key", DOUBLED),
    (Rule::Renews, "expired", STAYS_PARKED),
    (Rule::PurgeVersion, "expired", LOST),
    (Rule::ForgetSpares, "a forget", LOST),
];

#[test]
fn every_world_is_green() {
    for world in WORLDS {
        let (start, name) = (Instant::now(), world.name);
        let found = explore(&Model { world, left_out: None });
        let (states, history) = (found.states, found.history.join("\n"));
        println!("inbox, {name}: {states} states in {:.1} s", start.elapsed().as_secs_f64());
        assert_eq!(found.violation, None, "{name}:\n{history}");
    }
}

#[test]
fn every_rule_is_needed() {
    let listed: Vec<_> = LEFT_OUT.iter().map(|(rule, ..)| *rule as usize).collect();
    let all: Vec<_> = (0..=Rule::LAST as usize).collect();
    assert_eq!(listed, all, "each rule once, in their order");
    for (rule, name, violation) in LEFT_OUT {
        let world = WORLDS.iter().find(|world| world.name == *name).expect("a world");
        let found = explore(&Model { world, left_out: Some(*rule) });
        let (states, steps) = (found.states, found.history.len());
        println!("inbox without {rule:?}: {steps} steps, {states} states: {violation}");
        assert_eq!(found.violation, Some(*violation), "{name}, without {rule:?}");
    }
}
