//! The schemes that are data: a code over a text that the scheme describes, and shared tokens.

use chrono::DateTime;
use ctutils::CtEq;
use smallvec::{SmallVec, smallvec};

use super::error::Refusal;
use super::key::Key;
use super::received::{Received, code_in_base64, hex};
use crate::provider::scheme::{Part, Scheme};

/// Verifies a request with one key. One valid code is enough, so that a secret can change.
pub(super) fn verify(key: &Key, request: &Received<'_>) -> Result<(), Refusal> {
    let scheme = request.scheme;
    let (signed, other) = read(request)?;
    let prefix = key.prefix(scheme);
    let decode = if scheme.is_base64 { code_in_base64 } else { hex };
    let has_signed = |text: &Text<'_>| {
        let items = text.codes.into_iter().chain(other);
        let items = items.flat_map(|value| value.split(scheme.separators));
        let codes = items.filter_map(|item| decode(item.strip_prefix(prefix)?));
        key.has_signed(scheme, &text.parts, codes, signed.len())
    };
    signed.iter().any(has_signed).then_some(()).ok_or(Refusal::Forged)
}

/// Reads the signed text, or one for each time in the header of the codes, and the other header
/// with a code. Refuses what the head alone shows to be unverified.
pub(super) fn read<'a>(request: &Received<'a>) -> Result<(Texts<'a>, Option<&'a str>), Refusal> {
    let (mut texts, scheme) = (texts(request)?, request.scheme);
    let value = request.optional(scheme.header)?;
    let other = match scheme.other_header {
        "" => None,
        header => request.optional(header)?,
    };
    if value.or(other).is_none() {
        return Err(Refusal::Missing(scheme.header));
    }
    for text in &mut texts {
        text.codes = text.codes.or(value);
    }
    texts.retain(|text| text.time.is_none_or(|time| request.is_within_tolerance(time)));
    if texts.is_empty() {
        return Err(Refusal::OutOfTime);
    }
    Ok((texts, other))
}

/// Compares the header with the secret in constant time.
pub(super) fn verify_token(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let is_equal = request.header(request.scheme.header)?.as_bytes().ct_eq(secret).to_bool();
    is_equal.then_some(()).ok_or(Refusal::Forged)
}

/// The largest number of times in one header: each hashes the whole body again, for each secret.
const MAX_TIMES: usize = 4;

/// What a request may have signed: one text, or one for each time in the header of the codes.
pub(super) type Texts<'a> = SmallVec<[Text<'a>; 1]>;

/// A signed text.
pub(super) struct Text<'a> {
    pub(super) parts: Vec<&'a [u8]>,
    /// In seconds since 1970; `None` if no time is signed.
    time: Option<i64>,
    /// The part of the header with the codes of this text, if it is not the whole header.
    codes: Option<&'a str>,
}

/// Returns the texts that the parts describe.
pub(super) fn texts<'a>(request: &Received<'a>) -> Result<Texts<'a>, Refusal> {
    let scheme = request.scheme;
    let Some(prefix) = scheme.time_item() else {
        return Ok(smallvec![text(request, "", None)?]);
    };
    let value = request.header(scheme.header)?;
    let mut times: SmallVec<[(&str, usize); 1]> = SmallVec::new();
    let mut at = 0;
    for item in value.split_inclusive(scheme.separators) {
        let bare = item.strip_suffix(scheme.separators).unwrap_or(item);
        if let Some(time) = bare.strip_prefix(prefix) {
            times.push((time, at));
        }
        at += item.len();
    }
    if let [(time, _)] = *times {
        return Ok(smallvec![text(request, time, None)?]);
    }
    if !(1..=MAX_TIMES).contains(&times.len()) {
        return Err(Refusal::Malformed(scheme.header));
    }
    // A code is one of the time before it. With another time, who has captured a delivery could
    // send it for ever.
    let ends = times.iter().skip(1).map(|(_, at)| *at).chain([value.len()]);
    let of =
        |((time, at), end): (&(&'a str, usize), usize)| text(request, time, Some(&value[*at..end]));
    times.iter().zip(ends).map(of).collect()
}

/// Returns the text that the parts describe, with this time of an item.
fn text<'a>(
    request: &Received<'a>,
    item: &'a str,
    codes: Option<&'a str>,
) -> Result<Text<'a>, Refusal> {
    let Scheme { header: of_codes, text: parts, .. } = *request.scheme;
    let mut text = Text { parts: Vec::with_capacity(6), time: None, codes };
    for part in parts {
        let value = match *part {
            Part::Text(text) => text,
            Part::Method => request.head.method.as_str(),
            Part::Fixed(header, value) => {
                if request.optional(header)?.is_some_and(|found| found != value) {
                    return Err(Refusal::Malformed(header));
                }
                continue;
            }
            Part::Header(header) => request.header(header)?,
            Part::Seconds(header) | Part::Millis(header) | Part::Rfc3339(header) => {
                let value = request.header(header)?;
                text.time = Some(time(part, value).ok_or(Refusal::Malformed(header))?);
                value
            }
            Part::Item(_) | Part::ItemMillis(_) => {
                text.time = Some(time(part, item).ok_or(Refusal::Malformed(of_codes))?);
                item
            }
            Part::Url => {
                text.parts.push(request.public_url()?.as_str().as_bytes());
                request.target
            }
            Part::Body => {
                text.parts.push(request.body);
                continue;
            }
        };
        text.parts.push(value.as_bytes());
    }
    Ok(text)
}

/// Reads a time in the form of this part, in seconds since 1970.
fn time(part: &Part, value: &str) -> Option<i64> {
    match part {
        Part::Millis(_) | Part::ItemMillis(_) => Some(value.parse::<i64>().ok()?.div_euclid(1_000)),
        Part::Rfc3339(_) => rfc3339(value),
        _ => value.parse().ok(),
    }
}

/// Reads a time such as `2026-11-22T06:00:00.123Z`, in seconds since 1970.
fn rfc3339(value: &str) -> Option<i64> {
    // RFC 3339 allows lower-case letters and a space too. No sender writes them.
    let is_plain = value.bytes().all(|byte| byte.is_ascii_digit() || b"+-.:TZ".contains(&byte));
    let time = is_plain.then(|| DateTime::parse_from_rfc3339(value));
    Some(time?.ok()?.timestamp())
}
