//! The schemes: one function for each, which verifies a request with one key.

pub(super) mod adyen;
pub(super) mod body;
#[cfg(feature = "verify-ecdsa")]
pub(super) mod sendgrid;
pub(super) mod timed;
pub(super) mod token;
pub(super) mod url;
pub(super) mod webhooks;
