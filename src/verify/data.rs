//! The schemes that are data: a code over a text that the scheme describes, and shared tokens.

use chrono::DateTime;
use ctutils::CtEq;

use super::error::Refusal;
use super::key::Key;
use super::received::{Received, base64, hex};
use crate::provider::scheme::{Part, Scheme};

/// Verifies a request with one key. One valid code is enough, so that a secret can change.
pub(super) fn verify(key: &Key, request: &Received<'_>) -> Result<(), Refusal> {
    let scheme = request.scheme;
    let (signed, [value, other]) = read(request)?;
    let (prefix, decode) = (key.prefix(scheme), if scheme.is_base64 { base64 } else { hex });
    let items = value.into_iter().chain(other).flat_map(|value| value.split(scheme.separators));
    let codes = items.filter_map(|item| decode(item.strip_prefix(prefix)?));
    key.has_signed(scheme, &signed.parts, codes).then_some(()).ok_or(Refusal::Forged)
}

/// Reads the signed text and the headers with a code. Refuses what the head alone shows to be unverified.
pub(super) fn read<'a>(
    request: &Received<'a>,
) -> Result<(Text<'a>, [Option<&'a str>; 2]), Refusal> {
    let (text, scheme) = (text(request)?, request.scheme);
    let value = request.optional(scheme.header)?;
    let other = match scheme.other_header {
        "" => None,
        header => request.optional(header)?,
    };
    if value.or(other).is_none() {
        return Err(Refusal::Missing(scheme.header));
    }
    if let Some(time) = text.time {
        request.within_tolerance(time)?;
    }
    Ok((text, [value, other]))
}

/// Compares the header with the secret in constant time.
pub(super) fn verify_token(secret: &[u8], request: &Received<'_>) -> Result<(), Refusal> {
    let is_equal = request.header(request.scheme.header)?.as_bytes().ct_eq(secret).to_bool();
    is_equal.then_some(()).ok_or(Refusal::Forged)
}

/// The signed text of a request.
pub(super) struct Text<'a> {
    pub(super) parts: Vec<&'a [u8]>,
    /// In seconds since 1970; `None` if no time is signed.
    time: Option<i64>,
}

/// Returns the text that the parts describe.
pub(super) fn text<'a>(request: &Received<'a>) -> Result<Text<'a>, Refusal> {
    let Scheme { header: of_codes, separators, text: parts, .. } = *request.scheme;
    let mut text = Text { parts: Vec::with_capacity(6), time: None };
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
                let time = match part {
                    Part::Seconds(_) => value.parse().ok(),
                    Part::Millis(_) => value.parse().ok().map(|ms: i64| ms.div_euclid(1_000)),
                    _ => rfc3339(value),
                };
                text.time = Some(time.ok_or(Refusal::Malformed(header))?);
                value
            }
            Part::Item(prefix) => {
                let items = request.header(of_codes)?.split(separators);
                let mut times = items.filter_map(|item| item.strip_prefix(prefix));
                let (Some(value), None) = (times.next(), times.next()) else {
                    return Err(Refusal::Malformed(of_codes));
                };
                text.time = Some(value.parse().map_err(|_| Refusal::Malformed(of_codes))?);
                value
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

/// Reads a time such as `2026-11-22T06:00:00.123Z`, in seconds since 1970.
fn rfc3339(value: &str) -> Option<i64> {
    // RFC 3339 allows lower-case letters and a space too. No sender writes them.
    let is_plain = value.bytes().all(|byte| byte.is_ascii_digit() || b"+-.:TZ".contains(&byte));
    let time = is_plain.then(|| DateTime::parse_from_rfc3339(value));
    Some(time?.ok()?.timestamp())
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn rfc3339_reads_what_senders_write_only() {
        for (time, seconds) in [
            ("1969-12-31T23:59:59Z", Some(-1)),
            ("2000-02-29T12:00:00.5Z", Some(951_825_600)),
            ("2020-01-01T00:00:00-07:00", Some(1_577_862_000)),
            ("2022-12-28T14:31:01.123456789+05:30", Some(1_672_218_061)),
            ("2022-12-28 14:31:01Z", None),
            ("2022-12-28t14:31:01Z", None),
            ("2022-12-28T14:31:01z", None),
            ("2022-12-28T14:31:01\u{2212}07:00", None),
            ("2022-12-28T14:31:01", None),
            ("2022-02-29T14:31:01Z", None),
        ] {
            assert_eq!(rfc3339(time), seconds, "{time}");
        }
    }
}
