//! The transactional ledger: the key and the writes of the handler commit together.

mod commit;
mod errors;
mod fixture;
mod misuse;
mod modes;
mod postgres;
mod record_in;
mod responses;
mod sqlite;
