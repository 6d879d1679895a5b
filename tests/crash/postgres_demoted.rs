//! Pools whose connections lead to a demoted server.

use futures_util::future::join_all;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tower_dedup::adapter::PostgresAdapter;
use tower_dedup::adapter::contract::DedupAdapter;

use support::cluster::Cluster;
use support::{FIRST, dedup_key, on_claim, terms, until};

const CONNECTIONS: u32 = 10;

/// A failover behind one address leaves old connections open. Returns a pool that holds only connections to a standby,
/// open and idle. New connections lead to the primary.
async fn demoted(cluster: &Cluster, options: PgPoolOptions) -> PgPool {
    cluster.address.lead_to(cluster.standby.port());
    let pool = options.max_connections(CONNECTIONS).connect_lazy(&cluster.url()).unwrap();
    let open = join_all((0..CONNECTIONS).map(|_| pool.acquire())).await;
    assert!(open.iter().all(Result::is_ok));
    drop(open);
    until(|| pool.num_idle() == CONNECTIONS as usize).await;
    cluster.address.lead_to(cluster.primary.port());
    pool
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_full_of_connections_to_a_demoted_server_recovers() {
    let cluster = Cluster::start().await;
    PostgresAdapter::connect(&cluster.primary.url()).await.unwrap().migrate().await.unwrap();
    for terms in [terms(), on_claim(&terms())] {
        let adapter = PostgresAdapter::new(demoted(&cluster, PgPoolOptions::new()).await);
        let key = dedup_key(&format!("{:?}", terms.permanence()));
        assert_eq!(adapter.claim(&key, &terms).await.unwrap(), FIRST);
    }
}

/// The guide's `before_acquire` checks that a connection may write before the pool lends it.
#[tokio::test(flavor = "multi_thread")]
async fn before_acquire_of_the_guide_closes_connections_to_a_demoted_server() {
    let cluster = Cluster::start().await;
    let looks = PgPoolOptions::new().test_before_acquire(false).before_acquire(|connection, _| {
        Box::pin(async move {
            let read_only = sqlx::query_scalar("SHOW transaction_read_only");
            let read_only: String = read_only.fetch_one(connection).await?;
            Ok(read_only == "off")
        })
    });
    let pool = demoted(&cluster, looks).await;
    let recovers = sqlx::query_scalar("SELECT pg_is_in_recovery()");
    assert!(!recovers.fetch_one(&pool).await.unwrap_or(true));
}
