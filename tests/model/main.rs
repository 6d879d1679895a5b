//! Random schedules of calls on a few keys, compared with a model of the contract.
//!
//! 1. The model ([`contract`]) is written from the text of the contract. For one key it gives the
//!    reply to a call, and the row after the call.
//! 2. Calls follow each other, or run at the same time ([`history`]).
//! 3. Time passes in steps, each longer than a schedule runs. A test advances the adapter's clock, or
//!    moves the times in the database.

mod backends;
mod call;
mod contract;
mod driver;
mod history;

use std::cell::RefCell;
use std::future::Future;

use backends::{Backend, Memory, Processes};
use history::{Wave, is_explained, sequence, waves};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRunner};
use tokio::runtime::Builder;

/// How often a reduced schedule is tried after a failure, for failures that show only sometimes.
const TRIES: usize = 20;

/// Calls that follow each other. More threads would only wake each other.
fn follows_the_contract<W: Backend>(schedules: u32, backend: impl Future<Output = W>) {
    check(&mut Builder::new_current_thread(), schedules, &sequence(), backend);
}

fn is_linearizable<W: Backend>(schedules: u32, backend: impl Future<Output = W>) {
    check(Builder::new_multi_thread().worker_threads(2), schedules, &waves(), backend);
}

/// Runs this many schedules; ten times as many with ten times proptest's usual `PROPTEST_CASES`.
fn check<W: Backend>(
    runtime: &mut Builder,
    schedules: u32,
    strategy: &impl Strategy<Value = Vec<Wave>>,
    backend: impl Future<Output = W>,
) {
    let runtime = runtime.enable_all().build().unwrap();
    let (backend, failed) = (RefCell::new(runtime.block_on(backend)), RefCell::new(None));
    let usual = Config::default();
    let config = Config {
        cases: schedules * usual.cases / 256,
        failure_persistence: None,
        max_shrink_time: 30_000,
        // The usual one takes a fifth of the time.
        rng_algorithm: RngAlgorithm::XorShift,
        ..usual
    };
    let checked = TestRunner::new(config).run(strategy, |schedule| {
        let mut backend = backend.borrow_mut();
        let tries = if failed.borrow().is_some() { TRIES } else { 1 };
        let held =
            (0..tries).try_for_each(|_| runtime.block_on(is_explained(&mut *backend, &schedule)));
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

#[test]
fn memory_follows_the_contract() {
    follows_the_contract(2_000, async { Memory::new(100) });
}

#[test]
fn memory_in_shards_follows_the_contract() {
    follows_the_contract(2_000, async { Memory::new(4_096) });
}

#[test]
fn sqlite_follows_the_contract() {
    follows_the_contract(400, Processes::on_sqlite());
}

#[test]
fn postgres_follows_the_contract() {
    follows_the_contract(400, Processes::on_postgres());
}

#[test]
fn redis_follows_the_contract() {
    follows_the_contract(1_000, Processes::on_redis());
}

#[test]
fn memory_is_linearizable() {
    is_linearizable(2_000, async { Memory::new(100) });
}

#[test]
fn sqlite_is_linearizable() {
    is_linearizable(1_000, Processes::on_sqlite());
}

#[test]
fn postgres_is_linearizable() {
    is_linearizable(1_000, Processes::on_postgres());
}

#[test]
fn redis_is_linearizable() {
    is_linearizable(1_000, Processes::on_redis());
}
