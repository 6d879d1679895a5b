//! An inbox around [`tower_dedup`]: a webhook delivery is stored before it is handled, and handled again until it has
//! ended.
//!
//! # Log records
//!
//! The target is `tower_dedup_inbox`.
//!
//! | message | level | remarks |
//! |---|---|---|
//! | `stored` | debug | |
//! | `not stored` | warn, or error once a minute | the delivery went to its layer as without an inbox. `reason` and `error` say why; an error with `fix`: a layer outside of the inbox has verified the request |
//! | `the handler failed` | warn | the event runs again, `due_in_s` seconds later. `last` has the answer |
//! | `ended` | debug | `outcome` as in the metrics |
//! | `the process that ran a row has died` | warn | or it has lost its turn: the row runs after its next delay |
//! | `misrouted` | error, once a minute | a redelivery has not reached its layer. `why` and `fix` |
//! | `parked` | error, or info if it was `refused` | the row `seq` waits for a person. `reason` and `last`; without `seq`, `rows` counts them |
//! | `rows that were parked for long are deleted` | warn | `rows` counts them |
//! | `the table does not answer` | error, once a minute | `what` is not done, and `error` |
//! | `deliveries are stored, and no loop` | error, once a minute | nobody runs them in this process: spawn [`Inbox::run`] |
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade.
#![cfg_attr(
    feature = "metrics",
    doc = "[`describe_metrics`] gives each metric its unit and its text."
)]
//!
#![doc = include_str!("metrics.md")]

mod around;
mod decide;
mod ender;
mod inbox;
mod inspect;
mod observe;
#[cfg(feature = "postgres")]
mod postgres;
mod row;
mod run;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;
mod ticket;
mod writer;

pub use around::{Around, Inboxed, Releases};
pub use inbox::Inbox;
pub use inspect::{Count, Selection, ShownRequest, ShownRow};
#[cfg(feature = "metrics")]
pub use observe::describe_metrics;
pub use row::Parked;
pub use settings::InboxError;
