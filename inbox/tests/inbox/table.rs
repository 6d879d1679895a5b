//! A table that is away, locked, full, or has rows that this version cannot run.

use std::time::{Duration, Instant};

use sqlx::Connection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tower_dedup_inbox::{Inbox, Parked, Selection};

use crate::world::{Place, SHORT, World, on_each, request, send, stored};

on_each! {
    table_that_is_away_or_locked_costs_the_row_and_not_the_event
    locked_row_stops_no_other
    full_table_takes_no_row
    row_that_the_database_refuses_stops_no_other
    rows_that_this_version_cannot_run
    old_rows_end
    what_stored_waits_for_is_durable
}

/// Delivers until one is stored again, which must not need a restart.
async fn until_stored(world: &World, id: &str) {
    let app = world.router();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(9) {
        world.plan([500]);
        if send(&app, request(id, "1")).await == stored() {
            return;
        }
        tokio::time::sleep(SHORT).await;
    }
    panic!("not stored");
}

/// Delivers twice to a table that is away: it is asked the first time only.
async fn deliver_without_row(world: &World) {
    let app = world.router();
    for most in [1_500, 250] {
        let start = Instant::now();
        world.plan([500]);
        assert_eq!(send(&app, request("a", "1")).await, (500, None));
        assert!(start.elapsed() < Duration::from_millis(most), "{:?}", start.elapsed());
    }
}

async fn table_that_is_away_or_locked_costs_the_row_and_not_the_event(place: Place) {
    let world = World::new(place).await;
    let _running = world.start(world.router());
    let away = "ALTER TABLE webhook_inbox RENAME TO away";
    world.sql(away, away).await;
    deliver_without_row(&world).await;
    let back = "ALTER TABLE away RENAME TO webhook_inbox";
    world.sql(back, back).await;
    until_stored(&world, "b").await;
    world.until_done(&["b"]).await;
    let mut postgres = world.app.pool.begin().await.unwrap();
    let mut sqlite = None;
    if place == Place::Postgres {
        let lock = "LOCK TABLE webhook_inbox IN ACCESS EXCLUSIVE MODE";
        sqlx::query(lock).execute(&mut *postgres).await.unwrap();
    } else {
        let connection = sqlite.insert(world.sqlite().await);
        sqlx::query("BEGIN IMMEDIATE").execute(connection).await.unwrap();
    }
    deliver_without_row(&world).await;
    postgres.rollback().await.unwrap();
    if let Some(connection) = sqlite {
        connection.close().await.unwrap();
    }
    until_stored(&world, "c").await;
    world.until(|rows| rows.is_empty()).await;
    // The statement that waited for the lock may have stored its row after all.
    assert!(world.effects().await.contains(&"c".to_owned()));
}

/// On SQLite no row is locked by itself.
async fn locked_row_stops_no_other(place: Place) {
    if place == Place::Sqlite {
        return;
    }
    let world = World::with(place, |inbox| inbox.answer_within(SHORT)).await;
    world.plan([2_200]);
    let app = world.router();
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, request("a", "1")).await }
    });
    world.until_runs(1).await;
    let mut operator = world.app.pool.begin().await.unwrap();
    let lock = "SELECT FROM webhook_inbox FOR UPDATE";
    sqlx::query(lock).execute(&mut *operator).await.unwrap();
    // What its sender is to be told waits for the row. The failure of another one is written.
    tokio::time::sleep(2 * SHORT).await;
    world.plan([500]);
    let start = Instant::now();
    assert_eq!(send(&app, request("b", "1")).await, stored());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let again = send(&app, request("a", "1"));
    let others = futures_util::future::join_all(["c", "d"].map(|id| send(&app, request(id, "1"))));
    let start = Instant::now();
    let (again, others) = tokio::join!(again, others);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(others, [(200, None), (200, None)]);
    assert_ne!(again, stored());
    assert_eq!(first.await.unwrap(), (200, None));
    tokio::time::sleep(Duration::from_secs(3)).await;
    operator.rollback().await.unwrap();
    // The deletion waits for the row: it is no death.
    let rows = world.until(|rows| rows.len() == 1).await;
    assert_eq!(rows[0].keys[0].1, "b");
}

async fn full_table_takes_no_row(place: Place) {
    let world = World::with(place, |inbox| inbox.max_waiting(1)).await;
    let other = world.process(|inbox| inbox.later()).await;
    assert_eq!(send(&other.router(), request("a", "1")).await, stored());
    let others = "UPDATE webhook_inbox SET service = 'other'";
    world.sql(others, others).await;
    let app = world.router();
    let _running = world.start(app.clone());
    let answers = |wanted: (u16, Option<String>)| {
        let (world, app) = (&world, &app);
        async move {
            for _ in 0..200 {
                world.plan([500]);
                let answer = send(app, request("b", "1")).await;
                if answer == wanted {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            panic!("never {wanted:?}");
        }
    };
    answers((500, None)).await;
    world.inbox.delete(&Selection::default()).await.unwrap();
    answers(stored()).await;
}

async fn row_that_the_database_refuses_stops_no_other(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    world
        .sql(
            "ALTER TABLE webhook_inbox ADD CHECK (body <> 'bad'::bytea)",
            "CREATE TRIGGER bad BEFORE INSERT ON webhook_inbox WHEN NEW.body = CAST('bad' AS BLOB)
             BEGIN SELECT RAISE(ABORT, 'bad'); END",
        )
        .await;
    let app = world.router();
    let bodies: Vec<String> =
        (0..20).map(|n| if n == 7 { "bad".to_owned() } else { n.to_string() }).collect();
    let sent = bodies.iter().map(|body| send(&app, request(body, body)));
    for (answer, body) in futures_util::future::join_all(sent).await.iter().zip(&bodies) {
        assert_eq!(*answer, if body == "bad" { (200, None) } else { stored() }, "{body}");
    }
    assert_eq!((world.rows().await.len(), world.effects().await), (19, vec!["bad".to_owned()]));
    // It turns the inbox off for nobody.
    assert_eq!(send(&app, request("bad", "bad")).await.0, 200);
    assert_eq!(send(&app, request("z", "1")).await, stored());
}

async fn rows_that_this_version_cannot_run(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let app = world.router();
    for id in ["newer", "broken", "good"] {
        assert_eq!(send(&app, request(id, "1")).await, stored());
    }
    for sql in [
        "UPDATE webhook_inbox SET format = 2 WHERE keys LIKE '%newer%'",
        "UPDATE webhook_inbox SET method = 'P OST' WHERE keys LIKE '%broken%'",
    ] {
        world.sql(sql, sql).await;
    }
    let _running = world.start(app);
    let rows = world.until(|rows| rows.len() == 2 && rows[1].parked.is_some()).await;
    assert_eq!((rows[0].parked, rows[0].is_running), (None, false));
    assert_eq!(rows[1].parked, Some(Parked::Unreadable));
    assert_eq!(world.effects().await, ["good"]);
}

async fn old_rows_end(place: Place) {
    let world = World::with(place, |inbox| inbox.later()).await;
    let all = Selection::default();
    let app = world.router();
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let refused = world.process(|inbox| inbox).await;
    world.plan([422]);
    assert_eq!(send(&refused.router(), request("b", "1")).await, (422, None));
    world.until(|rows| rows.len() == 2 && rows[1].parked.is_some()).await;
    // A service that is not there any more: every process ends its rows.
    let service = "UPDATE webhook_inbox SET service = 'renamed'";
    world.sql(service, service).await;
    world.age(15).await;
    let running = world.start(app.clone());
    let rows = world.until(|rows| rows.len() == 1 && rows[0].parked.is_some()).await;
    assert_eq!(rows[0].parked, Some(Parked::Expired));
    assert_eq!(world.inbox.retry(&all).await.unwrap(), 0);
    drop(running);
    // A redelivery renews it.
    let service = "UPDATE webhook_inbox SET service = 'shop'";
    world.sql(service, service).await;
    assert_eq!(send(&app, request("a", "1")).await, stored());
    let running = world.start(app.clone());
    world.until_done(&["a"]).await;
    drop(running);
    // What was parked goes 21 days after it was received, unless its format is newer.
    for id in ["c", "d", "e"] {
        assert_eq!(send(&app, request(id, "1")).await, stored());
    }
    for sql in [
        "UPDATE webhook_inbox SET due = NULL, parked = 'failed'",
        "UPDATE webhook_inbox SET format = 2 WHERE keys LIKE '%d%'",
    ] {
        world.sql(sql, sql).await;
    }
    world.age(15).await;
    assert_eq!(world.inbox.retry(&all).await.unwrap(), 0);
    world.age(7).await;
    let _running = world.start(app);
    let rows = world.until(|rows| rows.len() == 1).await;
    assert_eq!(rows[0].keys[0].1, "d");
}

/// Whatever the role has: the insertion, and each write before *stored* leaves. SQLite sets it by a
/// pragma, which no trigger sees.
async fn what_stored_waits_for_is_durable(place: Place) {
    if place == Place::Sqlite {
        return;
    }
    let world = World::new(place).await;
    let note = "CREATE TABLE levels (level text);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           INSERT INTO levels VALUES (TG_OP || NEW.answered || current_setting('synchronous_commit'));
           RETURN NEW;
         END $$;
         CREATE TRIGGER note AFTER INSERT OR UPDATE ON webhook_inbox
           FOR EACH ROW EXECUTE FUNCTION note()";
    world.sql(note, note).await;
    let options: PgConnectOptions = world.url().parse().unwrap();
    let weak = options.options([("synchronous_commit", "off")]);
    let pool = PgPoolOptions::new().connect_lazy_with(weak);
    let process = world.process(move |_| Inbox::postgres(pool, "shop").answer_within(SHORT)).await;
    for plan in [500, 1_600] {
        world.plan([plan]);
        let id = plan.to_string();
        assert_eq!(send(&process.router(), request(&id, "1")).await, stored());
    }
    let levels: Vec<String> =
        sqlx::query_scalar("SELECT level FROM levels WHERE level NOT LIKE 'UPDATEfalse%'")
            .fetch_all(&world.app.pool)
            .await
            .unwrap();
    assert_eq!(levels, ["INSERTfalseon", "UPDATEtrueon", "INSERTfalseon", "UPDATEtrueon"]);
}
