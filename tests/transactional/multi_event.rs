//! Batches in one transaction: what a handler marks as done is committed with its keys although the
//! handler fails, and nothing else is.

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
    Effects, LATE, Rig, Sql, cases, ids, insert, layers, lite_adapter, lite_pool, own, terms,
};
use crate::support::{dedup_key, polled};

macro_rules! in_a_transaction {
    ($($case:ident),+ $(,)?) => {
        cases! {
            sqlite: sqlite_under(Transactional) = [$($case),+];
            postgres: postgres_under(Transactional) = [$($case),+];
        }
    };
}

in_a_transaction!(
    what_is_not_done_is_left_as_a_rollback_leaves_it,
    what_is_not_marked_is_not_kept,
    a_transaction_that_its_handler_breaks_keeps_what_was_done_before,
    a_transaction_that_its_handler_ends_keeps_nothing,
    a_savepoint_that_is_leaked_is_found_whatever_is_done,
    a_commit_that_fails_keeps_nothing_and_the_retry_finds_out,
    misuse_costs_no_connection,
    a_call_that_is_cut_off_keeps_both_or_neither,
    a_statement_that_nobody_waited_for_takes_nothing_along,
    a_claim_that_is_dropped_keeps_what_is_done,
    a_worker_that_fails_is_done_if_it_says_so,
    a_transaction_that_is_kept_is_rolled_back_all_of_it,
    a_process_that_is_killed_leaves_nothing_of_what_was_done,
);

/// Free at once; no attempt more; and a takeover is still to be told of.
async fn what_is_not_done_is_left_as_a_rollback_leaves_it(rig: Rig) {
    let mine = terms();
    let dead = CallTerms::on_completion(Token::random(), mine.retention(), Duration::ZERO);
    for _ in 0..2 {
        rig.store.claim(&[dedup_key("released")], &mine).await.unwrap();
        rig.store.release(&[dedup_key("released")], &mine).await.unwrap();
    }
    rig.store.claim(&[dedup_key("lapsed")], &dead).await.unwrap();
    let entry = async |id| rig.store.get(&dedup_key(id)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(rig.send("done0 fresh:fail released:fail lapsed:fail").await, own(500));
        assert_eq!((rig.last().attempt(), rig.last().is_takeover()), (3, true));
        assert_eq!(entry("fresh").await, None);
        let released = entry("released").await.unwrap();
        assert_eq!((released.state, released.attempts), (EntryState::Released, 2));
        let lapsed = entry("lapsed").await.unwrap();
        assert!(matches!(lapsed.state, EntryState::InFlight { .. }), "{lapsed:?}");
        assert_eq!(lapsed.attempts, 1);
    }
    assert_eq!(rig.send("lapsed fresh").await, own(200));
    assert_eq!((rig.last().attempt(), rig.last().is_takeover()), (2, true));
    assert_eq!(rig.send("released done0").await, own(200));
    assert_eq!((rig.last().attempt(), rig.last().is_takeover()), (3, false));
    assert_eq!(rig.effects.all().await, ids("done0 fresh lapsed released"));
}

/// What was written after the last mark is rolled back, whoever wrote it; what was written before
/// it is kept with it.
async fn what_is_not_marked_is_not_kept(rig: Rig) {
    assert_eq!(rig.send("a:undone b:undone c:500").await, own(500));
    assert!(rig.effects.all().await.is_empty());
    assert_eq!(rig.send("a b c:undone d:500").await, own(500));
    assert_eq!((rig.news(), rig.effects.all().await), (ids("a b c d"), ids("a b")));
    assert!(!rig.last().is_done(&dedup_key("c")) && rig.last().is_done(&dedup_key("b")));
    assert_eq!(rig.send("a b c:undone d").await, own(200));
    assert_eq!((rig.news(), rig.effects.all().await), (ids("c d"), ids("a b c d")));
    assert_eq!(rig.send("c").await, layers(200, "duplicate"));
}

/// An error that is swallowed aborts a transaction of Postgres, and the handler knows nothing of
/// it; on SQLite it undoes its own statement only.
async fn a_transaction_that_its_handler_breaks_keeps_what_was_done_before(rig: Rig) {
    let aborts = matches!(rig.effects, Effects::Pg(_));
    let answered = rig.send("a b c:swallow").await;
    if !aborts {
        assert_eq!((answered, rig.effects.all().await), (own(200), ids("a b c")));
        return;
    }
    assert_eq!((answered, rig.effects.all().await), (layers(500, "uncommitted"), ids("a b")));
    assert_eq!(rig.send("a b c").await, own(200));
    assert_eq!((rig.news(), rig.effects.all().await), (ids("c"), ids("a b c")));
}

/// A raw COMMIT on Postgres is out of our hands but for the keys, which are not complete.
async fn a_transaction_that_its_handler_ends_keeps_nothing(rig: Rig) {
    for words in ["a x:rollback y:begin z:500", "a x:rollback", "a x:rollback y:500"] {
        let status = rig.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(rig.effects.all().await.is_empty(), "{words}");
        assert_eq!(rig.state("a").await, None, "{words}");
    }
    for words in ["a x:commit", "b w:commit y:500"] {
        let status = rig.send(words).await.0;
        assert!(status == 500 || status == 0, "{words}: {status}");
        assert!(!rig.is_complete("a").await && !rig.is_complete("b").await);
    }
}

async fn a_savepoint_that_is_leaked_is_found_whatever_is_done(rig: Rig) {
    for words in ["x:leak a", "a x:leak", "a x:leak b", "x:leak a b", "a b x:leak c d"] {
        for _ in 0..4 {
            assert_eq!(rig.send(words).await, layers(500, "uncommitted"), "{words}");
            assert!(rig.effects.all().await.is_empty(), "{words}");
        }
        assert_eq!(rig.send(&format!("{words} z:500")).await, own(500));
        assert!(rig.effects.all().await.is_empty(), "{words}");
        assert_eq!(rig.store.count().await.unwrap(), 0, "{words}");
    }
    // Those that are rolled back and those that are released are none.
    assert_eq!(rig.send("a f:fail b g:sql h:sql c").await, own(500));
    assert_eq!(rig.send("d f:undone e").await, own(200));
    assert_eq!(rig.effects.all().await, ids("a b c d e f"));
}

/// The answer is the handler's failure anyway.
async fn a_commit_that_fails_keeps_nothing_and_the_retry_finds_out(rig: Rig) {
    let (bad, good) = match rig.effects {
        Effects::Pg(_) => (
            "ALTER TABLE effects ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
            "ALTER TABLE effects DROP CONSTRAINT effects_id_key",
        ),
        // What the last statement before COMMIT does not survive.
        _ => (
            "CREATE TRIGGER refuses BEFORE UPDATE OF completed_at ON webhook_deliveries \
             BEGIN SELECT RAISE(ROLLBACK, 'no'); END",
            "DROP TRIGGER refuses",
        ),
    };
    rig.store.count().await.unwrap();
    rig.effects.run("INSERT INTO effects VALUES ('a')").await;
    rig.effects.run(bad).await;
    assert_eq!(rig.send("a b p:fail").await, own(500));
    assert_eq!(rig.effects.all().await, ids("a"));
    assert_eq!(rig.store.count().await.unwrap(), 0);
    rig.effects.run(good).await;
    // Postgres tells of the error before it lets go of the locks.
    rig.send_until_done("a b p").await;
    assert_eq!((rig.news(), rig.effects.all().await), (ids("a b p"), ids("a a b p")));
}

async fn misuse_costs_no_connection(rig: Rig) {
    for round in 0..6 {
        for (n, ways) in
            ["leak", "rollback", "hang", "abort", "panic", "swallow"].iter().enumerate()
        {
            let impatient = if *ways == "hang" { "impatient!" } else { "" };
            rig.send(&format!("{round}a{n} {round}b{n}:{ways} {impatient}")).await;
        }
        assert_eq!(rig.send(&format!("{round}")).await, own(200), "after {round} rounds");
    }
    // All of the pool's connections are there, and none is in a transaction.
    for answer in join_all(["x", "y", "z"].map(|id| rig.send(id))).await {
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
        let tx = extensions.get::<TxHandle<DB>>().unwrap().lend().unwrap();
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
    ($rig:ident, $case:ident $(, $more:expr)*) => {
        match &$rig.effects {
            Effects::Pg(pool) => {
                let adapter = PostgresAdapter::new(pool.clone());
                $case(&$rig, &internals::transactional(adapter) $(, $more)*).await
            }
            Effects::Lite(pool) => {
                let adapter = lite_adapter(pool.clone());
                $case(&$rig, &internals::transactional(adapter) $(, $more)*).await
            }
            Effects::Log(_) => unreachable!("no database"),
        }
    };
}

/// `done` is dropped at each of its awaits, and the handler fails at once, goes on, or succeeds.
async fn a_call_that_is_cut_off_keeps_both_or_neither(rig: Rig) {
    let mut cut = 0;
    for polls in 1..6 {
        for again in [false, true] {
            for end in ["fails", "goes on", "succeeds"] {
                cut += usize::from(with_ledger!(rig, cut_off, polls, again, end));
            }
        }
    }
    assert!(cut > 0, "it was never cut off");
}

async fn cut_off<DB: Sql>(
    rig: &Rig,
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
    // What is still on its way is waited for first.
    drop(held.tx.begin().await.unwrap());
    let cut = polled(held.tx.mark_done(&dedup_key(b)), polls, again).await.is_none();
    held.effect(c).await;
    if end == "goes on" {
        assert!(held.mark_done(c).await);
        // Of nobody, and after the last mark.
        held.effect("nobody").await;
    }
    drop(held.tx);
    if end == "succeeds" {
        held.claim.commit(&HandlerSuccess::default()).await.unwrap();
    } else {
        held.claim.rollback().await.unwrap();
    }
    let effects = rig.effects.all().await;
    for id in [a, b, c] {
        let times = effects.iter().filter(|effect| *effect == id).count();
        assert_eq!(times, usize::from(rig.is_complete(id).await), "{id}");
    }
    let must = match end {
        "succeeds" => vec![a, b, c],
        // What was asked for and is under a later mark is done with that.
        "goes on" if !cut => vec![a, b, c],
        "fails" if !cut => vec![a, b],
        _ => vec![],
    };
    assert!(must.iter().all(|id| effects.iter().any(|effect| effect == id)), "{case}");
    // Marks of Postgres are set as one.
    let kept = effects.iter().filter(|effect| effect.ends_with(&case)).count();
    assert!(kept >= 1 || matches!(rig.effects, Effects::Lite(_)), "{case}");
    assert_eq!(rig.send(&names.join(" ")).await.0, 200, "{case}");
    let mut effects = rig.effects.all().await;
    effects.retain(|effect| effect.ends_with(&case) || effect == "nobody");
    assert_eq!(effects, names, "{case}");
    cut
}

/// A handler that is dropped in the middle of a statement, which then fails: sqlx answers the next
/// one with its error.
async fn a_statement_that_nobody_waited_for_takes_nothing_along(rig: Rig) {
    for statements in 0..3 {
        with_ledger!(rig, hasty, statements);
        let (done, other) = (format!("a{statements}"), format!("b{statements}"));
        assert!(rig.is_complete(&done).await, "{statements}");
        assert_eq!(rig.send(&format!("{done} {other}")).await, own(200));
        assert_eq!(rig.news(), [other]);
    }
    assert_eq!(rig.effects.all().await, ids("a0 a1 a2 b0 b1 b2"));
}

async fn hasty<DB: Sql>(_: &Rig, ledger: &Arc<Transactional<DB>>, statements: usize) {
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

async fn a_claim_that_is_dropped_keeps_what_is_done(rig: Rig) {
    with_ledger!(rig, dropped);
    // Its end is a task of its own.
    rig.send_until_done("a b").await;
    assert_eq!((rig.news(), rig.effects.all().await), (ids("b"), ids("a b")));
}

async fn dropped<DB: Sql>(_: &Rig, ledger: &Arc<Transactional<DB>>) {
    let mut held = Held::of(ledger, &["a", "b"]).await;
    held.effect("a").await;
    assert!(held.mark_done("a").await && !held.mark_done("not of this delivery").await);
    held.effect("b").await;
    drop(held.tx);
    drop(held.claim);
}

/// Its one key is as an event of a batch.
async fn a_worker_that_fails_is_done_if_it_says_so(rig: Rig) {
    match &rig.effects {
        Effects::Pg(pool) => {
            let adapter = PostgresAdapter::new(pool.clone());
            works(Deduplicator::transactional(adapter)).await;
        }
        Effects::Lite(pool) => {
            works(Deduplicator::transactional(lite_adapter(pool.clone()))).await;
        }
        Effects::Log(_) => unreachable!("no database"),
    }
    assert_eq!(rig.effects.all().await, ids("a"));
}

async fn works<DB: Sql>(worker: Deduplicator<Transactional<DB>>) {
    let key = dedup_key("a");
    let failed = worker.run(&key, async |work: RunContext| {
        let mut tx = work.transaction::<DB>().unwrap();
        DB::run(&mut tx, insert(["a"])).await.unwrap();
        assert!(!work.delivery().mark_done(&dedup_key("a")));
        assert!(tx.mark_done(&dedup_key("a")).await.unwrap());
        DB::run(&mut tx, insert(["nobody"])).await.unwrap();
        Err::<(), _>("no")
    });
    assert!(matches!(failed.await, Err(RunError::Handler("no"))));
    let again = worker.run(&key, async |_| Ok::<_, &str>(())).await.unwrap();
    assert!(matches!(again, RunOutcome::Duplicate(_)), "{again:?}");
}

async fn a_transaction_that_is_kept_is_rolled_back_all_of_it(rig: Rig) {
    with_ledger!(rig, kept);
    rig.send_until_done("a b").await;
    assert_eq!((rig.news(), rig.effects.all().await), (ids("a b"), ids("a b")));
}

async fn kept<DB: Sql>(_: &Rig, ledger: &Arc<Transactional<DB>>) {
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

/// Not a test: a delivery that is half-way, when it is started as one.
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

/// `kill -9`: what is done is durable when the delivery has ended, and not before.
async fn a_process_that_is_killed_leaves_nothing_of_what_was_done(rig: Rig) {
    rig.store.count().await.unwrap();
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["multi_event::half_way", "--exact", "--nocapture"])
        .env(PLACE, &rig.place)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while lines.next_line().await.unwrap().expect("it comes half-way") != HALF {}
    child.kill().await.unwrap();
    assert!(rig.effects.all().await.is_empty());
    for id in ["a", "b", "c"] {
        assert_eq!(rig.state(id).await, None, "{id}");
    }
    // The server has to notice.
    rig.send_until_done("a b c").await;
    assert_eq!((rig.news(), rig.effects.all().await), (ids("a b c"), ids("a b c")));
}
