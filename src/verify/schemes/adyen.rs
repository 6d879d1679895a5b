//! Adyen: some values of each item, signed inside the item.

use std::sync::LazyLock;

use bytes::Bytes;
use http::request::Parts;

use crate::error::KeyErrorKind;
use crate::key::{self, Arrays, KeyPart, RequestRef, items};
use crate::verify::error::Refusal;
use crate::verify::received::{HmacSha256, Received, base64, signed};

const ITEMS: &str = "notificationItems";
const SIGNATURE: &str = "additionalData.hmacSignature";
const REFERENCE: &str = "merchantReference";
/// The signed values, in their order: the name, and the pointer inside an item.
const VALUES: [(&str, &str); 8] = [
    ("pspReference", "/pspReference"),
    ("originalReference", "/originalReference"),
    ("merchantAccountCode", "/merchantAccountCode"),
    (REFERENCE, "/merchantReference"),
    ("amount.value", "/amount/value"),
    ("amount.currency", "/amount/currency"),
    ("eventCode", "/eventCode"),
    ("success", "/success"),
];

// Parsed once.
static LIST: LazyLock<Arrays> = LazyLock::new(|| Arrays::at(&[ITEMS]));
static SIGNATURE_PART: LazyLock<KeyPart> = LazyLock::new(|| field("/additionalData/hmacSignature"));
static VALUE_PARTS: LazyLock<[KeyPart; 8]> = LazyLock::new(|| VALUES.map(|(_, at)| field(at)));

fn field(pointer: &str) -> KeyPart {
    key::json(&format!("/NotificationRequestItem{pointer}"))
}

/// HMAC-SHA256 in base64. Every item must be signed.
pub(in crate::verify) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let items = items_of(&Bytes::copy_from_slice(request.body))?;
    for item in &items {
        let text = text(request.head, item)?;
        let signature = read(&SIGNATURE_PART, request.head, item, SIGNATURE)?;
        if signature.is_empty() {
            return Err(Refusal::Missing(SIGNATURE));
        }
        signed::<HmacSha256>(key, &[text.as_bytes()], base64(&signature))?;
    }
    Ok(())
}

pub(in crate::verify) fn items_of(body: &Bytes) -> Result<Vec<Bytes>, Refusal> {
    let items = items(body, &LIST).map_err(|_| Refusal::Malformed(ITEMS))?;
    items.filter(|items| !items.is_empty()).ok_or(Refusal::Missing(ITEMS))
}

/// Returns the signed text of an item: the values, joined by colons.
///
/// A colon in the merchant's own reference is signed as it is. A colon in another value would make the
/// text ambiguous, so that an attacker could move it to the next value.
pub(in crate::verify) fn text(head: &Parts, item: &Bytes) -> Result<String, Refusal> {
    let mut values = Vec::with_capacity(VALUES.len());
    for ((name, _), part) in VALUES.iter().zip(&*VALUE_PARTS) {
        let value = read(part, head, item, name)?;
        if *name != REFERENCE && value.contains(':') {
            return Err(Refusal::Malformed(name));
        }
        values.push(value);
    }
    Ok(values.join(":"))
}

/// Returns the value; empty if it is missing.
fn read(part: &KeyPart, head: &Parts, item: &Bytes, name: &'static str) -> Result<String, Refusal> {
    match part.read(&RequestRef::new(head, item)) {
        Ok(value) => Ok(value.unwrap_or_default().into_owned()),
        Err(error) if error.kind() == KeyErrorKind::Empty => Ok(String::new()),
        Err(_) => Err(Refusal::Malformed(name)),
    }
}
