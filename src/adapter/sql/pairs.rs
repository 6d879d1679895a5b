//! The claim of the two identities of an event, complete at once.
//!
//! 1. Of two calls with the same pair of keys, one gets both. Otherwise each may get one: both deliveries
//!    are duplicates then, and no handler runs.
//! 2. One statement inserts the missing rows, and another one claims the free rows. Each commits by itself,
//!    so another process may claim a key of the pair in between.
//! 3. So the later key of a pair, the key of the event, waits for the reply to the earlier one, the second
//!    identity. The later key is claimed if the earlier one was. Otherwise its row is only read, for the
//!    digest of its payload, and a free key is in flight.
//! 4. A call under a lease claims both keys at once: a delivery that does not get both is in flight, and its
//!    sender retries.

use std::future::Future;

use super::super::replies::Claimed;
use super::super::terms::{CallTerms, Permanence};
use super::call::missing_reply;
use super::row::Row;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

/// The calls of an adapter that a claim consists of.
pub(in crate::adapter) trait PairClaims: Sync {
    /// Claims keys, each of which stands alone. A duplicate is without its response.
    fn claim_keys(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Claimed>, Error>> + Send;

    /// Reads the rows of keys, without responses.
    fn look_up(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> impl Future<Output = Result<Vec<Option<Row>>, Error>> + Send;
}

/// Claims the keys of a call.
///
/// # Errors
///
/// Those of the adapter. The outcome is unknown if the error may follow the claim of a key.
pub(in crate::adapter) async fn claim_pairs<A: PairClaims>(
    adapter: &A,
    keys: &[DedupKey],
    terms: &CallTerms,
) -> Result<Vec<Claimed>, Error> {
    let pairs = pairs(keys, terms);
    if pairs.is_empty() {
        return adapter.claim_keys(keys, terms).await;
    }
    let select = |places: &[usize]| -> Vec<DedupKey> {
        places.iter().map(|place| keys[*place].clone()).collect()
    };
    let mut is_later = vec![false; keys.len()];
    for (_, later) in &pairs {
        is_later[*later] = true;
    }
    let mut replies: Vec<Option<Claimed>> = vec![None; keys.len()];
    let places: Vec<usize> = (0..keys.len()).filter(|place| !is_later[*place]).collect();
    for (place, reply) in places.iter().zip(adapter.claim_keys(&select(&places), terms).await?) {
        if let Claimed::Duplicate(_) = reply {
            // The next call may fail or time out, and no handler may run for a known duplicate.
            terms.note_duplicate();
        }
        replies[*place] = Some(reply);
    }
    let is_first = |place: usize| matches!(replies[place], Some(Claimed::First { .. }));
    let (claimed, others): (Vec<_>, Vec<_>) =
        pairs.into_iter().partition(|(earlier, _)| is_first(*earlier));
    let mut places: Vec<usize> = claimed.into_iter().map(|(_, later)| later).collect();
    // What follows must not be refused by a full queue: another process takes the event for a duplicate.
    let holds_keys = replies.iter().flatten().any(|reply| matches!(reply, Claimed::First { .. }));
    let terms = &if holds_keys { terms.clone().holding_keys() } else { terms.clone() };
    let failed = |error: Error| match error.kind() {
        _ if holds_keys => error.with_unknown_outcome(),
        ErrorKind::Corrupt => error,
        _ => Error::new(ErrorKind::Refused, "looking up keys").with_source(error),
    };
    if !others.is_empty() {
        let others: Vec<usize> = others.into_iter().map(|(_, later)| later).collect();
        let rows = adapter.look_up(&select(&others), terms).await.map_err(failed)?;
        for (later, row) in others.into_iter().zip(rows) {
            let reply = row.map(|row| row.claimed(terms)).transpose()?.flatten();
            replies[later] = Some(reply.unwrap_or(Claimed::InFlight));
        }
    }
    if !places.is_empty() {
        places.sort_unstable();
        let claimed = adapter
            .claim_keys(&select(&places), terms)
            .await
            .map_err(Error::with_unknown_outcome)?;
        for (place, reply) in places.into_iter().zip(claimed) {
            replies[place] = Some(reply);
        }
    }
    replies.into_iter().collect::<Option<_>>().ok_or_else(missing_reply)
}

/// Returns the places of the pairs whose keys are claimed one after the other, the earlier key first.
fn pairs(keys: &[DedupKey], terms: &CallTerms) -> Vec<(usize, usize)> {
    if terms.permanence() != Permanence::OnClaim {
        return Vec::new();
    }
    let later = |key| keys.binary_search(terms.later_identity_of(key)?).ok();
    keys.iter().enumerate().filter_map(|(place, key)| Some((place, later(key)?))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::super::super::terms::Token;
    use super::*;

    const FIRST: Claimed = Claimed::first(1, false);

    /// Claims all free keys, and notes each call.
    #[derive(Default)]
    struct Fake {
        calls: Mutex<Vec<String>>,
        complete: Vec<&'static str>,
        in_flight: Vec<&'static str>,
        /// The number of the call that fails, and its error.
        fails: Option<(usize, ErrorKind)>,
    }

    impl Fake {
        fn call(&self, name: &str, keys: &[DedupKey]) -> Result<(), Error> {
            let mut calls = self.calls.lock().unwrap();
            calls.push(keys.iter().fold(name.to_owned(), |text, key| text + " " + key.id()));
            match self.fails {
                Some((at, kind)) if at == calls.len() => Err(Error::new(kind, "claiming keys")),
                _ => Ok(()),
            }
        }

        fn row(&self, key: &DedupKey) -> Option<Row> {
            self.complete.contains(&key.id()).then(|| Row::row_after(key, &terms(), &FIRST))
        }
    }

    impl PairClaims for Fake {
        async fn claim_keys(
            &self,
            keys: &[DedupKey],
            terms: &CallTerms,
        ) -> Result<Vec<Claimed>, Error> {
            self.call(if terms.holds_keys() { "claim also" } else { "claim" }, keys)?;
            let claimed = keys.iter().map(|key| match self.row(key) {
                Some(row) => row.claimed(terms).map(|reply| reply.unwrap_or(FIRST)),
                None if self.in_flight.contains(&key.id()) => Ok(Claimed::InFlight),
                None => Ok(FIRST),
            });
            claimed.collect()
        }

        async fn look_up(
            &self,
            keys: &[DedupKey],
            _: &CallTerms,
        ) -> Result<Vec<Option<Row>>, Error> {
            self.call("read", keys)?;
            Ok(keys.iter().map(|key| self.row(key)).collect())
        }
    }

    fn key(id: &str) -> DedupKey {
        DedupKey::new("n", id).unwrap()
    }

    fn terms() -> CallTerms {
        CallTerms::on_claim(Token::random(), Duration::from_secs(3_600))
    }

    fn with_pairs(terms: CallTerms, pairs: &[(&str, &str)]) -> CallTerms {
        terms.with_sorted_pairs(pairs.iter().map(|(one, other)| (key(one), key(other))).collect())
    }

    /// Returns the calls, and a letter for each reply.
    async fn claim(fake: &Fake, keys: &[&str], terms: &CallTerms) -> (Vec<String>, String) {
        let keys: Vec<_> = keys.iter().copied().map(key).collect();
        let replies = claim_pairs(fake, &keys, terms).await.unwrap();
        let letter = |reply| match reply {
            Claimed::First { .. } => 'F',
            Claimed::Duplicate(_) => 'D',
            Claimed::InFlight => 'I',
        };
        (fake.calls.lock().unwrap().clone(), replies.into_iter().map(letter).collect())
    }

    #[tokio::test]
    async fn later_key_is_claimed_only_after_the_earlier_one() {
        let fake = |complete: &[_]| Fake { complete: complete.to_vec(), ..Fake::default() };
        let in_flight = Fake { in_flight: vec!["a"], ..fake(&[]) };
        let beside_complete = Fake { in_flight: vec!["a"], ..fake(&["b"]) };
        for (fake, calls, replies) in [
            (fake(&[]), &["claim a", "claim also b"][..], "FF"),
            (fake(&["b"]), &["claim a", "claim also b"], "FD"),
            (fake(&["a"]), &["claim a", "read b"], "DI"),
            (fake(&["a", "b"]), &["claim a", "read b"], "DD"),
            (in_flight, &["claim a", "read b"], "II"),
            (beside_complete, &["claim a", "read b"], "ID"),
        ] {
            let claimed = claim(&fake, &["a", "b"], &with_pairs(terms(), &[("a", "b")])).await;
            assert_eq!(claimed.0, calls);
            assert_eq!(claimed.1, replies);
        }
    }

    #[tokio::test]
    async fn later_keys_of_several_pairs_are_claimed_in_one_call() {
        let keys = ["a", "b", "c", "d", "e"];
        let pairs = with_pairs(terms(), &[("a", "d"), ("b", "c")]);
        let claimed = claim(&Fake::default(), &keys, &pairs).await;
        assert_eq!(claimed.0, ["claim a b e", "claim also c d"]);
        assert_eq!(claimed.1, "FFFFF");
        let fake = Fake { complete: vec!["b"], ..Fake::default() };
        let claimed = claim(&fake, &keys, &pairs).await;
        assert_eq!(claimed.0, ["claim a b e", "read c", "claim also d"]);
        assert_eq!(claimed.1, "FDIFF");
    }

    #[tokio::test]
    async fn call_under_a_lease_or_without_pairs_claims_all_keys_at_once() {
        let lease = CallTerms::on_completion(Token::random(), Duration::MAX, Duration::MAX);
        let of_others = with_pairs(terms(), &[("a", "x"), ("A", "b")]);
        for terms in [terms(), with_pairs(lease, &[("a", "b")]), of_others] {
            let claimed = claim(&Fake::default(), &["a", "b"], &terms).await;
            assert_eq!(claimed.0, ["claim a b"]);
            assert_eq!(claimed.1, "FF");
        }
    }

    #[tokio::test]
    async fn error_after_a_claim_leaves_the_outcome_unknown() {
        let keys = ["a", "b", "c"].map(key);
        let [corrupt, refused] = [ErrorKind::Corrupt, ErrorKind::Refused];
        for (complete, fails, kind, is_noted) in [
            (&[][..], (1, refused), refused, false),
            (&["a"], (2, refused), ErrorKind::Unavailable, true),
            (&["c"], (2, refused), ErrorKind::Unavailable, true),
            (&[], (2, refused), ErrorKind::Unavailable, false),
            // Nothing is claimed.
            (&["a", "c"], (2, refused), refused, true),
            (&["a", "c"], (2, ErrorKind::Timeout), refused, true),
            (&["a", "c"], (2, corrupt), corrupt, true),
        ] {
            let fake = Fake { complete: complete.to_vec(), fails: Some(fails), ..Fake::default() };
            let note = Arc::default();
            let terms = with_pairs(terms(), &[("a", "b")]).with_duplicate_note(Arc::clone(&note));
            let error = claim_pairs(&fake, &keys, &terms).await.unwrap_err();
            assert_eq!((error.kind(), note.get().is_some()), (kind, is_noted));
        }
    }
}
