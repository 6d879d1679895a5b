//! Lists, event types and statistics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tower_dedup::adapter::contract::{CallTerms, DedupAdapter, Token};
use tower_dedup::adapter::maintenance::{
    Entry, KeyState, ListFilter, MaintenanceAdapter, PURGE_GRACE, Stats,
};
use tower_dedup::{DedupKey, StoreErrorKind};

use crate::case::Case;
use crate::driver::{
    FIRST, LEASE, RETENTION, SLACK, claim_all, complete_at_once, key, leased, reply,
};
use crate::trace::Traced;

/// More than enough calls for a list or a purge of a few hundred keys.
const MANY: usize = 10_000;

fn in_namespace(namespace: &str, id: &str) -> DedupKey {
    DedupKey::new(namespace, id).expect("a key")
}

/// Returns the keys that a filter selects, in pages of this size, sorted. No key may occur twice.
async fn list(adapter: &Traced, filter: &ListFilter, limit: u32) -> BTreeMap<DedupKey, Entry> {
    let (mut found, mut after) = (BTreeMap::new(), None);
    for _ in 0..MANY {
        let page = adapter.list(filter, after.as_deref(), limit).await.unwrap();
        assert!(page.keys.len() <= limit as usize, "{} keys", page.keys.len());
        for (key, entry) in page.keys {
            assert!(found.insert(key.clone(), entry).is_none(), "{:?} occurs twice", key.id());
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return found,
        }
    }
    panic!("a list without an end");
}

fn of_state(state: KeyState) -> ListFilter {
    let mut filter = ListFilter::default();
    filter.state = Some(state);
    filter
}

fn of_namespace(namespace: &str) -> ListFilter {
    let mut filter = ListFilter::default();
    filter.namespace = Some(namespace.to_owned());
    filter
}

/// Returns the ids of the keys that a filter selects.
async fn ids(adapter: &Traced, filter: &ListFilter) -> Vec<String> {
    list(adapter, filter, 3).await.into_keys().map(|key| key.id().to_owned()).collect()
}

/// The time that passes after the last claim of [`populate`].
const LAST: Duration = Duration::from_secs(30);
/// How long ago its first key has expired then.
const EXPIRED: Duration = Duration::from_secs(6);

/// Makes keys in every state. Their ids begin with the name of the state.
async fn populate(store: &Case) {
    let adapter = store.adapter();
    let long = |lease| CallTerms::on_completion(Token::random(), 4 * RETENTION, lease);
    let brief = |lease| CallTerms::on_completion(Token::random(), Duration::from_millis(1), lease);
    adapter.claim(&key("lapsed"), &long(LEASE)).await.unwrap();
    // A live lease does not expire.
    adapter.claim(&key("in-flight-for-long"), &brief(4 * RETENTION)).await.unwrap();
    store.advance(RETENTION + LEASE).await;
    adapter.claim(&key("in-flight"), &leased()).await.unwrap();
    let failed = key("failed");
    for _ in 0..3 {
        let mine = leased();
        adapter.claim(&failed, &mine).await.unwrap();
        adapter.release(&failed, &mine).await.unwrap();
    }
    let (done, mine) = (key("complete-by-a-lease"), leased());
    adapter.claim(&done, &mine).await.unwrap();
    adapter.complete(&done, &mine).await.unwrap();
    adapter.claim(&key("complete-at-once"), &complete_at_once()).await.unwrap();
    let other = in_namespace("other", "complete");
    adapter.claim(&other, &complete_at_once()).await.unwrap();
    // The last claims, because a store may delete expired keys with every claim.
    let with_its_lease = key("expired-with-its-lease");
    adapter.claim(&with_its_lease, &brief(LAST - EXPIRED / 2)).await.unwrap();
    let expiring = CallTerms::on_claim(Token::random(), LAST - EXPIRED);
    adapter.claim(&key("expired"), &expiring).await.unwrap();
    store.advance(LAST).await;
}

/// `stats` counts the keys of each state, and returns the age of the oldest.
pub(super) async fn stats_count_each_state_and_its_oldest_key(store: Case) {
    let adapter = store.adapter();
    let empty = adapter.stats().await.unwrap();
    assert_eq!((empty.is_exact, empty.rows), (true, 0));
    assert_eq!(empty.oldest_in_flight.or(empty.oldest_lapsed).or(empty.oldest_expired), None);
    populate(&store).await;
    let stats = adapter.stats().await.unwrap();
    assert!(stats.is_exact, "{stats:?}");
    let counted = |stats: &Stats| [stats.in_flight, stats.lapsed, stats.released, stats.complete];
    assert_eq!((counted(&stats), stats.expired, stats.rows), ([2, 1, 1, 3], 2, 9));
    let ages = [
        (stats.oldest_in_flight, RETENTION + LEASE + LAST),
        (stats.oldest_lapsed, RETENTION + LAST),
        (stats.oldest_expired, EXPIRED),
    ];
    for ((age, expected), name) in ages.into_iter().zip(["in flight", "lapsed", "expired"]) {
        let age = age.unwrap_or_else(|| panic!("no age of the oldest key that is {name}"));
        let is_right = (expected..expected + SLACK).contains(&age);
        assert!(is_right, "oldest key that is {name}: {age:?} is not {expected:?}");
    }
    // A store may keep the row of a forgotten key, expired: it fences the calls that are still on their way.
    adapter.forget(&key(COMPLETE[0])).await.unwrap();
    let stats = adapter.stats().await.unwrap();
    assert_eq!((counted(&stats), stats.rows - stats.expired), ([2, 1, 1, 2], 6));
}

/// The entries of many keys come in the order of the keys, as `get` returns them without stored data.
pub(super) async fn entries_of_many_keys_are_those_of_each(store: Case) {
    let adapter = store.adapter();
    populate(&store).await;
    let ids =
        ["lapsed", "none", "failed", "expired", "in-flight", COMPLETE[1], "in-flight-for-long"];
    let mut keys: Vec<_> =
        ids.into_iter().chain([COMPLETE[0], "failed", "none"]).map(key).collect();
    keys.push(in_namespace("other", "complete"));
    // Another key of the same id.
    keys.push(in_namespace("other", "failed"));
    let many = adapter.get_many(&keys).await.unwrap();
    assert_eq!(many.len(), keys.len());
    for (key, many) in keys.iter().zip(many) {
        let entry = adapter.get(key).await.unwrap();
        assert!(many.as_ref().is_none_or(|entry| entry.stored.is_none()), "{many:?}");
        // A store may compute the times from the age of the row, each time anew.
        let state = |entry: Option<Entry>| {
            entry.map(|entry| (entry.state, entry.attempts, entry.takeover, entry.event_type))
        };
        assert_eq!(state(many), state(entry), "{:?}", key.id());
    }
    assert_eq!(adapter.get_many(&[]).await.unwrap(), []);
    // More than a store reads at once.
    let keys: Vec<_> = (0..3_000).map(|number| key(&format!("many {number}"))).collect();
    let some = |number: &usize| number.is_multiple_of(7);
    for number in (0..keys.len()).filter(some).step_by(20) {
        adapter.claim(&keys[number], &complete_at_once()).await.unwrap();
    }
    let many = adapter.get_many(&keys).await.unwrap();
    let found: Vec<_> = (0..keys.len()).filter(|number| many[*number].is_some()).collect();
    assert!(found.iter().copied().eq((0..keys.len()).filter(some).step_by(20)), "{found:?}");
}

/// A store without the ability refuses a list.
pub(super) async fn list_is_unsupported_without_the_ability(store: Case) {
    let adapter = store.adapter();
    let listed = adapter.list(&ListFilter::default(), None, 10).await;
    if adapter.abilities().inspection {
        assert_eq!(listed.unwrap().keys, []);
    } else {
        assert_eq!(listed.unwrap_err().kind(), StoreErrorKind::Unsupported);
    }
}

/// The keys of [`populate`] that have not expired, in their order, and those that are complete.
const ALL: [&str; 7] =
    [COMPLETE[0], COMPLETE[1], "failed", "in-flight", "in-flight-for-long", "lapsed", COMPLETE[2]];
const COMPLETE: [&str; 3] = ["complete-at-once", "complete-by-a-lease", "complete"];

/// A list has every key that has not expired, as `get` returns it without its stored data.
pub(super) async fn list_returns_the_state_of_each_key(store: Case) {
    let adapter = store.adapter();
    populate(&store).await;
    let listed = list(&adapter, &ListFilter::default(), 100).await;
    assert!(listed.keys().map(DedupKey::id).eq(ALL), "{listed:?}");
    for (key, listed) in listed {
        let mut entry = adapter.get(&key).await.unwrap().expect("an entry");
        entry.stored = None;
        assert_eq!(listed, entry, "{:?}", key.id());
    }
}

/// Each condition of a filter selects keys, and the conditions are joined by "and".
pub(super) async fn list_filters_by_state_namespace_id_age_and_attempts(store: Case) {
    let adapter = store.adapter();
    populate(&store).await;
    let filter = |set: &dyn Fn(&mut ListFilter)| {
        let mut filter = ListFilter::default();
        set(&mut filter);
        filter
    };
    let with_part = |part: &str| filter(&|filter| filter.id_part = Some(part.to_owned()));
    let since = |since| filter(&|filter| filter.since = Some(since));
    let over = |attempts| filter(&|filter| filter.attempts_over = Some(attempts));
    let recent = [COMPLETE[0], COMPLETE[1], "failed", "in-flight", COMPLETE[2]];
    let mut several = of_namespace("conformance");
    (several.state, several.since) = (Some(KeyState::Complete), Some(RETENTION));
    for (filter, expected) in [
        (of_state(KeyState::InFlight), &["in-flight", "in-flight-for-long"][..]),
        (of_state(KeyState::Lapsed), &["lapsed"]),
        (of_state(KeyState::Released), &["failed"]),
        (of_state(KeyState::Complete), &COMPLETE),
        (of_namespace("other"), &["complete"]),
        (with_part("for-long"), &["in-flight-for-long"]),
        (with_part("t-o"), &["complete-at-once"]),
        (with_part("ailed"), &["failed"]),
        (since(RETENTION), &recent),
        (since(Duration::ZERO), &[]),
        (over(2), &["failed"]),
        (over(3), &[]),
        (over(u32::MAX), &[]),
        (several, &COMPLETE[..2]),
        (with_part(""), &ALL),
        (since(Duration::MAX), &ALL),
    ] {
        assert_eq!(ids(&adapter, &filter).await, expected, "{filter:?}");
    }
    let namespaces = ["othe", "other2", "o'ther", "%", "\u{10FFFF}", ""].map(of_namespace);
    let parts = ["%", "_", "*", "FAILED", "expired", "'", "\u{10FFFF}"].map(with_part);
    for absent in namespaces.into_iter().chain(parts) {
        assert!(ids(&adapter, &absent).await.is_empty(), "{absent:?}");
    }
}

/// The pages of a list have every key once, whatever their size.
pub(super) async fn list_in_pages_has_every_key_once(store: Case) {
    let adapter = store.adapter();
    let ids =
        ["\"]]}", "\\", "'; --", "a", "a ", "\u{e9}", "line\nbreak\u{7f}", "\u{10FFFF}", "[0,1]"];
    let namespaces = ["a", "a b", "b\"'", "\u{10FFFF}"];
    let mut keys: Vec<DedupKey> = (0..30)
        .flat_map(|number| ids.map(|id| format!("{id}{number}")))
        .flat_map(|id| namespaces.map(|namespace| in_namespace(namespace, &id)))
        .collect();
    keys.sort();
    let claimed = claim_all(&adapter, &keys, &complete_at_once()).await;
    assert!(claimed.iter().all(|claimed| *claimed == FIRST));
    for limit in [7, 1_000, 1_080, u32::MAX] {
        let listed = list(&adapter, &ListFilter::default(), limit).await;
        assert!(listed.keys().eq(&keys), "{limit}: {} keys", listed.len());
    }
    for (namespace, limit) in namespaces.into_iter().zip([1, 7, 200, 270]) {
        let listed = list(&adapter, &of_namespace(namespace), limit).await;
        assert!(listed.keys().eq(keys.iter().filter(|key| key.namespace() == namespace)));
    }
    // A filter that selects few keys.
    let few = in_namespace("a", "\\7");
    adapter.forget(&few).await.unwrap();
    adapter.claim(&few, &leased()).await.unwrap();
    let listed = list(&adapter, &of_state(KeyState::InFlight), 7).await;
    assert!(listed.keys().eq([&few]));
}

/// A cursor that is not of this store is refused, and nothing is listed.
pub(super) async fn foreign_cursor_is_refused(store: Case) {
    let adapter = store.adapter();
    let keys = ["a", "b", "c"].map(key);
    claim_all(&adapter, &keys, &complete_at_once()).await;
    let all = ListFilter::default();
    let page = adapter.list(&all, None, 1).await.unwrap();
    let own = page.next.expect("a second page");
    adapter.list(&all, Some(&own), 1).await.unwrap();
    let texts = ["", " ", "\0", "x", "-1", "null", "[]", "{}", "[1,2]", "\u{e9}", "'", "a\nb"];
    let altered = [format!("{own}x"), format!(" {own}"), format!("{own}\0"), own[1..].into()];
    for text in texts.into_iter().map(str::to_owned).chain(altered) {
        let refused = adapter.list(&all, Some(&text), 1).await.map_err(|error| error.kind());
        assert_eq!(refused.err(), Some(StoreErrorKind::Refused), "cursor {text:?}");
    }
}

/// A list and statistics beside claims, completions and purges do not fail. The list has every key that
/// is not written, once.
pub(super) async fn list_beside_writes_has_every_key_that_is_not_written(store: Case) {
    let adapter = store.adapter();
    let mut stuck: Vec<DedupKey> = (0..200).map(|id| key(&format!("{id}-stuck"))).collect();
    let old: Vec<DedupKey> = (0..200).map(|id| key(&format!("{id}-old"))).collect();
    stuck.sort();
    claim_all(&adapter, &old, &complete_at_once()).await;
    store.advance(RETENTION + PURGE_GRACE).await;
    let long = CallTerms::on_completion(Token::random(), RETENTION, RETENTION);
    claim_all(&adapter, &stuck, &long).await;
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let adapter = Arc::clone(&adapter);
            tokio::spawn(async move {
                // Not for ever: a list may follow keys that are inserted faster than it reads.
                for turn in 0..150 {
                    let (keys, mine) = (key(&format!("{turn}-{writer}")), leased());
                    adapter.claim(&keys, &mine).await.unwrap();
                    match turn % 3 {
                        0 => drop(adapter.complete(&keys, &mine).await.unwrap()),
                        1 => adapter.release(&keys, &mine).await.unwrap(),
                        _ => drop(adapter.purge(5).await.unwrap()),
                    }
                }
            })
        })
        .collect();
    for limit in [11, 50, 400] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let all = ListFilter::default();
            let listed = adapter.list(&all, after.as_deref(), limit).await.unwrap();
            found.extend(listed.keys.into_iter().map(|(key, _)| key));
            after = listed.next;
            if after.is_none() {
                break;
            }
        }
        adapter.stats().await.unwrap();
        found.retain(|key| key.id().ends_with("-stuck"));
        found.sort();
        assert!(found == stuck, "{} of {} keys", found.len(), stuck.len());
    }
    for writer in writers {
        writer.await.unwrap();
    }
}

/// The type of an event is stored with a new key, however it is new. Only a key that is new again gets another type.
pub(super) async fn event_type_is_stored_with_a_new_key(store: Case) {
    let adapter = store.adapter();
    let stored =
        async |key: &DedupKey| adapter.get(key).await.unwrap().expect("an entry").event_type;
    let insertions: [(_, fn() -> CallTerms); 4] =
        [("claim", leased), ("claim", complete_at_once), ("renew", leased), ("complete", leased)];
    for (number, (call, terms)) in insertions.into_iter().enumerate() {
        let (typed, none) = (key(&format!("{number} typed")), key(&format!("{number} none")));
        let with =
            |terms: CallTerms, name: &str| terms.with_event_type(&format!("{name} {number}"));
        let is = async |name: &str| {
            assert_eq!(stored(&typed).await, Some(format!("{name} {number}")), "{call}");
            assert_eq!(stored(&none).await, None, "{call}");
        };
        reply(&adapter, call, &typed, &with(terms(), "first")).await;
        reply(&adapter, call, &none, &terms()).await;
        is("first").await;
        // The types that later claims bring are dropped: a takeover or a duplicate, and its completion.
        let late = leased().with_event_type("late");
        store.advance(LEASE + SLACK).await;
        for (key, terms) in [(&typed, with(leased(), "other")), (&none, late)] {
            adapter.claim(key, &terms).await.unwrap();
            adapter.complete(key, &terms).await.unwrap();
        }
        is("first").await;
        // The key is new again after its retention, but not for a renewal.
        store.advance(RETENTION + SLACK).await;
        let call = if call == "renew" { "claim" } else { call };
        reply(&adapter, call, &typed, &with(terms(), "new")).await;
        reply(&adapter, call, &none, &terms()).await;
        is("new").await;
    }
}
