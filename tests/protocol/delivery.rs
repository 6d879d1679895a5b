//! One delivery: what its process knows of it.

use super::store::{Call, Key, Reply, Token};

pub(crate) type Process = u8;

/// A delivery, over all attempts of its sender.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Delivery {
    /// How often the sender still sends.
    pub(crate) attempts: u8,
    /// How often its handler has succeeded, at most 3.
    pub(crate) successes: u8,
    pub(crate) phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// The sender waits before it sends, or has given up. `in_flight` is the last answer.
    Idle {
        in_flight: bool,
    },
    /// A call is under way, for the key at the place `replies.len()`.
    Calling {
        process: Process,
        token: Token,
        call: Call,
        replies: Vec<Reply>,
    },
    Running {
        process: Process,
        token: Token,
        takeover: bool,
    },
    /// Answered with 2xx, by the handler or as a duplicate.
    Acknowledged {
        duplicate: bool,
    },
}

impl Phase {
    pub(crate) fn process(&self) -> Option<Process> {
        match self {
            Self::Calling { process, .. } | Self::Running { process, .. } => Some(*process),
            Self::Idle { .. } | Self::Acknowledged { .. } => None,
        }
    }
}

/// A call that a process repeats in the background, for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) process: Process,
    pub(crate) call: Call,
    pub(crate) token: Token,
    pub(crate) key: Key,
}

/// A call that nobody waits for any more, and that the store may still execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Late {
    pub(crate) call: Call,
    pub(crate) token: Token,
    pub(crate) key: Key,
}
