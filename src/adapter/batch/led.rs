//! [`Led`]: a call that is sent in its caller's own task, for as long as nobody else waits for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;

use super::tasks::{Home, Mutex, home, spawn_at};

/// Where the sending of a call is, while it is not being polled.
///
/// A caller need not look after its future: it may hold it and do something else. So whoever comes
/// next takes the sending from it and gives it a task.
pub(super) struct Slot {
    home: Home,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sending: Option<BoxFuture<'static, bool>>,
    wanted: bool,
}

impl Slot {
    /// Of a caller in this runtime.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { home: home(), state: Mutex::default() })
    }

    /// Somebody waits for it.
    pub(super) fn want(&self) {
        let sending = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.wanted = true;
            state.sending.take()
        };
        if let Some(sending) = sending {
            self.give_a_task(sending);
        }
    }

    fn take(&self) -> Option<BoxFuture<'static, bool>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).sending.take()
    }

    /// Gives it back if somebody waits for it.
    fn put(&self, sending: BoxFuture<'static, bool>) -> Option<BoxFuture<'static, bool>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.wanted {
            return Some(sending);
        }
        state.sending = Some(sending);
        None
    }

    fn give_a_task(&self, sending: BoxFuture<'static, bool>) {
        spawn_at(&self.home, async {
            sending.await;
        });
    }
}

/// In the caller's task: sends its call. If the caller goes away, a task goes on: what was sent has
/// to be known to have ended before the next call with that key is.
///
/// Answers whether this very poll has left others to a task, which may wait for this thread. That
/// of a sending that has a task by now is not awaited.
pub(super) struct Led(Arc<Slot>);

impl Led {
    pub(super) fn new(slot: Arc<Slot>, sending: BoxFuture<'static, bool>) -> Self {
        if let Some(sending) = slot.put(sending) {
            slot.give_a_task(sending);
        }
        Self(slot)
    }
}

impl Future for Led {
    type Output = bool;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<bool> {
        // Out of its place, so that one that panics is not polled again.
        let Some(mut sending) = self.0.take() else { return Poll::Pending };
        let polled = sending.as_mut().poll(context);
        if polled.is_pending()
            && let Some(sending) = self.0.put(sending)
        {
            self.0.give_a_task(sending);
        }
        polled
    }
}

impl Drop for Led {
    fn drop(&mut self) {
        if let Some(sending) = self.0.take() {
            self.0.give_a_task(sending);
        }
    }
}
