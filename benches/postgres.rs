//! The Postgres adapter against one statement per call, on one server, with durable commits.
//!
//! `cargo bench --bench postgres` takes about five minutes, or one with `--quick`. It starts its own
//! server. Each side has a table of the same layout in its own schema. Before every measurement, the table is filled
//! with 10,000 rows. Each side has 64 callers.
//!
//! Under `cargo test`, it calls the memory adapter and starts no server.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{PgConnection, PgPool};
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter};
use tower_dedup::ledger::Transactional;
use tower_dedup::{DedupKey, Deduplicator, RunOutcome};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{
    Claims, Duplicates, Events, NAMESPACE, Ours, Store, fresh_id, fresh_key, old_id, terms,
};
use shared::compare::{Bed, compare, report_server};
use shared::database::{Database, FEW, Schema, fill};
use shared::goals::grouped;
use shared::one_by_one::{self, OneByOne};
use shared::ratios::report;
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};

const HELD: &str = "pg_held_64";
const TRANSACTIONS: [&str; 2] = ["pg_transactional_64", "pg_transactional_server"];

fn main() {
    let run = Run::from_args();
    if run.is_test() {
        return runtime().block_on(test(&run));
    }
    let rates = ["pg_claim_64", "pg_event_64", "pg_duplicates_64"];
    if !run.wants(&rates) && !run.wants(&[HELD]) && !run.wants(&TRANSACTIONS) {
        return;
    }
    let database = Database::start();
    runtime().block_on(async {
        let sides = Sides::new(&database).await;
        let (ours, baseline) = (Ours(sides.adapter.clone()), OneByOne(sides.pools[1].clone()));
        compare_calls(&run, &sides, rates, ours, baseline).await;
        sides.beside_held_rows(&run).await;
        sides.transactions(&run).await;
    });
}

/// Compares claims of new keys, events and duplicates.
async fn compare_calls(
    run: &Run,
    bed: &impl Bed,
    [claim, event, duplicate]: [&str; 3],
    ours: impl Store,
    baseline: impl Store,
) {
    compare(run, bed, claim, Claims(ours.clone()), Claims(baseline.clone())).await;
    compare(run, bed, event, Events(ours.clone()), Events(baseline.clone())).await;
    let ours = Duplicates { store: ours, keys: FEW };
    compare(run, bed, duplicate, ours, Duplicates { store: baseline, keys: FEW }).await;
}

/// The adapter and the baseline, each with its own table.
struct Sides<'a> {
    database: &'a Database,
    adapter: PostgresAdapter,
    /// For the table of the adapter, and for that of the baseline.
    pools: [PgPool; 2],
    _schemas: [Schema; 2],
}

impl Bed for Sides<'_> {
    async fn reset(&self, side: usize) {
        fill(&self.pools[side], FEW).await;
    }

    async fn cpu(&self) -> Option<Duration> {
        self.database.cpu()
    }
}

impl<'a> Sides<'a> {
    async fn new(database: &'a Database) -> Self {
        let (schema, adapter) = database.adapter().await;
        let (baseline, _) = database.adapter().await;
        let pools =
            [one_by_one::pool(&schema.url()).await, one_by_one::pool(&baseline.url()).await];
        Self { database, adapter, pools, _schemas: [schema, baseline] }
    }

    /// Measures claims beside eight leased rows, which an open transaction holds or not.
    async fn beside_held_rows(&self, run: &Run) {
        if !run.wants(&[HELD]) {
            return;
        }
        let rounds: Vec<[Load; 2]> = in_turn(run, async |side| {
            self.reset(0).await;
            let keys: Vec<_> = (0..8).map(|_| fresh_key()).collect();
            for key in &keys {
                Ours(self.adapter.clone()).claim(key, Token::random()).await;
            }
            let mut holder = self.pools[0].begin().await.expect("a transaction");
            if side == 0 {
                let hold = "UPDATE webhook_deliveries SET version = version + 1 \
                            WHERE completed_at IS NULL";
                sqlx::query(hold).execute(&mut *holder).await.expect("rows");
            }
            let caller = |leased| BesideHeld { adapter: self.adapter.clone(), leased };
            let leased = keys.into_iter().map(Some).map(caller);
            let load = load(vec![caller(None); 64].into_iter().chain(leased), run.time()).await;
            holder.rollback().await.expect("a rollback");
            load
        })
        .await;
        let ratios: Vec<_> =
            rounds.iter().map(|[held, free]| held.per_second / free.per_second).collect();
        let rate = |side: usize| grouped(median(rounds.iter().map(|it| it[side].per_second)));
        report(run, HELD, &ratios, &format!("{} over {} a second", rate(0), rate(1)));
    }

    /// Measures events whose handler writes one row, in a transaction that completes the event, against a table of
    /// seen ids by hand. Both sides have a pool of the same size for it.
    async fn transactions(&self, run: &Run) {
        if !run.wants(&TRANSACTIONS) {
            return;
        }
        for pool in &self.pools {
            let tables = "CREATE TABLE effects (id text NOT NULL, amount int8); CREATE TABLE seen \
                          (provider text, id text, at timestamptz DEFAULT now(), PRIMARY KEY (provider, id))";
            sqlx::raw_sql(tables).execute(pool).await.expect("tables");
        }
        let worker = Arc::new(Deduplicator::transactional(self.adapter.clone()));
        let ours = InTransactions { worker, pool: self.pools[0].clone() };
        let by_hand = ByHand(self.pools[1].clone());
        let rounds = compare(run, self, TRANSACTIONS[0], ours, by_hand).await;
        report_server(run, TRANSACTIONS[1], &rounds);
    }
}

/// A caller that claims new keys, or one leased key.
#[derive(Clone)]
struct BesideHeld {
    adapter: PostgresAdapter,
    leased: Option<DedupKey>,
}

impl Caller for BesideHeld {
    async fn call(&mut self) {
        let Some(key) = &self.leased else {
            return Ours(self.adapter.clone()).claim(&fresh_key(), Token::random()).await;
        };
        let claimed = self.adapter.claim(key, &terms(Token::random())).await;
        assert_eq!(claimed.expect("a claim"), ClaimReply::InFlight);
    }
}

async fn write(connection: &mut PgConnection, id: &str) -> sqlx::Result<()> {
    let insert = sqlx::query("INSERT INTO effects VALUES ($1, 42)").bind(id.to_owned());
    insert.execute(connection).await.map(drop)
}

/// A caller whose handler writes in a transaction that completes its event.
#[derive(Clone)]
struct InTransactions {
    worker: Arc<Deduplicator<Transactional>>,
    pool: PgPool,
}

impl Caller for InTransactions {
    async fn call(&mut self) {
        let key = fresh_key();
        let ran = self.worker.run(&key, async |event| {
            let mut tx = event.begin(&self.pool).await?;
            write(&mut tx, event.id()).await?;
            tx.commit().await
        });
        assert_eq!(ran.await.expect("a commit"), RunOutcome::First(()));
    }
}

/// A caller that does the same without this crate, as textbooks do.
#[derive(Clone)]
struct ByHand(PgPool);

impl Caller for ByHand {
    async fn call(&mut self) {
        let (id, mut tx) = (fresh_id(), self.0.begin().await.expect("a transaction"));
        let seen = "INSERT INTO seen (provider, id) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        let seen = sqlx::query(seen).bind(NAMESPACE).bind(&id).execute(&mut *tx).await;
        assert_eq!(seen.expect("an insert").rows_affected(), 1);
        write(&mut tx, &id).await.expect("an insert");
        tx.commit().await.expect("a commit");
    }
}

/// The memory adapter on both sides.
struct InMemory(Arc<MemoryAdapter>);

impl Bed for InMemory {
    async fn reset(&self, _: usize) {
        let terms = CallTerms::on_claim(Token::random(), Duration::from_secs(3_600));
        for number in 1..=FEW {
            let key = DedupKey::new(NAMESPACE, &old_id(number)).expect("a key");
            self.0.claim(&key, &terms).await.expect("a claim");
        }
    }

    async fn cpu(&self) -> Option<Duration> {
        Some(shared::usage::own_cpu())
    }
}

/// Checks what the benches share, and runs one short round.
async fn test(run: &Run) {
    shared::run::check();
    shared::goals::check();
    shared::ratios::check();
    shared::rounds::check(run).await;
    shared::usage::check();
    let memory = Arc::new(MemoryAdapter::with_capacity(1_000_000));
    let (bed, store) = (InMemory(Arc::clone(&memory)), Ours(memory));
    compare_calls(run, &bed, ["pg_claim_64"; 3], store.clone(), store.clone()).await;
    let rounds = compare(run, &bed, TRANSACTIONS[0], Claims(store.clone()), Claims(store)).await;
    report_server(run, TRANSACTIONS[1], &rounds);
}
