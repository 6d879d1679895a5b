//! Verifies signatures: one function for each scheme.
//!
//! 1. A signature covers the body as it arrived. A body that was parsed and serialised again differs.
//! 2. A signature is compared as a whole and in constant time. A comparison that stops early would let
//!    an attacker guess the signature byte by byte.
//! 3. A missing, repeated or unreadable header is refused.
//! 4. A signed time must be within five minutes of the server's time, before or after. So an attacker
//!    cannot resend a captured delivery for ever. The time is an argument, so that tests can set it.
//! 5. A secret can change while deliveries arrive. One request may carry several signatures, by the old
//!    and the new secret, and the receiver may accept several secrets ([`any_of`]).
//!
//! None of this recognises a retry: its id is the same, but a signature over the time is new.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ctutils::CtEq;
use hmac::{Hmac, KeyInit, Mac};
use http::Method;
use http::request::Parts;
use http::uri::PathAndQuery;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use standardwebhooks::Webhook;

/// The largest difference between a signed time and the server's time, in seconds.
const TOLERANCE: u64 = 300;

/// A request to be verified.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received<'a> {
    pub(crate) head: &'a Parts,
    /// The whole body as it arrived.
    pub(crate) body: &'a [u8],
    /// Seconds since 1970.
    pub(crate) now: i64,
}

/// Why a request is not verified. It is logged, and not sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The header is missing.
    Missing(&'static str),
    /// The header is repeated or unreadable.
    Malformed(&'static str),
    /// Two headers that must be equal differ.
    Ambiguous(&'static str),
    /// The signed time is too old, or too far in the future.
    OutOfTime,
    /// No signature matches the secret.
    Forged,
}

/// Verifies the requests of one sender.
pub(crate) type Check = Arc<dyn Fn(&Received<'_>) -> Result<(), Refusal> + Send + Sync>;

/// The signature schemes in this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    StandardWebhooks,
    Svix,
    GitHub,
    Gitea,
    Stripe,
    Shopify,
    Slack,
    Twilio,
}

/// Why a check cannot be created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetupError {
    /// The secret is empty.
    EmptySecret,
    /// The scheme needs a secret in base64.
    NotBase64,
    /// The scheme signs the public URL, and none is configured.
    NoPublicUrl,
}

impl Scheme {
    /// Returns the scheme of the preset with this name.
    pub(crate) fn of(sender: &str) -> Option<Self> {
        Some(match sender {
            "standard-webhooks" => Self::StandardWebhooks,
            "svix" => Self::Svix,
            "github" | "whatsapp" => Self::GitHub,
            "gitea" => Self::Gitea,
            "stripe" => Self::Stripe,
            "shopify" => Self::Shopify,
            "slack" => Self::Slack,
            "twilio" | "twilio-by-token" => Self::Twilio,
            _ => return None,
        })
    }

    /// Returns the check with this secret, in the sender's own notation.
    ///
    /// `public_url` is the URL of this server as the sender knows it, without the path. Only [`twilio`]
    /// needs it.
    pub(crate) fn check(self, secret: &str, public_url: Option<&str>) -> Result<Check, SetupError> {
        let key = secret.as_bytes().to_vec();
        if secret.strip_prefix("whsec_").unwrap_or(secret).is_empty() {
            return Err(SetupError::EmptySecret);
        }
        let webhook = || Webhook::new(secret).map_err(|_| SetupError::NotBase64);
        Ok(match self {
            Self::StandardWebhooks => {
                let webhook = webhook()?;
                Arc::new(move |request| standard_webhooks(&webhook, request))
            }
            Self::Svix => {
                let webhook = webhook()?;
                Arc::new(move |request| svix(&webhook, request))
            }
            Self::GitHub => Arc::new(move |request| github(&key, request)),
            Self::Gitea => Arc::new(move |request| gitea(&key, request)),
            Self::Stripe => Arc::new(move |request| stripe(&key, request)),
            Self::Shopify => Arc::new(move |request| shopify(&key, request)),
            Self::Slack => Arc::new(move |request| slack(&key, request)),
            Self::Twilio => {
                let url = public_url.ok_or(SetupError::NoPublicUrl)?;
                let urls = with_and_without_port(url.trim_end_matches('/'));
                Arc::new(move |request| twilio(&key, &urls, request))
            }
        })
    }
}

/// Returns a check that accepts what any of these checks accepts, for a change of secrets.
pub(crate) fn any_of(checks: Vec<Check>) -> Check {
    Arc::new(move |request| {
        let mut last = Err(Refusal::Forged);
        for check in &checks {
            last = check(request);
            if last.is_ok() {
                break;
            }
        }
        last
    })
}

/// [Standard Webhooks](https://github.com/standard-webhooks/standard-webhooks): HMAC-SHA256 over
/// id, time and body.
pub(crate) fn standard_webhooks(webhook: &Webhook, request: &Received<'_>) -> Result<(), Refusal> {
    webhook_signed(
        webhook,
        request,
        [
            request.header("webhook-id")?,
            request.header("webhook-timestamp")?,
            request.header("webhook-signature")?,
        ],
    )
}

/// Svix: Standard Webhooks in its own headers, in the standard headers, or in both.
pub(crate) fn svix(webhook: &Webhook, request: &Received<'_>) -> Result<(), Refusal> {
    let either = |own, standard| match (request.optional(own)?, request.optional(standard)?) {
        // The signature covers one of them, and a service downstream may read the other.
        (Some(one), Some(other)) if one != other => Err(Refusal::Ambiguous(own)),
        (Some(value), _) | (None, Some(value)) => Ok(value),
        (None, None) => Err(Refusal::Missing(own)),
    };
    webhook_signed(
        webhook,
        request,
        [
            either("svix-id", "webhook-id")?,
            either("svix-timestamp", "webhook-timestamp")?,
            either("svix-signature", "webhook-signature")?,
        ],
    )
}

/// Like `Webhook::verify`, with the time as an argument.
fn webhook_signed(
    webhook: &Webhook,
    request: &Received<'_>,
    [id, time, signatures]: [&str; 3],
) -> Result<(), Refusal> {
    let time = request.in_time("webhook-timestamp", time)?;
    // The crate signs text only. All of these senders send text.
    let expected = webhook.sign(id, time, request.body).map_err(|_| Refusal::Forged)?;
    let matches = |signature: &str| signature.as_bytes().ct_eq(expected.as_bytes()).to_bool();
    signatures.split(' ').any(matches).then_some(()).ok_or(Refusal::Forged)
}

/// [GitHub](https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries) and
/// Meta: HMAC-SHA256 over the body, without an id or a time. An attacker can resend a captured delivery
/// under any id until the secret changes.
pub(crate) fn github(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = request.header("x-hub-signature-256")?.strip_prefix("sha256=").and_then(hex);
    signed::<Hmac<Sha256>>(secret, &[request.body], signature)
}

/// Gitea and Forgejo: like GitHub, without the prefix `sha256=`.
pub(crate) fn gitea(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = hex(request.header("x-gitea-signature")?);
    signed::<Hmac<Sha256>>(secret, &[request.body], signature)
}

/// [Stripe](https://docs.stripe.com/webhooks): HMAC-SHA256 over time and body,
/// `t=TIME,v1=SIGNATURE`, with one `v1` for each valid secret. The key is the whole secret, including
/// `whsec_`.
pub(crate) fn stripe(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const HEADER: &str = "stripe-signature";
    let (mut times, mut signatures) = (Vec::new(), Vec::new());
    for item in request.header(HEADER)?.split(',') {
        match item.split_once('=') {
            Some(("t", time)) => times.push(time),
            Some(("v1", signature)) => signatures.extend(hex(signature)),
            // Signatures of other schemes.
            _ => {}
        }
    }
    let [time] = times[..] else { return Err(Refusal::Malformed(HEADER)) };
    request.in_time(HEADER, time)?;
    signed::<Hmac<Sha256>>(secret, &[time.as_bytes(), b".", request.body], signatures)
}

/// [Shopify](https://shopify.dev/docs/apps/build/webhooks): HMAC-SHA256 over the body. The headers with
/// id, topic and shop are not signed.
pub(crate) fn shopify(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = base64(request.header("x-shopify-hmac-sha256")?);
    signed::<Hmac<Sha256>>(secret, &[request.body], signature)
}

/// Slack: HMAC-SHA256 over version, time and body.
pub(crate) fn slack(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const TIME: &str = "x-slack-request-timestamp";
    let time = request.header(TIME)?;
    request.in_time(TIME, time)?;
    let signature = request.header("x-slack-signature")?.strip_prefix("v0=").and_then(hex);
    signed::<Hmac<Sha256>>(secret, &[b"v0:", time.as_bytes(), b":", request.body], signature)
}

/// [Twilio](https://www.twilio.com/docs/usage/security#validating-requests): HMAC-SHA1 over the whole URL
/// and the sorted form fields, or over the URL alone without a form. If the body is no form, the URL
/// contains its digest.
///
/// The URL is the one in Twilio's configuration. Behind a proxy, a server sees another scheme, host or
/// port, and a client can forge headers such as `X-Forwarded-Host`. So the public URL is configured, and
/// prefixes the path and query of the request. If the proxy or axum's `nest` removes a prefix of the
/// path, the public URL includes it. Twilio signs the URL sometimes with the port and sometimes without
/// it. So there are two public URLs, and both are tried, as in Twilio's libraries.
///
/// The signed text has no separators: `a=bc` and `ab=c` have the same signature, and so do the end of
/// the query and the beginning of the form. No time is signed either. So an attacker can resend a
/// captured delivery with other fields, which gives another key. Use TLS on the whole way, and let the
/// handler refuse an invalid SID or status.
pub(crate) fn twilio(
    auth_token: &[u8],
    public_urls: &[String],
    request: &Received<'_>,
) -> Result<(), Refusal> {
    let signature = base64(request.header("x-twilio-signature")?);
    let uri = &request.head.uri;
    let path_and_query = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let mut text = path_and_query.to_owned();
    let mut query = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
    if let Some((_, digest)) = query.find(|(name, _)| name == "bodySHA256") {
        // The signature covers the digest. The digest is public, so a plain comparison is enough.
        if hex(&digest).is_none_or(|digest| digest[..] != Sha256::digest(request.body)[..]) {
            return Err(Refusal::Forged);
        }
    } else if request.head.method == Method::GET || request.head.method == Method::HEAD {
        // Otherwise an attacker could move the end of the query into a form.
        if !request.body.is_empty() {
            return Err(Refusal::Forged);
        }
    } else {
        // Twilio sorts the fields and signs equal pairs once.
        for (name, value) in form_urlencoded::parse(request.body).collect::<BTreeSet<_>>() {
            text.push_str(&name);
            text.push_str(&value);
        }
    }
    let by = |url: &String| {
        signed::<Hmac<Sha1>>(auth_token, &[url.as_bytes(), text.as_bytes()], signature.clone())
    };
    public_urls.iter().map(by).find(Result::is_ok).unwrap_or(Err(Refusal::Forged))
}

fn with_and_without_port(url: &str) -> [String; 2] {
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let standard = if scheme == "http" { "80" } else { "443" };
    let (host, port) = match authority.rsplit_once(':') {
        // In `[::1]`, the text after the last colon is no number.
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port),
        _ => (authority, standard),
    };
    [format!("{scheme}://{host}{path}"), format!("{scheme}://{host}:{port}{path}")]
}

/// Succeeds if any of the signatures matches the parts.
fn signed<M: Mac + KeyInit + Clone>(
    secret: &[u8],
    parts: &[&[u8]],
    signatures: impl IntoIterator<Item = Vec<u8>>,
) -> Result<(), Refusal> {
    let mut mac = <M as KeyInit>::new_from_slice(secret).map_err(|_| Refusal::Forged)?;
    for part in parts {
        mac.update(part);
    }
    let matches = |signature: Vec<u8>| mac.clone().verify_slice(&signature).is_ok();
    signatures.into_iter().any(matches).then_some(()).ok_or(Refusal::Forged)
}

fn hex(text: &str) -> Option<Vec<u8>> {
    base16ct::mixed::decode_vec(text).ok()
}

fn base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

impl<'a> Received<'a> {
    fn header(&self, name: &'static str) -> Result<&'a str, Refusal> {
        self.optional(name)?.ok_or(Refusal::Missing(name))
    }

    fn optional(&self, name: &'static str) -> Result<Option<&'a str>, Refusal> {
        let mut values = self.head.headers.get_all(name).iter();
        match (values.next(), values.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => value.to_str().map(Some).map_err(|_| Refusal::Malformed(name)),
            // A service downstream may read the other value.
            (Some(_), Some(_)) => Err(Refusal::Malformed(name)),
        }
    }

    fn in_time(&self, header: &'static str, time: &str) -> Result<i64, Refusal> {
        let time = time.parse().map_err(|_| Refusal::Malformed(header))?;
        if self.now.abs_diff(time) > TOLERANCE {
            return Err(Refusal::OutOfTime);
        }
        Ok(time)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(header) => write!(f, "{header} is missing"),
            Self::Malformed(header) => write!(f, "{header} is repeated or unreadable"),
            Self::Ambiguous(header) => write!(f, "{header} and its standard header differ"),
            Self::OutOfTime => f.write_str("the signed time is too old or in the future"),
            Self::Forged => f.write_str("the signature does not match the request"),
        }
    }
}

impl Error for Refusal {}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EmptySecret => "the secret is empty",
            Self::NotBase64 => "the secret is not `whsec_` and base64",
            Self::NoPublicUrl => "the sender signs the URL: set --public-url",
        })
    }
}

impl Error for SetupError {}
