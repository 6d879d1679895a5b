//! [`Events`]: makes the events of a delivery from the ids that a rule finds.

use std::borrow::Cow;
use std::cell::OnceCell;

use bytes::Bytes;

use super::event_part::{EventPart, FoundId, read_type};
use super::id::{DedupKey, Event, Keys, Payload};
use super::json::MAX_EVENTS;
use super::naming::Naming;
use super::part::KeyPart;
use super::request::RequestRef;
use crate::error::{KeyError, KeyErrorKind};

/// The most bytes of all ids of one delivery, before long ids are hashed.
const MAX_ID_BYTES: usize = 32 << 20;

/// The result of an extractor on a request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Extracted {
    /// The delivery's keys.
    Keys(Keys),
    /// No event: a [handshake](super::KeyExtractor::handshake_when), or a request that reaches the
    /// handler without [deduplication](super::KeyExtractor::bypass_when).
    Bypass,
    /// The key is missing: the layer's policy decides.
    Missing,
}

/// The events of a delivery that have been found so far, with all their identities.
pub(crate) struct Events<'e> {
    pub(crate) request: RequestRef<'e>,
    /// The namespaces of the keys and of the second identities.
    namespaces: Result<[Cow<'e, str>; 2], KeyError>,
    /// The part of the second identities, and whether it is a digest of the body.
    second: Option<(Cow<'e, KeyPart>, bool)>,
    /// Reads the type of an event to which the rule gives none.
    event_type: Option<&'e KeyPart>,
    events: Vec<Event>,
    /// The bytes of all ids, and of all second identities.
    id_bytes: [usize; 2],
    /// Takes the key of the first event of a list, after which the list is too long.
    first: Option<&'e OnceCell<DedupKey>>,
}

impl<'e> Events<'e> {
    pub(super) fn new(request: &RequestRef<'e>, naming: &'e Naming, namespace: &'e str) -> Self {
        let second = naming.second.as_ref();
        Self {
            request: *request,
            namespaces: naming.namespaces(namespace, request),
            second: second.map(|second| (Cow::Borrowed(&second.part), second.is_content)),
            event_type: naming.event_type.as_ref(),
            events: Vec::new(),
            id_bytes: [0; 2],
            first: None,
        }
    }

    /// Ends a list at its first event.
    #[cfg(feature = "verify")]
    pub(super) fn until_first(self, first: &'e OnceCell<DedupKey>) -> Self {
        Self { first: Some(first), ..self }
    }

    /// Returns the keys of a delivery of the one event that the part reads.
    pub(crate) fn one_of(self, part: &EventPart) -> Result<Extracted, KeyError> {
        let found = part.read(&self.request)?;
        self.one(found)
    }

    /// Returns the keys of a delivery of one event.
    pub(super) fn one(mut self, found: Option<FoundId<'_>>) -> Result<Extracted, KeyError> {
        let Some(found) = found else { return Ok(Extracted::Missing) };
        let request = self.request;
        Ok(Extracted::Keys(self.event(found, &request)?.into()))
    }

    /// Adds the type and the second identity to the event that a closure found, if it is one event
    /// and has none.
    pub(super) fn of_closure(mut self, mut found: Extracted) -> Result<Extracted, KeyError> {
        if let Extracted::Keys(keys) = &mut found
            && let [event] = &mut *keys.events
        {
            let request = self.request;
            self.add_rest(event, &request)?;
        }
        Ok(found)
    }

    /// Adds an event of a list with its own bytes, which are its payload if they are the same on
    /// every attempt.
    pub(crate) fn push(
        &mut self,
        found: FoundId<'_>,
        body: Bytes,
        is_payload: bool,
    ) -> Result<(), KeyError> {
        match self.events.len() {
            MAX_EVENTS => return Err(too_many()),
            0 => {
                let read = |part: &KeyPart| Cow::Owned(part.with_head_of(&self.request));
                self.second = self.second.take().map(|(part, content)| (read(&part), content));
            }
            _ => {}
        }
        add_bytes(&mut self.id_bytes[0], &found.id)?;
        let mut event = self.event(found, &self.request.with_body(&body))?;
        if let Some(first) = self.first {
            first.get_or_init(|| event.key().clone());
            return Err(too_many());
        }
        event.payload = is_payload.then_some(Payload::Bytes(body));
        self.events.push(event);
        Ok(())
    }

    fn event(&mut self, found: FoundId<'_>, request: &RequestRef<'_>) -> Result<Event, KeyError> {
        let [namespace, _] = self.namespaces.as_ref().map_err(KeyError::clone)?;
        let mut event = Event::new(DedupKey::in_namespace(namespace, &found.id)?);
        event.event_type = found.event_type;
        self.add_rest(&mut event, request)?;
        Ok(event)
    }

    /// Adds the type and the second identity, if the event has none.
    fn add_rest(&mut self, event: &mut Event, request: &RequestRef<'_>) -> Result<(), KeyError> {
        if event.event_type.is_none() {
            event.event_type = self.event_type.and_then(|part| read_type(part, request));
        }
        if let (Some((part, is_content)), None) = (&self.second, &event.second) {
            let [_, namespace] = self.namespaces.as_ref().map_err(KeyError::clone)?;
            let Some(id) = part.read_unless_blank(request)? else { return Ok(()) };
            add_bytes(&mut self.id_bytes[1], &id)?;
            event.set_second(DedupKey::in_namespace(namespace, &id)?, *is_content);
        }
        Ok(())
    }
}

impl From<Events<'_>> for Extracted {
    fn from(list: Events<'_>) -> Self {
        Keys::new(list.events).map_or(Self::Bypass, Self::Keys)
    }
}

/// Refuses ids that are too long together: a long part that all events share is in each id.
fn add_bytes(bytes: &mut usize, id: &str) -> Result<(), KeyError> {
    *bytes = bytes.saturating_add(id.len());
    if *bytes <= MAX_ID_BYTES { Ok(()) } else { Err(too_many()) }
}

fn too_many() -> KeyError {
    KeyError::new(KeyErrorKind::TooMany, "the body")
}
