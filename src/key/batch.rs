//! [`Batch`]: a key for every event of a JSON array in the body.
//!
//! 1. A pointer names the array. As a token of it, `*` stands for every event of an array on the
//!    way: `/entry/*/changes/*/value/messages` names an array for every change of every entry.
//! 2. The part is read once for each event, on a request that has the head of the delivery and,
//!    as its body, the event's own bytes. So JSON pointers start at the event,
//!    [`body_digest`](super::body_digest) is that of the event, and headers are still there.
//! 3. An array that is missing anywhere, and an event without a key, make the whole delivery
//!    [`Missing`](super::Extracted::Missing): a key for the rest of it would let what has none be
//!    taken for a duplicate.
//! 4. Where all arrays are empty, there is nothing to deduplicate:
//!    [`Bypass`](super::Extracted::Bypass). A 400 would be sent again for ever.
//! 5. What is there and no array, and a name that occurs twice on the way, are malformed.
//! 6. A delivery has at most 65,536 events; what is beyond is not read. Neither are ids that
//!    have more than 32 MiB together: a long header would be in each of them.
//! 7. The events are slices of the body, not copies. What is read from the head is read once, and
//!    the time is linear in the body.

use std::fmt;

use bytes::Bytes;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::extractor::{Found, KeyExtractor, RequestRef};
use super::id::{check_namespace, stored};
use super::json::{NameIs, Pointer, array_index};
use super::part::KeyPart;
use crate::error::{ConfigError, KeyError, KeyErrorKind};

/// The most events of one delivery. The layer's own bound is lower; this one is met before a
/// single key has been made.
const MOST_ELEMENTS: usize = 65_536;

/// The most bytes of all ids of one delivery, before the long ones are hashed.
const MOST_ID_BYTES: usize = 32 << 20;

/// Reads a key for every event of a JSON array: [`each`] makes it.
#[derive(Debug, Clone)]
pub struct Batch {
    array: Pointer,
    part: KeyPart,
    payload: bool,
}

/// The keys of a batch: what `part` reads from each event of the array that `pointer` names.
/// [`Batch::new`] for a pointer that is surely one.
///
/// # Panics
///
/// If `pointer` is no JSON pointer; [`Batch::new`] answers an error instead.
///
/// # Example
///
/// ```
/// use http::Request;
/// use tower_dedup::key::{self, Extracted, RequestRef};
///
/// let events = key::each("/events", key::json("/id").or(key::body_digest())).namespace("acme");
/// let (head, body) = Request::post("/hook")
///     .body(r#"{"events": [{"id": 1}, {"id": 2}, {}]}"#.into())?
///     .into_parts();
/// let Ok(Extracted::Keys(keys)) = events.extract(&RequestRef::new(&head, &body)) else {
///     panic!("keys");
/// };
/// let ids: Vec<_> = keys.events().iter().map(|event| event.key().id()).collect();
/// assert_eq!(ids[..2], ["1", "2"]);
/// assert!(ids[2].starts_with("body_44136fa355b3678a"), "the SHA-256 of {{}}");
/// # Ok::<(), http::Error>(())
/// ```
#[must_use]
#[track_caller]
pub fn each(pointer: &str, part: KeyPart) -> Batch {
    Batch::new(pointer, part).unwrap_or_else(|error| panic!("{pointer:?}: {error}"))
}

impl Batch {
    /// The keys of a batch: what `part` reads from each event of the array at a JSON pointer
    /// (RFC 6901), in which `*` stands for every event of an array on the way.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidPointer`].
    pub fn new(pointer: &str, part: KeyPart) -> Result<Self, ConfigError> {
        Ok(Self { array: Pointer::new(pointer)?, part, payload: true })
    }

    /// Leaves the events' bytes out of the keys, for a sender that changes them from one attempt
    /// to the next: where the layer compares payloads, a retry would be another event under a
    /// known key.
    #[must_use]
    pub fn without_payload(mut self) -> Self {
        self.payload = false;
        self
    }

    /// The extractor of keys in this namespace: what the layer takes.
    ///
    /// # Panics
    ///
    /// If the namespace is not 1 to 64 bytes without control characters;
    /// [`try_namespace`](Self::try_namespace) answers an error instead.
    #[must_use]
    #[track_caller]
    pub fn namespace(self, namespace: &str) -> KeyExtractor {
        self.try_namespace(namespace).unwrap_or_else(|error| panic!("{namespace:?}: {error}"))
    }

    /// The extractor of keys in this namespace.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidNamespace`].
    pub fn try_namespace(self, namespace: &str) -> Result<KeyExtractor, ConfigError> {
        check_namespace(namespace)?;
        Ok(KeyExtractor::from_batch(namespace.into(), self))
    }

    pub(crate) fn read(&self, request: &RequestRef<'_>) -> Result<Found, KeyError> {
        let Some(events) = events(request.body(), &self.array)? else {
            return Ok(Found::Missing);
        };
        let mut items = Items::default();
        if events.is_empty() {
            return Ok(items.into());
        }
        let part = self.part.with_head_of(request);
        let mut missing = false;
        // To the end even if one is missing, as in a composite key: what is malformed is malformed.
        for (index, body) in events.iter().enumerate() {
            let id = part.read(&request.with_body(body)).map_err(|error| {
                KeyError::new(error.kind(), format!("{} of event {index}", error.place()))
            })?;
            match id {
                Some(id) => items.push(&id, body.clone(), self.payload)?,
                None => missing = true,
            }
        }
        Ok(if missing { Found::Missing } else { items.into() })
    }
}

/// The events of a batch that have been read so far, within the bounds.
#[derive(Debug, Default)]
pub(crate) struct Items {
    items: Vec<Item>,
    id_bytes: usize,
}

/// One event.
#[derive(Debug)]
pub(crate) struct Item {
    /// As it is stored, so that long ones do not add up.
    pub(super) id: String,
    /// Its own bytes.
    pub(super) body: Bytes,
    /// Whether they are the same on every attempt.
    pub(super) payload: bool,
}

impl Items {
    pub(crate) fn push(&mut self, id: &str, body: Bytes, payload: bool) -> Result<(), KeyError> {
        self.id_bytes = self.id_bytes.saturating_add(id.len());
        check_id_bytes(self.id_bytes)?;
        if self.items.len() == MOST_ELEMENTS {
            return Err(KeyError::new(KeyErrorKind::TooMany, "the body"));
        }
        self.items.push(Item { id: stored(id).into_owned(), body, payload });
        Ok(())
    }
}

/// A long part that all events share is in each of their ids.
pub(super) fn check_id_bytes(bytes: usize) -> Result<(), KeyError> {
    if bytes <= MOST_ID_BYTES {
        return Ok(());
    }
    Err(KeyError::new(KeyErrorKind::TooMany, "the body"))
}

/// No events: nothing to deduplicate.
impl From<Items> for Found {
    fn from(Items { items, .. }: Items) -> Self {
        if items.is_empty() { Self::Bypass } else { Self::Each(items) }
    }
}

/// The events of all arrays that `pointer` names in `body`, in its order, as slices of it;
/// `None` if one of the arrays is missing.
pub(crate) fn events(body: &Bytes, pointer: &Pointer) -> Result<Option<Vec<Bytes>>, KeyError> {
    let mut walk = Walk::default();
    let mut json = serde_json::Deserializer::from_slice(body);
    let step = Step { tokens: pointer.tokens(), walk: &mut walk };
    let read = step.deserialize(&mut json).and_then(|()| json.end());
    if let Some(kind) = walk.fault {
        let place = match pointer.as_str() {
            "" => "the body".to_owned(),
            pointer => format!("JSON array {pointer}"),
        };
        return Err(KeyError::new(kind, place));
    }
    read.map_err(|_| KeyError::new(KeyErrorKind::InvalidJson, "the body"))?;
    if walk.missing {
        return Ok(None);
    }
    Ok(Some(walk.events.into_iter().map(|raw| body.slice_ref(raw.get().as_bytes())).collect()))
}

/// What has been met on the way.
#[derive(Default)]
struct Walk<'de> {
    events: Vec<&'de RawValue>,
    missing: bool,
    /// What is wrong, where it is not the JSON that is wrong.
    fault: Option<KeyErrorKind>,
}

/// One step along the pointer.
struct Step<'s, 'de> {
    tokens: &'s [String],
    walk: &'s mut Walk<'de>,
}

impl Step<'_, '_> {
    fn fail<E: serde::de::Error>(self, kind: KeyErrorKind) -> Result<(), E> {
        self.walk.fault = Some(kind);
        Err(E::custom("malformed key"))
    }

    /// A value that has no events and no members.
    fn leaf<E: serde::de::Error>(self) -> Result<(), E> {
        if self.wants_array() {
            return self.fail(KeyErrorKind::NotAnArray);
        }
        self.walk.missing = true;
        Ok(())
    }

    fn wants_array(&self) -> bool {
        self.tokens.first().is_none_or(|token| token == "*")
    }
}

impl<'de> DeserializeSeed<'de> for Step<'_, 'de> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Step<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<(), E> {
        self.leaf()
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<(), E> {
        self.leaf()
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<(), E> {
        self.leaf()
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<(), E> {
        self.leaf()
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<(), E> {
        self.leaf()
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.walk.missing = true;
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Some((token, rest)) = self.tokens.split_first() else {
            while let Some(event) = items.next_element::<&'de RawValue>()? {
                if self.walk.events.len() == MOST_ELEMENTS {
                    return self.fail(KeyErrorKind::TooMany);
                }
                self.walk.events.push(event);
            }
            return Ok(());
        };
        if token == "*" {
            while items.next_element_seed(Step { tokens: rest, walk: self.walk })?.is_some() {}
            return Ok(());
        }
        let mut met = false;
        if let Some(index) = array_index(token) {
            for _ in 0..index {
                if items.next_element::<IgnoredAny>()?.is_none() {
                    self.walk.missing = true;
                    return Ok(());
                }
            }
            met = items.next_element_seed(Step { tokens: rest, walk: self.walk })?.is_some();
        }
        self.walk.missing |= !met;
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let Some((token, rest)) = self.tokens.split_first().filter(|(token, _)| *token != "*")
        else {
            return self.fail(KeyErrorKind::NotAnArray);
        };
        let mut met = false;
        while let Some(matches) = members.next_key_seed(NameIs(token))? {
            if !matches {
                members.next_value::<IgnoredAny>()?;
                continue;
            }
            if met {
                return self.fail(KeyErrorKind::Repeated);
            }
            met = true;
            members.next_value_seed(Step { tokens: rest, walk: self.walk })?;
        }
        self.walk.missing |= !met;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(pointer: &str, body: &str) -> Result<Option<Vec<String>>, KeyErrorKind> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let found = events(&body, &Pointer::new(pointer).unwrap());
        let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        found
            .map(|found| found.map(|all| all.into_iter().map(text).collect()))
            .map_err(|error| error.kind())
    }

    fn found(events: &[&str]) -> Result<Option<Vec<String>>, KeyErrorKind> {
        Ok(Some(events.iter().map(|&event| event.to_owned()).collect()))
    }

    #[test]
    fn elements_are_the_bytes_between_the_commas() {
        assert_eq!(at("", " [ {\"a\": 1} ,\n2,\"x\" , null,[ ] ]\r\n"), {
            found(&["{\"a\": 1}", "2", "\"x\"", "null", "[ ]"])
        });
        assert_eq!(at("/a/1", r#"{"a":[0,[1,2],3]}"#), found(&["1", "2"]));
    }

    #[test]
    fn elements_are_slices_of_the_body() {
        let body = Bytes::from_static(br#"{"a":[11,22]}"#);
        let all = events(&body, &Pointer::new("/a").unwrap()).unwrap().unwrap();
        let offsets: Vec<_> =
            all.iter().map(|event| event.as_ptr().addr() - body.as_ptr().addr()).collect();
        assert_eq!(offsets, [6, 9]);
    }

    #[test]
    fn a_star_is_every_element_on_the_way() {
        let body = r#"{"e":[{"c":[1,2]},{"c":[]},{"c":[3]}]}"#;
        assert_eq!(at("/e/*/c", body), found(&["1", "2", "3"]));
        assert_eq!(at("/*", "[[1],[2,3]]"), found(&["1", "2", "3"]));
        assert_eq!(at("/*/*", "[[[1]],[]]"), found(&["1"]));
    }

    #[test]
    fn empty_is_not_missing_and_missing_anywhere_is_missing() {
        for (pointer, body) in [("", "[]"), ("/e", r#"{"e":[]}"#), ("/e/*/c", r#"{"e":[]}"#)] {
            assert_eq!(at(pointer, body), found(&[]), "{pointer} of {body}");
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
            assert_eq!(at(pointer, body), Ok(None), "{pointer} of {body}");
        }
    }

    #[test]
    fn what_is_no_array_is_malformed() {
        for value in ["{}", "1", "-1", "1.5", "true", r#""text""#, r#"{"0":[]}"#] {
            assert_eq!(at("", value), Err(KeyErrorKind::NotAnArray), "{value}");
            assert_eq!(at("/*", value), Err(KeyErrorKind::NotAnArray), "{value} on the way");
        }
        assert_eq!(at("/e", r#"{"e":[1],"e":[2]}"#), Err(KeyErrorKind::Repeated));
        assert_eq!(at("/e", r#"{"e":[1],"\u0065":[2]}"#), Err(KeyErrorKind::Repeated));
        for body in ["", "[", "[1] x", "[1,]", "[1][2]", "\u{feff}[]", r#"{"e":[1,2}"#] {
            let kind = at("", body).or(at("/e", body)).unwrap_err();
            assert_eq!(kind, KeyErrorKind::InvalidJson, "{body:?}");
        }
    }

    #[test]
    fn the_bound_holds_for_all_arrays_together() {
        let array = |length: usize| format!("[{}0]", "0,".repeat(length - 1));
        assert_eq!(at("", &array(MOST_ELEMENTS)).unwrap().unwrap().len(), MOST_ELEMENTS);
        assert_eq!(at("", &array(MOST_ELEMENTS + 1)), Err(KeyErrorKind::TooMany));
        let two = format!("[{0},{0}]", array(MOST_ELEMENTS / 2 + 1));
        assert_eq!(at("/*", &two), Err(KeyErrorKind::TooMany));
    }

    #[test]
    fn deep_elements_are_taken_as_they_are() {
        let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert_eq!(at("", &format!("[{deep}]")), found(&[&deep]));
        assert_eq!(at("/e", &format!(r#"{{"x":{deep},"e":[1]}}"#)), found(&["1"]));
    }
}
