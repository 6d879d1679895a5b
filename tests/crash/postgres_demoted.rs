//! Pools whose connections lead to a demoted server.

use futures_util::future::join_all;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection, PgPool};
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};

use crate::support::cluster::{Cluster, until_true};
use crate::support::{FIRST, dedup_key, on_claim, terms, until};

/// A failover behind one address leaves old connections open. A pool may then hold only connections
/// to a standby or to a read-only server.
struct Demoted(Cluster);

impl Demoted {
    const CONNECTIONS: u32 = 10;

    async fn start() -> Self {
        let cluster = Cluster::asynchronous().await;
        let adapter = PostgresAdapter::connect(&cluster.address.url()).await.unwrap();
        adapter.migrate().await.unwrap();
        let mut standby = PgConnection::connect(&cluster.standby.url()).await.unwrap();
        let there = "SELECT to_regclass('webhook_deliveries_schema') IS NOT NULL";
        until_true(&mut standby, there).await;
        Self(cluster)
    }

    /// Returns a pool whose connections are all open and idle. New connections lead to the primary.
    async fn pool(&self) -> PgPool {
        self.pool_with(PgPoolOptions::new()).await
    }

    async fn pool_with(&self, options: PgPoolOptions) -> PgPool {
        let Self(cluster) = self;
        cluster.address.lead_to(&cluster.standby);
        let pool = options.max_connections(Self::CONNECTIONS);
        let pool = pool.connect_lazy(&cluster.address.url()).unwrap();
        let open = join_all((0..Self::CONNECTIONS).map(|_| pool.acquire())).await;
        assert!(open.iter().all(Result::is_ok));
        drop(open);
        until(|| pool.num_idle() == Self::CONNECTIONS as usize).await;
        cluster.address.lead_to(&cluster.primary);
        pool
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_full_of_connections_to_a_demoted_server_recovers() {
    let demoted = Demoted::start().await;
    let adapter = async || PostgresAdapter::new(demoted.pool().await);
    let recorded = adapter().await.claim(&dedup_key("record"), &on_claim(&terms())).await;
    assert_eq!(recorded.unwrap(), FIRST);
    let claimed = adapter().await.claim(&dedup_key("claim"), &terms()).await;
    assert_eq!(claimed.unwrap(), ClaimReply::first(1, false));
}

/// The guide's `before_acquire` checks that a connection may write before the pool lends it.
pub(super) fn looks() -> PgPoolOptions {
    PgPoolOptions::new().test_before_acquire(false).before_acquire(|connection, _| {
        Box::pin(async move {
            let read_only = sqlx::query_scalar("SHOW transaction_read_only");
            let read_only: String = read_only.fetch_one(connection).await?;
            Ok(read_only == "off")
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn before_acquire_of_the_guide_closes_connections_to_a_demoted_server() {
    let demoted = Demoted::start().await;
    let pool = demoted.pool_with(looks()).await;
    let recovers: bool =
        sqlx::query_scalar("SELECT pg_is_in_recovery()").fetch_one(&pool).await.unwrap();
    assert!(!recovers);
}
