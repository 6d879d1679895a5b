//! [`OwnCompletion`]: the completion of a store of this crate.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::stored::{Fetch, StoredResponse};
use super::terms::{CallTerms, KeyedTerms};
use crate::key::{DedupKey, List, hex};

/// A completion of a store of this crate.
#[derive(Clone)]
pub(crate) struct OwnCompletion {
    /// Their terms are equal, except for the payload.
    pub(crate) events: List<KeyedTerms>,
    pub(crate) within: Within,
    pub(crate) database: OwnDatabase,
    /// Returns a row if this transaction has completed the events. It takes the same parameter.
    pub(crate) check: Arc<str>,
    /// Returns the parameter.
    pub(super) make_parameter: fn(&Self) -> String,
}

impl OwnCompletion {
    /// Makes the completion of these keys, in a transaction that has written before.
    pub(super) fn new(
        keys: &[(&DedupKey, &CallTerms)],
        database: OwnDatabase,
        check: &Arc<str>,
        make_parameter: fn(&Self) -> String,
    ) -> Self {
        let event = |(key, terms): &(&DedupKey, &CallTerms)| KeyedTerms {
            key: (*key).clone(),
            terms: Box::new((*terms).clone()),
        };
        let (events, check) = (keys.iter().map(event).collect(), Arc::clone(check));
        Self { events, within: Within::Written, database, check, make_parameter }
    }

    /// Returns the terms of its events; `None` without an event.
    pub(super) fn terms(&self) -> Option<&CallTerms> {
        self.events.first().map(|event| &*event.terms)
    }

    /// Returns the mark of a transaction that this crate begins: the token in hex. Nobody reads it
    /// without an event.
    pub(super) fn mark(&self) -> String {
        self.terms().map(|terms| hex(terms.token().as_bytes())).unwrap_or_default()
    }

    /// Returns the text of a JSON object: the events as `event` names each with the hex digits of
    /// its payload's SHA-256, their terms, and the response that is stored with all of them. Bytes
    /// are in hex. `idle_ms` bounds an idle transaction that this crate has not begun.
    pub(super) fn json(
        &self,
        idle_ms: Option<i32>,
        event: impl Fn(&DedupKey, Option<String>) -> Value,
    ) -> String {
        let terms = self.terms();
        let retention_ms = terms.map_or(0, CallTerms::retention_ms);
        let events = self.events.iter();
        let events = events.map(|KeyedTerms { key, terms }| {
            event(key, terms.payload_sha256().map(|sha256| hex(&sha256)))
        });
        let response = terms.and_then(CallTerms::response);
        let awaits =
            terms.filter(|terms| terms.fetch() == Fetch::DigestAndResponse && response.is_none());
        let is_marked = self.within == Within::Marked;
        json!({
            "token": terms.map(|terms| hex(terms.token().as_bytes())),
            "mark": is_marked.then(|| self.mark()),
            // The mark shows the transaction, whatever was written before.
            "first": self.within != Within::Written,
            // The layer adds the response to the complete row. Until then the event is in flight
            // for its duplicates, for a lease at most: the lease of the claim may be over.
            "lease_ms": awaits.map(|terms| terms.lease_ms().min(retention_ms)),
            "retention_ms": retention_ms,
            // A marked transaction has the bound from its beginning.
            "idle_ms": idle_ms.filter(|_| !is_marked),
            "events": events.collect::<Vec<_>>(),
            "status": response.map(|response| response.status.as_u16()),
            "headers": response.map(StoredResponse::headers_json),
            "body": response.map(|response| hex(&response.body)),
        })
        .to_string()
    }
}

/// The transaction in which a completion is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Within {
    /// A transaction that has written before, where the database can tell.
    Written,
    /// A transaction that may have written nothing.
    Any,
    /// A transaction that this crate has begun and marked.
    Marked,
}

/// What only the stores of one database know of a completion.
#[derive(Clone)]
pub(crate) enum OwnDatabase {
    #[cfg(feature = "postgres")]
    Postgres {
        /// A faster statement for one event with which nothing is stored. It refuses by writing no
        /// row.
        lean: Arc<str>,
        /// The generation of the plans, on connections of sqlx.
        generation: Option<u32>,
        /// How long a transaction may be idle, if the crate bounds it.
        idle: Option<Duration>,
    },
    #[cfg(feature = "sqlite")]
    Sqlite {
        /// How long a transaction waits for those before it.
        write_lock_timeout: Duration,
    },
}
