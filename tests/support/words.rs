//! Deliveries whose body lists events: one for every word.

use futures_util::future::BoxFuture;
use sqlx::postgres::Postgres;
use sqlx::sqlite::Sqlite;
use sqlx::{AssertSqlSafe, Pool};
use tower_dedup::adapter::CompletionDatabase;
use tower_dedup::key::{Event, Extracted, Keys};
use tower_dedup::{DedupKey, KeyExtractor};

/// One event for every word of the body: `id`, or `id=second` for a second identity; `id:way` says
/// how the event ends.
pub fn by_word() -> KeyExtractor {
    KeyExtractor::from_fn("test", |request| {
        let body = std::str::from_utf8(request.body()).unwrap();
        let events = words(body).map(|(name, _)| {
            Ok(match name.split_once('=') {
                Some((id, second)) => Event::new(DedupKey::new("test", id)?)
                    .with_alias(DedupKey::new("test.second", second)?),
                None => Event::new(DedupKey::new("test", name)?),
            })
        });
        Ok(Keys::new(events.collect::<Result<_, _>>()?).map_or(Extracted::Missing, Extracted::Keys))
    })
}

pub fn words(body: &str) -> impl Iterator<Item = (&str, &str)> {
    body.split_whitespace().map(|word| word.split_once(':').unwrap_or((word, "")))
}

/// A database of the transactional ledger, with a table `effects`.
pub trait Sql: CompletionDatabase {
    fn execute(
        connection: &mut Self::Connection,
        sql: String,
        parameter: Option<String>,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>>;

    /// Returns the ids of all effects in order.
    fn effects(pool: &Pool<Self>) -> BoxFuture<'_, Vec<String>>;

    fn run(
        connection: &mut Self::Connection,
        sql: String,
    ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Self::execute(connection, sql, None)
    }
}

macro_rules! sql {
    ($($database:ty),+) => {$(
        impl Sql for $database {
            fn execute(
                connection: &mut Self::Connection,
                sql: String,
                parameter: Option<String>,
            ) -> BoxFuture<'_, Result<(), sqlx::Error>> {
                let query = sqlx::query(AssertSqlSafe(sql));
                Box::pin(async move {
                    let query = parameter.into_iter().fold(query, |query, it| query.bind(it));
                    query.execute(connection).await.map(drop)
                })
            }

            fn effects(pool: &Pool<Self>) -> BoxFuture<'_, Vec<String>> {
                let all = sqlx::query_scalar("SELECT id FROM effects ORDER BY id");
                Box::pin(async move { all.fetch_all(pool).await.unwrap() })
            }
        }
    )+};
}

sql!(Postgres, Sqlite);

pub fn insert<'i>(ids: impl IntoIterator<Item = &'i str>) -> String {
    let rows: Vec<String> = ids.into_iter().map(|id| format!("('{id}')")).collect();
    format!("INSERT INTO effects (id) VALUES {}", rows.join(", "))
}
