//! Adyen: some values of each item, signed inside the item.

use std::sync::LazyLock;

use bytes::Bytes;
use http::request::Parts;
use serde_json::Value;

use super::error::Refusal;
use super::received::{Received, base64, signed};
use crate::error::KeyErrorKind;
use crate::key::{self, Arrays, KeyPart, RequestRef, items};
use crate::provider::scheme::Proof;

const ITEMS: &str = "notificationItems";
const SIGNATURE: &str = "additionalData.hmacSignature";
const FILE: usize = 0;
const MERCHANT_REFERENCE: usize = 3;
const EVENT_CODE: usize = 6;
/// The names of the signed values of an item, in their order.
const VALUES: [&str; 8] = [
    "pspReference",
    "originalReference",
    "merchantAccountCode",
    "merchantReference",
    "amount.value",
    "amount.currency",
    "eventCode",
    "success",
];

// Parsed once.
static LIST: LazyLock<Arrays> =
    LazyLock::new(|| Arrays::parse(&format!("/{ITEMS}")).unwrap_or_default());
static SIGNATURE_PART: LazyLock<KeyPart> = LazyLock::new(|| field(SIGNATURE));
static VALUE_PARTS: LazyLock<[KeyPart; 8]> = LazyLock::new(|| VALUES.map(field));

fn field(name: &str) -> KeyPart {
    key::json(&format!("/NotificationRequestItem/{}", name.replace('.', "/")))
}

/// HMAC-SHA256 in base64. Every item must be signed.
pub(super) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let items = items_of(&Bytes::copy_from_slice(request.body))?;
    for item in &items {
        let text = text(request.head, item)?;
        let signature = read(&SIGNATURE_PART, request.head, item, SIGNATURE)?;
        if signature.is_empty() {
            return Err(Refusal::Missing(SIGNATURE));
        }
        signed(Proof::Adyen, key, &[text.as_bytes()], base64(&signature))?;
    }
    Ok(())
}

pub(super) fn items_of(body: &Bytes) -> Result<Vec<Bytes>, Refusal> {
    let items = items(body, &LIST).map_err(|_| Refusal::Malformed(ITEMS))?;
    items.filter(|items| !items.is_empty()).ok_or(Refusal::Missing(ITEMS))
}

/// Returns the signed text of an item: the values, joined by colons.
///
/// A colon inside a value is signed as it is. So one value of an item may have colons, and the
/// item's code decides which: otherwise an attacker could move a colon to the next value. The code
/// itself has none, and is always the last value but one of the text. The `pspReference` of a
/// report is the name of a file, which may contain a time. Every other item may have colons in the
/// merchant's own reference.
pub(super) fn text(head: &Parts, item: &Bytes) -> Result<String, Refusal> {
    let mut values = Vec::with_capacity(VALUES.len());
    for (name, part) in VALUES.iter().zip(&*VALUE_PARTS) {
        values.push(read(part, head, item, name)?);
    }
    if values[MERCHANT_REFERENCE].is_empty() {
        values[MERCHANT_REFERENCE] = blank_reference(item);
    }
    let is_report = values[EVENT_CODE] == "REPORT_AVAILABLE";
    let with_colons = if is_report { FILE } else { MERCHANT_REFERENCE };
    for (at, value) in values.iter().enumerate() {
        if at != with_colons && value.contains(':') {
            return Err(Refusal::Malformed(VALUES[at]));
        }
    }
    Ok(values.join(":"))
}

/// Returns the merchant's own text, which may be blank, and is signed as it is. No part of a key
/// reads it.
fn blank_reference(item: &Bytes) -> String {
    let item: Value = serde_json::from_slice(item).unwrap_or_default();
    let reference = item["NotificationRequestItem"][VALUES[MERCHANT_REFERENCE]].as_str();
    reference.unwrap_or_default().to_owned()
}

/// Returns the value; empty if it is missing or blank.
fn read(part: &KeyPart, head: &Parts, item: &Bytes, name: &'static str) -> Result<String, Refusal> {
    match part.read(&RequestRef::new(head, item)) {
        Ok(value) => Ok(value.unwrap_or_default().into_owned()),
        Err(error) if error.kind() == KeyErrorKind::Empty => Ok(String::new()),
        Err(_) => Err(Refusal::Malformed(name)),
    }
}
