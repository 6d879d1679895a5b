//! [`EchoLayer`] and [`Echo`]: answers the requests by which senders check an endpoint.

use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::ops::ControlFlow::{self, Break, Continue};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use ctutils::CtEq;
use futures_util::TryFutureExt;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use serde_json::{Value, json};
use tower_layer::Layer;
use tower_service::Service;

use super::received::code;
use crate::error::{BoxError, ConfigError};
use crate::key::{RequestRef, escaped, hex};
use crate::layer::{BODY_TIMEOUT, Collect, ResponseBody, Verified};
use crate::observe;
use crate::provider::Preset;
use crate::provider::challenge::{Answer, Challenge, Handshake};
use crate::provider::scheme::Proof;

/// The longest body, in bytes, in which a handshake is looked for.
const MAX_BODY: usize = 16 * 1024;

/// The longest value, in bytes, that is sent back.
const MAX_ECHO: usize = 4 * 1024;

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const ALLOWED_ORIGIN: HeaderName = HeaderName::from_static("webhook-allowed-origin");
const ALLOWED_RATE: HeaderName = HeaderName::from_static("webhook-allowed-rate");

/// A layer that answers the handshakes of one sender that need an echo, such as Slack's
/// `url_verification`. Then no handler has to answer them. [`Preset::echo`] makes the layer.
///
/// Put it *inside* a [`VerifyLayer`](super::VerifyLayer) if the sender signs the handshake, and
/// *outside* otherwise. [The guide](crate::guide::verification#handshakes) has the place for each
/// sender.
///
/// ```
/// # #[cfg(feature = "memory")] {
/// use axum::Router;
/// use axum::routing::post;
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::verify::VerifyLayer;
/// use tower_dedup::{DedupLayer, provider};
///
/// // From the environment, not from the source.
/// let (secret, token) = ("app secret", "verify token");
/// // Meta checks the URL by a GET, which it does not sign.
/// let echo = provider::WHATSAPP.echo(Some(token))?;
/// let verify = VerifyLayer::new(provider::WHATSAPP.verifier(secret)?);
/// let dedup = DedupLayer::new(provider::WHATSAPP, MemoryAdapter::new()).require_verified();
/// let app: Router = Router::new().route("/", post(async || "done").layer((echo, verify, dedup)));
/// # let _ = app;
/// # }
/// # Ok::<(), tower_dedup::BoxError>(())
/// ```
///
/// | answer | when |
/// |---|---|
/// | as the sender expects it: the value as `text/plain; charset=utf-8`, JSON, or a header | a handshake |
/// | 403 | the verify token is missing or wrong; it is compared in constant time |
/// | 401 | the answer is a code by the secret (Zoom), and the request is not [`Verified`]: otherwise anybody could have a value of their choice signed |
/// | 408, 400, 413 | the body does not arrive within 10 s, ends in an error, or is longer than 16 KiB and has not announced its length |
///
/// An answer has `X-Content-Type-Options: nosniff`, so that a browser never shows the value as a
/// page.
///
/// Any other request goes to the inner service unchanged. So does a request whose value is missing,
/// repeated, empty or longer than 4 KiB, and a request with a body if the handshakes of the sender
/// have none.
///
/// A body is read only if the head may be that of a handshake. If the handshakes of the sender have
/// a body, the length has to be known and at most 16 KiB; otherwise, a body of unknown length is
/// read to see that it is empty. The inner service gets it whole. Inside of a layer of this crate,
/// each length is known.
///
/// It takes every request body that can be made of [`Bytes`], such as axum's or [`Full`], and
/// passes the same type on. Around a hyper service, put it inside a layer of this crate, or map
/// hyper's body to such a type first.
///
/// [`Full`]: http_body_util::Full
///
/// # Clone
///
/// A clone shares the token.
#[derive(Clone)]
#[must_use = "a layer does nothing until it wraps a service"]
pub struct EchoLayer {
    handshakes: Arc<Handshakes>,
}

impl<S> Layer<S> for EchoLayer {
    type Service = Echo<S>;

    fn layer(&self, inner: S) -> Echo<S> {
        Echo { inner, layer: self.clone() }
    }
}

impl fmt::Debug for EchoLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EchoLayer").field("sender", &self.handshakes.sender).finish_non_exhaustive()
    }
}

impl Preset {
    /// Makes a layer that answers the handshakes of this sender that need an echo.
    ///
    /// `secret` depends on the sender: for Meta's senders it is the verify token that you have
    /// chosen, for Zoom the secret of the verifier, and for all others `None`.
    ///
    /// # Errors
    ///
    /// If the sender has no such handshake, or if `secret` is missing, is not needed, is empty, or
    /// has white space around it.
    pub fn echo(&self, secret: Option<&str>) -> Result<EchoLayer, ConfigError> {
        let sender = self.name();
        let fault =
            |fault: String| Err(ConfigError::new(format!("the echo of `{sender}` {fault}")));
        if self.challenges.is_empty() {
            return fault("is not needed: it has no handshake of this kind".to_owned());
        }
        let needed = self.challenges.iter().find_map(Challenge::secret);
        match (needed, secret) {
            (Some(needed), None) => return fault(format!("needs the {needed}")),
            (None, Some(_)) => return fault("needs no secret".to_owned()),
            (Some(needed), Some(secret)) if secret.is_empty() || secret.trim() != secret => {
                return fault(format!("needs a {needed} without white space around it"));
            }
            _ => {}
        }
        let secret = secret.unwrap_or_default().as_bytes().into();
        let handshakes = Handshakes { sender, secret, all: self.handshakes() };
        Ok(EchoLayer { handshakes: Arc::new(handshakes) })
    }
}

/// The service of [`EchoLayer`].
///
/// It calls the inner service that it polled ready. If its future is dropped before the inner
/// service is called, the request has had no effect.
#[derive(Debug, Clone)]
pub struct Echo<S> {
    inner: S,
    layer: EchoLayer,
}

impl<S, R, B> Service<Request<R>> for Echo<S>
where
    S: Service<Request<R>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    R: Body<Data = Bytes> + From<Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let (head, body) = request.into_parts();
        let Some(reads_body) = self.layer.handshakes.reads_body(&head, &body) else {
            let response = self.inner.call(Request::from_parts(head, body));
            return Box::pin(response.map_ok(|response| response.map(ResponseBody::inner)));
        };
        // Takes the ready service, and leaves the clone, which is not ready yet.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let handshakes = Arc::clone(&self.layer.handshakes);
        Box::pin(async move {
            match handshakes.answer(head, body, reads_body).await {
                Continue(request) => Ok(inner.call(request).await?.map(ResponseBody::inner)),
                Break(answer) => Ok(answer.map(ResponseBody::full)),
            }
        })
    }
}

/// The handshakes of a sender.
struct Handshakes {
    sender: &'static str,
    /// The verify token, or the secret; empty if none is needed.
    secret: Box<[u8]>,
    all: Vec<Handshake>,
}

impl Handshakes {
    /// Returns whether the body has to be read to know if the request is a handshake; `None` if it
    /// is none.
    fn reads_body<R: Body>(&self, head: &Parts, body: &R) -> Option<bool> {
        let nothing = Bytes::new();
        let of_head = RequestRef::new(head, &nothing);
        let marked = self.all.iter().filter(|handshake| handshake.is_marked(&of_head, false));
        let has_body = marked.map(Handshake::has_body).reduce(|one, other| one || other)?;
        let length = body.size_hint();
        let fits = if has_body {
            length.upper().is_some_and(|length| length <= MAX_BODY as u64)
        } else {
            // A body of unknown length may be empty.
            length.lower() == 0
        };
        fits.then_some(length.upper() != Some(0))
    }

    /// Answers a handshake, or returns any other request.
    async fn answer<R>(
        &self,
        head: Parts,
        mut body: R,
        reads_body: bool,
    ) -> ControlFlow<Response<Bytes>, Request<R>>
    where
        R: Body<Data = Bytes> + From<Bytes>,
        R::Error: Into<BoxError>,
    {
        let mut bytes = Bytes::new();
        if reads_body {
            let mut collect = pin!(Collect::new(body, MAX_BODY, BODY_TIMEOUT));
            bytes = match poll_fn(|cx| collect.as_mut().poll(cx)).await {
                Ok(bytes) => bytes,
                Err(fault) => return Break(refusal(fault.outcome().answer().status())),
            };
            body = R::from(bytes.clone());
        }
        let of = RequestRef::new(&head, &bytes);
        let answer = self.all.iter().find_map(|handshake| {
            let value = handshake.read(&of).filter(|value| value.len() <= MAX_ECHO)?;
            Some(self.answer_to(handshake, &of, &value))
        });
        match answer {
            Some(answer) => Break(answer),
            None => Continue(Request::from_parts(head, body)),
        }
    }

    /// Returns the answer to a handshake with this value.
    fn answer_to(&self, of: &Handshake, request: &RequestRef<'_>, value: &str) -> Response<Bytes> {
        let path = escaped(request.uri().path());
        if let Some(token) = &of.token {
            let token = token.read(request).ok().flatten().unwrap_or_default();
            if !token.as_bytes().ct_eq(&*self.secret).to_bool() {
                let reason = "the verify token does not match";
                observe::records::echo_refused(self.sender, &path, reason);
                return refusal(StatusCode::FORBIDDEN);
            }
        }
        let answer = match of.challenge.answer {
            Answer::Text(_) => response(StatusCode::OK, TEXT, value.to_owned()),
            Answer::Member(name, _) => json_of(&json!({ name: value })),
            Answer::Code(_) => {
                if request.extensions().get::<Verified>().is_none() {
                    let reason =
                        "it is not verified: put the `EchoLayer` inside of the `VerifyLayer`";
                    observe::records::echo_refused(self.sender, &path, reason);
                    return refusal(StatusCode::UNAUTHORIZED);
                }
                let code = code(Proof::HmacSha256, &self.secret, &[value.as_bytes()]);
                let code = hex(&code.unwrap_or_default());
                json_of(&json!({ "plainToken": value, "encryptedToken": code }))
            }
            Answer::Origin(_) => {
                let mut answer = response(StatusCode::OK, TEXT, String::new());
                let headers = answer.headers_mut();
                if let Ok(origin) = HeaderValue::from_bytes(value.as_bytes()) {
                    headers.insert(ALLOWED_ORIGIN, origin);
                }
                headers.insert(ALLOWED_RATE, HeaderValue::from_static("*"));
                answer
            }
            Answer::Pong(status, body) => response(status, JSON, body.to_owned()),
        };
        observe::records::echoed(self.sender, &path);
        answer
    }
}

fn json_of(value: &Value) -> Response<Bytes> {
    response(StatusCode::OK, JSON, value.to_string())
}

/// Returns an answer that no browser takes for another type than this.
fn response(status: StatusCode, media_type: &'static str, body: String) -> Response<Bytes> {
    let mut response = refusal(status);
    *response.body_mut() = body.into();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn refusal(status: StatusCode) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = status;
    response
}
