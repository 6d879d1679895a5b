//! Settings that a handler changes in its transaction (`search_path`, a role), and a table that is
//! dropped.

use std::convert::Infallible;

use http::{Request, Response};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor};
use tower::Layer;
use tower_dedup::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, Fetch};
use tower_dedup::adapter::inspect::{ForgetReply, MaintenanceAdapter};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions};
use tower_dedup::{DedupTx, Delivery, ErrorKind, Replay};

use crate::support::effects::{Boxed, Database, MINUTE, answer, effect, lend, transactional};
use crate::support::{
    Body, FIRST, answered, by_header, dedup_key, on_claim, request, result, rows, send, terms,
};

/// A handler that writes its effect, then runs this SQL in the delivery's transaction.
fn writes_and_runs(sql: &str) -> Boxed {
    let sql = sql.to_owned();
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let sql = sql.clone();
        async move {
            let mut tx = lend(&request).await;
            effect(&mut tx, request.extensions().get().unwrap()).await.unwrap();
            tx.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.unwrap();
            Ok::<_, Infallible>(answer(true))
        }
    }))
}

/// A role without any privilege, for as long as this value lives.
struct Role<'d> {
    database: &'d Database,
    /// In quotes. It has signs of SQL and a placeholder of the adapter's.
    name: String,
}

impl<'d> Role<'d> {
    async fn fresh(database: &'d Database) -> Self {
        let name = format!("\"tower-dedup's {{keys}} {:016x}\"", rand::random::<u64>());
        database.run(format!("CREATE ROLE {name}")).await;
        Self { database, name }
    }

    /// Returns the name without quotes.
    fn plain(&self) -> &str {
        self.name.trim_matches('"')
    }

    async fn drop(self) {
        self.database.run(format!("DROP OWNED BY {0}; DROP ROLE {0}", self.name)).await;
    }
}

async fn commits_once(database: &Database, sql: &str) {
    let layer = transactional(&database.pool(2));
    let service = layer.layer(writes_and_runs(sql));
    for (id, expected) in [("a", None), ("a", Some("duplicate")), ("b", None)] {
        let response = send(&service, request(id)).await;
        assert_eq!(answered(&response), (200, expected), "{sql}");
        assert_eq!(database.effects_and_key(id).await, 1, "{sql}");
    }
    // The response is stored beside the key.
    let layer = transactional(&database.pool(2)).replay(Replay::new());
    let service = layer.layer(writes_and_runs(sql));
    for _ in 0..2 {
        assert_eq!(send(&service, request("stored")).await.status(), 200, "{sql}");
        assert_eq!(database.effects_and_key("stored").await, 1, "{sql}");
    }
    database.until_no_transaction_is_open().await;
}

#[tokio::test]
async fn search_path_of_a_handler_does_not_hide_the_table() {
    let database = Database::fresh().await;
    // One schema without such a table, and one with it.
    let (without, with) = (database.other_schema(), database.other_schema());
    PostgresAdapter::connect(&with.url()).await.unwrap().migrate().await.unwrap();
    for path in [without.name(), with.name(), "''"] {
        commits_once(&database, &format!("SET LOCAL search_path = {path}")).await;
        database.run("TRUNCATE webhook_deliveries, effects").await;
    }
}

#[tokio::test]
async fn role_of_a_handler_does_not_refuse_the_completion() {
    let database = Database::fresh().await;
    let role = Role::fresh(&database).await;
    commits_once(&database, &format!("SET LOCAL ROLE {}", role.name)).await;
    role.drop().await;
}

/// A pool may give its connections a role that is not the role that the session began with.
#[tokio::test]
async fn role_of_the_claim_is_the_role_of_the_completion() {
    let database = Database::fresh().await;
    let role = Role::fresh(&database).await;
    PostgresAdapter::new(database.pool(1)).migrate().await.unwrap();
    database
        .run(format!(
            "ALTER TABLE webhook_deliveries OWNER TO {0}; GRANT ALL ON effects, effects_run_seq TO {0}; \
             GRANT ALL ON webhook_deliveries_schema TO {0}; \
             GRANT USAGE ON SCHEMA {1} TO {0}; REVOKE ALL ON webhook_deliveries FROM PUBLIC",
            role.name,
            database.name(),
        ))
        .await;
    let set = format!("SET ROLE {}", role.name);
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .after_connect(move |connection, _| {
            let set = set.clone();
            Box::pin(async move { connection.execute(AssertSqlSafe(set)).await.map(drop) })
        })
        .connect_lazy_with(database.options());
    // A trigger sees the role of each write.
    database
        .run(
            "CREATE TABLE roles (role text); GRANT ALL ON roles TO PUBLIC; \
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO roles VALUES (current_user); RETURN NEW; END $$; \
             CREATE TRIGGER note BEFORE UPDATE ON webhook_deliveries \
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
    let service = transactional(&pool).layer(writes_and_runs("SET LOCAL ROLE NONE"));
    assert_eq!(send(&service, request("a")).await.status(), 200);
    assert_eq!(database.effects_and_key("a").await, 1);
    let roles: Vec<String> = sqlx::query_scalar("SELECT role FROM roles")
        .fetch_all(database.effects.pool())
        .await
        .unwrap();
    assert_eq!(roles, [role.plain()]);
    role.drop().await;
}

/// A deferred constraint trigger of the handler's table, which a policy may rely on. Up to Postgres 17 it
/// runs as the role at COMMIT, from Postgres 18 on as the role that wrote the row.
#[tokio::test]
async fn deferred_triggers_run_as_the_role_of_the_handler() {
    let database = Database::fresh().await;
    let role = Role::fresh(&database).await;
    database
        .run(
            "CREATE TABLE roles (role text); GRANT ALL ON roles TO PUBLIC; \
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO roles VALUES (current_user); RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER note AFTER INSERT ON effects INITIALLY DEFERRED \
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
    let schema = database.name();
    let grant = "GRANT USAGE ON SCHEMA";
    database.run(format!("{grant} {schema} TO {0}; GRANT ALL ON effects TO {0}", role.name)).await;
    let sql = format!("SET LOCAL ROLE {}; INSERT INTO effects VALUES (0, 'b', false)", role.name);
    let service = transactional(&database.pool(2)).layer(writes_and_runs(&sql));
    assert_eq!(send(&service, request("a")).await.status(), 200);
    assert_eq!(database.effects_and_key("a").await, 1);
    let roles: Vec<String> = sqlx::query_scalar("SELECT role FROM roles ORDER BY ctid")
        .fetch_all(database.effects.pool())
        .await
        .unwrap();
    assert_eq!((roles.len(), &*roles[1]), (2, role.plain()));
    role.drop().await;
}

/// A role that cannot be set back: the handler caused it, so the store has not failed.
#[tokio::test]
async fn completion_that_is_not_allowed_is_uncommitted() {
    let database = Database::fresh().await;
    let role = Role::fresh(&database).await;
    let sql = format!("SET LOCAL SESSION AUTHORIZATION {}", role.name);
    let service = transactional(&database.pool(2)).layer(writes_and_runs(&sql));
    let drops = transactional(&database.pool(2));
    let drops = drops.layer(writes_and_runs("DROP TABLE webhook_deliveries"));
    for service in [&service, &drops] {
        let response = send(service, request("a")).await;
        assert_eq!(answered(&response), (500, Some("uncommitted")));
        assert_eq!(database.effects_and_key("a").await, 0);
    }
    database.until_no_transaction_is_open().await;
    role.drop().await;
}

/// A handler that forgets `LOCAL`: its connection goes back to the pool with another path.
#[tokio::test]
async fn search_path_of_a_session_does_not_change_the_table() {
    let database = Database::fresh().await;
    let with = database.other_schema();
    PostgresAdapter::connect(&with.url()).await.unwrap().migrate().await.unwrap();
    let service = transactional(&database.pool(1));
    let service = service.layer(tower::service_fn(async |request: Request<Body>| {
        let mut tx: DedupTx<_> = lend(&request).await;
        let delivery: &Delivery = request.extensions().get().unwrap();
        let written = tx.execute("SELECT 1 FROM webhook_deliveries LIMIT 1").await.is_ok();
        let schema = request.headers().get("schema").unwrap().to_str().unwrap();
        let set = format!("SET search_path = {schema}");
        tx.execute(AssertSqlSafe(set)).await.unwrap();
        assert!(written && delivery.attempt() == 1);
        Ok::<_, Infallible>(Response::new(Body::default()))
    }));
    let deliver = async |id: &str| {
        let mut request = request(id);
        request.headers_mut().insert("schema", with.name().parse().unwrap());
        send(&service, request).await
    };
    assert_eq!(deliver("a").await.status(), 200);
    assert_eq!(result(&deliver("a").await), Some("duplicate"));
    let own = PostgresAdapter::connect(&with.url()).await.unwrap();
    assert_eq!(rows(&own).await, 0, "the other table");
}

/// The table is dropped after use, as by a restore, or by a switch to another database behind the
/// same address.
#[tokio::test]
async fn dropped_table_is_created_again() {
    let database = Database::fresh().await;
    let adapter = PostgresAdapter::with_options(database.pool(3), PostgresOptions::new());
    let (key, mine) = (dedup_key("a"), terms());
    let service = tower_dedup::DedupLayer::transactional(by_header(), adapter.clone());
    let service = service.layer(writes_and_runs("SELECT"));
    adapter.migrate().await.unwrap();
    for case in 0..9 {
        database.run("DROP TABLE webhook_deliveries, webhook_deliveries_schema").await;
        match case {
            0 => {
                let claimed = adapter.claim(&key, &mine).await.unwrap();
                assert_eq!(claimed, ClaimReply::first(1, false));
            }
            1 => {
                let recorded = adapter.claim(&key, &on_claim(&mine)).await.unwrap();
                assert_eq!(recorded, FIRST);
            }
            2 => {
                let completed = adapter.complete(&key, &mine).await.unwrap();
                assert_eq!(completed, CompleteReply::Inserted);
            }
            3 => assert_eq!(adapter.get(&key).await.unwrap(), None),
            4 => assert_eq!(adapter.purge(10).await.unwrap(), 0),
            5 => assert_eq!(adapter.forget(&key).await.unwrap(), ForgetReply::Missing),
            6 => assert_eq!(send(&service, request("a")).await.status(), 200),
            7 => {
                let fetching = mine.clone().with_fetch(Fetch::Digest);
                assert_eq!(adapter.claim(&key, &fetching).await.unwrap(), FIRST);
            }
            _ => {
                // The caller's transaction is lost; the next one succeeds.
                let once = async || {
                    let mut tx = database.effects.pool().begin().await.unwrap();
                    let recorded = adapter.record_in(&mut tx, &key, MINUTE).await;
                    tx.rollback().await.unwrap();
                    recorded
                };
                assert_eq!(once().await.unwrap_err().kind(), ErrorKind::Refused);
                assert_eq!(once().await.unwrap(), FIRST);
            }
        }
    }
}
