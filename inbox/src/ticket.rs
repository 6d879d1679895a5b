//! [`Ticket`]: the mark of a redelivery, which is private to the inbox, and how it reports back.

use std::sync::Arc;

use tokio::sync::watch;

use crate::decide::End;
use crate::row::TakenRow;

/// What a redelivery has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// No layer of this inbox.
    Nothing,
    /// Its layer, which runs it.
    Reached,
    Ended(End),
    /// A layer that does not enforce its verdicts now, and has called nothing.
    NotEnforced,
    /// A layer that has called nothing, because the row is not its own. The text says why.
    Misrouted(&'static str),
}

/// An extension of a redelivered request. No request from outside can have it.
#[derive(Debug, Clone)]
pub(crate) struct Ticket(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Names the inbox of the row.
    inbox: usize,
    namespace: String,
    keys: String,
    verified: Option<String>,
    report: watch::Sender<Report>,
}

impl Ticket {
    pub(crate) fn new(inbox: usize, row: &TakenRow) -> (Self, watch::Receiver<Report>) {
        let (report, reported) = watch::channel(Report::Nothing);
        let (namespace, keys) = (row.namespace.clone(), row.keys.clone());
        let inner = Inner { inbox, namespace, keys, verified: row.verified.clone(), report };
        (Self(Arc::new(inner)), reported)
    }

    /// Returns `true` if the row was stored after this verification.
    pub(crate) fn was_verified_by(&self, name: &str) -> bool {
        self.0.verified.as_deref() == Some(name)
    }

    /// Returns `true` if this layer has stored the row, or would.
    pub(crate) fn is_of(&self, inbox: usize, namespace: &str, keys: &str) -> bool {
        self.0.inbox == inbox && self.0.namespace == namespace && self.0.keys == keys
    }

    pub(crate) fn report(&self, report: Report) {
        self.0.report.send_replace(report);
    }

    /// Reports that the layer runs the event. It has ended when the returned guard is dropped.
    pub(crate) fn reached(&self) -> Running {
        self.report(Report::Reached);
        Running { ticket: self.clone(), end: End::Dropped }
    }
}

/// Reports the end of a run when it is dropped.
pub(crate) struct Running {
    ticket: Ticket,
    pub(crate) end: End,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ticket.report(Report::Ended(self.end));
    }
}
