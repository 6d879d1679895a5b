//! Layers for the header `Idempotency-Key`: the settings that an API's clients expect.

use std::time::Duration;

use http::{StatusCode, header};

use super::builder::DedupLayer;
use super::config::NOT_STORED;
use super::policy::{LogIds, OnInFlight, OnMismatch, Replay};
use crate::adapter::TransactionAdapter;
use crate::adapter::contract::DedupAdapter;
use crate::key::{KeyExtractor, KeyPart, whole_payload};
use crate::ledger::CanReplay;
use crate::ledger::Transactional;

/// Layers for the header `Idempotency-Key`, with which the clients of an API repeat a request.
impl DedupLayer {
    /// Deduplicates the requests of an API by their header `Idempotency-Key`, under a lease.
    ///
    /// `scope` reads the client: the principal or the tenant that the authentication, a layer outside
    /// this one, has found. It is a part of every key, in plain text, and must not be a
    /// [credential](crate::guide::idempotency#the-key). A request with a key and without a scope is
    /// answered 500 with the log record `unscoped`.
    ///
    /// It differs from [`new`](Self::new) in these settings, and each can be changed afterwards:
    ///
    /// | setting | value |
    /// |---|---|
    /// | key | scope, method, path, and the header's value of 1 to 255 bytes, in the namespace `idempotency-key` |
    /// | [`methods`](Self::methods) | POST, PATCH |
    /// | [`on_missing_key`](Self::on_missing_key) | 400; [`PassThrough`](crate::OnMissingKey::PassThrough) makes the header optional |
    /// | [`on_in_flight`](Self::on_in_flight), [`in_flight_status`](Self::in_flight_status) | 409 at once |
    /// | [`retry_after_in_flight`](Self::retry_after_in_flight) | 1 s |
    /// | [`compare_payload`](Self::compare_payload) | the query string and the body; another payload is answered 422 |
    /// | [`replay`](Self::replay) | a body of up to 256 KiB with all its `content-…` headers, `etag`, `last-modified`, `link` and `location`; no [stream](crate::guide::responses#a-response-that-matters) |
    /// | [`success_when`](Self::success_when) | any status from 200 to 499 but 401, 407, 408, 409, 421, 423, 425 and 429 |
    /// | duplicate whose response was not stored | 422, `broken-response`; [`duplicate_status`](Self::duplicate_status) sets a 2xx |
    /// | [`retention`](Self::retention) | 24 h |
    /// | answers of the layer | problem details (RFC 9457) |
    /// | replayed responses | have the header `idempotent-replayed: true` |
    ///
    /// [The guide](crate::guide::idempotency) has the reasons, and an example.
    ///
    /// Invalid for an adapter without [`leases`](crate::adapter::contract::Abilities::leases) or without
    /// [`stored_data`](crate::adapter::contract::Abilities::stored_data).
    pub fn idempotency_key(scope: KeyPart, adapter: impl DedupAdapter) -> Self {
        Self::new(KeyExtractor::idempotency_key(scope), adapter)
            .for_api_clients()
            .success_when(|response| is_final(response.status))
    }

    /// Does the same as [`idempotency_key`](Self::idempotency_key), in the handler's own transaction,
    /// as [`transactional`](Self::transactional).
    ///
    /// A response that the handler sets by [`Delivery::set_response`](crate::Delivery::set_response) commits with the
    /// key. After any status but a 2xx no response is stored, and the same request runs again, unless the handler has
    /// committed.
    pub fn transactional_idempotency_key(
        scope: KeyPart,
        adapter: impl TransactionAdapter,
    ) -> DedupLayer<Transactional> {
        Self::transactional(KeyExtractor::idempotency_key(scope), adapter).for_api_clients()
    }
}

impl<L: CanReplay> DedupLayer<L> {
    fn for_api_clients(self) -> Self {
        let headers = [header::ETAG, header::LAST_MODIFIED, header::LINK, header::LOCATION];
        let replay = Replay::new().body_limit(256 * 1024).headers(headers).describing_content();
        let mut layer = self
            .retention(Duration::from_secs(86_400))
            .on_in_flight(OnInFlight::Reject)
            .in_flight_status(StatusCode::CONFLICT)
            .retry_after_in_flight(Duration::from_secs(1))
            .compare_payload(whole_payload(), OnMismatch::Refuse)
            .replay(replay);
        // Invalid for other layers, because webhook senders retry after it. A client of an API
        // must not take an empty 2xx for the response: a duplicate without one is `ResponseNotStored`.
        layer.config.duplicate_status = NOT_STORED;
        layer.config.problems = true;
        layer.config.log_ids = LogIds::Hashed;
        layer
    }
}

/// Returns `false` for a status after which a client repeats the same request with the same key: the server failed, or
/// the request comes too early, too often, without valid credentials (also for a proxy), on a wrong connection, or
/// meets a lock. A status below 200 is no response to the request (RFC 9110, section 15.2).
fn is_final(status: StatusCode) -> bool {
    !matches!(status.as_u16(), ..200 | 401 | 407..=409 | 421 | 423 | 425 | 429 | 500..)
}
