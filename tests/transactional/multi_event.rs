//! Multi-event deliveries in one transaction. Events that a handler marks as done are committed
//! with their keys, even if the handler fails. Other writes are rolled back.

use std::future::pending;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Connection, PgPool};
use tokio::io::{AsyncBufReadExt, BufReader};
use tower_dedup::adapter::{
    CallTerms, DedupAdapter, EntryState, MaintenanceAdapter, PostgresAdapter, Token,
};
use tower_dedup::key::{Event, Keys};
use tower_dedup::ledger::internals::{self, Begin, BeginContext, Claim, HandlerSuccess};
use tower_dedup::ledger::{Ledger, Transactional};
use tower_dedup::{DedupTx, Deduplicator, ErrorKind, RunContext, RunError, RunOutcome, TxHandle};

use crate::support::multi_event::{
    Effects, Fixture, LATE, Sql, cases, ids, insert, is_done, layers, lite_adapter, lite_pool, own,
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
    key_of_an_event_that_is_not_done_is_left_as_by_a_rollback,
    write_after_the_last_mark_is_rolled_back,
    transaction_broken_by_its_handler_keeps_the_done_events,
    transaction_ended_by_its_handler_keeps_nothing,
    savepoint_that_is_leaked_is_found_whatever_is_done,
    commit_that_fails_keeps_nothing_and_the_retry_runs,
    misuse_of_the_transaction_loses_no_connection,
    mark_done_dropped_at_any_await_keeps_both_or_neither,
    statement_dropped_half_way_does_not_undo_done_events,
    claim_that_is_dropped_keeps_the_done_events,
    deduplicator_work_that_fails_after_mark_done_is_complete,
    transaction_held_beyond_the_answer_is_rolled_back_with_its_done_events,
    process_that_is_killed_leaves_nothing_of_its_done_events,
);

/// The keys are free at once, no attempt is counted, and a takeover is still reported.
async fn key_of_an_event_that_is_not_done_is_left_as_by_a_rollback(fixture: Fixture) {
    let mine = terms();
    let dead = CallTerms::on_completion(Token::random(), mine.retention(), Duration::ZERO);
    for _ in 0..2 {
        fixture.store.claim(&[dedup_key("released")], &mine).await.unwrap();
        fixture.store.release(&[dedup_key("released")], &mine).await.unwrap();
    }
    fixture.store.claim(&[dedup_key("lapsed")], &dead).await.unwrap();
    let entry = async |id| fixture.store.get(&dedup_key(id)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.send("done0 fresh:fail released:fail lapsed:fail").await, own(500));
        assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (3, true));
        assert_eq!(entry("fresh").await, None);
        let released = entry("released").await.unwrap();
        assert_eq!((released.state, released.attempts), (EntryState::Released, 2));
        let lapsed = entry("lapsed").await.unwrap();
        assert!(matches!(lapsed.state, EntryState::InFlight { .. }), "{lapsed:?}");
        assert_eq!(lapsed.attempts, 1);
    }
    assert_eq!(fixture.send("lapsed fresh").await, own(200));
    assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (2, true));
    assert_eq!(fixture.send("released done0").await, own(200));
    assert_eq!((fixture.last().attempt(), fixture.last().is_takeover()), (3, false));
    assert_eq!(fixture.effects.all().await, ids("done0 fresh lapsed released"));
}

/// A write after the last savepoint is rolled back. A write before it is committed.
async fn write_after_the_last_mark_is_rolled_back(fixture: Fixture) {
    assert_eq!(fixture.send("a:undone b:undone c:500").await, own(500));
    assert!(fixture.effects.all().await.is_empty());
    assert_eq!(fixture.send("a b c:undone d:500").await, own(500));
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a b c d"), ids("a b")));
    assert!(
        !is_done(&fixture.last(), &dedup_key("c")) && is_done(&fixture.last(), &dedup_key("b"))
    );
    assert_eq!(fixture.send("a b c:undone d").await, own(200));
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("c d"), ids("a b c d")));
    assert_eq!(fixture.send("c").await, layers(200, "duplicate"));
}

/// On Postgres, an ignored error aborts the transaction. On SQLite, the error undoes its own
/// statement only.
async fn transaction_broken_by_its_handler_keeps_the_done_events(fixture: Fixture) {
    let aborts = matches!(fixture.effects, Effects::Pg(_));
    let answered = fixture.send("a b c:swallow").await;
    if !aborts {
        assert_eq!((answered, fixture.effects.all().await), (own(200), ids("a b c")));
        return;
    }
    assert_eq!((answered, fixture.effects.all().await), (layers(500, "uncommitted"), ids("a b")));
    assert_eq!(fixture.send("a b c").await, own(200));
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("c"), ids("a b c")));
}

/// The layer cannot undo a raw COMMIT on Postgres, but the keys are not complete.
async fn transaction_ended_by_its_handler_keeps_nothing(fixture: Fixture) {
    for words in ["a x:rollback y:begin z:500", "a x:rollback", "a x:rollback y:500"] {
        let status = fixture.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(fixture.effects.all().await.is_empty(), "{words}");
        assert_eq!(fixture.state("a").await, None, "{words}");
    }
    for words in ["a x:commit", "b w:commit y:500"] {
        let status = fixture.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(!fixture.is_complete("a").await && !fixture.is_complete("b").await);
    }
}

/// Sends a request whose keys a closed connection may still hold: its server session ends a moment later.
async fn send_when_free(fixture: &Fixture, words: &str) -> (u16, String) {
    let free = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            let reply = fixture.send(words).await;
            if reply != layers(503, "in-flight") {
                return reply;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    free.await.expect("the session of the closed connection ends")
}

async fn savepoint_that_is_leaked_is_found_whatever_is_done(fixture: Fixture) {
    for words in ["x:leak a", "a x:leak", "a x:leak b", "x:leak a b", "a b x:leak c d"] {
        for _ in 0..4 {
            assert_eq!(
                send_when_free(&fixture, words).await,
                layers(500, "uncommitted"),
                "{words}"
            );
            assert!(fixture.effects.all().await.is_empty(), "{words}");
        }
        assert_eq!(send_when_free(&fixture, &format!("{words} z:500")).await, own(500));
        assert!(fixture.effects.all().await.is_empty(), "{words}");
        assert_eq!(rows(&fixture.store).await, 0, "{words}");
    }
    // Events that are rolled back or released are not done.
    assert_eq!(send_when_free(&fixture, "a f:fail b g:sql h:sql c").await, own(500));
    assert_eq!(fixture.send("d f:undone e").await, own(200));
    assert_eq!(fixture.effects.all().await, ids("a b c d e f"));
}

/// The handler fails, so the answer is its own.
async fn commit_that_fails_keeps_nothing_and_the_retry_runs(fixture: Fixture) {
    let (bad, good) = match fixture.effects {
        Effects::Pg(_) => (
            "ALTER TABLE effects ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
            "ALTER TABLE effects DROP CONSTRAINT effects_id_key",
        ),
        // The last statement before COMMIT fails.
        _ => (
            "CREATE TRIGGER refuses BEFORE UPDATE OF completed_at ON webhook_deliveries \
             BEGIN SELECT RAISE(ROLLBACK, 'no'); END",
            "DROP TRIGGER refuses",
        ),
    };
    fixture.store.stats().await.unwrap();
    fixture.effects.run("INSERT INTO effects VALUES ('a')").await;
    fixture.effects.run(bad).await;
    assert_eq!(fixture.send("a b p:fail").await, own(500));
    assert_eq!(fixture.effects.all().await, ids("a"));
    assert_eq!(rows(&fixture.store).await, 0);
    fixture.effects.run(good).await;
    // Postgres reports the error before it releases the locks.
    fixture.send_until_done("a b p").await;
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a b p"), ids("a a b p")));
}

async fn misuse_of_the_transaction_loses_no_connection(fixture: Fixture) {
    for round in 0..6 {
        for (n, ways) in
            ["leak", "rollback", "hang", "abort", "panic", "swallow"].iter().enumerate()
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

    async fn mark_done(&mut self, id: &str) -> bool {
        self.tx.mark_done(&dedup_key(id)).await.unwrap()
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

/// `mark_done` is dropped at each of its awaits, and the handler fails at once, goes on, or
/// succeeds.
async fn mark_done_dropped_at_any_await_keeps_both_or_neither(fixture: Fixture) {
    let mut cut = 0;
    for polls in 1..6 {
        for again in [false, true] {
            for end in ["fails", "goes on", "succeeds"] {
                cut += usize::from(with_ledger!(fixture, cut_off, polls, again, end));
            }
        }
    }
    assert!(cut > 0, "no call was dropped in time");
}

async fn cut_off<DB: Sql>(
    fixture: &Fixture,
    ledger: &Arc<Transactional<DB>>,
    polls: usize,
    again: bool,
    end: &str,
) -> bool {
    let case = format!("{polls}{again}{}", end.replace(' ', ""));
    let names = ["a", "b", "c"].map(|id| format!("{id}{case}"));
    let [a, b, c] = names.each_ref().map(String::as_str);
    let mut held = Held::of(ledger, &[a, b, c]).await;
    held.effect(a).await;
    assert!(held.mark_done(a).await);
    held.effect(b).await;
    // The next statement on the connection waits for the running one.
    drop(held.tx.begin().await.unwrap());
    let cut = polled(held.tx.mark_done(&dedup_key(b)), polls, again).await.is_none();
    held.effect(c).await;
    if end == "goes on" {
        assert!(held.mark_done(c).await);
        // This effect belongs to no event, and is written after the last savepoint.
        held.effect("unmarked").await;
    }
    drop(held.tx);
    if end == "succeeds" {
        held.claim.commit(&HandlerSuccess::default()).await.unwrap();
    } else {
        held.claim.rollback().await.unwrap();
    }
    let effects = fixture.effects.all().await;
    for id in [a, b, c] {
        let times = effects.iter().filter(|effect| *effect == id).count();
        assert_eq!(times, usize::from(fixture.is_complete(id).await), "{id}");
    }
    let must = match end {
        "succeeds" => vec![a, b, c],
        // A marked event under a later savepoint is done with that savepoint.
        "goes on" if !cut => vec![a, b, c],
        "fails" if !cut => vec![a, b],
        _ => vec![],
    };
    assert!(must.iter().all(|id| effects.iter().any(|effect| effect == id)), "{case}");
    // On Postgres each savepoint is set in one step.
    let committed = effects.iter().filter(|effect| effect.ends_with(&case)).count();
    assert!(committed >= 1 || matches!(fixture.effects, Effects::Lite(_)), "{case}");
    assert_eq!(fixture.send(&names.join(" ")).await.0, 200, "{case}");
    let mut effects = fixture.effects.all().await;
    effects.retain(|effect| effect.ends_with(&case) || effect == "unmarked");
    assert_eq!(effects, names, "{case}");
    cut
}

/// A handler is dropped during a statement that then fails. sqlx returns the error of that
/// statement to the next one.
async fn statement_dropped_half_way_does_not_undo_done_events(fixture: Fixture) {
    for statements in 0..3 {
        with_ledger!(fixture, hasty, statements);
        let (done, other) = (format!("a{statements}"), format!("b{statements}"));
        assert!(fixture.is_complete(&done).await, "{statements}");
        assert_eq!(fixture.send(&format!("{done} {other}")).await, own(200));
        assert_eq!(fixture.news(), [other]);
    }
    assert_eq!(fixture.effects.all().await, ids("a0 a1 a2 b0 b1 b2"));
}

async fn hasty<DB: Sql>(_: &Fixture, ledger: &Arc<Transactional<DB>>, statements: usize) {
    let (done, other) = (format!("a{statements}"), format!("b{statements}"));
    let mut held = Held::of(ledger, &[&done, &other]).await;
    held.effect(&done).await;
    assert!(held.mark_done(&done).await);
    held.effect(&other).await;
    for _ in 0..statements {
        let wrong = DB::run(&mut held.tx, "SELECT nonsense".to_owned());
        let _ = polled(wrong, 1, false).await;
    }
    drop(held.tx);
    held.claim.rollback().await.unwrap();
}

async fn claim_that_is_dropped_keeps_the_done_events(fixture: Fixture) {
    with_ledger!(fixture, dropped);
    // The delivery's end runs in a task of its own.
    fixture.send_until_done("a b").await;
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("b"), ids("a b")));
}

async fn dropped<DB: Sql>(_: &Fixture, ledger: &Arc<Transactional<DB>>) {
    let mut held = Held::of(ledger, &["a", "b"]).await;
    held.effect("a").await;
    assert!(held.mark_done("a").await && !held.mark_done("not of this delivery").await);
    held.effect("b").await;
    drop(held.tx);
    drop(held.claim);
}

/// The one key of a `Deduplicator` run is like an event of a multi-event delivery.
async fn deduplicator_work_that_fails_after_mark_done_is_complete(fixture: Fixture) {
    match &fixture.effects {
        Effects::Pg(pool) => {
            let adapter = PostgresAdapter::new(pool.clone());
            works(Deduplicator::transactional(adapter)).await;
        }
        Effects::Lite(pool) => {
            works(Deduplicator::transactional(lite_adapter(pool.clone()))).await;
        }
        Effects::Log(_) => unreachable!("no database"),
    }
    assert_eq!(fixture.effects.all().await, ids("a"));
}

async fn works<DB: Sql>(worker: Deduplicator<Transactional<DB>>) {
    let key = dedup_key("a");
    let failed = worker.run(&key, async |work: RunContext| {
        let mut tx = work.transaction::<DB>().await.unwrap();
        DB::run(&mut tx, insert(["a"])).await.unwrap();
        assert!(!work.delivery().mark_done(&dedup_key("a")));
        assert!(tx.mark_done(&dedup_key("a")).await.unwrap());
        DB::run(&mut tx, insert(["unmarked"])).await.unwrap();
        Err::<(), _>("no")
    });
    assert!(matches!(failed.await, Err(RunError::Handler("no"))));
    let again = worker.run(&key, async |_| Ok::<_, &str>(())).await.unwrap();
    assert!(matches!(again, RunOutcome::Duplicate(_)), "{again:?}");
}

async fn transaction_held_beyond_the_answer_is_rolled_back_with_its_done_events(fixture: Fixture) {
    with_ledger!(fixture, held_beyond_the_answer);
    fixture.send_until_done("a b").await;
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a b"), ids("a b")));
}

async fn held_beyond_the_answer<DB: Sql>(_: &Fixture, ledger: &Arc<Transactional<DB>>) {
    let Held { claim, tx } = {
        let mut held = Held::of(ledger, &["a", "b"]).await;
        held.effect("a").await;
        assert!(held.mark_done("a").await);
        held
    };
    let mut tx = tx;
    claim.rollback().await.unwrap();
    let late = tx.mark_done(&dedup_key("b")).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Transaction);
}

const PLACE: &str = "TOWER_DEDUP_TEST_BATCH";
const HALF: &str = "half-way";

/// Not a test: a delivery that has run halfway, if this binary is started as one.
#[test]
fn half_way() {
    let Ok(place) = std::env::var(PLACE) else { return };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        match place.strip_prefix("postgres:") {
            Some(_) => {
                let pool = PgPool::connect(&place).await.unwrap();
                stop_half_way(internals::transactional(PostgresAdapter::new(pool))).await;
            }
            None => {
                let pool = lite_pool(place.as_ref()).await;
                stop_half_way(internals::transactional(lite_adapter(pool))).await;
            }
        }
    });
}

async fn stop_half_way<DB: Sql>(ledger: Arc<Transactional<DB>>) {
    let mut held = Held::of(&ledger, &["a", "b", "c"]).await;
    for id in ["a", "b"] {
        held.effect(id).await;
        assert!(held.mark_done(id).await);
    }
    held.effect("c").await;
    println!("\n{HALF}");
    pending::<()>().await;
}

/// `kill -9`: done events are durable when the delivery has ended, and not before.
async fn process_that_is_killed_leaves_nothing_of_its_done_events(fixture: Fixture) {
    fixture.store.stats().await.unwrap();
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["multi_event::half_way", "--exact", "--nocapture"])
        .env(PLACE, &fixture.place)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next_line().await.unwrap().expect("the process reaches the middle") != HALF {}
    child.kill().await.unwrap();
    assert!(fixture.effects.all().await.is_empty());
    for id in ["a", "b", "c"] {
        assert_eq!(fixture.state(id).await, None, "{id}");
    }
    // The server has to notice that the client is gone.
    fixture.send_until_done("a b c").await;
    assert_eq!((fixture.news(), fixture.effects.all().await), (ids("a b c"), ids("a b c")));
}
