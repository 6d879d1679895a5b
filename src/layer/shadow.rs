//! [`ShadowRun`]: one delivery in [`Mode::Shadow`](super::Mode::Shadow), from its claim to its ending.
//!
//! 1. The handler runs once, under every verdict, and its response, error or panic is the ending.
//! 2. The claim is settled as under `Enforce`. Its result changes the log record only.
//! 3. A delivery whose verdict is not `First` runs without a claim, and settles nothing.
//!
//! The delivery runs in its own task, as under `Enforce`: see `delivery` for futures that are dropped.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, request, response};
use http_body::Body;
use tower_service::Service;

use super::answer::Ending;
use super::config::ServiceState;
use super::delivery::{call, judge, settle};
use super::gate::Permit;
use super::paths::{LAST_PATHS, Path};
use super::policy::OnUnavailable;
use super::report::ReportFields;
use crate::adapter::{Fetch, Payloads};
use crate::delivery::{Delivery, Verdict};
use crate::key::{Event, Keys, hex, sha256};
use crate::ledger::{Begin, Claim, HandlerSuccess, Ledger};
use crate::observe::{self, ShadowFields};

/// What the layer has read of a request that reaches the handler under every verdict.
pub(super) struct ReadKeys {
    /// The events of the request, or the digest of its body. `None` if it has neither.
    pub(super) keys: Option<Keys>,
    /// The digests of the payloads, if the layer compares payloads.
    pub(super) payloads: Option<Payloads>,
}

/// A delivery in shadow that runs.
pub(super) struct ShadowRun<S, L, B> {
    pub(super) inner: S,
    pub(super) head: request::Parts,
    pub(super) body: Bytes,
    pub(super) read: ReadKeys,
    /// The verdict of a delivery that claims nothing.
    pub(super) verdict: Option<Verdict>,
    pub(super) permit: Option<Permit>,
    pub(super) path: Path,
    pub(super) service: Arc<ServiceState<L>>,
    pub(super) report: ReportFields,
    pub(super) inner_body: PhantomData<fn() -> B>,
}

impl<S, L, B, ResBody> ShadowRun<S, L, B>
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    L: Ledger,
    B: From<Bytes>,
    ResBody: Body<Data = Bytes>,
{
    /// Runs the delivery to its end and reports it.
    pub(super) async fn run(mut self) -> Ending<ResBody, S::Error> {
        let service = Arc::clone(&self.service);
        let config = &service.config;
        let running = config.meters.running();
        let (verdict, claim) = self.begin().await;
        self.report.age = verdict.age();
        self.report.shadow = Some(ShadowFields {
            verdict: verdict.as_str(),
            is_fault: matches!(
                verdict,
                Verdict::NoKey | Verdict::Unavailable | Verdict::Overloaded | Verdict::Unverified
            ),
            payload: payload_digest(&self.read, &self.body),
        });
        let Self { mut inner, head, body, read, path, mut report, permit, .. } = self;

        let mut request = Request::from_parts(head, body);
        if let Some(keys) = &read.keys {
            let held = claim.as_ref().map(Claim::delivery);
            if let Some(held) = held {
                held.keys().for_each(|key| LAST_PATHS.insert(key, path));
                report.attempt = Some((held.attempt(), held.is_takeover()));
            }
            let delivery = Delivery::unenforced(keys.events().into(), verdict, held);
            delivery.set_request(keys);
            request.extensions_mut().insert(delivery);
        }
        let called = call(None, || inner.call(request.map(B::from))).await;
        // The handler's response is the ending even if `success_when` panics.
        let mut has_panicked = false;
        let is_success = |head: &response::Parts| {
            catch_unwind(AssertUnwindSafe(|| config.success.is(head))).unwrap_or_else(|_panic| {
                has_panicked = true;
                false
            })
        };
        let (outcome, ending) = judge(called, is_success, &mut report);
        if has_panicked {
            report.error = Some("`success_when` panicked".into());
        }
        if let Some(claim) = claim {
            let held = claim.delivery().clone();
            if let Err(error) = settle(outcome, claim, &HandlerSuccess::default()).await {
                report.error = Some(error.into());
            }
            // A delivery that began under `Enforce` may wait for this one.
            service.gate.waiters.wake(held.events().iter().flat_map(Event::identities));
        }
        drop(running);
        observe::shadow(config.key.namespace_str(), verdict.as_str());
        report.emit(outcome, read.keys.as_ref().filter(|_| verdict.is_of_a_key()), config);
        drop(permit);
        ending
    }

    /// Claims the keys, unless the verdict is known. Returns the verdict, and the claim of the events
    /// that are new.
    async fn begin(&mut self) -> (Verdict, Option<L::Claim>) {
        let ServiceState { ledger, config, .. } = &*self.service;
        let (None, Some(keys)) = (self.verdict, &self.read.keys) else {
            return (self.verdict.unwrap_or(Verdict::NoKey), None);
        };
        // Responses are not replayed, so an unreadable one must not hide the verdict.
        let fetch = if config.compare_payload.is_some() { Fetch::Digest } else { Fetch::Nothing };
        let context = config
            .begin_context(self.read.payloads.as_ref())
            .with_fetch(fetch)
            .fail_open(config.on_unavailable == OnUnavailable::Open);
        let verdict = match ledger.begin(keys, &context).await {
            Ok(Begin::First { claim, .. }) => {
                let verdict = claim.delivery().verdict();
                return (verdict, Some(claim));
            }
            Ok(Begin::InFlight) => Verdict::InFlight,
            Ok(Begin::Duplicate(info)) => Verdict::Duplicate { age: info.age },
            Ok(Begin::Mismatch(info)) => Verdict::Mismatch { age: info.age },
            Err(error) => {
                self.report.error = Some(error.into());
                Verdict::Unavailable
            }
        };
        if verdict.age().is_some() && LAST_PATHS.is_elsewhere(keys.first(), self.path) {
            config.meters.handled_on_another_path(keys.first());
        }
        (verdict, None)
    }
}

/// Returns the first 16 hex digits of the SHA-256 of the part of the payload that is compared, or else
/// of the body.
fn payload_digest(read: &ReadKeys, body: &Bytes) -> String {
    let compared = || {
        let first = read.keys.as_ref()?.first();
        read.payloads.as_ref()?.iter().find(|(key, _)| key == first).map(|(_, digest)| *digest)
    };
    hex(&compared().unwrap_or_else(|| sha256(body))[..8])
}
