//! Random schedules of every call on a few keys, against a model of the contract.
//!
//! 1. The model ([`contract`]) is written from the words of the contract, one key at a time: what a
//!    call answers and leaves behind, given what is stored.
//! 2. Calls follow each other ([`sequence`]), or are under way at the same time ([`history`]).
//! 3. Time passes in steps, far longer than a schedule runs: by the adapter's clock, or by moving
//!    the times that a database has stored.

mod backends;
mod call;
mod contract;
mod driver;
mod history;
mod sequence;
#[path = "../support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::fmt::Debug;
use std::future::Future;

use backends::{File, Memory, Server, World, batching};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

/// Once a schedule has failed, how often one with less in it is tried, for what shows only now and
/// then.
const TRIES: usize = 20;

/// As many schedules as this; ten times as many with ten times proptest's usual `PROPTEST_CASES`.
fn check<W: World, S: Strategy<Value: Debug>>(
    schedules: u32,
    strategy: &S,
    world: impl Future<Output = W>,
    holds: &impl AsyncFn(&mut W, &S::Value) -> Result<(), String>,
) {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
    let (world, failed) = (RefCell::new(runtime.block_on(world)), RefCell::new(None));
    let usual = Config::default();
    let config = Config {
        cases: schedules * usual.cases / 256,
        failure_persistence: None,
        max_shrink_time: 30_000,
        ..usual
    };
    let checked = TestRunner::new(config).run(strategy, |schedule| {
        let mut world = world.borrow_mut();
        let tries = if failed.borrow().is_some() { TRIES } else { 1 };
        let held = (0..tries).try_for_each(|_| runtime.block_on(holds(&mut world, &schedule)));
        held.map_err(|why| {
            *failed.borrow_mut() = Some(format!("{why}\nof\n{schedule:#?}"));
            TestCaseError::fail(why)
        })
    });
    match (checked, failed.into_inner()) {
        (Err(TestError::Fail(..)), Some(failed)) => panic!("{failed}"),
        (checked, _) => checked.unwrap(),
    }
}

fn follows<W: World>(schedules: u32, world: impl Future<Output = W>) {
    check(schedules, &call::sequence(), world, &async |world, schedule| {
        sequence::follows(world, schedule).await
    });
}

fn is_explained<W: World>(schedules: u32, world: impl Future<Output = W>) {
    check(schedules, &history::waves(), world, &async |world, schedule| {
        history::is_explained(world, schedule).await
    });
}

#[test]
fn memory_answers_as_the_contract_says() {
    follows(2_000, async { Memory::new(100) });
}

#[test]
fn memory_in_shards_answers_as_the_contract_says() {
    follows(2_000, async { Memory::new(4_096) });
}

#[test]
fn sqlite_answers_as_the_contract_says() {
    follows(400, File::new(batching(true)));
}

#[test]
fn sqlite_unbatched_answers_as_the_contract_says() {
    follows(200, File::new(batching(false)));
}

#[test]
fn postgres_answers_as_the_contract_says() {
    follows(400, Server::new(batching(true)));
}

#[test]
fn postgres_unbatched_answers_as_the_contract_says() {
    follows(200, Server::new(batching(false)));
}

#[test]
fn what_callers_of_memory_are_told_is_explained_by_some_order() {
    is_explained(2_000, async { Memory::new(100) });
}

#[test]
fn what_callers_of_sqlite_are_told_is_explained_by_some_order() {
    is_explained(1_000, File::new(batching(true)));
}

#[test]
fn what_callers_of_unbatched_sqlite_are_told_is_explained_by_some_order() {
    is_explained(300, File::new(batching(false)));
}

#[test]
fn what_callers_of_postgres_are_told_is_explained_by_some_order() {
    is_explained(1_000, Server::new(batching(true)));
}

#[test]
fn what_callers_of_unbatched_postgres_are_told_is_explained_by_some_order() {
    is_explained(300, Server::new(batching(false)));
}
