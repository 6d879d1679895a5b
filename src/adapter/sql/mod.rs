//! The parts that the SQL adapters share: the meaning of a row, the queue of calls, and how a batch
//! of calls becomes statements.

mod batch;
mod inspection;
mod options;
mod purge;
mod queue;
mod row;
pub(super) mod statement;
mod store;

pub(super) use batch::{
    Call, Failed, Kind, RowCall, RowExecutor, RowReply, TRIES, claimed, unanswered,
    without_response,
};
pub(super) use inspection::{listing, stats};
#[cfg(feature = "postgres")]
pub(super) use options::check_name;
pub(super) use options::{SqlOptions, check_timeout, take_names};
pub use purge::Purging;
#[cfg(feature = "sqlite")]
pub(super) use queue::{BatchExecutor, BatchItem, Batcher, Bounds};
pub(super) use row::{Columns, Row, completed};
pub(super) use store::{Common, READING_RESPONSE, SqlAdapter, SqlStore, in_task, ready, usable};
