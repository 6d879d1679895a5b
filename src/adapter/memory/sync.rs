//! The mutex of a shard. The model in `races` replaces this file.

pub(super) use std::sync::{Mutex, MutexGuard};
