//! Values that more than one preset reads from a request.

use std::sync::LazyLock;

use bytes::Bytes;

use crate::error::KeyError;
use crate::key::{
    self, Arrays, EachKey, EventPart, Events, Extracted, KeyPart, RequestRef, is_array, items,
};

/// Reads the parts of a key in the notation of the guide's table: `|` joins parts, `?` ends an
/// optional one, and ` or ` stands between alternatives.
pub(super) fn joined(read: fn(&str) -> KeyPart, parts: &str) -> KeyPart {
    let any = |names: &str| names.split(" or ").map(read).reduce(KeyPart::or);
    let part = |part: &str| match part.strip_suffix('?') {
        Some(names) => any(names).map(KeyPart::optional),
        None => any(part),
    };
    // A text has at least one part.
    parts.split('|').filter_map(part).reduce(KeyPart::and).unwrap_or_else(|| read(parts))
}

/// Returns the value at a JSON pointer in the body, if it is present and well-formed.
pub(super) fn value(request: &RequestRef<'_>, pointer: &str) -> Option<String> {
    let value = key::json(pointer).read(request).ok()??;
    Some(value.into_owned())
}

/// Returns `true` if the text stands in the body. Most events are told from a handshake so, without
/// a walk through their JSON: no sender writes such a text with escapes.
pub(super) fn contains(request: &RequestRef<'_>, text: &str) -> bool {
    str::from_utf8(request.body()).is_ok_and(|body| body.contains(text))
}

/// Returns `true` if the body is JSON and the pointer names nothing in it.
pub(super) fn lacks(request: &RequestRef<'_>, pointer: &str) -> bool {
    matches!(key::json(pointer).read(request), Ok(None))
}

/// Returns `true` if this header occurs once and has this value.
pub(super) fn header_is(request: &RequestRef<'_>, name: &str, value: &str) -> bool {
    let found = key::header(name).read(request).ok().flatten();
    found.is_some_and(|found| found.eq_ignore_ascii_case(value))
}

/// Returns `true` if the body has `/events`, and it is an empty list.
pub(super) fn has_no_events(request: &RequestRef<'_>) -> bool {
    static EVENTS: LazyLock<Arrays> =
        LazyLock::new(|| Arrays::parse("/events").unwrap_or_default());
    matches!(items(request.body(), &EVENTS), Ok(Some(events)) if events.is_empty())
}

/// The key of one event.
static KEY: LazyLock<KeyPart> = LazyLock::new(|| key::json("/source").and(key::json("/id")));
static LIST: LazyLock<Arrays> = LazyLock::new(|| Arrays::parse("").unwrap_or_default());

/// Returns `true` if the body is a JSON array with an event among its items.
pub(super) fn is_batch_of_cloud_events(request: &RequestRef<'_>) -> bool {
    let is_event = |item: &Bytes| matches!(KEY.read(&request.with_body(item)), Ok(Some(_)));
    // Most bodies are no array: that is seen without a walk.
    is_array(request.body())
        && items(request.body(), &LIST).is_ok_and(|items| items.iter().flatten().any(is_event))
}

/// Reads CloudEvents in JSON, one event or a batch by the media type, and any other body by
/// `other`. An id is unique within its source only.
pub(super) fn cloud_events_or(
    events: Events<'_>,
    other: impl FnOnce(Events<'_>) -> Result<Extracted, KeyError>,
) -> Result<Extracted, KeyError> {
    static EVENT: LazyLock<EventPart> =
        LazyLock::new(|| EventPart::new(KEY.clone()).with_event_type(key::json("/type")));
    static BATCH: LazyLock<EachKey> =
        LazyLock::new(|| key::each("", KEY.clone()).event_type(key::json("/type")));
    if events.request.is_of("application/cloudevents-batch+json") {
        BATCH.read(events)
    } else if events.request.is_of("application/cloudevents+json") {
        events.one_of(&EVENT)
    } else {
        other(events)
    }
}
