//! Multi-event deliveries in one transaction: all events commit with their keys, or none.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::internals::{self, Begin, BeginContext, Claim};
use tower_dedup::key::{Event, Keys};
use tower_dedup::ledger::{Ledger, Transactional};
use tower_dedup::{DedupTx, TxHandle};

use crate::support::multi_event::{
    Effects, Fixture, LATE, Sql, cases, ids, insert, layers, lite_adapter, own,
};
use crate::support::{dedup_key, polled, rows, terms};

macro_rules! in_a_transaction {
    ($($case:ident),+ $(,)?) => {
        cases! {
            sqlite: sqlite_under(Transactional) = [$($case),+];
            postgres: postgres_under(Transactional) = [$($case),+];
        }
    };
}

in_a_transaction!(
    failed_delivery_leaves_each_key_as_it_was,
    savepoint_that_is_leaked_is_found,
    misuse_of_the_transaction_loses_no_connection,
    statement_dropped_half_way_is_rolled_back_with_the_rest,
    claim_that_is_dropped_keeps_nothing,
);

/// The keys are free at once, no attempt is counted, and a takeover is still reported.
async fn failed_delivery_leaves_each_key_as_it_was(fixture: Fixture) {
    let mine = terms();
    let dead = CallTerms::on_completion(Token::random(), mine.retention(), Duration::ZERO);
    for _ in 0..2 {
        fixture.store.claim(&dedup_key("released"), &mine).await.unwrap();
        fixture.store.release(&dedup_key("released"), &mine).await.unwrap();
    }
    fixture.store.claim(&dedup_key("lapsed"), &dead).await.unwrap();
    let entry = async |id| fixture.store.get(&dedup_key(id)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.send("done0 fresh released:fail lapsed").await, own(500));
        assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (3, true));
        assert_eq!(entry("fresh").await, None);
        let released = entry("released").await.unwrap();
        assert_eq!((released.state, released.attempts), (KeyState::Released, 2));
        let lapsed = entry("lapsed").await.unwrap();
        assert_eq!(lapsed.state, KeyState::Lapsed);
        assert_eq!(lapsed.attempts, 1);
    }
    assert_eq!(fixture.send("lapsed fresh").await, own(200));
    assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (2, true));
    assert_eq!(fixture.send("released done0").await, own(200));
    assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (3, false));
    assert_eq!(fixture.effects.all().await, ids("done0 fresh lapsed released"));
}

async fn savepoint_that_is_leaked_is_found(fixture: Fixture) {
    // The server session of a closed connection ends a moment later.
    let send_when_free = async |words: &str| {
        fixture.until_free().await;
        fixture.send(words).await
    };
    for words in ["x:leak a", "a x:leak", "a x:leak b", "x:leak a b", "a b x:leak c d"] {
        for _ in 0..4 {
            assert_eq!(send_when_free(words).await, layers(500, "uncommitted"), "{words}");
            assert!(fixture.effects.all().await.is_empty(), "{words}");
        }
        assert_eq!(send_when_free(&format!("{words} z:500")).await, own(500));
        assert!(fixture.effects.all().await.is_empty(), "{words}");
        assert_eq!(rows(&fixture.store).await, 0, "{words}");
    }
    assert_eq!(send_when_free("a f:fail b g:sql h:sql c").await, own(500));
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!(fixture.effects.all().await, ids("a b c"));
}

async fn misuse_of_the_transaction_loses_no_connection(fixture: Fixture) {
    for round in 0..6 {
        for (n, ways) in
            ["leak", "rollback", "rollback r:begin", "hang", "abort", "panic", "swallow"]
                .iter()
                .enumerate()
        {
            let impatient = if *ways == "hang" { "impatient!" } else { "" };
            fixture.send(&format!("{round}a{n} {round}b{n}:{ways} {impatient}")).await;
        }
        assert_eq!(fixture.send(&format!("{round}")).await, own(200), "after {round} rounds");
    }
    // All connections of the pool work, and none is inside a transaction.
    for answer in join_all(["x", "y", "z"].map(|id| fixture.send(id))).await {
        assert_eq!(answer, own(200));
    }
}

/// A delivery at the ledger's own interface.
struct Held<DB: Sql> {
    claim: <Transactional<DB> as Ledger>::Claim,
    tx: DedupTx<DB>,
}

impl<DB: Sql> Held<DB> {
    async fn of(ledger: &Arc<Transactional<DB>>, ids: &[&str]) -> Self {
        let keys = ids.iter().map(|id| Event::new(dedup_key(id))).collect();
        let context = BeginContext::new(LATE, LATE, LATE);
        let begun = ledger.begin(&Keys::new(keys).unwrap(), &context).await;
        let Ok(Begin::First { claim, .. }) = begun else { panic!("{begun:?}") };
        let mut extensions = http::Extensions::new();
        claim.attach(&mut extensions);
        let tx = extensions.get::<TxHandle<DB>>().unwrap().lend().await.unwrap();
        Self { claim, tx }
    }

    async fn effect(&mut self, id: &str) {
        DB::run(&mut self.tx, insert([id])).await.unwrap();
    }
}

/// Expands for the ledger of either database.
macro_rules! with_ledger {
    ($fixture:ident, $case:ident $(, $more:expr)*) => {
        match &$fixture.effects {
            Effects::Pg(pool) => {
                let adapter = PostgresAdapter::new(pool.clone());
                $case(&$fixture, &internals::transactional(adapter) $(, $more)*).await
            }
            Effects::Lite(pool) => {
                let adapter = lite_adapter(pool.clone());
                $case(&$fixture, &internals::transactional(adapter) $(, $more)*).await
            }
            Effects::Log(_) => unreachable!("no database"),
        }
    };
}

/// A handler is dropped during a statement that then fails. sqlx returns the error of that
/// statement to the next one.
async fn statement_dropped_half_way_is_rolled_back_with_the_rest(fixture: Fixture) {
    for statements in 0..3 {
        with_ledger!(fixture, hasty, statements);
        let words = format!("a{statements} b{statements}");
        assert_eq!(fixture.send(&words).await, own(200));
        assert_eq!(fixture.news(), ids(&words));
    }
    assert_eq!(fixture.effects.all().await, ids("a0 a1 a2 b0 b1 b2"));
}

async fn hasty<DB: Sql>(_: &Fixture, ledger: &Arc<Transactional<DB>>, statements: usize) {
    let (one, other) = (format!("a{statements}"), format!("b{statements}"));
    let mut held = Held::of(ledger, &[&one, &other]).await;
    held.effect(&one).await;
    for _ in 0..statements {
        let wrong = DB::run(&mut held.tx, "SELECT nonsense".to_owned());
        let _ = polled(wrong, 1, false).await;
    }
    drop(held.tx);
    held.claim.rollback().await.unwrap();
}

async fn claim_that_is_dropped_keeps_nothing(fixture: Fixture) {
    with_ledger!(fixture, dropped);
    // The delivery's end runs in a task of its own.
    fixture.until_free().await;
    fixture.send_until_done("a b").await;
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a b"), ids("a b")));
}

async fn dropped<DB: Sql>(_: &Fixture, ledger: &Arc<Transactional<DB>>) {
    let mut held = Held::of(ledger, &["a", "b"]).await;
    held.effect("a").await;
    held.effect("b").await;
    drop(held.tx);
    drop(held.claim);
}
