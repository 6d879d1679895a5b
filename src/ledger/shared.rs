//! [`Shared`]: what the deliveries of one ledger share.

use std::sync::Arc;

use tokio::time::Instant;

use super::contract::Permanent;
use super::pending::Pending;
use super::renewal::Renewals;
use super::retry::Background;
use crate::adapter::contract::{Abilities, DedupAdapter, StoredData};

pub(super) struct Shared {
    pub(super) permanent: Permanent,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) abilities: Abilities,
    pub(super) renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet, with the data of their completion.
    pub(super) completing: Arc<Pending<StoredData>>,
    /// On arrival: keys whose claims have no reply, with the times at which these were made.
    pub(super) claiming: Arc<Pending<Instant>>,
    /// On arrival: keys that deliveries with a 503 may have claimed, until they are released.
    pub(super) releasing: Arc<Pending>,
    /// The writes that continue in the background.
    pub(super) background: Background,
}

impl Shared {
    pub(super) fn new(permanent: Permanent, adapter: Arc<dyn DedupAdapter>) -> Self {
        Self {
            permanent,
            abilities: adapter.abilities(),
            adapter,
            renewals: Arc::default(),
            completing: Arc::default(),
            claiming: Arc::default(),
            releasing: Arc::default(),
            background: Background::new(permanent),
        }
    }
}
