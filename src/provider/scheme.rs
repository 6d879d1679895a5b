//! [`Scheme`]: how a sender signs, as data. The feature `verify` interprets it.

use http::HeaderName;

/// How a sender signs its requests, as data: for a sender without a preset, a constant of your
/// program.
///
/// The presets have values of this type, and `testing::sign` signs by it. A scheme is checked when
/// [`verifier`](Self::verifier) adds the secret.
/// [`VerifyLayer::from_fn`](crate::verify::VerifyLayer::from_fn) is for senders that no scheme
/// describes.
///
/// ```
/// use tower_dedup::verify::{Part, Scheme, VerifierError, VerifyLayer};
///
/// // x-acme-signature: t=1753900006,v1=HEX, with the code of `1753900006.BODY`
/// const ACME: Scheme =
///     Scheme::hmac_sha256("x-acme-signature", &[Part::Item("t="), Part::Text("."), Part::Body])
///         .separated_by(&[','])
///         .prefix("v1=");
///
/// // Two secrets while one replaces the other.
/// let verifier = ACME.verifier("new secret")?.or_secret("old secret")?;
/// let verify = VerifyLayer::new(verifier).named("acme");
/// assert_eq!(ACME.verifier("").unwrap_err(), VerifierError::EmptySecret);
/// # let _ = verify;
/// # Ok::<(), VerifierError>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use = "a scheme does nothing until it has a secret"]
pub struct Scheme {
    /// The header with the signature, or with the token; empty if the signatures are in the body.
    pub(crate) header: &'static str,
    /// Another header with a code, by another secret; empty if there is none.
    pub(crate) other_header: &'static str,
    /// The headers that begin with the first may begin with the second instead.
    pub(crate) twin: (&'static str, &'static str),
    pub(crate) proof: Proof,
    pub(crate) secret: Secret,
    /// The signed text.
    pub(crate) text: &'static [Part],
    /// Empty for a header with one item.
    pub(crate) separators: &'static [char],
    /// The beginning of an item with a code. Other items belong to other versions.
    pub(crate) prefix: &'static str,
    pub(crate) is_base64: bool,
    /// Some characters in the query of the signed URL may be decoded.
    pub(crate) decodes_query: bool,
}

/// A part of the signed text of a [`Scheme`].
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Part {
    /// This text.
    Text(&'static str),
    /// The method of the request: `POST`.
    Method,
    /// The value of this header, such as the id.
    Header(&'static str),
    /// The time in this header, in seconds since 1970. A signed time must be within the
    /// [tolerance](crate::verify::Verifier::tolerance).
    Seconds(&'static str),
    /// The time in this header, in milliseconds since 1970.
    Millis(&'static str),
    /// The time in this header, as `2026-11-22T06:00:00Z`.
    Rfc3339(&'static str),
    /// The time in seconds since 1970, in the item of the signature's header that begins with this
    /// text. While its secret changes, a sender may write up to four such items: each is signed by
    /// the codes that follow it.
    Item(&'static str),
    /// The time in milliseconds since 1970, in an item as [`Item`](Self::Item) has it.
    ItemMillis(&'static str),
    /// The whole body as it arrived. Every signed text has it.
    Body,
    /// The public URL of the server with path and query: see [`verifier_at`](Scheme::verifier_at).
    Url,
    /// Not a part of the text: if the request has this header, it must have this value. So another
    /// algorithm is refused.
    Fixed(&'static str, &'static str),
}

/// What makes a request genuine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    // The header has a code of the text.
    HmacSha256,
    HmacSha512,
    HmacSha1,
    Ed25519,
    P256,
    /// The header is the secret itself.
    Token,
    // Data cannot express these: each is a module of `verify`.
    Adyen,
    Twilio,
}

/// The form of a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Secret {
    /// Any text.
    Text,
    /// Base64 after `whsec_` or without it, or a public key of Ed25519 after `whpk_`.
    Webhook,
    Base64,
    Hex,
    /// Up to 256 letters, digits, `_` and `-`.
    Token,
}

impl Scheme {
    pub(super) const fn new(header: &'static str, proof: Proof) -> Self {
        Self {
            header,
            other_header: "",
            twin: ("", ""),
            proof,
            secret: Secret::Text,
            text: &[],
            separators: &[],
            prefix: "",
            is_base64: false,
            decodes_query: false,
        }
    }

    /// Makes a scheme whose header has the HMAC-SHA256 of the text in hexadecimal. The secret is
    /// any text, whose bytes are the key.
    pub const fn hmac_sha256(header: &'static str, text: &'static [Part]) -> Self {
        Self { text, ..Self::new(header, Proof::HmacSha256) }
    }

    /// Makes a scheme like [`hmac_sha256`](Self::hmac_sha256) with HMAC-SHA512.
    pub const fn hmac_sha512(header: &'static str, text: &'static [Part]) -> Self {
        Self { text, ..Self::new(header, Proof::HmacSha512) }
    }

    /// Makes a scheme like [`hmac_sha256`](Self::hmac_sha256) with HMAC-SHA1.
    pub const fn hmac_sha1(header: &'static str, text: &'static [Part]) -> Self {
        Self { text, ..Self::new(header, Proof::HmacSha1) }
    }

    /// Makes a scheme whose header has the Ed25519 signature of the text in hexadecimal. The secret
    /// is the public key in hexadecimal. Its verifier needs the feature `verify-ed25519`.
    pub const fn ed25519(header: &'static str, text: &'static [Part]) -> Self {
        Self { text, ..Self::new(header, Proof::Ed25519) }.hex_secret()
    }

    /// Makes a scheme whose header is the secret itself, `Basic …` and `Bearer …` included. It
    /// signs nothing: whoever reads a delivery can forge others.
    pub const fn token(header: &'static str) -> Self {
        Self::new(header, Proof::Token)
    }

    /// Sets the text that precedes a code: `sha256=`. An item without it belongs to another
    /// version, and is ignored.
    pub const fn prefix(self, prefix: &'static str) -> Self {
        Self { prefix, ..self }
    }

    /// Expects the codes in base64, in the standard or the URL-safe alphabet (RFC 4648), with or
    /// without padding.
    pub const fn base64(self) -> Self {
        Self { is_base64: true, ..self }
    }

    /// Expects a header with several items between these characters. One valid code is enough.
    pub const fn separated_by(self, separators: &'static [char]) -> Self {
        Self { separators, ..self }
    }

    /// Takes secrets in base64.
    pub const fn base64_secret(self) -> Self {
        self.with_secret(Secret::Base64)
    }

    /// Takes secrets in hexadecimal.
    pub const fn hex_secret(self) -> Self {
        self.with_secret(Secret::Hex)
    }

    pub(super) const fn with_secret(self, secret: Secret) -> Self {
        Self { secret, ..self }
    }

    /// Returns `true` if the public URL of the server is signed.
    pub(crate) fn signs_url(&self) -> bool {
        let is_url = |part: &Part| matches!(part, Part::Url);
        self.text.iter().any(is_url) || self.proof == Proof::Twilio
    }

    /// Returns the beginning of the items with a time, if the time is in the header of the
    /// signature.
    pub(crate) fn time_item(&self) -> Option<&'static str> {
        let item = |part: &Part| match *part {
            Part::Item(prefix) | Part::ItemMillis(prefix) => Some(prefix),
            _ => None,
        };
        self.text.iter().find_map(item)
    }

    /// Returns the rule that the scheme breaks.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let optional = Some(self.other_header).filter(|name| !name.is_empty());
        let mut named = self.text.iter().filter_map(Part::header).chain(optional);
        let count = |is: fn(&Part) -> bool| self.text.iter().filter(|part| is(part)).count();
        match self.proof {
            Proof::Adyen => None,
            _ if !is_name(self.header) || !named.all(is_name) => Some("a header has a valid name"),
            Proof::Token | Proof::Twilio => None,
            _ if count(|part| matches!(part, Part::Body)) == 0 => Some("the text has the body"),
            _ if count(Part::is_time) > 1 => Some("the text has one time at most"),
            _ if self.separators.is_empty() && self.time_item().is_some() => {
                Some("a header with a time and a code is separated")
            }
            _ => None,
        }
    }
}

fn is_name(header: &str) -> bool {
    HeaderName::from_bytes(header.as_bytes()).is_ok()
}

impl Part {
    fn is_time(&self) -> bool {
        matches!(self, Self::Seconds(_) | Self::Millis(_) | Self::Rfc3339(_))
            || matches!(self, Self::Item(_) | Self::ItemMillis(_))
    }

    fn header(&self) -> Option<&'static str> {
        match *self {
            Self::Header(name) | Self::Seconds(name) | Self::Millis(name) => Some(name),
            Self::Rfc3339(name) | Self::Fixed(name, _) => Some(name),
            Self::Text(_) | Self::Method | Self::Body | Self::Url => None,
            Self::Item(_) | Self::ItemMillis(_) => None,
        }
    }
}
