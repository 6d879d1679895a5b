//! The second identities that deliveries of this process claim on arrival.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::key::{DedupKey, Event, List};

/// When each claim of a second identity has begun.
#[derive(Default)]
pub(super) struct Claiming(Mutex<HashMap<DedupKey, Vec<Instant>>>);

impl Claiming {
    /// Adds the second identities of these events until the guard is dropped.
    pub(super) fn add(self: &Arc<Self>, events: &[Event]) -> ClaimingGuard {
        let (claiming, since) = (Arc::clone(self), Instant::now());
        let keys: List<DedupKey> =
            events.iter().filter_map(Event::second_identity).cloned().collect();
        let mut all = self.lock();
        for key in &keys {
            all.entry(key.clone()).or_default().push(since);
        }
        drop(all);
        ClaimingGuard { claiming, keys, since }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DedupKey, Vec<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes its keys when it is dropped.
pub(super) struct ClaimingGuard {
    claiming: Arc<Claiming>,
    keys: List<DedupKey>,
    since: Instant,
}

impl ClaimingGuard {
    pub(super) fn contains(&self, key: &DedupKey) -> bool {
        self.keys.contains(key)
    }

    /// Returns `true` if another delivery of this process may have completed the key `age` ago, and claims
    /// the key of its event now. It may release both.
    pub(super) fn is_shared(&self, key: &DedupKey, age: Duration) -> bool {
        let all = self.claiming.lock();
        let mut others = all.get(key).cloned().unwrap_or_default();
        remove(&mut others, self.since);
        others.iter().any(|since| age <= since.elapsed())
    }
}

impl Drop for ClaimingGuard {
    fn drop(&mut self) {
        let mut all = self.claiming.lock();
        for key in &self.keys {
            if let Some(claims) = all.get_mut(key) {
                remove(claims, self.since);
                if claims.is_empty() {
                    all.remove(key);
                }
            }
        }
    }
}

fn remove(claims: &mut Vec<Instant>, since: Instant) {
    if let Some(place) = claims.iter().position(|claim| *claim == since) {
        claims.swap_remove(place);
    }
}
