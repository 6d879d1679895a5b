//! One delivery: what its process knows of it.

use super::store::{Action, Call, Reply, Token};

pub(crate) type Process = u8;

/// A delivery, over all attempts of its sender.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Delivery {
    /// How often the sender still sends.
    pub(crate) attempts: u8,
    /// How often its handler has succeeded; on arrival, how often it has begun. At most 3.
    pub(crate) runs: u8,
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
        action: Action,
        replies: Vec<Reply>,
        view: View,
    },
    Running {
        process: Process,
        token: Token,
        takeover: bool,
        view: View,
    },
    /// Answered with 2xx, by the handler or as a duplicate.
    Acknowledged {
        duplicate: bool,
    },
}

/// What the process of a claim knows beyond the replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct View {
    /// One bit for each place: its completion was pending in this process when the claim began.
    pub(crate) pending: u8,
    /// On arrival: a release has ended in this process since the claim began.
    pub(crate) removed: bool,
}

impl Phase {
    pub(crate) fn process(&self) -> Option<Process> {
        match self {
            Self::Calling { process, .. } | Self::Running { process, .. } => Some(*process),
            Self::Idle { .. } | Self::Acknowledged { .. } => None,
        }
    }

    pub(crate) fn token(&self) -> Option<Token> {
        match self {
            Self::Calling { token, .. } | Self::Running { token, .. } => Some(*token),
            Self::Idle { .. } | Self::Acknowledged { .. } => None,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. })
    }
}

/// A call that a process repeats in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) process: Process,
    pub(crate) call: Call,
}
