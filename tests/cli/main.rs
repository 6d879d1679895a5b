//! The command `tower-dedup`.
