//! [`Members`]: the values of several JSON pointers, found in one walk of the body.
//!
//! No error is found here. If the walk fails, or a pointer leads into an array or to a name that occurs
//! twice, the pointer is [`Lookup::Unknown`], and a walk of its own finds the result. So a pointer has the
//! same result with and without this walk.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// One step of a JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    /// The name of a member, or the index of an item.
    Name(String),
    /// Every item of an array.
    EachItem,
}

/// The names of several pointers: those of one object, each with the names below it.
#[derive(Debug, Clone, Default)]
pub(super) struct Names(Vec<Name>);

#[derive(Debug, Clone)]
struct Name {
    name: Arc<str>,
    /// A pointer ends here.
    ends: bool,
    below: Names,
}

impl Names {
    /// Adds the names of a pointer to one value.
    pub(super) fn add(&mut self, tokens: &[Token]) {
        let Some((Token::Name(token), rest)) = tokens.split_first() else { return };
        let at = self.0.iter().position(|name| *name.name == **token).unwrap_or_else(|| {
            self.0.push(Name { name: (&**token).into(), ends: false, below: Self::default() });
            self.0.len() - 1
        });
        self.0[at].ends |= rest.is_empty();
        self.0[at].below.add(rest);
    }
}

/// The members of one object, one for each of its [`Names`].
#[derive(Debug)]
pub(crate) struct Members<'b> {
    names: &'b Names,
    values: Vec<Value<'b>>,
}

#[derive(Debug)]
enum Value<'b> {
    Missing,
    /// The value as it is written.
    Raw(&'b str),
    Object(Members<'b>),
    /// The value has no members.
    Scalar,
    Unknown,
}

/// What the walk has found out about a pointer.
pub(super) enum Lookup<'b, 't> {
    Unknown,
    Missing,
    /// The value, as it is written.
    Value(&'b str),
    /// The value is where the rest of the pointer leads to in this text.
    Below(&'b str, &'t [Token]),
}

impl<'b> Members<'b> {
    /// Returns the members of `body`; `None` if it is no JSON object.
    pub(super) fn read(body: &'b [u8], names: &'b Names) -> Option<Self> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let members = serde::Deserializer::deserialize_map(&mut json, Take(names)).ok()?;
        json.end().ok()?;
        if let Value::Object(members) = members { Some(members) } else { None }
    }

    pub(super) fn find<'t>(&self, tokens: &'t [Token]) -> Lookup<'b, 't> {
        let Some((Token::Name(token), rest)) = tokens.split_first() else {
            return Lookup::Unknown;
        };
        let at = self.names.0.iter().position(|name| *name.name == **token);
        match (at.map_or(&Value::Unknown, |at| &self.values[at]), rest) {
            (Value::Missing | Value::Scalar, _) => Lookup::Missing,
            (Value::Raw(value), []) => Lookup::Value(value),
            (Value::Raw(value), rest) => Lookup::Below(value, rest),
            (Value::Object(members), rest) => members.find(rest),
            (Value::Unknown, _) => Lookup::Unknown,
        }
    }
}

/// Takes the members with these names from a value.
#[derive(Clone, Copy)]
struct Take<'b>(&'b Names);

impl<'b> DeserializeSeed<'b> for Take<'b> {
    type Value = Value<'b>;

    fn deserialize<D: serde::Deserializer<'b>>(self, json: D) -> Result<Value<'b>, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'b> Visitor<'b> for Take<'b> {
    type Value = Value<'b>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_unit<E: Error>(self) -> Result<Value<'b>, E> {
        Ok(Value::Scalar)
    }

    fn visit_seq<A: SeqAccess<'b>>(self, mut items: A) -> Result<Value<'b>, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Unknown)
    }

    fn visit_map<A: MapAccess<'b>>(self, mut members: A) -> Result<Value<'b>, A::Error> {
        let Self(names) = self;
        let mut values: Vec<_> = names.0.iter().map(|_| Value::Missing).collect();
        while let Some(at) = members.next_key_seed(Place(names))? {
            let Some(at) = at else {
                members.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = if names.0[at].ends {
                Value::Raw(members.next_value::<Raw<'b>>()?.0)
            } else {
                members.next_value_seed(Take(&names.0[at].below))?
            };
            let is_first = matches!(values[at], Value::Missing);
            values[at] = if is_first { value } else { Value::Unknown };
        }
        Ok(Value::Object(Members { names, values }))
    }
}

/// A value as it is written.
struct Raw<'b>(&'b str);

impl<'b> Deserialize<'b> for Raw<'b> {
    fn deserialize<D: serde::Deserializer<'b>>(json: D) -> Result<Self, D::Error> {
        Ok(Self(<&RawValue>::deserialize(json)?.get()))
    }
}

/// Returns the place of a member's name, without copying the name.
struct Place<'n>(&'n Names);

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = Option<usize>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Option<usize>, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Place<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(self.0.0.iter().position(|known| *known.name == *name))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Request;

    use super::super::part::{KeyPart, json};
    use super::super::request::RequestRef;
    use super::*;

    const POINTERS: [&str; 12] = [
        "/id", "/a/id", "/a/b/id", "/a/b", "/a/b/0", "/a/b/01", "/type", "", "/", "/*", "/a~1b",
        "/\u{e9}",
    ];

    /// Every pointer has the same result, alone and in a walk with all of these.
    fn same(body: &[u8], pointers: &[&str]) {
        let parts: Vec<KeyPart> = pointers.iter().map(|pointer| json(pointer)).collect();
        let mut names = Names::default();
        for part in &parts {
            part.add_names(&mut names);
        }
        let (head, ()) = Request::new(()).into_parts();
        let bytes = Bytes::copy_from_slice(body);
        let alone = RequestRef::new(&head, &bytes);
        let members = Members::read(&bytes, &names);
        let together = alone.with_members(members.as_ref());
        for (part, pointer) in parts.iter().zip(pointers) {
            let text = String::from_utf8_lossy(body);
            assert_eq!(part.read(&together), part.read(&alone), "{pointer} of {text}");
        }
    }

    #[test]
    fn one_walk_finds_the_members_of_an_object() {
        let parts = ["/id", "/a/id", "/b"].map(json);
        let mut names = Names::default();
        for part in &parts {
            part.add_names(&mut names);
        }
        let members = Members::read(br#"{"x":0,"id":1,"a":{"y":2,"id":3}}"#, &names).unwrap();
        let [id, a, b] = ["id", "a", "b"].map(|name| Token::Name(name.to_owned()));
        assert!(matches!(members.find(std::slice::from_ref(&id)), Lookup::Value("1")));
        assert!(matches!(members.find(&[a, id]), Lookup::Value("3")));
        assert!(matches!(members.find(&[b]), Lookup::Missing));

        let (head, ()) = Request::new(()).into_parts();
        let body = Bytes::new();
        assert!(RequestRef::new(&head, &body).with_members(Some(&members)).members().is_some());
    }

    #[test]
    fn pointer_has_the_same_result_in_one_walk_with_others() {
        let deep = format!(r#"{{"x":{0},"a":{0},"id":1}}"#, "[".repeat(300) + &"]".repeat(300));
        for body in [
            r#"{"id":"evt","a":{"id":2,"b":{"id":"x"}},"type":"t"}"#,
            r#"{"type":"t","a":{"b":[{"id":1},2]},"id":null}"#,
            r#"{"a":{"b":{"0":"zero","01":"one"}},"":"empty","*":"star","a/b":1,"é":2}"#,
            r#"{"id":1,"id":2}"#,
            r#"{"id":1,"\u0069d":2,"type":{"a":1}}"#,
            r#"{"a":{"id":1,"id":2}}"#,
            r#"{"a":{"id":1},"a":{"id":2}}"#,
            r#"{"a":{"id":1},"a":1,"id":"x"}"#,
            r#"{"a":"\ud800","id":"x"}"#,
            r#"{"a":{"\ud800":1},"id":"x"}"#,
            r#"{"id":"\ud800","type":"x"}"#,
            r#"{"x":"\ud800","id":"x"}"#,
            r#"{"a":1,"id":1.5}"#,
            r#"{"a":null,"id":""}"#,
            r#"{"a":true,"id":{}}"#,
            r#"{"a":-1,"id":[]}"#,
            r#"{"a":1.5,"id":"a\u0000b"}"#,
            r#"{"a":[{"id":1}],"id":true}"#,
            r#"{"id":1} x"#,
            r#"{"id":1,"id":2} x"#,
            r#"{"id":1,}"#,
            r#"{"id":"#,
            r#"[{"id":1}]"#,
            r#""text""#,
            "",
            "{}",
            &deep,
        ] {
            same(body.as_bytes(), &POINTERS);
            same(body.as_bytes(), &["/id", "/a/b/id", "/a/id"]);
            same(body.as_bytes(), &["/a/b/id", "/type"]);
        }
        same(b"{\"id\":\"\xff\",\"type\":1}", &POINTERS);
        same(b"{\"x\":\"\xff\",\"type\":1}", &POINTERS);
    }
}
