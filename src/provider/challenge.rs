//! [`Challenge`]: the request by which a sender checks an endpoint, and the answer that it expects,
//! as data. The feature `verify` answers it.

use http::{Method, StatusCode};

use crate::key::{self, KeyPart};

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
    pub(crate) fn field(&self) -> Option<Field> {
        match *self {
            Self::Text(field) | Self::Member(_, field) | Self::Code(field) => Some(field),
            Self::Origin(field) => Some(field),
            Self::Pong(..) => None,
        }
    }
}

impl Field {
    pub(crate) fn part(self) -> KeyPart {
        match self {
            Self::Header(name) => key::header(name),
            Self::Query(parameter) => key::query(parameter),
            Self::Body(pointer) => key::json(pointer),
        }
    }

    pub(crate) fn is_in_body(self) -> bool {
        matches!(self, Self::Body(_))
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
