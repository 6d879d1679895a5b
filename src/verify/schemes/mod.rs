//! The schemes: one function for those that are data, and one for each of the others. Each verifies a request with
//! one key.

pub(super) mod adyen;
pub(super) mod box_;
pub(super) mod data;
#[cfg(feature = "verify-ecdsa")]
pub(super) mod sendgrid;
pub(super) mod svix;
pub(super) mod url;
