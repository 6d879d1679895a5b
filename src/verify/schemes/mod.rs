//! The schemes: one function for those that are data, and one for each of the others. Each verifies a request with
//! one key.

pub(super) mod adyen;
pub(super) mod data;
pub(super) mod url;
