//! The rules, one caller at a time.

use std::time::Duration;

use super::{
    FIRST, LEASE, RETENTION, SLACK, complete_at_once, is_duplicate, key, leased, leased_for,
};
use crate::adapter::{
    CallTerms, Claimed, Completed, DedupAdapter, EntryState, Fetch, Forgotten, MaintenanceAdapter,
    PURGE_GRACE, Released, Renewed, Token,
};
use crate::conformance::Store;
use crate::error::ErrorKind;
use crate::key::DedupKey;

/// Returns terms under `OnClaim` with the same token.
fn as_on_claim(terms: &CallTerms) -> CallTerms {
    CallTerms::on_claim(terms.token(), terms.retention())
}

/// Record: the first is first, everyone after is a duplicate.
pub async fn a_key_is_first_once<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
    store.advance(SLACK).await;
    for _ in 0..3 {
        match &adapter.claim(&keys, &complete_at_once()).await.unwrap()[..] {
            [Claimed::Duplicate(seen)] => {
                assert!(seen.age >= SLACK && seen.age < 2 * SLACK, "{:?}", seen.age);
            }
            ref other => panic!("{other:?}"),
        }
    }
}

/// A key that is complete at once is a duplicate for claims under a lease too.
pub async fn lease_claim_of_a_key_complete_at_once_is_a_duplicate<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// A key that is complete at once is a duplicate until its retention ends, and new from then on.
pub async fn key_complete_at_once_is_forgotten_after_its_retention<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("r")]);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
    store.advance(RETENTION - SLACK).await;
    assert!(is_duplicate(&adapter.claim(&keys, &complete_at_once()).await.unwrap()));
    store.advance(SLACK).await;
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
}

/// A claim that is complete at once counts attempts and takeovers, as a claim under a lease does.
pub async fn claim_complete_at_once_counts_attempts_and_takeovers<S: Store>(store: S) {
    let adapter = store.adapter();
    let [released, lapsed, expired] = ["released", "lapsed", "expired"].map(|id| [key(id)]);
    let brief = CallTerms::on_completion(Token::random(), LEASE, LEASE);
    adapter.claim(&expired, &brief).await.unwrap();
    adapter.claim(&lapsed, &leased()).await.unwrap();
    for _ in 0..2 {
        let mine = leased();
        adapter.claim(&released, &mine).await.unwrap();
        adapter.release(&released, &mine).await.unwrap();
    }
    store.advance(LEASE + SLACK).await;
    for (keys, expected) in
        [(released, Claimed::first(3, false)), (lapsed, Claimed::first(2, true)), (expired, FIRST)]
    {
        let mine = complete_at_once();
        for _ in 0..3 {
            let claimed = adapter.claim(&keys, &mine).await.unwrap();
            assert_eq!(claimed, std::slice::from_ref(&expected));
        }
        assert!(is_duplicate(&adapter.claim(&keys, &complete_at_once()).await.unwrap()));
        // A release deletes the row, with its attempts.
        assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::Released]);
        assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
    }
}

/// Release: under `OnCompletion` only an incomplete row of its token, under `OnClaim` only a complete
/// one.
pub async fn release_follows_the_permanence_of_its_terms<S: Store>(store: S) {
    let (adapter, at_once, held) = (store.adapter(), [key("at once")], [key("held")]);
    let (claim, lease) = (complete_at_once(), leased());
    adapter.claim(&at_once, &claim).await.unwrap();
    let under_lease = CallTerms::on_completion(claim.token(), claim.retention(), LEASE);
    assert_eq!(adapter.release(&at_once, &under_lease).await.unwrap(), [Released::NotHeld]);
    assert!(is_duplicate(&adapter.claim(&at_once, &complete_at_once()).await.unwrap()));
    assert_eq!(adapter.release(&at_once, &claim).await.unwrap(), [Released::Released]);
    assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), [FIRST]);

    adapter.claim(&held, &lease).await.unwrap();
    let as_complete = as_on_claim(&lease);
    assert_eq!(adapter.release(&held, &as_complete).await.unwrap(), [Released::NotHeld]);
    assert_eq!(adapter.claim(&held, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.release(&held, &lease).await.unwrap(), [Released::Released]);
    // The row stays: the attempts go on.
    assert_eq!(adapter.claim(&held, &lease).await.unwrap(), [Claimed::first(2, false)]);
    assert_eq!(adapter.complete(&held, &lease).await.unwrap(), [Completed::Held]);
    // A late release never undoes a completion.
    assert_eq!(adapter.release(&held, &lease).await.unwrap(), [Released::NotHeld]);
    assert!(is_duplicate(&adapter.claim(&held, &leased()).await.unwrap()));
}

/// An adapter without leases or without stored data refuses the terms that need them, and writes
/// nothing.
pub async fn unsupported_terms_are_refused_before_anything_is_written<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let abilities = adapter.abilities();
    assert!(!abilities.leases || !abilities.stored_data, "the adapter supports everything");
    let mut refused = Vec::new();
    if !abilities.leases {
        refused.push(leased());
        for kind in [
            adapter.renew(&keys, &leased()).await.map(drop),
            adapter.complete(&keys, &leased()).await.map(drop),
        ] {
            assert_eq!(kind.unwrap_err().kind(), ErrorKind::Unsupported);
        }
    }
    if !abilities.stored_data {
        refused.push(complete_at_once().with_fetch(Fetch::Digest));
        refused.push(complete_at_once().with_payloads([(keys[0].clone(), [7; 32])]));
    }
    for terms in refused {
        let error = adapter.claim(&keys, &terms).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{terms:?}");
    }
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
}

/// Record: a caller that lost the answer asks again, and is told the same.
pub async fn a_record_repeated_with_its_token_is_first_again<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], complete_at_once());
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [FIRST]);
    }
    let other = adapter.claim(&keys, &complete_at_once()).await.unwrap();
    assert!(matches!(other[..], [Claimed::Duplicate(_)]));
}

/// Record: undone by its own token only, and then as if it had never been.
pub async fn an_undone_record_is_first_again<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], complete_at_once());
    assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::NotHeld]);
    adapter.claim(&keys, &mine).await.unwrap();
    assert_eq!(adapter.release(&keys, &complete_at_once()).await.unwrap(), [Released::NotHeld]);
    assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::Released]);
    assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::NotHeld]);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [FIRST]);
}

/// Record beside claims on one store: a live lease is in flight, a lapsed or released one is free.
pub async fn a_record_respects_leases<S: Store>(store: S) {
    let adapter = store.adapter();
    let (live, lapsed, released) = ([key("live")], [key("lapsed")], [key("released")]);
    let (mine, live_terms) = (leased(), leased());
    adapter.claim(&lapsed, &leased()).await.unwrap();
    store.advance(LEASE + SLACK).await;
    adapter.claim(&live, &live_terms).await.unwrap();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    assert_eq!(adapter.claim(&live, &complete_at_once()).await.unwrap(), [Claimed::InFlight]);
    let taken_over = adapter.claim(&lapsed, &complete_at_once()).await.unwrap();
    assert_eq!(taken_over, [Claimed::first(2, true)]);
    let again = adapter.claim(&released, &complete_at_once()).await.unwrap();
    assert_eq!(again, [Claimed::first(2, false)]);
    // A release under `OnClaim` never releases a lease.
    assert_eq!(
        adapter.release(&live, &as_on_claim(&live_terms)).await.unwrap(),
        [Released::NotHeld]
    );
    assert_eq!(adapter.claim(&live, &leased()).await.unwrap(), [Claimed::InFlight]);
}

/// A key is a duplicate until its retention ends, and new from then on.
pub async fn a_key_is_forgotten_after_its_retention<S: Store>(store: S) {
    let (adapter, recorded, completed) = (store.adapter(), [key("r")], [key("c")]);
    let mine = leased();
    adapter.claim(&recorded, &complete_at_once()).await.unwrap();
    adapter.claim(&completed, &mine).await.unwrap();
    adapter.complete(&completed, &mine).await.unwrap();
    store.advance(RETENTION - SLACK).await;
    let again = adapter.claim(&recorded, &complete_at_once()).await.unwrap();
    assert!(matches!(again[..], [Claimed::Duplicate(_)]), "{again:?}");
    assert!(is_duplicate(&adapter.claim(&completed, &leased()).await.unwrap()));
    store.advance(SLACK).await;
    assert_eq!(adapter.claim(&recorded, &complete_at_once()).await.unwrap(), [FIRST]);
    let again = adapter.claim(&completed, &leased()).await.unwrap();
    assert_eq!(again, [Claimed::first(1, false)]);
}

/// Claim: in flight is not complete, and complete is not in flight.
pub async fn a_claim_is_first_then_in_flight_then_duplicate<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    // A repetition that comes so late is no claim any more.
    assert!(is_duplicate(&adapter.claim(&keys, &mine).await.unwrap()));
}

/// Claim: a caller that lost the answer asks again, and is told the same.
pub async fn a_claim_repeated_with_its_token_answers_the_same<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(1, false)]);
    }
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    store.advance(LEASE + SLACK).await;
    let theirs = leased();
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &theirs).await.unwrap(), [Claimed::first(2, true)]);
    }
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::InFlight]);
}

/// Release: the key is free at once, and the next claim is no takeover.
pub async fn a_released_key_is_free_and_counts_its_attempts<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    for attempt in 1..=4 {
        let mine = leased();
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), [Claimed::first(attempt, false)]);
        assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::Released]);
        assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::NotHeld]);
    }
}

/// A lease that ran out goes to the next claim, flagged, and from it to nobody else.
pub async fn a_lapsed_lease_is_taken_over_by_one<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    adapter.claim(&keys, &leased()).await.unwrap();
    store.advance(LEASE - SLACK).await;
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    store.advance(SLACK).await;
    let taker = leased();
    assert_eq!(adapter.claim(&keys, &taker).await.unwrap(), [Claimed::first(2, true)]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    adapter.release(&keys, &taker).await.unwrap();
    // Given up properly: the third attempt takes nothing over.
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::first(3, false)]);
}

/// A key whose retention has ended is as new, whatever state it was left in.
pub async fn an_expired_key_starts_anew<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let (lapsed, released) = ([key("lapsed")], [key("released")]);
    adapter.claim(&lapsed, &leased()).await.unwrap();
    let mine = leased();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    store.advance(RETENTION).await;
    for keys in [lapsed, released] {
        assert_eq!(adapter.get(&keys[0]).await.unwrap(), None);
        let again = adapter.claim(&keys, &leased()).await.unwrap();
        assert_eq!(again, [Claimed::first(1, false)]);
    }
}

/// A token that lost its lease can neither renew nor release nor undo.
pub async fn a_stale_token_changes_nothing<S: Store>(store: S) {
    let (adapter, keys, stale) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &stale).await.unwrap();
    store.advance(LEASE).await;
    let mine = leased();
    adapter.claim(&keys, &mine).await.unwrap();
    for complete in [false, true] {
        if complete {
            assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
        }
        assert_eq!(adapter.renew(&keys, &stale).await.unwrap(), [Renewed::Lost]);
        assert_eq!(adapter.release(&keys, &stale).await.unwrap(), [Released::NotHeld]);
        let release = adapter.release(&keys, &as_on_claim(&stale)).await.unwrap();
        assert_eq!(release, [Released::NotHeld]);
        let next = adapter.claim(&keys, &leased()).await.unwrap();
        if complete {
            assert!(is_duplicate(&next), "{next:?}");
        } else {
            assert_eq!(next, [Claimed::InFlight]);
        }
    }
    // Nor can the right one, once it has completed.
    assert_eq!(adapter.release(&keys, &mine).await.unwrap(), [Released::NotHeld]);
    assert_eq!(adapter.renew(&keys, &mine).await.unwrap(), [Renewed::Lost]);
}

/// Success is success: the completion of a lost lease counts, and says that it was lost.
pub async fn a_late_completion_is_recorded_and_told<S: Store>(store: S) {
    let (adapter, keys, late) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &late).await.unwrap();
    store.advance(LEASE).await;
    let taker = leased();
    adapter.claim(&keys, &taker).await.unwrap();
    assert_eq!(adapter.complete(&keys, &late).await.unwrap(), [Completed::LeaseLost]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    // The taker fails now: what has succeeded stays.
    assert_eq!(adapter.release(&keys, &taker).await.unwrap(), [Released::NotHeld]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));

    // A lease that was released, by an operator's retry say, is no longer held either.
    let (keys, mine) = ([key("b")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    adapter.release(&keys, &mine).await.unwrap();
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::LeaseLost]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));

    // One that has lapsed, and that nobody took, still is.
    let (keys, mine) = ([key("c")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(LEASE).await;
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
}

/// A completion whose row vanished, or never was, is recorded.
pub async fn a_completion_of_a_missing_row_is_recorded<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    assert_eq!(adapter.complete(&keys, &leased()).await.unwrap(), [Completed::Inserted]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    store.advance(RETENTION).await;
    // What has expired counts as missing.
    assert_eq!(adapter.complete(&keys, &leased()).await.unwrap(), [Completed::Inserted]);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// A completion whose answer was lost is repeated, and is told the same.
pub async fn a_completion_can_be_repeated<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    for _ in 0..3 {
        assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
    }
    assert_eq!(adapter.complete(&keys, &leased()).await.unwrap(), [Completed::LeaseLost]);
}

/// Renew: a handler longer than its lease keeps it.
pub async fn a_renewal_keeps_a_lease<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    for _ in 0..5 {
        store.advance(LEASE - SLACK).await;
        assert_eq!(adapter.renew(&keys, &mine).await.unwrap(), [Renewed::Held]);
        assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    }
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
}

/// Renew: a lapsed or missing lease lives again if nobody took it.
pub async fn a_renewal_revives_what_nobody_took<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(LEASE).await;
    assert_eq!(adapter.renew(&keys, &mine).await.unwrap(), [Renewed::Held]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);

    let (missing, mine) = ([key("missing")], leased());
    assert_eq!(adapter.renew(&missing, &mine).await.unwrap(), [Renewed::Held]);
    assert_eq!(adapter.claim(&missing, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.complete(&missing, &mine).await.unwrap(), [Completed::Held]);
}

/// Renew: what was released or completed stays so, even if the renewal crosses it.
pub async fn a_renewal_revives_nothing_that_was_given_up<S: Store>(store: S) {
    let (adapter, released, completed) = (store.adapter(), [key("r")], [key("c")]);
    let mine = leased();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    assert_eq!(adapter.renew(&released, &mine).await.unwrap(), [Renewed::Lost]);
    let again = adapter.claim(&released, &leased()).await.unwrap();
    assert_eq!(again, [Claimed::first(2, false)]);

    adapter.claim(&completed, &mine).await.unwrap();
    adapter.complete(&completed, &mine).await.unwrap();
    assert_eq!(adapter.renew(&completed, &mine).await.unwrap(), [Renewed::Lost]);
    assert!(is_duplicate(&adapter.claim(&completed, &leased()).await.unwrap()));
}

/// A handler that outlives its key's retention keeps the key: it is not purged, not taken, not
/// forgotten.
pub async fn a_live_lease_outlives_its_retention<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let brief =
        CallTerms::on_completion(Token::random(), Duration::from_millis(1), 3 * PURGE_GRACE);
    adapter.claim(&keys, &brief).await.unwrap();
    store.advance(PURGE_GRACE + SLACK).await;
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::InFlight);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), [Claimed::InFlight]);
    let entry = adapter.get(&keys[0]).await.unwrap().expect("a live lease is an entry");
    assert!(matches!(entry.state, EntryState::InFlight { .. }), "{entry:?}");
    assert_eq!(adapter.renew(&keys, &brief).await.unwrap(), [Renewed::Held]);
}

/// A completion after the retention has ended is still remembered for one.
pub async fn a_completion_is_never_expired_at_birth<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased_for(4 * RETENTION));
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(RETENTION + PURGE_GRACE + SLACK).await;
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), [Completed::Held]);
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// Claim: a further attempt is remembered for a whole retention.
pub async fn a_claim_again_refreshes_the_retention<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), [key("a")]);
    let mine = leased();
    adapter.claim(&keys, &mine).await.unwrap();
    adapter.release(&keys, &mine).await.unwrap();
    store.advance(RETENTION / 2).await;
    let mine = leased();
    adapter.claim(&keys, &mine).await.unwrap();
    adapter.complete(&keys, &mine).await.unwrap();
    store.advance(RETENTION / 2 + SLACK).await;
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// A set of keys, some new, some in flight, some complete, some released: each as it stands.
pub async fn sets_are_answered_key_by_key<S: Store>(store: S) {
    let adapter = store.adapter();
    let keys = ["a", "b", "c", "d"].map(key);
    let theirs = leased();
    adapter.claim(&keys[..3], &theirs).await.unwrap();
    adapter.complete(&keys[..1], &theirs).await.unwrap();
    adapter.release(&keys[1..2], &theirs).await.unwrap();
    // a: complete, b: released, c: in flight, d: new
    let mine = leased();
    let claimed = adapter.claim(&keys, &mine).await.unwrap();
    assert!(is_duplicate(&claimed[..1]), "{claimed:?}");
    let rest = [Claimed::first(2, false), Claimed::InFlight, Claimed::first(1, false)];
    assert_eq!(claimed[1..], rest);
    let renewed = adapter.renew(&keys, &mine).await.unwrap();
    assert_eq!(renewed, [Renewed::Lost, Renewed::Held, Renewed::Lost, Renewed::Held]);
    let released = adapter.release(&keys[..2], &mine).await.unwrap();
    assert_eq!(released, [Released::NotHeld, Released::Released]);
    let completed = adapter.complete(&keys[2..], &mine).await.unwrap();
    assert_eq!(completed, [Completed::LeaseLost, Completed::Held]);
    let claimed = adapter.claim(&keys, &complete_at_once()).await.unwrap();
    assert_eq!(claimed[1], Claimed::first(3, false));
    for place in [0, 2, 3] {
        assert!(is_duplicate(&claimed[place..=place]), "{claimed:?}");
    }
}

/// Retentions and leases of nothing and of everything neither panic nor overflow into the past.
pub async fn extreme_durations_do_no_harm<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let longest = CallTerms::on_completion(Token::random(), Duration::MAX, Duration::MAX);
    let keys = [key("longest")];
    adapter.claim(&keys, &longest).await.unwrap();
    assert_eq!(adapter.renew(&keys, &longest).await.unwrap(), [Renewed::Held]);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!(adapter.complete(&keys, &longest).await.unwrap(), [Completed::Held]);
    store.advance(Duration::from_secs(100 * 365 * 86_400)).await;
    assert_eq!(adapter.purge(10).await.unwrap(), 0);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));

    let nothing = || CallTerms::on_claim(Token::random(), Duration::ZERO);
    let keys = [key("nothing")];
    assert_eq!(adapter.claim(&keys, &nothing()).await.unwrap(), [FIRST]);
    assert_eq!(adapter.claim(&keys, &nothing()).await.unwrap(), [FIRST]);
    let no_lease = CallTerms::on_completion(Token::random(), Duration::ZERO, Duration::ZERO);
    let claimed = adapter.claim(&keys, &no_lease).await.unwrap();
    assert_eq!(claimed, [Claimed::first(1, false)]);
}

/// Keys that look like SQL, like JSON, like each other.
pub async fn hostile_keys_are_just_keys<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let long = "x".repeat(255);
    let wide = "\u{10FFFF}".repeat(63);
    let ids = [
        "'; DROP TABLE webhook_deliveries; --",
        "\"]]}",
        "\\",
        "\\u0041",
        "A",
        "a",
        "a ",
        " a",
        "%",
        "_",
        "*",
        "?1",
        "$1",
        "\u{e9}",
        "e\u{301}",
        "\u{202e}rtl",
        "line\nbreak\r\ttab\u{7f}",
        "null",
        "0",
        "00",
        "1e3",
        &long,
        &wide,
    ];
    let mut keys: Vec<DedupKey> = ids
        .iter()
        .flat_map(|id| ["conformance", "conformance2", "con\"for'mance"].map(|ns| (ns, *id)))
        .map(|(namespace, id)| DedupKey::new(namespace, id).expect("a key"))
        .collect();
    keys.sort();
    // One by one, and then all at once.
    for key in &keys {
        let one = std::slice::from_ref(key);
        let first = adapter.claim(one, &complete_at_once()).await.unwrap();
        assert_eq!(first, [FIRST], "{key:?}");
    }
    let again = adapter.claim(&keys, &complete_at_once()).await.unwrap();
    assert!(again.iter().all(|answer| matches!(answer, Claimed::Duplicate(_))), "{again:?}");
    assert_eq!(adapter.count().await.unwrap(), keys.len() as u64);
    for key in &keys {
        assert_eq!(adapter.forget(key).await.unwrap(), Forgotten::Removed, "{key:?}");
    }
    let claimed = adapter.claim(&keys, &leased()).await.unwrap();
    assert!(claimed.iter().all(|answer| *answer == Claimed::first(1, false)), "{claimed:?}");
}

/// 4,096 keys at once, half of them known.
pub async fn as_many_keys_as_a_request_may_carry<S: Store>(store: S) {
    let adapter = store.adapter();
    let mut keys: Vec<DedupKey> = (0..4_096).map(|id| key(&id.to_string())).collect();
    keys.sort();
    let (mine, theirs) = (leased(), leased());
    let half: Vec<DedupKey> = keys.iter().step_by(2).cloned().collect();
    adapter.claim(&half, &theirs).await.unwrap();
    adapter.complete(&half, &theirs).await.unwrap();
    let claimed = adapter.claim(&keys, &mine).await.unwrap();
    for (place, answer) in claimed.iter().enumerate() {
        assert_eq!(matches!(answer, Claimed::Duplicate(_)), place % 2 == 0, "{place}");
    }
    let completed = adapter.complete(&keys, &mine).await.unwrap();
    for (place, answer) in completed.iter().enumerate() {
        assert_eq!(*answer == Completed::Held, place % 2 == 1, "{place}");
    }
}

/// Purge: keys that expired an hour ago go, up to the limit. Those that expired since then stay,
/// although claims take them for expired; so do live ones, leased ones and fresh ones.
pub async fn purge_deletes_what_expired_an_hour_ago_and_nothing_else<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    for id in 0..10 {
        adapter.claim(&[key(&format!("old-{id}"))], &complete_at_once()).await.unwrap();
    }
    adapter.claim(&[key("lapsed")], &leased()).await.unwrap();
    // Its lease is the last to end.
    let brief = CallTerms::on_completion(Token::random(), SLACK, RETENTION);
    adapter.claim(&[key("brief")], &brief).await.unwrap();
    store.advance(RETENTION - SLACK).await;
    let fresh = CallTerms::on_claim(Token::random(), 4 * PURGE_GRACE);
    adapter.claim(&[key("fresh")], &fresh).await.unwrap();
    let long = CallTerms::on_completion(Token::random(), 4 * PURGE_GRACE, 4 * PURGE_GRACE);
    adapter.claim(&[key("leased")], &long).await.unwrap();
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    store.advance(SLACK).await;
    for id in ["old-0", "lapsed", "brief"] {
        assert_eq!(adapter.get(&key(id)).await.unwrap(), None, "{id}");
    }
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(adapter.count().await.unwrap(), 14);
    store.advance(PURGE_GRACE - SLACK).await;
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(adapter.count().await.unwrap(), 14);
    store.advance(SLACK).await;
    assert_eq!(adapter.purge(4).await.unwrap(), 4);
    assert_eq!(adapter.purge(100).await.unwrap(), 8);
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    assert_eq!(adapter.count().await.unwrap(), 2);
    let fresh = adapter.claim(&[key("fresh")], &complete_at_once()).await.unwrap();
    assert!(matches!(fresh[..], [Claimed::Duplicate(_)]));
    let leased = adapter.claim(&[key("leased")], &leased()).await.unwrap();
    assert_eq!(leased, [Claimed::InFlight]);
}

/// A clock that goes back by an hour: leases and retentions last for an hour more, and nothing that
/// was granted is granted again.
pub async fn a_clock_that_goes_back_grants_nothing_twice<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let adapter = store.adapter();
    let [lapsed, recorded, claimed, released, new] =
        ["lapsed", "recorded", "claimed", "released", "new"].map(|id| [key(id)]);
    adapter.claim(&lapsed, &leased()).await.unwrap();
    store.advance(LEASE + SLACK).await;
    let mine = leased();
    adapter.claim(&recorded, &complete_at_once()).await.unwrap();
    adapter.claim(&claimed, &mine).await.unwrap();
    adapter.claim(&released, &mine).await.unwrap();
    adapter.release(&released, &mine).await.unwrap();
    store.set_back(RETENTION).await;

    match &adapter.claim(&recorded, &complete_at_once()).await.unwrap()[..] {
        // It was seen in what is the future now.
        [Claimed::Duplicate(seen)] => assert!(seen.age < SLACK, "{:?}", seen.age),
        ref other => panic!("{other:?}"),
    }
    // The one that had lapsed is live again.
    for keys in [&lapsed, &claimed] {
        assert_eq!(adapter.claim(keys, &leased()).await.unwrap(), [Claimed::InFlight]);
    }
    assert_eq!(adapter.renew(&claimed, &mine).await.unwrap(), [Renewed::Held]);
    assert_eq!(adapter.claim(&claimed, &leased()).await.unwrap(), [Claimed::InFlight]);
    assert_eq!(adapter.complete(&claimed, &mine).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&claimed, &leased()).await.unwrap()));
    let again = adapter.claim(&released, &mine).await.unwrap();
    assert_eq!(again, [Claimed::first(2, false)]);
    assert_eq!(adapter.claim(&new, &mine).await.unwrap(), [Claimed::first(1, false)]);
    assert_eq!(adapter.complete(&new, &mine).await.unwrap(), [Completed::Held]);
    assert!(is_duplicate(&adapter.claim(&new, &leased()).await.unwrap()));
    assert_eq!(adapter.purge(100).await.unwrap(), 0);
    let entry = adapter.get(&claimed[0]).await.unwrap().expect("an entry");
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");

    store.advance(2 * RETENTION - LEASE).await;
    assert!(is_duplicate(&adapter.claim(&recorded, &leased()).await.unwrap()));
    store.advance(LEASE + SLACK).await;
    assert_eq!(adapter.claim(&recorded, &complete_at_once()).await.unwrap(), [FIRST]);
}

/// Close: every later call fails at once, and says that the store is unavailable.
pub async fn calls_after_close_fail<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
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
            adapter.forget(&keys[0]).await.map(drop),
            adapter.get(&keys[0]).await.map(drop),
            adapter.count().await.map(drop),
        ]
        .map(|ended| ended.map_err(|error| error.kind()));
        // A second time changes nothing.
        adapter.close().await;
        kinds
    };
    let kinds = tokio::time::timeout(SLACK, closed_and_asked).await.expect("nobody waits");
    assert_eq!(kinds, [Err(ErrorKind::Unavailable); 10]);
}

/// Forget, get and count: what an operator sees and does.
pub async fn forget_get_and_count<S: Store>(store: S)
where
    S::Adapter: MaintenanceAdapter,
{
    let (adapter, keys, mine) = (store.adapter(), [key("a")], leased());
    assert_eq!(adapter.get(&keys[0]).await.unwrap(), None);
    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::Missing);
    assert_eq!(adapter.count().await.unwrap(), 0);

    adapter.claim(&keys, &mine).await.unwrap();
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    let EntryState::InFlight { lease_until } = entry.state else { panic!("{entry:?}") };
    assert!(lease_until > entry.first_seen_at && entry.expires_at > lease_until, "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover), (1, false));
    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::InFlight);

    adapter.release(&keys, &mine).await.unwrap();
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert_eq!(entry.state, EntryState::Released);

    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(LEASE).await;
    let taker = leased();
    adapter.claim(&keys, &taker).await.unwrap();
    adapter.complete(&keys, &taker).await.unwrap();
    let entry = adapter.get(&keys[0]).await.unwrap().expect("an entry");
    assert!(matches!(entry.state, EntryState::Complete { .. }), "{entry:?}");
    assert_eq!((entry.attempts, entry.takeover), (3, true));
    assert_eq!(adapter.count().await.unwrap(), 1);

    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::Removed);
    assert_eq!(adapter.count().await.unwrap(), 0);
    // As if it had never been: the event can be delivered again.
    let again = adapter.claim(&keys, &leased()).await.unwrap();
    assert_eq!(again, [Claimed::first(1, false)]);

    // Even a lapsed lease can be forgotten; only a live one is kept.
    store.advance(LEASE).await;
    assert_eq!(adapter.forget(&keys[0]).await.unwrap(), Forgotten::Removed);
}
