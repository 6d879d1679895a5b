//! Meta's Graph webhooks, of which WhatsApp sends the most.

use std::sync::Arc;

use bytes::Bytes;

use super::preset::{DAY, Floor, POST, Preset, Retries, Rule};
use crate::error::KeyError;
use crate::key::{
    self, Found, Items, KeyPart, Pointer, Reader, RequestRef, body_id, compose, events,
};

/// WhatsApp and other webhooks of Meta: of each update, what identifies it.
///
/// 1. A message: `phone_number_id|id`.
/// 2. A status of a message: `phone_number_id|id|status|recipient_id`. One message has several
///    statuses under one id.
/// 3. Any other change: the entry's `id` and `time`, the change's `field`, and the digest of the
///    change. An entry without changes: the digest of the entry.
///
/// `phone_number_id` is that of `/value/metadata`, and an empty part where there is none; so are
/// `recipient_id`, and the entry's and the change's own fields. One request carries up to 1,000
/// updates. The verification of the URL is a GET, which is not deduplicated.
pub const WHATSAPP: Preset = Preset {
    name: "whatsapp",
    title: "WhatsApp (Meta)",
    aliases: &["meta", "meta-whatsapp"],
    key: "each message: `phone_number_id?|id`; each status: \
          `phone_number_id?|id|status|recipient_id?`; any other change: `entry id?|entry \
          time?|field?|body_` and the SHA-256 of the change",
    rule: Rule::Reader(whatsapp),
    handshake: None,
    methods: POST,
    floor: Floor(14 * DAY, "twice the 7 days of the schedule"),
    retries: Retries::Automatic,
    how: "for up to 7 days; other webhooks of Meta for 36 h",
    signed_id: true,
    answer_matters: false,
    source: "https://developers.facebook.com/docs/whatsapp/cloud-api/guides/set-up-webhooks",
    unverified: "that the message's id is the key (no page of Meta says so); that time and bytes \
                 of other changes are the same on retries",
};

fn whatsapp() -> Reader {
    let rules = Rules::new();
    Arc::new(move |request| rules.read(request))
}

/// What is read, parsed once.
struct Rules {
    entries: Pointer,
    changes: Pointer,
    messages: Pointer,
    statuses: Pointer,
    phone: KeyPart,
    id: KeyPart,
    status: KeyPart,
    recipient: KeyPart,
    time: KeyPart,
    field: KeyPart,
}

impl Rules {
    fn new() -> Self {
        Self {
            entries: Pointer::of_names(&["entry"]),
            changes: Pointer::of_names(&["changes"]),
            messages: Pointer::of_names(&["value", "messages"]),
            statuses: Pointer::of_names(&["value", "statuses"]),
            phone: key::json("/value/metadata/phone_number_id"),
            id: key::json("/id"),
            status: key::json("/status"),
            recipient: key::json("/recipient_id"),
            time: key::json("/time"),
            field: key::json("/field"),
        }
    }

    fn read(&self, request: &RequestRef<'_>) -> Result<Found, KeyError> {
        let Some(entries) = events(request.body(), &self.entries)? else {
            return Ok(Found::Missing);
        };
        let mut items = Items::default();
        let mut complete = true;
        for entry in entries {
            let changes = events(&entry, &self.changes)?.unwrap_or_default();
            if changes.is_empty() {
                items.push(&body_id(&entry), entry, true)?;
                continue;
            }
            // Once for all changes of the entry.
            let of = request.with_body(&entry);
            let (id, time) = (self.id.read(&of)?, self.time.read(&of)?);
            for change in changes {
                let updates = self.updates(&change)?;
                if !updates.is_empty() {
                    let of = request.with_body(&change);
                    complete &= self.read_updates(&of, updates, &mut items)?;
                    continue;
                }
                let field = self.field.read(&request.with_body(&change))?;
                let digest = body_id(&change);
                let parts = [id.as_deref(), time.as_deref(), field.as_deref(), Some(&*digest)];
                items.push(&compose(&parts), change, true)?;
            }
        }
        Ok(if complete { items.into() } else { Found::Missing })
    }

    /// The messages and statuses of a change, in the order of the request; `true` is a status.
    fn updates(&self, change: &Bytes) -> Result<Vec<(Bytes, bool)>, KeyError> {
        let messages = events(change, &self.messages)?.unwrap_or_default();
        let statuses = events(change, &self.statuses)?.unwrap_or_default();
        let messages = messages.into_iter().map(|update| (update, false));
        let statuses = statuses.into_iter().map(|update| (update, true));
        let mut updates: Vec<_> = messages.chain(statuses).collect();
        updates.sort_by_key(|(update, _)| update.as_ptr().addr());
        Ok(updates)
    }

    /// Answers whether each of them has a key.
    fn read_updates(
        &self,
        change: &RequestRef<'_>,
        updates: Vec<(Bytes, bool)>,
        items: &mut Items,
    ) -> Result<bool, KeyError> {
        let phone = self.phone.read(change)?;
        let mut complete = true;
        for (update, is_status) in updates {
            let of = change.with_body(&update);
            let id = self.id.read(&of)?;
            let key = if is_status {
                let (status, recipient) = (self.status.read(&of)?, self.recipient.read(&of)?);
                complete &= id.is_some() && status.is_some();
                compose(&[phone.as_deref(), id.as_deref(), status.as_deref(), recipient.as_deref()])
            } else {
                complete &= id.is_some();
                compose(&[phone.as_deref(), id.as_deref()])
            };
            items.push(&key, update, true)?;
        }
        Ok(complete)
    }
}
