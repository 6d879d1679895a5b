//! The steps of one delivery: claim, wait, handle, settle.
//!
//! 1. [`AnyLedger::begin`](crate::ledger::AnyLedger::begin) claims the keys of the delivery.
//! 2. [`Waiter::claim`](waiters::Waiter::claim): while another delivery runs the event, the
//!    delivery waits and claims again. Of the [`Waiters`] of an event, one claims for all.
//! 3. [`call`] calls the handler, within its bound. The caller decides whether the handler
//!    succeeded.
//! 4. [`Claim::settle`](crate::ledger::Claim::settle) completes the keys of a success, and releases
//!    any others.
//!
//! A layer adds its bounds and its answers. In shadow, it calls the handler under every verdict. A
//! request without a key has nothing to claim. A [`Deduplicator`](crate::Deduplicator) has no
//! bounds on running deliveries.
//!
//! # What happens if a future is dropped?
//!
//! - *While it claims or waits*: the ledger releases the keys that it may have claimed.
//! - *The handler's future*, because it runs longer than its bound, or panics: [`call`] drops it
//!   before step 4. Step 4 then rolls the claim back.
//! - *While the handler runs*: the claim is dropped with it, and rolled back in the background. On
//!   arrival, the event is lost.
//! - *While the claim is settled*: the ledger ends it in the background, or the database decides.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::timeout;

mod waiters;

pub(crate) use waiters::{Admission, NotBegun, Waiters};

/// How the call of the handler ended.
pub(crate) enum Called<R, E> {
    Returned(Result<R, E>),
    Panicked(Box<dyn Any + Send>),
    TimedOut,
}

/// Calls the handler, within its bound, and catches its panic. The handler is dropped before this
/// returns: nothing runs once the claim is settled.
pub(crate) async fn call<F, R, E>(
    bound: Option<Duration>,
    handler: impl FnOnce() -> F,
) -> Called<R, E>
where
    F: Future<Output = Result<R, E>>,
{
    let mut handler = pin!(AssertUnwindSafe(async { handler().await }).catch_unwind());
    let returned = match bound {
        None => handler.await,
        Some(bound) => match timeout(bound, handler.as_mut()).await {
            Ok(returned) => returned,
            Err(_elapsed) => return Called::TimedOut,
        },
    };
    returned.map_or_else(Called::Panicked, Called::Returned)
}
