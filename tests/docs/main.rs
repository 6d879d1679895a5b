//! The guide and the README: what they say is checked.

mod guide;
mod readme;
mod recipes;
#[path = "../support/mod.rs"]
mod support;
