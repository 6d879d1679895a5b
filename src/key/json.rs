//! JSON pointers (RFC 6901), and the values that they name in a body.
//!
//! 1. A walk reads the body once, for one pointer or for several, because walks are most of the
//!    cost of a key, and a composed key and a type have several pointers. It builds no tree of the
//!    body, and skips values that no pointer names, however deeply they nest.
//! 2. The whole body must be one JSON value. The escapes in skipped strings are not checked. The
//!    content type does not matter, because some senders say `text/plain`. A byte order mark before
//!    the value is skipped.
//! 3. A member name that occurs twice on the way is malformed. The handler's parser may return the
//!    other one of the two values (RFC 8259, section 4).
//! 4. Strings, booleans and 64-bit integers are ids. Other numbers are malformed, because two ids
//!    could become one floating point number. `null` is missing.
//! 5. Where `*` stands for every item of an array, each item is read by a walk of its own.
//! 6. A walk for several pointers finds no error: where one has a fault, each is read by a walk of
//!    its own. So a pointer has the same result alone and with others.
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
    /// A name is that of a member, or the index of an item.
    names: Arc<[String]>,
}

/// A JSON pointer to an array. In the pointer, `*` stands for every item of an array on the way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrays {
    text: Arc<str>,
    /// The names on the way to the first array, and from each item of an array to the next array.
    ways: Arc<[Vec<String>]>,
}

impl Pointer {
    /// # Errors
    ///
    /// If `text` is neither empty nor starts with `/`, or if a `~` is not part of `~0` or `~1`.
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        Ok(Self { text: text.into(), names: names(text)?.into() })
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
    /// Those of [`Pointer::parse`].
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        let ways = names(text)?.split(|name| name == "*").map(<[_]>::to_vec).collect();
        Ok(Self { text: text.into(), ways })
    }
}

fn error(kind: KeyErrorKind, what: &str, pointer: &str) -> KeyError {
    match kind {
        KeyErrorKind::InvalidJson => KeyError::new(kind, "the body"),
        _ => KeyError::new(kind, format!("{what} {pointer}")),
    }
}

/// Several pointers, each to another value.
#[derive(Debug, Clone, Default)]
pub(super) struct Pointers(Vec<Pointer>);

/// The values of several pointers in one body, in the order of the pointers.
pub(crate) struct Selected<'b> {
    pointers: &'b [Pointer],
    values: Vec<Option<&'b RawValue>>,
}

impl Pointers {
    pub(super) fn add(&mut self, pointer: &Pointer) {
        if self.0.iter().all(|known| known.text != pointer.text) {
            self.0.push(pointer.clone());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Reads the values in one walk; `None` if a pointer has a fault.
    pub(super) fn read<'b>(&'b self, body: &'b [u8]) -> Option<Selected<'b>> {
        let values = walk(body, self.0.iter().map(|pointer| &*pointer.names)).ok()?;
        Some(Selected { pointers: &self.0, values: values.into_vec() })
    }
}

impl<'b> Selected<'b> {
    /// Returns the value of a pointer, if the pointer was read.
    fn find(&self, pointer: &Pointer) -> Option<Option<&'b RawValue>> {
        let number = self.pointers.iter().position(|known| known.text == pointer.text)?;
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

/// Returns the id at `pointer` in `body`, or `None` if it is missing or `null`. `values` are those
/// of the body, if they were read.
pub(super) fn read<'b>(
    body: &'b [u8],
    values: Option<&Selected<'b>>,
    pointer: &Pointer,
) -> Result<Option<Cow<'b, str>>, KeyErrorKind> {
    let value = match values.and_then(|values| values.find(pointer)) {
        Some(value) => value,
        None => select(body, &pointer.names)?,
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
    for names in &*arrays.ways {
        let mut inner = Vec::new();
        for item in items {
            let array: Option<Vec<&RawValue>> = select(item, names).map_err(fault)?;
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

/// Returns the items of several arrays, in the order of `arrays`, as slices of `body`. A missing
/// array has none. No pointer has a `*`, and the body is walked once.
pub(crate) fn lists(body: &Bytes, arrays: &[Arrays]) -> Result<Vec<Vec<Bytes>>, KeyError> {
    let ways = arrays.iter().map(|one| one.ways.first().map(Vec::as_slice).unwrap_or_default());
    let found: Result<List<Option<Vec<&RawValue>>>, _> = walk(body, ways);
    let fits = |list: &Option<Vec<_>>| list.as_ref().is_none_or(|list| list.len() <= MAX_EVENTS);
    match found {
        Ok(lists) if lists.iter().all(fits) => {
            let slice = |item: &RawValue| body.slice_ref(item.get().as_bytes());
            let of = |list: Option<Vec<_>>| list.into_iter().flatten().map(slice).collect();
            Ok(lists.into_iter().map(of).collect())
        }
        // A walk for one array names the fault.
        _ => arrays.iter().map(|one| Ok(items(body, one)?.unwrap_or_default())).collect(),
    }
}

/// Returns the text without a byte order mark before it, which a parser may ignore (RFC 8259,
/// section 8.1).
pub(crate) fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// Returns `true` if the body can be a JSON array, and no other JSON.
pub(crate) fn is_array(body: &[u8]) -> bool {
    without_mark(body).trim_ascii_start().starts_with(b"[")
}

/// Returns what one pointer names in `body`.
fn select<'b, T>(body: &'b [u8], names: &[String]) -> Result<T, KeyErrorKind>
where
    T: Deserialize<'b> + Default,
{
    Ok(walk(body, std::iter::once(names))?.pop().unwrap_or_default())
}

/// Returns what each pointer names in `body`; the default if it is missing.
fn walk<'b, 'n, T>(
    body: &'b [u8],
    pointers: impl Iterator<Item = &'n [String]>,
) -> Result<List<T>, KeyErrorKind>
where
    T: Deserialize<'b> + Default,
{
    let ways: Ways<'_> = pointers.enumerate().collect();
    let mut found: List<T> = ways.iter().map(|_| T::default()).collect();
    let mut is_repeated = false;
    let mut json = serde_json::Deserializer::from_slice(without_mark(body));
    let walk = Walk { ways, found: &mut found, is_repeated: &mut is_repeated };
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

/// The numbers of pointers, and the names that each still has before it.
type Ways<'n> = SmallVec<[(usize, &'n [String]); 4]>;

/// Reads a value, and what the pointers name in it.
struct Walk<'w, 'n, T> {
    ways: Ways<'n>,
    /// The values that were found, by the numbers of the pointers.
    found: &'w mut [T],
    is_repeated: &'w mut bool,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Walk<'_, '_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(mut self, json: D) -> Result<(), D::Error> {
        // No two pointers are equal, so at most one ends here.
        let Some(at) = self.ways.iter().position(|(_, names)| names.is_empty()) else {
            return json.deserialize_any(self);
        };
        let (number, _) = self.ways.remove(at);
        if self.ways.is_empty() {
            self.found[number] = T::deserialize(json)?;
            return Ok(());
        }
        let value = <&RawValue>::deserialize(json)?;
        self.found[number] = T::deserialize(value).map_err(D::Error::custom)?;
        value.deserialize_any(self).map_err(D::Error::custom)
    }
}

impl<'n, T> Walk<'_, 'n, T> {
    /// Returns the walk of what all ways with the next name of this one lead to.
    fn below(&mut self, at: usize) -> Walk<'_, 'n, T> {
        let next = &self.ways[at].1[0];
        let same = self.ways.iter().filter(|(_, names)| names[0] == *next);
        let ways = same.map(|(number, names)| (*number, &names[1..])).collect();
        Walk { ways, found: self.found, is_repeated: self.is_repeated }
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
impl<'de, T: Deserialize<'de>> Visitor<'de> for Walk<'_, '_, T> {
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
            let is_wanted = |(_, names): &(_, &[String])| array_index(&names[0]) == Some(index);
            let item = match self.ways.iter().position(is_wanted) {
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
        let mut met: SmallVec<[bool; 8]> = smallvec![false; self.ways.len()];
        while let Some(at) = members.next_key_seed(Member(&self.ways))? {
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

/// Returns the first way that a member's name is next on, without copying the name.
struct Member<'w>(&'w [(usize, &'w [String])]);

impl<'de> DeserializeSeed<'de> for Member<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Option<usize>, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Member<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(self.0.iter().position(|(_, names)| names[0] == name))
    }
}
