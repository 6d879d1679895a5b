//! A store of plain statements on Postgres, as a third party writes it. A [`Fault`] edits its statements.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor, PgPool, Row as _};
use tower_dedup::adapter::contract::{
    Abilities, CallTerms, ClaimReply, CompleteReply, DedupAdapter, Permanence, RenewReply, Seen,
    StoreFuture,
};
use tower_dedup::adapter::maintenance::{Entry, ForgetReply, MaintenanceAdapter, Stats};
use tower_dedup::{DedupKey, StoreError, StoreErrorKind};
use tower_dedup_conformance::{RemoteStore, Store};

use support::postgres::Schema;
use support::proxy::through;

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Sql {
    Table,
    Insert,
    Take,
    Release,
    ReleaseAtOnce,
    Renew,
    Forget,
}

/// A part of a statement, and the text in its place. The empty part is the whole statement.
pub(super) type Edit = (Sql, &'static str, &'static str);

pub(super) trait Fault: Send + Sync + 'static {
    const EDITS: &'static [Edit];
}

const TABLE: &str = "CREATE TABLE keys (
  namespace text, id text, token bytea, lease_until timestamptz, attempts int NOT NULL, takeover boolean NOT NULL,
  first_seen_at timestamptz NOT NULL, completed_at timestamptz, expires_at timestamptz NOT NULL,
  version bigint NOT NULL DEFAULT (extract(epoch FROM {now}) * 1000000)::bigint, PRIMARY KEY (namespace, id)
)";
const INSERT: &str = "INSERT INTO keys AS t
  (namespace, id, token, lease_until, attempts, takeover, first_seen_at, completed_at, expires_at)
VALUES ($1, $2, $3, {now} + {lease}, 1, false, {now}, CASE WHEN $5 IS NULL THEN {now} END, {now} + {retention})
ON CONFLICT (namespace, id) DO NOTHING
RETURNING attempts, takeover";
const READ: &str = "SELECT version, attempts, takeover, coalesce(token = $3, false) AS is_mine,
  completed_at IS NOT NULL AS is_complete, lease_until IS NOT NULL AS has_lease,
  coalesce(completed_at IS NULL AND lease_until > {now}, false) AS is_leased, expires_at <= {now} AS is_expired,
  (extract(epoch FROM {now} - first_seen_at) * 1000)::bigint AS age
FROM keys WHERE namespace = $1 AND id = $2";
const TAKE: &str = "UPDATE keys AS t SET version = t.version + 1, token = $3, lease_until = {now} + {lease},
  attempts = CASE WHEN {repeated} THEN t.attempts WHEN t.expires_at <= {now} THEN 1 ELSE t.attempts + 1 END,
  takeover = CASE WHEN {repeated} THEN t.takeover ELSE t.expires_at > {now} AND t.lease_until IS NOT NULL END,
  first_seen_at = CASE WHEN t.expires_at <= {now} THEN {now} ELSE t.first_seen_at END,
  completed_at = CASE WHEN $5 IS NULL THEN {now} END, expires_at = {now} + {retention}
WHERE namespace = $1 AND id = $2 AND t.version = $6
RETURNING attempts, takeover";
const RELEASE: &str =
    "INSERT INTO keys AS t (namespace, id, attempts, takeover, first_seen_at, expires_at)
VALUES ($1, $2, 0, false, {now}, {now})
ON CONFLICT (namespace, id) DO UPDATE SET version = t.version + 1,
  token = CASE WHEN {own} THEN NULL ELSE t.token END,
  lease_until = CASE WHEN {own} THEN NULL ELSE t.lease_until END,
  completed_at = CASE WHEN {own} THEN NULL ELSE t.completed_at END,
  attempts = CASE WHEN {own} AND $4 THEN 0 ELSE t.attempts END,
  expires_at = CASE WHEN {own} AND $4 THEN {now} ELSE greatest(t.expires_at, {now}) END";
const RENEW: &str = "INSERT INTO keys AS t
  (namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at)
VALUES ($1, $2, $3, {now} + {lease}, 1, false, {now}, {now} + {retention})
ON CONFLICT (namespace, id) DO UPDATE SET version = t.version + 1, lease_until = excluded.lease_until
WHERE t.completed_at IS NULL AND t.token = excluded.token AND t.lease_until IS NOT NULL";
const COMPLETE: &str = "INSERT INTO keys AS t
  (namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at)
VALUES ($1, $2, $3, 0, false, {now}, {now}, {now} + {retention})
ON CONFLICT (namespace, id) DO UPDATE SET version = t.version + 1, completed_at = {now}, lease_until = NULL,
  token = CASE WHEN t.completed_at IS NULL AND t.attempts > 0 THEN t.token ELSE excluded.token END,
  attempts = CASE WHEN t.completed_at IS NULL THEN t.attempts ELSE 0 END,
  expires_at = CASE WHEN t.expires_at <= {now} THEN excluded.expires_at ELSE t.expires_at END
WHERE t.completed_at IS NULL OR t.expires_at <= {now}";
const FORGET: &str =
    "UPDATE keys SET version = version + 1, token = NULL, lease_until = NULL, attempts = 0,
  completed_at = NULL, expires_at = {now}
WHERE namespace = $1 AND id = $2 AND version = $3";
const PURGE: &str = "DELETE FROM keys WHERE (namespace, id) IN (
  SELECT namespace, id FROM keys
  WHERE greatest(expires_at, CASE WHEN completed_at IS NULL THEN lease_until END) <= {now} - interval '1 hour'
  LIMIT $1
)";

fn sql<F: Fault>(which: Sql) -> AssertSqlSafe<String> {
    let text = match which {
        Sql::Table => TABLE,
        Sql::Insert => INSERT,
        Sql::Take => TAKE,
        Sql::Release | Sql::ReleaseAtOnce => RELEASE,
        Sql::Renew => RENEW,
        Sql::Forget => FORGET,
    };
    let mut text = text.to_owned();
    for (_, part, other) in F::EDITS.iter().filter(|(of, ..)| *of == which) {
        assert!(text.contains(part), "{part}");
        text = if part.is_empty() { (*other).to_owned() } else { text.replacen(part, other, 1) };
    }
    finished(&text)
}

fn finished(text: &str) -> AssertSqlSafe<String> {
    let text = text
        .replace("{own}", "(t.token = $3 AND (t.completed_at IS NOT NULL) = $4)")
        .replace("{repeated}", "($5 IS NOT NULL AND t.token = $3 AND t.completed_at IS NULL)")
        .replace("{retention}", "$4::bigint * interval '1 ms'")
        .replace("{lease}", "$5::bigint * interval '1 ms'")
        .replace("{now}", "clock_timestamp()");
    AssertSqlSafe(text)
}

fn unavailable(error: sqlx::Error) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "executing a statement").with_source(error)
}

pub(super) struct PlainAdapter<F>(PgPool, PhantomData<F>);

type Statement = Query<'static, sqlx::Postgres, PgArguments>;

/// The statement for this key and this token.
fn of(text: AssertSqlSafe<String>, key: &DedupKey, terms: &CallTerms) -> Statement {
    let (namespace, id) = (key.namespace().to_owned(), key.id().to_owned());
    sqlx::query(text).bind(namespace).bind(id).bind(terms.token().as_bytes().to_vec())
}

/// The same, with the retention and the lease.
fn timed(text: AssertSqlSafe<String>, key: &DedupKey, terms: &CallTerms) -> Statement {
    let is_leased = terms.permanence() != Permanence::OnClaim;
    let lease = is_leased.then(|| terms.lease_ms());
    of(text, key, terms).bind(terms.retention_ms()).bind(lease)
}

fn first(row: &PgRow) -> ClaimReply {
    let attempts: i32 = row.get("attempts");
    ClaimReply::first(u32::try_from(attempts).unwrap().max(1), row.get("takeover"))
}

impl<F: Fault> PlainAdapter<F> {
    async fn row(&self, statement: Statement) -> Result<Option<PgRow>, StoreError> {
        statement.fetch_optional(&self.0).await.map_err(unavailable)
    }

    async fn written(&self, statement: Statement) -> Result<u64, StoreError> {
        Ok(statement.execute(&self.0).await.map_err(unavailable)?.rows_affected())
    }

    async fn claimed(&self, key: &DedupKey, terms: &CallTerms) -> Result<ClaimReply, StoreError> {
        let at_once = terms.permanence() == Permanence::OnClaim;
        for _ in 0..5 {
            if let Some(row) = self.row(timed(sql::<F>(Sql::Insert), key, terms)).await? {
                return Ok(first(&row));
            }
            let Some(row) = self.row(of(finished(READ), key, terms)).await? else { continue };
            let flag = |name| row.get::<bool, _>(name);
            if flag("is_complete") && !flag("is_expired") {
                let is_repeated = at_once && flag("is_mine");
                let age = u64::try_from(row.get::<i64, _>("age")).unwrap_or_default();
                let duplicate = ClaimReply::Duplicate(Seen::new(Duration::from_millis(age)));
                return Ok(if is_repeated { first(&row) } else { duplicate });
            }
            if flag("is_leased") && (at_once || !flag("is_mine")) {
                return Ok(ClaimReply::InFlight);
            }
            let version: i64 = row.get("version");
            let take = timed(sql::<F>(Sql::Take), key, terms).bind(version);
            if let Some(row) = self.row(take).await? {
                return Ok(first(&row));
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "claiming a key that others change"))
    }
}

impl<F: Fault> DedupAdapter for PlainAdapter<F> {
    fn abilities(&self) -> Abilities {
        let mut abilities = Abilities::default();
        abilities.leases = true;
        abilities
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            self.abilities().check(terms)?;
            self.claimed(key, terms).await
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let at_once = terms.permanence() == Permanence::OnClaim;
            let AssertSqlSafe(text) =
                sql::<F>(if at_once { Sql::ReleaseAtOnce } else { Sql::Release });
            for part in text.split(";;") {
                let release = of(AssertSqlSafe(part.to_owned()), key, terms).bind(at_once);
                if self.written(release).await? > 0 {
                    break;
                }
            }
            Ok(())
        })
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        Box::pin(async move {
            let written = self.written(timed(sql::<F>(Sql::Renew), key, terms)).await?;
            Ok(if written > 0 { RenewReply::Held } else { RenewReply::Lost })
        })
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        Box::pin(async move {
            let complete = of(finished(COMPLETE), key, terms).bind(terms.retention_ms());
            self.written(complete).await?;
            let row = self.row(of(finished(READ), key, terms)).await?;
            let row = row
                .ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, "completing a key"))?;
            Ok(match (row.get::<bool, _>("is_mine"), row.get::<i32, _>("attempts")) {
                (true, 0) => CompleteReply::Inserted,
                (true, _) => CompleteReply::Held,
                (false, _) => CompleteReply::LeaseLost,
            })
        })
    }
}

impl<F: Fault> MaintenanceAdapter for PlainAdapter<F> {
    fn purge(&self, limit: u32) -> StoreFuture<'_, u64> {
        Box::pin(self.written(sqlx::query(finished(PURGE)).bind(i64::from(limit))))
    }

    fn forget<'a>(&'a self, key: &'a DedupKey) -> StoreFuture<'a, ForgetReply> {
        Box::pin(async move {
            let nobody = CallTerms::on_claim([0; 16].into(), Duration::ZERO);
            for _ in 0..5 {
                let Some(row) = self.row(of(finished(READ), key, &nobody)).await? else {
                    return Ok(ForgetReply::Missing);
                };
                if row.get("is_leased") || row.get("is_expired") {
                    let is_leased = row.get("is_leased");
                    return Ok(if is_leased {
                        ForgetReply::InFlight
                    } else {
                        ForgetReply::Missing
                    });
                }
                let (namespace, id) = (key.namespace().to_owned(), key.id().to_owned());
                let forget = sqlx::query(sql::<F>(Sql::Forget)).bind(namespace).bind(id);
                // None, if a claim has taken the row since: its message was not the one that is held.
                if self.written(forget.bind(row.get::<i64, _>("version"))).await? > 0 {
                    return Ok(ForgetReply::Removed);
                }
            }
            Err(StoreError::new(StoreErrorKind::Unavailable, "forgetting a key that others change"))
        })
    }

    fn get<'a>(&'a self, _: &'a DedupKey) -> StoreFuture<'a, Option<Entry>> {
        Box::pin(async { Err(StoreError::new(StoreErrorKind::Unsupported, "reading a key")) })
    }

    fn stats(&self) -> StoreFuture<'_, Stats> {
        Box::pin(async {
            let row = self.row(sqlx::query("SELECT count(*) FROM keys")).await?;
            let rows: i64 = row.map_or(0, |row| row.get(0));
            let mut stats = Stats::default();
            (stats.rows, stats.is_exact) = (rows.try_into().unwrap(), true);
            Ok(stats)
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.0.close())
    }
}

pub(super) struct Plain<F> {
    adapter: Arc<PlainAdapter<F>>,
    schema: Schema,
}

impl<F: Fault> Plain<F> {
    async fn shift(&self, by: Duration, sign: &str) {
        let by = format!("{sign} interval '{} ms'", by.as_millis());
        let sql = format!(
            "UPDATE keys SET lease_until = lease_until {by}, first_seen_at = first_seen_at {by}, \
             completed_at = completed_at {by}, expires_at = expires_at {by}"
        );
        self.adapter.0.execute(AssertSqlSafe(sql)).await.unwrap();
    }
}

impl<F: Fault> Store for Plain<F> {
    type Adapter = PlainAdapter<F>;

    async fn create() -> Self {
        let schema = Schema::fresh();
        let pool = PgPool::connect(&schema.url()).await.unwrap();
        pool.execute(sql::<F>(Sql::Table)).await.unwrap();
        Self { adapter: Arc::new(PlainAdapter(pool, PhantomData)), schema }
    }

    fn adapter(&self) -> Arc<PlainAdapter<F>> {
        Arc::clone(&self.adapter)
    }

    async fn advance(&self, by: Duration) {
        self.shift(by, "-").await;
    }

    async fn set_back(&self, by: Duration) {
        self.shift(by, "+").await;
    }
}

impl<F: Fault> RemoteStore for Plain<F> {
    fn server(&self) -> (String, u16) {
        let options: PgConnectOptions = self.schema.url().parse().unwrap();
        (options.get_host().to_owned(), options.get_port())
    }

    async fn connect(&self, port: u16) -> Arc<PlainAdapter<F>> {
        let options = through(port, self.schema.url().parse().unwrap());
        let pool = PgPoolOptions::new().max_connections(50).connect_lazy_with(options);
        Arc::new(PlainAdapter(pool, PhantomData))
    }
}
