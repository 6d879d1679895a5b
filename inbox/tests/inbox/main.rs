//! The inbox on real servers.

mod ends;
mod faults;
mod operators;
mod processes;
mod reach;
mod routes;
mod settings;
mod table;
mod verified;
mod world;
