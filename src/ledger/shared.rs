//! [`Shared`]: what the deliveries of one ledger share.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::call::Calls;
use super::contract::Permanent;
use super::pending::Pending;
use super::renewal::Renewals;
use super::retry::Background;
use super::times::Times;
use crate::adapter::contract::{Abilities, CallTerms, DedupAdapter, Token};

pub(super) struct Shared {
    pub(super) permanent: Permanent,
    pub(super) adapter: Arc<dyn DedupAdapter>,
    pub(super) abilities: Abilities,
    pub(super) renewals: Arc<Renewals>,
    /// Keys that succeeded in this process and are not completed in the store yet, with the terms of their completion.
    pub(super) completing: Arc<Pending<CallTerms>>,
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

    /// Makes the calls of one delivery under these times, with a token of its own. `after` is the bound on what follows
    /// the handler before the commit.
    pub(super) fn calls(&self, times: &Times, after: Duration) -> Calls {
        let Times { retention, lease, store_timeout: bound, handler_timeout } = *times;
        let mut terms = match self.permanent {
            Permanent::OnArrival => CallTerms::on_claim(Token::random(), retention),
            Permanent::Lease | Permanent::Transactional => {
                CallTerms::on_completion(Token::random(), retention, lease)
            }
        };
        let most = |handler: Duration| handler.saturating_add(after).saturating_add(bound);
        // No honest handler is ended by it. The setting of Postgres has 31 bits.
        let ms = |handler| i32::try_from(most(handler).as_millis()).unwrap_or(i32::MAX);
        terms.handler_bound_ms = handler_timeout.map_or(0, ms);
        Calls { adapter: Arc::clone(&self.adapter), terms, bound }
    }
}
