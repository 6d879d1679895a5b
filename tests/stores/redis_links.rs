//! The connections of the Redis adapter: they break, fall silent and are refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::Request;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tower::Layer;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::{ListFilter, MaintenanceAdapter};
use tower_dedup::adapter::{RedisAdapter, RedisOptions};
use tower_dedup::{ConfigError, DedupLayer, StoreErrorKind};

use super::redis_calls::{attempt, claim, config_error, connect, options};
use support::effects::answer;
use support::log::Log;
use support::proxy::{Cut, Proxy};
use support::redis::{Server, fresh_prefix, wait_until};
use support::{Body, by_header, dedup_key, on_claim, request, send, terms, until};

/// The adapter's default bound of a call, and something for a busy machine.
const CALL: Duration = Duration::from_millis(1_800);
const SLACK: Duration = Duration::from_millis(700);

async fn refused(url: &str) -> ConfigError {
    let error = RedisAdapter::connect_with(url, options()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Config, "{error:?}");
    config_error(&error).clone()
}

/// Closes all connections of clients.
fn disconnect(server: &Server) {
    // The command closes its own connection too.
    let _ = server.ask::<()>(&["CLIENT", "KILL", "TYPE", "normal"]);
}

/// Returns a server, and an adapter that is connected to it.
async fn served() -> (Server, Arc<RedisAdapter>) {
    let server = Server::start();
    let adapter = connect(&server.url()).await;
    (server, adapter)
}

/// Returns a server, a proxy before it, and an adapter behind it. Its connection is open, and the server knows the scripts.
async fn proxied() -> (Server, Proxy, Arc<RedisAdapter>) {
    let server = Server::start();
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let adapter = connect(&format!("redis://127.0.0.1:{}", proxy.port())).await;
    claim(&adapter, "warm", &terms()).await.unwrap();
    adapter.release(&dedup_key("warm"), &terms()).await.unwrap();
    (server, proxy, adapter)
}

#[tokio::test]
async fn connecting_to_a_server_that_is_down_fails_at_once() {
    let server = Server::start();
    server.kill();
    let begun = Instant::now();
    let error = RedisAdapter::connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn stopped_server_costs_each_call_one_bound() {
    let (server, adapter) = served().await;
    claim(&adapter, "a", &terms()).await.unwrap();
    server.stop();
    let begun = Instant::now();
    let ids: Vec<_> = (0..50).map(|number| format!("b{number}")).collect();
    let terms = terms();
    for claimed in join_all(ids.iter().map(|id| claim(&adapter, id, &terms))).await {
        assert_eq!(claimed.unwrap_err().kind(), StoreErrorKind::Timeout);
    }
    assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
    server.cont();
    let begun = Instant::now();
    for claimed in join_all(ids.iter().map(|id| claim(&adapter, id, &terms))).await {
        assert_eq!(attempt(claimed), 1);
    }
    assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn connection_that_fell_silent_is_dropped_although_its_callers_go_early() {
    let (_server, proxy, adapter) = proxied().await;
    proxy.silence();
    let (begun, terms) = (Instant::now(), terms());
    // Shorter than the response timeout.
    while timeout(Duration::from_millis(300), claim(&adapter, "b", &terms)).await.is_err() {
        assert!(begun.elapsed() < CALL + SLACK, "the connection stays");
    }
    assert!(begun.elapsed() >= Duration::from_millis(600), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn caller_that_goes_while_the_connection_opens_leaves_no_trace() {
    let ((server, adapter), terms) = (served().await, terms());
    disconnect(&server);
    server.stop();
    for _ in 0..20 {
        let _ = timeout(Duration::from_millis(10), claim(&adapter, "a", &terms)).await;
    }
    server.cont();
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
}

#[tokio::test]
async fn repeated_call_whose_reply_was_lost_gets_its_own_claim() {
    let (_server, proxy, adapter) = proxied().await;
    for cut in [Cut::Lost, Cut::Unanswered, Cut::Abandoned, Cut::Silent, Cut::SilentUnanswered] {
        for mine in [terms(), on_claim(&terms())] {
            let case = format!("{cut:?} {:?}", mine.permanence());
            proxy.set(0, cut);
            assert_eq!(attempt(claim(&adapter, &case, &mine).await), 1, "{case}");
            assert!(proxy.sprung().unwrap().contains("EVALSHA"), "{case}");
            let other = claim(&adapter, &case, &terms()).await.unwrap();
            assert!(!matches!(other, ClaimReply::First { .. }), "{case}: {other:?}");
            // The second attempt may find that nothing is held any more.
            proxy.set(0, cut);
            adapter.release(&dedup_key(&case), &mine).await.unwrap();
            assert!(proxy.sprung().unwrap().contains("EVALSHA"), "{case}");
            attempt(claim(&adapter, &case, &terms()).await);
        }
    }
}

/// Not one of Redis's own refusals: the script may have run. So says a proxy that has lost the reply of its server.
#[tokio::test]
async fn answer_of_a_proxy_is_no_refusal_of_the_server() {
    let (_server, proxy, adapter) = proxied().await;
    for answer in [
        "-upstream failure\r\n",
        "-ERR server closed connection\r\n",
        "-BACKEND no backend is left\r\n",
        "-WRONGTYPE the proxy says so\r\n",
        // Of no shape that a script returns.
        "+OK\r\n",
        ":0\r\n",
        "*0\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n:7\r\n",
    ] {
        for mine in [terms(), on_claim(&terms())] {
            let case = format!("{answer} {:?}", mine.permanence());
            let key = dedup_key(&format!("{:?}", mine.token()));
            // Opens a connection, if the last one has ended.
            assert!(adapter.get(&key).await.unwrap().is_none());
            proxy.set(0, Cut::Replied(answer.as_bytes()));
            let error = adapter.claim(&key, &mine).await.unwrap_err();
            let is_unknown =
                matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Corrupt);
            assert!(is_unknown, "{case}: {error:?}");
            assert!(adapter.get(&key).await.unwrap().is_some(), "{case}");
            // The value of another program is there for the release, too.
            if !answer.starts_with("-WRONGTYPE") {
                proxy.set(0, Cut::Replied(answer.as_bytes()));
                adapter.release(&key, &mine).await.expect_err(&case);
            }
        }
    }
}

#[tokio::test]
async fn refusal_after_a_lost_reply_leaves_the_outcome_unknown() {
    let ((server, proxy, adapter), other) = (proxied().await, Server::start());
    let (terms, port) = (terms(), other.port().to_string());
    let keys = || server.run::<u32>(&["DBSIZE"]);
    let before = keys();
    proxy.set(0, Cut::SilentUnanswered);
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        wait_until("a claim", || (keys() > before).then_some(())).await;
        server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    });
    let error = claimed.unwrap_err();
    // The key was claimed. `Refused` would say that nothing was stored.
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
}

/// A row that changes before each write leaves the outcome unknown, and not in flight.
#[tokio::test]
async fn claim_of_a_row_that_changes_each_time_is_of_unknown_outcome() {
    let server = Server::start();
    let proxy = Proxy::to("127.0.0.1", server.port()).await;
    let by_proxy = format!("redis://127.0.0.1:{}", proxy.port());
    let slow = RedisAdapter::connect(&by_proxy).await.unwrap();
    let adapter = RedisAdapter::connect(&server.url()).await.unwrap();
    let (key, mine, failed) = (dedup_key("a"), terms(), terms());
    slow.claim(&key, &failed).await.unwrap();
    slow.release(&key, &failed).await.unwrap();
    let mut claim = Box::pin(slow.claim(&key, &mine));
    for number in 0..6 {
        proxy.set(0, Cut::Late);
        tokio::select! {
            reply = &mut claim => panic!("after {number}: {reply:?}"),
            () = proxy.until_held(0) => {}
        }
        adapter.release(&key, &terms()).await.unwrap();
        proxy.deliver().await;
    }
    let error = claim.await.unwrap_err();
    assert!(error.is_transient() && error.kind() == StoreErrorKind::Unavailable);
    adapter.claim(&key, &terms()).await.unwrap();
}

#[test]
fn connection_that_a_dead_runtime_was_opening_is_opened_by_another_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (server, terms) = (Server::start(), terms());
    let first = runtime();
    let adapter = first.block_on(connect(&server.url()));
    disconnect(&server);
    server.stop();
    let bound = Duration::from_millis(100);
    first.block_on(async {
        timeout(bound, claim(&adapter, "a", &terms)).await.unwrap_err();
    });
    drop(first);
    server.cont();
    let second = runtime();
    assert_eq!(attempt(second.block_on(claim(&adapter, "a", &terms))), 1);
    // Its connection ends with its runtime.
    drop(second);
    assert_eq!(attempt(runtime().block_on(claim(&adapter, "a", &terms))), 1);
}

#[tokio::test]
async fn forgotten_scripts_are_sent_again() {
    let ((server, adapter), terms) = (served().await, terms());
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    server.run::<()>(&["SCRIPT", "FLUSH"]);
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
}

/// Returns how many connections the server has accepted.
fn connections(server: &Server) -> u128 {
    let info: String = server.run(&["INFO", "stats"]);
    let count = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.unwrap().parse().unwrap()
}

#[tokio::test]
async fn replica_refuses_until_it_is_a_primary_again() {
    let (log, _guard) = Log::of_this_thread();
    let (server, other) = (Server::start(), Server::start());
    let adapter = connect(&server.url()).await;
    let (terms, port) = (terms(), other.port().to_string());
    server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    let (since, before) = (Instant::now(), connections(&server));
    let mut kinds = Vec::new();
    // A try that is under way when the time of a call is up makes that call's outcome unknown.
    while !kinds.contains(&StoreErrorKind::Refused) && kinds.len() < 5 {
        let begun = Instant::now();
        kinds.push(claim(&adapter, "a", &terms).await.unwrap_err().kind());
        assert!(begun.elapsed() < CALL + SLACK, "{:?}", begun.elapsed());
    }
    let (last, earlier) = kinds.split_last().unwrap();
    assert_eq!(*last, StoreErrorKind::Refused);
    assert!(earlier.iter().all(|kind| *kind == StoreErrorKind::Timeout), "{earlier:?}");
    // Each refusal is a doubt. One of the connections is that of this question.
    let opened = connections(&server) - before - 1;
    assert!((1..=since.elapsed().as_millis() / 200 + 1).contains(&opened), "{opened}");
    // A call that waits for the end of the failover succeeds.
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        sleep(Duration::from_millis(500)).await;
        server.run::<()>(&["REPLICAOF", "NO", "ONE"]);
    });
    assert_eq!(attempt(claimed), 1);
    // The process is the same, and its history another.
    assert!(!log.beginning("the store may have lost acknowledged writes").is_empty());
}

/// A key that a replica has as complete may be free on its primary.
#[tokio::test]
async fn replica_answers_no_duplicate() {
    let primary = Server::start();
    let replica = Server::start_with(&[&format!("replicaof 127.0.0.1 {}", primary.port())]);
    let (options, terms) = (options(), terms());
    let on_primary = RedisAdapter::connect_with(&primary.url(), options.clone()).await.unwrap();
    on_primary.complete(&dedup_key("a"), &terms).await.unwrap();
    let on_replica = RedisAdapter::connect_with(&replica.url(), options).await.unwrap();
    let mut known = false;
    while !known {
        known = on_replica.get(&dedup_key("a")).await.is_ok_and(|entry| entry.is_some());
    }
    // On a busy machine, an attempt may be under way when the time of a call is up.
    let mut kind = StoreErrorKind::Timeout;
    for _ in 0..5 {
        if kind == StoreErrorKind::Timeout {
            kind = claim(&on_replica, "a", &terms).await.unwrap_err().kind();
        }
    }
    assert_eq!(kind, StoreErrorKind::Refused);
}

/// A call that waits for its next connection has sent nothing since the refusal.
#[tokio::test]
async fn refusal_stays_the_error_of_a_call_that_waits_for_another_connection() {
    let (server, other) = (Server::start(), Server::start());
    // The time is up before the connection after the next one may open.
    let options = options().call_timeout(Duration::from_millis(180));
    let adapter = RedisAdapter::connect_with(&server.url(), options).await.unwrap();
    let (terms, port) = (terms(), other.port().to_string());
    server.run::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    let mut refused = 0;
    for _ in 0..5 {
        let error = claim(&adapter, "a", &terms).await.unwrap_err();
        refused += usize::from(error.kind() == StoreErrorKind::Refused);
    }
    // The machine may be slow, and an attempt be under way at the end.
    assert!(refused > 2, "{refused}");
}

#[tokio::test]
async fn invalid_option_is_the_error_of_every_call() {
    // No server is asked.
    let client = redis::Client::open("redis://127.0.0.1:1").unwrap();
    let adapter = RedisAdapter::with_options(client, RedisOptions::new().prefix(""));
    for error in [
        claim(&adapter, "a", &terms()).await.unwrap_err(),
        adapter.release(&dedup_key("a"), &terms()).await.unwrap_err(),
        adapter.get(&dedup_key("a")).await.unwrap_err(),
        adapter.list(&ListFilter::default(), None, 1).await.unwrap_err(),
        adapter.stats().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Config, "{error:?}");
        assert!(config_error(&error).to_string().starts_with("`prefix` must be"), "{error:?}");
    }
}

const EVICTS: &str = "the Redis server evicts keys";

#[tokio::test]
async fn server_that_evicts_is_refused_unless_it_is_accepted_by_name() {
    let server = Server::start_with(&["maxmemory 100mb", "maxmemory-policy allkeys-lru"]);
    assert!(refused(&server.url()).await.to_string().contains(EVICTS));
    // The server of the user's client is checked before the first call.
    let client = redis::Client::open(server.url()).unwrap();
    let users = RedisAdapter::with_options(client, options());
    let error = claim(&users, "a", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Refused);
    assert!(config_error(&error).to_string().contains(EVICTS));
    let accepted = options().evictable(true);
    let adapter = RedisAdapter::connect_with(&server.url(), accepted).await.unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
}

#[tokio::test]
async fn server_that_begins_to_evict_refuses_calls_until_it_is_mended() {
    let (log, _guard) = Log::of_this_thread();
    let server = Server::start_with(&["maxmemory 100mb"]);
    let (adapter, terms) = (connect(&server.url()).await, terms());
    assert_eq!(attempt(claim(&adapter, "a", &terms).await), 1);
    let policy = |policy| server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", policy]);
    policy("volatile-ttl");
    disconnect(&server);
    // This call may have reached the server before the connection ended.
    claim(&adapter, "b", &terms).await.unwrap_err();
    for _ in 0..10 {
        let error = claim(&adapter, "b", &terms).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Refused);
        assert!(error.is_transient());
        assert!(config_error(&error).to_string().contains(EVICTS));
    }
    assert_eq!(log.beginning("the Redis server may not be used").len(), 1);
    policy("noeviction");
    wait_until_claimed(&adapter).await;
    assert_eq!(attempt(claim(&adapter, "b", &terms).await), 1);
}

#[tokio::test]
async fn server_of_another_kind_names_the_scheme() {
    let server = Server::start_with(&["cluster-enabled yes"]);
    let names = |error: ConfigError, scheme| {
        assert!(error.to_string().ends_with(scheme), "{error}");
    };
    names(refused(&server.url()).await, "use the scheme `redis+cluster`");
    let single = Server::start();
    let cluster = format!("redis+cluster://{}", single.address());
    names(refused(&cluster).await, "use the scheme `redis`");
}

#[tokio::test]
async fn password_and_database_are_those_of_the_url() {
    let server = Server::start();
    server.run::<()>(&["CONFIG", "SET", "requirepass", "p@ss:w/rd"]);
    let url = format!("redis://:p%40ss%3Aw%2Frd@{}/3", server.address());
    let adapter = connect(&url).await;
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    let mut client = redis::Client::open(url).unwrap().get_connection().unwrap();
    assert_eq!(redis::cmd("DBSIZE").query::<u32>(&mut client).unwrap(), 1);

    let wrong = format!("redis://:secret@{}", server.address());
    let error = RedisAdapter::connect(&wrong).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(!text.contains("secret") && !text.contains("p@ss"), "{text}");
}

#[tokio::test]
async fn server_that_refuses_info_is_used() {
    let server = Server::start();
    let prefix = fresh_prefix();
    let keys = format!("~{prefix}:*");
    // The rights that the guide names, without INFO.
    let user = ["ACL", "SETUSER", "app", "on", ">pw", &keys, "+evalsha", "+eval", "+get"];
    server.run::<()>(&[&user[..], &["+set", "+time", "+renamenx", "+scan", "+dbsize"]].concat());
    let options = RedisOptions::new().prefix(&prefix);
    let url = format!("redis://app:pw@{}", server.address());
    let adapter = RedisAdapter::connect_with(&url, options).await.unwrap();
    assert_eq!(attempt(claim(&adapter, "a", &terms()).await), 1);
    let listed = adapter.list(&ListFilter::default(), None, 10).await.unwrap();
    assert_eq!(listed.keys.len(), 1);
}

/// Every task of an adapter ends with it, also of one that was silenced in the middle.
#[tokio::test]
async fn closed_adapter_refuses_calls_and_leaves_nothing_behind() {
    let (server, adapter) = served().await;
    claim(&adapter, "a", &terms()).await.unwrap();
    server.stop();
    claim(&adapter, "b", &terms()).await.unwrap_err();
    server.cont();
    adapter.close().await;
    let error = claim(&adapter, "b", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    until(|| Handle::current().metrics().num_alive_tasks() == 0).await;
    wait_until("closed connections", || {
        let clients: String = server.run(&["CLIENT", "LIST", "TYPE", "normal"]);
        (clients.lines().count() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn call_that_waits_for_a_connection_is_refused_once_its_adapter_is_closed() {
    let server = Server::start();
    let adapter = RedisAdapter::new(redis::Client::open(server.url()).unwrap());
    server.stop();
    let terms = terms();
    let (claimed, ()) = tokio::join!(claim(&adapter, "a", &terms), async {
        sleep(Duration::from_millis(50)).await;
        adapter.close().await;
        server.cont();
    });
    assert_eq!(claimed.unwrap_err().kind(), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn client_of_the_user_connects_again() {
    let server = Server::start();
    let client = redis::Client::open(server.url()).unwrap();
    let adapter = RedisAdapter::with_options(client, options());
    for id in ["a", "b"] {
        assert_eq!(attempt(claim(&adapter, id, &terms()).await), 1);
        disconnect(&server);
    }
    adapter.close().await;
    let error = claim(&adapter, "c", &terms()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn another_process_or_history_and_evictions_are_told_once_when_a_connection_opens() {
    let (log, _guard) = Log::of_this_thread();
    let server = Server::start_with(&["appendonly yes", "appendfsync always"]);
    let adapter = RedisAdapter::connect_with(&server.url(), options().evictable(true)).await;
    let adapter = adapter.unwrap();
    let told = || log.beginning("the store may have lost acknowledged writes");
    let reconnects = async || {
        disconnect(&server);
        wait_until_claimed(&adapter).await;
    };
    reconnects().await;
    assert_eq!(told().len(), 0);
    server.restart();
    for _ in 0..2 {
        reconnects().await;
        assert_eq!(told().len(), 1);
    }
    server.run::<()>(&["SET", "large", &"x".repeat(1_000_000), "EX", "1000"]);
    server.run::<()>(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"]);
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let _ = server.ask::<()>(&["SET", "more", "1"]);
    server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    for _ in 0..2 {
        reconnects().await;
        let told = told();
        let kinds: Vec<_> = told.iter().map(|record| &*record["kind"]).collect();
        assert_eq!(kinds, ["suspected", "evicted"]);
        assert_eq!(told[1]["primary"], server.address());
    }
}

/// Claims until a call succeeds: a connection that breaks costs one attempt.
async fn wait_until_claimed(adapter: &RedisAdapter) {
    let begun = Instant::now();
    while claim(adapter, "until", &terms()).await.is_err() {
        assert!(begun.elapsed() < CALL + SLACK, "the connection stays broken");
    }
}

/// The completion of a key whose claim the store has forgotten.
#[tokio::test]
async fn claim_that_the_store_has_lost_is_told_when_it_is_completed() {
    let (log, _guard) = Log::of_this_thread();
    let server = Arc::new(Server::start());
    let adapter = connect(&server.url()).await;
    let service = tower::service_fn(move |_: Request<Body>| {
        server.run::<()>(&["FLUSHALL"]);
        async { Ok::<_, std::convert::Infallible>(answer(true)) }
    });
    let service = DedupLayer::new(by_header(), adapter).layer(service);
    for (id, told) in [("a", 1), ("b", 2)] {
        assert_eq!(send(&service, request(id)).await.status(), 200);
        let records = log.beginning("the store lost a claim");
        assert_eq!(records.len(), told);
        assert_eq!(records[0]["kind"], "missing");
    }
}
