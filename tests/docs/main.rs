//! Checks statements and links of the guide and the README.

mod guide;
mod recipes;
#[path = "../support/mod.rs"]
mod support;
