//! The calls that are measured, on an adapter or on a baseline.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_dedup::DedupKey;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, CompleteReply, DedupAdapter, Token};

use super::rounds::Caller;

pub(crate) const NAMESPACE: &str = "bench";
pub(crate) const RETENTION: Duration = Duration::from_secs(30 * 86_400);
pub(crate) const LEASE: Duration = Duration::from_secs(60);

pub(crate) fn terms(token: Token) -> CallTerms {
    CallTerms::on_completion(token, RETENTION, LEASE)
}

/// Returns a new id of 28 bytes. Ids come in no order, like those of senders.
pub(crate) fn fresh_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // Multiplication by an odd number modulo 2⁶⁴ has no collisions.
    format!("evt_{:024x}", u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) << 32)
}

pub(crate) fn fresh_key() -> DedupKey {
    DedupKey::new(NAMESPACE, &fresh_id()).expect("a key")
}

/// A store that is measured. Each method panics if the reply is not the expected one.
pub(crate) trait Store: Clone + Send + Sync + 'static {
    /// Claims a new key.
    fn claim(&self, key: &DedupKey, token: Token) -> impl Future<Output = ()> + Send;
    /// Completes a key that the token has claimed.
    fn complete(&self, key: &DedupKey, token: Token) -> impl Future<Output = ()> + Send;
    /// Claims a key that is complete.
    fn duplicate(&self, key: &DedupKey) -> impl Future<Output = ()> + Send;
}

/// An adapter, called as the layer calls it.
#[derive(Clone)]
pub(crate) struct Ours<A>(pub(crate) A);

impl<A: DedupAdapter + Clone> Store for Ours<A> {
    async fn claim(&self, key: &DedupKey, token: Token) {
        let claimed = self.0.claim(key, &terms(token)).await;
        let claimed = claimed.expect("a claim");
        assert!(matches!(claimed, ClaimReply::First { .. }), "{claimed:?}");
    }

    async fn complete(&self, key: &DedupKey, token: Token) {
        let completed = self.0.complete(key, &terms(token)).await;
        assert_eq!(completed.expect("a completion"), CompleteReply::Held);
    }

    async fn duplicate(&self, key: &DedupKey) {
        let claimed = self.0.claim(key, &terms(Token::random())).await;
        let claimed = claimed.expect("a claim");
        assert!(matches!(claimed, ClaimReply::Duplicate(_)), "{claimed:?}");
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

/// A caller that claims a new key and completes it.
#[derive(Clone)]
pub(crate) struct Events<S>(pub(crate) S);

impl<S: Store> Caller for Events<S> {
    async fn call(&mut self) {
        let (key, token) = (fresh_key(), Token::random());
        self.0.claim(&key, token).await;
        self.0.complete(&key, token).await;
    }
}

/// A caller that claims complete keys.
#[derive(Clone)]
pub(crate) struct Duplicates<S> {
    pub(crate) store: S,
    /// The number of complete keys, from [`old_id`].
    pub(crate) keys: u64,
}

impl<S: Store> Caller for Duplicates<S> {
    async fn call(&mut self) {
        let id = old_id(rand::random_range(1..=self.keys));
        let key = DedupKey::new(NAMESPACE, &id).expect("a key");
        self.store.duplicate(&key).await;
    }
}

/// Returns the id of a row that [`fill`](super::database::fill) inserts.
pub(crate) fn old_id(number: u64) -> String {
    format!("old_{number:024}")
}
