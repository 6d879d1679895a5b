//! Extraction of keys from requests.

mod composition;
mod each;
mod extractor;
mod idempotency;
mod parts;
mod requests;
