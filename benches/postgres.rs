//! Postgres: the adapter over one statement a call, on one server, with durable commits.
//!
//! `cargo bench --bench postgres`, about six minutes, or one with `--quick`. It starts a server of
//! its own, and needs 2 GB of disk while it runs. Both sides have a table of the same layout in a
//! schema of their own, which holds 10,000 rows again before every measurement.
//!
//! Under `cargo test` it asks the memory adapter, and starts no server.

use std::sync::Arc;
use std::time::Duration;

use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    CallTerms, Claimed, DedupAdapter, MemoryAdapter, PostgresAdapter, Token,
};

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{Claims, Duplicates, Events, NAMESPACE, Ours, Store, callers, old_id};
use shared::database::{Database, FEW, Schema, fill};
use shared::goals::grouped;
use shared::one_by_one::{self, OneByOne};
use shared::ratios::{begin, tell};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};
use sqlx::PgPool;

fn main() {
    let run = Run::from_args();
    if run.is_test() {
        return runtime().block_on(test(&run));
    }
    let claims: &[(&[&str], usize)] = &[
        (&["pg_claim_1_p50"], 1),
        (&["pg_claim_64", "pg_claim_64_p50"], 64),
        (&["pg_claim_256"], 256),
    ];
    let others = ["pg_event_64", "pg_duplicates_64"];
    if !claims.iter().any(|(names, _)| run.wants(names)) && !run.wants(&others) {
        return;
    }
    let database = Database::start();
    runtime().block_on(async {
        let sides = Sides::new(&database).await;
        for (names, count) in claims {
            if run.wants(names) {
                let rounds =
                    sides.measure(&run, *count, Claims(sides.ours()), Claims(sides.theirs()));
                tell_claims(&run, names, *count, &rounds.await);
            }
        }
        if run.wants(&["pg_event_64"]) {
            let rounds =
                sides.measure(&run, 64, Events(sides.ours()), Events(sides.theirs())).await;
            begin(&run, "claim and completion, over two statements an event, 64 callers");
            tell(&run, "pg_event_64", &over(&rounds), &rates(&rounds));
        }
        if run.wants(&["pg_duplicates_64"]) {
            let ours = Duplicates { store: sides.ours(), keys: FEW };
            let theirs = Duplicates { store: sides.theirs(), keys: FEW };
            let rounds = sides.measure(&run, 64, ours, theirs).await;
            begin(&run, "duplicates, over INSERT … ON CONFLICT DO NOTHING, 64 callers");
            tell(&run, "pg_duplicates_64", &over(&rounds), &rates(&rounds));
        }
    });
}

/// Ours and the baseline, each with a table.
struct Sides {
    adapter: PostgresAdapter,
    one_by_one: PgPool,
    /// To the adapter's table.
    beside: PgPool,
    _schemas: [Schema; 2],
}

impl Sides {
    async fn new(database: &Database) -> Self {
        let (schema, adapter) = database.adapter().await;
        let (baseline, _) = database.adapter().await;
        Self {
            adapter,
            one_by_one: one_by_one::pool(&baseline.url()).await,
            beside: one_by_one::pool(&schema.url()).await,
            _schemas: [schema, baseline],
        }
    }

    fn ours(&self) -> Ours<PostgresAdapter> {
        Ours(self.adapter.clone())
    }

    fn theirs(&self) -> OneByOne {
        OneByOne(self.one_by_one.clone())
    }

    async fn measure<A, B>(&self, run: &Run, count: usize, ours: A, theirs: B) -> Vec<[Load; 2]>
    where
        A: Caller + Clone,
        B: Caller + Clone,
    {
        in_turn(run, async |which| {
            if which == 0 {
                fill(&self.beside, FEW).await;
                load(callers(count, ours.clone()), run.time()).await
            } else {
                fill(&self.one_by_one, FEW).await;
                load(callers(count, theirs.clone()), run.time()).await
            }
        })
        .await
    }
}

fn tell_claims(run: &Run, names: &[&str], count: usize, rounds: &[[Load; 2]]) {
    let of = if count == 1 { "one caller".to_owned() } else { format!("{count} callers") };
    begin(run, &format!("claims of new keys, over one statement a call, {of}"));
    for name in names {
        if name.ends_with("_p50") {
            let latencies: Vec<f64> = rounds
                .iter()
                .map(|[ours, theirs]| ours.p50.as_secs_f64() / theirs.p50.as_secs_f64())
                .collect();
            let [ours, theirs] = middle(rounds, |load| load.p50.as_secs_f64() * 1e6);
            tell(run, name, &latencies, &format!("{ours:.0} µs over {theirs:.0} µs"));
        } else {
            tell(run, name, &over(rounds), &rates(rounds));
        }
    }
}

fn over(rounds: &[[Load; 2]]) -> Vec<f64> {
    rounds.iter().map(|[ours, theirs]| ours.per_second / theirs.per_second).collect()
}

fn rates(rounds: &[[Load; 2]]) -> String {
    let [ours, theirs] = middle(rounds, |load| load.per_second);
    format!("{} over {} a second", grouped(ours), grouped(theirs))
}

fn middle(rounds: &[[Load; 2]], of: impl Fn(&Load) -> f64) -> [f64; 2] {
    [0, 1].map(|side| median(rounds.iter().map(|round| of(&round[side]))))
}

/// One tiny round of everything, over the memory adapter on both sides.
async fn test(run: &Run) {
    shared::run::check();
    shared::goals::check();
    shared::ratios::check();
    shared::rounds::check(run).await;

    let memory = Arc::new(MemoryAdapter::with_capacity(1_000_000));
    for number in 1..=10 {
        let key = DedupKey::new(NAMESPACE, &old_id(number)).expect("a key");
        let recorded = memory
            .claim(&[key], &CallTerms::on_claim(Token::random(), Duration::from_secs(3_600)))
            .await;
        assert_eq!(recorded.expect("a record"), [Claimed::first(1, false)]);
    }
    let store = Ours(memory);
    store.duplicate(&DedupKey::new(NAMESPACE, &old_id(1)).expect("a key")).await;
    let time = run.time();
    let rounds = in_turn(run, async |which| match which {
        0 => load(callers(4, Claims(store.clone())), time).await,
        1 => load(callers(4, Events(store.clone())), time).await,
        _ => load(callers(4, Duplicates { store: store.clone(), keys: 10 }), time).await,
    })
    .await;
    for [claims, events, duplicates] in rounds {
        tell_claims(run, &["pg_claim_64", "pg_claim_64_p50"], 64, &[[claims, events]]);
        tell(run, "pg_duplicates_64", &over(&[[duplicates, claims]]), "");
    }
}
