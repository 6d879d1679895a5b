//! [`Refusal`] of a request, and [`VerifierError`] of the code that builds a verifier.

use std::fmt;

use crate::provider::{self, Preset};

/// The section of the guide on senders without a scheme.
const PAGE: &str =
    "https://docs.rs/tower-dedup/latest/tower_dedup/guide/verification/#senders-without-a-scheme";

/// Why a request is not verified.
///
/// A [`VerifyLayer`](super::VerifyLayer) logs it and does not send it to the client. It contains no
/// value of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The header, or the member of the body, is missing.
    Missing(&'static str),
    /// The header, the form or the member of the body is repeated, unreadable or too long.
    Malformed(&'static str),
    /// The header and its equivalent in the other family of headers differ.
    Ambiguous(&'static str),
    /// The signed time differs from the server's time by more than the tolerance.
    OutOfTime,
    /// No signature matches the request and a secret.
    Forged,
    /// [`VerifyLayer::select`](super::VerifyLayer::select) knows no verifier for the request.
    Unknown,
}

impl Refusal {
    /// Returns the name of the reason, as metrics have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Missing(_) => "missing",
            Self::Malformed(_) => "malformed",
            Self::Ambiguous(_) => "ambiguous",
            Self::OutOfTime => "out_of_time",
            Self::Forged => "forged",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(place) => write!(f, "{place} is missing"),
            Self::Malformed(place) => write!(f, "{place} is repeated, unreadable or too long"),
            Self::Ambiguous(header) => write!(f, "{header} and its standard header differ"),
            Self::OutOfTime => f.write_str("the signed time is too old or in the future"),
            Self::Forged => f.write_str("the signature does not match the request"),
            Self::Unknown => f.write_str("no verifier is known for the request"),
        }
    }
}

impl std::error::Error for Refusal {}

/// Why a verifier cannot be made. It does not contain the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VerifierError {
    /// This crate knows no signature scheme for the preset of this name. `Display` lists the
    /// senders with one, and names the page that says what to do.
    NoScheme(&'static str),
    /// A scheme of your own breaks this rule.
    InvalidScheme(&'static str),
    /// The secret is empty.
    EmptySecret,
    /// The secret does not have this form, which the scheme needs. A secret in base64 or
    /// hexadecimal has at least 16 bytes.
    MalformedSecret(&'static str),
    /// The sender signs the public URL of the server:
    /// [`verifier_at`](crate::provider::Preset::verifier_at) takes it.
    NoPublicUrl,
    /// A public URL starts with `http://` or `https://`, has a host, and has no query.
    InvalidPublicUrl,
    /// The scheme needs this cargo feature, which is off.
    FeatureDisabled(&'static str),
}

impl fmt::Display for VerifierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoScheme(preset) => {
                let known = provider::ALL.iter().filter(|known| known.scheme().is_some());
                let known = known.map(Preset::name).collect::<Vec<_>>().join(", ");
                write!(
                    f,
                    "no signature scheme is known for `{preset}`: {PAGE} says what to do; there is one for {known}"
                )
            }
            Self::InvalidScheme(rule) => {
                write!(f, "the signature scheme is invalid; the rule is: {rule}")
            }
            Self::EmptySecret => f.write_str("the secret is empty"),
            Self::MalformedSecret(rule) => write!(f, "the secret is not {rule}"),
            Self::NoPublicUrl => f.write_str("the sender signs the public URL, and none is given"),
            Self::InvalidPublicUrl => {
                f.write_str("a public URL looks like https://hooks.example.com")
            }
            Self::FeatureDisabled(feature) => {
                write!(f, "this scheme needs the cargo feature `{feature}` of tower-dedup")
            }
        }
    }
}

impl std::error::Error for VerifierError {}
