//! The schemes: one function for those that are data, and one for each of the others. Each verifies a request with
//! one key.

pub(super) mod adyen;
pub(super) mod data;
#[cfg(feature = "verify-ecdsa")]
pub(super) mod ecdsa;
pub(super) mod url;
