//! Log records, metrics and spans: one `tracing` event for every delivery, and counters.
//!
//! A run of a [`Deduplicator`](crate::Deduplicator) is a delivery too: it has the same records, metrics
//! and spans. Its namespace is that of its key.
//!
//! # Log records
//!
//! The target is `tower_dedup`. Every delivery ends in exactly one record with the message
//! `delivery`. The record has these fields, as far as they are known:
//!
//! | field | meaning |
//! |---|---|
//! | `outcome` | see below |
//! | `namespace`, `id` | the first key; `id` is the id itself with control characters escaped, or the first 16 hex digits of its SHA-256 ([`LogIds`](crate::LogIds)) |
//! | `event_type` | the type of the first event, as the sender names it |
//! | `keys` | the number of events in the delivery (each event has one key, and one second identity at most) |
//! | `attempt`, `takeover` | of a run: see [`Delivery`](crate::Delivery) |
//! | `age_ms` | of a duplicate: the time since the event was first seen |
//! | `mode`, `verdict` | in [shadow](crate::Mode::Shadow): `shadow`, and the [verdict](crate::Verdict); `outcome` says how the handler ended. The level is warn at least if the verdict is `no_key`, `unavailable`, `overloaded` or `unverified` |
//! | `payload` | in shadow: the first 16 hex digits of the SHA-256 of the body, or of the part that [`compare_payload`](crate::DedupLayer::compare_payload) names |
//! | `status` | the status of the response; a run of a `Deduplicator` has none |
//! | `duration_ms` | the time from the head of the request to the head of the response, or of the run |
//! | `error` | the internal error, which the client never sees |
//!
//! | `outcome` | level | meaning |
//! |---|---|---|
//! | `completed` | info | the handler succeeded; the key is complete |
//! | `failed` | info; warn for a preset whose sender does not [retry](crate::provider::Preset::retries) after a response | the handler failed; the key is free for the retry (on arrival: the event is lost). Without a retry, the event is lost unless somebody sends it again |
//! | `handler_timeout` | warn | the handler ran for longer than [`handler_timeout`](crate::DedupLayer::handler_timeout) and was dropped; the key is free for the retry (on arrival: the event is lost) |
//! | `panicked` | error | the handler panicked; the key is free for the retry (on arrival: the event is lost) |
//! | `uncommitted` | error | the handler succeeded, but the ledger could not commit |
//! | `duplicate` | info | every event is complete; the handler did not run |
//! | `in_flight` | info | another delivery runs an event, or may run it. Without `attempt`, the handler did not run; with it, the handler ran, and the events that it ran are complete |
//! | `mismatch` | warn | the id is complete with another payload, and the layer [compares](crate::DedupLayer::compare_payload) payloads |
//! | `broken_response` | error | the body of a response to be stored ended in an error; the key is free for the retry |
//! | `unavailable` | warn | the store did not reply in time, or returned an error |
//! | `overloaded` | warn | `max_running` or `max_waiting` was reached, or the inner service was not ready when the wait ended |
//! | `invalid_key` | warn | the key is missing or malformed, or there are too many keys |
//! | `too_large`, `broken_body`, `slow_body` | warn | the request body could not be read to its end |
//! | `unverified` | error | the marker `Verified` is missing: the layers are in the wrong order |
//! | `unscoped` | error | a request with an `Idempotency-Key` has no [scope](crate::DedupLayer::idempotency_key): no layer outside has set it |
//! | `cancelled` | warn | the caller dropped the future of [`Deduplicator::run`](crate::Deduplicator::run) before its end; [its documentation](crate::Deduplicator#cancel-safety) says what happens to the key |
//! | `handshake` | info | the layer answered a [handshake](crate::KeyExtractor::handshake_when), such as GitHub's ping |
//! | `bypass` | debug | a request without an event for the handler, a missing key that passes through, or a delivery that an outer layer already runs. The record of the first two comes after the handler, and `uncommitted`, `panicked`, `handler_timeout` and `overloaded` apply to them too |
//!
//! Other records, with the same target. A record about one event has `namespace` and `id` too:
//!
//! | message begins with | level | meaning |
//! |---|---|---|
//! | `lease lost` | warn | another handler may have run this event too |
//! | `takeover` | warn | an earlier handler of this event died or lost its lease |
//! | `running unprotected` | warn | the handler runs although the store did not reply |
//! | `handled on another path` | error, once a minute at most | a duplicate came on a path on which its event was not handled |
//! | `mode changed` | info | [`set_mode`](crate::DedupHandle::set_mode) was called; `from` and `to` are the modes |
//! | `nested layers` | warn, once | an outer layer uses the same keys |
//! | `unsigned id` | warn, once a layer | [`require_verified`](crate::DedupLayer::require_verified) is set, the sender does not sign the id, and there is no [content identity](crate::guide::keys#an-id-that-is-not-signed) |
//! | `not verified` | warn | a [`VerifyLayer`](crate::verify::VerifyLayer) refused the request; `preset` is the sender, `path` the path of the request, and `reason` says why |
//! | `same body` | warn | the event is a duplicate by its [content identity](crate::KeyExtractor::content_identity) only: a replay under another id, or two events with the same bytes |
//! | `payload mismatch` | warn | the event was handled with another payload |
//! | `response not stored` | warn | duplicates of this event get an empty response |
//! | `completed in the background` | info | a store call succeeded after its delivery had ended |
//! | `gave up in the background` | error | such a call never succeeded, or a release met an error that does not pass by itself; `error` is the last one |
//! | `gave up at once` | error | such a call was not started: too many are pending, or the runtime has ended |
//! | `a handler panicked after its client had gone` | error | no caller is left that the panic could reach |
//! | `the retention is shorter` | warn | a layer is built, and the retention is below the preset's floor |
//! | `the body limit is smaller` | warn | a layer is built, and its body limit is below the sender's largest body |
//! | `purged` | debug | expired keys were deleted |
//! | `purging failed` | warn | a round of a purge failed, and the round before it did not |
//! | `purging failed` | debug | a further round failed |
//! | `not encrypted` | warn, once | a `PostgresAdapter` is connected to another host without TLS |
//! | `the Redis server may not be used` | error | it evicts keys, is too old, or is of another kind than the URL says: every call is refused until it is mended |
//! | `the Redis server hides its eviction policy` | warn, once an adapter | it may evict keys. Its access rules or its service hide the policy: set it to `noeviction` |
//! | `nearly full` | warn, once an hour at most | a `MemoryAdapter` has reached four fifths of its capacity |
//! | `evicted` | warn, once a minute at most | a full `MemoryAdapter` has forgotten `keys` live keys; `age_s` is the age of the youngest |
//! | `rejected` | warn | an argument of a handler, `Delivery` or `DedupTx`, is not available; `fix` says what to change |
//! | `the table of the SQLite store is gone` | warn | the table is made again, without its keys |
//! | `the SQLite pool runs below` | warn | `synchronous` is below `FULL`: a power cut can lose a completed key |
//! | `the SQLite file is not in WAL mode` | warn | duplicates wait for writers |
//! | `the store lost a claim` | error | a handler succeeded, and the row of its claim was gone (`kind` `missing`): another handler may have run this event too |
//! | `the store may have lost acknowledged writes` | warn | Redis is another process or has another history than before (`kind` `suspected`), or has evicted keys (`evicted`). `primary` is the server |
//!
//! Filter the whole subscriber, not each of its layers. With a filter for each layer
//! (`Layer::with_filter`), a record can be lost after sqlx has asked whether its own record is wanted, for
//! example when the Postgres server stops. The cause is
//! [a defect of tracing-subscriber](https://github.com/tokio-rs/tracing/issues/2519).
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade:
//!
#![doc = include_str!("observe/metrics.md")]
//!
//! A gauge counts a delivery or a call exactly once, and until its future ends or is dropped.
//!
//! [`describe_metrics`] gives each metric its unit and its text. [`metrics_buckets`] returns the
//! recommended buckets. Without buckets, the exporter for Prometheus makes summaries, which cannot be
//! added up over processes. The setup, with
//! [metrics-exporter-prometheus](https://docs.rs/metrics-exporter-prometheus) in your `Cargo.toml`:
//!
//! ```
//! # #[cfg(feature = "metrics")] {
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//!
//! let mut builder = PrometheusBuilder::new();
//! for &(name, buckets) in tower_dedup::observe::metrics_buckets() {
//!     builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
//! }
//! let prometheus = builder.install_recorder()?;
//! tower_dedup::observe::describe_metrics();
//! // The response of `GET /metrics`:
//! let text: String = prometheus.render();
//! # assert_eq!(text, "");
//! # }
//! # Ok::<(), tower_dedup::BoxError>(())
//! ```
//!
//! An application that calls `install_recorder` must also call `run_upkeep` of its handle every few
//! seconds, because otherwise the samples of histograms stay in memory until the next scrape.
//!
//! # Spans
//!
//! The target is `tower_dedup`. A span that no subscriber wants costs one atomic load. Without a subscriber,
//! spans are not sent to the `log` crate.
//!
//! | span | level | fields | around |
//! |---|---|---|---|
//! | `delivery` | info | `namespace`, `id`, `outcome`, `attempt`, `mode`, `verdict` | a delivery, from its keys to its end: waiting, store calls and the handler. It goes along into the task of the delivery. Records of the handler are inside it; the record `delivery` has the fields itself and is in the span around it |
//! | `store` | debug | `operation`, `result` | one call to the store, with its wait in the queue |
//!
//! A request that is refused before its keys are known, or that an outer layer runs, has no span `delivery`.
//! `outcome` and `attempt` are set at the end. A background write has a span `store` outside of any
//! `delivery`.
//!
//! [tracing-opentelemetry](https://docs.rs/tracing-opentelemetry) exports these spans, with their names
//! and fields unchanged, as in the example `otel`. To rename them in a collector, use this table. Its names
//! are those of the OpenTelemetry semantic conventions, in which the conventions for databases are stable
//! and those for messaging are in development.
//!
//! | here | OpenTelemetry | remarks |
//! |---|---|---|
//! | span `delivery` | span `process {namespace}` of kind `CONSUMER`, `messaging.operation.type` = `process` | the conventions name a span by its operation and its destination |
//! | `namespace` | `messaging.destination.name` | |
//! | `id` | `messaging.message.id` | under [`LogIds::Hashed`](crate::LogIds::Hashed) it is the hash of the id |
//! | `outcome`, if not `completed` or `duplicate` | `error.type` | |
//! | `attempt`, `takeover`, `mode`, `verdict` | none | |
//! | span `store` | span `{operation} {table}` of kind `CLIENT` | the conventions name a span by its operation and its target |
//! | `operation` | `db.operation.name` | one call may be several statements, or a part of one |
//! | `result`, if not `ok` | `error.type` | |
//! | the adapter | `db.system.name` = `postgresql` or `sqlite`, `db.collection.name` = the table | constants of your deployment |
//! | `tower_dedup_delivery_duration_seconds` | `messaging.process.duration` | histogram in seconds |
//! | `tower_dedup_deliveries_total` | `messaging.client.consumed.messages` | |
//! | `tower_dedup_store_duration_seconds` | `db.client.operation.duration` | histogram in seconds |
//! | every other metric | none | |

/// Logs a record that names an event by its namespace and its id.
macro_rules! log {
    ($level:ident, $key:expr, $($fields:tt)+) => {
        tracing::event!(
            target: "tower_dedup",
            tracing::Level::$level,
            namespace = $key.namespace(),
            id = &*$key.shown_id(),
            $($fields)+
        )
    };
}

/// Adds to a counter: one, or the number before its name.
macro_rules! count {
    ($number:expr; $name:literal $(, $label:literal => $value:expr)*) => {{
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment($number);
        #[cfg(not(feature = "metrics"))]
        let _ = || ($number, $($value),*);
    }};
    ($name:literal $($labels:tt)*) => { count!(1; $name $($labels)*) };
}

mod background;
mod delivery;
#[cfg(feature = "metrics")]
mod describe;
mod error_text;
mod meters;
mod outcome;
mod records;
mod run;
mod span;
mod store;

pub(crate) use background::{Background, background, orphaned_panic, pending_write};
pub(crate) use delivery::{Report, ShadowFields};
#[cfg(feature = "metrics")]
pub use describe::{describe_metrics, metrics_buckets};
pub(crate) use meters::{Meters, MetersByNamespace};
pub(crate) use outcome::Outcome;
#[cfg(feature = "verify")]
pub(crate) use records::not_verified;
#[cfg(feature = "axum")]
pub(crate) use records::rejected;
pub(crate) use records::{
    claim_missing, lease_lost, mismatch, mode_changed, purge_failed, purged, response_not_stored,
    same_body, shadow, short_retention, small_body_limit, takeover, unprotected, unsigned_id,
};
#[cfg(feature = "memory")]
pub(crate) use records::{evicted, evicting, nearly_full};
#[cfg(feature = "postgres")]
pub(crate) use records::{lane_restarted, not_encrypted};
#[cfg(feature = "redis")]
pub(crate) use records::{redis_hides_its_policy, redis_is_unfit, store_loss_suspected};
pub(crate) use run::RunReport;
pub(crate) use span::store_span;
pub(crate) use store::{TableCounts, set_last_purge, store_call, table};
