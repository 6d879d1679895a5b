//! Checks statements and links of the guide and the README.

mod guide;
mod metrics;
mod readme;
mod recipes;
mod records;
mod shadow;
#[path = "../support/mod.rs"]
mod support;
