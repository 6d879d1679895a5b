//! [`OpenDelivery`]: ends the transaction of a delivery.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Database;

use super::super::call::bounded;
use super::super::contract::HandlerSuccess;
use super::super::resolve::identities;
use crate::adapter::{CallTerms, OpenTransaction, TransactionAdapter};
use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;
use crate::observe;

/// The claim of a delivery whose transaction is open, without the transaction; or a request without a
/// key that may open one.
pub(super) struct OpenDelivery<DB: Database> {
    pub(super) adapter: Arc<dyn TransactionAdapter<Database = DB>>,
    /// `None` without a key.
    pub(super) delivery: Option<Delivery>,
    /// The keys to complete, sorted.
    pub(super) keys: Vec<DedupKey>,
    pub(super) terms: CallTerms,
    pub(super) store_timeout: Duration,
}

impl<DB: Database> OpenDelivery<DB> {
    /// Opens a transaction without a key.
    pub(super) async fn open(&self) -> Result<OpenTransaction<DB>, Error> {
        let bound = self.store_timeout.saturating_add(self.adapter.open_timeout());
        let open = || self.adapter.open(&self.keys, &self.terms);
        let opened = bounded(&["begin", "opening a transaction"], bound, open).await?;
        opened.transaction.ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "opening a transaction: the adapter opened none")
        })
    }

    pub(super) async fn savepoint(
        &self,
        transaction: &mut OpenTransaction<DB>,
        savepoint: u32,
        replaces: Option<u32>,
    ) -> Result<(), Error> {
        bounded(&["savepoint", "setting a savepoint"], self.store_timeout, || {
            self.adapter.savepoint(transaction, savepoint, replaces)
        })
        .await
    }

    pub(super) async fn commit(
        &self,
        transaction: OpenTransaction<DB>,
        marks: &Savepoints,
        success: &HandlerSuccess,
    ) -> Result<(), Error> {
        let commit = || Box::pin(self.commit_all(transaction, marks, success)) as _;
        bounded(&["commit", "committing the handler's transaction"], self.store_timeout, commit)
            .await
    }

    async fn commit_all(
        &self,
        mut transaction: OpenTransaction<DB>,
        marks: &Savepoints,
        success: &HandlerSuccess,
    ) -> Result<(), Error> {
        if marks.sent > 0 {
            // Fails in a transaction that the handler has broken, while the marked events can still
            // be committed.
            let probe = self.adapter.savepoint(&mut transaction, marks.sent + 1, None);
            if let Err(error) = probe.await {
                if let Err(error) = self.commit_marked(transaction, marks).await {
                    self.report_marks(&error);
                }
                return Err(error);
            }
        }
        let with_response = success.terms(&self.terms);
        let terms = with_response.as_ref().unwrap_or(&self.terms);
        self.adapter.commit(transaction, &self.keys, terms).await
    }

    pub(super) async fn rollback(
        &self,
        transaction: OpenTransaction<DB>,
        marks: &Savepoints,
    ) -> Result<(), Error> {
        let end = || Box::pin(self.commit_marked(transaction, marks)) as _;
        let ended = bounded(
            &["rollback", "rolling the handler's transaction back"],
            self.store_timeout,
            end,
        )
        .await;
        if let (Err(error), true) = (&ended, marks.sent > 0) {
            self.report_marks(error);
        }
        ended
    }

    fn report_marks(&self, error: &Error) {
        if let Some(delivery) = &self.delivery {
            observe::marks_not_committed(delivery.key(), error);
        }
    }

    /// Rolls back to the last savepoint, and commits the earlier writes. Without a savepoint, rolls
    /// everything back.
    async fn commit_marked(
        &self,
        mut transaction: OpenTransaction<DB>,
        marks: &Savepoints,
    ) -> Result<(), Error> {
        let (done, rest) = match self.rollback_to_savepoint(&mut transaction, marks).await {
            Ok(Some(savepoint)) => self.keys_by(savepoint, marks),
            Ok(None) => return self.adapter.rollback(transaction).await,
            Err(error) => {
                let _ = self.adapter.rollback(transaction).await;
                return Err(error);
            }
        };
        if !rest.is_empty()
            && let Err(error) = self.adapter.release_in(&mut transaction, &rest, &self.terms).await
        {
            let _ = self.adapter.rollback(transaction).await;
            return Err(error);
        }
        self.adapter.commit(transaction, &done, &self.terms).await
    }

    /// Rolls back to the last savepoint that exists. Returns `None` if there is none.
    async fn rollback_to_savepoint(
        &self,
        transaction: &mut OpenTransaction<DB>,
        marks: &Savepoints,
    ) -> Result<Option<u32>, Error> {
        for savepoint in (marks.confirmed.max(1)..=marks.sent).rev() {
            if self.adapter.rollback_to(transaction, savepoint).await? {
                return Ok(Some(savepoint));
            }
        }
        Ok(None)
    }

    /// Returns the keys to complete with this savepoint, with all identities of their events, and the
    /// other keys.
    fn keys_by(&self, savepoint: u32, marks: &Savepoints) -> (Vec<DedupKey>, Vec<DedupKey>) {
        let done: HashSet<&DedupKey> = marks.keys_by(savepoint).collect();
        let events = self.delivery.iter().flat_map(Delivery::events);
        let undone = events.filter(|event| !done.contains(event.key()));
        let rest = identities(undone);
        let done = self.keys.iter().filter(|key| rest.binary_search(key).is_err());
        (done.cloned().collect(), rest)
    }
}

/// The savepoints of a transaction, and the keys that were marked as done.
#[derive(Default)]
pub(super) struct Savepoints {
    /// Each key with its savepoint.
    keys: Vec<(DedupKey, u32)>,
    /// The number of the last savepoint that was sent; 0 is none.
    sent: u32,
    /// The number of the last savepoint that the database has confirmed; 0 is none.
    confirmed: u32,
}

impl Savepoints {
    /// Returns the next savepoint, which marks this key, and the savepoint that it replaces.
    ///
    /// A savepoint of unknown outcome is not replaced, because releasing a missing one aborts the
    /// transaction.
    pub(super) fn send(&mut self, key: &DedupKey) -> (u32, Option<u32>) {
        let replaces =
            (self.confirmed == self.sent && self.confirmed > 0).then_some(self.confirmed);
        self.sent += 1;
        self.keys.push((key.clone(), self.sent));
        (self.sent, replaces)
    }

    /// Notes the reply to a savepoint that was sent.
    pub(super) fn replied(&mut self, savepoint: u32, reply: &Result<(), Error>) {
        match reply {
            Ok(()) => self.confirmed = savepoint,
            Err(error) if error.kind() == ErrorKind::Transaction => {
                self.sent = savepoint - 1;
                self.keys.retain(|(_, by)| *by < savepoint);
            }
            Err(_unknown) => {}
        }
    }

    fn keys_by(&self, savepoint: u32) -> impl Iterator<Item = &DedupKey> {
        self.keys.iter().filter(move |(_, by)| *by <= savepoint).map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> DedupKey {
        DedupKey::new("test", id).unwrap()
    }

    fn ids(marks: &Savepoints, savepoint: u32) -> Vec<&str> {
        marks.keys_by(savepoint).map(DedupKey::id).collect()
    }

    #[test]
    fn savepoint_of_unknown_outcome_is_not_replaced() {
        let mut marks = Savepoints::default();
        assert_eq!(marks.send(&key("a")), (1, None));
        marks.replied(1, &Ok(()));
        assert_eq!(marks.send(&key("b")), (2, Some(1)));
        marks.replied(2, &Err(Error::new(ErrorKind::Unavailable, "no reply")));
        assert_eq!(marks.send(&key("c")), (3, None));
        assert_eq!((marks.confirmed, marks.sent), (1, 3));
        assert_eq!((ids(&marks, 1), ids(&marks, 3)), (vec!["a"], vec!["a", "b", "c"]));
    }

    #[test]
    fn refused_savepoint_marks_no_key() {
        let mut marks = Savepoints::default();
        for (id, savepoint) in [("a", 1), ("b", 2)] {
            assert_eq!(marks.send(&key(id)).0, savepoint);
            marks.replied(savepoint, &Ok(()));
        }
        assert_eq!(marks.send(&key("c")), (3, Some(2)));
        marks.replied(3, &Err(Error::new(ErrorKind::Transaction, "refused")));
        assert_eq!((marks.confirmed, marks.sent), (2, 2));
        assert_eq!(ids(&marks, u32::MAX), ["a", "b"]);
        assert_eq!(marks.send(&key("d")), (3, Some(2)));
    }
}
