//! Log records, metrics and spans: one `tracing` event for every delivery, and counters.
//!
//! A run of a [`Deduplicator`](crate::Deduplicator) has the same records, metrics and spans as a
//! delivery. Its namespace is the namespace of its key.
//!
//! # Log records
//!
//! The target is `tower_dedup`. Every delivery ends in exactly one record with the message
//! `delivery`. The record has these fields, as far as they are known:
//!
//! | field | meaning |
//! |---|---|
//! | `outcome` | see below |
//! | `namespace`, `id` | the first key; `namespace` is its whole namespace, with the value that [`namespace_by`](crate::KeyExtractor::namespace_by) adds; `id` is the id itself, or the first 16 hex digits of its SHA-256 ([`LogIds`](crate::LogIds)). Control characters and direction marks are escaped |
//! | `event_type` | the type of the first event, as the sender names it |
//! | `keys` | the number of keys in the delivery: one of each event, without second identities |
//! | `attempt`, `takeover` | if the handler ran: see [`Delivery`](crate::Delivery) |
//! | `age_ms` | for a duplicate, the time since the event was first seen |
//! | `mode`, `verdict` | in [shadow](crate::Mode::Shadow): `shadow`, and the [verdict](crate::Verdict); `outcome` says how the handler ended. The level is at least warn if the verdict is `no_key`, `unavailable`, `overloaded` or `unverified` |
//! | `payload` | in shadow: the first 16 hex digits of the SHA-256 of the body, or of the part that [`compare_payload`](crate::DedupLayer::compare_payload) names |
//! | `status` | the status of the response; a run of a `Deduplicator` has none |
//! | `duration_ms` | the time from the head of the request to the head of the response, or of the run |
//! | `error` | the internal error, which the client never sees; for `overloaded`, how many deliveries run and wait |
//! | `fix` | for `unverified`, `unscoped`, `overloaded` and `uncommitted`, what to change |
//!
//! | `outcome` | level | meaning |
//! |---|---|---|
#![doc = endings::outcome_rows!()]
//!
//! Other records, with the same target. A record about one event also has `namespace` and `id`:
//!
//! | message | level | remarks |
//! |---|---|---|
#![doc = records::record_rows!()]
//!
//! An inbox has [records and metrics of its own](https://docs.rs/tower-dedup-inbox), with the
//! target `tower_dedup_inbox`.
//!
//! Filter the whole subscriber, not each of its layers. With a filter for each layer
//! (`Layer::with_filter`), a record can be lost after sqlx has asked whether its own record is
//! wanted, for example when the Postgres server stops. The cause is [a defect of
//! tracing-subscriber](https://github.com/tokio-rs/tracing/issues/2519).
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade:
//!
#![doc = include_str!("observe/metrics.md")]
//!
//! `namespace` is the layer's namespace, without the value of
//! [`namespace_by`](crate::KeyExtractor::namespace_by), and also if a closure gives its keys
//! another namespace. So a layer has one series for all its tenants. For a
//! [`Deduplicator`](crate::Deduplicator), it is the namespace of the key. After its first 1,000
//! namespaces, the deduplicator counts all others as `other`. Log records and spans have the whole
//! namespace.
//!
//! A gauge counts a delivery or a call exactly once, until its future ends or is dropped.
//!
//! [`describe_metrics`] gives each metric its unit and its text. [`metrics_buckets`] returns the
//! recommended buckets. Without buckets, the exporter for Prometheus makes summaries, which cannot
//! be added up over processes. This is the setup, with
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
//! The target is `tower_dedup`. A span that no subscriber wants costs one atomic load. Without a
//! subscriber, spans are not sent to the `log` crate.
//!
//! | span | level | fields | around |
//! |---|---|---|---|
//! | `delivery` | info | `namespace`, `id`, `outcome`, `attempt`, `mode`, `verdict` | a delivery, from its keys to its end: waiting, store calls and the handler. The span follows the delivery into its task. Records of the handler are inside it. The record `delivery` has these fields itself, and is in the span around this one |
//! | `store` | debug | `operation`, `result` | one call to the store, with its wait in the queue |
//!
//! A request that is refused before its keys are known, or that an outer layer runs, has no span
//! `delivery`. `outcome` and `attempt` are set at the end. A background write has a span `store`
//! outside of any `delivery`.
//!
//! [tracing-opentelemetry](https://docs.rs/tracing-opentelemetry) exports these spans, with their
//! names and fields unchanged, as in the example `otel`. To rename them in a collector, use this
//! table. Its names come from the OpenTelemetry semantic conventions. The conventions for databases
//! are stable, and those for messaging are in development.
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

/// Changes a metric: `counter increment 1; "name", "label" => value`.
macro_rules! meter {
    ($kind:ident $change:ident $value:expr; $name:literal $(, $label:literal => $of:expr)*) => {{
        #[cfg(feature = "metrics")]
        metrics::$kind!($name $(, $label => $of)*).$change($value);
        #[cfg(not(feature = "metrics"))]
        let _ = || ($value, $($of),*);
    }};
}

/// Adds to a counter: one, or the number before its name.
macro_rules! count {
    ($number:expr; $($metric:tt)+) => { meter!(counter increment $number; $($metric)+) };
    ($($metric:tt)+) => { count!(1; $($metric)+) };
}

mod delivery;
#[cfg(feature = "metrics")]
mod describe;
pub(crate) mod endings;
mod meters;
pub(crate) mod records;
mod store;

pub(crate) use delivery::{Report, RunReport, ShadowFields};
#[cfg(feature = "metrics")]
pub use describe::{describe_metrics, metrics_buckets};
pub(crate) use endings::{DedupAnswer, Outcome};
pub(crate) use meters::{Counted, Meters, MetersByNamespace};
pub(crate) use store::StoreSpan;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use store::{set_last_purge, table};
