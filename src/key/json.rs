//! JSON pointers (RFC 6901), and the values that they name in a body.
//!
//! 1. One walk reads the body once and builds no tree. It skips values that the pointer does not
//!    name, however deeply they nest.
//! 2. The whole body must be one JSON value. The escapes in skipped strings are not checked. The
//!    content type does not matter, because some senders say `text/plain`.
//! 3. A member name that occurs twice on the way is malformed. The handler's parser may return the
//!    other one of the two values (RFC 8259, section 4).
//! 4. Strings, booleans and 64-bit integers are ids. Other numbers are malformed, because two ids
//!    could become one floating point number. `null` is missing.
//! 5. In a pointer to items, `*` stands for every item of an array.
//!
//! # Why own code?
//!
//! `serde_json::Value::pointer` needs the whole tree, one allocation for each member. It returns
//! the last of two equal names, and rounds long numbers. It cannot give the bytes of an event.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::list::List;
use super::members::{Lookup, Members, Token};
use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// The most events of one delivery. The layer's default bound is lower; this bound is checked
/// before a single key is made.
pub(super) const MAX_EVENTS: usize = 65_536;

/// A JSON pointer (RFC 6901): `/data/object/id`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer {
    text: Arc<str>,
    tokens: Arc<[Token]>,
}

impl Pointer {
    /// Parses a pointer to one value.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidPointer`] if `text` is neither empty nor starts with `/`, or if a `~`
    /// is not part of `~0` or `~1`.
    pub(super) fn to_value(text: &str) -> Result<Self, ConfigError> {
        let tokens: Vec<_> = names(text)?.into_iter().map(Token::Name).collect();
        Ok(Self { text: text.into(), tokens: tokens.into() })
    }

    /// Parses a pointer to the items of an array, or of several: `*` stands for every item of an
    /// array on the way.
    ///
    /// # Errors
    ///
    /// As [`to_value`](Self::to_value).
    pub(super) fn to_items(text: &str) -> Result<Self, ConfigError> {
        let token = |name| if name == "*" { Token::EachItem } else { Token::Name(name) };
        let tokens = names(text)?.into_iter().map(token).chain([Token::EachItem]);
        Ok(Self { text: text.into(), tokens: tokens.collect() })
    }

    /// Returns the pointer to the items of the array that these plain names lead to.
    pub(crate) fn to_items_of(names: &[&str]) -> Self {
        let tokens = names.iter().map(|&name| Token::Name(name.to_owned()));
        Self {
            text: names.iter().map(|name| format!("/{name}")).collect::<String>().into(),
            tokens: tokens.chain([Token::EachItem]).collect(),
        }
    }

    pub(super) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Returns the pointer as it was written.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns an error about the value at the pointer.
    fn error(&self, kind: KeyErrorKind) -> KeyError {
        let what = match (kind, &*self.tokens) {
            (KeyErrorKind::InvalidJson, _) => return KeyError::new(kind, "the body"),
            (_, [.., Token::EachItem]) if self.text.is_empty() => "the body".to_owned(),
            (_, [.., Token::EachItem]) => format!("JSON array {}", self.text),
            _ => format!("JSON value {}", self.text),
        };
        KeyError::new(kind, what)
    }
}

fn names(text: &str) -> Result<Vec<String>, ConfigError> {
    match text.strip_prefix('/') {
        Some(rest) => rest.split('/').map(unescape).collect(),
        None if text.is_empty() => Ok(Vec::new()),
        None => Err(ConfigError::InvalidPointer),
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

/// Returns the id at `pointer` in `body`, or `None` if it is missing or `null`. `members` are those of
/// the body, if they were read.
pub(super) fn read<'b>(
    body: &'b [u8],
    members: Option<&Members<'b>>,
    pointer: &Pointer,
) -> Result<Option<Cow<'b, str>>, KeyError> {
    let known = members.map_or(Lookup::Unknown, |members| members.find(&pointer.tokens));
    let found = match known {
        Lookup::Unknown => select(body, pointer, &pointer.tokens)?,
        Lookup::Missing => None,
        Lookup::Value(json) => Some(List::from([json])),
        Lookup::Below(json, tokens) => select(json.as_bytes(), pointer, tokens)?,
    };
    let Some(&[json]) = found.as_deref() else { return Ok(None) };
    id(json).map_err(|kind| pointer.error(kind))
}

/// Returns the items of all arrays that `pointer` names in `body`, as slices of `body` in its order.
/// Returns `None` if one of the arrays is missing.
pub(crate) fn items(body: &Bytes, pointer: &Pointer) -> Result<Option<Vec<Bytes>>, KeyError> {
    let found = select(body, pointer, &pointer.tokens)?;
    let slice = |item: &str| body.slice_ref(item.as_bytes());
    Ok(found.map(|found| found.into_iter().map(slice).collect()))
}

/// Returns the text of every value that `tokens`, the end of `pointer`, name in `body`, or `None` if one
/// is missing.
fn select<'b>(
    body: &'b [u8],
    pointer: &Pointer,
    tokens: &[Token],
) -> Result<Option<List<&'b str>>, KeyError> {
    let mut found = Selection::default();
    let mut json = serde_json::Deserializer::from_slice(body);
    let walk = Walk { tokens, found: &mut found };
    let read = walk.deserialize(&mut json).and_then(|()| json.end());
    match (found.fault, read) {
        (Some(kind), _) => Err(pointer.error(kind)),
        (None, Err(_)) => Err(pointer.error(KeyErrorKind::InvalidJson)),
        (None, Ok(())) => Ok((!found.missing).then_some(found.values)),
    }
}

/// Returns the id that a JSON value stands for; `json` is well-formed but for the escapes of a
/// string.
fn id(json: &str) -> Result<Option<Cow<'_, str>>, KeyErrorKind> {
    let id: Cow<'_, str> = match json.as_bytes() {
        b"null" => return Ok(None),
        b"true" | b"false" => json.into(),
        [b'"', plain @ .., b'"'] if !plain.contains(&b'\\') => json[1..json.len() - 1].into(),
        [b'"', ..] => {
            serde_json::from_str::<String>(json).map_err(|_| KeyErrorKind::InvalidJson)?.into()
        }
        // JSON writes an integer in one way only, but for `-0`: to other parsers that is a
        // floating point number.
        _ if json != "-0" && (json.parse::<i64>().is_ok() || json.parse::<u64>().is_ok()) => {
            json.into()
        }
        _ => return Err(KeyErrorKind::NotAnId),
    };
    match &*id {
        "" => Err(KeyErrorKind::Empty),
        text if text.contains('\0') => Err(KeyErrorKind::Nul),
        _ => Ok(Some(id)),
    }
}

/// The result of a walk.
#[derive(Default)]
struct Selection<'de> {
    values: List<&'de str>,
    missing: bool,
    /// An error that is not an error of the JSON syntax.
    fault: Option<KeyErrorKind>,
}

impl Selection<'_> {
    fn fail<E: Error>(&mut self, kind: KeyErrorKind) -> Result<(), E> {
        self.fault = Some(kind);
        Err(E::custom("malformed key"))
    }
}

/// Reads a value, and selects the values that the tokens name in it.
struct Walk<'w, 'de> {
    tokens: &'w [Token],
    found: &'w mut Selection<'de>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_, 'de> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        let Self { tokens, found } = self;
        if let Some((token, rest)) = tokens.split_first() {
            return json.deserialize_any(Step { token, rest, found });
        }
        if found.values.len() == MAX_EVENTS {
            return found.fail(KeyErrorKind::TooMany);
        }
        found.values.push(<&RawValue>::deserialize(json)?.get());
        Ok(())
    }
}

/// Follows one token into a value.
struct Step<'w, 'de> {
    token: &'w Token,
    rest: &'w [Token],
    found: &'w mut Selection<'de>,
}

impl<'w, 'de> Step<'w, 'de> {
    /// The value has neither members nor items.
    fn scalar<E: Error>(self) -> Result<(), E> {
        if *self.token == Token::EachItem {
            return self.found.fail(KeyErrorKind::NotAnArray);
        }
        self.found.missing = true;
        Ok(())
    }

    fn walk(&mut self) -> Walk<'_, 'de> {
        Walk { tokens: self.rest, found: self.found }
    }
}

impl<'de> Visitor<'de> for Step<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.found.missing = true;
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let Token::Name(name) = self.token else {
            while items.next_element_seed(self.walk())?.is_some() {}
            return Ok(());
        };
        let mut met = false;
        if let Some(index) = array_index(name) {
            for _ in 0..index {
                if items.next_element::<IgnoredAny>()?.is_none() {
                    self.found.missing = true;
                    return Ok(());
                }
            }
            met = items.next_element_seed(self.walk())?.is_some();
        }
        self.found.missing |= !met;
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        let Token::Name(name) = self.token else {
            return self.found.fail(KeyErrorKind::NotAnArray);
        };
        let mut met = false;
        while let Some(matches) = members.next_key_seed(NameIs(name))? {
            if !matches {
                members.next_value::<IgnoredAny>()?;
            } else if met {
                return self.found.fail(KeyErrorKind::Repeated);
            } else {
                met = true;
                members.next_value_seed(self.walk())?;
            }
        }
        self.found.missing |= !met;
        Ok(())
    }
}

/// Reads an array index as RFC 6901, section 4, writes it: digits without a leading zero.
fn array_index(token: &str) -> Option<usize> {
    let plain = token == "0" || (!token.starts_with('0') && !token.starts_with('+'));
    if plain { token.parse().ok() } else { None }
}

/// Compares a member's name without copying it.
struct NameIs<'t>(&'t str);

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

    fn visit_str<E: Error>(self, name: &str) -> Result<bool, E> {
        Ok(name == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(pointer: &str, body: &str) -> Result<Option<String>, KeyErrorKind> {
        let found = read(body.as_bytes(), None, &Pointer::to_value(pointer).unwrap());
        found.map(|id| id.map(Cow::into_owned)).map_err(|error| error.kind())
    }

    fn id(text: &str) -> Result<Option<String>, KeyErrorKind> {
        Ok(Some(text.to_owned()))
    }

    #[test]
    fn only_strings_booleans_and_64_bit_integers_are_ids() {
        assert_eq!(at("/id", r#"{"a":{"id":1},"id":"evt"}"#), id("evt"));
        assert_eq!(at("/id", r#"{"id":18446744073709551615}"#), id("18446744073709551615"));
        assert_eq!(at("/id", r#"{"id":-9}"#), id("-9"));
        assert_eq!(at("/id", r#"{"id":-9223372036854775808}"#), id("-9223372036854775808"));
        assert_eq!(at("/id", r#"{"id":0}"#), id("0"));
        assert_eq!(at("/id", r#"{"id":true}"#), id("true"));
        assert_eq!(at("/id", r#"{"id":null}"#), Ok(None));
        for number in ["1.0", "-0", "1e3", "1E0", "-9223372036854775809"] {
            let body = format!(r#"{{"id":{number}}}"#);
            assert_eq!(at("/id", &body), Err(KeyErrorKind::NotAnId), "{number}");
        }
        for number in ["01", "+1", "-", "1.", "0x1"] {
            let body = format!(r#"{{"id":{number}}}"#);
            assert_eq!(at("/id", &body), Err(KeyErrorKind::InvalidJson), "{number}");
        }
        assert_eq!(at("/id", r#"{"id":18446744073709551616}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":{"id":1}}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":{}}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":[1]}"#), Err(KeyErrorKind::NotAnId));
        assert_eq!(at("/id", r#"{"id":""}"#), Err(KeyErrorKind::Empty));
        assert_eq!(at("/id", r#"{"id":"a\u0000b"}"#), Err(KeyErrorKind::Nul));
    }

    #[test]
    fn read_decodes_the_escapes_of_a_string() {
        let escaped = r#"{"id":"a\"\\\/\n\u00e9\ud834\udd1e\u0022"}"#;
        assert_eq!(at("/id", escaped), id("a\"\\/\n\u{e9}\u{1d11e}\""));
        assert_eq!(at("/id", "{\"id\":\"\u{e9}\u{1d11e} *\"}"), id("\u{e9}\u{1d11e} *"));
        assert_eq!(at("/*", r#"{"*":"a name in a pointer to a value"}"#), {
            id("a name in a pointer to a value")
        });
        for broken in [r#"{"id":"\x"}"#, r#"{"id":"\u12"}"#, "{\"id\":\"\n\"}", r#"{"id":"\"}"#] {
            assert_eq!(at("/id", broken), Err(KeyErrorKind::InvalidJson), "{broken}");
        }
    }

    #[test]
    fn read_follows_the_pointer_through_objects_and_arrays() {
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
    fn a_repeated_name_on_the_way_is_malformed_even_if_escaped() {
        assert_eq!(at("/id", r#"{"id":"a","id":"b"}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/id", r#"{"id":"a","\u0069d":"b"}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/a/id", r#"{"a":{"id":"a"},"a":{}}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/id", r#"{"other":1,"other":2,"id":"a"}"#), id("a"));
    }

    #[test]
    fn a_body_that_is_not_one_json_value_is_malformed() {
        for body in ["", "{", r#"{"id":"a"} x"#, r#"{"id":"a"}{}"#, "id=a", "\u{feff}{}"] {
            assert_eq!(at("/id", body), Err(KeyErrorKind::InvalidJson), "{body:?}");
        }
        assert!(read(b"{\"id\":\"\xff\"}", None, &Pointer::to_value("/id").unwrap()).is_err());
        assert_eq!(at("/id", r#"{"id":"\ud800"}"#), Err(KeyErrorKind::InvalidJson));
    }

    #[test]
    fn deep_nesting_is_skipped_beside_the_key_and_malformed_as_the_key() {
        let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert_eq!(at("/id", &format!(r#"{{"x":{deep},"id":"a"}}"#)), id("a"));
        assert_eq!(at("/id", &format!(r#"{{"id":{deep}}}"#)), Err(KeyErrorKind::NotAnId));
    }

    #[test]
    fn to_value_refuses_what_is_not_a_pointer() {
        for text in ["id", "/a~2", "/a~", "#/id"] {
            assert_eq!(Pointer::to_value(text), Err(ConfigError::InvalidPointer), "{text}");
        }
    }

    fn items_at(pointer: &str, body: &str) -> Result<Option<Vec<String>>, KeyErrorKind> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let found = items(&body, &Pointer::to_items(pointer).unwrap());
        let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        found
            .map(|found| found.map(|all| all.into_iter().map(text).collect()))
            .map_err(|error| error.kind())
    }

    fn found(items: &[&str]) -> Result<Option<Vec<String>>, KeyErrorKind> {
        Ok(Some(items.iter().map(|&item| item.to_owned()).collect()))
    }

    #[test]
    fn items_are_the_bytes_between_the_commas() {
        assert_eq!(items_at("", " [ {\"a\": 1} ,\n2,\"x\" , null,[ ] ]\r\n"), {
            found(&["{\"a\": 1}", "2", "\"x\"", "null", "[ ]"])
        });
        assert_eq!(items_at("/a/1", r#"{"a":[0,[1,2],3]}"#), found(&["1", "2"]));
    }

    #[test]
    fn items_are_slices_of_the_body() {
        let body = Bytes::from_static(br#"{"a":[11,22]}"#);
        let all = items(&body, &Pointer::to_items("/a").unwrap()).unwrap().unwrap();
        let offsets: Vec<_> =
            all.iter().map(|item| item.as_ptr().addr() - body.as_ptr().addr()).collect();
        assert_eq!(offsets, [6, 9]);
    }

    #[test]
    fn a_star_is_every_item_on_the_way() {
        let body = r#"{"e":[{"c":[1,2]},{"c":[]},{"c":[3]}]}"#;
        assert_eq!(items_at("/e/*/c", body), found(&["1", "2", "3"]));
        assert_eq!(items_at("/*", "[[1],[2,3]]"), found(&["1", "2", "3"]));
        assert_eq!(items_at("/*/*", "[[[1]],[]]"), found(&["1"]));
    }

    #[test]
    fn an_empty_array_is_not_missing_and_an_array_missing_anywhere_is() {
        for (pointer, body) in [("", "[]"), ("/e", r#"{"e":[]}"#), ("/e/*/c", r#"{"e":[]}"#)] {
            assert_eq!(items_at(pointer, body), found(&[]), "{pointer} of {body}");
        }
        for (pointer, body) in [
            ("", "null"),
            ("/e", "{}"),
            ("/e", r#"{"e":null}"#),
            ("/e/f", r#"{"e":1}"#),
            ("/2", "[[],[]]"),
            ("/01", "[[],[]]"),
            ("/e/*/c", r#"{"e":[{"c":[1]},{}]}"#),
        ] {
            assert_eq!(items_at(pointer, body), Ok(None), "{pointer} of {body}");
        }
    }

    #[test]
    fn a_value_that_is_no_array_is_malformed() {
        for value in ["{}", "1", "-1", "1.5", "true", r#""text""#, r#"{"0":[]}"#] {
            assert_eq!(items_at("", value), Err(KeyErrorKind::NotAnArray), "{value}");
            assert_eq!(items_at("/*", value), Err(KeyErrorKind::NotAnArray), "{value} on the way");
        }
        assert_eq!(items_at("/e", r#"{"e":[1],"e":[2]}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(items_at("/e", r#"{"e":[1],"\u0065":[2]}"#), Err(KeyErrorKind::Repeated));
        for body in ["", "[", "[1] x", "[1,]", "[1][2]", "\u{feff}[]", r#"{"e":[1,2}"#] {
            let kind = items_at("", body).or(items_at("/e", body)).unwrap_err();
            assert_eq!(kind, KeyErrorKind::InvalidJson, "{body:?}");
        }
    }

    #[test]
    fn the_bound_on_events_holds_for_all_arrays_together() {
        let array = |length: usize| format!("[{}0]", "0,".repeat(length - 1));
        assert_eq!(items_at("", &array(MAX_EVENTS)).unwrap().unwrap().len(), MAX_EVENTS);
        assert_eq!(items_at("", &array(MAX_EVENTS + 1)), Err(KeyErrorKind::TooMany));
        let two = format!("[{0},{0}]", array(MAX_EVENTS / 2 + 1));
        assert_eq!(items_at("/*", &two), Err(KeyErrorKind::TooMany));
    }

    #[test]
    fn deeply_nested_items_are_returned_unparsed() {
        let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert_eq!(items_at("", &format!("[{deep}]")), found(&[&deep]));
        assert_eq!(items_at("/e", &format!(r#"{{"x":{deep},"e":[1]}}"#)), found(&["1"]));
    }
}
