//! The handler's transaction on Postgres: settings, isolation, rights, pools, and completions without a layer's help.

use std::convert::Infallible;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, Response};
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgPool};
use tower::Layer;
use tower::service_fn;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::inspect::{KeyState, MaintenanceAdapter};
use tower_dedup::{
    CommitError, CommitErrorKind, Deduplicator, Delivery, ResponseBody, RunError, RunOutcome,
};

use super::fixture::{send as send_script, started};
use support::effects::{
    Boxed, Database, MINUTE, answer, effect, transactional, until_acknowledged,
};
use support::places::Postgres;
use support::{Body, answered, dedup_key, request, send};

type Deduplicated = BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

/// Runs a handler on a pool; an error of it is 500.
fn handler<F>(
    pool: &PgPool,
    run: impl Fn(PgPool, Delivery) -> F + Clone + Send + Sync + 'static,
) -> Boxed
where
    F: Future<Output = Result<(), CommitError>> + Send + 'static,
{
    let pool = pool.clone();
    Boxed::new(service_fn(move |request: Request<Body>| {
        let event = request.extensions().get::<Delivery>().unwrap().clone();
        let ran = run(pool.clone(), event);
        async move { Ok::<Response<Body>, Infallible>(answer(ran.await.is_ok())) }
    }))
}

fn service(pool: &PgPool, handler: Boxed) -> Deduplicated {
    Deduplicated::new(transactional(pool).layer(handler))
}

async fn show(connection: &mut PgConnection, setting: &str) -> String {
    let show = AssertSqlSafe(format!("SHOW {setting}"));
    sqlx::query_scalar(show).fetch_one(connection).await.unwrap()
}

/// The COMMIT of a handler waits for the disk, and for that of a synchronous standby, whatever its role is set to. COMMIT
/// itself reads the setting. A stronger setting stays.
#[tokio::test]
async fn completion_is_committed_to_disk() {
    let database = Database::fresh().await;
    database
        .run(
            "CREATE TABLE commits (setting text); \
             CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO commits SELECT current_setting('synchronous_commit'); RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER look AFTER INSERT ON effects INITIALLY DEFERRED \
             FOR EACH ROW EXECUTE FUNCTION look()",
        )
        .await;
    for (setting, found) in
        [("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")]
    {
        let pool = database.pool_set(3, &[("synchronous_commit", setting)]);
        let worker = Deduplicator::transactional(PostgresAdapter::new(pool.clone()));
        for is_early in [false, true] {
            database.run("TRUNCATE commits").await;
            let key = dedup_key(&format!("{setting} {is_early}"));
            let ran = worker.run(&key, async |event| {
                let mut tx = event.begin(&pool).await?;
                effect(&mut tx, &event).await?;
                if is_early {
                    tx.complete().await?;
                }
                tx.commit().await
            });
            assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
            let commits: Vec<String> = sqlx::query_scalar("SELECT setting FROM commits")
                .fetch_all(database.effects.pool())
                .await
                .unwrap();
            assert_eq!(commits, [found], "{setting} {is_early}");
        }
    }
}

/// The bounds of a completion are for its transaction. `lock_timeout` is for its statement only, and what the handler has
/// set stays.
#[tokio::test]
async fn bounds_are_set_only_where_the_handler_has_none() {
    let database = Database::fresh().await;
    let pool = database.pool(3);
    let adapter = PostgresAdapter::new(pool.clone());
    for (timeout, before, idle) in [
        (None, ["0", "0"], "1min"),
        (Some(Duration::from_secs(90)), ["0", "0"], "92s"),
        (None, ["7s", "3s"], "3s"),
    ] {
        let mut worker = Deduplicator::transactional(adapter.clone());
        if let Some(timeout) = timeout {
            worker = worker.handler_timeout(timeout);
        }
        let key = dedup_key(&format!("{timeout:?} {before:?}"));
        let ran = worker.run(&key, async |event| {
            let mut tx = event.begin(&pool).await?;
            let [lock, idle_before] = before;
            let set = format!("SET LOCAL lock_timeout = '{lock}'; SET LOCAL idle_in_transaction_session_timeout = '{idle_before}'");
            tx.execute(sqlx::raw_sql(AssertSqlSafe(set))).await?;
            effect(&mut tx, &event).await?;
            tx.complete().await?;
            assert_eq!(show(&mut tx, "lock_timeout").await, lock);
            assert_eq!(show(&mut tx, "idle_in_transaction_session_timeout").await, idle);
            tx.commit().await
        });
        assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
        // Nothing is left on the connection.
        let mut connection = pool.acquire().await.unwrap();
        for setting in ["lock_timeout", "idle_in_transaction_session_timeout"] {
            assert_eq!(show(&mut connection, setting).await, "0");
        }
    }
}

/// They would wait for each other without an end.
#[tokio::test]
async fn second_transaction_of_a_handler_fails_in_time() {
    let (db, _, app) = started::<Postgres>().await;
    let start = Instant::now();
    let answer = send_script(&app, "a", "begin insert-run complete other-commits").await;
    assert_eq!(answered(&answer), (503, None));
    assert!(start.elapsed() < MINUTE / 4, "{:?}", start.elapsed());
    assert!(db.effects().await.is_empty());
    assert_eq!(answered(&send_script(&app, "a", "begin insert commit").await), (200, None));
}

/// Rows in which the transactions of handlers conflict.
const TALLY: &str = "CREATE TABLE tally (number int PRIMARY KEY, n int); \
    INSERT INTO tally VALUES (0, 0), (1, 0), (2, 0)";

/// Two services stand for two processes. Each of twenty events is delivered eight times at once. A handler completes
/// first, reads all tallies and adds to one of them; the database refuses some of the transactions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_isolation_level_takes_effect_once() {
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = Database::fresh().await;
        database.run(TALLY).await;
        let settings = [("default_transaction_isolation", level), ("synchronous_commit", "off")];
        let services = [(); 2].map(|()| {
            let pool = database.pool_set(4, &settings);
            service(&pool, handler(&pool, |pool, event| async move {
                let mut tx = event.begin(&pool).await?;
                tx.complete().await?;
                let number = event.id().parse::<i32>().unwrap() % 3;
                let count = format!(
                    "SELECT sum(n) FROM tally; UPDATE tally SET n = n + 1 WHERE number = {number}"
                );
                tx.execute(sqlx::raw_sql(AssertSqlSafe(count))).await?;
                effect(&mut tx, &event).await?;
                tx.commit().await
            }))
        });
        let deliveries = (0..160).map(|copy: usize| {
            let (service, id) = (services[copy % 2].clone(), (copy / 8).to_string());
            tokio::spawn(async move { until_acknowledged(&service, &id).await })
        });
        for delivery in join_all(deliveries.collect::<Vec<_>>()).await {
            delivery.unwrap();
        }
        database.effects.assert_once((0..20).map(|event| event.to_string())).await;
        let counted = sqlx::query_scalar::<_, i64>("SELECT sum(n) FROM tally");
        assert_eq!(counted.fetch_one(database.effects.pool()).await.unwrap(), 20, "at {level}");
        database.until_no_transaction_is_open().await;
    }
}

/// The completion runs as the role of the handler, which needs rights on the table.
#[tokio::test]
async fn completion_needs_the_rights_of_the_handlers_role() {
    let database = Database::fresh().await;
    let (schema, role) = (database.name().to_owned(), format!("{}_app", database.name()));
    let pool = database.pool(2);
    PostgresAdapter::new(pool.clone()).migrate().await.unwrap();
    database
        .run(format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT ALL ON effects, effects_run_seq TO {role}"
        ))
        .await;
    let as_role = role.clone();
    let service = service(
        &pool,
        handler(&pool, move |pool, event| {
            let role = as_role.clone();
            async move {
                let mut tx = event.begin(&pool).await?;
                tx.execute(AssertSqlSafe(format!("SET LOCAL ROLE {role}"))).await?;
                effect(&mut tx, &event).await?;
                let committed = tx.commit().await;
                let kind = committed.as_ref().err().map(CommitError::kind);
                assert!(matches!(kind, None | Some(CommitErrorKind::Database)), "{committed:?}");
                committed
            }
        }),
    );
    assert_eq!(answered(&send(&service, request("a")).await), (500, None));
    assert_eq!(database.effects_and_key("a").await, 0);
    database.run(format!("GRANT SELECT, INSERT, UPDATE ON webhook_deliveries TO {role}")).await;
    assert_eq!(answered(&send(&service, request("a")).await), (200, None));
    assert_eq!(database.effects_and_key("a").await, 1);
    database.run(format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

/// Without a transaction of the handler's before it, a completion would complete alone, and pass every ordinary test.
#[tokio::test]
async fn completion_outside_of_the_handlers_transaction_is_refused() {
    let database = Database::fresh().await;
    let pool = database.pool(2);
    let worker = Deduplicator::transactional(PostgresAdapter::new(pool.clone()));
    let key = dedup_key("a");
    let execute =
        async |connection: &mut PgConnection,
               completion: &tower_dedup::adapter::contract::Completion| {
            let sql = sqlx::query(AssertSqlSafe(completion.sql().to_owned()));
            sql.bind(completion.parameter().to_owned()).execute(connection).await.map(drop)
        };
    for by_statement in [true, false] {
        let outside = worker.run(&key, async |event| {
            let mut connection = pool.acquire().await?;
            if by_statement {
                return Ok(execute(&mut connection, &event.completion()?).await?);
            }
            event.complete_in(&mut *connection).await
        });
        match outside.await {
            Err(RunError::Handler(error)) => assert_eq!(error.kind(), CommitErrorKind::Config),
            other => panic!("{other:?}"),
        }
    }
    // As the first statement that writes, if the handler says so; and by `complete_in`.
    for is_first in [true, false] {
        let key = dedup_key(&format!("{is_first}"));
        let within = worker.run(&key, async |event| {
            let mut tx = pool.begin().await?;
            if is_first {
                execute(&mut tx, &event.completion()?.first()).await?;
                effect(&mut tx, &event).await?;
            } else {
                effect(&mut tx, &event).await?;
                event.complete_in(&mut *tx).await?;
            }
            Ok::<_, CommitError>(tx.commit().await?)
        });
        assert_eq!(within.await.unwrap(), RunOutcome::First(()));
        assert_eq!(database.effects_and_key(key.id()).await, 1);
    }
}

/// A pool of another kind, or of another database, or without a free connection.
#[tokio::test]
async fn begin_on_another_pool_is_an_error() {
    let database = Database::fresh().await;
    let pool = database.pool(1);
    let worker = Deduplicator::transactional(PostgresAdapter::new(pool.clone()));
    let of_kind = async |id: &str,
                         kind,
                         begin: &dyn Fn(
        Delivery,
    ) -> futures_util::future::BoxFuture<
        'static,
        Result<(), CommitError>,
    >| {
        let ran = worker.run(&dedup_key(id), async |event| begin(event).await).await;
        match ran {
            Err(RunError::Handler(error)) => assert_eq!(error.kind(), kind, "{error:?}"),
            other => panic!("{other:?}"),
        }
    };
    of_kind("kind", CommitErrorKind::Config, &|event| {
        Box::pin(async move {
            let lite = SqlitePoolOptions::new().connect_lazy("sqlite:///nowhere/at/all.db")?;
            event.begin(&lite).await.map(drop)
        })
    })
    .await;
    let at_once = Duration::from_millis(100);
    let busy = sqlx::postgres::PgPoolOptions::new().max_connections(1).acquire_timeout(at_once);
    let busy = busy.connect_lazy_with(database.options());
    // Connecting may take longer than that on a busy machine.
    let _taken = loop {
        if let Ok(connection) = busy.acquire().await {
            break connection;
        }
    };
    of_kind("busy", CommitErrorKind::Unavailable, &move |event| {
        let busy = busy.clone();
        Box::pin(async move { event.begin(&busy).await.map(drop) })
    })
    .await;
    let entry = PostgresAdapter::new(pool).get(&dedup_key("busy")).await.unwrap().unwrap();
    assert_eq!(entry.state, KeyState::Released);
}
