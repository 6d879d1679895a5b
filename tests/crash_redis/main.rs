//! Redis servers that are killed, cut off, flushed and full, under load. A binary of its own: the loads disturb
//! the times of other tests.

mod failover;
mod load;
mod partition;
mod replies;
mod server;
