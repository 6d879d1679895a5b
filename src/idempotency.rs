//! Layers for the header `Idempotency-Key`: the settings and the answers that an API's clients
//! expect.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE, HeaderValue};
use http::{HeaderName, Response, StatusCode, header};

use crate::adapter::contract::{DedupAdapter, TransactionAdapter};
use crate::key::LogIds;
use crate::key::{KeyExtractor, KeyPart, whole_payload};
use crate::layer::{DedupLayer, OnMismatch};
use crate::ledger::{CanReplay, Transactional};
use crate::observe::DedupAnswer;
use crate::replay::Replay;

/// Stripe's name for the header of a replayed response. The draft has none.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Layers for the header `Idempotency-Key`, with which the clients of an API repeat a request.
impl DedupLayer {
    /// Deduplicates the requests of an API by their header `Idempotency-Key`, under a lease.
    ///
    /// `scope` reads the client: the principal or the tenant that a layer outside this one has
    /// authenticated. The scope is a part of every key, in plain text, and must not be a
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
    /// | [`wait`](Self::wait), [`in_flight_status`](Self::in_flight_status) | 409 at once |
    /// | [`retry_after_in_flight`](Self::retry_after_in_flight) | 1 s |
    /// | [`compare_payload`](Self::compare_payload) | the query string and the body; another payload is answered 422 |
    /// | [`replay`](Self::replay) | a body of up to 256 KiB, without a `content-encoding`, with all its `content-…` headers, `etag`, `last-modified`, `link` and `location`; no [stream](crate::guide::responses#a-response-that-matters) |
    /// | [`success_when`](Self::success_when) | any status from 200 to 499 but 401, 407, 408, 409, 421, 423, 425 and 429 |
    /// | duplicate whose response was not stored | 422, `response-not-stored`; [`duplicate_status`](Self::duplicate_status) sets a 2xx |
    /// | [`retention`](Self::retention) | 24 h |
    /// | answers of the layer | problem details (RFC 9457) |
    /// | replayed responses | have the header `idempotent-replayed: true` |
    ///
    /// [The guide](crate::guide::idempotency) has the reasons, and an example.
    ///
    /// Invalid for an adapter without [`leases`](crate::adapter::contract::Abilities::leases) or
    /// without [`stored_data`](crate::adapter::contract::Abilities::stored_data).
    pub fn idempotency_key(scope: KeyPart, adapter: impl DedupAdapter) -> Self {
        Self::new(KeyExtractor::idempotency_key(scope), adapter)
            .for_api_clients()
            .success_when(|response| is_final(response.status))
    }

    /// Does the same as [`idempotency_key`](Self::idempotency_key), in the handler's own
    /// transaction, as [`transactional`](Self::transactional).
    ///
    /// A response that the handler sets by
    /// [`Delivery::set_response`](crate::Delivery::set_response) commits with the key. After any
    /// status but a 2xx no response is stored, and the same request runs again, unless the handler
    /// has committed.
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
        self.retention(Duration::from_secs(86_400))
            .wait(Duration::ZERO)
            .in_flight_status(StatusCode::CONFLICT)
            .retry_after_in_flight(Duration::from_secs(1))
            .compare_payload(whole_payload(), OnMismatch::Refuse)
            .replay(replay)
            .log_ids(LogIds::Hashed)
            .dressed(dress)
    }
}

/// Returns `false` for a status after which a client repeats the same request with the same key:
/// the server failed, or the request comes too early, too often, without valid credentials (also
/// for a proxy), on a wrong connection, or meets a lock. A status below 200 is no response to the
/// request (RFC 9110, section 15.2).
fn is_final(status: StatusCode) -> bool {
    !matches!(status.as_u16(), ..200 | 401 | 407..=409 | 421 | 423 | 425 | 429 | 500..)
}

/// Makes an answer of the layer's problem details (RFC 9457), and marks a replayed response.
fn dress(response: &mut Response<Bytes>, answer: Option<DedupAnswer>, docs: Option<&str>) {
    let Some(answer) = answer else {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        return;
    };
    let status = response.status();
    // By choice, a duplicate is answered 2xx, which is no problem.
    if status.is_success() {
        return;
    }
    let Problem { title, detail, is_retryable } = Problem::of(answer);
    let (kind, title) = match docs {
        Some(docs) => (format!("{docs}#{}", answer.as_str()), title),
        // Section 4.2.1: the title of this type is the status's.
        None => ("about:blank".to_owned(), status.canonical_reason().unwrap_or(title)),
    };
    let problem = serde_json::json!({
        "type": kind,
        "title": title,
        "status": status.as_u16(),
        "detail": detail,
        "retryable": is_retryable,
    });
    *response.body_mut() = problem.to_string().into();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
}

/// What a problem says to the clients of an API. It names nothing internal.
struct Problem {
    title: &'static str,
    detail: &'static str,
    /// Whether the same request with the same key may succeed later.
    is_retryable: bool,
}

impl Problem {
    const fn of(answer: DedupAnswer) -> Self {
        const LATER: &str = "Repeat the request later with the same Idempotency-Key.";
        const FAILED: &str = "The server could not process the request";
        const BODY: &str = "The body of the request could not be read";
        let (title, detail, is_retryable) = match answer {
            DedupAnswer::Duplicate | DedupAnswer::ResponseNotStored => (
                "The response is no longer available",
                "A request with this Idempotency-Key was processed. Its response was not stored. A new \
                 key would process the request again.",
                false,
            ),
            DedupAnswer::Handshake => ("A handshake", "The request carries no event.", false),
            DedupAnswer::InFlight => {
                ("A request with this Idempotency-Key is in progress", LATER, true)
            }
            DedupAnswer::Unavailable => ("The service is temporarily unavailable", LATER, true),
            DedupAnswer::InvalidKey => (
                "The Idempotency-Key is missing or malformed",
                "Send one Idempotency-Key: a string of 1 to 255 printable ASCII characters in \
                 double quotes, such as a UUID.",
                false,
            ),
            DedupAnswer::Mismatch => (
                "This Idempotency-Key was used for another request",
                "The first request with this Idempotency-Key had another query string or body. Use \
                 a new key for a new request.",
                false,
            ),
            DedupAnswer::TooLarge => (BODY, "The body is too large.", false),
            DedupAnswer::BrokenBody => (BODY, "The body is not complete.", true),
            DedupAnswer::SlowBody => (BODY, "The body did not arrive in time.", true),
            DedupAnswer::HandlerTimeout => ("The request took too long", LATER, true),
            DedupAnswer::Uncommitted | DedupAnswer::BrokenResponse => (FAILED, LATER, true),
            DedupAnswer::Unverified | DedupAnswer::Unscoped => {
                (FAILED, "The request was not processed.", false)
            }
        };
        Self { title, detail, is_retryable }
    }
}
