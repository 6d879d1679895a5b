//! JSON pointers and `each`, against a tree of the whole body.

use std::collections::BTreeSet;
use std::fmt;

use bytes::Bytes;
use http::Request;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tower_dedup::KeyErrorKind::{self, Empty, NotAnArray, NotAnId, Nul, Repeated};
use tower_dedup::key::{self, Extracted, KeyPart, RequestRef};

use crate::fuzz::fuzz;
use crate::input::Input;
use crate::{ReadId, composed, is_blank, read, stored_id};

/// A JSON value with the members in the order of the text, repeated names included.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tree {
    Null,
    /// A boolean or an integer of 64 bits, as JSON writes it.
    Id(String),
    /// Another number.
    Fraction,
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Id(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Id(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Id(value.to_string()))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Tree, E> {
        Ok(Tree::Fraction)
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Tree, A::Error> {
        let mut map = Vec::new();
        while let Some(member) = members.next_entry()? {
            map.push(member);
        }
        Ok(Tree::Map(map))
    }
}

impl Tree {
    /// Returns `true` if an object in it has two members of one name.
    pub(crate) fn has_repeated_names(&self) -> bool {
        match self {
            Self::List(items) => items.iter().any(Self::has_repeated_names),
            Self::Map(members) => {
                let names: BTreeSet<_> = members.iter().map(|(name, _)| name).collect();
                names.len() < members.len()
                    || members.iter().any(|(_, value)| value.has_repeated_names())
            }
            _ => false,
        }
    }
}

/// The names of a pointer; `None` stands for every item of an array.
type Tokens = Vec<Option<String>>;

/// Returns the names of a JSON pointer, or `None` if it is none (RFC 6901, section 3).
fn tokens(pointer: &str) -> Option<Tokens> {
    let bytes = pointer.as_bytes();
    let is_escape = |at: usize| matches!(bytes.get(at + 1), Some(b'0' | b'1'));
    let is_valid = (0..bytes.len()).all(|at| bytes[at] != b'~' || is_escape(at));
    if !is_valid || !(pointer.is_empty() || pointer.starts_with('/')) {
        return None;
    }
    let name = |token: &str| Some(token.replace("~1", "/").replace("~0", "~"));
    Some(pointer.split('/').skip(1).map(name).collect())
}

/// The values at a pointer, in the order of the text.
struct Found<'t> {
    values: Vec<&'t Tree>,
    missing: bool,
}

impl<'t> Found<'t> {
    fn at(tree: &'t Tree, tokens: &[Option<String>]) -> Result<Self, KeyErrorKind> {
        let mut found = Self { values: vec![tree], missing: false };
        let ways: Vec<_> = tokens.split(Option::is_none).collect();
        for (index, names) in ways.iter().enumerate() {
            let is_to_array = index + 1 < ways.len();
            for value in std::mem::take(&mut found.values) {
                match named(value, names, is_to_array)? {
                    Some(Tree::List(items)) if is_to_array => found.values.extend(items),
                    Some(value) => found.values.push(value),
                    None => found.missing = true,
                }
            }
        }
        Ok(found)
    }
}

/// Returns the value that the names lead to.
fn named<'t>(
    tree: &'t Tree,
    names: &[Option<String>],
    is_to_array: bool,
) -> Result<Option<&'t Tree>, KeyErrorKind> {
    let Some((Some(name), rest)) = names.split_first() else {
        return match tree {
            Tree::Null => Ok(None),
            Tree::List(_) => Ok(Some(tree)),
            _ if is_to_array => Err(NotAnArray),
            _ => Ok(Some(tree)),
        };
    };
    match tree {
        Tree::List(items) => {
            let is_index = name == "0" || !name.starts_with(['0', '+']);
            let index = name.parse::<usize>().ok().filter(|_| is_index);
            let item = index.and_then(|index| items.get(index));
            item.map_or(Ok(None), |item| named(item, rest, is_to_array))
        }
        Tree::Map(members) => {
            let mut of_name = members.iter().filter(|member| member.0 == *name);
            let first = of_name.next();
            let value = first.map_or(Ok(None), |(_, value)| named(value, rest, is_to_array))?;
            if of_name.next().is_some() { Err(Repeated) } else { Ok(value) }
        }
        _ => Ok(None),
    }
}

/// Returns the id at a pointer, before it is hashed.
fn id_at(tree: &Tree, tokens: &[Option<String>]) -> ReadId {
    let found = Found::at(tree, tokens)?;
    let [value] = found.values[..] else { return Ok(None) };
    match value {
        Tree::Null => Ok(None),
        Tree::Id(id) => Ok(Some(id.clone())),
        Tree::Text(text) if text.contains('\0') => Err(Nul),
        Tree::Text(text) if is_blank(text) => Err(Empty),
        Tree::Text(text) => Ok(Some(text.clone())),
        _ => Err(NotAnId),
    }
}

/// Returns both values. A value that is no id is reported after every other fault, and a blank one last.
fn pair(one: ReadId, other: ReadId) -> Result<[Option<String>; 2], KeyErrorKind> {
    let rank = |value: &ReadId| match value {
        Ok(_) => 0,
        Err(Empty) => 1,
        Err(NotAnId) => 2,
        Err(_) => 3,
    };
    if rank(&other) > rank(&one) {
        other.clone()?;
    }
    Ok([one?, other?])
}

/// Returns the id of two parts: malformed before missing.
fn both(one: ReadId, other: ReadId) -> ReadId {
    let values = pair(one, other)?;
    Ok(values.iter().all(Option::is_some).then(|| composed(&values)))
}

/// A pointer finds what it names in a tree of the body, alone and beside another pointer.
#[test]
fn json_pointer() {
    fuzz("json_pointer", 6_000, &[], |input| {
        let mut input = Input(input);
        let [one, other] = [(); 2].map(|()| input.text());
        let (of_one, of_other) = (tokens(&one), tokens(&other));
        let [one, other] = [&one, &other].map(|pointer| key::json(pointer));
        let is_valid = |part: &KeyPart| part.clone().namespace("n").checked().is_ok();
        let are_valid = (is_valid(&one), is_valid(&other));
        assert_eq!(are_valid, (of_one.is_some(), of_other.is_some()));
        let (Some(of_one), Some(of_other)) = (of_one, of_other) else { return };
        let body = Bytes::copy_from_slice(input.0);
        // A byte order mark is skipped.
        let plain = input.0.strip_prefix(b"\xef\xbb\xbf").unwrap_or(input.0);
        let request = || Request::post("/").body(body.clone()).unwrap();
        let results =
            [one.clone(), other.clone(), one.and(other)].map(|part| read(&part, request()));
        if let Ok(tree) = serde_json::from_slice::<Tree>(plain) {
            let (one, other) = (id_at(&tree, &of_one), id_at(&tree, &of_other));
            let expected = [one.clone(), other.clone(), both(one, other)];
            assert_eq!(results, expected.map(|id| id.map(|id| id.map(|id| stored_id(&id)))));
        } else if serde_json::from_slice::<IgnoredAny>(plain).is_err() {
            // A walk that fails at a value before the error has another reason.
            assert!(results.iter().all(Result::is_err), "{results:?}");
        } else {
            // Deeper than 128 levels, or with a string that is no text: a pointer past it is read.
            let [one, other, of_both] = results;
            let is_hashed = |id: &ReadId| matches!(id, Ok(Some(id)) if id.len() == 64);
            if !is_hashed(&one) && !is_hashed(&other) {
                assert_eq!(of_both, both(one, other).map(|id| id.map(|id| stored_id(&id))));
            }
        }
    });
}

const ARRAYS: [&str; 10] =
    ["", "/a", "/*", "/a/*", "/a/*/b", "/*/*", "/0", "/a/*/b/*/c", "/~1", "/*/0"];

/// `each` finds the events that the tree has, with their bytes.
#[test]
fn each() {
    fuzz("each", 6_000, &[], |input| {
        let mut input = Input(input);
        let pointer = *input.pick(&ARRAYS);
        let body = Bytes::copy_from_slice(input.0);
        // A byte order mark is skipped.
        let plain = input.0.strip_prefix(b"\xef\xbb\xbf").unwrap_or(input.0);
        let part = key::json("/id").and(key::json("/t").optional());
        let each = key::each(pointer, part).namespace("n");
        let (head, ()) = Request::post("/").body(()).unwrap().into_parts();
        let extracted = each.extract(&RequestRef::new(&head, &body)).map_err(|error| error.kind());
        let Ok(tree) = serde_json::from_slice::<Tree>(plain) else {
            if serde_json::from_slice::<IgnoredAny>(plain).is_err() {
                assert!(extracted.is_err(), "{extracted:?}");
            }
            return;
        };
        let star = |token: Option<String>| token.filter(|token| token != "*");
        let tokens = tokens(pointer).unwrap().into_iter().map(star).chain([None]);
        let found = Found::at(&tree, &tokens.collect::<Tokens>());
        let id = |event: &Tree| -> ReadId {
            let field = |name: &str| id_at(event, &[Some(name.to_owned())]);
            // A blank value is missing where none is needed.
            let kind = match field("t") {
                Err(Empty) => Ok(None),
                kind => kind,
            };
            let [id, kind] = pair(field("id"), kind)?;
            Ok(id.map(|id| stored_id(&composed(&[Some(id), kind]))))
        };
        let expected = found.and_then(|found| match (found.missing, &found.values[..]) {
            (true, _) => Ok(Extracted::Missing),
            (false, []) => Ok(Extracted::Bypass),
            (false, events) => {
                let ids = events.iter().map(|event| id(event)).collect::<Result<Vec<_>, _>>()?;
                let ids: Option<Vec<_>> = ids.into_iter().collect();
                let Some(ids) = ids else { return Ok(Extracted::Missing) };
                let Ok(Extracted::Keys(keys)) = &extracted else { panic!("{extracted:?}") };
                let read = keys.events().iter().map(|event| event.key().id());
                assert!(read.eq(ids.iter().map(String::as_str)), "{keys:?}");
                for (event, of_tree) in keys.events().iter().zip(events) {
                    let payload: Tree = serde_json::from_slice(event.payload().unwrap()).unwrap();
                    assert_eq!(payload, **of_tree);
                }
                Ok(Extracted::Keys(keys.clone()))
            }
        });
        assert_eq!(extracted, expected);
    });
}
