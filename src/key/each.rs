//! [`EachKey`]: a key for every event of a JSON array in the body.

use super::event_part::EventPart;
use super::events::{Events, Extracted};
use super::json::{Arrays, items};
use super::part::KeyPart;
use crate::error::{ConfigError, KeyError};

/// Reads a key for every event of a JSON array. [`each`] makes it.
///
/// 1. A pointer names the array. In the pointer, `*` stands for every item of an array in the path:
///    `/entry/*/changes/*/value/messages` names an array for every change of every entry.
/// 2. The part is read once for each item. It sees the head of the delivery and, as the body, the
///    item's own bytes. So JSON pointers start at the item, and
///    [`body_digest`](super::body_digest) is the digest of the item.
/// 3. If an array is missing anywhere, or an event has no key, the whole delivery is
///    [`Missing`](super::Extracted::Missing). Keys for the rest would make the event without a key
///    part of a duplicate.
/// 4. If all arrays are empty, the result is [`Bypass`](super::Extracted::Bypass): nothing has to
///    be deduplicated, and after a 400 the sender would retry.
/// 5. A value that is not an array, and a name that occurs twice in the path, are malformed.
/// 6. A delivery has at most 65,536 events. All ids of a delivery have at most 32 MiB together,
///    because a long header would be part of each.
/// 7. Events are slices of the body, not copies. The head is read once, so the time is linear in
///    the body.
#[derive(Debug, Clone)]
pub struct EachKey {
    arrays: Arrays,
    part: EventPart,
    payload: bool,
}

/// Reads `part` from each event of the array at a JSON pointer (RFC 6901). In the pointer, `*`
/// stands for every item of an array in the path.
///
/// A text that is not a pointer makes an [invalid](super::KeyExtractor::checked) key: see
/// [`json`](super::json).
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
pub fn each(pointer: &str, part: KeyPart) -> EachKey {
    let (arrays, part) = match Arrays::parse(pointer) {
        Ok(arrays) => (arrays, part),
        Err(fault) => (Arrays::default(), KeyPart::invalid(fault)),
    };
    EachKey { arrays, part: EventPart::new(part), payload: true }
}

impl EachKey {
    /// Leaves the bytes of the events out of the keys.
    ///
    /// This is for a sender that changes these bytes from one attempt to the next. A layer that
    /// compares payloads would take such a retry for another event under a known key.
    #[must_use]
    pub fn without_payload(mut self) -> Self {
        self.payload = false;
        self
    }

    /// Reads the [type](super::Event::with_event_type) of each event with `part`, as it reads the
    /// key.
    pub(crate) fn event_type(mut self, part: KeyPart) -> Self {
        self.part = self.part.with_event_type(part);
        self
    }

    pub(super) fn fault(&self) -> Option<&ConfigError> {
        self.part.fault()
    }

    pub(crate) fn read(&self, mut events: Events<'_>) -> Result<Extracted, KeyError> {
        let request = events.request;
        let Some(bodies) = items(request.body(), &self.arrays)? else {
            return Ok(Extracted::Missing);
        };
        let part = self.part.with_head_of(&request);
        let mut missing = false;
        // All events are read even if one has no key, because a malformed value is reported before
        // a missing value.
        for (index, body) in bodies.iter().enumerate() {
            let id = part.read(&request.with_body(body)).map_err(|error| {
                KeyError::new(error.kind(), format!("{} of event {index}", error.place()))
            })?;
            match id {
                Some(id) => events.push(id, body.clone(), self.payload)?,
                None => missing = true,
            }
        }
        Ok(if missing { Extracted::Missing } else { events.into() })
    }
}
