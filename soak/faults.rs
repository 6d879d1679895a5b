//! The schedule of the faults.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::load::{Load, STORE};
use crate::log::{Kind, Log, Window, now};
use crate::receivers::{RECEIVERS, Receivers};
use crate::row::StoreKind;
use crate::store::Store;
use support::redis::link::SILENT;

/// A receiver is killed once in this many deliveries.
const KILL_EVERY: u64 = 8_000;

/// The faults of a store, and in how many deliveries each of them happens once.
fn kinds(store: StoreKind) -> &'static [(Kind, u64)] {
    match store {
        StoreKind::Sqlite => &[(Kind::WriteLock, 40_000)],
        StoreKind::Postgres => {
            &[(Kind::Restart, 80_000), (Kind::Backend, 80_000), (Kind::Silence, 40_000)]
        }
        StoreKind::PostgresSync => &[
            (Kind::Failover, 80_000),
            (Kind::Restart, 80_000),
            (Kind::Backend, 80_000),
            (Kind::Silence, 40_000),
        ],
        StoreKind::Redis => &[(Kind::Restart, 80_000), (Kind::Silence, 40_000)],
        StoreKind::Sentinel | StoreKind::Cluster => {
            &[(Kind::Failover, 80_000), (Kind::Silence, 40_000)]
        }
    }
}

/// Returns when a fault happens, in acknowledged deliveries: three times at least, never near the start or the end.
fn times(deliveries: u64, every: u64, draws: &mut StdRng) -> Vec<u64> {
    let count = (deliveries / every).max(3);
    let part = deliveries / count;
    (0..count).map(|number| number * part + draws.random_range(part / 5..=part * 7 / 10)).collect()
}

/// The receivers to kill, and when.
pub(crate) fn kills(deliveries: u64, seed: u64) -> Vec<(u64, usize)> {
    let mut draws = StdRng::seed_from_u64(seed);
    let times = times(deliveries, KILL_EVERY, &mut draws);
    times.into_iter().map(|at| (at, draws.random_range(0..RECEIVERS))).collect()
}

/// The faults of the store, and when.
pub(crate) fn of_store(store: StoreKind, deliveries: u64, seed: u64) -> Vec<(u64, Kind)> {
    let mut draws = StdRng::seed_from_u64(!seed);
    let mut all = Vec::new();
    for (kind, every) in kinds(store) {
        all.extend(times(deliveries, *every, &mut draws).into_iter().map(|at| (at, *kind)));
    }
    all.sort_by_key(|fault| fault.0);
    all
}

/// Waits until so many deliveries are acknowledged. Returns `false` if the load ends before.
async fn reached(load: &Load, client: usize, at: u64) -> bool {
    load.due[client].store(at, Ordering::Relaxed);
    while load.acknowledged() < at {
        if load.has_ended() {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // The load goes on during the fault.
    load.due[client].store(u64::MAX, Ordering::Relaxed);
    true
}

/// Kills receivers, until the list or the load ends.
pub(crate) async fn kill_receivers(
    load: &Load,
    receivers: &Receivers,
    kills: Vec<(u64, usize)>,
) -> Result<(), String> {
    for (at, place) in kills {
        if !reached(load, 1 - STORE, at).await {
            break;
        }
        receivers.kill(place).await?;
    }
    load.due[1 - STORE].store(u64::MAX, Ordering::Relaxed);
    Ok(())
}

/// Does these things to the store, until the list or the load ends. Returns the store.
pub(crate) async fn inflict(
    load: Arc<Load>,
    mut store: Store,
    faults: Vec<(u64, Kind)>,
    log: Log,
) -> Store {
    for (at, kind) in faults {
        if !reached(&load, STORE, at).await {
            break;
        }
        let (from, turn) = (now(), log.faults().count(kind));
        // Without an end until the fault has ended, so that the verdict sees it if the row stops now.
        log.faults().store.push((kind, Window(from, u64::MAX)));
        store.inflict(kind, turn).await;
        let silent = if kind == Kind::Silence { SILENT.as_secs() * 1_000 } else { 0 };
        if let Some(fault) = log.faults().store.last_mut() {
            fault.1.1 = now() + silent;
        }
    }
    load.due[STORE].store(u64::MAX, Ordering::Relaxed);
    store
}
