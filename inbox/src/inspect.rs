//! The data of the table for operators, and the selection of rows.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::row::Parked;

/// How many rows of a namespace wait, and how many are parked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Count {
    /// The service that has stored the rows.
    pub service: String,
    /// The namespace of the rows.
    pub namespace: String,
    /// Why the rows are parked; `None` for rows that wait or run.
    pub parked: Option<Parked>,
    /// How many rows there are.
    pub rows: u64,
    /// The bytes of their headers and bodies.
    pub bytes: u64,
    /// How long ago the oldest of them was received, or received again.
    pub oldest: Duration,
}

/// Selects rows. The default selects every row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Selection {
    /// Only the row of this number.
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
    /// The number of the row.
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
    /// `true` if a process runs the row, or ran it when the process died.
    pub is_running: bool,
    /// Why it is parked.
    pub parked: Option<Parked>,
    /// How often its handler has ended without success, deaths included.
    pub attempts: u32,
    /// How often its process has died, or lost its turn.
    pub deaths: u32,
    /// `true` if the sender has got a 2xx for it.
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
    /// The stored headers, one on each line.
    pub headers: String,
    /// The body.
    pub body: Bytes,
}
