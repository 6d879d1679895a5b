//! Effects of handlers, in the database of the keys. Each run writes one row, and no constraint
//! refuses a second row.

use std::convert::Infallible;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, PgConnection, PgPool};
use tower::Service;
use tower::util::BoxCloneSyncService;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{CallTerms, DedupAdapter};
use tower_dedup::ledger::Transactional;
use tower_dedup::{CommitError, DedupKey, DedupLayer, Delivery};

use super::postgres::Schema;
use super::proxy::{Proxy, through, to_postgres};
use super::{Body, Handler, by_header, request, send, until_async};

/// A handler.
pub type Boxed = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

pub struct Effects(PgPool);

impl Effects {
    /// Creates the effects table in the first schema of the URL's search path.
    pub async fn create(url: &str) -> Self {
        let pool = PgPoolOptions::new().max_connections(2).connect(url).await.unwrap();
        // The numbers come from a sequence, which counts writes that are rolled back too.
        let create = sqlx::raw_sql("CREATE TABLE effects (run bigserial, id text NOT NULL)");
        create.execute(&pool).await.unwrap();
        Self(pool)
    }

    /// Returns the pool, for other questions about the database.
    pub fn pool(&self) -> &PgPool {
        &self.0
    }

    /// Returns the number of effects of this event.
    pub async fn of(&self, id: &str) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM effects WHERE id = $1").bind(id);
        count.fetch_one(&self.0).await.unwrap()
    }

    /// Returns how many effects were ever written, including those that were rolled back.
    pub async fn runs(&self) -> i64 {
        let last = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM effects_run_seq";
        sqlx::query_scalar(last).fetch_one(&self.0).await.unwrap()
    }

    /// Asserts that each of these events, and no other, has taken effect once.
    pub async fn assert_once(&self, ids: impl IntoIterator<Item = String>) {
        let all = sqlx::query_scalar("SELECT id FROM effects").fetch_all(&self.0);
        let mut all: Vec<String> = all.await.unwrap();
        let mut ids: Vec<_> = ids.into_iter().collect();
        all.sort();
        ids.sort();
        assert_eq!(all, ids);
    }
}

/// Writes the effect of a delivery.
pub async fn effect(connection: &mut PgConnection, delivery: &Delivery) -> sqlx::Result<()> {
    let insert = sqlx::query("INSERT INTO effects (id) VALUES ($1)").bind(delivery.id().to_owned());
    insert.execute(connection).await.map(drop)
}

pub const MINUTE: Duration = Duration::from_secs(60);

const OURS: &str = "pg_stat_activity WHERE application_name = $1";

/// A fresh schema with its effects, and pools whose sessions can be told from other sessions.
pub struct Database {
    pub effects: Effects,
    schema: Schema,
}

impl Database {
    pub async fn fresh() -> Self {
        Self::of(Schema::alone()).await
    }

    /// Creates the effects table in this schema.
    pub async fn of(schema: Schema) -> Self {
        Self { effects: Effects::create(&schema.url()).await, schema }
    }

    /// Returns the name of the schema, and of the pools' sessions.
    pub fn name(&self) -> &str {
        self.schema.name()
    }

    pub fn options(&self) -> PgConnectOptions {
        let options: PgConnectOptions = self.schema.url().parse().unwrap();
        options.application_name(self.schema.name())
    }

    pub fn pool(&self, connections: u32) -> PgPool {
        self.pool_with(connections, self.options())
    }

    pub fn pool_with(&self, connections: u32, options: PgConnectOptions) -> PgPool {
        PgPoolOptions::new().max_connections(connections).connect_lazy_with(options)
    }

    /// Returns a pool whose sessions have these settings, as a role's sessions may have.
    pub fn pool_set(&self, connections: u32, settings: &[(&str, &str)]) -> PgPool {
        self.pool_with(connections, self.options().options(settings.iter().copied()))
    }

    /// Returns a proxy, and a pool whose connections pass through the proxy.
    pub async fn proxied(&self, connections: u32) -> (Proxy, PgPool) {
        let proxy = to_postgres(&self.options()).await;
        let pool = self.pool_with(connections, through(proxy.port(), self.options()));
        (proxy, pool)
    }

    /// Runs SQL on a connection outside the pools.
    pub async fn run(&self, sql: impl Into<String>) {
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.into()));
        sql.execute(self.effects.pool()).await.unwrap();
    }

    /// Closes a gate: sessions wait (`pg_sleep`) at this event, such as `"BEFORE INSERT ON
    /// effects"`, until the gate is dropped. A deferred trigger waits in COMMIT.
    ///
    /// The gate is no lock, because `lock_timeout` would end the wait.
    pub async fn gate(&self, at: &str) -> Gate {
        let number: u32 = rand::random();
        let options: PgConnectOptions = self.schema.url().parse().unwrap();
        let mut closed = options.connect().await.unwrap();
        let lock = sqlx::query("SELECT pg_advisory_lock($1)").bind(i64::from(number));
        lock.execute(&mut closed).await.unwrap();
        let (trigger, deferred) = match at.strip_prefix("COMMIT AFTER ") {
            Some(event) => ("CONSTRAINT TRIGGER", format!("AFTER {event} INITIALLY DEFERRED")),
            None => ("TRIGGER", at.to_owned()),
        };
        self.run(format!(
            "CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             WHILE NOT pg_try_advisory_lock_shared(TG_ARGV[0]::int8) LOOP \
             PERFORM pg_sleep(0.005); END LOOP; \
             PERFORM pg_advisory_unlock_shared(TG_ARGV[0]::int8); RETURN NEW; END $$; \
             CREATE {trigger} \"{number}\" {deferred} FOR EACH ROW EXECUTE FUNCTION gate('{number}')"
        ))
        .await;
        Gate { _closed: closed }
    }

    /// Returns how many of the pools' sessions match this condition on `pg_stat_activity`.
    pub async fn sessions(&self, such: &str) -> i64 {
        self.count(format!("SELECT count(*) FROM {OURS} AND ({such})")).await
    }

    /// Terminates the pools' sessions that match, and returns their number. A session that waits at
    /// a gate polls it; the condition has to match its sleep.
    pub async fn terminate(&self, such: &str) -> i64 {
        // The sessions are chosen first, because a WHERE may evaluate its conditions in any order.
        let terminate = format!(
            "WITH ours AS MATERIALIZED (SELECT pid FROM {OURS} AND ({such})) \
             SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM ours"
        );
        for _ in 0..1_000 {
            let ended = self.count(terminate.clone()).await;
            if ended > 0 {
                return ended;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        0
    }

    async fn count(&self, sql: String) -> i64 {
        let count = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(self.schema.name());
        count.fetch_one(self.effects.pool()).await.unwrap()
    }

    /// Waits until this many of the pools' sessions match.
    #[track_caller]
    pub fn until_sessions(&self, such: &str, count: i64) -> impl Future<Output = ()> {
        until_async(move || async move { self.sessions(such).await == count })
    }

    /// Waits until no connection of the pools is inside a transaction.
    pub async fn until_no_transaction_is_open(&self) {
        self.until_sessions("state LIKE 'idle in transaction%'", 0).await;
    }

    /// Returns the number of the event's effects, and asserts that as many keys are complete. One
    /// statement sees one moment.
    pub async fn effects_and_key(&self, id: &str) -> i64 {
        let sql = "SELECT (SELECT count(*) FROM effects WHERE id = $1), \
                   (SELECT count(completed_at) FROM webhook_deliveries WHERE id = $1)";
        let (effects, keys): (i64, i64) =
            sqlx::query_as(sql).bind(id).fetch_one(self.effects.pool()).await.unwrap();
        assert_eq!(effects, keys, "the effects of {id}, and its complete keys");
        effects
    }
}

/// A gate, which opens when this value is dropped.
pub struct Gate {
    _closed: PgConnection,
}

/// The condition on `pg_stat_activity` that matches a session at a gate.
pub const AT_A_GATE: &str = "wait_event = 'PgSleep'";

/// Writes the effect of a delivery in a transaction that completes it, after `then` has waited.
pub async fn commit_effect(
    pool: &PgPool,
    event: &Delivery,
    then: impl Future<Output = ()>,
) -> Result<(), CommitError> {
    let mut tx = event.begin(pool).await?;
    effect(&mut tx, event).await?;
    then.await;
    tx.commit().await
}

/// Completes these claimed keys in a transaction of the user's.
pub async fn complete_in(
    pool: &PgPool,
    adapter: &PostgresAdapter,
    keys: &[DedupKey],
    terms: &CallTerms,
) {
    let keys: Vec<_> = keys.iter().map(|key| (key, terms)).collect();
    let completion = adapter.completion(&keys).unwrap().as_first_statement();
    let completed = sqlx::query(sqlx::AssertSqlSafe(completion.sql().to_owned()));
    completed.bind(completion.parameter().to_owned()).execute(pool).await.unwrap();
}

/// A handler that writes its effect in a transaction that completes the delivery, and fails if the commit fails.
pub fn write(pool: &PgPool) -> Boxed {
    let pool = pool.clone();
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let pool = pool.clone();
        async move {
            let event = request.extensions().get().unwrap();
            Ok(answer(commit_effect(&pool, event, async {}).await.is_ok()))
        }
    }))
}

pub fn answer(success: bool) -> Response<Body> {
    let mut response = Response::new(Body::default());
    if !success {
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    }
    response
}

pub fn transactional(pool: &PgPool) -> DedupLayer<Transactional> {
    DedupLayer::transactional(by_header(), PostgresAdapter::new(pool.clone()))
}

/// Delivers the event until it is acknowledged, as its sender does.
pub async fn until_acknowledged<S, B>(service: &S, id: &str)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
{
    let acknowledged = async {
        while send(service, request(id)).await.status() != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(MINUTE, acknowledged).await.expect("an end");
}

/// A handler that writes its effect, then does as `held` says, then commits.
pub fn writes_and_waits(pool: &PgPool, held: &Handler) -> Boxed {
    let (pool, held) = (pool.clone(), held.clone());
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let (pool, held) = (pool.clone(), held.clone());
        async move {
            let event = request.extensions().get::<Delivery>().unwrap().clone();
            let waits = async { drop(held.run(request).await.unwrap()) };
            Ok(answer(commit_effect(&pool, &event, waits).await.is_ok()))
        }
    }))
}

/// A handler that writes its effect on a connection that does not break.
pub fn apart(database: &Database) -> Boxed {
    let pool = database.effects.pool().clone();
    Boxed::new(tower::service_fn(move |request: Request<Body>| {
        let pool = pool.clone();
        async move {
            let mut connection = pool.acquire().await.unwrap();
            effect(&mut connection, request.extensions().get().unwrap()).await.unwrap();
            Ok(answer(true))
        }
    }))
}
