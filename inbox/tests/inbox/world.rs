//! A receiver with an inbox: its keys and effects are in a schema of Postgres, and its table is where the test says.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{OriginalUri, State};
use http::{HeaderMap, Request, Response, StatusCode};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgPool, SqliteConnection};
use tokio::task::JoinHandle;
use tower::{Service, ServiceExt};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::ledger::Transactional;
use tower_dedup::{CommitError, DedupLayer, Delivery, KeyExtractor, key};
use tower_dedup_inbox::{Around, Inbox, Parked, Selection, ShownRow};

use support::postgres::Schema;

/// Where the table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Postgres,
    Sqlite,
}

/// Runs a test with the table in each database.
macro_rules! on_each {
    ($($name:ident)+) => {
        mod postgres {
            $(#[tokio::test]
            async fn $name() {
                super::$name(crate::world::Place::Postgres).await;
            })+
        }

        mod sqlite {
            $(#[tokio::test]
            async fn $name() {
                super::$name(crate::world::Place::Sqlite).await;
            })+
        }
    };
}
pub(crate) use on_each;

#[derive(Clone)]
pub(crate) struct App {
    pub(crate) pool: PgPool,
    /// The statuses of the next runs, then 200. 299 is a success without a COMMIT; 0 panics; from 1,000 on,
    /// a success after so many milliseconds above it.
    pub(crate) plan: Arc<Mutex<Vec<u16>>>,
    /// `id:status:attempt` of each run.
    pub(crate) runs: Arc<Mutex<Vec<String>>>,
    /// The target and the headers of the last run.
    pub(crate) seen: Arc<Mutex<(String, HeaderMap)>>,
}

pub(crate) struct World {
    pub(crate) place: Place,
    pub(crate) inbox: Inbox,
    pub(crate) app: App,
    pub(crate) store: PostgresAdapter,
    pub(crate) url: String,
    /// Removed with the first process.
    directory: Arc<tempfile::TempDir>,
    _schema: Option<Schema>,
}

/// The loop of a process. Dropped, it ends as if the process had died.
pub(crate) struct Loop(JoinHandle<()>);

impl Drop for Loop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Commits the effect of its events as the plan says.
pub(crate) async fn on_event(
    State(app): State<App>,
    OriginalUri(target): OriginalUri,
    headers: HeaderMap,
    event: Delivery,
) -> Result<StatusCode, CommitError> {
    let ids: Vec<String> = event.keys().map(|key| key.id().to_owned()).collect();
    let next = {
        let mut plan = app.plan.lock().unwrap();
        if plan.is_empty() { 200 } else { plan.remove(0) }
    };
    *app.seen.lock().unwrap() = (target.to_string(), headers);
    app.runs.lock().unwrap().push(format!("{}:{next}:{}", ids.join("+"), event.attempt()));
    match next {
        0 => panic!("on purpose"),
        200 | 1_000.. => {
            tokio::time::sleep(Duration::from_millis(next.saturating_sub(1_000).into())).await;
            let mut transaction = event.begin(&app.pool).await?;
            for id in &ids {
                sqlx::query("INSERT INTO effects (id) VALUES ($1)")
                    .bind(id)
                    .execute(&mut *transaction)
                    .await?;
            }
            transaction.commit().await?;
            Ok(StatusCode::OK)
        }
        299 => Ok(StatusCode::OK),
        status => Ok(StatusCode::from_u16(status).unwrap()),
    }
}

pub(crate) fn one() -> KeyExtractor {
    key::header("webhook-id").namespace("acme")
}

pub(crate) fn each() -> KeyExtractor {
    key::each("/e", key::json("/id")).namespace("acme")
}

pub(crate) const SHORT: Duration = Duration::from_millis(300);

impl World {
    pub(crate) async fn new(place: Place) -> Self {
        Self::with(place, |inbox| inbox).await
    }

    pub(crate) async fn with(place: Place, set: impl FnOnce(Inbox) -> Inbox) -> Self {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let schema = Schema::fresh();
        let app = App {
            pool: PgPoolOptions::new().connect_lazy(&schema.url()).unwrap(),
            plan: Arc::default(),
            runs: Arc::default(),
            seen: Arc::default(),
        };
        let world = Self::make(place, schema.url(), directory, app, set).await;
        let effects =
            "CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, id text NOT NULL)";
        sqlx::raw_sql(effects).execute(&world.app.pool).await.unwrap();
        world.store.migrate().await.unwrap();
        world.inbox.migrate().await.unwrap();
        Self { _schema: Some(schema), ..world }
    }

    async fn make(
        place: Place,
        url: String,
        directory: Arc<tempfile::TempDir>,
        app: App,
        set: impl FnOnce(Inbox) -> Inbox,
    ) -> Self {
        let pool = PgPoolOptions::new().max_connections(8).connect(&url).await.unwrap();
        let store = PostgresAdapter::new(pool.clone());
        let inbox = match place {
            Place::Postgres => Inbox::postgres(pool.clone(), "shop"),
            Place::Sqlite => Inbox::sqlite(directory.path().join("inbox.db"), "shop"),
        };
        let inbox = set(inbox.delays([SHORT; 3]).turn(Duration::from_secs(2)));
        let app = App { pool, ..app };
        Self { place, inbox, app, store, url, directory, _schema: None }
    }

    /// Returns another process of the service, with connections and an inbox of its own.
    pub(crate) fn process<F>(&self, set: F) -> impl Future<Output = Self> + use<F>
    where
        F: FnOnce(Inbox) -> Inbox,
    {
        let (url, directory) = (self.url.clone(), Arc::clone(&self.directory));
        Self::make(self.place, url, directory, self.app.clone(), set)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Executes a statement in the database of the table: this one on Postgres, or that one on SQLite.
    pub(crate) async fn sql(&self, postgres: &str, sqlite: &str) {
        match self.place {
            Place::Postgres => {
                let sql = sqlx::raw_sql(AssertSqlSafe(postgres.to_owned()));
                sql.execute(&self.app.pool).await.unwrap();
            }
            Place::Sqlite => {
                let sql = sqlx::raw_sql(AssertSqlSafe(sqlite.to_owned()));
                sql.execute(&mut self.sqlite().await).await.unwrap();
            }
        }
    }

    pub(crate) async fn sqlite(&self) -> SqliteConnection {
        let file = self.directory.path().join("inbox.db");
        SqliteConnection::connect(&format!("sqlite://{}", file.display())).await.unwrap()
    }

    /// Makes all rows older.
    pub(crate) async fn age(&self, days: u32) {
        let postgres =
            format!("UPDATE webhook_inbox SET received = received - interval '{days} days'");
        let sqlite = format!("UPDATE webhook_inbox SET received = received - {days} * 86400000");
        self.sql(&postgres, &sqlite).await;
    }

    pub(crate) fn dedup(&self, keys: KeyExtractor) -> DedupLayer<Transactional, Body> {
        let dedup = DedupLayer::transactional(keys, self.store.clone());
        dedup.lease(Duration::from_secs(3)).inner_body::<Body>()
    }

    /// Returns the application with one route, `/hook`.
    pub(crate) fn router(&self) -> Router {
        self.router_of(self.dedup(one()))
    }

    pub(crate) fn router_of(&self, dedup: DedupLayer<Transactional, Body>) -> Router {
        self.router_around(self.inbox.around(dedup))
    }

    pub(crate) fn router_around(&self, around: Around<Transactional, Body>) -> Router {
        let route = axum::routing::post(on_event).layer(around);
        Router::new().route("/hook", route).with_state(self.app.clone())
    }

    pub(crate) fn plan(&self, statuses: impl IntoIterator<Item = u16>) {
        self.app.plan.lock().unwrap().extend(statuses);
    }

    pub(crate) fn runs(&self) -> Vec<String> {
        self.app.runs.lock().unwrap().clone()
    }

    pub(crate) fn start<S>(&self, app: S) -> Loop
    where
        S: Service<Request<http_body_util::Full<bytes::Bytes>>, Response = Response<Body>>,
        S: Service<Request<http_body_util::Full<bytes::Bytes>>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send,
    {
        Loop(tokio::spawn(self.inbox.run(app, std::future::pending())))
    }

    pub(crate) async fn effects(&self) -> Vec<String> {
        let all = sqlx::query_scalar("SELECT id FROM effects ORDER BY n");
        all.fetch_all(&self.app.pool).await.unwrap()
    }

    pub(crate) async fn rows(&self) -> Vec<ShownRow> {
        self.inbox.list(&Selection::default(), 0, 1_000).await.unwrap()
    }

    /// Waits until the effects are these and the table is empty, for 20 s at most.
    #[track_caller]
    pub(crate) fn until_done(&self, effects: &[&str]) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            for _ in 0..1_000 {
                if self.effects().await == effects && self.rows().await.is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let (found, rows) = (self.effects().await, self.rows().await);
            panic!("at {caller}: effects {found:?}, runs {:?}, rows {rows:#?}", self.runs());
        }
    }

    /// Waits until every row is parked, and returns why.
    #[track_caller]
    pub(crate) fn until_parked(&self) -> impl Future<Output = Vec<Parked>> {
        let rows =
            self.until(|rows| !rows.is_empty() && rows.iter().all(|row| row.parked.is_some()));
        async { rows.await.into_iter().filter_map(|row| row.parked).collect() }
    }

    /// Waits until the rows are so, for 20 s at most, and returns them.
    #[track_caller]
    pub(crate) fn until(
        &self,
        is_met: impl Fn(&[ShownRow]) -> bool,
    ) -> impl Future<Output = Vec<ShownRow>> {
        let caller = std::panic::Location::caller();
        async move {
            for _ in 0..1_000 {
                let rows = self.rows().await;
                if is_met(&rows) {
                    return rows;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            panic!("at {caller}: runs {:?}, rows {:#?}", self.runs(), self.rows().await);
        }
    }

    /// Waits until so many runs have begun.
    pub(crate) async fn until_runs(&self, runs: usize) {
        self.until(|_| self.runs().len() >= runs).await;
    }
}

pub(crate) fn request(id: &str, body: &str) -> Request<Body> {
    let request = Request::post("/hook").header("webhook-id", id);
    request.body(Body::from(body.to_owned())).unwrap()
}

/// Returns the status and the value of the result header.
pub(crate) async fn send(app: &Router, request: Request<Body>) -> (u16, Option<String>) {
    let response = app.clone().oneshot(request).await.unwrap();
    let result = response.headers().get("x-dedup-result");
    (response.status().as_u16(), result.map(|it| it.to_str().unwrap().to_owned()))
}

pub(crate) fn stored() -> (u16, Option<String>) {
    (200, Some("stored".to_owned()))
}
