//! Purges, close, clocks and hostile keys.

use std::time::{Duration, SystemTime};

use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use tower_dedup::adapter::maintenance::{ForgetReply, MaintenanceAdapter, PURGE_GRACE};
use tower_dedup::{DedupKey, StoreErrorKind};

use crate::case::Case;
use crate::driver::{
    FIRST, RETENTION, SLACK, claim_all, complete_at_once, is_duplicate, key, leased, prepare, rows,
    story,
};

/// Retentions and leases of zero and of `Duration::MAX` neither panic nor overflow into the past.
pub(super) async fn extreme_durations_neither_panic_nor_overflow(store: Case) {
    let adapter = store.adapter();
    let longest = CallTerms::on_completion(Token::random(), Duration::MAX, Duration::MAX);
    let keys = key("longest");
    adapter.claim(&keys, &longest).await.unwrap();
    assert_eq!(adapter.renew(&keys, &longest).await.unwrap(), RenewReply::Held);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    adapter.get(&keys).await.unwrap().expect("an entry");
    assert_eq!(adapter.complete(&keys, &longest).await.unwrap(), CompleteReply::Held);
    store.advance(Duration::from_secs(100 * 365 * 86_400)).await;
    assert_eq!(adapter.purge(10).await.unwrap(), 0);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));

    let nothing = || CallTerms::on_claim(Token::random(), Duration::ZERO);
    let keys = key("nothing");
    assert_eq!(adapter.claim(&keys, &nothing()).await.unwrap(), FIRST);
    assert_eq!(adapter.claim(&keys, &nothing()).await.unwrap(), FIRST);
    let no_lease = CallTerms::on_completion(Token::random(), Duration::ZERO, Duration::ZERO);
    assert_eq!(adapter.claim(&keys, &no_lease).await.unwrap(), FIRST);
}

/// The key of an event that another program has handled was complete then, and its retention counts from then on. A time
/// in the future counts as now.
pub(super) async fn claim_of_an_event_of_the_past_has_its_times(store: Case) {
    let adapter = store.adapter();
    let assert_near = |at: SystemTime, expected: SystemTime, what: &str| {
        let apart = at.duration_since(expected).unwrap_or_else(|error| error.duration());
        assert!(apart < SLACK, "{what}: {apart:?} apart");
    };
    let old = RETENTION / 2;
    for row in ["none", "expired complete", "released"] {
        let (key, mine) = (key(row), complete_at_once());
        prepare(&store, row, &[(key.clone(), leased())]).await;
        let now = SystemTime::now();
        let terms = mine.with_handled_at(now - old);
        for _ in 0..2 {
            let claimed = adapter.claim(&key, &terms).await.unwrap();
            assert!(matches!(claimed, ClaimReply::First { .. }), "{row}: {claimed:?}");
        }
        let entry = adapter.get(&key).await.unwrap().expect("an entry");
        let is_new = row != "released";
        assert_near(entry.first_seen_at, if is_new { now - old } else { now }, row);
        assert_near(entry.completed_at.expect("it is complete"), now - old, row);
        assert_near(entry.expires_at, now - old + RETENTION, row);
        assert!(is_duplicate(&adapter.claim(&key, &leased()).await.unwrap()), "{row}");
    }
    store.advance(RETENTION - old).await;
    assert_eq!(adapter.claim(&key("released"), &leased()).await.unwrap(), FIRST);

    let (key, now) = (key("future"), SystemTime::now());
    let terms = complete_at_once().with_handled_at(now + RETENTION);
    assert_eq!(adapter.claim(&key, &terms).await.unwrap(), FIRST);
    let entry = adapter.get(&key).await.unwrap().expect("an entry");
    assert_near(entry.first_seen_at, now, "future");
    assert_near(entry.completed_at.expect("it is complete"), now, "future");
    assert_near(entry.expires_at, now + RETENTION, "future");
}

/// Keys that look like SQL or JSON, or like each other, are stored as they are and stay distinct.
pub(super) async fn hostile_keys_stay_distinct(store: Case) {
    let adapter = store.adapter();
    let x = "x".repeat(254);
    #[rustfmt::skip]
    let ids = [
        "\"]]}", "\\", "\\u0041", "A", "a", "a ", " a", "%", "_", "*", "?1", "$1", "\u{e9}", "null", "0", "00", "1e3",
        "e\u{301}", "\u{202e}rtl", "line\nbreak\r\ttab\u{7f}", "'; DROP TABLE webhook_deliveries; --",
        &format!("{x}x"), &format!("{x}y"), &"\u{10FFFF}".repeat(63),
    ];
    let namespaces = ["conformance", "conformance2", "con\"for'mance"];
    let of = |namespace| ids.map(|id| DedupKey::new(namespace, id).expect("a key"));
    let keys: Vec<DedupKey> = namespaces.into_iter().flat_map(of).collect();
    // One after the other, then all at the same time.
    for key in &keys {
        let first = adapter.claim(key, &complete_at_once()).await.unwrap();
        assert_eq!(first, FIRST, "{:?}", key.id());
    }
    let again = claim_all(&adapter, &keys, &complete_at_once()).await;
    assert!(again.iter().all(is_duplicate), "{again:?}");
    assert_eq!(rows(&adapter).await, keys.len() as u64);
    for key in &keys {
        assert_eq!(adapter.forget(key).await.unwrap(), ForgetReply::Removed, "{:?}", key.id());
    }
    let claimed = claim_all(&adapter, &keys, &leased()).await;
    assert_eq!(claimed, vec![FIRST; keys.len()]);
}

/// After the clock is set back by an hour, leases and retentions last for an hour more. No key is first twice.
pub(super) async fn clock_set_back_makes_no_key_first_twice(store: Case) {
    for calls in [
        "a once 1; 3600 back; b once D; 7140 s; b claim D; 80 s; b once 1",
        "a claim 1; 3600 back; b claim -; a renew H; a complete H; b claim D",
        // The lapsed lease is live again.
        "a claim 1; 80 s; 3600 back; b claim -",
        "a claim 1; a release; 3600 back; a claim 2",
    ] {
        story(&store, calls).await;
    }
    let (adapter, key, mine) = (store.adapter(), key("a"), complete_at_once());
    adapter.claim(&key, &mine).await.unwrap();
    store.set_back(RETENTION).await;
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    match adapter.claim(&key, &leased()).await.unwrap() {
        // The key was first seen in the future.
        ClaimReply::Duplicate(seen) => assert!(seen.age < SLACK, "{:?}", seen.age),
        other => panic!("{other:?}"),
    }
    adapter.get(&key).await.unwrap().expect("an entry");
}

/// A purge deletes keys that expired an hour ago, up to the limit. Keys that expired later stay, although claims treat
/// them as new. Keys under a live lease stay, although their retention has ended. A store that deletes expired keys by
/// itself has deleted the same keys by then.
pub(super) async fn purge_deletes_only_keys_that_expired_an_hour_ago(store: Case) {
    let adapter = store.adapter();
    let brief = |lease| CallTerms::on_completion(Token::random(), SLACK, lease);
    let old: Vec<_> = (0..10).map(|id| key(&format!("old-{id}"))).collect();
    claim_all(&adapter, &old, &complete_at_once()).await;
    for (id, terms) in [
        ("lapsed", leased()),
        // The lease ends after the retention.
        ("brief", brief(RETENTION)),
        ("live", brief(4 * PURGE_GRACE)),
        ("fresh", CallTerms::on_claim(Token::random(), 4 * PURGE_GRACE)),
    ] {
        adapter.claim(&key(id), &terms).await.unwrap();
    }
    let none_is_purged = async || {
        assert_eq!(adapter.purge(100).await.unwrap(), 0);
        assert_eq!(rows(&adapter).await, 14);
    };
    store.advance(RETENTION).await;
    for id in ["old-0", "lapsed", "brief"] {
        assert_eq!(adapter.get(&key(id)).await.unwrap(), None, "{id}");
    }
    none_is_purged().await;
    store.advance(PURGE_GRACE - SLACK).await;
    none_is_purged().await;
    store.advance(SLACK).await;
    if !adapter.abilities().expires_keys {
        assert_eq!(adapter.purge(4).await.unwrap(), 4);
        assert_eq!(adapter.purge(100).await.unwrap(), 8);
    }
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(rows(&adapter).await, 2);
    assert!(is_duplicate(&adapter.claim(&key("fresh"), &complete_at_once()).await.unwrap()));
    assert_eq!(adapter.claim(&key("live"), &leased()).await.unwrap(), ClaimReply::InFlight);
}

/// A purge deletes as many keys as its limit, wherever they lie: a purger stops at the first call that deletes fewer.
/// Statistics then count the other keys. A store that deletes expired keys by itself has deleted the same keys by then.
pub(super) async fn purge_deletes_as_many_keys_as_its_limit(store: Case) {
    let adapter = store.adapter();
    let long = CallTerms::on_claim(Token::random(), 4 * PURGE_GRACE + RETENTION);
    // Expired keys and others alternate, in the order of insertion and in that of the keys.
    for turn in 0..20_u32 {
        for (namespace, shift) in [("conformance", 0), ("other", 7)] {
            let id = |number: u32| format!("{}-{turn}", (number * 37 + turn + shift) % 100);
            let key = |number| DedupKey::new(namespace, &id(number)).expect("a key");
            let keys: Vec<_> = (0..100).map(key).collect();
            let terms = if turn % 2 == 0 { &complete_at_once() } else { &long };
            claim_all(&adapter, &keys, terms).await;
        }
    }
    assert_eq!(rows(&adapter).await, 4_000);
    store.advance(RETENTION + PURGE_GRACE).await;
    let expected = if adapter.abilities().expires_keys { [0; 3] } else { [1_000, 1_000, 0] };
    for (call, expected) in expected.into_iter().enumerate() {
        let purged = adapter.purge(1_000).await.unwrap();
        assert_eq!(purged, expected, "purge {call} of 1,000 keys each, over 2,000");
    }
    let stats = adapter.stats().await.unwrap();
    assert_eq!((stats.rows, stats.complete, stats.expired), (2_000, 2_000, 0));
}

/// After `close`, every call fails at once with `Unavailable`. A second `close` changes nothing.
pub(super) async fn calls_after_close_fail(store: Case) {
    let (adapter, key, mine) = (store.adapter(), key("a"), leased());
    adapter.claim(&key, &mine).await.unwrap();
    let closed_and_asked = async {
        adapter.close().await;
        adapter.close().await;
        [
            adapter.claim(&key, &mine).await.map(drop),
            adapter.renew(&key, &mine).await.map(drop),
            adapter.complete(&key, &mine).await.map(drop),
            adapter.release(&key, &mine).await.map(drop),
            adapter.claim(&key, &complete_at_once()).await.map(drop),
            adapter.release(&key, &complete_at_once()).await.map(drop),
            adapter.purge(10).await.map(drop),
            adapter.forget(&key).await.map(drop),
            adapter.get(&key).await.map(drop),
            adapter.get_many(std::slice::from_ref(&key)).await.map(drop),
            adapter.stats().await.map(drop),
        ]
    };
    let ended = tokio::time::timeout(SLACK, closed_and_asked).await.expect("no call waits");
    let kinds = ended.map(|ended| ended.map_err(|error| error.kind()));
    assert_eq!(kinds, [Err(StoreErrorKind::Unavailable); 11]);
}
