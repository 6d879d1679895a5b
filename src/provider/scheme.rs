//! [`Scheme`]: how a sender signs, as data. The feature `verify` interprets it.

/// How a sender signs its requests.
#[derive(Clone, Copy)]
pub(crate) struct Scheme {
    /// The header with the signature, or with the token; empty if the signatures are in the body.
    pub(crate) header: &'static str,
    pub(crate) secret: Secret,
    pub(crate) proof: Proof,
}

/// What makes a request genuine.
#[derive(Clone, Copy)]
pub(crate) enum Proof {
    /// The header has a code of the text: an HMAC-SHA256, or an ECDSA signature if the secret is a public key.
    Signed(Codes, &'static [Part]),
    /// The header is the secret itself.
    Token,
    // Data cannot express these: each is a function of `verify::schemes`.
    Adyen,
    HubSpot,
    Twilio,
}

/// How a header contains the codes.
#[derive(Clone, Copy)]
pub(crate) struct Codes {
    /// Another header with a code, by another secret; empty if there is none.
    pub(crate) other_header: &'static str,
    /// Empty for a header with one item.
    pub(crate) separators: &'static [char],
    /// The beginning of an item with a code. Other items belong to other versions.
    pub(crate) prefix: &'static str,
    pub(crate) is_base64: bool,
}

/// A part of the signed text.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Text(&'static str),
    /// Nothing. If the request has this header, its value is this one.
    Fixed(&'static str, &'static str),
    /// The id, in this header.
    Id(&'static str),
    /// The time in seconds since 1970, in this header.
    Seconds(&'static str),
    /// The time in RFC 3339, in this header.
    Rfc3339(&'static str),
    /// The time in seconds since 1970, in the item of the signature's header that begins so.
    Item(&'static str),
    /// The public URL of the server, with the target of the request.
    Url,
    Body,
}

/// The form of a secret.
#[derive(Clone, Copy)]
pub(crate) enum Secret {
    /// Any text.
    Text,
    /// Base64, after `whsec_` or without it.
    Webhook,
    Hex,
    /// Up to 256 letters, digits, `_` and `-`.
    Token,
    /// A public key on the curve P-256.
    PublicKey,
}

pub(super) const fn hex(prefix: &'static str) -> Codes {
    Codes { other_header: "", separators: &[], prefix, is_base64: false }
}

pub(super) const fn base64(prefix: &'static str) -> Codes {
    Codes { is_base64: true, ..hex(prefix) }
}

impl Codes {
    pub(super) const fn split_at(self, separators: &'static [char]) -> Self {
        Self { separators, ..self }
    }

    pub(super) const fn or_in(self, other_header: &'static str) -> Self {
        Self { other_header, ..self }
    }
}

impl Scheme {
    pub(super) const fn new(header: &'static str, proof: Proof) -> Self {
        Self { header, secret: Secret::Text, proof }
    }

    pub(super) const fn signed(header: &'static str, codes: Codes, text: &'static [Part]) -> Self {
        Self::new(header, Proof::Signed(codes, text))
    }

    pub(super) const fn with_secret(self, secret: Secret) -> Self {
        Self { secret, ..self }
    }

    /// Returns `true` if a signed time limits how long a captured request can be sent again.
    pub(crate) fn signs_time(&self) -> bool {
        let is_time =
            |part: &Part| matches!(part, Part::Seconds(_) | Part::Rfc3339(_) | Part::Item(_));
        self.text().iter().any(is_time) || matches!(self.proof, Proof::HubSpot)
    }

    /// Returns `true` if the public URL of the server is signed.
    pub(crate) fn signs_url(&self) -> bool {
        let is_url = |part: &Part| matches!(part, Part::Url);
        self.text().iter().any(is_url) || matches!(self.proof, Proof::HubSpot | Proof::Twilio)
    }

    fn text(&self) -> &'static [Part] {
        if let Proof::Signed(_, text) = self.proof { text } else { &[] }
    }
}
