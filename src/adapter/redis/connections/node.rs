//! [`Node`]: one primary, with a connection for most calls and a lane for durable calls.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::super::options::RedisOptions;
use super::super::script::ScriptCall;
use super::failure::Failure;
use super::lane::{Durability, Lane};
use super::link::{Link, Target};
use super::target::longest_step;

/// What is sent to a primary.
#[derive(Clone, Copy)]
pub(super) enum Sent<'a> {
    Script {
        call: &'a ScriptCall,
        /// Waits for replicas.
        durably: bool,
    },
    Command(&'a Cmd),
}

/// One primary. Its connections are opened when they are needed.
pub(super) struct Node {
    pub(super) link: Arc<Link>,
    lane: Arc<Lane>,
}

impl Node {
    pub(super) fn new(target: &Target, options: &RedisOptions) -> Self {
        let durability = durability(options);
        let link = Link::new(target.clone(), options, Duration::ZERO);
        let bound = longest_step(options) + durability.bound;
        let lane = Link::new(target.clone(), options, durability.bound);
        Self { lane: Lane::new(lane, Arc::clone(&link), durability, bound), link }
    }

    /// `asking` is set if the slot of the key is on its way to this node.
    pub(super) async fn send(&self, sent: Sent<'_>, asking: bool) -> Result<Value, Failure> {
        match sent {
            Sent::Script { call, durably: true } => self.lane.run(call, asking).await,
            Sent::Script { call, durably: false } => self.link.run(call, asking).await,
            Sent::Command(command) => self.link.send(command, asking).await,
        }
    }

    /// Asks the server again whether it may be used, and Sentinel which server is the master.
    pub(super) async fn check(&self) -> Result<(), Failure> {
        // The lane follows the link.
        self.link.check().await
    }

    #[cfg(test)]
    pub(super) fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }

    pub(super) fn close(&self) {
        self.link.close();
        self.lane.close();
    }
}

/// Returns how durable a durable call is.
pub(super) fn durability(options: &RedisOptions) -> Durability {
    match options.wait_replicas {
        Some((replicas, bound)) => Durability { replicas: Some(replicas), bound },
        None => Durability { replicas: None, bound: Duration::from_millis(500) },
    }
}
