//! An inbox around [`tower_dedup`]: a webhook delivery is stored before it is handled, and handled
//! again until it has ended.

#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "without a database there is no inbox")
)]

mod around;
mod core;
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
pub use row::Parked;
pub use settings::InboxError;
