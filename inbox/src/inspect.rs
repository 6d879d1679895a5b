//! What operators see of the table, and do to it.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::row::Parked;

/// How many rows of a namespace wait, and how many are parked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Count {
    /// The service that has stored them.
    pub service: String,
    /// Their namespace.
    pub namespace: String,
    /// Why they are parked; `None` for rows that wait or run.
    pub parked: Option<Parked>,
    /// How many.
    pub rows: u64,
    /// The bytes of their headers and bodies.
    pub bytes: u64,
    /// How long ago the oldest of them was received, or received again.
    pub oldest: Duration,
}

/// Which rows an operator means. The default is all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Selection {
    /// The row of this number alone.
    pub seq: Option<i64>,
    /// Rows of this service.
    pub service: Option<String>,
    /// Rows of this namespace.
    pub namespace: Option<String>,
    /// Rows with an event of this id.
    pub id: Option<String>,
    /// Parked rows only, or those that are parked for this reason.
    pub parked: Option<Option<Parked>>,
    /// Rows that were received at this time or before, and not again since.
    pub received_until: Option<SystemTime>,
}

impl Selection {
    /// Returns the reason, as the statements of every database take it.
    pub(crate) fn parked_text(&self) -> Option<&'static str> {
        self.parked.map(|reason| reason.map_or("any", Parked::as_str))
    }
}

/// A row, for an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownRow {
    /// Its number.
    pub seq: i64,
    /// The service that has stored it.
    pub service: String,
    /// The namespace of its layer.
    pub namespace: String,
    /// Namespace and id of each identity of its events.
    pub keys: Vec<(String, String)>,
    /// The type of the first event.
    pub event_type: Option<String>,
    /// When it was received, or received again.
    pub received: SystemTime,
    /// When it runs next, or when the turn of its run ends; `None` if it is parked.
    pub due: Option<SystemTime>,
    /// A process runs it, or did when it died.
    pub is_running: bool,
    /// Why it is parked.
    pub parked: Option<Parked>,
    /// How often its handler has ended without success, deaths included.
    pub attempts: u32,
    /// How often its process has died, or lost its turn.
    pub deaths: u32,
    /// The sender has got a 2xx for it.
    pub answered: bool,
    /// The method of the request.
    pub method: String,
    /// The target of the request, as the sender has sent it.
    pub target: String,
    /// The name of the verification that the request has passed.
    pub verified: Option<String>,
    /// What the last run answered.
    pub last: Option<String>,
    /// The size of the body, in bytes.
    pub body_bytes: u64,
}

/// The request of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShownRequest {
    /// The headers that are stored, a line each.
    pub headers: String,
    /// The body.
    pub body: Bytes,
}
