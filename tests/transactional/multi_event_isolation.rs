//! Multi-event deliveries in one transaction above READ COMMITTED. The database refuses a statement
//! or the COMMIT if another transaction came first (40001). The retry finds each event either done
//! or free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::Request;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, Postgres};
use sqlx::{Connection, PgPool};
use tower_dedup::DedupLayer;
use tower_dedup::TxHandle;
use tower_dedup::adapter::PostgresAdapter;

use crate::support::multi_event::{
    Answer, Effects, LATE, Runs, Service, Sql, answer, by_word, id, ids, insert, layers, own,
    send_to, service, split, words,
};
use crate::support::postgres::Schema;
use crate::support::{Body, dedup_key};

const LEVELS: [&str; 2] = ["repeatable read", "serializable"];
/// The number of rows that handlers add to; transactions conflict in these rows.
const TALLIES: usize = 3;

/// Two receivers on one schema, as in two processes, whose sessions use this isolation level.
struct Place {
    level: &'static str,
    pool: PgPool,
    services: [Service; 2],
    effects: Effects,
    runs: Runs,
    /// While set, another transaction runs before a handler whose body asks for it.
    rivals: Arc<AtomicBool>,
    _schema: Schema,
}

impl Place {
    async fn at(level: &'static str) -> Self {
        let schema = Schema::fresh();
        let options: PgConnectOptions = schema.url().parse().unwrap();
        let options = options.options([("default_transaction_isolation", level)]);
        let pool = || PgPoolOptions::new().max_connections(4).connect_lazy_with(options.clone());
        let (own, runs, rivals) = (pool(), Runs::default(), Arc::new(AtomicBool::new(true)));
        sqlx::raw_sql(
            "CREATE TABLE effects (id text); CREATE TABLE tally (number int PRIMARY KEY, n int); \
             INSERT INTO tally SELECT number, 0 FROM generate_series(0, 2) AS number",
        )
        .execute(&own)
        .await
        .unwrap();
        let services = [(); 2].map(|()| {
            let (runs, rivals, rival) = (Arc::clone(&runs), Arc::clone(&rivals), own.clone());
            let layer = DedupLayer::transactional(by_word(), PostgresAdapter::new(pool()));
            service(layer, move |request| {
                let rival = rivals.load(Ordering::SeqCst).then(|| rival.clone());
                handle(request, Arc::clone(&runs), rival)
            })
        });
        let effects = Effects::Pg(own.clone());
        Self { level, pool: own, services, effects, runs, rivals, _schema: schema }
    }

    async fn send(&self, words: &str) -> (u16, String) {
        send_to(&self.services[0], words).await
    }

    /// Returns the events that the last run saw as new.
    fn news(&self) -> Vec<String> {
        let last = self.runs.lock().unwrap().last().unwrap().clone();
        last.keys().map(|key| key.id().to_owned()).collect()
    }

    /// Returns the events that took effect, which are those that are complete.
    async fn committed(&self) -> Vec<String> {
        let effects = self.effects.all().await;
        let sql = "SELECT id FROM webhook_deliveries WHERE completed_at IS NOT NULL ORDER BY id";
        let complete: Vec<String> = sqlx::query_scalar(sql).fetch_all(&self.pool).await.unwrap();
        assert_eq!(effects, complete, "at {}", self.level);
        effects
    }

    /// Delivers again, without a conflicting transaction. These events run, and no others.
    async fn retry(&self, words: &str, news: &str) {
        self.rivals.store(false, Ordering::SeqCst);
        assert_eq!(self.send(words).await, own(200), "at {}", self.level);
        let all: Vec<String> =
            crate::support::multi_event::words(words).map(|(name, _)| name.to_owned()).collect();
        assert_eq!((self.news(), self.committed().await), (ids(news), all));
        assert_eq!(self.send(words).await, layers(200, "duplicate"));
    }
}

async fn run(tx: &mut sqlx::PgConnection, sql: impl Into<String>) -> Result<(), sqlx::Error> {
    Postgres::run(tx, sql.into()).await
}

fn add_to(tally: usize) -> String {
    format!("UPDATE tally SET n = n + 1 WHERE number = {tally}")
}

/// Runs another transaction, from BEGIN to COMMIT.
async fn rival(pool: &PgPool, statements: &[String]) {
    let mut transaction = pool.begin().await.unwrap();
    for sql in statements {
        run(&mut transaction, sql).await.unwrap();
    }
    transaction.commit().await.unwrap();
}

/// Writes each event's effect under a savepoint, in the order of the words. `tallyN` adds to a tally as
/// well. `skew` and `clash` conflict with another transaction; `bare` does so without a savepoint. `fail`
/// fails, and `quit` does so at once.
async fn handle(request: Request<Body>, runs: Runs, before: Option<PgPool>) -> Answer {
    let (delivery, head, body) = split(request, &runs).await;
    let mut tx = head.extensions.get::<TxHandle<Postgres>>().unwrap().lend().await.unwrap();
    let mut failed = false;
    for (name, way) in words(&body) {
        let key = dedup_key(id(name));
        if !delivery.needs_run(&key) {
            continue;
        }
        if way == "quit" {
            return answer(500);
        }
        if way == "bare" {
            if let Some(before) = &before {
                run(&mut tx, "SELECT n FROM tally").await.unwrap();
                rival(before, &[add_to(0)]).await;
            }
            failed |= add(&mut tx, name, Some(0)).await.is_err();
            continue;
        }
        let mut savepoint = tx.begin().await.unwrap();
        let added = effect(&mut savepoint, name, way, before.as_ref()).await;
        if added.is_ok() && way != "fail" {
            savepoint.commit().await.unwrap();
        } else {
            savepoint.rollback().await.unwrap();
            failed = true;
        }
    }
    answer(if failed { 500 } else { 200 })
}

async fn effect(
    connection: &mut sqlx::PgConnection,
    name: &str,
    way: &str,
    before: Option<&PgPool>,
) -> Result<(), sqlx::Error> {
    match (way, before) {
        // Each transaction reads rows that the other one writes.
        ("skew", Some(before)) => {
            run(connection, "SELECT n FROM tally WHERE number = 1").await?;
            add(connection, name, Some(0)).await?;
            let read = "SELECT n FROM tally WHERE number = 0".to_owned();
            rival(before, &[read, add_to(1)]).await;
            Ok(())
        }
        ("clash", Some(before)) => {
            rival(before, &[add_to(0)]).await;
            add(connection, name, Some(0)).await
        }
        _ => {
            let tally = way.strip_prefix("tally").map(|number| number.parse().unwrap());
            add(connection, name, tally).await
        }
    }
}

async fn add(
    connection: &mut sqlx::PgConnection,
    name: &str,
    tally: Option<usize>,
) -> Result<(), sqlx::Error> {
    if let Some(tally) = tally {
        run(connection, "SELECT sum(n) FROM tally").await?;
        run(connection, add_to(tally)).await?;
    }
    run(connection, insert([id(name)])).await
}

/// The answer is retryable, and nothing is committed, although the handler has succeeded.
#[tokio::test]
async fn refused_commit_is_503_and_the_retry_runs() {
    let place = Place::at("serializable").await;
    assert_eq!(place.send("a b c:skew").await, layers(503, "unavailable"));
    assert!(place.committed().await.is_empty());
    place.retry("a b c:skew", "a b c").await;
}

/// The handler fails: its next statement is refused, or it returns a failure.
#[tokio::test]
async fn failure_after_a_conflict_rolls_everything_back() {
    for words in ["a b:skew c", "a b:skew c:quit"] {
        let place = Place::at("serializable").await;
        assert_eq!(place.send(words).await, own(500));
        assert!(place.committed().await.is_empty(), "{words}");
        place.rivals.store(false, Ordering::SeqCst);
        assert_eq!(place.send("c:fail a b").await, own(500));
        assert!(place.committed().await.is_empty(), "{words}");
        place.retry("a b c", "a b c").await;
    }
}

/// Under a savepoint, the transaction goes on; without one, the conflict aborts it. The handler fails either
/// way, and so does the delivery.
#[tokio::test]
async fn refused_statement_fails_the_delivery() {
    for level in LEVELS {
        for words in ["a b:clash c", "a b:bare"] {
            let place = Place::at(level).await;
            assert_eq!(place.send(words).await, own(500), "at {level}");
            assert!(place.committed().await.is_empty(), "at {level}: {words}");
            place.retry(words, if words.ends_with("bare") { "a b" } else { "a b c" }).await;
        }
    }
}

/// Two receivers get overlapping deliveries until each is acknowledged. Every event takes effect
/// once, and the tallies agree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_overlapping_deliveries_takes_effect_once() {
    const EVENTS: usize = 30;
    for level in LEVELS {
        let place = Place::at(level).await;
        PostgresAdapter::new(place.pool.clone()).migrate().await.unwrap();
        let senders = (0..2 * EVENTS).map(|sender: usize| {
            let service = place.services[sender % 2].clone();
            // Each event is in eight deliveries, of which some fail the first time.
            let events = (0..4).map(|next| (sender * 7 + next) % EVENTS);
            let events = events.map(|event| format!("e{event:02}:tally{}", event % TALLIES));
            let body = events.collect::<Vec<_>>().join(" ");
            tokio::spawn(async move {
                loop {
                    match send_to(&service, &body).await {
                        (200, _) => return,
                        answer => {
                            let retryable =
                                [own(500), layers(503, "unavailable"), layers(503, "in-flight")];
                            assert!(retryable.contains(&answer), "{answer:?}");
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(rand::random_range(1..10))).await;
                }
            })
        });
        let senders = join_all(senders.collect::<Vec<_>>());
        for sender in tokio::time::timeout(LATE * 3, senders).await.expect("an end") {
            sender.unwrap();
        }
        let all: Vec<String> = (0..EVENTS).map(|event| format!("e{event:02}")).collect();
        assert_eq!(place.committed().await, all, "at {level}");
        let tallies: i64 =
            sqlx::query_scalar("SELECT sum(n) FROM tally").fetch_one(&place.pool).await.unwrap();
        assert_eq!(usize::try_from(tallies).unwrap(), EVENTS, "at {level}");
    }
}
