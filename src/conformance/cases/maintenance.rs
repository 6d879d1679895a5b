//! Purge, forget, get and close, and the claims after them.

use std::time::Duration;

use super::super::driver::{
    FIRST, LEASE, RETENTION, SLACK, claim_all, complete_at_once, is_duplicate, key, leased,
    leased_for, rows,
};
use super::super::store::Maintained;
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use crate::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter, PURGE_GRACE};
use crate::error::StoreErrorKind;
use crate::key::DedupKey;

/// A key under a live lease is not purged, claimed or forgotten, even after its retention has ended.
pub(super) async fn live_lease_outlives_its_retention<S: Maintained>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    let brief =
        CallTerms::on_completion(Token::random(), Duration::from_millis(1), 3 * PURGE_GRACE);
    adapter.claim(&keys, &brief).await.unwrap();
    store.advance(PURGE_GRACE + SLACK).await;
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(adapter.forget(&keys).await.unwrap(), ForgetReply::InFlight);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), ClaimReply::InFlight);
    let entry = adapter.get(&keys).await.unwrap().expect("a live lease is an entry");
    assert_eq!(entry.state, KeyState::InFlight);
    assert_eq!(adapter.renew(&keys, &brief).await.unwrap(), RenewReply::Held);
}

/// A completion after the retention has ended starts another retention.
pub(super) async fn completion_after_the_retention_is_remembered<S: Maintained>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), leased_for(4 * RETENTION));
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(RETENTION + PURGE_GRACE + SLACK).await;
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// Retentions and leases of zero and of `Duration::MAX` neither panic nor overflow into the past.
pub(super) async fn extreme_durations_neither_panic_nor_overflow<S: Maintained>(store: S) {
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

/// Keys that look like SQL or JSON, or like each other, are stored as they are and stay distinct.
pub(super) async fn hostile_keys_stay_distinct<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let ids = [
        "\"]]}", "\\", "\\u0041", "A", "a", "a ", " a", "%", "_", "*", "?1", "$1", "\u{e9}",
        "null", "0", "00", "1e3",
    ];
    let x = "x".repeat(254);
    let long = [
        format!("{x}x"),
        format!("{x}y"),
        "\u{10FFFF}".repeat(63),
        "'; DROP TABLE webhook_deliveries; --".into(),
    ];
    let odd = ["e\u{301}", "\u{202e}rtl", "line\nbreak\r\ttab\u{7f}"];
    let keys: Vec<DedupKey> = ids
        .iter()
        .chain(&odd)
        .copied()
        .chain(long.iter().map(String::as_str))
        .flat_map(|id| ["conformance", "conformance2", "con\"for'mance"].map(|ns| (ns, id)))
        .map(|(namespace, id)| DedupKey::new(namespace, id).expect("a key"))
        .collect();
    // One after the other, then all at the same time.
    for key in &keys {
        let first = adapter.claim(key, &complete_at_once()).await.unwrap();
        assert_eq!(first, FIRST, "{key:?}");
    }
    let again = claim_all(&*adapter, &keys, &complete_at_once()).await;
    assert!(again.iter().all(is_duplicate), "{again:?}");
    assert_eq!(rows(&adapter).await, keys.len() as u64);
    for key in &keys {
        assert_eq!(adapter.forget(key).await.unwrap(), ForgetReply::Removed, "{key:?}");
    }
    let claimed = claim_all(&*adapter, &keys, &leased()).await;
    assert_eq!(claimed, vec![FIRST; keys.len()]);
}

/// After the clock is set back by an hour, leases and retentions last for an hour more. No key is
/// first twice.
pub(super) async fn clock_set_back_makes_no_key_first_twice<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let [lapsed, at_once, claimed, released] =
        ["lapsed", "at once", "claimed", "released"].map(key);
    adapter.claim(&lapsed, &leased()).await.unwrap();
    store.advance(LEASE + SLACK).await;
    let mine = leased();
    adapter.claim(&at_once, &complete_at_once()).await.unwrap();
    adapter.claim(&claimed, &mine).await.unwrap();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    store.set_back(RETENTION).await;

    match &adapter.claim(&at_once, &complete_at_once()).await.unwrap() {
        // The key was first seen in the future.
        ClaimReply::Duplicate(seen) => assert!(seen.age < SLACK, "{:?}", seen.age),
        ref other => panic!("{other:?}"),
    }
    // The lapsed lease is live again.
    for keys in [&lapsed, &claimed] {
        assert_eq!(adapter.claim(keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    }
    assert_eq!(adapter.renew(&claimed, &mine).await.unwrap(), RenewReply::Held);
    assert_eq!(adapter.complete(&claimed, &mine).await.unwrap(), CompleteReply::Held);
    assert!(is_duplicate(&adapter.claim(&claimed, &leased()).await.unwrap()));
    let again = adapter.claim(&released, &mine).await.unwrap();
    assert_eq!(again, ClaimReply::first(2, false));
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    let entry = adapter.get(&claimed).await.unwrap().expect("an entry");
    assert_eq!(entry.state, KeyState::Complete);

    store.advance(2 * RETENTION - LEASE).await;
    assert!(is_duplicate(&adapter.claim(&at_once, &leased()).await.unwrap()));
    store.advance(LEASE + SLACK).await;
    assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), FIRST);
}

/// A purge deletes keys that expired an hour ago, up to the limit. Keys that expired later stay,
/// although claims treat them as new. Live and leased keys stay too. A store that deletes expired keys by
/// itself has deleted the same keys by then.
pub(super) async fn purge_deletes_only_keys_that_expired_an_hour_ago<S: Maintained>(store: S) {
    let adapter = store.adapter();
    for id in 0..10 {
        adapter.claim(&key(&format!("old-{id}")), &complete_at_once()).await.unwrap();
    }
    adapter.claim(&key("lapsed"), &leased()).await.unwrap();
    // The lease ends after the retention.
    let brief = CallTerms::on_completion(Token::random(), SLACK, RETENTION);
    adapter.claim(&key("brief"), &brief).await.unwrap();
    store.advance(RETENTION - SLACK).await;
    let fresh = CallTerms::on_claim(Token::random(), 4 * PURGE_GRACE);
    adapter.claim(&key("fresh"), &fresh).await.unwrap();
    let long = CallTerms::on_completion(Token::random(), 4 * PURGE_GRACE, 4 * PURGE_GRACE);
    adapter.claim(&key("leased"), &long).await.unwrap();
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    store.advance(SLACK).await;
    for id in ["old-0", "lapsed", "brief"] {
        assert_eq!(adapter.get(&key(id)).await.unwrap(), None, "{id}");
    }
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(rows(&adapter).await, 14);
    store.advance(PURGE_GRACE - SLACK).await;
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(rows(&adapter).await, 14);
    store.advance(SLACK).await;
    if !adapter.abilities().expires_keys {
        assert_eq!(adapter.purge(4).await.unwrap(), 4);
        assert_eq!(adapter.purge(100).await.unwrap(), 8);
    }
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(rows(&adapter).await, 2);
    assert!(is_duplicate(&adapter.claim(&key("fresh"), &complete_at_once()).await.unwrap()));
    assert_eq!(adapter.claim(&key("leased"), &leased()).await.unwrap(), ClaimReply::InFlight);
}

/// A purge deletes as many keys as its limit, wherever they lie: a purger stops at the first call that deletes fewer.
/// Statistics then count the other keys. A store that deletes expired keys by itself has deleted the same keys by then.
pub(super) async fn purge_deletes_as_many_keys_as_its_limit<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let long = CallTerms::on_claim(Token::random(), 4 * PURGE_GRACE + RETENTION);
    // Expired keys and others alternate, in the order of insertion and in that of the keys.
    for turn in 0..20_u32 {
        for (namespace, shift) in [("conformance", 0), ("other", 7)] {
            let id = |number: u32| format!("{}-{turn}", (number * 37 + turn + shift) % 100);
            let key = |number| DedupKey::new(namespace, &id(number)).expect("a key");
            let keys: Vec<_> = (0..100).map(key).collect();
            let terms = if turn % 2 == 0 { &complete_at_once() } else { &long };
            claim_all(&*adapter, &keys, terms).await;
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

/// After `close`, every call fails at once with `Unavailable`.
pub(super) async fn calls_after_close_fail<S: Maintained>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), leased());
    adapter.claim(&keys, &mine).await.unwrap();
    let closed_and_asked = async {
        adapter.close().await;
        let kinds = [
            adapter.claim(&keys, &mine).await.map(drop),
            adapter.renew(&keys, &mine).await.map(drop),
            adapter.complete(&keys, &mine).await.map(drop),
            adapter.release(&keys, &mine).await.map(drop),
            adapter.claim(&keys, &complete_at_once()).await.map(drop),
            adapter.release(&keys, &complete_at_once()).await.map(drop),
            adapter.purge(10).await.map(drop),
            adapter.forget(&keys).await.map(drop),
            adapter.get(&keys).await.map(drop),
            adapter.stats().await.map(drop),
        ]
        .map(|ended| ended.map_err(|error| error.kind()));
        // A second `close` changes nothing.
        adapter.close().await;
        kinds
    };
    let kinds = tokio::time::timeout(SLACK, closed_and_asked).await.expect("no call waits");
    assert_eq!(kinds, [Err(StoreErrorKind::Unavailable); 10]);
}

/// `get` and `stats` follow the key: the end of its lease, its attempts, its row. After a `forget`, the event can be
/// delivered again.
pub(super) async fn forget_get_and_stats_follow_the_state_of_a_key<S: Maintained>(store: S) {
    let (adapter, keys, mine, taker) = (store.adapter(), key("a"), leased(), leased());
    assert_eq!(rows(&adapter).await, 0);
    adapter.claim(&keys, &mine).await.unwrap();
    let entry = adapter.get(&keys).await.unwrap().expect("an entry");
    let lease_until = entry.lease_until.expect("the end of the lease");
    assert!(lease_until > entry.first_seen_at && entry.expires_at > lease_until, "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover), (1, false));

    adapter.release(&keys, &mine).await.unwrap();
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(LEASE).await;
    adapter.claim(&keys, &taker).await.unwrap();
    adapter.complete(&keys, &taker).await.unwrap();
    let entry = adapter.get(&keys).await.unwrap().expect("an entry");
    assert_eq!((entry.attempts, entry.takeover), (3, true));
    assert_eq!(rows(&adapter).await, 1);

    assert_eq!(adapter.forget(&keys).await.unwrap(), ForgetReply::Removed);
    assert_eq!(adapter.get(&keys).await.unwrap(), None);
    // A store may keep an expired row, which fences the calls that are still on their way.
    let stats = adapter.stats().await.unwrap();
    assert_eq!(stats.rows, stats.expired, "{stats:?}");
    assert_eq!(adapter.forget(&keys).await.unwrap(), ForgetReply::Missing);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), FIRST);
}
