//! How the calls of a batch are executed. All that write run under the write lock.
//!
//! The caller reads first, on the connections that only read, so that duplicates wait for no writer.
//! Only keys that are not known are written.

use std::sync::Arc;

use super::super::sql::batch::{Failed, RowExecutor, execute_batch};
use super::super::sql::call::{Call, Kind, Replied, RowCall, RowReply};
use super::super::sql::queue::{BatchExecutor, Waits};
use super::super::sql::row::Row;
use super::super::stored::Fetch;
use super::super::terms::CallTerms;
use super::errors::{is_row_error, store_error};
use super::session::Session;
use super::store::{Lookup, SqliteStore, WriteGuard, acquire};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

impl BatchExecutor<Lookup> for SqliteStore {
    type SendGuard = ();

    async fn send_guard(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn execute(
        &self,
        (): (),
        batch: Vec<Lookup>,
        _: &Waits<'_>,
    ) -> Vec<Result<Option<Row>, Error>> {
        let fetch = batch.first().map_or(Fetch::Nothing, |(_, fetch)| *fetch);
        let keys: Vec<&DedupKey> = batch.iter().map(|(key, _)| key).collect();
        match self.read(&keys, fetch).await {
            Ok(rows) => rows.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(store_error("looking up keys", error)); batch.len()],
        }
    }
}

impl SqliteStore {
    pub(super) async fn submit(
        self: &Arc<Self>,
        kind: Kind,
        key: &DedupKey,
        terms: &CallTerms,
    ) -> Result<RowReply, Error> {
        self.calls.submit(self, Call::new(kind, key, terms, |_| 0)).await
    }
}

impl BatchExecutor<Call> for SqliteStore {
    type SendGuard = WriteGuard;

    async fn send_guard(&self) -> Result<WriteGuard, Error> {
        // A lane has the lock before it takes a batch: a write is executed only for a caller that still
        // waits, and a release that follows needs the lock too. So it is a fence. The same with a second lane
        // beside a late batch.
        // After an error nothing was sent to the file.
        self.write_lock(ErrorKind::Refused).await
    }

    async fn execute(
        &self,
        _guard: WriteGuard,
        batch: Vec<Call>,
        waits: &Waits<'_>,
    ) -> Vec<Result<RowReply, Error>> {
        execute_batch(&mut &*self, &batch, waits).await
    }
}

/// The caller holds the write lock.
impl RowExecutor for &SqliteStore {
    /// If it is dropped, the statement runs to its end on the connection's own thread, and its outcome is unknown.
    async fn execute(
        &mut self,
        kind: Kind,
        rows: &[RowCall<'_>],
    ) -> (Vec<Replied>, Option<Failed>) {
        let mut has_written = false;
        let executed = async {
            let connection = &mut *acquire(&self.writer).await?;
            let mut session = Session { connection, statements: &self.statements };
            session.execute(kind, rows, &mut has_written).await
        };
        let error = match executed.await {
            Ok(replies) => return (replies, None),
            Err(error) => error,
        };
        let is_row_error = is_row_error(&error);
        let error = store_error(kind.context(), error);
        let error = if has_written { error.with_unknown_outcome() } else { error };
        (rows.iter().map(|_| None).collect(), Some(Failed { error, is_row_error }))
    }
}
