//! Extraction of keys from requests.

mod answers;
mod composition;
mod each;
mod extractor;
mod idempotency;
mod parts;
mod requests;
#[path = "../support/mod.rs"]
mod support;
