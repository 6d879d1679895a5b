//! The Postgres adapter against one statement per call, on one server, with durable commits.
//!
//! `cargo bench --bench postgres` takes about eight minutes, or two with `--quick`. It starts its own
//! server, and needs 2 GB of disk while it runs. Each side has a table of the same layout in its own
//! schema. Before every measurement, the table is filled with 10,000 rows.
//!
//! Beside each rate stand the CPU time of the server and of this process, and the WAL, for each call.
//! Claims are also measured against the server's own limit (`measure/limit.rs`), in the same rounds.
//!
//! Under `cargo test`, it calls the memory adapter and starts no server.

use std::sync::Arc;
use std::time::Duration;

use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Token};
use tower_dedup::adapter::{MemoryAdapter, PostgresAdapter};
use tower_dedup::ledger::Transactional;
use tower_dedup::{DedupKey, Deduplicator, RunOutcome};

#[path = "measure/limit.rs"]
mod limit;
#[path = "shared/mod.rs"]
mod shared;

use limit::Limit;
use shared::calls::{
    Claims, Duplicates, Events, NAMESPACE, Ours, Store, callers, fresh_id, fresh_key, old_id, terms,
};
use shared::database::{Database, FEW, Schema, fill};
use shared::disk::SyncTime;
use shared::goals::grouped;
use shared::one_by_one::{self, OneByOne};
use shared::ratios::{heading, report, skipped};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};
use shared::usage::{Cost, Usage, own_cpu};
use sqlx::{PgConnection, PgPool};

const CLAIMS_1: &[&str] = &["pg_claim_1_p50"];
const CLAIMS_64: &[&str] = &[
    "pg_claim_64",
    "pg_claim_64_p50",
    "pg_claim_64_of_limit",
    "pg_claim_server_us",
    "pg_claim_client_us",
    "pg_claim_wal_bytes",
    "sync_us",
];
const CLAIMS_256: &[&str] = &["pg_claim_256", "pg_claim_256_of_limit"];
const EVENTS: &[&str] =
    &["pg_event_64", "pg_event_server_us", "pg_event_client_us", "pg_event_wal_bytes"];
const HELD: &[&str] = &["pg_held_64"];
const TRANSACTIONS: &[&str] = &["pg_transactional_64", "pg_transactional_server"];
const DUPLICATES: &[&str] = &[
    "pg_duplicates_64",
    "pg_duplicate_server_us",
    "pg_duplicate_client_us",
    "pg_duplicate_wal_bytes",
];

fn main() {
    let run = Run::from_args();
    if run.is_test() {
        return runtime().block_on(test(&run));
    }
    let all = [CLAIMS_1, CLAIMS_64, CLAIMS_256, HELD, EVENTS, TRANSACTIONS, DUPLICATES];
    if !all.into_iter().any(|names| run.wants(names)) {
        return;
    }
    let database = Database::start();
    runtime().block_on(async {
        let sides = Sides::new(&run, &database).await;
        for (names, count) in [(CLAIMS_1, 1), (CLAIMS_64, 64), (CLAIMS_256, 256)] {
            let (ours, baseline) = (Claims(sides.ours()), Claims(sides.baseline()));
            sides.compare(names, count, "claims of new keys", ours, baseline).await;
        }
        sides.beside_held_rows().await;
        let what = "claim and completion, over two statements an event";
        let (ours, baseline) = (Events(sides.ours()), Events(sides.baseline()));
        sides.compare(EVENTS, 64, what, ours, baseline).await;
        sides.transactions().await;
        let what = "duplicates, over INSERT … ON CONFLICT DO NOTHING";
        let ours = Duplicates { store: sides.ours(), keys: FEW };
        let baseline = Duplicates { store: sides.baseline(), keys: FEW };
        sides.compare(DUPLICATES, 64, what, ours, baseline).await;
    });
}

/// The adapter and the baseline, each with its own table.
struct Sides<'a> {
    run: &'a Run,
    database: &'a Database,
    adapter: PostgresAdapter,
    one_by_one: PgPool,
    /// Fills the adapter's table.
    filler: PgPool,
    schemas: [Schema; 2],
}

/// The result of one measurement.
struct Measured {
    load: Load,
    cost: Cost,
    /// The sync time just before.
    sync: Option<SyncTime>,
}

/// The adapter, the baseline, and the limit if it was measured.
type Round = Vec<Measured>;

impl<'a> Sides<'a> {
    async fn new(run: &'a Run, database: &'a Database) -> Self {
        let (schema, adapter) = database.adapter().await;
        let (baseline, _) = database.adapter().await;
        Self {
            run,
            database,
            adapter,
            one_by_one: one_by_one::pool(&baseline.url()).await,
            filler: one_by_one::pool(&schema.url()).await,
            schemas: [schema, baseline],
        }
    }

    fn ours(&self) -> Ours<PostgresAdapter> {
        Ours(self.adapter.clone())
    }

    fn baseline(&self) -> OneByOne {
        OneByOne(self.one_by_one.clone())
    }

    /// Measures the sides in turn, and reports these figures if any of them is selected.
    async fn compare<A, B>(&self, names: &[&str], count: usize, what: &str, ours: A, baseline: B)
    where
        A: Caller + Clone,
        B: Caller + Clone,
    {
        if !self.run.wants(names) {
            return;
        }
        let mut limit = None;
        if let Some(name) = names.iter().find(|name| name.ends_with("_of_limit")) {
            let (schema, time) = (&self.schemas[0], self.run.time());
            limit = Limit::new(self.database, schema, &self.adapter, &self.filler, count, time)
                .await
                .inspect_err(|why| skipped(name, why))
                .ok();
        }
        let sides = async |which| match (which, &limit) {
            (0, _) => {
                let load = || load(callers(count, ours.clone()), self.run.time());
                self.measure(&self.filler, load).await
            }
            (1, _) => {
                let load = || load(callers(count, baseline.clone()), self.run.time());
                self.measure(&self.one_by_one, load).await
            }
            (_, limit) => {
                let limit = limit.as_ref().expect("a limit");
                self.measure(&self.filler, || limit.load()).await
            }
        };
        let rounds: Vec<Round> = if limit.is_some() {
            in_turn::<_, 3>(self.run, sides).await.into_iter().map(Vec::from).collect()
        } else {
            in_turn::<_, 2>(self.run, sides).await.into_iter().map(Vec::from).collect()
        };
        let callers = if count == 1 { "one caller".to_owned() } else { format!("{count} callers") };
        heading(self.run, &format!("{what}, {callers}"));
        if let Some(Limit { batch, .. }) = limit {
            println!("the limit: batches of {batch} keys");
        }
        for name in names {
            report_one(self.run, name, &rounds);
        }
    }

    /// Measures claims beside eight leased rows, which an open transaction holds or not.
    async fn beside_held_rows(&self) {
        if !self.run.wants(HELD) {
            return;
        }
        let rounds = in_turn::<_, 2>(self.run, async |which| {
            let load = async || {
                let keys: Vec<_> = (0..8).map(|_| fresh_key()).collect();
                for key in &keys {
                    self.ours().claim(key, Token::random()).await;
                }
                let mut holder = self.filler.begin().await.expect("a transaction");
                if which == 0 {
                    let hold = "UPDATE webhook_deliveries SET version = version + 1 \
                                WHERE completed_at IS NULL";
                    sqlx::query(hold).execute(&mut *holder).await.expect("rows");
                }
                let caller = |leased| BesideHeld { adapter: self.adapter.clone(), leased };
                let all = callers(64, caller(None)).chain(keys.into_iter().map(Some).map(caller));
                let load = load(all, self.run.time()).await;
                holder.rollback().await.expect("a rollback");
                load
            };
            self.measure(&self.filler, load).await
        });
        let rounds: Vec<Round> = rounds.await.into_iter().map(Vec::from).collect();
        heading(self.run, "claims of new keys beside eight held rows, 64 callers");
        report_one(self.run, HELD[0], &rounds);
    }

    /// Measures events whose handler writes one row, in a transaction that completes the event, against a table of
    /// seen ids by hand. Both sides have a pool of the same size for it.
    async fn transactions(&self) {
        if !self.run.wants(TRANSACTIONS) {
            return;
        }
        for pool in [&self.filler, &self.one_by_one] {
            let tables = "CREATE TABLE effects (id text NOT NULL, amount int8); CREATE TABLE seen \
                          (provider text, id text, at timestamptz DEFAULT now(), PRIMARY KEY (provider, id))";
            sqlx::raw_sql(tables).execute(pool).await.expect("tables");
        }
        let worker = Arc::new(Deduplicator::transactional(self.adapter.clone()));
        let ours = InTransactions { worker, pool: self.filler.clone() };
        let what = "events with one write in a transaction, over INSERT … ON CONFLICT by hand";
        self.compare(TRANSACTIONS, 64, what, ours, ByHand(self.one_by_one.clone())).await;
    }

    /// Runs a load beside 10,000 rows.
    async fn measure<F: Future<Output = Load>>(
        &self,
        pool: &PgPool,
        load: impl FnOnce() -> F,
    ) -> Measured {
        fill(pool, FEW).await;
        let sync = self.database.folder().and_then(|folder| SyncTime::measure(folder).ok());
        let before = self.database.usage(pool).await;
        let load = load().await;
        let cost = Cost::of_each(load.calls, before, self.database.usage(pool).await);
        Measured { load, cost, sync }
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

/// Reports one figure. The end of its name says which.
fn report_one(run: &Run, name: &str, rounds: &[Round]) {
    let medians = |value: &dyn Fn(&Measured) -> f64| {
        let side = |side: usize| median(rounds.iter().filter_map(|it| it.get(side)).map(value));
        [side(0), side(1), if rounds[0].len() > 2 { side(2) } else { f64::NAN }]
    };
    let ratios = |over: usize, value: &dyn Fn(&Measured) -> f64| {
        let rounds = rounds.iter().filter(|round| round.len() > over);
        rounds.map(|round| value(&round[0]) / value(&round[over])).collect::<Vec<f64>>()
    };
    let ours = |value: &dyn Fn(&Measured) -> f64| {
        rounds.iter().map(|round| value(&round[0])).collect::<Vec<f64>>()
    };
    let per_second = |it: &Measured| it.load.per_second;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let (values, note) = if name.ends_with("_p50") {
        let p50 = |it: &Measured| us(it.load.p50);
        let [ours, baseline, _] = medians(&p50);
        (ratios(1, &p50), format!("{ours:.0} µs over {baseline:.0} µs"))
    } else if name.ends_with("_of_limit") {
        let [ours, _, limit] = medians(&per_second);
        (ratios(2, &per_second), format!("{} over {} a second", grouped(ours), grouped(limit)))
    } else if name.ends_with("_server_us") {
        let server = |it: &Measured| it.cost.server_us.unwrap_or(f64::NAN);
        (ours(&server), format!("of the baseline {:.1} µs", medians(&server)[1]))
    } else if name.ends_with("_server") {
        let server = |it: &Measured| it.cost.server_us.unwrap_or(f64::NAN);
        let [ours, baseline, _] = medians(&server);
        (ratios(1, &server), format!("{ours:.1} µs over {baseline:.1} µs"))
    } else if name.ends_with("_client_us") {
        let client = |it: &Measured| it.cost.client_us;
        (ours(&client), format!("of the baseline {:.1} µs", medians(&client)[1]))
    } else if name.ends_with("_wal_bytes") {
        let wal = |it: &Measured| it.cost.wal_bytes;
        (ours(&wal), format!("of the baseline {:.0} B", medians(&wal)[1]))
    } else if name == "sync_us" {
        let of = |value: fn(&SyncTime) -> Duration| {
            let all = rounds.iter().flatten().filter_map(|it| it.sync.as_ref());
            all.map(|sync| us(value(sync))).collect::<Vec<f64>>()
        };
        let p90 = of(|sync| sync.p90);
        let p90 = if p90.is_empty() { f64::NAN } else { median(p90) };
        (of(|sync| sync.median), format!("p90 {p90:.0} µs"))
    } else {
        let [ours, baseline, _] = medians(&per_second);
        (ratios(1, &per_second), format!("{} over {} a second", grouped(ours), grouped(baseline)))
    };
    let values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
    if !values.is_empty() {
        report(run, name, &values, &note);
    } else if !name.ends_with("_of_limit") {
        skipped(name, "only on Linux, with the bench's own server");
    }
}

/// Runs one short round of every measurement, with the memory adapter on both sides.
async fn test(run: &Run) {
    shared::run::check();
    shared::goals::check();
    shared::ratios::check();
    shared::rounds::check(run).await;
    shared::disk::check();
    shared::usage::check();
    limit::check();

    let memory = Arc::new(MemoryAdapter::with_capacity(1_000_000));
    for number in 1..=10 {
        let key = DedupKey::new(NAMESPACE, &old_id(number)).expect("a key");
        let claimed = memory
            .claim(&key, &CallTerms::on_claim(Token::random(), Duration::from_secs(3_600)))
            .await;
        assert_eq!(claimed.expect("a claim"), ClaimReply::first(1, false));
    }
    let store = Ours(memory);
    store.duplicate(&DedupKey::new(NAMESPACE, &old_id(1)).expect("a key")).await;
    let time = run.time();
    let usage = Usage { client: own_cpu(), server: Some(Duration::ZERO), wal: 0 };
    let rounds = in_turn::<_, 3>(run, async |which| {
        let load = match which {
            0 => load(callers(4, Claims(store.clone())), time).await,
            1 => load(callers(4, Events(store.clone())), time).await,
            _ => load(callers(4, Duplicates { store: store.clone(), keys: 10 }), time).await,
        };
        let cost = Cost::of_each(load.calls, usage, Usage { client: own_cpu(), ..usage });
        let sync = SyncTime::measure(&std::env::temp_dir()).ok();
        Measured { load, cost, sync }
    });
    let rounds: Vec<Round> = rounds.await.into_iter().map(Vec::from).collect();
    for name in [CLAIMS_1, CLAIMS_64, CLAIMS_256, HELD, EVENTS, TRANSACTIONS, DUPLICATES].concat() {
        report_one(run, name, &rounds);
    }
}
