//! The command `tower-dedup`, run as a program.

mod command;
mod doctor_postgres;
mod doctor_sqlite;
mod import;
mod inbox;
mod key;
mod keys;
mod locks;
mod missed;
mod redis;
mod redis_rights;
mod roles;
mod secrets;
