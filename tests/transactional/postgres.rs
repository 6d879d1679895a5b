//! The handler's transaction on Postgres: settings, isolation, rights, pools, and completions without a layer's help.

use std::convert::Infallible;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::{Request, Response};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgPool};
use tower::Layer;
use tower::service_fn;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::contract::DedupAdapter;
use tower_dedup::adapter::maintenance::{KeyState, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::{
    CommitError, CommitErrorKind, DedupLayer, Deduplicator, Delivery, Mode, ResponseBody, RunError,
    RunOutcome,
};

use super::fixture::{CONNECTIONS, Db, World, app, send as send_script, started};
use support::cluster::until_true;
use support::effects::{
    Boxed, Database, MINUTE, answer, effect, transactional, until_acknowledged, write,
};
use support::places::Postgres;
use support::{Body, answered, by_header, dedup_key, request, send, terms};

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
        for (when, found) in [
            ("late", found),
            ("early", found),
            ("early, then weakened", "on"),
            ("in another transaction", found),
        ] {
            database.run("TRUNCATE commits").await;
            let key = dedup_key(&format!("{setting} {when}"));
            let ran = worker.run(&key, async |event| {
                if when == "in another transaction" {
                    let mut tx = pool.begin().await?;
                    effect(&mut tx, &event).await?;
                    event.complete_in(&mut *tx).await?;
                    return Ok(tx.commit().await?);
                }
                let mut tx = event.begin(&pool).await?;
                effect(&mut tx, &event).await?;
                if when != "late" {
                    tx.complete().await?;
                }
                if when.ends_with("weakened") {
                    tx.execute("SET LOCAL synchronous_commit = off").await?;
                }
                tx.commit().await
            });
            assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
            let commits: Vec<String> = sqlx::query_scalar("SELECT setting FROM commits")
                .fetch_all(database.effects.pool())
                .await
                .unwrap();
            assert_eq!(commits, [found], "{setting} {when}");
        }
    }
}

const IDLE: &str = "idle_in_transaction_session_timeout";

/// The bounds are for one transaction: `begin` sets how long it may be idle, whatever the session has, and a completion
/// by another driver only where the session has none. A completion sets `lock_timeout` for its statement only. The
/// settings of a handler stay.
#[tokio::test]
async fn transaction_has_its_bounds_and_the_handler_may_change_them() {
    const SECONDS: [Option<Duration>; 3] =
        [Some(Duration::from_secs(60)), Some(Duration::from_secs(5)), None];
    let database = Database::fresh().await;
    for (option, timeout, session, begun, other) in [
        (SECONDS[0], None, "0", "1min", "1min"),
        (SECONDS[0], None, "3s", "1min", "3s"),
        (SECONDS[0], Some(90), "3s", "92s", "3s"),
        (SECONDS[1], None, "0", "5s", "5s"),
        (SECONDS[1], Some(90), "0", "92s", "92s"),
        (SECONDS[2], Some(90), "3s", "3s", "3s"),
        (SECONDS[2], None, "0", "0", "0"),
    ] {
        let pool = database.pool_set(1, &[(IDLE, session)]);
        let options = PostgresOptions::new().transaction_idle_timeout(option);
        let adapter = PostgresAdapter::with_options(pool.clone(), options);
        let mut worker = Deduplicator::transactional(adapter);
        if let Some(timeout) = timeout {
            worker = worker.handler_timeout(Duration::from_secs(timeout));
        }
        for set in [None, Some("7s"), Some("0")] {
            let case = format!("{option:?} {timeout:?} {session} {set:?}");
            let key = dedup_key(&case);
            let ran = worker.run(&key, async |event| {
                let mut tx = event.begin(&pool).await?;
                // Nothing has taken a snapshot.
                tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await?;
                if let Some(set) = set {
                    let set =
                        format!("SET LOCAL lock_timeout = '{set}'; SET LOCAL {IDLE} = '{set}'");
                    tx.execute(sqlx::raw_sql(AssertSqlSafe(set))).await?;
                }
                tx.complete().await?;
                effect(&mut tx, &event).await?;
                assert_eq!(show(&mut tx, "lock_timeout").await, set.unwrap_or("0"), "{case}");
                assert_eq!(show(&mut tx, IDLE).await, set.unwrap_or(begun), "{case}");
                tx.commit().await
            });
            assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
        }
        let key = dedup_key(&format!("{option:?} {timeout:?} {session}"));
        let ran = worker.run(&key, async |event| {
            let mut tx = pool.begin().await?;
            effect(&mut tx, &event).await?;
            event.complete_in(&mut *tx).await?;
            assert_eq!(show(&mut tx, "lock_timeout").await, "0");
            assert_eq!(show(&mut tx, IDLE).await, other, "{option:?} {timeout:?} {session}");
            Ok::<_, CommitError>(tx.commit().await?)
        });
        assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
        // Nothing is left on the connection.
        let mut connection = pool.acquire().await.unwrap();
        for (setting, before) in [("lock_timeout", "0"), (IDLE, session)] {
            assert_eq!(show(&mut connection, setting).await, before);
        }
    }
}

/// A trial in shadow ends no transaction that an enforcing layer leaves alone.
#[tokio::test]
async fn transaction_may_be_idle_as_long_in_every_mode() {
    let database = Database::fresh().await;
    let pool = database.pool(2);
    for (id, mode) in [("a", Mode::Enforce), ("b", Mode::Shadow), ("c", Mode::Off)] {
        let adapter = PostgresAdapter::new(pool.clone());
        let layer = DedupLayer::transactional(by_header(), adapter).mode(mode);
        let handler = handler(&pool, move |pool, event| async move {
            let mut tx = event.begin(&pool).await?;
            assert_eq!(show(&mut tx, IDLE).await, "92s", "{mode:?}");
            tx.commit().await
        });
        let service = layer.handler_timeout(Duration::from_secs(90)).layer(handler);
        assert_eq!(send(&service, request(id)).await.status(), 200, "{mode:?}");
    }
}

/// A process hangs after its write and before its completion, as one that was stopped, or whose machine has vanished. Its
/// row is unique, and its takeover writes the same one.
#[tokio::test]
async fn takeover_waits_for_no_transaction_of_a_process_that_hangs() {
    const SECOND: Duration = Duration::from_secs(1);
    let database = Database::fresh().await;
    database.run("CREATE UNIQUE INDEX ON effects (id)").await;
    let options = || PostgresOptions::new().transaction_idle_timeout(SECOND);
    let (hung, wakes) = (tokio::sync::oneshot::channel(), std::sync::mpsc::channel::<()>());
    let (connect, sender) = (database.options(), hung.0);
    let first = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let pool = PgPoolOptions::new().connect_lazy_with(connect);
            let adapter = PostgresAdapter::with_options(pool.clone(), options());
            let worker = Deduplicator::transactional(adapter).lease(SECOND);
            let key = dedup_key("a");
            let ran = worker.run(&key, async |event| {
                let mut tx = event.begin(&pool).await?;
                effect(&mut tx, &event).await?;
                sender.send(()).unwrap();
                // The whole runtime: the lease is not renewed.
                wakes.1.recv().unwrap();
                tx.commit().await
            });
            ran.await
        })
    });
    hung.1.await.unwrap();
    let pool = database.pool(4);
    let adapter = PostgresAdapter::with_options(pool.clone(), options());
    let layer = DedupLayer::transactional(by_header(), adapter).lease(SECOND);
    let start = Instant::now();
    until_acknowledged(&layer.layer(write(&pool)), "a").await;
    assert!(start.elapsed() < MINUTE / 3, "{:?}", start.elapsed());
    wakes.0.send(()).unwrap();
    let first = first.join().unwrap();
    assert!(!matches!(first, Ok(RunOutcome::First(()))), "{first:?}");
    assert_eq!(database.effects_and_key("a").await, 1);
}

/// Prepared on a connection of the handlers while the table was tiny, the statements of a completion would read all of it.
/// What this process claims shows that the table grows.
#[tokio::test]
async fn completion_is_planned_again_when_the_table_has_grown() {
    const ROWS: usize = 20_000;
    let database = Database::fresh().await;
    let pool = database.pool(1);
    let adapter = PostgresAdapter::new(database.pool(2));
    adapter.migrate().await.unwrap();
    // What the statements of a transaction have read.
    database
        .run(
            "CREATE TABLE reads (n int8); \
             CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO reads SELECT seq_tup_read FROM pg_stat_xact_user_tables \
             WHERE relname = 'webhook_deliveries'; RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER look AFTER INSERT ON effects INITIALLY DEFERRED \
             FOR EACH ROW EXECUTE FUNCTION look()",
        )
        .await;
    let worker = Deduplicator::transactional(adapter.clone());
    let deliver = async |when: &str| {
        for how in ["late", "early", "in"] {
            // The sixth execution of a statement has a plan for all parameters.
            for number in 0..6 {
                let key = dedup_key(&format!("{when} {how} {number}"));
                let ran = worker.run(&key, async |event| {
                    if how == "in" {
                        let mut tx = pool.begin().await?;
                        effect(&mut tx, &event).await?;
                        event.complete_in(&mut *tx).await?;
                        return Ok::<_, CommitError>(tx.commit().await?);
                    }
                    let mut tx = event.begin(&pool).await?;
                    effect(&mut tx, &event).await?;
                    if how == "early" {
                        tx.complete().await?;
                    }
                    tx.commit().await
                });
                assert_eq!(ran.await.unwrap(), RunOutcome::First(()));
            }
        }
    };
    let tiny = adapter.completion(&[(&dedup_key("a"), &terms())]).unwrap();
    deliver("tiny").await;
    database.run("ANALYZE webhook_deliveries").await;
    deliver("analyzed").await;
    join_all((0..1_000).map(async |number| {
        adapter.claim(&dedup_key(&format!("row {number}")), &terms()).await.unwrap()
    }))
    .await;
    database
        .run(format!(
            "INSERT INTO webhook_deliveries (key, namespace, id, attempts, takeover, first_seen_at, expires_at) \
             SELECT gen_random_uuid(), 'test', n, 1, false, now(), now() FROM generate_series(1, {ROWS}) AS n; \
             TRUNCATE reads"
        ))
        .await;
    deliver("grown").await;
    let reads = sqlx::query_scalar("SELECT max(n) FROM reads").fetch_one(database.effects.pool());
    let reads: i64 = reads.await.unwrap();
    assert!(reads < i64::try_from(ROWS).unwrap(), "{reads} rows read");
    // For other drivers, it is one statement.
    let grown = adapter.completion(&[(&dedup_key("b"), &terms())]).unwrap();
    assert_eq!(tiny.sql(), grown.sql());
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

/// A handler that leaves its transaction idle for longer than its bound.
#[tokio::test]
async fn session_ended_by_the_server_is_503_and_nothing_is_committed() {
    let (db, world) = (Db::<Postgres>::create().await, World::default());
    let bound = PostgresOptions::new().transaction_idle_timeout(Duration::from_millis(500));
    let adapter = PostgresAdapter::with_options(db.pool.clone(), bound);
    let app = app(&db, DedupLayer::transactional(by_header(), adapter), &world);
    let ended = async || {
        let idle = "SELECT count(*) = 0 FROM pg_stat_activity \
                    WHERE datname = current_database() AND state = 'idle in transaction'";
        until_true(&mut db.pool.acquire().await.unwrap(), idle).await;
    };
    // More deliveries than connections: none is lost.
    for _ in 0..=CONNECTIONS {
        let answer = world.send_beside(&app, "begin insert wait commit", &ended).await;
        assert_eq!(answered(&answer), (503, None));
    }
    assert_eq!(answered(&send_script(&app, "a", "begin insert commit").await), (200, None));
    assert_eq!(db.effects().await, ["a"]);
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
                execute(&mut tx, &event.completion()?.as_first_statement()).await?;
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
    let busy = PgPoolOptions::new().max_connections(1).acquire_timeout(at_once);
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
