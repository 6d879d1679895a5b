//! JSON pointers (RFC 6901), and the values that they name in a body.
//!
//! 1. A walk reads the body once, for one pointer or for several. It builds no tree of the body, and skips
//!    values that no pointer names, however deeply they nest.
//! 2. The whole body must be one JSON value. The escapes in skipped strings are not checked. The
//!    content type does not matter, because some senders say `text/plain`.
//! 3. A member name that occurs twice on the way is malformed. The handler's parser may return the
//!    other one of the two values (RFC 8259, section 4).
//! 4. Strings, booleans and 64-bit integers are ids. Other numbers are malformed, because two ids
//!    could become one floating point number. `null` is missing.
//! 5. In a pointer to items, `*` stands for every item of an array.
//! 6. A walk for several pointers finds no error: where one has a fault, each is read by a walk of its own.
//!    So a pointer has the same result alone and with others.
//!
//! # Why own code?
//!
//! `serde_json::Value::pointer` needs the whole tree, one allocation for each member. It returns
//! the last of two equal names, and rounds long numbers. It cannot give the bytes of an event.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use smallvec::{SmallVec, smallvec};

use super::id::{List, check_value};
use crate::error::{ConfigError, ConfigErrorKind, KeyError, KeyErrorKind};

/// The most events of one delivery. The layer's default bound is lower; this bound is checked
/// before a single key is made.
pub(super) const MAX_EVENTS: usize = 65_536;

/// A JSON pointer (RFC 6901): `/data/object/id`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer {
    text: Arc<str>,
    tree: Arc<Tree>,
    is_to_items: bool,
}

/// One step of a JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// The name of a member, or the index of an item.
    Name(String),
    /// Every item of an array.
    EachItem,
}

/// The steps of one pointer, or of several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Tree {
    /// The number of the pointer that ends here.
    ends: Option<usize>,
    below: Vec<(Token, Self)>,
}

impl Tree {
    /// Adds the steps of a pointer, which gets this number unless it has one.
    fn add(&mut self, pointer: &Self, number: usize) {
        if pointer.ends.is_some() {
            self.ends.get_or_insert(number);
        }
        for (token, rest) in &pointer.below {
            let known = self.below.iter().position(|(known, _)| known == token);
            let at = known.unwrap_or_else(|| {
                self.below.push((token.clone(), Self::default()));
                self.below.len() - 1
            });
            self.below[at].1.add(rest, number);
        }
    }
}

impl Pointer {
    /// Parses a pointer to one value.
    ///
    /// # Errors
    ///
    /// If `text` is neither empty nor starts with `/`, or if a `~` is not part of `~0` or `~1`.
    pub(super) fn to_value(text: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(text, names(text)?.into_iter().map(Token::Name), false))
    }

    /// Parses a pointer to the items of an array, or of several: `*` stands for every item of an
    /// array on the way.
    ///
    /// # Errors
    ///
    /// As [`to_value`](Self::to_value).
    pub(super) fn to_items(text: &str) -> Result<Self, ConfigError> {
        let token = |name| if name == "*" { Token::EachItem } else { Token::Name(name) };
        Ok(Self::new(text, names(text)?.into_iter().map(token).chain([Token::EachItem]), true))
    }

    /// Returns the pointer to the items of the array that these plain names lead to.
    pub(crate) fn to_items_of(names: &[&str]) -> Self {
        let text: String = names.iter().map(|name| format!("/{name}")).collect();
        let tokens = names.iter().map(|&name| Token::Name(name.to_owned()));
        Self::new(&text, tokens.chain([Token::EachItem]), true)
    }

    fn new(text: &str, tokens: impl DoubleEndedIterator<Item = Token>, is_to_items: bool) -> Self {
        let end = Tree { ends: Some(0), below: Vec::new() };
        let tree = tokens.rfold(end, |tree, token| Tree { ends: None, below: vec![(token, tree)] });
        Self { text: text.into(), tree: tree.into(), is_to_items }
    }

    /// Returns the pointer as it was written.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns an error about the value at the pointer.
    pub(super) fn error(&self, kind: KeyErrorKind) -> KeyError {
        let what = match (kind, self.is_to_items) {
            (KeyErrorKind::InvalidJson, _) => return KeyError::new(kind, "the body"),
            (_, true) if self.text.is_empty() => "the body".to_owned(),
            (_, true) => format!("JSON array {}", self.text),
            (_, false) => format!("JSON value {}", self.text),
        };
        KeyError::new(kind, what)
    }
}

/// Several pointers, each to one value.
#[derive(Debug, Clone, Default)]
pub(super) struct Pointers {
    texts: Vec<Arc<str>>,
    tree: Tree,
}

/// The values of several pointers in one body.
#[derive(Debug)]
pub(crate) struct Values<'b> {
    texts: &'b [Arc<str>],
    /// In the order of the pointers.
    values: Vec<Option<&'b str>>,
}

impl Pointers {
    pub(super) fn add(&mut self, pointer: &Pointer) {
        self.tree.add(&pointer.tree, self.texts.len());
        self.texts.push(Arc::clone(&pointer.text));
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Reads the values in one walk; `None` if a pointer has a fault.
    pub(super) fn read<'b>(&'b self, body: &'b [u8]) -> Option<Values<'b>> {
        let found = walk(body, &self.tree, self.texts.len()).ok()?;
        let values = found.into_iter().map(|found| found.values.first().copied()).collect();
        Some(Values { texts: &self.texts, values })
    }
}

impl<'b> Values<'b> {
    /// Returns the value of a pointer, if the pointer was read.
    fn find(&self, pointer: &Pointer) -> Option<Option<&'b str>> {
        let number = self.texts.iter().position(|text| *text == pointer.text)?;
        Some(self.values[number])
    }
}

fn names(text: &str) -> Result<Vec<String>, ConfigError> {
    match text.strip_prefix('/') {
        Some(rest) => rest.split('/').map(unescape).collect(),
        None if text.is_empty() => Ok(Vec::new()),
        None => Err(not_a_pointer()),
    }
}

fn not_a_pointer() -> ConfigError {
    ConfigError::new(ConfigErrorKind::Setting, "not a JSON pointer (RFC 6901)")
}

fn unescape(token: &str) -> Result<String, ConfigError> {
    let is_valid = token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    // In this order: `~01` is the name `~1`.
    let plain = || token.replace("~1", "/").replace("~0", "~");
    is_valid.then(plain).ok_or_else(not_a_pointer)
}

/// Returns the id at `pointer` in `body`, or `None` if it is missing or `null`. `values` are those of
/// the body, if they were read.
pub(super) fn read<'b>(
    body: &'b [u8],
    values: Option<&Values<'b>>,
    pointer: &Pointer,
) -> Result<Option<Cow<'b, str>>, KeyErrorKind> {
    let value = match values.and_then(|values| values.find(pointer)) {
        Some(value) => value,
        None => select(body, pointer)?.values.first().copied(),
    };
    value.map_or(Ok(None), id)
}

/// Returns the items of all arrays that `pointer` names in `body`, as slices of `body` in its order.
/// Returns `None` if one of the arrays is missing.
pub(crate) fn items(body: &Bytes, pointer: &Pointer) -> Result<Option<Vec<Bytes>>, KeyError> {
    let found = select(body, pointer).map_err(|kind| pointer.error(kind))?;
    let Found { values, is_missing } = found;
    let slice = |item: &str| body.slice_ref(item.as_bytes());
    Ok((!is_missing).then(|| values.into_iter().map(slice).collect()))
}

/// Returns what one pointer names in `body`.
fn select<'b>(body: &'b [u8], pointer: &Pointer) -> Result<Found<'b>, KeyErrorKind> {
    let found = walk(body, &pointer.tree, 1)?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// Returns what each of `count` pointers names in `body`, by its number.
fn walk<'b>(body: &'b [u8], tree: &Tree, count: usize) -> Result<List<Found<'b>>, KeyErrorKind> {
    let found = std::iter::repeat_with(Found::default).take(count).collect();
    let mut selection = Selection { found, fault: None };
    let mut json = serde_json::Deserializer::from_slice(body);
    let walk = Walk { tree, selection: &mut selection };
    let read = walk.deserialize(&mut json).and_then(|()| json.end());
    match (selection.fault, read) {
        (Some(kind), _) => Err(kind),
        (None, Err(_)) => Err(KeyErrorKind::InvalidJson),
        (None, Ok(())) => Ok(selection.found),
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
    check_value(&id)?;
    Ok(Some(id))
}

/// What a pointer names, as it is written.
#[derive(Debug, Default)]
struct Found<'de> {
    values: List<&'de str>,
    /// A value is missing, on the way or at the end.
    is_missing: bool,
}

/// The result of a walk.
struct Selection<'de> {
    /// By the numbers of the pointers.
    found: List<Found<'de>>,
    /// An error that is not an error of the JSON syntax.
    fault: Option<KeyErrorKind>,
}

impl Selection<'_> {
    fn fail<E: Error>(&mut self, kind: KeyErrorKind) -> Result<(), E> {
        self.fault = Some(kind);
        Err(E::custom("malformed key"))
    }

    /// All pointers that lead through here name nothing.
    fn miss(&mut self, tree: &Tree) {
        if let Some(number) = tree.ends {
            self.found[number].is_missing = true;
        }
        tree.below.iter().for_each(|(_, below)| self.miss(below));
    }
}

/// Reads a value, and selects the values that the pointers name in it.
struct Walk<'w, 'de> {
    tree: &'w Tree,
    selection: &'w mut Selection<'de>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        let Some(number) = self.tree.ends else { return json.deserialize_any(self) };
        if self.selection.found[number].values.len() == MAX_EVENTS {
            return self.selection.fail(KeyErrorKind::TooMany);
        }
        let value = <&RawValue>::deserialize(json)?.get();
        self.selection.found[number].values.push(value);
        if self.tree.below.is_empty() {
            return Ok(());
        }
        let mut json = serde_json::Deserializer::from_str(value);
        (&mut json).deserialize_any(self).map_err(D::Error::custom)
    }
}

impl<'de> Walk<'_, 'de> {
    /// The value has neither members nor items.
    fn scalar<E: Error>(self) -> Result<(), E> {
        if self.has_each_item() {
            return self.selection.fail(KeyErrorKind::NotAnArray);
        }
        self.visit_unit()
    }

    fn has_each_item(&self) -> bool {
        self.tree.below.iter().any(|(token, _)| *token == Token::EachItem)
    }

    fn below(&mut self, at: usize) -> Walk<'_, 'de> {
        Walk { tree: &self.tree.below[at].1, selection: self.selection }
    }
}

/// Follows the pointers into a value.
impl<'de> Visitor<'de> for Walk<'_, 'de> {
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
        self.tree.below.iter().for_each(|(_, below)| self.selection.miss(below));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let wanted = |token: &Token, index| match token {
            Token::EachItem => true,
            Token::Name(name) => array_index(name) == Some(index),
        };
        let mut length = 0;
        loop {
            let at = self.tree.below.iter().position(|(token, _)| wanted(token, length));
            let item = match at {
                Some(at) => items.next_element_seed(self.below(at))?,
                None => items.next_element::<IgnoredAny>()?.map(drop),
            };
            if item.is_none() {
                break;
            }
            length += 1;
        }
        for (token, below) in &self.tree.below {
            let is_item = |name| array_index(name).is_some_and(|index| index < length);
            if let Token::Name(name) = token
                && !is_item(name)
            {
                self.selection.miss(below);
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        if self.has_each_item() {
            return self.selection.fail(KeyErrorKind::NotAnArray);
        }
        let mut met: SmallVec<[bool; 8]> = smallvec![false; self.tree.below.len()];
        while let Some(at) = members.next_key_seed(Place(self.tree))? {
            let Some(at) = at else {
                members.next_value::<IgnoredAny>()?;
                continue;
            };
            if std::mem::replace(&mut met[at], true) {
                return self.selection.fail(KeyErrorKind::Repeated);
            }
            members.next_value_seed(self.below(at))?;
        }
        for ((_, below), met) in self.tree.below.iter().zip(met) {
            if !met {
                self.selection.miss(below);
            }
        }
        Ok(())
    }
}

/// Reads an array index as RFC 6901, section 4, writes it: digits without a leading zero.
fn array_index(token: &str) -> Option<usize> {
    let plain = token == "0" || (!token.starts_with('0') && !token.starts_with('+'));
    if plain { token.parse().ok() } else { None }
}

/// Returns the place of a member's name in the tree, without copying the name.
struct Place<'t>(&'t Tree);

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Option<usize>, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Place<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<usize>, E> {
        let is_name = |token: &Token| matches!(token, Token::Name(known) if known == name);
        Ok(self.0.below.iter().position(|(token, _)| is_name(token)))
    }
}
