//! Webhooks of Meta's Graph API, which WhatsApp uses.

use std::sync::LazyLock;

use bytes::Bytes;

use super::challenge::META;
use super::preset::{DAY, DEFAULTS, MIB, Preset};
use super::scheme::Part::Body;
use super::scheme::Scheme;
use crate::error::KeyError;
use crate::key::{
    self, Arrays, EventPart, Events, Extracted, FoundId, KeyPart, Rule, body_id, compose,
    event_type, items, lists,
};

/// WhatsApp and other webhooks of Meta: one key for each update.
///
/// 1. A message, and the echo of a message that somebody has sent in WhatsApp's own app
///    (`/value/message_echoes`), has the key `phone_number_id|id`. An echo without an id is known
///    by its digest; so is a call.
/// 2. A status of a message has the key `phone_number_id|id|status|recipient_id`, because one
///    message has several statuses under one id.
/// 3. A call (`/value/calls`) has the key `phone_number_id|id|event`, because it begins and ends
///    under one id.
/// 4. Any other change is known by the entry's `id` and `time`, the change's `field`, and the
///    digest of the change. An entry without changes is known by the digest of the entry.
///
/// `phone_number_id` is read from `/value/metadata`. It is an empty part if it is missing or blank;
/// so are `recipient_id`, `event`, and the fields of the entry and of the change. Meta writes `""`
/// for the number of a person with a user name. One request carries up to 1,000 updates. Meta
/// verifies the URL by a GET, which [`WHATSAPP.echo(Some(verify_token))`](Preset::echo) answers.
///
/// **Some statuses share a key, and all but the first are duplicates**: the same status of several
/// members of a group (`recipient_participant_id`), and several statuses of one payment with one
/// name (`/payment`). If they matter, read your own key with
/// [`KeyExtractor::from_fn`](crate::KeyExtractor::from_fn).
///
/// [Signature](https://developers.facebook.com/docs/graph-api/webhooks/getting-started):
/// HMAC-SHA256 over the body, which has the ids. No time is signed.
pub const WHATSAPP: Preset = Preset {
    name: "whatsapp",
    aliases: &["meta", "meta-whatsapp"],
    rule: || Rule::Reader(whatsapp),
    challenges: META,
    floor: 14 * DAY, // twice the 7 days of the schedule
    max_body: Some(3 * MIB),
    scheme: Some(Scheme::hmac_sha256("x-hub-signature-256", &[Body]).prefix("sha256=")),
    signed_id: Some(true),
    sample: r#"{"object":"whatsapp_business_account","entry":[{"id":"sample","changes":[{"field":"messages","value":{"messaging_product":"whatsapp","metadata":{"phone_number_id":"sample"},"messages":[{"id":"{id}","type":"text","text":{"body":"sample"}}]}}]}]}"#,
    ..DEFAULTS
};

// Parsed once.
static ENTRIES: LazyLock<Arrays> = LazyLock::new(|| Arrays::parse("/entry").unwrap_or_default());
static CHANGES: LazyLock<Arrays> = LazyLock::new(|| Arrays::parse("/changes").unwrap_or_default());
/// The lists of a change, by the kinds of their updates.
static LISTS: LazyLock<[Arrays; 4]> = LazyLock::new(|| {
    let list = |name| Arrays::parse(&format!("/value/{name}")).unwrap_or_default();
    ["messages", "statuses", "message_echoes", "calls"].map(list)
});
const KINDS: [UpdateKind; 4] =
    [UpdateKind::Message, UpdateKind::Status, UpdateKind::Echo, UpdateKind::Call];
/// The type is that of the change.
static PHONE: LazyLock<EventPart> = LazyLock::new(|| {
    EventPart::new(key::json("/value/metadata/phone_number_id").optional())
        .with_event_type(key::json("/field"))
});
static ID: LazyLock<KeyPart> = LazyLock::new(|| key::json("/id"));
static ID_OR_DIGEST: LazyLock<KeyPart> = LazyLock::new(|| key::json("/id").or(key::body_digest()));
static STATUS: LazyLock<KeyPart> = LazyLock::new(|| key::json("/status"));
static EVENT: LazyLock<KeyPart> = LazyLock::new(|| key::json("/event").optional());
static RECIPIENT: LazyLock<KeyPart> = LazyLock::new(|| key::json("/recipient_id").optional());
static ENTRY: LazyLock<KeyPart> = LazyLock::new(|| key::json("/id").optional());
static TIME: LazyLock<KeyPart> = LazyLock::new(|| key::json("/time").optional());
static FIELD: LazyLock<KeyPart> = LazyLock::new(|| key::json("/field").optional());

fn whatsapp(mut events: Events<'_>) -> Result<Extracted, KeyError> {
    let request = events.request;
    let Some(entries) = items(request.body(), &ENTRIES)? else {
        return Ok(Extracted::Missing);
    };
    let mut complete = true;
    for entry in entries {
        let changes = items(&entry, &CHANGES)?.unwrap_or_default();
        if changes.is_empty() {
            events.push(body_id(&entry).into(), entry, true)?;
            continue;
        }
        let of = request.with_body(&entry);
        let (id, time) = (ENTRY.read(&of)?, TIME.read(&of)?);
        for change in changes {
            let updates = updates(&change)?;
            let of = request.with_body(&change);
            if updates.is_empty() {
                let field = FIELD.read(&of)?;
                let digest = body_id(&change);
                let parts = [id.as_deref(), time.as_deref(), field.as_deref(), Some(&*digest)];
                let event_type = field.as_deref().and_then(event_type);
                let found = FoundId { id: compose(&parts).into(), event_type };
                events.push(found, change, true)?;
                continue;
            }
            let phone = PHONE.read(&of)?;
            for (update, kind) in updates {
                let of = request.with_body(&update);
                let (id, state, recipient) = match kind {
                    UpdateKind::Message => (ID.read(&of)?, None, None),
                    UpdateKind::Echo => (ID_OR_DIGEST.read(&of)?, None, None),
                    UpdateKind::Status => (ID.read(&of)?, STATUS.read(&of)?, RECIPIENT.read(&of)?),
                    UpdateKind::Call => (ID_OR_DIGEST.read(&of)?, EVENT.read(&of)?, None),
                };
                complete &= id.is_some() && (state.is_some() || kind != UpdateKind::Status);
                let number = phone.as_ref().map(|phone| &*phone.id);
                let parts = [number, id.as_deref(), state.as_deref(), recipient.as_deref()];
                let parts = match kind {
                    UpdateKind::Message | UpdateKind::Echo => &parts[..2],
                    UpdateKind::Call => &parts[..3],
                    UpdateKind::Status => &parts,
                };
                let id = compose(parts).into();
                let event_type = phone.as_ref().and_then(|phone| phone.event_type.clone());
                events.push(FoundId { id, event_type }, update, true)?;
            }
        }
    }
    Ok(if complete { events.into() } else { Extracted::Missing })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UpdateKind {
    Message,
    Echo,
    Status,
    Call,
}

/// Returns the updates of a change that have ids, in the order of the request.
fn updates(change: &Bytes) -> Result<Vec<(Bytes, UpdateKind)>, KeyError> {
    // A change of another product may have values of the last two names that are no lists.
    let lists = lists(change, &*LISTS).or_else(|_| lists(change, &LISTS[..2]))?;
    let lists = lists.into_iter().zip(KINDS);
    let updates = lists.flat_map(|(list, kind)| list.into_iter().map(move |update| (update, kind)));
    let mut updates: Vec<_> = updates.collect();
    updates.sort_by_key(|(update, _)| update.as_ptr().addr());
    Ok(updates)
}
