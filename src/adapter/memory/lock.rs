//! The lock of a shard: the standard library's, and in tests one whose schedule is explored.

use std::ops::DerefMut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::shard::Shard;

pub(super) trait Lock: Default {
    type Guard<'a>: DerefMut<Target = Shard>
    where
        Self: 'a;

    fn lock(&self) -> Self::Guard<'_>;
}

impl Lock for Mutex<Shard> {
    type Guard<'a> = MutexGuard<'a, Shard>;

    fn lock(&self) -> Self::Guard<'_> {
        // No step leaves a shard half-changed when it panics.
        Self::lock(self).unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl Lock for shuttle::sync::Mutex<Shard> {
    type Guard<'a> = shuttle::sync::MutexGuard<'a, Shard>;

    fn lock(&self) -> Self::Guard<'_> {
        Self::lock(self).unwrap_or_else(PoisonError::into_inner)
    }
}
