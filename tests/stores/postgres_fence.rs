//! A release on Postgres is a fence: no claim and no renewal that was called before it has an effect after it,
//! whenever its messages arrive at the server.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::inspect::{ForgetReply, MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::adapter::{PostgresAdapter, PostgresOptions, Purging};

use crate::support::dedup_key;
use crate::support::postgres::Schema;
use crate::support::proxy::{Cut, Proxy};
use crate::support::time_travel::age_schema;

const LEASE: Duration = Duration::from_secs(60);
const RETENTION: Duration = Duration::from_secs(1_800);
const MINUTE: Duration = Duration::from_secs(60);

fn under_lease() -> CallTerms {
    CallTerms::on_completion(Token::random(), RETENTION, LEASE)
}

fn on_arrival() -> CallTerms {
    CallTerms::on_claim(Token::random(), RETENTION)
}

/// A store with two adapters: the messages of one of them go through a proxy.
struct World {
    schema: Schema,
    proxy: Proxy,
    /// Its claims are late.
    late: Arc<PostgresAdapter>,
    other: PostgresAdapter,
}

impl World {
    async fn new() -> Self {
        let schema = Schema::fresh();
        let options = || {
            // A statement may be late for longer than the test takes.
            let options = PostgresOptions::new().connections(100);
            let options = options.purging(Purging::off());
            options.statement_timeout(MINUTE)
        };
        let direct: PgConnectOptions = schema.url().parse().unwrap();
        let proxy = Proxy::start(&direct).await;
        // The place of a lost statement is free again after 10 s.
        let pool =
            PgPoolOptions::new().max_connections(200).connect_lazy_with(proxy.options(direct));
        let late = Arc::new(PostgresAdapter::with_options(pool, options()));
        let other = PostgresAdapter::connect_with(&schema.url(), options()).await.unwrap();
        other.migrate().await.unwrap();
        // Prepares the statements of each step, so that each is one message from now on.
        for terms in [under_lease, on_arrival] {
            let (key, mine) = (dedup_key("prepared"), terms());
            for _ in 0..2 {
                late.claim(&key, &mine).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.claim(&key, &terms()).await.unwrap();
                late.release(&key, &mine).await.unwrap();
                late.forget(&key).await.unwrap();
            }
            late.renew(&key, &mine).await.unwrap();
        }
        Self { schema, proxy, late, other }
    }

    async fn age(&self, by: Duration) {
        let mut connection = PgConnection::connect(self.schema.database_url()).await.unwrap();
        age_schema(&mut connection, self.schema.name(), by).await;
    }

    /// Makes the row that a claim finds.
    async fn begin(&self, key: &DedupKey, row: &str) {
        let theirs = under_lease();
        match row {
            "none" => {}
            "released" => {
                self.other.claim(key, &theirs).await.unwrap();
                self.other.release(key, &theirs).await.unwrap();
            }
            "lapsed" => {
                self.other.claim(key, &theirs).await.unwrap();
                self.age(LEASE).await;
            }
            "expired" => {
                self.other.claim(key, &on_arrival()).await.unwrap();
                self.age(RETENTION + PURGE_GRACE / 2).await;
            }
            other => panic!("{other}"),
        }
    }
}

/// The message with this number is late. Returns `false` if it is none of the claim.
async fn late_claim_has_no_effect(
    world: &World,
    row: &str,
    terms: fn() -> CallTerms,
    spared: usize,
    waits: Duration,
) -> bool {
    let label = format!("{row}, message {spared}, {waits:?}, {:?}", terms().permanence());
    let (key, mine) = (dedup_key(&label), terms());
    world.begin(&key, row).await;
    world.proxy.set(spared, Cut::Late);
    let (late, sent) = (Arc::clone(&world.late), (key.clone(), mine.clone()));
    let claim = tokio::spawn(async move { late.claim(&sent.0, &sent.1).await });
    let is_held = async {
        while world.proxy.all_messages() <= spared && !claim.is_finished() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    is_held.await;
    claim.abort();
    match claim.await {
        // The late message, if there is one, is none of the claim.
        Ok(claimed) => {
            // The pool may ask whether a connection is alive, and the adapter which server it leads to.
            if let Some(message) = world.proxy.sprung() {
                assert!(message.starts_with(['S', 'Q']), "{label}: {message}");
                world.proxy.deliver().await;
            }
            let claimed = claimed.unwrap();
            assert!(matches!(claimed, ClaimReply::First { .. }), "{label}: {claimed:?}");
            return false;
        }
        Err(error) => assert!(error.is_cancelled(), "{label}"),
    }
    world.other.release(&key, &mine).await.unwrap();
    world.age(waits).await;
    world.other.purge(100).await.unwrap();
    world.proxy.deliver().await;
    // A batch goes on after the reply. Nothing of it follows the next call on the same adapter.
    let probe = dedup_key(&format!("{label}, probe"));
    for _ in 0..3 {
        world.late.claim(&probe, &under_lease()).await.unwrap();
    }
    let next = terms();
    let claimed = world.other.claim(&key, &next).await.unwrap();
    assert!(matches!(claimed, ClaimReply::First { .. }), "{label}: {claimed:?}");
    // A late renewal does not get the key back.
    assert_eq!(world.late.renew(&key, &mine).await.unwrap(), RenewReply::Lost, "{label}");
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_claims_in_batches_have_no_effect_after_their_release() {
    let world = World::new().await;
    for terms in [under_lease, on_arrival] {
        for waits in [Duration::ZERO, PURGE_GRACE - MINUTE] {
            for row in ["none", "released", "lapsed", "expired"] {
                // An insertion, a read and a take; before and after each, a pool may test the connection.
                let mut late = 0;
                for message in 0..9 {
                    let is_late = late_claim_has_no_effect(&world, row, terms, message, waits);
                    late += u32::from(is_late.await);
                }
                // An insertion; or a read and a take, after an insertion or without it.
                let expected = if row == "none" { 1 } else { 2 };
                assert!(late >= expected, "{row}: {late}");
            }
        }
    }
    world.proxy.close();
}

/// An operator's call that is late must not undo a completion that came after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_forget_keeps_a_later_completion() {
    let world = World::new().await;
    let key = dedup_key("a");
    world.other.claim(&key, &on_arrival()).await.unwrap();
    // The second message names the version that the first one has read.
    world.proxy.set(1, Cut::Late);
    let late = Arc::clone(&world.late);
    let forgotten = key.clone();
    let forget = tokio::spawn(async move { late.forget(&forgotten).await });
    world.proxy.until_held(1).await;
    assert_eq!(world.other.forget(&key).await.unwrap(), ForgetReply::Removed);
    let mine = under_lease();
    assert_eq!(world.other.claim(&key, &mine).await.unwrap(), ClaimReply::first(1, false));
    assert_eq!(world.other.complete(&key, &mine).await.unwrap(), CompleteReply::Held);
    forget.abort();
    world.proxy.deliver().await;
    let again = world.other.claim(&key, &under_lease()).await.unwrap();
    assert!(matches!(again, ClaimReply::Duplicate(_)), "{again:?}");
    world.proxy.close();
}

/// A purge must not delete the row of a release while the claim may still arrive.
#[tokio::test]
async fn release_keeps_every_row_for_an_hour() {
    let world = World::new().await;
    for mine in [under_lease(), on_arrival()] {
        let key = dedup_key(&format!("{:?}", mine.permanence()));
        world.other.claim(&key, &on_arrival()).await.unwrap();
        world.age(RETENTION + PURGE_GRACE - MINUTE).await;
        world.other.release(&key, &mine).await.unwrap();
        world.age(PURGE_GRACE - MINUTE).await;
        world.other.purge(100).await.unwrap();
        assert!(world.other.stats().await.unwrap().expired > 0, "{key:?}");
        world.age(MINUTE).await;
        world.other.purge(100).await.unwrap();
        assert_eq!(world.other.stats().await.unwrap().rows, 0, "{key:?}");
    }
    world.proxy.close();
}

/// The row that a release leaves is no event: users see a key that was never delivered.
#[tokio::test]
async fn row_of_a_release_shows_nothing() {
    let schema = Schema::fresh();
    let adapter = PostgresAdapter::connect(&schema.url()).await.unwrap();
    adapter.migrate().await.unwrap();
    for mine in [under_lease(), on_arrival()] {
        let key = dedup_key(&format!("{:?}", mine.permanence()));
        adapter.release(&key, &mine).await.unwrap();
        assert_eq!(adapter.get(&key).await.unwrap(), None);
        assert_eq!(adapter.forget(&key).await.unwrap(), ForgetReply::Missing);
        // The token is that of the release.
        assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Lost);
        assert_eq!(adapter.claim(&key, &mine).await.unwrap(), ClaimReply::first(1, false));
    }
    let completed = dedup_key("completed");
    adapter.release(&completed, &under_lease()).await.unwrap();
    assert_eq!(
        adapter.complete(&completed, &under_lease()).await.unwrap(),
        CompleteReply::Inserted
    );
    assert_eq!(adapter.stats().await.unwrap().rows, 3);
}
