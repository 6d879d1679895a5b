//! The soak: three receivers on every store and ledger, faults under load, one table.
//!
//! `scripts/soak` builds and runs it. Without options, as `cargo test` runs it, it is a small soak of
//! three rows. Its options are those of [`Options`].
//!
//! 1. **Receivers.** Three processes with the real layer, HTTP by axum. Each run of a handler writes one
//!    row (its event, the receiver, the attempt, the time) into a database: in a transaction that
//!    completes the delivery under the transactional ledger, on a connection of its own else. A handler repeats its
//!    write until the database has it. The rows are in the database of the keys; for Redis, in a
//!    Postgres without faults.
//! 2. **Deliveries.** Each event is delivered four times: twice at the same moment to two receivers, once
//!    after both were acknowledged, once later. Each delivery is repeated until a 2xx. One request in 40
//!    is one whose client hangs up: before the response, or in the middle of the body. One request in
//!    100 is [hostile](hostile).
//! 3. **Faults.** The [schedule](faults) depends on the seed and on the number of deliveries. The load
//!    waits for a fault that is late, so the number of faults does not depend on the machine.
//! 4. **Counting.** The times of the acknowledgements are loaded into the database of the effects, which
//!    counts lost and doubled events by SQL. The [verdict](verdict) says which of them are explained.
//!
//! The exit code is 1 if an event is lost or doubled without an explanation, if the ledger promises
//! otherwise, or if a request gets a wrong answer.

mod check;
mod effects;
mod faults;
mod hostile;
mod load;
mod log;
mod receiver;
mod receivers;
mod row;
mod run;
mod store;
mod table;
mod verdict;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use row::Row;
use run::Plan;

/// The first argument of a soak. Without it, the arguments are those of `cargo test`.
const RUN: &str = "run";

/// Runs receivers on each store and ledger under faults, and prints a table of what was lost and doubled.
#[derive(Debug, Parser)]
#[command(name = "scripts/soak")]
struct Options {
    /// Acknowledged deliveries per row; four of them are one event.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(4..))]
    deliveries: u64,
    /// A row to run, such as `postgres/lease`. Can be repeated. By default, all rows.
    #[arg(long = "row")]
    rows: Vec<Row>,
    /// Ends each row after this many minutes, with what is delivered by then.
    #[arg(long)]
    minutes: Option<f64>,
    /// Decides the schedule of the faults, the hang-ups and the handlers' failures.
    #[arg(long)]
    seed: Option<u64>,
    /// Prints the names of the rows, and ends.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    if let Ok(setup) = std::env::var(receiver::SETUP) {
        receiver::run(&setup);
        return ExitCode::SUCCESS;
    }
    let mut args: Vec<_> = std::env::args().collect();
    if args.get(1).is_none_or(|arg| arg != RUN) {
        return under_cargo_test(&args[1..]);
    }
    args.remove(1);
    let options = Options::parse_from(args);
    let rows = if options.rows.is_empty() { Row::all() } else { options.rows };
    if options.list {
        rows.iter().for_each(|row| println!("{row}"));
        return ExitCode::SUCCESS;
    }
    let plan = Plan {
        deliveries: options.deliveries,
        seed: options.seed.unwrap_or_else(|| u64::from(rand::random::<u32>())),
        time: options.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0)),
    };
    code(soak(&rows, plan))
}

/// Runs a small soak, unless the arguments of `cargo test` select other tests.
fn under_cargo_test(args: &[String]) -> ExitCode {
    if args.iter().any(|arg| arg == "--list") {
        println!("soak: test");
        return ExitCode::SUCCESS;
    }
    let mut filters = args.iter().filter(|arg| !arg.starts_with('-')).peekable();
    if filters.peek().is_some() && !filters.any(|filter| "soak".contains(&**filter)) {
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(check::verdict());
    code(small_soak_loses_and_doubles_nothing_without_an_explanation())
}

fn small_soak_loses_and_doubles_nothing_without_an_explanation() -> bool {
    let plan = Plan { deliveries: 4_000, seed: 1, time: None };
    // Several rows at once, because most of the time is that of servers that start.
    let passes = |names: &[&str]| {
        std::thread::scope(|scope| {
            let row = |name: &&str| name.parse().expect("a row");
            let started = |row: Row| scope.spawn(move || soak(&[row], plan));
            let rows: Vec<_> = names.iter().map(row).map(started).collect();
            rows.into_iter().all(|row| row.join().expect("no panic"))
        })
    };
    passes(&["sqlite/lease", "postgres/lease", "postgres/transactional", "redis/lease"])
        && passes(&[
            "sqlite/on-arrival",
            "sqlite/transactional",
            "postgres-sync/lease",
            "postgres-sync/transactional",
        ])
}

/// Prints the table of these rows. Returns `false` if one of them has failed.
fn soak(rows: &[Row], plan: Plan) -> bool {
    eprintln!("seed {}", plan.seed);
    let mut reports = Vec::new();
    let mut failed = false;
    for row in rows {
        let report = run::run(*row, plan);
        match &report {
            Ok(report) => {
                for failure in &report.failures {
                    eprintln!("{row}: {failure}");
                    failed = true;
                }
            }
            Err(error) => {
                eprintln!("{row}: {error}");
                failed = true;
            }
        }
        reports.push((*row, report));
        // A soak of hours may be cut short.
        if let Some(report) = reports.last().and_then(|(_, report)| report.as_ref().ok()) {
            eprintln!("{}", table::line(*row, report));
        }
    }
    println!("{}", table::markdown(&reports, plan));
    !failed
}

fn code(passed: bool) -> ExitCode {
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
