//! Reads a response that is stored for duplicates.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use http::Response;
use http_body::Body;

use super::answer::{self, Ended};
use super::body::{ResponseBody, buffer_response};
use super::config::Config;
use crate::adapter::contract::StoredResponse;
use crate::key::DedupKey;
use crate::ledger::HandlerSuccess;
use crate::observe::{self, Outcome};
use crate::replay::{Replay, is_stream};

/// Reads the body of a success, so that duplicates get the response.
///
/// # Errors
///
/// The body ends in an error or panics: the ending, which is no success.
pub(super) async fn read_success<ResBody: Body<Data = Bytes>, E>(
    response: &mut Response<ResponseBody<ResBody>>,
    replay: &Replay,
    config: &Config,
    key: &DedupKey,
) -> Result<HandlerSuccess, Ended<ResBody, E>> {
    if is_stream(response.headers()) {
        observe::records::response_not_stored(&config.meters, key, "its body is a stream");
        return Ok(HandlerSuccess::default());
    }
    let Some(body) = std::mem::take(response.body_mut()).into_inner() else {
        return Ok(HandlerSuccess::default());
    };
    let read = buffer_response(body, replay.body_limit, config.body_timeout);
    let (bytes, body) = match AssertUnwindSafe(read).catch_unwind().await {
        Ok(Ok(buffered)) => buffered,
        Ok(Err(_)) => return Err(answer::ended(Outcome::BrokenResponse, config)),
        Err(panic) => return Err(Ended { outcome: Outcome::Panicked, ending: Err(panic) }),
    };
    *response.body_mut() = body;
    let stored = bytes.and_then(|bytes| {
        Ok(StoredResponse::new(response.status(), replay.select(response.headers())?, bytes))
    });
    let stored =
        stored.inspect_err(|why| observe::records::response_not_stored(&config.meters, key, why));
    Ok(HandlerSuccess { response: stored.ok().map(Arc::new) })
}
