//! Extraction of keys from requests.

mod each;
mod extractor;
mod idempotency;
mod parts;
mod requests;
