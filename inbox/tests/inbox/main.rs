//! The inbox on real servers.

mod faults;
mod world;
