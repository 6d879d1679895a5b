//! The inbox on real servers.

mod faults;
mod reach;
mod world;
