//! Whether a request comes from whom it says: one function for each scheme of signing.
//!
//! 1. What is signed is the body as it arrived. One that was parsed and written anew is another.
//! 2. A signature is compared whole and in constant time: a prefix is soon guessed, and so is what
//!    a clock gives away byte by byte.
//! 3. What is missing, repeated or unreadable proves nothing, and is refused.
//! 4. Where the time is signed, it is within five minutes of ours, before or after: whoever has
//!    overheard a delivery cannot send it for ever. The time is an argument, so that tests can set
//!    it.
//! 5. A secret can be changed while deliveries arrive: several signatures in one request (the
//!    sender signs with the old and the new one) and several secrets ([`any_of`]) are both fine.
//!
//! None of this recognises a retry: its signature is new where the time is signed, and its id is
//! the old one.

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

/// How far the time of a signature may be from ours, in seconds.
const TOLERANCE: u64 = 300;

/// A request to be verified.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received<'a> {
    pub(crate) head: &'a Parts,
    /// All of it, untouched.
    pub(crate) body: &'a [u8],
    /// Seconds since 1970.
    pub(crate) now: i64,
}

/// Why a request is not verified. For the log: the client hears nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The header is not there.
    Missing(&'static str),
    /// The header is repeated, or cannot be read.
    Malformed(&'static str),
    /// Two headers that should say the same do not.
    Ambiguous(&'static str),
    /// It was signed too long ago, or will be.
    OutOfTime,
    /// Nobody with the secret has signed this.
    Forged,
}

/// Verifies the requests of one sender.
pub(crate) type Check = Arc<dyn Fn(&Received<'_>) -> Result<(), Refusal> + Send + Sync>;

/// The ways of signing that there is a function for.
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

/// Why there can be no check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetupError {
    /// Everybody knows the empty secret.
    EmptySecret,
    /// The scheme's secrets are in base64.
    NotBase64,
    /// The scheme signs the URL, which only the sender knows.
    NoPublicUrl,
}

impl Scheme {
    /// That of the sender with a preset of this name.
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

    /// The check with this secret, which is as the sender shows it.
    ///
    /// `public_url` is where the sender finds this server, without the path: [`twilio`] needs it.
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

/// One check of several: the secret is being changed, and the sender may use either.
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

/// Svix: Standard Webhooks in headers of its own, or in the standard ones, or in both.
pub(crate) fn svix(webhook: &Webhook, request: &Received<'_>) -> Result<(), Refusal> {
    let either = |own, standard| match (request.optional(own)?, request.optional(standard)?) {
        // One may be what is signed, and the other what somebody downstream believes.
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

/// `Webhook::verify` does the same, by the clock of the machine.
fn webhook_signed(
    webhook: &Webhook,
    request: &Received<'_>,
    [id, time, signatures]: [&str; 3],
) -> Result<(), Refusal> {
    let time = request.in_time("webhook-timestamp", time)?;
    // The crate signs text only, as all of these senders send it.
    let expected = webhook.sign(id, time, request.body).map_err(|_| Refusal::Forged)?;
    let is_it = |signature: &str| signature.as_bytes().ct_eq(expected.as_bytes()).to_bool();
    signatures.split(' ').any(is_it).then_some(()).ok_or(Refusal::Forged)
}

/// [GitHub](https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries) and
/// Meta: HMAC-SHA256 over the body. No id, no time: a delivery that was overheard can be sent
/// again, under any id, for as long as the secret lives.
pub(crate) fn github(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = request.header("x-hub-signature-256")?.strip_prefix("sha256=").and_then(hex);
    signed::<Hmac<Sha256>>(secret, &[request.body], signature)
}

/// Gitea and Forgejo: as GitHub, without the prefix.
pub(crate) fn gitea(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = hex(request.header("x-gitea-signature")?);
    signed::<Hmac<Sha256>>(secret, &[request.body], signature)
}

/// [Stripe](https://docs.stripe.com/webhooks): HMAC-SHA256 over time and body,
/// `t=TIME,v1=SIGNATURE`, with a `v1` for each secret while it changes. The secret is the whole
/// text, `whsec_` included.
pub(crate) fn stripe(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    const HEADER: &str = "stripe-signature";
    let (mut times, mut signatures) = (Vec::new(), Vec::new());
    for item in request.header(HEADER)?.split(',') {
        match item.split_once('=') {
            Some(("t", time)) => times.push(time),
            Some(("v1", signature)) => signatures.extend(hex(signature)),
            // Schemes of other versions.
            _ => {}
        }
    }
    let [time] = times[..] else { return Err(Refusal::Malformed(HEADER)) };
    request.in_time(HEADER, time)?;
    signed::<Hmac<Sha256>>(secret, &[time.as_bytes(), b".", request.body], signatures)
}

/// [Shopify](https://shopify.dev/docs/apps/build/webhooks): HMAC-SHA256 over the body. The id, the
/// topic and the shop are headers, and are not signed.
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

/// [Twilio](https://www.twilio.com/docs/usage/security#validating-requests): HMAC-SHA1 over the
/// whole URL and the form's fields in order; over the URL alone where there is no form. A body that
/// is no form has its digest in the URL.
///
/// The URL is the one that Twilio was given. Behind a proxy a server sees another scheme, host or
/// port, and headers such as `X-Forwarded-Host` are what the client likes: so the public URL is
/// configured, and comes before the path and query that arrive here. If the proxy takes a prefix
/// off the path, or axum's `nest` does, it is part of the public URL. There are two of them, with the
/// port and without: Twilio signs now the one and now the other, and its libraries try both.
///
/// Nothing separates what is signed: `a=bc` and `ab=c` are the same to Twilio, and so are the end
/// of the query and the beginning of the form. No time is signed either. Whoever has overheard a
/// delivery can send it again with its fields cut anew, which is another key: an endpoint of
/// Twilio's is worth TLS all the way, and a handler that refuses what is no SID and no status.
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
        // The digest is no secret, and is signed with the URL.
        if hex(&digest).is_none_or(|digest| digest[..] != Sha256::digest(request.body)[..]) {
            return Err(Refusal::Forged);
        }
    } else if request.head.method == Method::GET || request.head.method == Method::HEAD {
        // Or the end of the query could be sent as a form.
        if !request.body.is_empty() {
            return Err(Refusal::Forged);
        }
    } else {
        // Sorted, and each pair once.
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
        // Or it is the middle of an IPv6 address.
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, port),
        _ => (authority, standard),
    };
    [format!("{scheme}://{host}{path}"), format!("{scheme}://{host}:{port}{path}")]
}

/// Whether any of the signatures is that of the parts.
fn signed<M: Mac + KeyInit + Clone>(
    secret: &[u8],
    parts: &[&[u8]],
    signatures: impl IntoIterator<Item = Vec<u8>>,
) -> Result<(), Refusal> {
    let mut mac = <M as KeyInit>::new_from_slice(secret).map_err(|_| Refusal::Forged)?;
    for part in parts {
        mac.update(part);
    }
    let is_it = |signature: Vec<u8>| mac.clone().verify_slice(&signature).is_ok();
    signatures.into_iter().any(is_it).then_some(()).ok_or(Refusal::Forged)
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
            // Others may read the other one.
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
            Self::Missing(header) => write!(f, "there is no {header}"),
            Self::Malformed(header) => write!(f, "{header} is repeated or cannot be read"),
            Self::Ambiguous(header) => write!(f, "{header} and its standard twin differ"),
            Self::OutOfTime => f.write_str("the signature is too old, or from the future"),
            Self::Forged => f.write_str("the signature is not that of this request"),
        }
    }
}

impl Error for Refusal {}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EmptySecret => "the secret is empty",
            Self::NotBase64 => "the secret is not `whsec_` and base64",
            Self::NoPublicUrl => "the sender signs the URL: say which by --public-url",
        })
    }
}

impl Error for SetupError {}
