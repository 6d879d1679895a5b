//! Signs a request as its sender does.

use std::time::SystemTime;

use bytes::Bytes;
use futures_util::FutureExt;
use http::Request;
use http_body::Body;
use http_body_util::{BodyExt, Full};

use crate::verify::Scheme;

/// Signs a request as the sender of a preset, or of your own [`Scheme`], does, with the current
/// time.
///
/// `secret` is the secret of the verifier; for SendGrid and Ed25519 it is the private key, as 64
/// hexadecimal digits or after `whsk_`. A retry of a sender that signs the time has a new
/// signature: sign each copy. [`Scheme::sign`] takes the time, and returns errors.
///
/// The body must be available at once, as that of [`request`](super::request) or an axum `Body`
/// made from a string is.
///
/// Panics if the crate knows no scheme of the preset, if the sender signs the public URL
/// ([`sign_at`] takes it), if the secret is malformed, if a signed header is missing, or if the
/// body is a stream.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use axum::{Router, routing::post};
/// use tower_dedup::adapter::MemoryAdapter;
/// use tower_dedup::verify::VerifyLayer;
/// use tower_dedup::{DedupLayer, provider, testing};
///
/// let dedup = DedupLayer::new(provider::STRIPE, MemoryAdapter::new()).require_verified();
/// let verify = VerifyLayer::new(provider::STRIPE.verifier("whsec_test")?);
/// let app = Router::new().route("/stripe", post(async || "done").layer((verify, dedup)));
///
/// let event = testing::request(provider::STRIPE, "/stripe", "evt_1");
/// let forged = testing::redeliver(app.clone(), event.clone(), 1).await;
/// assert_eq!(forged.statuses(), [401]);
/// let signed = testing::sign(event, provider::STRIPE, "whsec_test");
/// assert_eq!(testing::redeliver(app, signed, 2).await.duplicates(), 1);
/// # Ok::<(), tower_dedup::verify::VerifierError>(())
/// # }).unwrap();
/// ```
#[must_use]
pub fn sign<R: Body<Data = Bytes>>(
    request: Request<R>,
    scheme: impl Into<Option<Scheme>>,
    secret: &str,
) -> Request<Full<Bytes>> {
    signed(request, scheme.into(), None, secret)
}

/// Signs a request like [`sign`], for a sender that signs the public URL of the server.
///
/// `public_url` is the URL of [`Scheme::verifier_at`]: without the path of the request.
#[must_use]
pub fn sign_at<R: Body<Data = Bytes>>(
    request: Request<R>,
    scheme: impl Into<Option<Scheme>>,
    public_url: &str,
    secret: &str,
) -> Request<Full<Bytes>> {
    signed(request, scheme.into(), Some(public_url), secret)
}

fn signed<R: Body<Data = Bytes>>(
    request: Request<R>,
    scheme: Option<Scheme>,
    public_url: Option<&str>,
    secret: &str,
) -> Request<Full<Bytes>> {
    let Some(scheme) = scheme else { panic!("there is no signature scheme for the preset") };
    let (head, body) = request.into_parts();
    let Some(Ok(body)) = body.collect().now_or_never() else {
        panic!("the body of the request is not there at once");
    };
    let request = Request::from_parts(head, body.to_bytes());
    match scheme.sign(secret, public_url, SystemTime::now(), request) {
        Ok(request) => request.map(Full::from),
        Err(error) => panic!("the request cannot be signed: {error}"),
    }
}
