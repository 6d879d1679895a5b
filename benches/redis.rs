//! The Redis adapter against `SET NX PX` by the raw client, on one server.
//!
//! `cargo bench --bench redis` takes three minutes, or 30 s with `--quick`. It starts its own server,
//! which persists nothing. Each side has one multiplexed connection and 64 callers. Before every measurement, the server
//! is emptied and gets 10,000 complete keys of this side.
//!
//! Under `cargo test` it does nothing, because `postgres` tests all of its parts.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, Value};
use tower_dedup::DedupKey;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::Token;

#[path = "shared/mod.rs"]
mod shared;

use shared::calls::{
    Claims, Duplicates, Events, LEASE, NAMESPACE, Ours, RETENTION, Store, fresh_key, old_id,
};
use shared::compare::{Bed, compare};
use shared::database::FEW;
use shared::ratios::report;
use shared::run::{Run, runtime};
use support::redis::Server;

const BYTES: &str = "redis_key_bytes";
/// The number of keys whose bytes are measured.
const MANY: u64 = 200_000;

fn main() {
    let run = Run::from_args();
    let rates = ["redis_claim_64", "redis_event_64", "redis_duplicate_64"];
    if run.is_test() || !(run.wants(&rates) || run.wants(&[BYTES])) {
        return;
    }
    let server = Server::start();
    runtime().block_on(async {
        let adapter = RedisAdapter::connect(&server.url()).await.expect("Redis");
        let sides = Sides { ours: Ours(adapter), raw: Raw::connect(&server.url()).await };
        println!("\nRedis: redis_version {}", sides.info("server", "redis_version").await);
        let stores = || (sides.ours.clone(), sides.raw.clone());
        let (ours, raw) = stores();
        compare(&run, &sides, rates[0], Claims(ours), Claims(raw)).await;
        let (ours, raw) = stores();
        compare(&run, &sides, rates[1], Events(ours), Events(raw)).await;
        let (ours, raw) = stores();
        let ours = Duplicates { store: ours, keys: FEW };
        compare(&run, &sides, rates[2], ours, Duplicates { store: raw, keys: FEW }).await;
        if run.wants(&[BYTES]) {
            let (ours, raw) = (sides.bytes(&sides.ours).await, sides.bytes(&sides.raw).await);
            report(&run, BYTES, &[ours], &format!("{raw:.0} B for SET NX PX"));
        }
    });
}

/// The adapter and the raw client, on one server.
struct Sides {
    ours: Ours<RedisAdapter>,
    raw: Raw,
}

impl Bed for Sides {
    async fn reset(&self, side: usize) {
        self.empty().await;
        if side == 0 { fill(&self.ours).await } else { fill(&self.raw).await }
    }

    async fn cpu(&self) -> Option<Duration> {
        let mut cpu = Duration::ZERO;
        for field in ["used_cpu_user", "used_cpu_sys"] {
            cpu += Duration::from_secs_f64(self.info("cpu", field).await.parse().ok()?);
        }
        Some(cpu)
    }
}

impl Sides {
    /// Returns the memory that one key takes on the server.
    async fn bytes<S: Store>(&self, store: &S) -> f64 {
        self.empty().await;
        let used = async || self.info("memory", "used_memory").await.parse::<f64>();
        let before = used().await.expect("bytes");
        each(MANY, |_| {
            let store = store.clone();
            async move { store.claim(&fresh_key(), Token::random()).await }
        })
        .await;
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² keys")]
        let keys = MANY as f64;
        (used().await.expect("bytes") - before) / keys
    }

    async fn empty(&self) {
        let emptied: String = self.raw.query(&redis::cmd("FLUSHALL")).await;
        assert_eq!(emptied, "OK");
    }

    async fn info(&self, section: &str, field: &str) -> String {
        let info: String = self.raw.query(redis::cmd("INFO").arg(section)).await;
        let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {field} in {info}")).to_owned()
    }
}

/// Completes keys.
async fn fill<S: Store>(store: &S) {
    each(FEW, |number| {
        let store = store.clone();
        async move {
            let key = DedupKey::new(NAMESPACE, &old_id(number)).expect("a key");
            let token = Token::random();
            store.claim(&key, token).await;
            store.complete(&key, token).await;
        }
    })
    .await;
}

/// Makes calls for the numbers from 1 on, 64 at once.
async fn each<F: Future<Output = ()> + Send + 'static>(count: u64, call: impl Fn(u64) -> F) {
    let mut running = tokio::task::JoinSet::new();
    for number in 1..=count {
        if running.len() == 64 {
            running.join_next().await.expect("a call").expect("a call that ends");
        }
        running.spawn(call(number));
    }
    running.join_all().await;
}

/// The baseline: the raw client, with commands that a careful engineer would send.
///
/// The value is the token. A lease that lapses is forgotten; there is no attempt, no age and no takeover.
#[derive(Clone)]
struct Raw(MultiplexedConnection);

impl Raw {
    async fn connect(url: &str) -> Self {
        let info = url.into_connection_info().expect("a URL");
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let client = Client::open(info.set_tcp_settings(tcp)).expect("a URL");
        // The adapter's default.
        let config =
            AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(1)));
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Self(connection.await.expect("Redis"))
    }

    async fn query<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> T {
        command.query_async(&mut self.0.clone()).await.expect("a reply")
    }

    async fn set(&self, key: &DedupKey, value: &[u8], only: &str, ttl: Duration) -> Value {
        let key = format!("dedup:{}:{}", key.namespace(), key.id());
        let ttl = u64::try_from(ttl.as_millis()).expect("milliseconds");
        let mut command = redis::cmd("SET");
        command.arg(key).arg(value).arg(only).arg("PX").arg(ttl);
        self.query(&command).await
    }
}

impl Store for Raw {
    async fn claim(&self, key: &DedupKey, token: Token) {
        assert_eq!(self.set(key, token.as_bytes(), "NX", LEASE).await, Value::Okay);
    }

    async fn complete(&self, key: &DedupKey, token: Token) {
        assert_eq!(self.set(key, token.as_bytes(), "XX", RETENTION).await, Value::Okay);
    }

    async fn duplicate(&self, key: &DedupKey) {
        let set = self.set(key, Token::random().as_bytes(), "NX", LEASE).await;
        assert_eq!(set, Value::Nil);
    }
}
