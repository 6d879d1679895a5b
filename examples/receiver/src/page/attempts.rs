//! The deliveries that the page's buttons send, through the receiver's own router.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode};
use serde::Deserialize;
use tower::ServiceExt;
use tower_dedup::provider::STANDARD_WEBHOOKS;
use tower_dedup::{DedupKey, testing};

/// How many requests are held.
const HELD: usize = 8;
/// How long the handler of "twice at once" runs, so that the deliveries overlap.
const SHORT: Duration = Duration::from_millis(500);
/// How long the handler of "slowly" runs.
const LONG: Duration = Duration::from_secs(10);

/// What a button does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Button {
    Once,
    Again,
    OtherPayload,
    TwiceAtOnce,
    Slowly,
    Failing,
    /// With the signature of another body.
    Forged,
    StoreAway,
    Crash,
}

/// One request of a button.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    number: u64,
    pub(crate) id: String,
    pub(crate) query: String,
    pub(crate) body: &'static str,
    /// `None` while the delivery is under way.
    pub(crate) answer: Option<Answer>,
}

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// The header `x-dedup-result`.
    pub(crate) result: String,
}

/// The receiver's router, and the last requests of the buttons. Clones share them.
#[derive(Clone)]
pub(crate) struct Attempts {
    webhooks: Router,
    /// The secret with which the receiver verifies the deliveries of the buttons.
    secret: Option<Arc<str>>,
    /// An event whose handler fails runs again by itself.
    has_inbox: bool,
    sent: Arc<Mutex<VecDeque<Sent>>>,
}

/// The path of the deliveries.
pub(crate) fn path() -> String {
    format!("/webhooks/{}", STANDARD_WEBHOOKS.name())
}

/// Returns the key of an event that a button has delivered.
pub(crate) fn key(id: &str) -> Option<DedupKey> {
    DedupKey::new(STANDARD_WEBHOOKS.name(), id).ok()
}

impl Attempts {
    pub(crate) fn new(webhooks: Router, secret: Option<Arc<str>>, has_inbox: bool) -> Self {
        Self { webhooks, secret, has_inbox, sent: Arc::default() }
    }

    /// Returns the last requests, the newest first.
    pub(crate) fn list(&self) -> Vec<Sent> {
        self.lock().iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Sent>> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what the button says. `id` names the event of [`Button::Again`] and
    /// [`Button::OtherPayload`]; the other buttons make an event. Returns `None` for an id that cannot
    /// be a header.
    pub(crate) async fn press(&self, button: Button, id: &str) -> Option<()> {
        const PAID: &str = r#"{"type":"paid","amount":42}"#;
        const MORE: &str = r#"{"type":"paid","amount":43}"#;
        const FORGED: &str = r#"{"type":"paid","amount":9999}"#;
        let new = format!("try_{:08x}", rand::random::<u32>());
        let slow = |time: Duration| format!("?delay_ms={}", time.as_millis());
        match button {
            Button::Once => finish(self.deliver(&new, "", PAID)?).await,
            Button::Again => finish(self.deliver(id, "", PAID)?).await,
            Button::OtherPayload => finish(self.deliver(id, "", MORE)?).await,
            Button::TwiceAtOnce => {
                let (one, other) = (
                    self.deliver(&new, &slow(SHORT), PAID)?,
                    self.deliver(&new, &slow(SHORT), PAID)?,
                );
                tokio::join!(finish(one), finish(other));
            }
            // The page has to show the event while its handler runs.
            Button::Slowly | Button::Crash => {
                drop(tokio::spawn(self.deliver(&new, &slow(LONG), PAID)?));
            }
            Button::Failing => {
                let query = if self.has_inbox { "?fail_runs=2" } else { "?fail=500" };
                finish(self.deliver(&new, query, PAID)?).await;
            }
            Button::Forged => finish(self.send(&new, "", PAID, FORGED)?).await,
            Button::StoreAway => {}
        }
        Some(())
    }

    fn deliver(
        &self,
        id: &str,
        query: &str,
        body: &'static str,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.send(id, query, body, body)
    }

    /// Sends a request through the router, as from a client: every layer of the route sees it. The signature is that of
    /// `signed`.
    fn send(
        &self,
        id: &str,
        query: &str,
        signed: &'static str,
        body: &'static str,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let mut request = Request::post(path() + query).body(Body::from(signed)).ok()?;
        request.headers_mut().insert("webhook-id", HeaderValue::from_str(id).ok()?);
        request.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        if let Some(secret) = &self.secret {
            request = testing::sign(request, STANDARD_WEBHOOKS, secret).map(Body::new);
        }
        *request.body_mut() = Body::from(body);
        let number = {
            let mut sent = self.lock();
            let number = sent.front().map_or(0, |last| last.number + 1);
            let (id, query) = (id.to_owned(), query.to_owned());
            sent.truncate(HELD - 1);
            sent.push_front(Sent { number, id, query, body, answer: None });
            number
        };
        let this = self.clone();
        Some(async move {
            let Ok(response) = this.webhooks.clone().oneshot(request).await;
            let result = response.headers().get("x-dedup-result");
            let result = result.and_then(|result| result.to_str().ok()).unwrap_or_default();
            let answer = Answer { status: response.status(), result: result.to_owned() };
            if let Some(sent) = this.lock().iter_mut().find(|sent| sent.number == number) {
                sent.answer = Some(answer);
            }
        })
    }
}

/// Waits for a delivery, which goes on if the browser hangs up.
async fn finish(delivery: impl Future<Output = ()> + Send + 'static) {
    // An error is a panic of the delivery, which the log shows.
    let _ = tokio::spawn(delivery).await;
}
