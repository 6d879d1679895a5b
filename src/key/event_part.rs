//! [`EventPart`]: the id and the type of one event, read together.

use std::borrow::Cow;
use std::sync::Arc;

use super::id::event_type;
use super::json::Pointers;
use super::part::KeyPart;
use super::request::RequestRef;
use crate::error::{ConfigError, KeyError};

/// Reads the id and the type of one event, with one walk for all JSON pointers of both.
#[derive(Debug, Clone)]
pub(crate) struct EventPart {
    id: KeyPart,
    event_type: Option<KeyPart>,
    /// Set if there is more than one pointer.
    pointers: Option<Pointers>,
}

/// The id of one event, without a namespace, and the event's type.
#[derive(Debug)]
pub(crate) struct FoundId<'r> {
    pub(crate) id: Cow<'r, str>,
    pub(crate) event_type: Option<Arc<str>>,
}

impl EventPart {
    pub(crate) fn new(id: KeyPart) -> Self {
        Self { id, event_type: None, pointers: None }.with_pointers()
    }

    pub(crate) fn with_event_type(self, part: KeyPart) -> Self {
        Self { event_type: Some(part), ..self }.with_pointers()
    }

    fn with_pointers(mut self) -> Self {
        let mut pointers = Pointers::default();
        for part in std::iter::once(&self.id).chain(&self.event_type) {
            part.add_pointers(&mut pointers);
        }
        self.pointers = (pointers.len() > 1).then_some(pointers);
        self
    }

    pub(super) fn fault(&self) -> Option<&ConfigError> {
        std::iter::once(&self.id).chain(&self.event_type).find_map(KeyPart::fault)
    }

    /// Returns the part of the id.
    pub(crate) fn id(&self) -> &KeyPart {
        &self.id
    }

    /// Reads what the parts read from the head, as [`KeyPart::with_head_of`] does.
    pub(super) fn with_head_of(&self, request: &RequestRef<'_>) -> Self {
        Self {
            id: self.id.with_head_of(request),
            event_type: self.event_type.as_ref().map(|part| part.with_head_of(request)),
            pointers: self.pointers.clone(),
        }
    }

    pub(crate) fn read<'r>(
        &self,
        request: &RequestRef<'r>,
    ) -> Result<Option<FoundId<'r>>, KeyError> {
        let values = self.pointers.as_ref().and_then(|pointers| pointers.read(request.body()));
        if values.is_none() {
            return self.read_parts(request);
        }
        let found = self.read_parts(&request.with_values(values.as_ref()))?;
        Ok(found.map(FoundId::into_owned))
    }

    fn read_parts<'r>(&self, request: &RequestRef<'r>) -> Result<Option<FoundId<'r>>, KeyError> {
        let Some(id) = self.id.read(request)? else { return Ok(None) };
        let event_type = self.event_type.as_ref().and_then(|part| read_type(part, request));
        Ok(Some(FoundId { id, event_type }))
    }
}

/// Reads the type of an event. A malformed type is none, because a label must not make a delivery
/// fail.
pub(super) fn read_type(part: &KeyPart, request: &RequestRef<'_>) -> Option<Arc<str>> {
    event_type(&part.read(request).ok()??)
}

impl FoundId<'_> {
    pub(crate) fn into_owned(self) -> FoundId<'static> {
        FoundId { id: self.id.into_owned().into(), event_type: self.event_type }
    }
}

impl From<String> for FoundId<'_> {
    fn from(id: String) -> Self {
        Self { id: id.into(), event_type: None }
    }
}
