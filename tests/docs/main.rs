//! Checks statements and links of the guide and the README.

mod guards;
mod guide;
mod observability;
mod readme;
mod recipes;
mod shadow;
