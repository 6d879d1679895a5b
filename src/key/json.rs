//! A value of a JSON body, found by a JSON pointer (RFC 6901).
//!
//! 1. The body is read once, without building a tree: what the pointer does not name is skipped,
//!    however deeply it nests.
//! 2. The whole body must be one JSON value, except that the text of skipped strings is not looked
//!    into; the content type is not asked (some senders say `text/plain`).
//! 3. A name that occurs twice on the way is malformed: parsers differ in which of the two they
//!    hand to the handler (RFC 8259, section 4).
//! 4. Strings, booleans and integers of 64 bits are ids. Other numbers are malformed: as floating
//!    point, two different ids could become one. `null` is missing.

use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// A JSON pointer (RFC 6901): `/data/object/id`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pointer {
    text: Arc<str>,
    tokens: Arc<[String]>,
}

impl Pointer {
    /// Parses a pointer.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidPointer`] if it is neither empty nor starts with `/`, or if a `~` is
    /// not part of `~0` or `~1`.
    pub fn new(text: &str) -> Result<Self, ConfigError> {
        let tokens = match text.strip_prefix('/') {
            Some(rest) => rest.split('/').map(unescape).collect::<Result<_, _>>()?,
            None if text.is_empty() => Vec::new(),
            None => return Err(ConfigError::InvalidPointer),
        };
        Ok(Self { text: text.into(), tokens: tokens.into() })
    }

    /// The pointer as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The pointer of these plain names.
    pub(crate) fn of_names(names: &[&str]) -> Self {
        let text: String = names.iter().map(|name| format!("/{name}")).collect();
        let tokens: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        Self { text: text.into(), tokens: tokens.into() }
    }

    pub(super) fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

fn unescape(token: &str) -> Result<String, ConfigError> {
    let mut pieces = token.split('~');
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (escaped, rest) = match piece.as_bytes().first() {
            Some(b'0') => ('~', &piece[1..]),
            Some(b'1') => ('/', &piece[1..]),
            _ => return Err(ConfigError::InvalidPointer),
        };
        plain.push(escaped);
        plain.push_str(rest);
    }
    Ok(plain)
}

/// The value that `pointer` names in `body`.
pub(super) fn read(body: &[u8], pointer: &Pointer) -> Result<Option<String>, KeyError> {
    let mut fault = None;
    let mut json = serde_json::Deserializer::from_slice(body);
    let step = Step { tokens: &pointer.tokens, fault: &mut fault };
    let found = step.deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    match (fault, found) {
        (Some(kind), _) => Err(KeyError::new(kind, format!("JSON value {}", pointer.text))),
        (None, Ok(found)) => Ok(found),
        (None, Err(_)) => Err(KeyError::new(KeyErrorKind::InvalidJson, "the body")),
    }
}

/// One step along the pointer: reads a value and answers what the rest of the pointer names in it.
struct Step<'p> {
    tokens: &'p [String],
    /// What is wrong with the value, where it is not the JSON that is wrong.
    fault: &'p mut Option<KeyErrorKind>,
}

impl Step<'_> {
    fn scalar<E: serde::de::Error>(self, id: &str) -> Result<Option<String>, E> {
        if !self.tokens.is_empty() {
            return Ok(None);
        }
        if id.is_empty() {
            return self.fail(KeyErrorKind::Empty);
        }
        if id.contains('\0') {
            return self.fail(KeyErrorKind::Nul);
        }
        Ok(Some(id.to_owned()))
    }

    fn fail<E: serde::de::Error>(self, kind: KeyErrorKind) -> Result<Option<String>, E> {
        *self.fault = Some(kind);
        Err(E::custom("malformed key"))
    }
}

impl<'de> DeserializeSeed<'de> for Step<'_> {
    type Value = Option<String>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Step<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Self::Value, E> {
        self.scalar(value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Self::Value, E> {
        self.scalar(&value.to_string())
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
        self.scalar(&value.to_string())
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
        self.scalar(if value { "true" } else { "false" })
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Self::Value, E> {
        if self.tokens.is_empty() { self.fail(KeyErrorKind::NotAnId) } else { Ok(None) }
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let Some((token, rest)) = self.tokens.split_first() else {
            return self.fail(KeyErrorKind::NotAnId);
        };
        let mut found = None;
        if let Some(index) = array_index(token) {
            for _ in 0..index {
                if items.next_element::<IgnoredAny>()?.is_none() {
                    return Ok(None);
                }
            }
            let step = Step { tokens: rest, fault: self.fault };
            found = items.next_element_seed(step)?.flatten();
        }
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(found)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let Some((token, rest)) = self.tokens.split_first() else {
            return number(&mut members, self.fault);
        };
        let mut found = None;
        while let Some(matches) = members.next_key_seed(NameIs(token))? {
            if !matches {
                members.next_value::<IgnoredAny>()?;
                continue;
            }
            if found.is_some() {
                return self.fail(KeyErrorKind::Repeated);
            }
            found = Some(members.next_value_seed(Step { tokens: rest, fault: self.fault })?);
        }
        Ok(found.flatten())
    }
}

/// An array index as RFC 6901, section 4, writes it: digits without a leading zero.
pub(super) fn array_index(token: &str) -> Option<usize> {
    let plain = token == "0" || (!token.starts_with('0') && !token.starts_with('+'));
    if plain { token.parse().ok() } else { None }
}

/// An object where an id was expected is malformed. But if any crate of the program switches on
/// `serde_json/arbitrary_precision`, this is also how a *number* arrives, and it must give the
/// same id as without that feature.
fn number<'de, A: MapAccess<'de>>(
    members: &mut A,
    fault: &mut Option<KeyErrorKind>,
) -> Result<Option<String>, A::Error> {
    if members.next_key_seed(NameIs("$serde_json::private::Number"))? == Some(true) {
        let text = members.next_value::<String>()?;
        // Without the feature, `-0` is a floating point number.
        let integer = text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok();
        if integer && text != "-0" {
            return Ok(Some(text));
        }
    }
    *fault = Some(KeyErrorKind::NotAnId);
    Err(A::Error::custom("malformed key"))
}

/// Whether a member's name is this one, without copying the name.
pub(super) struct NameIs<'t>(pub(super) &'t str);

impl<'de> DeserializeSeed<'de> for NameIs<'_> {
    type Value = bool;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<bool, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for NameIs<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<bool, E> {
        Ok(name == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(pointer: &str, body: &str) -> Result<Option<String>, KeyErrorKind> {
        read(body.as_bytes(), &Pointer::new(pointer).unwrap()).map_err(|error| error.kind())
    }

    fn id(text: &str) -> Result<Option<String>, KeyErrorKind> {
        Ok(Some(text.to_owned()))
    }

    #[test]
    fn scalars_are_ids_and_everything_else_is_not() {
        assert_eq!(at("/id", r#"{"a":{"id":1},"id":"evt"}"#), id("evt"));
        assert_eq!(at("/id", r#"{"id":18446744073709551615}"#), id("18446744073709551615"));
        assert_eq!(at("/id", r#"{"id":-9}"#), id("-9"));
        assert_eq!(at("/id", r#"{"id":true}"#), id("true"));
        assert_eq!(at("/id", r#"{"id":null}"#), Ok(None));
        assert_eq!(at("/id", r#"{"id":1.0}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":18446744073709551616}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":{"id":1}}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":{}}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":[1]}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":""}"#), Err(KeyErrorKind::Empty));
        assert_eq!(at("/id", r#"{"id":"a\u0000b"}"#), Err(KeyErrorKind::Nul));
    }

    #[test]
    fn the_pointer_is_followed_through_objects_and_arrays() {
        let body = r#"{"a/b":[{"m~n":"x"},{"m~n":"y"}]}"#;
        assert_eq!(at("/a~1b/1/m~0n", body), id("y"));
        assert_eq!(at("/a~1b/2/m~0n", body), Ok(None));
        assert_eq!(at("/a~1b/01/m~0n", body), Ok(None));
        assert_eq!(at("/a~1b/-/m~0n", body), Ok(None));
        assert_eq!(at("/a~1b/0/m~0n/deeper", body), Ok(None));
        assert_eq!(at("", r#""whole""#), id("whole"));
        assert_eq!(at("/", r#"{"":"empty name"}"#), id("empty name"));
    }

    #[test]
    fn a_repeated_name_on_the_way_is_malformed_even_when_escaped() {
        assert_eq!(at("/id", r#"{"id":"a","id":"b"}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/id", r#"{"id":"a","\u0069d":"b"}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/a/id", r#"{"a":{"id":"a"},"a":{}}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/id", r#"{"other":1,"other":2,"id":"a"}"#), id("a"));
    }

    #[test]
    fn what_is_not_one_json_value_is_malformed() {
        for body in ["", "{", r#"{"id":"a"} x"#, r#"{"id":"a"}{}"#, "id=a", "\u{feff}{}"] {
            assert_eq!(at("/id", body), Err(KeyErrorKind::InvalidJson), "{body:?}");
        }
        assert!(read(b"{\"id\":\"\xff\"}", &Pointer::new("/id").unwrap()).is_err());
        assert_eq!(at("/id", r#"{"id":"\ud800"}"#), Err(KeyErrorKind::InvalidJson));
    }

    #[test]
    fn deep_nesting_beside_the_key_is_skipped_and_on_the_way_is_refused() {
        let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert_eq!(at("/id", &format!(r#"{{"x":{deep},"id":"a"}}"#)), id("a"));
        assert_eq!(at("/id", &format!(r#"{{"id":{deep}}}"#)), Err(KeyErrorKind::NotAnId));
    }

    #[test]
    fn pointers_that_are_none_are_refused() {
        for text in ["id", "/a~2", "/a~", "#/id"] {
            assert_eq!(Pointer::new(text), Err(ConfigError::InvalidPointer), "{text}");
        }
    }
}
