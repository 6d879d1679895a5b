//! Claims on Postgres beside 10,000,000 live rows: the cost of a large index.
//!
//! `cargo bench --bench postgres_10m` takes about five minutes, most of them to fill the table, and
//! 4 GB of disk while it runs. `--quick` skips it. It measures three sides in turn. On the
//! large table: the adapter, and one statement per call. On a table of 10,000 rows: the adapter.
//!
//! Under `cargo test` it does nothing, because `postgres` tests all of its parts.

use std::time::Instant;

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, Ours, callers};
use shared::database::{Database, FEW, assert_found, fill};
use shared::goals::grouped;
use shared::one_by_one::{self, OneByOne};
use shared::ratios::{heading, report, skipped};
use shared::rounds::{Load, in_turn, load, median};
use shared::run::{Length, Run, runtime};
use sqlx::Executor;

const ROWS: u64 = 10_000_000;
const CALLERS: usize = 64;
const NAMES: [&str; 2] = ["pg_10m_64", "pg_10m_hold"];

fn main() {
    let run = Run::from_args();
    if run.is_test() || !run.wants(&NAMES) {
        return;
    }
    heading(&run, "claims of new keys beside 10,000,000 live rows, 64 callers");
    if run.length == Length::Quick {
        for name in NAMES {
            skipped(name, "with --quick, because filling the table takes minutes");
        }
        return;
    }
    let database = Database::start();
    let rounds = runtime().block_on(measure(&run, &database));

    let [large, one_by_one, small] =
        [0, 1, 2].map(|side| grouped(median(rounds.iter().map(|round| round[side].per_second))));
    let over_one_by_one: Vec<f64> = rounds
        .iter()
        .map(|[large, one_by_one, _]| large.per_second / one_by_one.per_second)
        .collect();
    let over_small: Vec<f64> =
        rounds.iter().map(|[large, _, small]| large.per_second / small.per_second).collect();
    report(&run, NAMES[0], &over_one_by_one, &format!("{large} over {one_by_one} a second"));
    report(&run, NAMES[1], &over_small, &format!("{large} over {small} a second"));
}

async fn measure(run: &Run, database: &Database) -> Vec<[Load; 3]> {
    let (large_schema, large) = database.adapter().await;
    let (small_schema, small) = database.adapter().await;
    let one_by_one = one_by_one::pool(&large_schema.url()).await;
    let small_pool = one_by_one::pool(&small_schema.url()).await;

    let start = Instant::now();
    fill(&one_by_one, ROWS).await;
    // The claims must not wait for dirty pages of the fill.
    one_by_one.execute("CHECKPOINT").await.expect("a checkpoint");
    let bytes: i64 = sqlx::query_scalar("SELECT pg_total_relation_size('webhook_deliveries')")
        .fetch_one(&one_by_one)
        .await
        .expect("a size");
    println!("filled in {:.0} s: {} MB", start.elapsed().as_secs_f64(), bytes / 1_000_000);
    let (large, small) = (Ours(large), Ours(small));
    assert_found(&large, ROWS).await;

    in_turn(run, async |which| match which {
        0 => load(callers(CALLERS, Claims(large.clone())), run.time()).await,
        1 => load(callers(CALLERS, Claims(OneByOne(one_by_one.clone()))), run.time()).await,
        _ => {
            fill(&small_pool, FEW).await;
            load(callers(CALLERS, Claims(small.clone())), run.time()).await
        }
    })
    .await
}
