//! [`Config`]: every setting.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Method, Response, StatusCode, Uri};

use super::body::{BODY_LIMIT, BODY_TIMEOUT};
use super::policy::{OnMismatch, OnMissingKey, OnUnavailable, Success};
use crate::adapter::contract::Fetch;
use crate::error::{ConfigError, NOT_ZERO, check};
use crate::key::{KeyExtractor, KeyPart, LogIds};
use crate::ledger::{AnyLedger, Calls, Times};
use crate::observe::{DedupAnswer, Meters};
use crate::replay::Replay;

/// The answer to a duplicate whose response is not stored, as that of a layer without [`Replay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WithoutResponse {
    /// An empty response with this status, a 2xx.
    Empty(StatusCode),
    /// [`DedupAnswer::ResponseNotStored`]: a client of an API must not take an empty 2xx for the
    /// response.
    Refuse,
}

/// Completes an answer for the clients of an API: its body and its headers. It has its status
/// already. A replayed response has no [`DedupAnswer`]. `docs` is the page that
/// [`DedupLayer::problem_docs`](super::DedupLayer::problem_docs) sets.
pub(crate) type Dress = fn(&mut Response<Bytes>, Option<DedupAnswer>, docs: Option<&str>);

/// Returns `true` for a URL of a page, to which a fragment can be added.
fn is_page(url: &str) -> bool {
    let is_http = |url: &Uri| matches!(url.scheme_str(), Some("http" | "https"));
    !url.contains('#') && url.parse().is_ok_and(|url| is_http(&url))
}

/// Every setting but the bounds, which are the gate's.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) key: KeyExtractor,
    pub(super) meters: Arc<Meters>,
    pub(super) methods: Arc<[Method]>,
    pub(super) body_limit: usize,
    pub(super) body_timeout: Duration,
    pub(super) times: Times,
    pub(super) max_keys: usize,
    pub(super) success: Success,
    pub(super) on_missing_key: OnMissingKey,
    /// How long a delivery waits for its event in flight.
    pub(super) wait: Duration,
    pub(super) on_unavailable: OnUnavailable,
    pub(super) retry_after_in_flight: Duration,
    pub(super) retry_after_unavailable: Duration,
    pub(super) without_response: WithoutResponse,
    pub(super) in_flight_status: StatusCode,
    pub(super) result_header: Option<HeaderName>,
    pub(super) require_verified: bool,
    /// The part of a payload that is compared.
    pub(super) compare_payload: Option<KeyPart>,
    pub(super) on_mismatch: OnMismatch,
    pub(super) replay: Option<Arc<Replay>>,
    /// For a layer whose clients send the header `Idempotency-Key`.
    pub(super) dress: Option<Dress>,
    /// The URL of the API's documentation.
    pub(super) problem_docs: Option<Arc<str>>,
}

impl Config {
    pub(super) fn new(key: KeyExtractor) -> Self {
        let mut times = Times::default();
        times.retention = times.retention.max(key.retention_floor.unwrap_or_default());
        let body_limit = BODY_LIMIT.max(key.max_body.unwrap_or_default());
        Self {
            meters: Arc::new(Meters::new(&key.namespace, key.tried_once, LogIds::default())),
            methods: key.methods.into(),
            key,
            body_limit,
            body_timeout: BODY_TIMEOUT,
            times,
            max_keys: 4_096,
            success: Success(Arc::new(|response| response.status.is_success())),
            on_missing_key: OnMissingKey::default(),
            wait: Duration::from_secs(2),
            on_unavailable: OnUnavailable::default(),
            retry_after_in_flight: Duration::from_secs(5),
            retry_after_unavailable: Duration::from_secs(30),
            without_response: WithoutResponse::Empty(StatusCode::OK),
            in_flight_status: StatusCode::SERVICE_UNAVAILABLE,
            result_header: Some(HeaderName::from_static("x-dedup-result")),
            require_verified: false,
            compare_payload: None,
            on_mismatch: OnMismatch::default(),
            replay: None,
            dress: None,
            problem_docs: None,
        }
    }

    /// `stores_data` is whether the store holds payload digests and responses.
    pub(super) fn check(&self, stores_data: bool) -> Result<(), ConfigError> {
        self.key.check()?;
        if let Some(fault) = self.compare_payload.as_ref().and_then(KeyPart::fault) {
            return Err(fault.clone());
        }
        if let Some(part) = &self.compare_payload
            && self.key.has_content_identity()
        {
            // The digests of both stand in one column.
            let rule = "`key::body_digest()` under a `content_identity`";
            check(part.is_body_digest(), "compare_payload", rule, part)?;
        }
        self.times.check()?;
        check(!self.methods.is_empty(), "methods", "at least one method", &self.methods)?;
        check(self.body_limit > 0, "body_limit", "at least 1 byte", &self.body_limit)?;
        check(!self.body_timeout.is_zero(), "body_timeout", NOT_ZERO, &self.body_timeout)?;
        check(self.max_keys > 0, "max_keys", "at least 1 key", &self.max_keys)?;
        let status = self.in_flight_status;
        let is_allowed = !status.is_success() && !status.is_informational();
        check(is_allowed, "in_flight_status", "neither 1xx nor 2xx", &status)?;
        if let WithoutResponse::Empty(status) = self.without_response {
            check(status.is_success(), "duplicate_status", "2xx", &status)?;
        }
        if let Some(docs) = &self.problem_docs {
            let rule = "an http or https URL without a fragment";
            check(is_page(docs), "problem_docs", rule, docs)?;
            check(self.dress.is_some(), "problem_docs", "of a layer for `Idempotency-Key`", docs)?;
        }
        if let Some(replay) = &self.replay {
            let invalid = replay.invalid();
            let rule = "without headers of one client or one connection";
            check(invalid.is_empty(), "replay", rule, &invalid)?;
        }
        if !stores_data && (self.compare_payload.is_some() || self.replay.is_some()) {
            let rule = "the adapter does not support stored data";
            return Err(ConfigError::new(rule));
        }
        Ok(())
    }

    /// Returns `true` for the methods that are deduplicated. GET stands for HEAD too, because
    /// routers answer HEAD by the handler of GET.
    pub(super) fn deduplicates(&self, method: &Method) -> bool {
        self.methods.contains(method)
            || (method == Method::HEAD && self.methods.contains(&Method::GET))
    }

    /// Returns what a claim fetches of the stored data.
    pub(super) fn fetch(&self) -> Fetch {
        match (&self.replay, &self.compare_payload) {
            (Some(_), _) => Fetch::DigestAndResponse,
            (None, Some(_)) => Fetch::Digest,
            (None, None) => Fetch::Nothing,
        }
    }

    /// Makes the calls of one delivery, with a token of its own.
    pub(super) fn calls(&self, ledger: &AnyLedger, fetch: Fetch) -> Calls {
        // A response to be stored is read after the handler has returned.
        let after = if self.replay.is_some() { self.body_timeout } else { Duration::ZERO };
        let mut calls = ledger.calls(&self.times, after, &self.meters);
        calls.terms.fetch = fetch;
        calls.replay.clone_from(&self.replay);
        calls.fails_open = self.on_unavailable == OnUnavailable::FailOpen;
        calls
    }
}
