//! The Redis adapter against `SET NX PX` by the raw client, on one server.
//!
//! `cargo bench --bench redis` takes about eight minutes, or two with `--quick`. It starts its own server,
//! which persists nothing. Each side has one multiplexed connection. Before every measurement, the server
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
#[allow(dead_code, unused_imports, reason = "the tests use the rest")]
#[path = "../tests/support/redis/mod.rs"]
mod support;

use shared::calls::{Claims, Duplicates, Events, LEASE, NAMESPACE, Ours, RETENTION, Store};
use shared::calls::{callers, fresh_key, old_id};
use shared::goals::grouped;
use shared::ratios::{heading, report};
use shared::rounds::{Caller, Load, in_turn, load, median};
use shared::run::{Run, runtime};
use shared::usage::own_cpu;
use support::Server;

/// The number of complete keys on the server before a measurement.
const FEW: u64 = 10_000;
/// The number of keys whose bytes are measured.
const MANY: u64 = 200_000;

fn main() {
    let run = Run::from_args();
    let claims = [("redis_claim_1", 1), ("redis_claim_64", 64), ("redis_claim_256", 256)];
    let duplicates =
        [("redis_duplicate_1", 1), ("redis_duplicate_64", 64), ("redis_duplicate_256", 256)];
    let others = ["redis_event_64", "redis_key_bytes"];
    let names = claims.iter().chain(&duplicates).map(|(name, _)| *name).chain(others);
    if run.is_test() || !names.into_iter().any(|name| run.wants(&[name])) {
        return;
    }
    let server = Server::start();
    runtime().block_on(async {
        let sides = Sides::new(&server.url()).await;
        println!("\nRedis: redis_version {}", sides.info("server", "redis_version").await);
        for (name, count) in claims {
            sides.compare(&run, name, count, "claims of new keys", Claims, Claims).await;
        }
        for (name, count) in duplicates {
            let what = "claims of complete keys";
            let ours = |store| Duplicates { store, keys: FEW };
            let raw = |store| Duplicates { store, keys: FEW };
            sides.compare(&run, name, count, what, ours, raw).await;
        }
        let what = "claim and completion, over SET NX PX and SET XX PX";
        sides.compare(&run, "redis_event_64", 64, what, Events, Events).await;
        if run.wants(&["redis_key_bytes"]) {
            heading(&run, &format!("memory of the server for each of {MANY} keys"));
            let (ours, raw) = (sides.bytes(&sides.ours).await, sides.bytes(&sides.raw).await);
            report(&run, "redis_key_bytes", &[ours], &format!("{raw:.0} B for SET NX PX"));
        }
    });
}

/// The adapter and the raw client, on one server.
struct Sides {
    ours: Ours<RedisAdapter>,
    raw: Raw,
}

/// The result of one measurement.
struct Measured {
    load: Load,
    /// CPU time of one call, in microseconds: of this process and of the server.
    cpu: [f64; 2],
}

impl Sides {
    async fn new(url: &str) -> Self {
        let adapter = RedisAdapter::connect(url).await.expect("Redis");
        Self { ours: Ours(adapter), raw: Raw::connect(url).await }
    }

    /// Measures both sides in turn, and reports the calls a second of the adapter over those of the
    /// raw client.
    async fn compare<A: Caller + Clone, B: Caller + Clone>(
        &self,
        run: &Run,
        name: &str,
        count: usize,
        what: &str,
        ours: impl Fn(Ours<RedisAdapter>) -> A,
        raw: impl Fn(Raw) -> B,
    ) {
        if !run.wants(&[name]) {
            return;
        }
        let rounds: Vec<[Measured; 2]> = in_turn(run, async |which| {
            if which == 0 {
                self.measure(run, count, &self.ours, &ours).await
            } else {
                self.measure(run, count, &self.raw, &raw).await
            }
        })
        .await;
        let callers = if count == 1 { "one caller".to_owned() } else { format!("{count} callers") };
        heading(run, &format!("{what}, {callers}"));
        let ratios: Vec<f64> =
            rounds.iter().map(|[ours, raw]| ours.load.per_second / raw.load.per_second).collect();
        let of = |side: usize, value: fn(&Measured) -> f64| {
            median(rounds.iter().map(|round| value(&round[side])))
        };
        let [rates, client, server] = [
            (|it: &Measured| it.load.per_second) as fn(&Measured) -> f64,
            |it| it.cpu[0],
            |it| it.cpu[1],
        ]
        .map(|value| [of(0, value), of(1, value)]);
        let note = format!(
            "{} over {} a second; CPU of a call: client {:.1} over {:.1} µs, server {:.1} over {:.1} µs",
            grouped(rates[0]),
            grouped(rates[1]),
            client[0],
            client[1],
            server[0],
            server[1],
        );
        report(run, name, &ratios, &note);
    }

    async fn measure<S: Store, C: Caller + Clone>(
        &self,
        run: &Run,
        count: usize,
        store: &S,
        caller: impl Fn(S) -> C,
    ) -> Measured {
        self.empty().await;
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
        let before = self.cpu().await;
        let load = load(callers(count, caller(store.clone())), run.time()).await;
        let after = self.cpu().await;
        let cpu = [0, 1].map(|of| (after[of] - before[of]).as_secs_f64() * 1e6 / load.calls);
        Measured { load, cpu }
    }

    /// Returns the memory that one key takes on the server.
    async fn bytes<S: Store>(&self, store: &S) -> f64 {
        self.empty().await;
        let used = async || {
            let used: f64 = self.info("memory", "used_memory").await.parse().expect("bytes");
            used
        };
        let before = used().await;
        each(MANY, |_| {
            let store = store.clone();
            async move { store.claim(&fresh_key(), Token::random()).await }
        })
        .await;
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² keys")]
        let keys = MANY as f64;
        (used().await - before) / keys
    }

    async fn empty(&self) {
        let emptied: String = self.raw.query(&redis::cmd("FLUSHALL")).await;
        assert_eq!(emptied, "OK");
    }

    /// Returns the CPU time that this process and the server have used.
    async fn cpu(&self) -> [Duration; 2] {
        let mut server = Duration::ZERO;
        for field in ["used_cpu_user", "used_cpu_sys"] {
            let seconds = self.info("cpu", field).await.parse().expect("seconds");
            server += Duration::from_secs_f64(seconds);
        }
        [own_cpu(), server]
    }

    async fn info(&self, section: &str, field: &str) -> String {
        let info: String = self.raw.query(redis::cmd("INFO").arg(section)).await;
        let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {field} in {info}")).to_owned()
    }
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
