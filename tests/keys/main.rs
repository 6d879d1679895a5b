//! Extraction of keys from requests.

mod each;
mod extraction;
#[path = "../support/mod.rs"]
mod support;
