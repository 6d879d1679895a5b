//! [`Members`]: the values of several JSON pointers, found in one walk of the body.
//!
//! 1. The walk takes the members of the body's object that the pointers begin with, as they are
//!    written. If two pointers go on below one member, one more walk takes the members of its value.
//! 2. Errors are not found here. If the body is no object, or a name on the way occurs twice, the
//!    pointer is [`Found::Unknown`], and a walk of its own finds the error. So a pointer has the same
//!    result with and without this walk.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::json::Token;

/// The names with which several pointers begin.
#[derive(Debug, Clone, Default)]
pub(super) struct Names(Vec<Name>);

#[derive(Debug, Clone)]
struct Name {
    name: Arc<str>,
    /// How many pointers go on below this name.
    longer: usize,
    below: Names,
}

impl Names {
    /// Adds the names of a pointer to one value.
    pub(super) fn add(&mut self, tokens: &[Token]) {
        let Some((Token::Name(token), rest)) = tokens.split_first() else { return };
        let at = self.0.iter().position(|name| *name.name == **token).unwrap_or_else(|| {
            self.0.push(Name { name: (&**token).into(), longer: 0, below: Self::default() });
            self.0.len() - 1
        });
        self.0[at].longer += usize::from(!rest.is_empty());
        self.0[at].below.add(rest);
    }
}

/// The members of one object, in the order of their [`Names`].
#[derive(Debug)]
pub(crate) struct Members<'b>(SmallVec<[Member<'b>; 4]>);

#[derive(Debug)]
struct Member<'b> {
    name: &'b str,
    /// The value as it is written.
    value: Option<&'b str>,
    repeated: bool,
    below: Option<Members<'b>>,
}

/// What the walk knows of a pointer.
pub(super) enum Found<'b, 't> {
    Unknown,
    Missing,
    /// The value, as it is written.
    Value(&'b str),
    /// The value is where the rest of the pointer leads to in this text.
    Below(&'b str, &'t [Token]),
}

impl<'b> Members<'b> {
    /// Returns the members of an object; `None` if `body` is no object.
    pub(super) fn read(body: &'b [u8], names: &'b Names) -> Option<Self> {
        let member = |name: &'b Name| Member {
            name: &name.name,
            value: None,
            repeated: false,
            below: None,
        };
        let mut members = Self(names.0.iter().map(member).collect());
        let mut json = serde_json::Deserializer::from_slice(body);
        serde::Deserializer::deserialize_map(&mut json, Take(&mut members)).ok()?;
        json.end().ok()?;
        for (member, name) in members.0.iter_mut().zip(&names.0) {
            if name.longer > 1 {
                let value = member.value.unwrap_or_default();
                member.below = Self::read(value.as_bytes(), &name.below);
            }
        }
        Some(members)
    }

    pub(super) fn find<'t>(&self, tokens: &'t [Token]) -> Found<'b, 't> {
        let Some((Token::Name(token), rest)) = tokens.split_first() else { return Found::Unknown };
        let Some(member) = self.0.iter().find(|member| member.name == token) else {
            return Found::Unknown;
        };
        match (member.value, rest) {
            _ if member.repeated => Found::Unknown,
            (None, _) => Found::Missing,
            (Some(value), []) => Found::Value(value),
            (Some(value), rest) => {
                match member.below.as_ref().map_or(Found::Unknown, |below| below.find(rest)) {
                    Found::Unknown => Found::Below(value, rest),
                    found => found,
                }
            }
        }
    }
}

/// Takes the members from an object.
struct Take<'m, 'b>(&'m mut Members<'b>);

impl<'b> Visitor<'b> for Take<'_, 'b> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'b>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(at) = members.next_key_seed(Place(self.0))? {
            let Some(at) = at else {
                members.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = members.next_value::<Raw<'b>>()?;
            let member = &mut self.0.0[at];
            member.repeated |= member.value.replace(value.0).is_some();
        }
        Ok(())
    }
}

/// A value as it is written.
struct Raw<'b>(&'b str);

impl<'b> Deserialize<'b> for Raw<'b> {
    fn deserialize<D: serde::Deserializer<'b>>(json: D) -> Result<Self, D::Error> {
        Ok(Self(<&RawValue>::deserialize(json)?.get()))
    }
}

/// Finds the place of a member's name without copying it.
struct Place<'m, 'b>(&'m Members<'b>);

impl<'de> DeserializeSeed<'de> for Place<'_, '_> {
    type Value = Option<usize>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Option<usize>, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Place<'_, '_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(self.0.0.iter().position(|member| member.name == name))
    }
}
