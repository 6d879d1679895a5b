//! Reruns that an operator allows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;

use super::super::driver::{
    FIRST, LEASE, RETENTION, SLACK, complete_at_once, is_duplicate, key, leased,
};
use super::super::store::Store;
use crate::adapter::{
    CallTerms, Claimed, Completed, DedupAdapter, EntryState, Fetch, MaintenanceAdapter, Released,
    Renewed, RerunOrder, RerunReply,
};
use crate::error::ErrorKind;
use crate::key::DedupKey;

/// How long a rerun waits for its delivery at least.
const WAIT: Duration = Duration::from_secs(7 * 86_400);

fn order() -> RerunOrder {
    RerunOrder::new("ada", "the invoice was not sent: 'quoted'; -- \u{e9}").expect("an order")
}

/// Allows a rerun of these keys, which all may run again.
async fn allow<A: MaintenanceAdapter + ?Sized>(adapter: &A, keys: &[DedupKey]) {
    let allowed = adapter.allow_rerun(keys, &order()).await.unwrap();
    assert_eq!(allowed, vec![RerunReply::Allowed; keys.len()]);
}

/// Claims and completes these keys.
async fn run<A: MaintenanceAdapter + ?Sized>(adapter: &A, keys: &[DedupKey]) -> CallTerms {
    let mine = leased();
    adapter.claim(keys, &mine).await.unwrap();
    adapter.complete(keys, &mine).await.unwrap();
    mine
}

/// A store that announces the ability allows reruns. Another store returns `Unsupported`.
pub async fn rerun_is_unsupported_without_the_ability<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let allowed = adapter.allow_rerun(&[key("a")], &order()).await;
    if adapter.abilities().inspection {
        assert_eq!(allowed.unwrap(), [RerunReply::Missing]);
        assert_eq!(adapter.allow_rerun(&[], &order()).await.unwrap(), []);
    } else {
        assert_eq!(allowed.unwrap_err().kind(), ErrorKind::Unsupported);
    }
}

/// A complete key runs once more after a rerun was allowed. Its audit stays, and its stored data
/// does not.
pub async fn complete_key_runs_again_once_and_keeps_its_audit<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let first = leased().with_payloads([(keys[0].clone(), [7; 32])]);
    adapter.claim(&keys, &first).await.unwrap();
    adapter.complete(&keys, &first).await.unwrap();
    let before = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!(before.rerun, None);

    allow(&*adapter, &keys).await;
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!((entry.state, entry.attempts, entry.takeover), (EntryState::Released, 1, false));
    assert_eq!((entry.first_seen_at, &entry.stored), (before.first_seen_at, &None));
    assert!(entry.expires_at >= entry.first_seen_at + WAIT, "{entry:?}");
    let audit = entry.rerun.expect("an audit");
    assert_eq!(audit.order, order());
    assert!(audit.at >= before.first_seen_at, "{audit:?}");

    let mine = leased();
    for _ in 0..2 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::rerun(2, false)]);
    }
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
    let again = adapter.claim(&keys, &leased().with_fetch(Fetch::Digest)).await.unwrap();
    let [Claimed::Duplicate(seen)] = &again[..] else { panic!("{again:?}") };
    let stored = seen.stored.as_ref().expect("stored data");
    assert_eq!(stored.payload_sha256, None, "the data of the first run");
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
    assert_eq!((entry.attempts, entry.rerun), (2, Some(audit)));

    // A further rerun needs a further order, which replaces the audit.
    let other = RerunOrder::new("grace", "once more").expect("an order");
    assert_eq!(adapter.allow_rerun(&keys, &other).await.unwrap(), [RerunReply::Allowed]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::rerun(3, false)]);
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!(entry.rerun.map(|audit| audit.order), Some(other));
}

/// A key that is unknown or expired stays so. Its next claim is a first one without an audit.
pub async fn rerun_of_a_missing_or_expired_key_changes_nothing<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let [missing, complete, lapsed] = ["missing", "complete", "lapsed"].map(|id| [key(id)]);
    run(&*adapter, &complete).await;
    adapter.claim(&lapsed, &leased()).await.unwrap();
    store.advance(RETENTION + SLACK).await;
    for keys in [missing, complete, lapsed] {
        let reply = adapter.allow_rerun(&keys, &order()).await.unwrap();
        assert_eq!(reply, [RerunReply::Missing], "{keys:?}");
        assert_eq!(adapter.get(&keys[0]).await.unwrap(), None);
        assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [FIRST], "{keys:?}");
        let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
        assert_eq!(entry.rerun, None);
    }
}

/// A live lease is not touched: its holder goes on, and no second handler runs.
pub async fn rerun_of_a_live_lease_changes_nothing<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    let before = adapter.get(&keys[0]).await.unwrap();
    let reply = adapter.allow_rerun(&keys, &order()).await.unwrap();
    assert_eq!(reply, [RerunReply::InFlight]);
    assert_eq!(adapter.get(&keys[0]).await.unwrap(), before);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// The next claim of a lapsed key is a takeover and a rerun. Until then its holder may still complete
/// the key.
pub async fn rerun_of_a_lapsed_key_is_a_takeover<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, taken, held) = (store.adapter(), [key("taken")], [key("held")]);
    let mine = leased();
    for keys in [&taken, &held] {
        adapter.claim(keys, &mine).await.unwrap();
    }
    store.advance(LEASE + SLACK).await;
    for keys in [&taken, &held] {
        allow(&*adapter, keys).await;
    }
    let theirs = leased();
    for _ in 0..2 {
        assert_eq!(adapter.claim(&taken, &theirs).await.unwrap(), [Claimed::rerun(2, true)]);
    }
    assert_eq!(adapter.complete(&held, &mine).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&held, &leased()).await.unwrap()));
}

/// The retry of a failed rerun is a rerun, whether its key was released or its lease lapsed.
pub async fn retry_of_a_failed_rerun_is_a_rerun<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    adapter.release(&keys, &mine).await.unwrap();
    // A released key would run anyway; now its run has an audit.
    allow(&*adapter, &keys).await;
    let failing = leased();
    assert_eq!(adapter.claim(&keys, &failing).await.unwrap(), [Claimed::rerun(2, false)]);
    assert_eq!(adapter.release(&keys, &failing).await.unwrap(), [Released::Released]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::rerun(3, false)]);
    store.advance(LEASE + SLACK).await;
    let last = leased();
    assert_eq!(adapter.claim(&keys, &last).await.unwrap(), [Claimed::rerun(4, true)]);
    assert_eq!(adapter.complete(&keys, &last).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// A claim that is complete at once runs again once too. Its release keeps the audit.
pub async fn key_complete_at_once_runs_again_once<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, first) = (store.adapter(), [key("a")], complete_at_once());
    adapter.claim(&keys, &first).await.unwrap();
    allow(&*adapter, &keys).await;
    // A late release of the first run finds nothing to release.
    assert_eq!(adapter.release(&keys, &first).await.unwrap(), [Released::NotHeld]);
    let mine = complete_at_once();
    for _ in 0..2 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::rerun(2, false)]);
    }
    for other in [first, complete_at_once()] {
        assert!(is_duplicate(&adapter.claim(&keys, &other).await.unwrap()));
    }
    assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::Released]);
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!(entry.state, EntryState::Released);
    assert_eq!(entry.rerun.map(|audit| audit.order), Some(order()));
    let again = adapter.claim(&keys, &complete_at_once()).await.unwrap();
    assert_eq!(again, [Claimed::rerun(3, false)]);
}

/// A rerun waits for 7 days at least. The audit ends with the retention of the rerun.
pub async fn audit_ends_with_the_retention<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let [claimed, at_once, completed] = ["claimed", "at once", "completed"].map(|id| [key(id)]);
    for keys in [&claimed, &at_once, &completed] {
        run(&*adapter, keys).await;
        allow(&*adapter, keys).await;
    }
    store.advance(WAIT - SLACK).await;
    for keys in [&claimed, &at_once, &completed] {
        let mine = leased();
        assert_eq!(adapter.claim(keys, &mine).await.unwrap(), [Claimed::rerun(2, false)]);
        assert_eq!(adapter.complete(keys, &mine).await.unwrap(), [Completed::Held]);
    }
    store.advance(RETENTION + SLACK).await;
    assert_eq!(adapter.claim(&claimed, &leased()).await.unwrap(), [FIRST]);
    assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), [FIRST]);
    assert_eq!(adapter.complete(&completed, &leased()).await.unwrap(), [Completed::Inserted]);
    for keys in [claimed, at_once, completed] {
        let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
        assert_eq!(entry.rerun, None, "{keys:?}");
    }
}

/// The late success of a handler that ran before does not use up a rerun, because an operator waits
/// for it. Only the holder completes the key.
pub async fn earlier_token_does_not_complete_a_rerun<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys) = (store.adapter(), [key("a"), key("b")]);
    let stalled = leased();
    adapter.claim(&keys, &stalled).await.unwrap();
    store.advance(LEASE + SLACK).await;
    let second = run(&*adapter, &keys).await;
    allow(&*adapter, &keys).await;
    let others_change_nothing = async || {
        for earlier in [&stalled, &second] {
            let completed = adapter.complete(&keys, earlier).await.unwrap();
            assert_eq!(completed, [Completed::LeaseLost, Completed::LeaseLost]);
            let one = adapter.complete(&keys[..1], earlier).await.unwrap();
            assert_eq!(one, [Completed::LeaseLost]);
            let renewed = adapter.renew(&keys, earlier).await.unwrap();
            assert_eq!(renewed, [Renewed::Lost, Renewed::Lost]);
            let released = adapter.release(&keys, earlier).await.unwrap();
            assert_eq!(released, [Released::NotHeld, Released::NotHeld]);
        }
    };
    others_change_nothing().await;
    let failing = leased();
    let claimed = adapter.claim(&keys, &failing).await.unwrap();
    assert_eq!(claimed, [Claimed::rerun(3, false), Claimed::rerun(3, false)]);
    others_change_nothing().await;
    adapter.release(&keys, &failing).await.unwrap();
    others_change_nothing().await;
    let last = leased();
    let claimed = adapter.claim(&keys, &last).await.unwrap();
    assert_eq!(claimed, [Claimed::rerun(4, false), Claimed::rerun(4, false)]);
    let completed = adapter.complete(&keys, &last).await.unwrap();
    assert_eq!(completed, [Completed::Held, Completed::Held]);
    // The rerun is complete: it is as every other complete key.
    let late = adapter.complete(&keys, &stalled).await.unwrap();
    assert_eq!(late, [Completed::LeaseLost, Completed::LeaseLost]);
}

/// One call allows what may run again, and returns one reply per key.
pub async fn rerun_of_several_keys_replies_key_by_key<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    // Sorted by id.
    let keys = ["a complete", "b inserted", "c lapsed", "d leased", "e missing", "f released"];
    let keys = keys.map(key);
    let [complete, inserted, lapsed, leases, _, released] = &keys;
    let mine = leased();
    adapter.claim(std::slice::from_ref(lapsed), &mine).await.unwrap();
    store.advance(LEASE + SLACK).await;
    run(&*adapter, std::slice::from_ref(complete)).await;
    adapter.complete(std::slice::from_ref(inserted), &mine).await.unwrap();
    adapter.claim(std::slice::from_ref(leases), &mine).await.unwrap();
    adapter.claim(std::slice::from_ref(released), &mine).await.unwrap();
    adapter.release(std::slice::from_ref(released), &mine).await.unwrap();
    let replies = adapter.allow_rerun(&keys, &order()).await.unwrap();
    let (allowed, missing, in_flight) =
        (RerunReply::Allowed, RerunReply::Missing, RerunReply::InFlight);
    assert_eq!(replies, [allowed, allowed, allowed, in_flight, missing, allowed]);
    let claimed = adapter.claim(&keys, &leased()).await.unwrap();
    let again = Claimed::rerun(2, false);
    let expected =
        [again.clone(), again.clone(), Claimed::rerun(2, true), Claimed::InFlight, FIRST, again];
    assert_eq!(claimed, expected);
}

/// 16 workers claim 60 keys after one rerun of each was allowed: each key is first once.
pub async fn workers_racing_for_a_rerun_have_one_winner<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    const KEYS: usize = 60;
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (0..KEYS).map(|id| key(&format!("{id:02}"))).collect();
    run(&*adapter, &keys).await;
    allow(&*adapter, &keys).await;
    let wins: Arc<Vec<AtomicU32>> = Arc::new(keys.iter().map(|_| AtomicU32::new(0)).collect());
    let tasks = (0..16).map(|worker| {
        let (adapter, keys, wins) = (Arc::clone(&adapter), keys.clone(), Arc::clone(&wins));
        tokio::spawn(async move {
            for (key, wins) in keys.iter().zip(&*wins) {
                let one = std::slice::from_ref(key);
                let terms = if worker % 2 == 0 { leased() } else { complete_at_once() };
                let claimed = adapter.claim(one, &terms).await.unwrap();
                if claimed == [Claimed::rerun(2, false)] {
                    wins.fetch_add(1, Ordering::Relaxed);
                } else {
                    assert!(!matches!(claimed[..], [Claimed::First { .. }]), "{claimed:?}");
                }
            }
        })
    });
    for task in join_all(tasks).await {
        task.expect("a worker");
    }
    assert!(wins.iter().all(|wins| wins.load(Ordering::Relaxed) == 1), "{wins:?}");
}

/// Reruns are allowed while workers run the event: a run beyond the first needs a rerun of its own.
pub async fn reruns_beside_load_never_run_twice<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let runs = Arc::new(AtomicU32::new(0));
    run(&*adapter, &keys).await;
    let tasks = (0..8).map(|_| {
        let (adapter, keys, runs) = (Arc::clone(&adapter), keys.clone(), Arc::clone(&runs));
        tokio::spawn(async move {
            for _ in 0..60 {
                let mine = leased();
                let claimed = adapter.claim(&keys, &mine).await.unwrap();
                if matches!(claimed[..], [Claimed::First { rerun, .. }] if rerun) {
                    runs.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
                }
            }
        })
    });
    let tasks = join_all(tasks);
    let mut allowed = 0;
    let operator = async {
        for _ in 0..60 {
            let reply = adapter.allow_rerun(&keys, &order()).await.unwrap();
            allowed += u32::from(reply == [RerunReply::Allowed]);
            assert_ne!(reply, [RerunReply::Missing]);
        }
    };
    let (tasks, ()) = futures_util::future::join(tasks, operator).await;
    for task in tasks {
        task.expect("a worker");
    }
    let last = adapter.claim(&keys, &leased()).await.unwrap();
    let runs = runs.load(Ordering::Relaxed) + u32::from(!is_duplicate(&last));
    assert!(allowed > 0 && (1..=allowed).contains(&runs), "{runs} runs of {allowed} allowed");
}

/// The type of an event is stored with a new key. Only a key that is new again gets another type.
pub async fn event_type_is_stored_with_a_new_key<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let keys = ["a leased", "b at once", "c completed", "d renewed", "e none"].map(key);
    let [leases, at_once, completed, renewed, none] = &keys;
    let one = std::slice::from_ref::<DedupKey>;
    let types = |name: &str| {
        keys[..4]
            .iter()
            .map(|key| (key.clone(), format!("{name} {}", key.id())))
            .collect::<Vec<_>>()
    };
    let stored =
        async |key: &DedupKey| adapter.get(key).await.unwrap().expect("an entry").event_type;
    let mine = leased().with_event_types(types("first"));
    adapter.claim(&[leases.clone(), none.clone()], &mine).await.unwrap();
    let claim = complete_at_once().with_event_types(types("first"));
    adapter.claim(one(at_once), &claim).await.unwrap();
    adapter.complete(one(completed), &mine).await.unwrap();
    adapter.renew(one(renewed), &mine).await.unwrap();
    let all_are = async |name: &str| {
        for key in &keys[..4] {
            assert_eq!(stored(key).await, Some(format!("{name} {}", key.id())));
        }
        assert_eq!(stored(none).await, None);
    };
    all_are("first").await;

    // A takeover, the completion of its claim, and duplicates.
    store.advance(LEASE + SLACK).await;
    let other = leased().with_event_types(types("other"));
    for key in [leases, renewed] {
        assert_eq!(adapter.claim(one(key), &other).await.unwrap(), [Claimed::first(2, true)]);
        assert_eq!(adapter.complete(one(key), &other).await.unwrap(), [Completed::Held]);
    }
    for key in &keys[..4] {
        assert!(is_duplicate(&adapter.claim(one(key), &other).await.unwrap()));
    }
    all_are("first").await;

    // Each key is new again after its retention.
    store.advance(RETENTION + SLACK).await;
    let new = leased().with_event_types(types("new"));
    let claim = complete_at_once().with_event_types(types("new"));
    adapter.claim(&[leases.clone(), renewed.clone(), none.clone()], &new).await.unwrap();
    adapter.claim(one(at_once), &claim).await.unwrap();
    adapter.complete(one(completed), &new).await.unwrap();
    all_are("new").await;
}
