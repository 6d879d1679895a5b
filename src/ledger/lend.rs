//! To whom a delivery's transaction is lent: one at a time, and to one copy of the request.
//!
//! A layer inside this one that runs the handler again, such as a retry, clones the request, and
//! its extensions with it. Both runs would write in the one transaction, and their effects would
//! commit together. So the transaction is lent to the copy that took it first.
//!
//! 1. A handle's clones have numbers of their own, and so have those in the copies of a request.
//! 2. A handler may clone its handle too. Whether the *request* was copied is known from
//!    [`CopyMark`], which nobody but the request's extensions holds. Where it was not, any clone of
//!    the handle may have the transaction.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Why a transaction cannot be lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TxUnavailable {
    /// There is none: the ledger is not transactional, or over another database, or the request
    /// was not deduplicated.
    Absent,
    /// Somebody else has it: there is one.
    Lent,
    /// Another copy of the request has had it: a layer inside the deduplicating one runs the
    /// handler again, and what its earlier run wrote would commit as well.
    Copied,
    /// The delivery has ended, and its transaction with it.
    Closed,
}

impl fmt::Display for TxUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "there is no transaction over this database",
            Self::Lent => "the delivery's transaction is lent already",
            Self::Copied => "another copy of the request has had the delivery's transaction",
            Self::Closed => "the delivery's transaction has ended",
        })
    }
}

impl std::error::Error for TxUnavailable {}

/// What all handles to one transaction share.
#[derive(Default)]
struct Shared {
    is_copied: AtomicBool,
    /// The number of the next clone.
    next: AtomicU64,
    /// The number of the handle that has had the transaction first.
    holder: OnceLock<u64>,
}

/// A handle's number.
pub(super) struct Borrower {
    shared: Arc<Shared>,
    number: u64,
}

/// Stays in the request's extensions, and so is cloned with the request only.
pub(super) struct CopyMark(Arc<Shared>);

impl Borrower {
    /// The first handle, and the mark of its request.
    pub(super) fn with_mark() -> (Self, CopyMark) {
        let shared = Arc::<Shared>::default();
        (Self::of(Arc::clone(&shared)), CopyMark(shared))
    }

    fn of(shared: Arc<Shared>) -> Self {
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        Self { shared, number }
    }

    /// Fails if another copy of the request has had the transaction. The caller holds the transaction.
    pub(super) fn may_have_it(&self) -> Result<(), TxUnavailable> {
        let holder = self.shared.holder.get_or_init(|| self.number);
        if *holder != self.number && self.shared.is_copied.load(Ordering::Acquire) {
            return Err(TxUnavailable::Copied);
        }
        Ok(())
    }
}

impl Clone for Borrower {
    fn clone(&self) -> Self {
        Self::of(Arc::clone(&self.shared))
    }
}

impl Clone for CopyMark {
    fn clone(&self) -> Self {
        self.0.is_copied.store(true, Ordering::Release);
        Self(Arc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_clone_of_a_handle_may_have_it_while_the_request_is_not_copied() {
        let (first, _mark) = Borrower::with_mark();
        let second = first.clone();
        assert_eq!(first.may_have_it(), Ok(()));
        assert_eq!(second.may_have_it(), Ok(()));
    }

    #[test]
    fn only_the_copy_that_had_it_first_may_have_it_again() {
        let (first, mark) = Borrower::with_mark();
        let (second, _copy) = (first.clone(), mark.clone());
        assert_eq!(second.may_have_it(), Ok(()));
        assert_eq!(first.may_have_it(), Err(TxUnavailable::Copied));
        assert_eq!(second.may_have_it(), Ok(()));
    }
}
