//! What callers ask of a store, ours or the baseline.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_dedup::DedupKey;
use tower_dedup::adapter::{CallTerms, Claimed, Completed, DedupAdapter, Token};

use super::rounds::Caller;

pub(crate) const NAMESPACE: &str = "bench";
const RETENTION: Duration = Duration::from_secs(30 * 86_400);
const LEASE: Duration = Duration::from_secs(60);

pub(crate) fn terms(token: Token) -> CallTerms {
    CallTerms::on_completion(token, RETENTION, LEASE)
}

/// An id that was not used before, of 28 bytes in no order, as senders make them.
pub(crate) fn fresh_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // An odd factor maps no two numbers to one.
    format!("evt_{:024x}", u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) << 32)
}

pub(crate) fn fresh_key() -> DedupKey {
    DedupKey::new(NAMESPACE, &fresh_id()).expect("a key")
}

/// A store that is measured. Each call panics unless it does what it is measured for.
pub(crate) trait Store: Clone + Send + Sync + 'static {
    /// Of a new key.
    fn claim(&self, key: &DedupKey, token: Token) -> impl Future<Output = ()> + Send;
    /// Of a key that the token has claimed.
    fn complete(&self, key: &DedupKey, token: Token) -> impl Future<Output = ()> + Send;
    /// A delivery of a key that is complete.
    fn duplicate(&self, key: &DedupKey) -> impl Future<Output = ()> + Send;
}

/// An adapter, asked as the layer asks it.
#[derive(Clone)]
pub(crate) struct Ours<A>(pub(crate) A);

impl<A: DedupAdapter + Clone> Store for Ours<A> {
    async fn claim(&self, key: &DedupKey, token: Token) {
        let claimed = self.0.claim(std::slice::from_ref(key), &terms(token)).await;
        let claimed = claimed.expect("a claim");
        assert!(matches!(claimed[..], [Claimed::First { .. }]), "{claimed:?}");
    }

    async fn complete(&self, key: &DedupKey, token: Token) {
        let completed = self.0.complete(std::slice::from_ref(key), &terms(token)).await;
        assert_eq!(completed.expect("a completion"), [Completed::Held]);
    }

    async fn duplicate(&self, key: &DedupKey) {
        let claimed = self.0.claim(std::slice::from_ref(key), &terms(Token::random())).await;
        let claimed = claimed.expect("a claim");
        assert!(matches!(claimed[..], [Claimed::Duplicate(_)]), "{claimed:?}");
    }
}

/// A caller that claims new keys.
#[derive(Clone)]
pub(crate) struct Claims<S>(pub(crate) S);

impl<S: Store> Caller for Claims<S> {
    async fn call(&mut self) {
        self.0.claim(&fresh_key(), Token::random()).await;
    }
}

/// A caller that claims new keys and completes each.
#[derive(Clone)]
pub(crate) struct Events<S>(pub(crate) S);

impl<S: Store> Caller for Events<S> {
    async fn call(&mut self) {
        let (key, token) = (fresh_key(), Token::random());
        self.0.claim(&key, token).await;
        self.0.complete(&key, token).await;
    }
}

/// A caller that delivers complete keys again.
#[derive(Clone)]
pub(crate) struct Duplicates<S> {
    pub(crate) store: S,
    /// The keys are the complete ones of [`old_id`].
    pub(crate) keys: u64,
}

impl<S: Store> Caller for Duplicates<S> {
    async fn call(&mut self) {
        let id = old_id(rand::random_range(1..=self.keys));
        let key = DedupKey::new(NAMESPACE, &id).expect("a key");
        self.store.duplicate(&key).await;
    }
}

/// The id of a row that was there before.
pub(crate) fn old_id(number: u64) -> String {
    format!("old_{number:024}")
}

/// As many callers as these.
pub(crate) fn callers<C: Caller + Clone>(count: usize, caller: C) -> impl Iterator<Item = C> {
    std::iter::repeat_n(caller, count)
}
