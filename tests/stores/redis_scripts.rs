//! What the scripts of the Redis adapter write, and what they make of unreadable values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, StoreFuture,
    StoredResponse, Token,
};
use tower_dedup::adapter::maintenance::{ForgetReply, ListFilter, MaintenanceAdapter};

use support::redis::{Server, command};
use support::{FIRST, claim_all, complete_all, dedup_key, list, on_claim, sorted_keys, terms};

const HOUR: u64 = 3_600_000;

/// A server of its own, and an adapter.
struct Own {
    adapter: RedisAdapter,
    server: Server,
}

impl Own {
    async fn new() -> Self {
        let server = Server::start();
        let adapter = RedisAdapter::connect(&server.url()).await.unwrap();
        Self { adapter, server }
    }

    /// Returns how many changes the server has made.
    fn changes(&self) -> u64 {
        self.server.info("rdb_changes_since_last_save").unwrap().parse().unwrap()
    }

    fn set(&self, id: &str, value: &[u8]) {
        let mut connection = self.server.connection().unwrap();
        command(&["SET", &name(id)]).arg(value).exec(&mut connection).unwrap();
    }

    fn value(&self, id: &str) -> Vec<u8> {
        self.server.run(&["GET", &name(id)])
    }
}

fn name(id: &str) -> String {
    format!("dedup:test:{id}")
}

#[tokio::test]
async fn calls_that_change_nothing_write_nothing() {
    let own = Own::new().await;
    let (adapter, mine) = (&own.adapter, terms());
    let [held, complete, at_once] = ["held", "complete", "at once"].map(dedup_key);
    let done = mine.clone().with_payload_sha256([7; 32]);
    let arrived = on_claim(&terms()).with_payload_sha256([7; 32]);
    adapter.claim(&held, &mine).await.unwrap();
    adapter.claim(&complete, &mine).await.unwrap();
    adapter.complete(&complete, &done).await.unwrap();
    adapter.claim(&at_once, &arrived).await.unwrap();
    let before = own.changes();
    assert!(before >= 4, "{before}");
    for other in [terms(), on_claim(&terms())] {
        let other = other.with_fetch(Fetch::DigestAndResponse);
        assert_eq!(adapter.claim(&held, &other).await.unwrap(), ClaimReply::InFlight);
        for keys in [&complete, &at_once] {
            let claimed = adapter.claim(keys, &other).await.unwrap();
            assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{claimed:?}");
        }
        for keys in [&held, &complete, &at_once] {
            assert_eq!(adapter.renew(keys, &other).await.unwrap(), RenewReply::Lost);
        }
    }
    assert_eq!(adapter.renew(&complete, &mine).await.unwrap(), RenewReply::Lost);
    assert_eq!(adapter.forget(&held).await.unwrap(), ForgetReply::InFlight);
    assert_eq!(adapter.forget(&dedup_key("missing")).await.unwrap(), ForgetReply::Missing);
    for key in [&held, &complete, &at_once] {
        adapter.get(key).await.unwrap().unwrap();
    }
    adapter.list(&ListFilter::default(), None, 100).await.unwrap();
    adapter.stats().await.unwrap();
    adapter.purge(100).await.unwrap();
    assert_eq!(own.changes(), before);
}

/// `WAIT` waits for a write of its own connection, so a repetition on another connection has to write.
#[tokio::test]
async fn repeated_call_writes_again_what_it_has_written_before() {
    let own = Own::new().await;
    let (adapter, key) = (&own.adapter, dedup_key("a"));
    let (mine, other) = (on_claim(&terms()), terms());
    let written = async |call: StoreFuture<'_, ()>| {
        let before = own.changes();
        call.await.unwrap();
        assert_eq!(own.changes() - before, 1);
    };
    let claim = || async { adapter.claim(&key, &mine).await.map(|it| assert_eq!(it, FIRST)) };
    written(Box::pin(claim())).await;
    // All but the version.
    let value = || [&own.value("a")[..23], &own.value("a")[28..]].concat();
    let claimed = value();
    written(Box::pin(claim())).await;
    // Another attempt of a call may have completed the row.
    for (terms, reply) in [(&mine, CompleteReply::Held), (&other, CompleteReply::LeaseLost)] {
        let complete =
            async { adapter.complete(&key, terms).await.map(|it| assert_eq!(it, reply)) };
        written(Box::pin(complete)).await;
    }
    assert_eq!(value(), claimed);
    for terms in [&other, &mine, &mine] {
        written(adapter.release(&key, terms)).await;
    }
}

/// A release changes only the version of the row of another token.
#[tokio::test]
async fn release_of_another_token_raises_the_version_only() {
    let own = Own::new().await;
    for (id, is_complete) in [("leased", false), ("complete", true)] {
        let (key, mine) = (dedup_key(id), terms());
        let mine = mine.with_event_type("order.paid");
        own.adapter.claim(&key, &mine).await.unwrap();
        if is_complete {
            let done = mine.with_payload_sha256([7; 32]);
            own.adapter.complete(&key, &done).await.unwrap();
        }
        for other in [terms(), on_claim(&terms())] {
            let before = own.value(id);
            own.adapter.release(&key, &other).await.unwrap();
            let after = own.value(id);
            let version = |value: &[u8]| {
                value[23..28].iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
            };
            assert_eq!(version(&after), version(&before) + 1, "{id}");
            assert_eq!((&after[..23], &after[28..]), (&before[..23], &before[28..]), "{id}");
        }
    }
}

/// Versions have five bytes. The one after the last is 0, and a claim names it as any other.
#[tokio::test]
async fn row_of_the_last_version_is_released_and_claimed() {
    let own = Own::new().await;
    let (key, failed) = (dedup_key("a"), terms());
    own.adapter.claim(&key, &failed).await.unwrap();
    own.adapter.release(&key, &failed).await.unwrap();
    let mut value = own.value("a");
    value[23..28].fill(0xff);
    own.set("a", &value);
    own.adapter.release(&key, &terms()).await.unwrap();
    assert_eq!(own.value("a")[23..28], [0; 5]);
    let claimed = own.adapter.claim(&key, &terms()).await.unwrap();
    assert_eq!(claimed, ClaimReply::first(2, false));
    assert_eq!(own.value("a")[23..28], [0, 0, 0, 0, 1]);
}

/// A key is small, and Redis deletes it an hour after its retention and after its lease.
#[tokio::test]
async fn value_has_44_bytes_and_outlives_retention_and_lease_by_an_hour() {
    let own = Own::new().await;
    let (adapter, minute) = (&own.adapter, Duration::from_secs(60));
    let long = CallTerms::on_completion(Token::from([7; 16]), minute, 10 * minute);
    let short = CallTerms::on_completion(Token::from([7; 16]), 10 * minute, minute);
    let left = || own.server.run::<u64>(&["PTTL", &name("a")]);
    let keys = dedup_key("a");
    for (mine, ms) in [(&long, 600_000), (&short, 600_000)] {
        adapter.claim(&keys, mine).await.unwrap();
        let value = own.value("a");
        assert_eq!(
            (value.len(), &value[..5], &value[28..]),
            (44, &[2, 2, 0, 0, 1][..], &[7; 16][..])
        );
        // One allocation. Valkey 8.1 replies `raw`.
        let encoding: String = own.server.run(&["OBJECT", "ENCODING", &name("a")]);
        let is_valkey = own.server.info("valkey_version").is_some();
        assert!(encoding == "embstr" || is_valkey, "{encoding}");
        let expected = ms + HOUR;
        assert!((expected - 20_000..=expected).contains(&left()), "{}", left());
        adapter.release(&keys, mine).await.unwrap();
        let most = mine.retention() + Duration::from_millis(HOUR);
        assert!(Duration::from_millis(left()) <= most);
        assert_eq!(adapter.forget(&keys).await.unwrap(), ForgetReply::Removed);
    }
    adapter.claim(&keys, &on_claim(&long)).await.unwrap();
    assert_eq!(own.value("a")[..5], [2, 3, 0, 0, 1]);
    assert!((HOUR..=60_000 + HOUR).contains(&left()), "{}", left());
}

/// Calls each method on a key, except `forget`. Returns the kinds of the errors.
async fn kinds(adapter: &RedisAdapter, id: &str) -> Vec<Option<StoreErrorKind>> {
    let (keys, mine) = (dedup_key(id), terms());
    let at_once = on_claim(&mine);
    let results = [
        adapter.get(&keys).await.map(drop),
        adapter.claim(&keys, &mine).await.map(drop),
        adapter.claim(&keys, &at_once).await.map(drop),
        adapter.renew(&keys, &mine).await.map(drop),
        adapter.complete(&keys, &mine).await.map(drop),
        adapter.release(&keys, &mine).await.map(drop),
        adapter.release(&keys, &at_once).await.map(drop),
    ];
    results.into_iter().map(|result| result.err().map(|error| error.kind())).collect()
}

/// Every call but a release, because no token has claimed an unreadable value.
const CORRUPT: [Option<StoreErrorKind>; 7] = {
    let mut kinds = [Some(StoreErrorKind::Corrupt); 7];
    (kinds[5], kinds[6]) = (None, None);
    kinds
};

#[tokio::test]
async fn unreadable_value_is_corrupt_and_stays_until_it_is_forgotten() {
    let own = Own::new().await;
    let adapter = &own.adapter;
    adapter.claim(&dedup_key("good"), &terms()).await.unwrap();
    let good = own.value("good");
    let with = |place: usize, byte: u8| {
        let mut value = good.clone();
        value[place] = byte;
        value
    };
    let unreadable = [
        Vec::new(),
        vec![2],
        good[..43].to_vec(),
        [&good[..], b"x"].concat(),
        // An older and a newer format, an unknown flag, and a section that is missing or too long.
        with(0, 1),
        with(0, 3),
        with(1, 0x82),
        with(1, 0x0a),
        with(1, 0x12),
        with(1, 0x23),
        with(1, 0x43),
        [&with(1, 0x12)[..], &[9, b'x']].concat(),
        [&with(1, 0x43)[..], &[0, 200, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]].concat(),
    ];
    for value in unreadable {
        own.set("bad", &value);
        assert_eq!(kinds(adapter, "bad").await, CORRUPT, "{value:?}");
        assert_eq!(own.value("bad"), value);
        let listed = adapter.list(&ListFilter::default(), None, 10).await.unwrap();
        assert_eq!((listed.keys.len(), listed.unreadable), (1, 1), "{value:?} {listed:?}");
        let stats = adapter.stats().await.unwrap();
        assert_eq!((stats.rows, stats.in_flight), (2, 1), "{stats:?}");
        // Its header may say that a live lease holds it.
        let is_leased = value.len() >= 44 && value[0] == 2 && value[1] & 3 == 2;
        let expected = if is_leased { ForgetReply::InFlight } else { ForgetReply::Removed };
        assert_eq!(adapter.forget(&dedup_key("bad")).await.unwrap(), expected, "{value:?}");
    }
}

#[tokio::test]
async fn key_of_another_type_is_corrupt_and_is_not_listed() {
    let own = Own::new().await;
    own.server.run::<()>(&["RPUSH", &name("list"), "a"]);
    own.server.run::<()>(&["SET", "dedup::0", "5"]);
    own.server.run::<()>(&["SET", "dedup-other:test:a", "5"]);
    assert_eq!(kinds(&own.adapter, "list").await, CORRUPT);
    let forgotten = own.adapter.forget(&dedup_key("list")).await.unwrap_err();
    assert_eq!(forgotten.kind(), StoreErrorKind::Corrupt);
    assert_eq!(own.adapter.list(&ListFilter::default(), None, 10).await.unwrap().keys, []);
    assert_eq!(own.adapter.stats().await.unwrap().rows, 0);
}

/// Changes bytes of readable values: the scripts and this program read the same values.
#[test]
fn scripts_and_the_decoder_agree_on_every_value() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let own = runtime.block_on(Own::new());
    let mut values = Vec::new();
    runtime.block_on(async {
        let keys = ["a", "b", "c"].map(dedup_key);
        let mut headers = HeaderMap::new();
        headers.append("x-a", "b".parse().unwrap());
        let response = StoredResponse::new(StatusCode::OK, headers, Bytes::from_static(b"body"));
        let mine = terms().with_event_type("order.paid");
        claim_all(&own.adapter, &keys, &mine).await.unwrap();
        let done = mine.with_response(Arc::new(response));
        for (key, payload) in keys[1..].iter().zip([7, 8]) {
            let done = done.clone().with_payload_sha256([payload; 32]);
            own.adapter.complete(key, &done).await.unwrap();
        }
        for (id, flags) in [("a", 0x12), ("b", 0x73), ("c", 0x73)] {
            assert_eq!(own.value(id)[1], flags, "{id}");
            values.push(own.value(id));
        }
    });
    let change = (any::<prop::sample::Index>(), any::<u8>(), prop::bool::weighted(0.8));
    let strategy =
        (0..3_usize, prop::collection::vec(change, 0..4), prop::option::of(0..260_usize));
    let (readable, unreadable) = (AtomicU32::new(0), AtomicU32::new(0));
    let config = Config { cases: 600, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&strategy, |(value, changes, length)| {
        let mut value = values[value].clone();
        for (index, byte, in_place) in changes {
            let place = index.index(value.len());
            let byte = if place < 44 { byte } else { byte & 0x7f };
            if in_place {
                value[place] = byte;
            } else {
                value.insert(place, byte);
            }
        }
        if let Some(length) = length {
            value.truncate(length);
        }
        own.set("x", &value);
        let (keys, mine) = (dedup_key("x"), terms());
        let kind = |error: Option<tower_dedup::StoreError>| error.map(|error| error.kind());
        let (read, renewed) = runtime.block_on(async {
            let read = own.adapter.get(&keys).await;
            (kind(read.err()), kind(own.adapter.renew(&keys, &mine).await.err()))
        });
        // Changed lengths may make a text of other bytes, and the scripts do not check the encoding.
        let is_ascii = value.get(44..).is_none_or(<[u8]>::is_ascii);
        prop_assert!(
            read == renewed || (renewed.is_none() && !is_ascii),
            "{:?}, {:?}",
            read,
            renewed
        );
        prop_assert!(matches!(read, None | Some(StoreErrorKind::Corrupt)), "{:?}", read);
        // What a script writes can be read again.
        let written = runtime.block_on(own.adapter.complete(&keys, &mine));
        prop_assert_eq!(kind(written.err()), renewed);
        let counts = if read.is_none() { &readable } else { &unreadable };
        counts.fetch_add(1, Ordering::Relaxed);
        if read.is_none() {
            runtime.block_on(own.adapter.get(&keys)).unwrap().unwrap();
        }
        Ok(())
    });
    checked.unwrap();
    let counts = (readable.into_inner(), unreadable.into_inner());
    assert!(counts.0 > 50 && counts.1 > 50, "{counts:?}");
}

#[tokio::test]
async fn full_server_refuses_claims_and_takes_completions_and_releases() {
    let own = Own::new().await;
    let (adapter, mine) = (&own.adapter, terms());
    let keys = ["a", "b", "c", "d"].map(dedup_key);
    let at_once = on_claim(&mine);
    claim_all(adapter, &keys[..3], &mine).await.unwrap();
    adapter.claim(&keys[3], &at_once).await.unwrap();
    own.server.run::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = adapter.claim(&dedup_key("new"), &terms()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Full);
    // Senders of events that are complete stop.
    for terms in [terms(), terms().with_fetch(Fetch::DigestAndResponse)] {
        let claimed = adapter.claim(&keys[3], &terms).await.unwrap();
        assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{claimed:?}");
    }
    // The claim of this token is one whose reply was lost.
    assert_eq!(adapter.claim(&keys[3], &at_once).await.unwrap(), FIRST);
    assert_eq!(adapter.complete(&keys[0], &mine).await.unwrap(), CompleteReply::Held);
    adapter.release(&keys[1], &mine).await.unwrap();
    adapter.release(&keys[3], &at_once).await.unwrap();
    adapter.get(&keys[2]).await.unwrap().unwrap();
    own.server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    let claimed = claim_all(adapter, &keys[..2], &terms()).await.unwrap();
    assert!(
        matches!(claimed[..], [ClaimReply::Duplicate(_), ClaimReply::First { .. }]),
        "{claimed:?}"
    );
}

#[tokio::test]
async fn statistics_of_a_large_database_are_estimated() {
    let own = Own::new().await;
    let adapter = &own.adapter;
    let others = "for i = 1, 100000 do redis.call('SET', 'other:' .. ARGV[1] .. i, 1) end";
    for part in ["a", "b"] {
        own.server.run::<()>(&["EVAL", others, "0", part]);
    }
    let keys = sorted_keys("many", 4_096);
    let mine = terms();
    // Each call has its bound, and the machine may be busy.
    for some in keys.chunks(256) {
        claim_all(adapter, some, &mine).await.unwrap();
    }
    for some in keys[..3_000].chunks(256) {
        complete_all(adapter, some, &mine).await.unwrap();
    }
    let stats = adapter.stats().await.unwrap();
    assert!(!stats.is_exact);
    for (found, expected) in
        [(stats.rows, 4_096), (stats.complete, 3_000), (stats.in_flight, 1_096)]
    {
        assert!((expected * 7 / 10..expected * 13 / 10).contains(&found), "{stats:?}");
    }
    // A list visits a bounded part in one call, and all in the end.
    let (mut listed, calls) = list(adapter, &ListFilter::default(), u32::MAX).await;
    listed.sort();
    assert!(listed == keys && calls > 10, "{} keys in {calls} calls", listed.len());
}

#[tokio::test]
async fn cursor_of_another_primary_is_refused() {
    let own = Own::new().await;
    claim_all(&own.adapter, &sorted_keys("many", 100), &terms()).await.unwrap();
    let page = own.adapter.list(&ListFilter::default(), None, 1).await.unwrap();
    let cursor = page.next.unwrap();
    let address = own.server.address();
    let other = cursor.as_str().replace(&address, "127.0.0.1:1");
    assert_ne!(other, cursor.as_str());
    let listed = own.adapter.list(&ListFilter::default(), Some(&other), 1).await;
    assert_eq!(listed.unwrap_err().kind(), StoreErrorKind::Refused);
}
