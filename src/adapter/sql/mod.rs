//! The parts that the SQL adapters share: everything but the dialect.
//!
//! A dialect ([`engine::Dialect`]) supplies single statements. The engine decides which statements
//! are sent for a call, or for a batch of calls.

pub(super) mod call;
pub(super) mod engine;
pub(super) mod errors;
pub(super) mod maintenance;
mod options;
pub(super) mod purge;
pub(super) mod queue;
pub(super) mod responses;
pub(super) mod rounds;
pub(super) mod row;
pub(super) mod statement;
#[cfg(test)]
mod table;

pub use options::Identifier;
pub(super) use options::{checked_timeout, take_identifiers};
pub use queue::Batching;
