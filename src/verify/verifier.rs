//! [`Verifier`]: the scheme of a preset with its secrets.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::request::Parts;

use super::error::{Refusal, VerifierError};
use super::public_url::{PublicUrl, targets};
use super::received::Received;
use super::schemes::{adyen, data, url};
use super::secret::key_of;
use crate::provider::{Preset, Proof, Scheme};

/// Verifies the requests of one sender: its scheme, one or more secrets, and a tolerance.
///
/// A clone shares the secrets. `Debug` does not show them.
///
/// # Example
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
///
/// use http::Request;
/// use tower_dedup::provider;
/// use tower_dedup::verify::Refusal;
///
/// // GitHub's own example.
/// let verifier = provider::GITHUB.verifier("It's a Secret to Everybody")?;
/// let (head, ()) = Request::post("/hook")
///     .header(
///         "x-hub-signature-256",
///         "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
///     )
///     .body(())
///     .unwrap()
///     .into_parts();
/// let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
/// assert_eq!(verifier.verify(&head, b"Hello, World!", now), Ok(()));
/// assert_eq!(verifier.verify(&head, b"Hello, World?", now), Err(Refusal::Forged));
/// # Ok::<(), tower_dedup::verify::VerifierError>(())
/// ```
#[derive(Clone)]
pub struct Verifier {
    pub(super) preset: Preset,
    scheme: Scheme,
    keys: Arc<[Box<[u8]>]>,
    url: Option<Arc<PublicUrl>>,
    tolerance: Duration,
}

impl Verifier {
    fn new(preset: Preset, secret: &str, url: Option<&str>) -> Result<Self, VerifierError> {
        let scheme = preset.scheme.ok_or(VerifierError::NoScheme { preset: preset.name() })?;
        let key = key_of(scheme.secret, secret)?.into();
        let url = match url {
            Some(url) => Some(Arc::new(PublicUrl::parse(url)?)),
            None if scheme.signs_url() => return Err(VerifierError::NoPublicUrl),
            None => None,
        };
        let tolerance = Duration::from_secs(300);
        Ok(Self { preset, scheme, keys: [key].into(), url, tolerance })
    }

    /// Accepts another secret too, while one secret replaces the other. One of them has to match.
    ///
    /// # Errors
    ///
    /// [`VerifierError`] if the secret is empty or malformed.
    pub fn or_secret(mut self, secret: impl AsRef<str>) -> Result<Self, VerifierError> {
        let key = key_of(self.scheme.secret, secret.as_ref())?.into();
        self.keys = self.keys.iter().cloned().chain([key]).collect();
        Ok(self)
    }

    /// Sets how far a signed time may differ from the server's time, before or after. The default is
    /// five minutes; Twitch and Box recommend ten, and Paddle's libraries use five seconds. It has no effect
    /// on a scheme that signs no time.
    #[must_use]
    pub fn tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Verifies a request: its head, its whole raw body, and the server's time.
    ///
    /// # Errors
    ///
    /// The reason why the request is not verified.
    pub fn verify(&self, head: &Parts, body: &[u8], now: SystemTime) -> Result<(), Refusal> {
        self.decide(head, body, now, verify)
    }

    /// Refuses a request before its body is read, if its head shows that it is not verified.
    pub(super) fn verify_head(&self, head: &Parts, now: SystemTime) -> Result<(), Refusal> {
        self.decide(head, b"", now, verify_head)
    }

    /// Succeeds if `verify` does, with one of the keys and one of the URLs that the sender may have signed.
    fn decide(
        &self,
        head: &Parts,
        body: &[u8],
        now: SystemTime,
        verify: fn(&Scheme, &[u8], &Received<'_>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let (now, tolerance) = (unix(now), self.tolerance.as_secs());
        let url = self.url.as_deref().filter(|_| self.scheme.signs_url());
        let tried = if url.is_some() { 2 } else { 1 };
        for target in targets(&head.uri).take(tried) {
            let request = Received { head, body, now, tolerance, url, target };
            for key in &*self.keys {
                // Every other refusal is the same for all keys and URLs.
                let result = verify(&self.scheme, key, &request);
                if result != Err(Refusal::Forged) {
                    return result;
                }
            }
        }
        Err(Refusal::Forged)
    }

    /// Returns the URL that the sender has to have signed, without its query, which may name persons; `None` if
    /// it signs no URL.
    pub(super) fn signed_url(&self, head: &Parts) -> Option<String> {
        let url = self.url.as_deref().filter(|_| self.scheme.signs_url())?;
        Some([url.as_str(), head.uri.path()].concat())
    }
}

/// Verifies a request with one key.
fn verify(scheme: &Scheme, key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    match scheme.proof {
        Proof::Signed(codes, text) => data::verify(scheme, codes, text, key, request),
        Proof::Token => data::verify_token(scheme.header, key, request),
        Proof::Adyen => adyen::verify(key, request),
        Proof::HubSpot => url::hubspot(key, request),
        Proof::Twilio => url::twilio(key, request),
    }
}

/// Verifies what the head alone shows. Adyen's signatures are in the body.
fn verify_head(scheme: &Scheme, key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    match scheme.proof {
        Proof::Signed(codes, text) => data::read(scheme, codes, text, request).map(drop),
        Proof::Token => data::verify_token(scheme.header, key, request),
        Proof::Adyen => Ok(()),
        Proof::HubSpot => url::hubspot_headers(request).map(drop),
        Proof::Twilio => url::twilio_signature(request).map(drop),
    }
}

/// Returns the time in seconds since 1970.
pub(super) fn unix(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
        Err(before) => 0_i64.checked_sub_unsigned(before.duration().as_secs()).unwrap_or(i64::MIN),
    }
}

impl Preset {
    /// Makes a verifier with a secret in the sender's own notation, `whsec_` included.
    ///
    /// # Errors
    ///
    /// [`VerifierError::NoScheme`] if this crate knows no scheme of the sender. Otherwise if the secret is empty
    /// or malformed, if the sender signs the public URL, or if the scheme needs a feature that is off.
    pub fn verifier(&self, secret: impl AsRef<str>) -> Result<Verifier, VerifierError> {
        Verifier::new(*self, secret.as_ref(), None)
    }

    /// Makes a verifier for a sender that may sign the public URL of this server.
    ///
    /// `public_url` is what stands before the path that the layer sees: `https://hooks.example.com`. It is
    /// not the URL that is configured at the sender, `https://hooks.example.com/twilio`, unless a proxy or
    /// axum's `nest` removes `/twilio`, so that the layer sees the path `/`. The port belongs to it, if the
    /// sender's URL has one. Schemes that sign no URL do not use it.
    ///
    /// A request that is refused has the URL that was expected in its log record `not verified`, as `url`.
    ///
    /// # Errors
    ///
    /// As [`verifier`](Self::verifier), and [`VerifierError::InvalidPublicUrl`].
    pub fn verifier_at(
        &self,
        public_url: &str,
        secret: impl AsRef<str>,
    ) -> Result<Verifier, VerifierError> {
        Verifier::new(*self, secret.as_ref(), Some(public_url))
    }

    /// Returns `true` if a signed time limits how long a captured delivery can be sent again.
    #[must_use]
    pub fn signs_time(&self) -> bool {
        self.scheme.is_some_and(|scheme| scheme.signs_time())
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("preset", &self.preset.name())
            .field("keys", &self.keys.len())
            .field("tolerance", &self.tolerance)
            .finish_non_exhaustive()
    }
}
