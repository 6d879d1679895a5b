//! Log records and metrics: one `tracing` event for every delivery, and counters.
//!
//! # Log records
//!
//! The target is `tower_dedup`. Every delivery ends in exactly one record with the message
//! `delivery`. The record has these fields, as far as they are known:
//!
//! | field | meaning |
//! |---|---|
//! | `outcome` | see below |
//! | `namespace`, `id` | the first key; `id` is the first 16 hex digits of its SHA-256, or the id itself by choice ([`LogIds`](crate::LogIds)) |
//! | `keys` | the number of events in the delivery (each event has one key, and one second identity at most) |
//! | `attempt`, `takeover` | of a run: see [`Delivery`](crate::Delivery) |
//! | `age_ms` | of a duplicate: the time since the event was first seen |
//! | `status` | the status of the response |
//! | `duration_ms` | the time from the head of the request to the head of the response |
//! | `error` | the internal error, which the client never sees |
//!
//! | `outcome` | level | meaning |
//! |---|---|---|
//! | `completed` | info | the handler succeeded; the key is complete |
//! | `failed` | info | the handler failed; the key is free for the retry (on arrival: the event is lost) |
//! | `handler_timeout` | warn | the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped; the key is free for the retry (on arrival: the event is lost) |
//! | `panicked` | error | the handler panicked; the key is free for the retry (on arrival: the event is lost) |
//! | `uncommitted` | error | the handler succeeded, but the ledger could not commit |
//! | `partial` | info | a multi-event delivery: the new events are complete; other deliveries still run the rest |
//! | `duplicate` | info | every event is complete; the handler did not run |
//! | `in_flight` | info | another delivery runs the event, or may run it; the handler did not run |
//! | `mismatch` | warn | the id is complete with another payload, and the layer [compares](crate::DedupLayer::compare_payload) payloads |
//! | `broken_response` | error | the body of a response to be stored ended in an error; the key is free for the retry |
//! | `unavailable` | warn | the store did not reply in time, or returned an error |
//! | `overloaded` | warn | `max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended |
//! | `invalid_key` | warn | the key is missing or malformed, or there are too many keys |
//! | `too_large`, `broken_body`, `slow_body` | warn | the request body could not be read to its end |
//! | `unverified` | error | the marker `Verified` is missing: the layers are in the wrong order |
//! | `unscoped` | error | a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside has set it |
//! | `bypass` | debug | a handshake, a missing key that passes through, or a delivery that an outer layer already runs. Under a transactional ledger, the record of the first two comes after the handler, and `uncommitted`, `panicked` and `handler_timeout` apply to them too |
//!
//! Other records, with the same target. A record about one event names it by the hash of its id:
//!
//! | message begins with | level | meaning |
//! |---|---|---|
//! | `lease lost` | warn | another handler may have run this event too |
//! | `takeover` | warn | an earlier handler of this event died or lost its lease |
//! | `rerun` | info | the handler runs because an operator [allowed](crate::adapter::MaintenanceAdapter::allow_rerun) it; the row of the event says who and why |
//! | `running unprotected` | warn | the handler runs although the store did not reply |
//! | `handled on another path` | error, once a minute at most | a duplicate came on a path on which its event was not handled |
//! | `nested layers` | warn, once | an outer layer uses the same keys |
//! | `unsigned id` | warn, once a layer | [`require_verified`](crate::DedupLayer::require_verified) is set, the sender does not sign the id, and there is no [second identity](crate::guide::keys#an-id-that-is-not-signed) |
//! | `not verified` | warn | a [`VerifyLayer`](crate::verify::VerifyLayer) refused the request; `reason` says why |
//! | `payload mismatch` | warn | the event was handled with another payload |
//! | `response not stored` | warn | duplicates of this event get an empty response |
//! | `completed in the background` | info | a store call succeeded after its delivery had ended |
//! | `gave up in the background` | error | such a call never succeeded |
//! | `gave up at once` | error | such a call was not started: too many are pending, or the runtime has ended |
//! | `a handler panicked after its client had gone` | error | no caller is left that the panic could reach |
//! | `the events that the handler marked` | warn | a handler failed after [`mark_done`](crate::Delivery::mark_done), and the outcome of the COMMIT of its marked events is unknown |
//! | `the retention is shorter` | warn | a layer is built, and the retention is below the preset's floor |
//! | `the body limit is smaller` | warn | a layer is built, and its body limit is below the sender's largest body |
//! | `purged` | debug | expired keys were deleted |
//! | `purging failed` | warn | a round of a purge failed, and the round before it did not |
//! | `purging failed` | debug | a further round failed |
//! | `purging does not succeed` | warn, once until a round succeeds | no round has succeeded for three intervals |
//! | `purging is not permitted` | warn, once | the role of a `PostgresAdapter` may not delete rows |
//! | `not encrypted` | warn, once | a `PostgresAdapter` is connected to another host without TLS |
//! | `nearly full` | warn, once an hour at most | a `MemoryAdapter` has reached four fifths of its capacity |
//! | `evicted` | warn, once a minute at most | a full `MemoryAdapter` has forgotten `keys` live keys; `age_s` is the age of the youngest |
//! | `rejected` | warn | an argument of a handler, `Delivery` or `DedupTx`, is not available; `fix` says what to change |
//! | `could not terminate the session` | warn | Postgres: the server may hold the key of a lost transaction until its own keepalive ends the session |
//! | `the SQLite file was deleted or replaced` | error | every call is refused until the file is back |
//! | `the SQLite file is back` | warn | calls are no longer refused |
//! | `the table of the SQLite store is gone` | warn | the table is made again, without its keys |
//! | `the SQLite pool runs below` | warn | `synchronous` is below `FULL`: a power cut can lose a completed key |
//! | `the SQLite file is not in WAL mode` | warn | duplicates wait for writers |
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade:
//!
//! | name | kind | labels | meaning |
//! |---|---|---|---|
//! | `tower_dedup_deliveries_total` | counter | `namespace`, `outcome` | deliveries by outcome, as above |
//! | `tower_dedup_running` | gauge | `namespace` | deliveries that have begun and not ended |
//! | `tower_dedup_delivery_duration_seconds` | histogram | `namespace`, `outcome` | the time from the head of the request to the head of the response |
//! | `tower_dedup_store_duration_seconds` | histogram | `operation`, `result` | store calls: `claim`, `renew`, `complete`, `release`; in transactions `begin`, `release_in`, `savepoint`, `commit`, `rollback`. `result` is `ok` or the kind of the error |
//! | `tower_dedup_takeovers_total` | counter | `namespace` | runs after another lease lapsed |
//! | `tower_dedup_reruns_total` | counter | `namespace` | events that ran because an operator allowed it |
//! | `tower_dedup_leases_lost_total` | counter | `namespace` | handlers that lost their lease |
//! | `tower_dedup_unprotected_total` | counter | `namespace` | handlers that ran although the store did not reply |
//! | `tower_dedup_other_path_total` | counter | `namespace` | duplicates that came on another path than their event |
//! | `tower_dedup_mismatches_total` | counter | `namespace` | events that came again with another payload |
//! | `tower_dedup_responses_not_stored_total` | counter | `namespace` | responses that were to be stored and cannot be |
//! | `tower_dedup_background_total` | counter | `operation`, `result` | store calls that ended after their delivery; `result` is `ok`, `gave_up` or `refused` |
//! | `tower_dedup_purged_total` | counter | | expired keys that were deleted |
//! | `tower_dedup_evicted_total` | counter | | live keys that a full `MemoryAdapter` has forgotten |

/// Logs a record that names an event by its namespace and the hash of its id.
macro_rules! log {
    ($level:ident, $key:expr, $($fields:tt)+) => {
        tracing::event!(
            target: "tower_dedup",
            tracing::Level::$level,
            namespace = $key.namespace(),
            id = $key.log_id(),
            $($fields)+
        )
    };
}

mod background;
mod delivery;
mod error_text;
mod event;
#[cfg(feature = "memory")]
mod memory;
mod meters;
mod outcome;
#[cfg(feature = "postgres")]
mod postgres;
mod purge;
mod settings;
mod store;

pub(crate) use background::{Background, background, orphaned_panic};
pub(crate) use delivery::Report;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use event::marks_not_committed;
pub(crate) use event::{lease_lost, mismatch, rerun, response_not_stored, takeover, unprotected};
#[cfg(feature = "memory")]
pub(crate) use memory::{evicted, evicting, nearly_full};
pub(crate) use meters::Meters;
pub(crate) use outcome::Outcome;
#[cfg(feature = "postgres")]
pub(crate) use postgres::{not_encrypted, session_not_terminated};
#[cfg(feature = "postgres")]
pub(crate) use purge::purge_not_permitted;
pub(crate) use purge::{purge_failed, purge_stuck, purged};
#[cfg(feature = "verify")]
pub(crate) use settings::not_verified;
#[cfg(feature = "axum")]
pub(crate) use settings::rejected;
pub(crate) use settings::{short_retention, small_body_limit, unsigned_id};
pub(crate) use store::store_call;
