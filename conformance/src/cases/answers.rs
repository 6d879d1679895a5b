//! Replies to one caller: by the state of a row, and one call after the other.

use tower_dedup::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, Fetch, RenewReply, Token,
};
use tower_dedup::adapter::maintenance::{ForgetReply, KeyState, MaintenanceAdapter};
use tower_dedup::{DedupKey, StoreErrorKind};

use crate::case::Case;
use crate::driver::{
    FIRST, RETENTION, SLACK, complete_at_once, key, leased, prepare, reply, stories, story,
};

/// How a row [comes about](prepare). Of each call, the [`reply`] to the token of the row, and to another token. `get`: the
/// state, the attempts, `t` after a takeover, or `-`; `forget`: `R`emoved, `M`issing, `-` in flight.
#[rustfmt::skip]
const REPLIES: [(&str, &str); 15] = [
    // row                 claim    at once  renew  complete  get  forget
    ("none",              "1 1      1 1      H H    I I       -    M"),
    ("released unclaimed","1 1      1 1      L L    I I       -    M"),
    ("released",          "2 2      2 2      L L    L L       R1   R"),
    ("leased",            "1 -      - -      H L    H L       I1   -"),
    ("taken",             "2t -     - -      H L    H L       I2t  -"),
    ("lapsed",            "1 2t     2t 2t    H L    H L       L1   R"),
    ("complete",          "D D      1 D      L L    H L       C1   R"),
    ("inserted",          "D D      1 D      L L    I L       C0   R"),
    // A live lease outlives the retention.
    ("expired leased",    "1 -      - -      H L    H L       I1   -"),
    // An incomplete row answers its own token as before.
    ("expired released",  "1 1      1 1      L L    L L       -    M"),
    ("expired lapsed",    "1 1      1 1      H L    H L       -    M"),
    ("expired taken",     "2t 1     1 1      H L    H L       -    M"),
    ("expired complete",  "1 1      1 1      L L    I I       -    M"),
    ("expired inserted",  "1 1      1 1      L L    I I       -    M"),
    ("released at once",  "1 1      1 1      L L    I I       -    M"),
];

/// Makes each call by each token, on a row of its own. The same call again has the same reply.
async fn check(store: &Case, (row, replies): (&str, &str), then: impl AsyncFn(&DedupKey)) {
    let adapter = store.adapter();
    let calls = ["claim", "once", "renew", "complete"];
    let calls = calls.into_iter().flat_map(|call| ["its", "another"].map(|token| (call, token)));
    let calls: Vec<_> = calls.zip(replies.split_whitespace()).collect();
    let label = |call, token| format!("{row}: {call} by {token} token");
    let keys = calls.iter().map(|((call, token), _)| (key(&label(call, token)), leased()));
    let keys: Vec<_> = keys.collect();
    // A store may delete an expired row with every insertion, and a release may leave one.
    let together = if row.starts_with("released ") { 1 } else { calls.len() };
    for (calls, keys) in calls.chunks(together).zip(keys.chunks(together)) {
        prepare(store, row, keys).await;
        for (((call, token), expected), (key, mine)) in calls.iter().zip(keys) {
            then(key).await;
            let terms = if *token == "its" { mine } else { &leased() };
            for time in ["once", "again"] {
                let reply = reply(&adapter, call, key, terms).await;
                assert_eq!(reply, *expected, "{}, {time}", label(call, token));
            }
        }
    }
}

/// Each call replies by the state of its row, and a call that is repeated with its token replies the same.
pub(super) async fn calls_reply_by_the_state_of_the_row(store: Case) {
    for row in REPLIES {
        check(&store, row, async |_| {}).await;
    }
}

/// `get` and `forget` reply by the state of the row. A forgotten key is new, and no renewal revives it.
pub(super) async fn calls_of_operators_reply_by_the_state_of_the_row(store: Case) {
    let adapter = store.adapter();
    let forget = async |key: &DedupKey| match adapter.forget(key).await.unwrap() {
        ForgetReply::Removed => "R",
        ForgetReply::InFlight => "-",
        ForgetReply::Missing => "M",
        other => panic!("{other:?}"),
    };
    let get = async |key: &DedupKey| {
        let Some(entry) = adapter.get(key).await.unwrap() else { return "-".to_owned() };
        let state = match entry.state {
            KeyState::InFlight => "I",
            KeyState::Lapsed => "L",
            KeyState::Released => "R",
            KeyState::Complete => "C",
            other => panic!("{other:?}"),
        };
        let has_lease = matches!(entry.state, KeyState::InFlight | KeyState::Lapsed);
        let is_right = |lease_until| has_lease && lease_until > entry.first_seen_at;
        assert!(entry.lease_until.map_or(!has_lease, is_right), "{entry:?}");
        format!("{state}{}{}", entry.attempts, if entry.takeover { "t" } else { "" })
    };
    for row in ["complete", "lapsed"] {
        let forgotten = (row, "1 1  1 1  L L  I I");
        check(&store, forgotten, async |key| assert_eq!(forget(key).await, "R")).await;
    }
    for (row, replies) in REPLIES {
        let key = key(row);
        prepare(&store, row, &[(key.clone(), leased())]).await;
        let (got, forgotten) = (get(&key).await, forget(&key).await);
        let mut expected = replies.split_whitespace().skip(8);
        assert_eq!((Some(&*got), Some(forgotten)), (expected.next(), expected.next()), "{row}");
        if forgotten == "R" {
            assert_eq!((get(&key).await, forget(&key).await), ("-".to_owned(), "M"), "{row}");
        }
    }
}

/// A renewal and a completion do not ask for the permanence of their terms: without a lease, a renewal lapses at once.
pub(super) async fn terms_without_a_lease_renew_and_complete(store: Case) {
    let (adapter, key) = (store.adapter(), key("a"));
    let [mine, other] = [(); 2].map(|()| CallTerms::on_claim(Token::random(), RETENTION));
    assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Held);
    let taker = leased();
    assert_eq!(adapter.claim(&key, &taker).await.unwrap(), ClaimReply::first(2, true));
    assert_eq!(adapter.complete(&key, &other).await.unwrap(), CompleteReply::LeaseLost);
    // The row keeps the token of its holder.
    assert_eq!(adapter.complete(&key, &taker).await.unwrap(), CompleteReply::Held);
}

stories! {
    /// A key that is complete at once is a duplicate until its retention ends, or until it is released, by the token of its
    /// claim only. Then the key is new.
    fn key_complete_at_once_is_first_again_after_its_release_or_retention() {
        "a undo; a once 1; b undo; b once D; a undo; a undo; b once 1";
        "a once 1; 3580 s; b once D; 20 s; b once 1";
    }

    /// A release under `OnCompletion` releases only an incomplete row of its token. A release under `OnClaim` releases
    /// only a complete row of its token.
    fn release_follows_the_permanence_of_its_terms() {
        "a once 1; a release; b once D; b claim D; a undo; b once 1";
        "a claim 1; a undo; b claim -; c once -";
        // The row stays, with its attempts. A late release never undoes a completion.
        "a claim 1; a release; a release; a claim 2; a complete H; a release; b claim D";
    }

    /// A completed key is a duplicate until the retention of its last claim ends. Then the key is new.
    fn completed_key_is_first_again_after_its_retention() {
        "a claim 1; a release; 1800 s; b claim 2; 20 s; b complete H; 3560 s; c claim D; 20 s; c claim 1";
    }

    /// A claimed key is in flight until it is completed. Then the key is a duplicate, even for the token of its claim. A
    /// completion that is repeated with its token returns the same reply, because the first reply may be lost.
    fn claim_is_first_then_in_flight_then_duplicate() {
        "a claim 1; b claim -; a complete H; a complete H; b complete L; b claim D; a claim D";
    }

    /// A claim that is repeated with its token returns the same reply, because the first reply may be lost, and starts the
    /// lease and the retention again. Once another token holds the key, the repeated claim is in flight.
    fn claim_repeated_with_its_token_returns_the_same_reply() {
        "a claim 1; 40 s; a claim 1; 40 s; b claim -";
        "a claim 1; 1800 s; a claim 1; a complete H; 3580 s; b claim D";
        "a claim 1; 80 s; b claim 2t; b claim 2t; a claim -";
    }

    /// A key whose lease lapsed goes to the next claim, which is a takeover. Then the key is in flight. After a release,
    /// the next attempt is no takeover.
    fn lapsed_lease_is_taken_over_once() {
        "a claim 1; 40 s; b claim -; 20 s; b claim 2t; c claim -; b release; c claim 3";
    }

    /// A token that lost its lease cannot renew or release the key.
    fn stale_token_changes_nothing() {
        "a claim 1; 60 s; b claim 2t; a renew L; a release; a undo; c claim -; \
         b complete H; a renew L; a release; a undo; c claim D";
    }

    /// A completion counts after its lease was lost, because the handler succeeded. The reply says that the lease was lost.
    /// The row keeps the token of its holder: one of the two handlers knows that both have run.
    fn late_completion_counts_and_returns_lease_lost() {
        // A release by the second token does not undo the completion.
        "a claim 1; 60 s; b claim 2t; a complete L; a complete L; b complete H; c claim D; b release; c claim D";
    }

    /// Renewals extend the lease of a handler that runs for longer than one lease, and revive a lapsed lease.
    fn renewal_keeps_or_revives_the_lease() {
        "a claim 1; 40 s; b renew L; a renew H; b claim -; 40 s; b renew L; a renew H; b claim -; \
         60 s; b renew L; a renew H; b claim -; a complete H";
    }
}

/// The first claim of a key is first, also if it is repeated with its token, because the first reply may be lost. Every
/// claim with another token is a duplicate with the age of the key.
pub(super) async fn claim_complete_at_once_is_first_once(store: Case) {
    let (adapter, keys, mine) = (store.adapter(), key("a"), complete_at_once());
    for _ in 0..3 {
        assert_eq!(adapter.claim(&keys, &mine).await.unwrap(), FIRST);
    }
    store.advance(SLACK).await;
    for _ in 0..3 {
        match &adapter.claim(&keys, &complete_at_once()).await.unwrap() {
            ClaimReply::Duplicate(seen) => {
                assert!(seen.age >= SLACK && seen.age < 2 * SLACK, "{:?}", seen.age);
            }
            ref other => panic!("{other:?}"),
        }
    }
}

/// An adapter without leases or without stored data refuses the terms that need them, and writes
/// nothing.
pub(super) async fn unsupported_terms_are_refused_before_anything_is_written(store: Case) {
    let (adapter, keys) = (store.adapter(), key("a"));
    let abilities = adapter.abilities();
    let mut refused = Vec::new();
    if !abilities.leases {
        refused.push(leased());
        for kind in [
            adapter.renew(&keys, &leased()).await.map(drop),
            adapter.complete(&keys, &leased()).await.map(drop),
        ] {
            assert_eq!(kind.unwrap_err().kind(), StoreErrorKind::Unsupported);
        }
    }
    if !abilities.stored_data {
        refused.push(complete_at_once().with_fetch(Fetch::Digest));
        refused.push(complete_at_once().with_payload_sha256([7; 32]));
    }
    for terms in refused {
        let error = adapter.claim(&keys, &terms).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{terms:?}");
    }
    assert_eq!(adapter.claim(&keys, &complete_at_once()).await.unwrap(), FIRST);
}
