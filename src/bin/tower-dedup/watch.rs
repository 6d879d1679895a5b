//! `watch`: a live table on a terminal, and a line for each round elsewhere.

use std::env;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tower_dedup::adapter::Stats;
use tower_dedup::sqlx;

use crate::failure::{Failure, UNAVAILABLE};
use crate::output::{Output, span, table, utc};
use crate::store::{Access, Store, Target};
use crate::table::{StatsView, stats_text};

/// Moves the cursor to the first line, and deletes what is below it.
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

/// The rows that a Postgres table counts, since its statistics began.
#[derive(Clone, Copy)]
struct Counts {
    at: Instant,
    inserted: i64,
    updated: i64,
    deleted: i64,
}

/// Rows a second. The server publishes its counts up to a second late.
#[derive(Serialize)]
struct Rates {
    /// Keys that were claimed for the first time.
    inserts: f64,
    /// Completions, renewals, releases and takeovers.
    updates: f64,
    /// Keys that were purged or forgotten.
    deletes: f64,
}

#[derive(Serialize)]
struct Round {
    at: String,
    #[serde(flatten)]
    stats: StatsView,
    /// `None` in the first round, and on SQLite.
    rates_per_second: Option<Rates>,
}

/// Watches until the process is ended. A store that is away is shown, and watched on.
pub(crate) async fn watch(
    target: &Target,
    once: bool,
    every: Duration,
    output: Output,
) -> Result<bool, Failure> {
    let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    let is_live = !once && !output.json && io::stdout().is_terminal() && !is_dumb;
    let mut store = Some(target.open(Access::Read).await?);
    let mut last = None;
    loop {
        let read = read(target, &mut store).await;
        match read {
            Ok((stats, counts)) => {
                let rates = rates(last, counts);
                last = counts;
                show(&stats, rates, is_live, output, target)?;
            }
            Err(failure) if once || failure.code != UNAVAILABLE => return Err(failure),
            Err(failure) if output.json => output.failure(&failure),
            Err(failure) => {
                let clear = if is_live { CLEAR } else { "" };
                let now = utc(SystemTime::now());
                writeln!(io::stdout(), "{clear}{now}  unavailable: {}", failure.message)?;
            }
        }
        if once {
            return Ok(true);
        }
        tokio::time::sleep(every).await;
    }
}

/// Reads one round. Opens the store again if the last round failed.
async fn read(
    target: &Target,
    store: &mut Option<Store>,
) -> Result<(Stats, Option<Counts>), Failure> {
    let open = match store.take() {
        Some(open) => open,
        None => target.open(Access::Read).await?,
    };
    let stats = open.adapter.stats().await;
    let counts = match &stats {
        Ok(_) => open.within(counts(&open)).await,
        Err(_) => Ok(None),
    };
    let read = stats.map_err(Failure::from).and_then(|stats| Ok((stats, counts?)));
    if read.is_ok() {
        *store = Some(open);
    }
    read
}

async fn counts(store: &Store) -> Result<Option<Counts>, Failure> {
    let Some((pool, table)) = store.postgres() else { return Ok(None) };
    let counts = sqlx::query_as(include_str!("sql/watch.sql")).bind(table.oid);
    let (inserted, updated, deleted) = counts.fetch_one(pool).await?;
    Ok(Some(Counts { at: Instant::now(), inserted, updated, deleted }))
}

fn rates(last: Option<Counts>, now: Option<Counts>) -> Option<Rates> {
    let (last, now) = (last?, now?);
    let seconds = now.at.duration_since(last.at).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a rate for the eye")]
    // A reset of the statistics lets the counts begin again.
    let rate = |last: i64, now: i64| ((now - last).max(0) as f64 / seconds * 10.0).round() / 10.0;
    Some(Rates {
        inserts: rate(last.inserted, now.inserted),
        updates: rate(last.updated, now.updated),
        deletes: rate(last.deleted, now.deleted),
    })
}

fn show(
    stats: &Stats,
    rates: Option<Rates>,
    is_live: bool,
    output: Output,
    target: &Target,
) -> Result<(), Failure> {
    let at = utc(SystemTime::now());
    if !is_live {
        let line = line(stats, rates.as_ref(), &at);
        let round = Round { at, stats: stats.into(), rates_per_second: rates };
        return output.stream(&round, || line);
    }
    let rates = rates.map(|rates| {
        let rows = [
            ("new keys", rates.inserts),
            ("completed, renewed or released", rates.updates),
            ("purged or forgotten", rates.deletes),
        ];
        table(rows.map(|(name, rate)| vec![name.to_owned(), format!("{rate:.1}/s")]))
    });
    let rates = rates.map(|rates| format!("\n\n{rates}")).unwrap_or_default();
    let (name, stats) = (target.table_name(), stats_text(stats));
    let text = format!("{CLEAR}{name}  {at}\n\n{stats}{rates}\n\nCtrl-C ends");
    writeln!(io::stdout(), "{text}")?;
    Ok(io::stdout().flush()?)
}

fn line(stats: &Stats, rates: Option<&Rates>, at: &str) -> String {
    let oldest = |time: Option<Duration>| {
        time.map(|time| format!(" (oldest {})", span(time))).unwrap_or_default()
    };
    let rates = rates.map(|rates| {
        let Rates { inserts, updates, deletes } = rates;
        format!("; new {inserts:.1}/s, updated {updates:.1}/s, deleted {deletes:.1}/s")
    });
    format!(
        "{at}  {}keys {}, in flight {}{}, lapsed {}{}, failed {}, complete {}, expired {}{}{}",
        if stats.is_exact { "" } else { "about: " },
        stats.rows,
        stats.in_flight,
        oldest(stats.oldest_in_flight),
        stats.lapsed,
        oldest(stats.oldest_lapsed),
        stats.released,
        stats.complete,
        stats.expired,
        oldest(stats.oldest_expired),
        rates.unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_never_negative() {
        let at = Instant::now();
        let before = Counts { at, inserted: 100, updated: 50, deleted: 10 };
        let after =
            Counts { at: at + Duration::from_secs(2), inserted: 120, updated: 51, deleted: 0 };
        let rates = rates(Some(before), Some(after)).unwrap();
        assert_eq!((rates.inserts, rates.updates, rates.deletes), (10.0, 0.5, 0.0));
        assert!(super::rates(None, Some(after)).is_none());
    }
}
