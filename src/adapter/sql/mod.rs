//! The parts that the SQL adapters share: the meaning of a row, the queue of calls, and how a batch of calls becomes
//! statements.

pub(super) mod batch;
pub(super) mod call;
pub(super) mod completion;
pub(super) mod errors;
pub(super) mod inspection;
pub(super) mod options;
pub(super) mod purge;
pub(super) mod queue;
pub(super) mod row;
pub(super) mod statement;
pub(super) mod store;

pub use purge::Purging;
