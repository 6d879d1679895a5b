//! [`Node`]: one primary, with a connection for most calls and a lane for durable calls.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::super::options::RedisOptions;
use super::super::script::ScriptCall;
use super::failure::Failure;
use super::lane::{Durability, Lane};
use super::link::{Link, Target};

/// One primary. Its connections are opened when they are needed.
pub(super) struct Node {
    pub(super) link: Arc<Link>,
    lane: Arc<Lane>,
}

impl Node {
    pub(super) fn new(target: &Target, options: &RedisOptions) -> Self {
        let durability = durability(options);
        let lane = Link::new(target.clone(), options, durability.bound);
        Self {
            link: Link::new(target.clone(), options, Duration::ZERO),
            lane: Lane::new(lane, durability),
        }
    }

    pub(super) async fn run(
        &self,
        call: &ScriptCall,
        durably: bool,
        asking: bool,
    ) -> Result<Value, Failure> {
        if durably { self.lane.run(call, asking).await } else { self.link.run(call, asking).await }
    }

    pub(super) async fn send(&self, command: &Cmd, asking: bool) -> Result<Value, Failure> {
        self.link.send(command, asking).await
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
