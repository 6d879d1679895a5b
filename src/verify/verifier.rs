//! [`Verifier`]: the scheme of a preset with its secrets.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use http::header::Entry;
use http::request::Parts;

use super::error::{Refusal, VerifierError};
use super::key::Key;
use super::public_url::{PublicUrl, targets};
use super::received::Received;
use super::{adyen, data, twilio};
use crate::provider::Preset;
use crate::provider::scheme::{Proof, Scheme};

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
    /// `None` for a scheme of your own.
    pub(super) preset: Option<Preset>,
    scheme: Scheme,
    keys: Arc<[Key]>,
    url: Option<Arc<PublicUrl>>,
    tolerance: Duration,
}

impl Verifier {
    fn new(scheme: Scheme, secret: &str, url: Option<&str>) -> Result<Self, VerifierError> {
        if let Some(rule) = scheme.fault() {
            return Err(VerifierError::InvalidScheme(rule));
        }
        let key = Key::new(&scheme, secret)?;
        if url.is_none() && scheme.signs_url() {
            return Err(VerifierError::NoPublicUrl);
        }
        let url = url.map(PublicUrl::parse).transpose()?.map(Arc::new);
        let tolerance = Duration::from_secs(300);
        Ok(Self { preset: None, scheme, keys: [key].into(), url, tolerance })
    }

    /// Also accepts another secret, while one secret replaces the other. One of them has to match.
    ///
    /// # Errors
    ///
    /// [`VerifierError`] if the secret is empty or malformed.
    pub fn or_secret(mut self, secret: impl AsRef<str>) -> Result<Self, VerifierError> {
        let key = Key::new(&self.scheme, secret.as_ref())?;
        self.keys = self.keys.iter().cloned().chain([key]).collect();
        Ok(self)
    }

    /// Sets how far a signed time may differ from the server's time, before or after. The default
    /// is five minutes; Twitch and Box recommend ten, and Paddle's libraries use five seconds. It
    /// has no effect on a scheme that signs no time.
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

    /// Succeeds if `verify` does, with one of the keys and one of the URLs that the sender may have
    /// signed.
    fn decide(
        &self,
        head: &Parts,
        body: &[u8],
        now: SystemTime,
        verify: fn(&Key, &Received<'_>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let (scheme, now, tolerance) = (&self.scheme, unix(now), self.tolerance.as_secs());
        let url = self.url.as_deref().filter(|_| self.scheme.signs_url());
        for target in &targets(&head.uri, scheme) {
            let request = Received { scheme, head, body, now, tolerance, url, target };
            for key in &*self.keys {
                // Every other refusal is the same for all keys and URLs.
                let result = verify(key, &request);
                if result != Err(Refusal::Forged) {
                    return result;
                }
            }
        }
        Err(Refusal::Forged)
    }

    /// Marks the headers whose values are secrets.
    pub(super) fn mark_tokens(&self, headers: &mut HeaderMap) {
        if self.scheme.proof == Proof::Token
            && let Ok(Entry::Occupied(mut tokens)) = headers.try_entry(self.scheme.header)
        {
            tokens.iter_mut().for_each(|token| token.set_sensitive(true));
        }
    }

    /// Returns the URL that the sender has to have signed, without its query, which may name
    /// persons; `None` if it signs no URL.
    pub(super) fn signed_url(&self, head: &Parts) -> Option<String> {
        let url = self.url.as_deref().filter(|_| self.scheme.signs_url())?;
        Some([url.as_str(), head.uri.path()].concat())
    }
}

/// Verifies a request with one key.
fn verify(key: &Key, request: &Received<'_>) -> Result<(), Refusal> {
    match (request.scheme.proof, key) {
        (Proof::Token, Key::Shared(token)) => data::verify_token(token, request),
        (Proof::Adyen, Key::Shared(key)) => adyen::verify(key, request),
        (Proof::Twilio, Key::Shared(key)) => twilio::verify(key, request),
        (_, key) => data::verify(key, request),
    }
}

/// Verifies what the head alone shows. Adyen's signatures are in the body.
fn verify_head(key: &Key, request: &Received<'_>) -> Result<(), Refusal> {
    match (request.scheme.proof, key) {
        (Proof::Token, Key::Shared(token)) => data::verify_token(token, request),
        (Proof::Adyen, _) => Ok(()),
        (Proof::Twilio, _) => request.header(request.scheme.header).map(drop),
        _ => data::read(request).map(drop),
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
    /// [`VerifierError::NoScheme`] if this crate knows no scheme of the sender. Otherwise if the
    /// secret is empty or malformed, if the sender signs the public URL, or if the scheme needs a
    /// feature that is off.
    pub fn verifier(&self, secret: impl AsRef<str>) -> Result<Verifier, VerifierError> {
        let scheme = self.scheme.ok_or(VerifierError::NoScheme(self.name()))?;
        Ok(Verifier { preset: Some(*self), ..scheme.verifier(secret)? })
    }

    /// Makes a verifier for a sender that may sign the public URL of this server.
    ///
    /// `public_url` is the part of the URL before the path that the layer sees:
    /// `https://hooks.example.com`. It is the whole URL that is configured at the sender,
    /// `https://hooks.example.com/twilio`, only if a proxy or axum's `nest` removes `/twilio`, so
    /// that the layer sees the path `/`. It includes the port, if the sender's URL has one. Schemes
    /// that sign no URL do not use it.
    ///
    /// If a request is refused, its log record `not verified` has the expected URL as `url`.
    ///
    /// # Errors
    ///
    /// As [`verifier`](Self::verifier), and [`VerifierError::InvalidPublicUrl`].
    pub fn verifier_at(
        &self,
        public_url: &str,
        secret: impl AsRef<str>,
    ) -> Result<Verifier, VerifierError> {
        let scheme = self.scheme.ok_or(VerifierError::NoScheme(self.name()))?;
        Ok(Verifier { preset: Some(*self), ..scheme.verifier_at(public_url, secret)? })
    }

    /// Returns how the sender signs; `None` if this crate does not know it. SendGrid's verifier
    /// needs the feature `verify-ecdsa`, and Discord's `verify-ed25519`.
    #[must_use]
    pub fn scheme(&self) -> Option<Scheme> {
        self.scheme
    }
}

impl Scheme {
    /// Makes a verifier with a secret.
    ///
    /// # Errors
    ///
    /// [`VerifierError::InvalidScheme`]; otherwise if the secret is empty or malformed, if the
    /// scheme signs the public URL, or if it needs a feature that is off.
    pub fn verifier(&self, secret: impl AsRef<str>) -> Result<Verifier, VerifierError> {
        Verifier::new(*self, secret.as_ref(), None)
    }

    /// Makes a verifier for a scheme that signs the public URL of this server: see
    /// [`Preset::verifier_at`].
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
}

/// How the sender signs; `None` if this crate does not know it.
impl From<Preset> for Option<Scheme> {
    fn from(preset: Preset) -> Self {
        preset.scheme
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("preset", &self.preset.map_or("none", |preset| preset.name()))
            .field("keys", &self.keys.len())
            .field("tolerance", &self.tolerance)
            .finish_non_exhaustive()
    }
}
