//! The baseline on Postgres: one statement per call.
//!
//! It uses prepared statements on a pool of ten connections without pings. The table has the adapter's
//! layout, because leases and purging need these columns and indexes. The statements do the minimum
//! that a lease needs. So the figures compare only how the database is called.

use sha2::{Digest, Sha256};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::Token;

use super::calls::Store;

const CONNECTIONS: u32 = 10;

const CLAIM: &str = "INSERT INTO webhook_deliveries AS t \
    (key, namespace, id, token, lease_until, attempts, takeover, first_seen_at, expires_at) \
    VALUES ($1::uuid, $2, $3, $4::uuid, now() + interval '60 seconds', 1, false, now(), \
    now() + interval '30 days') \
    ON CONFLICT (key) DO UPDATE SET token = excluded.token, lease_until = excluded.lease_until, \
    attempts = t.attempts + 1 WHERE t.completed_at IS NULL AND t.lease_until <= now()";

const COMPLETE: &str = "UPDATE webhook_deliveries SET completed_at = now(), lease_until = NULL \
    WHERE key = $1::uuid AND token = $2::uuid AND completed_at IS NULL";

const INSERT: &str = "INSERT INTO webhook_deliveries \
    (key, namespace, id, token, attempts, takeover, first_seen_at, completed_at, expires_at) \
    VALUES ($1::uuid, $2, $3, $4::uuid, 1, false, now(), now(), now() + interval '30 days') \
    ON CONFLICT DO NOTHING";

/// Returns a warm pool of ten connections without pings.
pub(crate) async fn pool(url: &str) -> PgPool {
    let options = PgPoolOptions::new()
        .min_connections(CONNECTIONS)
        .max_connections(CONNECTIONS)
        .test_before_acquire(false);
    options.connect(url).await.expect("PostgreSQL")
}

#[derive(Clone)]
pub(crate) struct OneByOne(pub(crate) PgPool);

impl Store for OneByOne {
    async fn claim(&self, key: &DedupKey, token: Token) {
        let query = sqlx::query(CLAIM).bind(row_key(key)).bind(key.namespace()).bind(key.id());
        let claimed = query.bind(hex(*token.as_bytes())).execute(&self.0).await.expect("a claim");
        assert_eq!(claimed.rows_affected(), 1);
    }

    async fn complete(&self, key: &DedupKey, token: Token) {
        let query = sqlx::query(COMPLETE).bind(row_key(key)).bind(hex(*token.as_bytes()));
        let completed = query.execute(&self.0).await.expect("a completion");
        assert_eq!(completed.rows_affected(), 1);
    }

    async fn duplicate(&self, key: &DedupKey) {
        let token = hex(*Token::random().as_bytes());
        let query = sqlx::query(INSERT).bind(row_key(key)).bind(key.namespace()).bind(key.id());
        let inserted = query.bind(token).execute(&self.0).await.expect("an insert");
        assert_eq!(inserted.rows_affected(), 0);
    }
}

/// Returns the primary key, computed as in the guide.
fn row_key(key: &DedupKey) -> String {
    let hash = Sha256::digest(format!("{}\n{}", key.namespace(), key.id()));
    hex(*hash.first_chunk().expect("32 bytes"))
}

fn hex(bytes: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(bytes))
}
