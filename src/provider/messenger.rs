//! Messenger and Instagram, whose entries have lists of messages and of changes.

use std::sync::LazyLock;

use super::challenge::META;
use super::preset::{DAY, DEFAULTS, Preset};
use super::scheme::Part::Body;
use super::scheme::Scheme;
use crate::error::KeyError;
use crate::key::{
    self, Arrays, Events, Extracted, FoundId, KeyPart, Rule, body_id, compose, event_type, items,
    lists,
};

/// Messenger and Instagram (Meta): one key for each message and each other update.
///
/// 1. A message of `/messaging` or `/standby` has the key `entry id|mid|is_echo|is_deleted`,
///    because a deleted message arrives again under its `mid`. An item of `/standby` has one more
///    part, `standby`: the conversation belongs to another app.
/// 2. Any other item (a reaction, a reading, a postback) has the same key with its digest for the
///    `mid`. It has the time of the event.
/// 3. A change (a comment, a mention) is known as in [`WHATSAPP`](super::WHATSAPP), by the entry's
///    `id` and `time`, the change's `field`, and the digest of the change.
///
/// Values that are missing are empty parts. Meta verifies the URL by a GET, which
/// [`MESSENGER.echo(Some(verify_token))`](Preset::echo) answers.
///
/// [Signature](https://developers.facebook.com/docs/graph-api/webhooks/getting-started):
/// HMAC-SHA256 over the body, which has the ids. No time is signed. The secret is the app secret.
pub const MESSENGER: Preset = Preset {
    name: "messenger",
    aliases: &["instagram"],
    rule: || Rule::Reader(messenger),
    challenges: META,
    floor: 3 * DAY, // twice the 36 h of the schedule
    scheme: Some(Scheme::hmac_sha256("x-hub-signature-256", &[Body]).prefix("sha256=")),
    signed_id: Some(true),
    sample: r#"{"object":"page","entry":[{"id":"sample","messaging":[{"message":{"mid":"{id}","text":"sample"}}]}]}"#,
    ..DEFAULTS
};

// Parsed once.
static ENTRIES: LazyLock<Arrays> = LazyLock::new(|| Arrays::parse("/entry").unwrap_or_default());
static LISTS: LazyLock<[Arrays; 3]> = LazyLock::new(|| {
    ["/messaging", "/standby", "/changes"].map(|list| Arrays::parse(list).unwrap_or_default())
});
const KINDS: [ItemKind; 3] = [ItemKind::Message, ItemKind::Standby, ItemKind::Change];
static ID: LazyLock<KeyPart> = LazyLock::new(|| key::json("/id").optional());
static TIME: LazyLock<KeyPart> = LazyLock::new(|| key::json("/time").optional());
static FIELD: LazyLock<KeyPart> = LazyLock::new(|| key::json("/field").optional());
static MESSAGE: LazyLock<[KeyPart; 3]> = LazyLock::new(|| {
    let flag = |name: &str| key::json(&format!("/message/{name}")).optional();
    let id = key::json("/message/mid").or(key::body_digest());
    [id, flag("is_echo"), flag("is_deleted")]
});

fn messenger(mut events: Events<'_>) -> Result<Extracted, KeyError> {
    let request = events.request;
    let Some(entries) = items(request.body(), &ENTRIES)? else {
        return Ok(Extracted::Missing);
    };
    for entry in entries {
        let of = request.with_body(&entry);
        let (id, time) = (ID.read(&of)?, TIME.read(&of)?);
        let lists = lists(&entry, &*LISTS)?;
        if lists.iter().all(Vec::is_empty) {
            events.push(body_id(&entry).into(), entry, true)?;
            continue;
        }
        let lists = lists.into_iter().zip(KINDS);
        for (item, kind) in
            lists.flat_map(|(list, kind)| list.into_iter().map(move |it| (it, kind)))
        {
            let of = request.with_body(&item);
            let found = if kind == ItemKind::Change {
                let field = FIELD.read(&of)?;
                let digest = body_id(&item);
                let parts = [id.as_deref(), time.as_deref(), field.as_deref(), Some(&*digest)];
                let event_type = field.as_deref().and_then(event_type);
                FoundId { id: compose(&parts).into(), event_type }
            } else {
                let [mid, echo, deleted] = &*MESSAGE;
                let (mid, echo, deleted) = (mid.read(&of)?, echo.read(&of)?, deleted.read(&of)?);
                let [id, mid] = [id.as_deref(), mid.as_deref()];
                let parts = [id, mid, echo.as_deref(), deleted.as_deref(), Some("standby")];
                compose(if kind == ItemKind::Standby { &parts } else { &parts[..4] }).into()
            };
            events.push(found, item, true)?;
        }
    }
    Ok(events.into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Message,
    Standby,
    Change,
}
