//! What handlers did, in the same database as the keys: one row a run, and nothing that would
//! refuse a second one.

use std::collections::HashMap;

use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tower_dedup::Delivery;

pub(crate) struct Effects(PgPool);

impl Effects {
    /// With a table of its own in the first schema of the URL's search path.
    pub(crate) async fn create(url: &str) -> Self {
        let pool = PgPoolOptions::new().max_connections(2).connect(url).await.unwrap();
        // The numbers come from a sequence, which counts what is rolled back too.
        sqlx::raw_sql(
            "CREATE TABLE effects (run bigserial, id text NOT NULL, takeover bool NOT NULL)",
        )
        .execute(&pool)
        .await
        .unwrap();
        Self(pool)
    }

    /// For what else a test wants to know of the database.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.0
    }

    /// How many there are of this event.
    pub(crate) async fn of(&self, id: &str) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM effects WHERE id = $1").bind(id);
        count.fetch_one(&self.0).await.unwrap()
    }

    /// Whether each run of an event was a takeover, by event.
    pub(crate) async fn all(&self) -> HashMap<String, Vec<bool>> {
        let rows: Vec<(String, bool)> =
            sqlx::query_as("SELECT id, takeover FROM effects").fetch_all(&self.0).await.unwrap();
        let mut all: HashMap<String, Vec<bool>> = HashMap::new();
        for (id, takeover) in rows {
            all.entry(id).or_default().push(takeover);
        }
        all
    }

    /// How many were ever written, those included that were rolled back.
    pub(crate) async fn runs(&self) -> i64 {
        let last = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM effects_run_seq";
        sqlx::query_scalar(last).fetch_one(&self.0).await.unwrap()
    }

    /// Each of these events, and no other, has taken effect once.
    pub(crate) async fn assert_once(&self, ids: impl IntoIterator<Item = String>) {
        let mut all = self.all().await;
        for id in ids {
            let runs = all.remove(&id).unwrap_or_default();
            assert_eq!(runs.len(), 1, "the effects of {id}");
        }
        assert!(all.is_empty(), "nobody has sent {all:?}");
    }
}

/// The effect of a delivery.
pub(crate) async fn effect(connection: &mut PgConnection, delivery: &Delivery) -> sqlx::Result<()> {
    sqlx::query("INSERT INTO effects (id, takeover) VALUES ($1, $2)")
        .bind(delivery.key().map(|key| key.id().to_owned()))
        .bind(delivery.takeover())
        .execute(connection)
        .await
        .map(drop)
}
