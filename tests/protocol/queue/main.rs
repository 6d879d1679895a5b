//! The queue of the SQL adapters under many thousand interleavings: callers that drop their futures, batches that fail,
//! hang or are late, and workers that are dropped early. The source of the queue is compiled here over a modelled
//! runtime.
//!
//! `scripts/faults` runs it with `--cfg shuttle`; without it, there is nothing to run.
#![cfg(shuttle)]

mod error;

#[path = "."]
mod adapter {
    #[path = "../../../src/adapter/sql/queue/batcher.rs"]
    #[allow(dead_code, reason = "the adapters use all of it")]
    mod batcher;
    mod counts;
    mod model;
    mod runtime;
}
