//! [`Challenge`]: the request by which a sender checks an endpoint, and the answer that it expects,
//! as data. [`Handshake`] reads it. The feature `verify` answers it.

use std::borrow::Cow;

use http::{Method, StatusCode};

use super::read::contains;
use crate::key::{self, KeyPart, RequestRef};

/// A request that carries no event, and whose sender reads the answer.
#[derive(Debug)]
pub(crate) struct Challenge {
    pub(crate) method: Method,
    /// What the request has in these fields: a value, or nothing.
    pub(crate) marks: &'static [(Field, Option<&'static str>)],
    /// The field that has to be equal to the user's own token.
    pub(crate) token: Option<Field>,
    pub(crate) answer: Answer,
}

/// The default of the fields that a challenge does not state.
pub(super) const POSTED: Challenge = Challenge {
    method: Method::POST,
    marks: &[],
    token: None,
    answer: Answer::Pong(StatusCode::NO_CONTENT, ""),
};

/// A field of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Field {
    Header(&'static str),
    Query(&'static str),
    /// A pointer into the body.
    Body(&'static str),
}

/// The answer that a sender expects.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    /// The value of this field, as text.
    Text(Field),
    /// An object of JSON whose only member, of this name, has the value of this field.
    Member(&'static str, Field),
    /// An object of JSON with the value of this field, and its HMAC-SHA256 by the secret in
    /// hexadecimal: the members `plainToken` and `encryptedToken`.
    Code(Field),
    /// The header `WebHook-Allowed-Origin` with the value of this field.
    Origin(Field),
    /// This status and this JSON.
    Pong(StatusCode, &'static str),
}

impl Challenge {
    /// Returns what the answer needs from the user.
    pub(crate) fn secret(&self) -> Option<&'static str> {
        match (self.token, self.answer) {
            (Some(_), _) => Some("verify token"),
            (None, Answer::Code(_)) => Some("secret"),
            (None, _) => None,
        }
    }
}

impl Answer {
    /// Returns the field that the answer repeats.
    fn field(&self) -> Option<Field> {
        match *self {
            Self::Text(field) | Self::Member(_, field) | Self::Code(field) => Some(field),
            Self::Origin(field) => Some(field),
            Self::Pong(..) => None,
        }
    }
}

impl Field {
    fn part(self) -> KeyPart {
        match self {
            Self::Header(name) => key::header(name),
            Self::Query(parameter) => key::query(parameter),
            Self::Body(pointer) => key::json(pointer),
        }
    }

    fn is_in_body(self) -> bool {
        matches!(self, Self::Body(_))
    }
}

/// A challenge, with the parts that read its fields.
pub(crate) struct Handshake {
    pub(crate) challenge: &'static Challenge,
    marks: Vec<KeyPart>,
    pub(crate) token: Option<KeyPart>,
    /// `None` if the answer repeats nothing.
    value: Option<KeyPart>,
}

impl Handshake {
    pub(crate) fn new(challenge: &'static Challenge) -> Self {
        let marks = challenge.marks.iter().map(|(field, _)| field.part()).collect();
        let token = challenge.token.map(Field::part);
        let value = challenge.answer.field().map(Field::part);
        Self { challenge, marks, token, value }
    }

    /// Returns `true` if the handshake has a body. In any other, a body may be an event.
    pub(crate) fn has_body(&self) -> bool {
        let marks = self.challenge.marks.iter().map(|(field, _)| *field);
        marks.chain(self.challenge.answer.field()).any(Field::is_in_body)
    }

    /// Returns `true` if the request has what marks this handshake; in its head, unless it is the
    /// whole request.
    pub(crate) fn is_marked(&self, request: &RequestRef<'_>, is_whole: bool) -> bool {
        let has = |part: &KeyPart, value| part.read(request).is_ok_and(|it| it.as_deref() == value);
        let mut marks = self.challenge.marks.iter().zip(&self.marks);
        *request.method() == self.challenge.method
            && marks.all(|((field, value), part)| match (field.is_in_body(), value) {
                (true, _) if !is_whole => true,
                (true, Some(text)) if !contains(request, text) => false,
                _ => has(part, *value),
            })
    }

    /// Returns `true` if the request is this handshake. With a mark in its body, it is one also
    /// without the value that the answer repeats.
    pub(crate) fn is(&self, request: &RequestRef<'_>) -> bool {
        if self.challenge.marks.iter().any(|(field, _)| field.is_in_body()) {
            return self.is_marked(request, true);
        }
        self.read(request).is_some()
    }

    /// Returns the value that the answer to this request repeats, an empty one if it repeats
    /// nothing; `None` if the request is another one.
    pub(crate) fn read<'r>(&self, request: &RequestRef<'r>) -> Option<Cow<'r, str>> {
        if !(self.has_body() || request.body().is_empty()) || !self.is_marked(request, true) {
            return None;
        }
        let Some(part) = &self.value else { return Some(Cow::Borrowed("")) };
        part.read(request).ok().flatten()
    }
}

/// The GET by which Meta checks a URL.
pub(super) const META: &[Challenge] = &[Challenge {
    method: Method::GET,
    marks: &[(Field::Query("hub.mode"), Some("subscribe"))],
    token: Some(Field::Query("hub.verify_token")),
    answer: Answer::Text(Field::Query("hub.challenge")),
}];

/// The OPTIONS of "HTTP 1.1 Web Hooks for Event Delivery".
pub(super) const WEB_HOOK: Challenge = Challenge {
    method: Method::OPTIONS,
    marks: &[],
    token: None,
    answer: Answer::Origin(Field::Header("webhook-request-origin")),
};
