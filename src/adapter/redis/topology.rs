//! [`Node`]: a primary with its slots, and what `INFO` says of it.

use std::error::Error as _;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{ErrorKind as RedisKind, RedisError, ServerErrorKind};

use super::connections::{Connections, Primary};
use super::history::Observation;
use super::moment::Moment;
use crate::error::{Error, ErrorKind};

pub(super) const CONTEXT: &str = "looking for lost writes";

/// A primary, and what it says of itself.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) primary: Primary,
    /// The ranges of its slots, each with its last slot.
    pub(super) slots: Vec<(u16, u16)>,
}

impl Node {
    pub(super) fn owns(&self, slot: u16) -> bool {
        self.slots.iter().any(|&(first, last)| (first..=last).contains(&slot))
    }
}

/// Returns the primaries of the store.
pub(super) async fn nodes(connections: &Connections) -> Result<Vec<Node>, Error> {
    let shards = connections.shards().await?;
    Ok(shards.into_iter().map(|(primary, slots)| Node { primary, slots }).collect())
}

/// What a server replies to `INFO`.
#[derive(Debug)]
pub(super) enum Info {
    Primary(Observation),
    /// The server refuses the command, or hides a field.
    Refused,
}

/// How a store is asked.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// `INFO` knows one section a call: before Redis 7.0.
    one_section: AtomicBool,
}

impl Questions {
    /// Asks a server for its replication state.
    ///
    /// # Errors
    ///
    /// Those of the connections, and [`ErrorKind::Refused`] for a replica.
    pub(super) async fn info(
        &self,
        connections: &Connections,
        primary: &Primary,
    ) -> Result<Info, Error> {
        let mut command = redis::cmd("INFO");
        if !self.one_section.load(Ordering::Relaxed) {
            command.arg(&["server", "replication", "stats"]);
        }
        let mut at = Moment::now();
        let mut reply = connections.ask(primary, &command, CONTEXT).await;
        if reply.as_ref().is_err_and(is_reply) && !self.one_section.swap(true, Ordering::Relaxed) {
            at = Moment::now();
            reply = connections.ask(primary, &redis::cmd("INFO"), CONTEXT).await;
        }
        let text = match reply {
            Ok(reply) => redis::from_redis_value::<String>(reply).unwrap_or_default(),
            Err(error) if is_reply(&error) => return Ok(Info::Refused),
            Err(error) => return Err(error),
        };
        if text.lines().any(|line| line.trim() == "role:slave") {
            return Err(Error::new(ErrorKind::Refused, CONTEXT));
        }
        Ok(Observation::read(&text, at).map_or(Info::Refused, Info::Primary))
    }
}

/// Returns `true` if the server has replied that it does not execute the command at all.
fn is_reply(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<RedisError>());
    cause.is_some_and(|cause| {
        matches!(
            cause.kind(),
            RedisKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::NoPerm)
        )
    })
}
