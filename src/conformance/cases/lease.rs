//! Claims under a lease, one caller at a time.

use futures_util::future::try_join_all;

use super::super::driver::{FIRST, claim_all, complete_all, is_duplicate, key, leased, story};
use super::super::store::Store;
use crate::adapter::contract::{ClaimReply, CompleteReply, DedupAdapter, RenewReply};
use crate::key::DedupKey;

/// A release under `OnCompletion` releases only an incomplete row of its token. A release under
/// `OnClaim` releases only a complete row of its token.
pub(super) async fn release_follows_the_permanence_of_its_terms<S: Store>(store: S) {
    story(&store, "at once", "a once 1; a release; b once D; b claim D; a undo; b once 1").await;
    story(&store, "held", "a claim 1; a undo; b claim -; c once -").await;
    // The row stays, with its attempts. A late release never undoes a completion.
    let released = "a claim 1; a release; a release; a claim 2; a complete H; a release; b claim D";
    story(&store, "released", released).await;
}

/// A completed key is a duplicate until the retention of its last claim ends. Then the key is new.
pub(super) async fn completed_key_is_first_again_after_its_retention<S: Store>(store: S) {
    let completed = "a claim 1; a release; 1800 s; b claim 2; 20 s; b complete H";
    let ended = "3560 s; c claim D; 20 s; c claim 1";
    story(&store, "a", &format!("{completed}; {ended}")).await;
}

/// A claimed key is in flight until it is completed. Then the key is a duplicate, even for the token of its claim. A
/// completion that is repeated with its token returns the same reply, because the first reply may be lost.
pub(super) async fn claim_is_first_then_in_flight_then_duplicate<S: Store>(store: S) {
    let calls =
        "a claim 1; b claim -; a complete H; a complete H; b complete L; b claim D; a claim D";
    story(&store, "a", calls).await;
}

/// A claim that is repeated with its token returns the same reply, because the first reply may be
/// lost, and starts the lease again. Once another token holds the key, the repeated claim is in flight.
pub(super) async fn claim_repeated_with_its_token_returns_the_same_reply<S: Store>(store: S) {
    story(&store, "repeated", "a claim 1; 40 s; a claim 1; 40 s; b claim -").await;
    story(&store, "taken", "a claim 1; 80 s; b claim 2t; b claim 2t; a claim -").await;
}

/// A key whose lease lapsed goes to the next claim, which is a takeover. Then the key is in flight. After a release, the
/// next attempt is no takeover.
pub(super) async fn lapsed_lease_is_taken_over_once<S: Store>(store: S) {
    let taken = "a claim 1; 40 s; b claim -; 20 s; b claim 2t; c claim -; b release; c claim 3";
    story(&store, "a", taken).await;
}

/// A token that lost its lease cannot renew or release the key.
pub(super) async fn stale_token_changes_nothing<S: Store>(store: S) {
    let held = "a claim 1; 60 s; b claim 2t; a renew L; a release; a undo; c claim -";
    let complete = "b complete H; a renew L; a release; a undo; c claim D";
    story(&store, "a", &format!("{held}; {complete}")).await;
}

/// A completion counts after its lease was lost, because the handler succeeded. The reply says that the lease was lost.
/// The row keeps the token of its holder: one of the two handlers knows that both have run.
pub(super) async fn late_completion_counts_and_returns_lease_lost<S: Store>(store: S) {
    let late = "a claim 1; 60 s; b claim 2t; a complete L; a complete L; b complete H; c claim D";
    // A release by the second token does not undo the completion.
    story(&store, "a", &format!("{late}; b release; c claim D")).await;
}

/// Renewals extend the lease of a handler that runs for longer than one lease, and revive a lapsed lease.
pub(super) async fn renewal_keeps_or_revives_the_lease<S: Store>(store: S) {
    let renewed = "b renew L; a renew H; b claim -";
    let all = format!("a claim 1; 40 s; {renewed}; 40 s; {renewed}; 60 s; {renewed}; a complete H");
    story(&store, "a", &all).await;
}

/// 4,096 calls at the same time, with one token, for complete, released, in-flight and new keys, return the reply of
/// each key.
pub(super) async fn calls_for_4096_keys_reply_key_by_key<S: Store>(store: S) {
    let adapter = store.adapter();
    let keys: Vec<DedupKey> = (0..4_096).map(|id| key(&id.to_string())).collect();
    let every = |place: usize| keys.iter().skip(place).step_by(4).cloned().collect::<Vec<_>>();
    let (mine, theirs) = (leased(), leased());
    for place in 0..3 {
        claim_all(&*adapter, &every(place), &theirs).await;
    }
    complete_all(&*adapter, &every(0), &theirs).await;
    try_join_all(every(1).iter().map(|key| adapter.release(key, &theirs))).await.unwrap();
    let claimed = claim_all(&*adapter, &keys, &mine).await;
    let renewed = try_join_all(keys.iter().map(|key| adapter.renew(key, &mine))).await.unwrap();
    let completed = complete_all(&*adapter, &keys, &mine).await;
    for (place, claimed) in claimed.iter().enumerate() {
        let is_right = match place % 4 {
            0 => is_duplicate(claimed),
            1 => *claimed == ClaimReply::first(2, false),
            2 => *claimed == ClaimReply::InFlight,
            _ => *claimed == FIRST,
        };
        assert!(is_right, "{place}: {claimed:?}");
        let is_mine = place % 2 == 1;
        let renewal = if is_mine { RenewReply::Held } else { RenewReply::Lost };
        let completion = if is_mine { CompleteReply::Held } else { CompleteReply::LeaseLost };
        assert_eq!((renewed[place], completed[place]), (renewal, completion), "{place}");
    }
}
