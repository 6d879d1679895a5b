//! A receiver with an inbox: its keys and effects are in a schema of Postgres, and its table is where the test says.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use http::{Request, Response, StatusCode};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinHandle;
use tower::{Service, ServiceExt};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::ledger::Transactional;
use tower_dedup::{CommitError, DedupLayer, Delivery, KeyExtractor, key};
use tower_dedup_inbox::{Inbox, Parked, Selection, ShownRow};

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
    /// The statuses of the next runs, then 200. 299 is a success without a COMMIT; 0 panics.
    pub(crate) plan: Arc<Mutex<Vec<u16>>>,
    /// `id:status:attempt` of each run.
    pub(crate) runs: Arc<Mutex<Vec<String>>>,
}

pub(crate) struct World {
    pub(crate) inbox: Inbox,
    pub(crate) app: App,
    pub(crate) store: PostgresAdapter,
    pub(crate) schema: Schema,
    #[expect(dead_code, reason = "its drop removes the file")]
    directory: tempfile::TempDir,
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
    event: Delivery,
) -> Result<StatusCode, CommitError> {
    let ids: Vec<String> = event.keys().map(|key| key.id().to_owned()).collect();
    let next = {
        let mut plan = app.plan.lock().unwrap();
        if plan.is_empty() { 200 } else { plan.remove(0) }
    };
    app.runs.lock().unwrap().push(format!("{}:{next}:{}", ids.join("+"), event.attempt()));
    match next {
        0 => panic!("on purpose"),
        200 => {
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
        let directory = tempfile::tempdir().unwrap();
        let schema = Schema::fresh();
        let pool = PgPoolOptions::new().max_connections(8).connect(&schema.url()).await.unwrap();
        sqlx::raw_sql(
            "CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, id text NOT NULL)",
        )
        .execute(&pool)
        .await
        .unwrap();
        let store = PostgresAdapter::new(pool.clone());
        store.migrate().await.unwrap();
        let inbox = match place {
            Place::Postgres => Inbox::postgres(pool.clone(), "shop"),
            Place::Sqlite => Inbox::sqlite(directory.path().join("inbox.db"), "shop"),
        };
        let inbox = inbox.delays([SHORT; 3]).turn(Duration::from_secs(2));
        inbox.migrate().await.unwrap();
        let app = App { pool, plan: Arc::default(), runs: Arc::default() };
        Self { inbox, app, store, schema, directory }
    }

    pub(crate) fn dedup(&self, keys: KeyExtractor) -> DedupLayer<Transactional> {
        DedupLayer::transactional(keys, self.store.clone())
    }

    /// Returns the application with one route, `/hook`.
    pub(crate) fn router(&self) -> Router {
        self.router_of(self.dedup(one()))
    }

    pub(crate) fn router_of(&self, dedup: DedupLayer<Transactional>) -> Router {
        let route = axum::routing::post(on_event).layer(self.inbox.around(dedup));
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

    /// Returns why the rows are parked, in their order.
    pub(crate) async fn parked(&self) -> Vec<Option<Parked>> {
        self.rows().await.iter().map(|row| row.parked).collect()
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
    pub(crate) async fn until_parked(&self) -> Vec<Parked> {
        for _ in 0..1_000 {
            let rows = self.parked().await;
            if !rows.is_empty() && rows.iter().all(Option::is_some) {
                return rows.into_iter().flatten().collect();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("runs {:?}, rows {:#?}", self.runs(), self.rows().await);
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
