//! One reply for each call and each state of a row.

use super::super::driver::{LEASE, RETENTION, SLACK, at_once, key, leased, reply, story};
use super::super::store::{Maintained, Store};
use crate::adapter::contract::{
    CallTerms, ClaimReply, CompleteReply, DedupAdapter, RenewReply, Token,
};
use crate::adapter::inspect::{ForgetReply, KeyState, MaintenanceAdapter};
use crate::key::DedupKey;

/// How a row comes about. Of each call, the [`reply`] to the token of the row, and to another token. `get`: the state or
/// `-`; `forget`: `R`emoved, `M`issing, `-` in flight.
///
/// A row that is called *expired* was in the state before, and its retention has ended.
#[rustfmt::skip]
const REPLIES: [(&str, &str); 14] = [
    // row                 claim    at once  renew  complete  get  forget
    ("none",              "1 1      1 1      H H    I I       -    M"),
    ("released unclaimed","1 1      1 1      L L    I I       -    M"),
    ("released",          "2 2      2 2      L L    L L       R    R"),
    ("leased",            "1 -      - -      H L    H L       I    -"),
    ("taken",             "2t -     - -      H L    H L       I    -"),
    ("lapsed",            "1 2t     2t 2t    H L    H L       L    R"),
    ("complete",          "D D      1 D      L L    H L       C    R"),
    ("inserted",          "D D      1 D      L L    I L       C    R"),
    // An incomplete row answers its own token as before.
    ("expired released",  "1 1      1 1      L L    L L       -    M"),
    ("expired lapsed",    "1 1      1 1      H L    H L       -    M"),
    ("expired taken",     "2t 1     1 1      H L    H L       -    M"),
    ("expired complete",  "1 1      1 1      L L    I I       -    M"),
    ("expired inserted",  "1 1      1 1      L L    I I       -    M"),
    ("released at once",  "1 1      1 1      L L    I I       -    M"),
];

/// Makes a row of this name for each key, by its token.
async fn prepare<S: Store>(store: &S, row: &str, keys: &[(DedupKey, CallTerms)]) {
    let adapter = store.adapter();
    let (is_expired, row) = row.strip_prefix("expired ").map_or((false, row), |row| (true, row));
    for (key, mine) in keys {
        let first = match row {
            "none" | "inserted" | "released unclaimed" => continue,
            "released at once" => at_once(mine),
            "taken" => leased(),
            _ => mine.clone(),
        };
        adapter.claim(key, &first).await.unwrap();
    }
    if row == "lapsed" || row == "taken" {
        store.advance(LEASE + SLACK).await;
    }
    for (key, mine) in keys {
        match row {
            "none" | "leased" | "lapsed" => {}
            "released unclaimed" | "released" => adapter.release(key, mine).await.unwrap(),
            "released at once" => adapter.release(key, &at_once(mine)).await.unwrap(),
            "taken" => drop(adapter.claim(key, mine).await.unwrap()),
            _ => drop(adapter.complete(key, mine).await.unwrap()),
        }
    }
    if is_expired {
        store.advance(RETENTION + SLACK).await;
    }
}

/// Makes each call by each token, on a row of its own. The same call again has the same reply.
async fn check<S: Store>(store: &S, (row, replies): (&str, &str), then: impl AsyncFn(&DedupKey)) {
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
                let reply = reply(&*adapter, call, key, terms).await;
                assert_eq!(reply, *expected, "{}, {time}", label(call, token));
            }
        }
    }
}

/// Each call replies by the state of its row, and a call that is repeated with its token replies the same.
pub(super) async fn calls_reply_by_the_state_of_the_row<S: Store>(store: S) {
    for row in REPLIES {
        check(&store, row, async |_| {}).await;
    }
}

/// `get` and `forget` reply by the state of the row. A forgotten key is new, and no renewal revives it.
pub(super) async fn calls_of_operators_reply_by_the_state_of_the_row<S: Maintained>(store: S) {
    let adapter = store.adapter();
    let forget = async |key: &DedupKey| adapter.forget(key).await.unwrap();
    for row in ["complete", "lapsed"] {
        let forgotten = (row, "1 1  1 1  L L  I I");
        check(&store, forgotten, async |key| assert_eq!(forget(key).await, ForgetReply::Removed))
            .await;
    }
    for (row, replies) in REPLIES {
        let key = key(row);
        prepare(&store, row, &[(key.clone(), leased())]).await;
        let got = match adapter.get(&key).await.unwrap().map(|entry| entry.state) {
            Some(KeyState::InFlight) => "I",
            Some(KeyState::Lapsed) => "L",
            Some(KeyState::Released) => "R",
            Some(KeyState::Complete) => "C",
            None => "-",
        };
        let forgotten = match forget(&key).await {
            ForgetReply::Removed => "R",
            ForgetReply::InFlight => "-",
            ForgetReply::Missing => "M",
        };
        let mut expected = replies.split_whitespace().skip(8);
        assert_eq!((Some(got), Some(forgotten)), (expected.next(), expected.next()), "{row}");
    }
}

/// A claim that is repeated with its token starts the retention again, as it starts the lease again.
pub(super) async fn retention_counts_from_the_last_claim<S: Store>(store: S) {
    story(&store, "a", "a claim 1; 1800 s; a claim 1; a complete H; 3580 s; b claim D").await;
}

/// A renewal and a completion do not ask for the permanence of their terms: without a lease, a renewal lapses at once.
pub(super) async fn terms_without_a_lease_renew_and_complete<S: Store>(store: S) {
    let (adapter, key) = (store.adapter(), key("a"));
    let [mine, other] = [(); 2].map(|()| CallTerms::on_claim(Token::random(), RETENTION));
    assert_eq!(adapter.renew(&key, &mine).await.unwrap(), RenewReply::Held);
    let taker = leased();
    assert_eq!(adapter.claim(&key, &taker).await.unwrap(), ClaimReply::first(2, true));
    assert_eq!(adapter.complete(&key, &other).await.unwrap(), CompleteReply::LeaseLost);
    // The row keeps the token of its holder.
    assert_eq!(adapter.complete(&key, &taker).await.unwrap(), CompleteReply::Held);
}
