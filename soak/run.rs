//! The run of one row.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::faults;
use crate::hostile::Requests;
use crate::load::Load;
use crate::log::{Faults, Log};
use crate::receivers::Receivers;
use crate::row::Row;
use crate::store::Store;
use crate::verdict::{self, Verdict};

/// A row that acknowledges nothing for this time ends with an error.
const PROGRESS: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) deliveries: u64,
    pub(crate) seed: u64,
    /// Ends the row early.
    pub(crate) time: Option<Duration>,
}

/// What a row shows.
pub(crate) struct Report {
    /// Acknowledged.
    pub(crate) deliveries: u64,
    pub(crate) events: usize,
    pub(crate) faults: Faults,
    pub(crate) hang_ups: u64,
    pub(crate) hostile: u64,
    pub(crate) verdict: Verdict,
    pub(crate) time: Duration,
    pub(crate) version: String,
    /// Why the row has failed, if it has.
    pub(crate) failures: Vec<String>,
}

/// Runs a row, with servers and receivers of its own.
pub(crate) fn run(row: Row, plan: Plan) -> Result<Report, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let report = runtime.block_on(run_in(row, plan));
    runtime.shutdown_timeout(Duration::from_secs(10));
    report
}

async fn run_in(row: Row, plan: Plan) -> Result<Report, String> {
    let store = Store::start(row.store).await;
    let version = store.version().await;
    store.effects().await?.create_tables().await.map_err(|error| error.to_string())?;
    let log = Log::default();
    let (url, effects) = (store.url(), store.effects_url());
    let receivers = Receivers::start(row, &url, &effects, plan.seed, &log).await?;
    let load = Arc::new(Load::new(receivers.ports(), plan.deliveries, plan.seed));
    let hostile = Requests::default();
    let start = Instant::now();
    // `Store::inflict` blocks its thread while servers start.
    let store = {
        let faults = faults::of_store(row.store, plan.deliveries, plan.seed);
        let (load, log, runtime) =
            (Arc::clone(&load), log.clone(), tokio::runtime::Handle::current());
        tokio::task::spawn_blocking(move || {
            runtime.block_on(faults::inflict(load, store, faults, log))
        })
    };
    let kills = faults::kills(plan.deliveries, plan.seed);
    let all = async {
        tokio::try_join!(
            async { store.await.map_err(|error| format!("a fault of the store: {error}")) },
            load.run(),
            faults::kill_receivers(&load, &receivers, kills),
            async {
                hostile.run(&load).await;
                Ok(())
            },
        )
    };
    let store = tokio::select! {
        done = all => done?.0,
        error = watch(row, &load, &log, plan) => return Err(error),
    };
    receivers.drain().await?;
    let time = start.elapsed();
    let events = load.acknowledgements();
    let mut database = store.effects().await?;
    let faults = std::mem::take(&mut *log.faults());
    let verdict = verdict::judge(row, &mut database, &events, &faults).await;
    let verdict = verdict.map_err(|error| format!("the counts: {error}"))?;
    drop(receivers);
    let mut failures = verdict.failures();
    for (answer, count) in load.wrong.lock().unwrap().iter() {
        failures.push(format!("{count} deliveries got a wrong answer: {answer}"));
    }
    for (answer, count) in hostile.wrong.lock().unwrap().iter() {
        failures.push(format!("{count} hostile requests got a wrong answer: {answer}"));
    }
    Ok(Report {
        deliveries: load.acknowledged(),
        events: events.len(),
        faults,
        hang_ups: load.hang_ups.load(Ordering::Relaxed),
        hostile: hostile.sent.load(Ordering::Relaxed),
        verdict,
        time,
        version,
        failures,
    })
}

/// Prints the progress, and ends the load when its time is over. Returns why the row cannot go on.
async fn watch(row: Row, load: &Load, log: &Log, plan: Plan) -> String {
    let start = Instant::now();
    let (mut last, mut moved, mut shown) = (0, start, start);
    loop {
        sleep(Duration::from_millis(200)).await;
        if plan.time.is_some_and(|time| start.elapsed() > time) {
            load.stop();
        }
        if let Some(receiver) = log.faults().ended.first() {
            return format!("receiver {receiver} ended by itself");
        }
        let acknowledged = load.acknowledged();
        if acknowledged > last {
            (last, moved) = (acknowledged, Instant::now());
        }
        let summary = || {
            let faults = log.faults();
            let store: Vec<_> = faults.store.iter().map(|fault| fault.0).collect();
            let under_way = faults.store.last().filter(|fault| fault.1.1 == u64::MAX);
            format!(
                "{acknowledged} of {} deliveries, {} kills, store: {store:?}, under way: {:?}, \
                 other answers: {}",
                plan.deliveries,
                faults.deaths.len(),
                under_way.map(|fault| fault.0),
                load.answers()
            )
        };
        if moved.elapsed() > PROGRESS {
            return format!("no delivery was acknowledged for {PROGRESS:?}: {}", summary());
        }
        if shown.elapsed() > Duration::from_secs(10) {
            shown = Instant::now();
            eprintln!("{row}: {:.0} s: {}", start.elapsed().as_secs_f64(), summary());
        }
    }
}
