//! [`Run`]: a request, its keys, and its log record.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::{header, request};

use super::answer::{self, Ended, Ending};
use super::builder::DedupLayer;
use super::config::Config;
use super::end::{self, DeliveryEnd, ReportEnd};
use super::gate::Permit;
use super::paths::LAST_PATHS;
use super::policy::{OnMissingKey, Verified};
use crate::delivery::{Delivery, RetryAfterOfLayer};
use crate::error::{KeyError, KeyErrorKind};
use crate::key::{DedupKey, Event, Extracted, Keys, RequestRef};
use crate::observe::{self, Counted, Outcome, Report};

/// A request, and the delivery that it becomes.
pub(super) struct Run<S, L, B> {
    /// Ready, except while the delivery waits for another delivery.
    pub(super) inner: S,
    /// Taken when the handler is called, with the body.
    pub(super) head: request::Parts,
    /// Empty until it was read.
    pub(super) body: Bytes,
    /// Empty until they were extracted, and of a request without a key.
    pub(super) keys: Keys,
    /// Log records may name the keys: they are valid, and the request is verified if it has to be.
    pub(super) logs_keys: bool,
    /// The request asks for its [`DeliveryEnd`].
    pub(super) reports_end: bool,
    pub(super) layer: Arc<DedupLayer<L, B>>,
    /// `None` while the delivery waits, and in shadow after a fault or if none was free.
    pub(super) permit: Option<Permit>,
    pub(super) report: Report,
}

impl<S, L, B> Run<S, L, B> {
    /// Boxed once, because each step takes it by value.
    pub(super) fn new(inner: S, head: request::Parts, layer: Arc<DedupLayer<L, B>>) -> Box<Self> {
        let reports_end = head.extensions.get::<ReportEnd>().is_some();
        Box::new(Self {
            inner,
            head,
            body: Bytes::new(),
            keys: Keys::none(),
            logs_keys: true,
            reports_end,
            layer,
            permit: None,
            report: Report::started_now(),
        })
    }

    /// Opens the span of the delivery, which the rest of its work enters.
    pub(super) fn open_span(&mut self) {
        let keys = if self.logs_keys { self.keys.events() } else { &[] };
        self.report.open_span(keys, &self.layer.config.meters);
    }

    /// Reports how the request has ended.
    pub(super) fn report<R, E>(&mut self, outcome: Outcome, ending: &Ending<R, E>) {
        let config = &self.layer.config;
        if outcome == Outcome::Overloaded {
            self.report.error = Some(self.layer.gate.load().into());
        }
        if let Ok(Ok(response)) = ending {
            self.report.status = Some(response.status());
        }
        let keys = if self.logs_keys { self.keys.events() } else { &[] };
        self.report.emit(outcome, keys, &config.meters);
    }

    /// Ends a delivery that has run to its end, and reports it. A panic in an extension or in a
    /// response body counts as a panic of the handler: the dropped claim is released. The ledger
    /// catches the panics of an adapter.
    pub(super) fn finish<R, E>(
        &mut self,
        delivered: thread::Result<Ended<R, E>>,
        running: Counted,
    ) -> Ending<R, E> {
        let panicked = |panic| Ended { outcome: Outcome::Panicked, ending: Err(panic) };
        let Ended { outcome, ending } = delivered.unwrap_or_else(panicked);
        drop(running);
        self.report(outcome, &ending);
        ending
    }

    /// Reports a delivery that runs.
    pub(super) fn report_run(&mut self, delivery: &Delivery) {
        // Set before the handler runs: under the on-arrival ledger, a delivery of this event on
        // another path is a duplicate from now on.
        LAST_PATHS.insert(delivery.keys(), self.head.uri.path());
        self.report.attempt = Some((delivery.attempt(), delivery.is_takeover()));
    }

    /// Reports that every event is complete, and whether the first one was handled on another path.
    pub(super) fn report_known(&mut self, age: Duration) {
        self.report.age = Some(age);
        let (meters, key) = (&self.layer.config.meters, self.keys.first());
        if LAST_PATHS.is_elsewhere(key, self.head.uri.path()) && meters.counts_other_path() {
            observe::records::other_path(meters, key);
        }
    }

    /// Wakes the deliveries that wait for these events.
    pub(super) fn wake_waiters(&self, delivery: &Delivery) {
        self.layer.gate.waiters.wake(delivery.events().iter().flat_map(Event::identities));
    }

    /// Replaces the `Retry-After` of a rejection by that of the layer.
    pub(super) fn set_retry_after<R, E>(&self, ending: &mut Ending<R, E>) {
        if let Ok(Ok(response)) = ending
            && response.extensions_mut().remove::<RetryAfterOfLayer>().is_some()
        {
            let seconds = answer::seconds(self.layer.config.retry_after_unavailable);
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
    }

    pub(super) fn request_ref(&self) -> RequestRef<'_> {
        RequestRef::new(&self.head, &self.body)
    }

    /// Returns `true` if an outer layer runs this delivery. This layer would find the event in
    /// flight or complete.
    pub(super) fn is_nested(&self, runs: fn(&Delivery, &DedupKey) -> bool) -> bool {
        let outer = self.head.extensions.get::<Delivery>();
        let mut events = self.keys.events().iter();
        outer.is_some_and(|outer| events.any(|event| runs(outer, event.key())))
    }

    /// Reports, once, that nobody has verified a request of a sender that signs.
    pub(super) fn report_unverified(&self) {
        let Config { key, meters, .. } = &self.layer.config;
        let is_unverified = || key.is_signed && self.head.extensions.get::<Verified>().is_none();
        if meters.is_first_unverified(is_unverified) {
            observe::records::unverified_sender(&key.namespace);
        }
    }

    /// Returns `true` if the request is verified, or need not be.
    pub(super) fn is_verified(&self) -> bool {
        !self.layer.config.require_verified || self.head.extensions.get::<Verified>().is_some()
    }

    pub(super) fn request_keys(&self) -> Result<Keys, KeyError> {
        self.digested(self.extract()?)
    }

    /// Returns the keys of a request that reaches the handler whatever is wrong with them. If there
    /// is a fault, returns the fault and the digest of the body as the key, unless the body is
    /// empty.
    pub(super) fn extract_leniently(&self) -> (Keys, Option<KeyError>) {
        match caught(|| self.extract()) {
            Ok(keys) => (keys, None),
            Err(fault) => {
                let digest = caught(|| self.layer.config.key.body_digest(&self.request_ref()));
                (digest.unwrap_or_else(|_| Keys::none()), Some(fault))
            }
        }
    }

    /// Returns the keys, or [`Keys::none`] for a request that reaches the handler without one.
    fn extract(&self) -> Result<Keys, KeyError> {
        let config = &self.layer.config;
        let request = self.request_ref();
        match config.key.read(&request)? {
            Extracted::Keys(keys) => Ok(keys),
            Extracted::Bypass => Ok(Keys::none()),
            Extracted::Missing => match config.on_missing_key {
                OnMissingKey::Reject => {
                    Err(KeyError::new(KeyErrorKind::Missing, config.key.place()))
                }
                OnMissingKey::PassThrough => Ok(Keys::none()),
            },
        }
    }

    /// Refuses too many keys. The events have the SHA-256 of their payloads then, if the layer
    /// compares payloads, and no bytes: a background write may hold them. In a multi-event delivery
    /// a payload is the event's own bytes; an event whose bytes the extractor does not name is not
    /// compared.
    pub(super) fn digested(&self, keys: Keys) -> Result<Keys, KeyError> {
        let (config, is_multi_event) = (&self.layer.config, keys.is_multi_event());
        if keys.identity_count() > config.max_keys {
            return Err(KeyError::new(KeyErrorKind::TooMany, "the request"));
        }
        let Some(part) = &config.compare_payload else { return Ok(keys.without_payloads()) };
        keys.with_digests(|event| {
            let bytes = event.payload().or((!is_multi_event).then_some(&self.body));
            bytes.map(|bytes| part.sha256(&RequestRef::new(&self.head, bytes))).transpose()
        })
    }
}

/// Sets what the response reports of the delivery's events.
pub(super) fn set_end<R, E>(ending: &mut Ending<R, E>, end: Option<DeliveryEnd>) {
    if let Ok(Ok(response)) = ending {
        end::set(response, end);
    }
}

pub(super) const NOT_VERIFIED: &str = "the request has no extension `Verified`";

/// Returns an error if `read` panics: a closure of the key must not replace the response by its
/// panic, and the delivery has its log record.
pub(super) fn caught<T>(read: impl FnOnce() -> Result<T, KeyError>) -> Result<T, KeyError> {
    let panicked = |_| Err(KeyError::new(KeyErrorKind::Panicked, "the key"));
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(panicked)
}
