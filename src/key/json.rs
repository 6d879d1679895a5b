//! JSON pointers (RFC 6901), and the values that they name in a body.
//!
//! 1. A walk reads the body once, for one pointer or for several. It builds no tree of the body, and skips
//!    values that no pointer names, however deeply they nest.
//! 2. The whole body must be one JSON value. The escapes in skipped strings are not checked. The
//!    content type does not matter, because some senders say `text/plain`. A byte order mark before the
//!    value is skipped.
//! 3. A member name that occurs twice on the way is malformed. The handler's parser may return the
//!    other one of the two values (RFC 8259, section 4).
//! 4. Strings, booleans and 64-bit integers are ids. Other numbers are malformed, because two ids
//!    could become one floating point number. `null` is missing.
//! 5. Where `*` stands for every item of an array, each item is read by a walk of its own.
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
use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// The most events of one delivery. The layer's default bound is lower; this bound is checked
/// before a single key is made.
pub(super) const MAX_EVENTS: usize = 65_536;

/// A JSON pointer (RFC 6901) to one value: `/data/object/id`.
#[derive(Debug, Clone)]
pub(super) struct Pointer {
    text: Arc<str>,
    tree: Arc<Tree>,
}

/// A JSON pointer to an array. In the pointer, `*` stands for every item of an array on the way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrays {
    text: Arc<str>,
    /// The way to the first array, and from each item of an array to the next array.
    trees: Arc<[Tree]>,
}

/// The names on the way to one value, or to several. A name is that of a member, or the index of an item.
#[derive(Debug, Clone, Default)]
struct Tree {
    /// The number of the pointer that ends here.
    ends: Option<usize>,
    below: Vec<(String, Self)>,
}

impl Tree {
    fn new(names: &[String]) -> Self {
        let end = Self { ends: Some(0), below: Vec::new() };
        let above = |tree, name: &String| Self { ends: None, below: vec![(name.clone(), tree)] };
        names.iter().rfold(end, above)
    }

    /// Adds the names of a pointer, which gets this number unless it has one.
    fn add(&mut self, pointer: &Self, number: usize) {
        if pointer.ends.is_some() {
            self.ends.get_or_insert(number);
        }
        for (name, rest) in &pointer.below {
            let at = self.place(name).unwrap_or_else(|| {
                self.below.push((name.clone(), Self::default()));
                self.below.len() - 1
            });
            self.below[at].1.add(rest, number);
        }
    }

    fn place(&self, name: &str) -> Option<usize> {
        self.below.iter().position(|(known, _)| known == name)
    }
}

impl Pointer {
    /// # Errors
    ///
    /// If `text` is neither empty nor starts with `/`, or if a `~` is not part of `~0` or `~1`.
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        Ok(Self { text: text.into(), tree: Tree::new(&names(text)?).into() })
    }

    /// Returns the pointer as it was written.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns an error about the value at the pointer.
    pub(super) fn error(&self, kind: KeyErrorKind) -> KeyError {
        error(kind, "JSON value", &self.text)
    }
}

impl Arrays {
    /// # Errors
    ///
    /// As [`Pointer::parse`].
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        let trees = names(text)?.split(|name| name == "*").map(Tree::new).collect();
        Ok(Self { text: text.into(), trees })
    }

    /// Returns the pointer to the array that these plain names lead to.
    pub(crate) fn at(names: &[&str]) -> Self {
        let text: String = names.iter().map(|name| format!("/{name}")).collect();
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        Self { text: text.into(), trees: [Tree::new(&names)].into() }
    }
}

fn error(kind: KeyErrorKind, what: &str, pointer: &str) -> KeyError {
    match kind {
        KeyErrorKind::InvalidJson => KeyError::new(kind, "the body"),
        _ => KeyError::new(kind, format!("{what} {pointer}")),
    }
}

/// Several pointers, each to one value.
#[derive(Debug, Clone, Default)]
pub(super) struct Pointers {
    texts: Vec<Arc<str>>,
    tree: Tree,
}

/// The values of several pointers in one body.
pub(crate) struct Values<'b> {
    texts: &'b [Arc<str>],
    /// In the order of the pointers.
    values: Vec<Option<&'b RawValue>>,
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
        let values = walk(body, &self.tree, self.texts.len()).ok()?.into_vec();
        Some(Values { texts: &self.texts, values })
    }
}

impl<'b> Values<'b> {
    /// Returns the value of a pointer, if the pointer was read.
    fn find(&self, pointer: &Pointer) -> Option<Option<&'b RawValue>> {
        let number = self.texts.iter().position(|text| *text == pointer.text)?;
        Some(self.values[number])
    }
}

fn names(text: &str) -> Result<Vec<String>, ConfigError> {
    let names = match text.strip_prefix('/') {
        Some(rest) => rest.split('/').map(unescape).collect(),
        None => text.is_empty().then(Vec::new),
    };
    names.ok_or_else(|| ConfigError::value("pointer", "a JSON pointer (RFC 6901)", &text))
}

fn unescape(token: &str) -> Option<String> {
    let is_valid = token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    // In this order: `~01` is the name `~1`.
    let plain = || token.replace("~1", "/").replace("~0", "~");
    is_valid.then(plain)
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
        None => select(body, &pointer.tree)?,
    };
    value.map(|value| id(value.get())).transpose()
}

/// Returns the items of all arrays that `arrays` names in `body`, as slices of `body` in its order.
/// Returns `None` if one of the arrays is missing.
pub(crate) fn items(body: &Bytes, arrays: &Arrays) -> Result<Option<Vec<Bytes>>, KeyError> {
    let fault = |kind| match &*arrays.text {
        "" => KeyError::new(kind, "the body"),
        text => error(kind, "JSON array", text),
    };
    let (mut items, mut is_missing) = (vec![&**body], false);
    for tree in &*arrays.trees {
        let mut inner = Vec::new();
        for item in items {
            let array: Option<Vec<&RawValue>> = select(item, tree).map_err(fault)?;
            is_missing |= array.is_none();
            inner.extend(array.into_iter().flatten().map(|item| item.get().as_bytes()));
        }
        items = inner;
    }
    if items.len() > MAX_EVENTS {
        return Err(fault(KeyErrorKind::TooMany));
    }
    Ok((!is_missing).then(|| items.into_iter().map(|item| body.slice_ref(item)).collect()))
}

/// Returns the text without a byte order mark before it, which a parser may ignore (RFC 8259, section 8.1).
pub(crate) fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Returns `true` if the body can be a JSON array, and no other JSON.
pub(crate) fn is_array(body: &[u8]) -> bool {
    without_mark(body).trim_ascii_start().starts_with(b"[")
}

/// Returns what one pointer names in `body`.
fn select<'b, T>(body: &'b [u8], tree: &Tree) -> Result<T, KeyErrorKind>
where
    T: Deserialize<'b> + Default,
{
    Ok(walk(body, tree, 1)?.pop().unwrap_or_default())
}

/// Returns what each of `count` pointers names in `body`, by its number; the default if it is missing.
fn walk<'b, T>(body: &'b [u8], tree: &Tree, count: usize) -> Result<List<T>, KeyErrorKind>
where
    T: Deserialize<'b> + Default,
{
    let mut found: List<T> = std::iter::repeat_with(T::default).take(count).collect();
    let mut is_repeated = false;
    let mut json = serde_json::Deserializer::from_slice(without_mark(body));
    let walk = Walk { tree, found: &mut found, is_repeated: &mut is_repeated };
    match walk.deserialize(&mut json).and_then(|()| json.end()) {
        Ok(()) => Ok(found),
        Err(_) if is_repeated => Err(KeyErrorKind::Repeated),
        // Every value can be read, but an array only as an array.
        Err(error) if error.is_data() => Err(KeyErrorKind::NotAnArray),
        Err(_) => Err(KeyErrorKind::InvalidJson),
    }
}

/// Returns the id that a JSON value stands for; `json` is well-formed but for the escapes of a
/// string.
fn id(json: &str) -> Result<Cow<'_, str>, KeyErrorKind> {
    let id: Cow<'_, str> = match json.as_bytes() {
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
    Ok(id)
}

/// Reads a value, and what the pointers name in it.
struct Walk<'w, T> {
    tree: &'w Tree,
    /// By the numbers of the pointers.
    found: &'w mut [T],
    is_repeated: &'w mut bool,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Walk<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        let Some(number) = self.tree.ends else { return json.deserialize_any(self) };
        if self.tree.below.is_empty() {
            self.found[number] = T::deserialize(json)?;
            return Ok(());
        }
        let value = <&RawValue>::deserialize(json)?;
        self.found[number] = T::deserialize(value).map_err(D::Error::custom)?;
        value.deserialize_any(self).map_err(D::Error::custom)
    }
}

impl<T> Walk<'_, T> {
    fn below(&mut self, at: usize) -> Walk<'_, T> {
        let tree = &self.tree.below[at].1;
        Walk { tree, found: self.found, is_repeated: self.is_repeated }
    }
}

/// Defines methods that find nothing in a value without members and items.
macro_rules! skip {
    ($($visit:ident($value:ty))+) => {$(
        fn $visit<E>(self, _: $value) -> Result<(), E> {
            Ok(())
        }
    )+};
}

/// Follows the pointers into a value.
impl<'de, T: Deserialize<'de>> Visitor<'de> for Walk<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    skip!(visit_str(&str) visit_u64(u64) visit_i64(i64) visit_f64(f64) visit_bool(bool));

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        for index in 0.. {
            let is_wanted = |(name, _): &(String, _)| array_index(name) == Some(index);
            let item = match self.tree.below.iter().position(is_wanted) {
                Some(at) => items.next_element_seed(self.below(at))?,
                None => items.next_element::<IgnoredAny>()?.map(drop),
            };
            if item.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        let mut met: SmallVec<[bool; 8]> = smallvec![false; self.tree.below.len()];
        while let Some(at) = members.next_key_seed(Place(self.tree))? {
            let Some(at) = at else {
                members.next_value::<IgnoredAny>()?;
                continue;
            };
            if std::mem::replace(&mut met[at], true) {
                *self.is_repeated = true;
                return Err(A::Error::custom("a repeated name"));
            }
            members.next_value_seed(self.below(at))?;
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
        Ok(self.0.place(name))
    }
}
