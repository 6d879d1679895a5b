//! Claims under a lease, one caller at a time.

use futures_util::future::{try_join, try_join_all};

use super::super::driver::{
    FIRST, LEASE, RETENTION, SLACK, claim_all, complete_all, complete_at_once, is_duplicate, key,
    leased,
};
use super::super::store::Store;
use crate::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply};
use crate::key::DedupKey;

/// A release under `OnCompletion` releases only an incomplete row of its token. A release under
/// `OnClaim` releases only a complete row of its token.
pub async fn release_follows_the_permanence_of_its_terms<S: Store>(store: S) {
    let (adapter, at_once, held) = (store.adapter(), key("at once"), key("held"));
    let (claim, lease) = (complete_at_once(), leased());
    adapter.claim(&at_once, &claim).await.unwrap();
    let under_lease = CallTerms::on_completion(claim.token(), claim.retention(), LEASE);
    adapter.release(&at_once, &under_lease).await.unwrap();
    assert!(is_duplicate(&adapter.claim(&at_once, &complete_at_once()).await.unwrap()));
    assert!(is_duplicate(&adapter.claim(&at_once, &leased()).await.unwrap()));
    adapter.release(&at_once, &claim).await.unwrap();
    assert_eq!(adapter.claim(&at_once, &complete_at_once()).await.unwrap(), FIRST);

    adapter.claim(&held, &lease).await.unwrap();
    adapter.release(&held, &as_on_claim(&lease)).await.unwrap();
    for theirs in [leased(), complete_at_once()] {
        assert_eq!(adapter.claim(&held, &theirs).await.unwrap(), ClaimReply::InFlight);
    }
    for _ in 0..2 {
        adapter.release(&held, &lease).await.unwrap();
    }
    // The row stays, with its attempts.
    assert_eq!(adapter.claim(&held, &lease).await.unwrap(), ClaimReply::first(2, false));
    assert_eq!(adapter.complete(&held, &lease).await.unwrap(), CompleteReply::Held);
    // A late release never undoes a completion.
    adapter.release(&held, &lease).await.unwrap();
    assert!(is_duplicate(&adapter.claim(&held, &leased()).await.unwrap()));
}

/// A completed key is a duplicate until the retention of its last claim ends. Then the key is new.
pub async fn completed_key_is_first_again_after_its_retention<S: Store>(store: S) {
    let (adapter, keys, failed, mine) = (store.adapter(), key("a"), leased(), leased());
    adapter.claim(&keys, &failed).await.unwrap();
    adapter.release(&keys, &failed).await.unwrap();
    store.advance(RETENTION / 2).await;
    adapter.claim(&keys, &mine).await.unwrap();
    store.advance(SLACK).await;
    adapter.complete(&keys, &mine).await.unwrap();
    store.advance(RETENTION - 2 * SLACK).await;
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    store.advance(SLACK).await;
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), FIRST);
}

/// A claimed key is in flight until it is completed. Then the key is a duplicate. A completion that is repeated with
/// its token returns the same reply, because the first reply may be lost.
pub async fn claim_is_first_then_in_flight_then_duplicate<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), leased());
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    for _ in 0..2 {
        assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
    }
    assert_eq!(adapter.complete(&keys, &leased()).await.unwrap(), CompleteReply::LeaseLost);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    // After the completion, even the token of the claim gets a duplicate.
    assert!(is_duplicate(&adapter.claim(&keys, &mine).await.unwrap()));
}

/// A claim that is repeated with its token returns the same reply, because the first reply may be
/// lost, and starts the lease again. Once another token holds the key, the repeated claim is in flight.
pub async fn claim_repeated_with_its_token_returns_the_same_reply<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), leased());
    for _ in 0..2 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
        store.advance(LEASE - SLACK).await;
    }
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    store.advance(LEASE + SLACK).await;
    let theirs = leased();
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &theirs).await.unwrap(), ClaimReply::first(2, true));
    }
    assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), ClaimReply::InFlight);
}

/// A key whose lease lapsed goes to the next claim, which is a takeover. Then the key is in flight.
pub async fn lapsed_lease_is_taken_over_once<S: Store>(store: S) {
    let (adapter, keys) = (store.adapter(), key("a"));
    adapter.claim(&keys, &leased()).await.unwrap();
    store.advance(LEASE - SLACK).await;
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    store.advance(SLACK).await;
    let taker = leased();
    assert_eq!(adapter.claim(&keys, &taker).await.unwrap(), ClaimReply::first(2, true));
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    adapter.release(&keys, &taker).await.unwrap();
    // The lease was released, so the third attempt is no takeover.
    assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::first(3, false));
}

/// A token that lost its lease cannot renew or release the key.
pub async fn stale_token_changes_nothing<S: Store>(store: S) {
    let (adapter, keys, stale) = (store.adapter(), key("a"), leased());
    adapter.claim(&keys, &stale).await.unwrap();
    store.advance(LEASE).await;
    let mine = leased();
    adapter.claim(&keys, &mine).await.unwrap();
    for complete in [false, true] {
        if complete {
            assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
        }
        assert_eq!(adapter.renew(&keys, &stale).await.unwrap(), RenewReply::Lost);
        adapter.release(&keys, &stale).await.unwrap();
        adapter.release(&keys, &as_on_claim(&stale)).await.unwrap();
        let next = adapter.claim(&keys, &leased()).await.unwrap();
        if complete {
            assert!(is_duplicate(&next), "{next:?}");
        } else {
            assert_eq!(next, ClaimReply::InFlight);
        }
    }
}

/// A completion counts after its lease was lost, because the handler succeeded. The reply says that
/// the lease was lost.
pub async fn late_completion_counts_and_returns_lease_lost<S: Store>(store: S) {
    let (adapter, keys, late) = (store.adapter(), key("a"), leased());
    adapter.claim(&keys, &late).await.unwrap();
    store.advance(LEASE).await;
    let taker = leased();
    adapter.claim(&keys, &taker).await.unwrap();
    for _ in 0..2 {
        assert_eq!(adapter.complete(&keys, &late).await.unwrap(), CompleteReply::LeaseLost);
    }
    // The row keeps the token of its holder: one of the two handlers knows that both have run.
    assert_eq!(adapter.complete(&keys, &taker).await.unwrap(), CompleteReply::Held);
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
    // A release by the second token does not undo the completion.
    adapter.release(&keys, &taker).await.unwrap();
    assert!(is_duplicate(&adapter.claim(&keys, &leased()).await.unwrap()));
}

/// Renewals extend the lease of a handler that runs for longer than one lease, and revive a lapsed lease.
pub async fn renewal_keeps_or_revives_the_lease<S: Store>(store: S) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), leased());
    adapter.claim(&keys, &mine).await.unwrap();
    for pause in [LEASE - SLACK, LEASE - SLACK, LEASE] {
        store.advance(pause).await;
        assert_eq!(adapter.renew(&keys, &leased()).await.unwrap(), RenewReply::Lost);
        assert_eq!(adapter.renew(&keys, &mine).await.unwrap(), RenewReply::Held);
        assert_eq!(adapter.claim(&keys, &leased()).await.unwrap(), ClaimReply::InFlight);
    }
    assert_eq!(adapter.complete(&keys, &mine).await.unwrap(), CompleteReply::Held);
}

/// Calls with one token for new, released, complete and in-flight keys, made at the same time, return the reply
/// of each key.
pub async fn calls_for_several_keys_reply_key_by_key<S: Store>(store: S) {
    let adapter = store.adapter();
    let keys = ["a", "b", "c", "d"].map(key);
    let [complete, released, _, new] = &keys;
    let theirs = leased();
    claim_all(&*adapter, &keys[..3], &theirs).await;
    adapter.complete(complete, &theirs).await.unwrap();
    adapter.release(released, &theirs).await.unwrap();
    let mine = leased();
    let claimed = claim_all(&*adapter, &keys, &mine).await;
    assert!(is_duplicate(&claimed[0]), "{claimed:?}");
    let rest = [ClaimReply::first(2, false), ClaimReply::InFlight, FIRST];
    assert_eq!(claimed[1..], rest);
    let renewed = try_join_all(keys.iter().map(|key| adapter.renew(key, &mine))).await.unwrap();
    assert_eq!(renewed, [RenewReply::Lost, RenewReply::Held, RenewReply::Lost, RenewReply::Held]);
    let (one, other) = (adapter.release(complete, &mine), adapter.release(released, &mine));
    try_join(one, other).await.unwrap();
    let completed = complete_all(&*adapter, &keys[2..], &mine).await;
    assert_eq!(completed, [CompleteReply::LeaseLost, CompleteReply::Held]);
    let claimed = claim_all(&*adapter, &keys, &complete_at_once()).await;
    assert_eq!(claimed[1], ClaimReply::first(3, false));
    for place in [0, 2, 3] {
        assert!(is_duplicate(&claimed[place]), "{claimed:?}");
    }
    adapter.release(new, &mine).await.unwrap();
    assert!(is_duplicate(&adapter.claim(new, &leased()).await.unwrap()));
}

/// 4,096 calls at the same time, half of them for complete keys, return the reply of each key.
pub async fn calls_for_4096_keys_reply_key_by_key<S: Store>(store: S) {
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (0..4_096).map(|id| key(&id.to_string())).collect();
    let (mine, theirs) = (leased(), leased());
    let half: Vec<DedupKey> = keys.iter().step_by(2).cloned().collect();
    claim_all(&*adapter, &half, &theirs).await;
    complete_all(&*adapter, &half, &theirs).await;
    for (place, reply) in claim_all(&*adapter, &keys, &mine).await.iter().enumerate() {
        assert_eq!(is_duplicate(reply), place % 2 == 0, "{place}");
    }
    for (place, reply) in complete_all(&*adapter, &keys, &mine).await.iter().enumerate() {
        assert_eq!(*reply == CompleteReply::Held, place % 2 == 1, "{place}");
    }
}

/// Returns terms under `OnClaim` with the same token and retention.
fn as_on_claim(terms: &CallTerms) -> CallTerms {
    CallTerms::on_claim(terms.token(), terms.retention())
}
