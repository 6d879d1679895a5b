//! Twilio, which signs the fields of a form.

use std::collections::BTreeSet;

use bytes::Bytes;
use http::Method;
use sha2::{Digest, Sha256};

use super::error::Refusal;
use super::received::{Received, base64, hex, signed};
use crate::key::RequestRef;
use crate::provider::scheme::Proof;

/// Twilio: HMAC-SHA1 over the whole URL and the sorted form fields, or over the URL alone without a
/// form. If the body is no form, the URL contains its digest.
///
/// Twilio signs the URL sometimes with the port and sometimes without it, so both are tried, as in
/// Twilio's libraries.
///
/// Twilio does not sign the method: see [`check_method`].
pub(super) fn verify(key: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let signature = base64(request.header(request.scheme.header)?);
    let text = text(request)?;
    check_method(request, &text)?;
    let by = |url: &String| {
        let parts = [url.as_bytes(), text.as_bytes()];
        signed(Proof::Twilio, key, &parts, signature.clone())
    };
    let urls = request.public_url()?.with_and_without_port();
    urls.iter().map(by).find(Result::is_ok).unwrap_or(Err(Refusal::Forged))
}

/// The largest number of fields that are sorted. A body of 2 MB may have a million, which take 90
/// ms before the signature is compared.
const MAX_FIELDS: usize = 1_000;

/// Returns what follows the public URL in the signed text.
pub(super) fn text(request: &Received<'_>) -> Result<String, Refusal> {
    let mut text = request.target.to_owned();
    let query = request.head.uri.query().unwrap_or_default();
    let mut query = form_urlencoded::parse(query.as_bytes());
    if let Some((_, digest)) = query.find(|(name, _)| name == "bodySHA256") {
        // The signature covers the digest. The digest is public, so a plain comparison is enough.
        if hex(&digest).is_none_or(|digest| digest[..] != Sha256::digest(request.body)[..]) {
            return Err(Refusal::Forged);
        }
    } else if is_get(request) {
        // Otherwise an attacker could move the end of the query into a form.
        if !request.body.is_empty() {
            return Err(Refusal::Forged);
        }
    } else if !RequestRef::new(request.head, &Bytes::new()).may_be_form() {
        // Otherwise an attacker could hide the fields from the key, which reads forms.
        return Err(Refusal::Malformed("content-type"));
    } else {
        let mut fields = form_urlencoded::parse(request.body);
        // Twilio sorts the fields and signs equal pairs once.
        let sorted: BTreeSet<_> = fields.by_ref().take(MAX_FIELDS).collect();
        if fields.next().is_some() {
            return Err(Refusal::Malformed("the form"));
        }
        for (name, value) in sorted {
            text.push_str(&name);
            text.push_str(&value);
        }
    }
    Ok(text)
}

/// Checks that Twilio has signed this text for the method of the request.
///
/// The URL of a GET is also the text of a POST to the beginning of that URL, with the rest as
/// fields. Twilio states the account in each request: as `AccountSid=AC…` in the query of a GET,
/// and as `AccountSidAC…` in the text of a form. A GET needs the first, and no other request may
/// have it. A text without fields must not have the second. The rule reads the signed text only, so
/// it does not depend on where the text is cut, and no text of Twilio passes for both methods.
fn check_method(request: &Received<'_>, text: &str) -> Result<(), Refusal> {
    const ACCOUNT: &str = "AccountSid";
    let has = |name| has_account_after(name, text);
    if text == request.target && has(ACCOUNT) {
        return Err(Refusal::Malformed(ACCOUNT));
    }
    match (is_get(request), has("?AccountSid=") || has("&AccountSid=")) {
        (true, false) => Err(Refusal::Missing(ACCOUNT)),
        (false, true) => Err(Refusal::Malformed(ACCOUNT)),
        _ => Ok(()),
    }
}

/// Returns `true` if the name is followed by the id of an account: `AC` and 32 hexadecimal digits.
fn has_account_after(name: &str, text: &str) -> bool {
    text.split(name)
        .skip(1)
        .filter_map(|rest| rest.strip_prefix("AC")?.as_bytes().get(..32))
        .any(|id| id.iter().all(u8::is_ascii_hexdigit))
}

fn is_get(request: &Received<'_>) -> bool {
    request.head.method == Method::GET || request.head.method == Method::HEAD
}
