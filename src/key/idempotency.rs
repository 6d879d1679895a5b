//! The header `Idempotency-Key`, and the ids of requests that carry it.
//!
//! 1. The header is an Item whose value is a String (draft-ietf-httpapi-idempotency-key-header, section
//!    2.1; RFC 9651, section 3.3.3): `"8e03978e"`.
//! 2. The value without quotes is accepted too, because many clients send it so. Both forms of one
//!    value give one key.
//! 3. Parameters (`"8e03978e";x=1`) are malformed. The draft defines none, so a client that sends one
//!    expects an effect that it does not get.
//! 4. An id has four parts: the scope, the method, the path and the value of the header. A client
//!    chooses its keys, so a key means nothing outside its client and its operation.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName};

use super::id::{MAX_ID_LEN, is_blank};
use super::part::{KeyPart, compose, from_fn};
use super::request::RequestRef;
use super::{digest, field};
use crate::error::{KeyError, KeyErrorKind};

const NAME: HeaderName = HeaderName::from_static("idempotency-key");

/// Returns the value of the header.
fn read(headers: &HeaderMap) -> Result<Option<Cow<'_, str>>, KeyErrorKind> {
    let Some(text) = field::header(headers, &NAME)? else { return Ok(None) };
    let value = match text.strip_prefix('"') {
        Some(rest) => quoted(rest),
        None => text.bytes().all(is_bare).then_some(Cow::Borrowed(text)),
    };
    let value = value.ok_or(KeyErrorKind::InvalidString)?;
    match value.len() {
        _ if is_blank(&value) => Err(KeyErrorKind::Empty),
        ..=MAX_ID_LEN => Ok(Some(value)),
        _ => Err(KeyErrorKind::TooLong),
    }
}

/// Returns the value of a String whose first quote was read.
fn quoted(rest: &str) -> Option<Cow<'_, str>> {
    let inner = rest.strip_suffix('"')?;
    if !inner.bytes().all(|byte| (0x20..=0x7E).contains(&byte)) {
        return None;
    }
    if !inner.contains(['"', '\\']) {
        return Some(Cow::Borrowed(inner));
    }
    let mut value = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(char) = chars.next() {
        value.push(match char {
            '"' => return None,
            '\\' => chars.next().filter(|escaped| matches!(escaped, '"' | '\\'))?,
            plain => plain,
        });
    }
    Some(Cow::Owned(value))
}

/// Returns `true` for a byte of a value without quotes. A comma may join two headers, and a semicolon
/// begins parameters.
fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b',' | b';')
}

/// Reads the id of a request.
pub(super) fn find(scope: &KeyPart, request: &RequestRef<'_>) -> Result<Option<String>, KeyError> {
    let fault = |kind| KeyError::new(kind, format!("header {NAME}"));
    let key = read(request.headers()).map_err(fault)?;
    key.map(|key| id(scope, request, &key)).transpose()
}

/// Returns the id of a request by its scope, its operation and its key.
pub(super) fn id(scope: &KeyPart, request: &RequestRef<'_>, key: &str) -> Result<String, KeyError> {
    let scope = scope.read(request)?;
    let scope = scope.ok_or_else(|| KeyError::new(KeyErrorKind::MissingScope, "the scope"))?;
    let (method, path) = (request.method().as_str(), request.uri().path());
    Ok(compose(&[Some(&*scope), Some(method), Some(path), Some(key)]))
}

/// Reads what has to be the same under one key: the query string and the body.
pub(crate) fn whole_payload() -> KeyPart {
    from_fn(|request| {
        let body = digest::body_id(request.body());
        Ok(Some(compose(&[request.uri().query(), Some(&body)])))
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::fuzz::fuzz;

    /// Parses an Item that is a String without parameters, by the steps of RFC 9651, section 4.2.5.
    fn string(input: &[u8]) -> Option<String> {
        let mut bytes = input.iter().copied();
        if bytes.next()? != b'"' {
            return None;
        }
        let mut output = String::new();
        loop {
            match bytes.next()? {
                b'\\' => match bytes.next()? {
                    escaped @ (b'"' | b'\\') => output.push(char::from(escaped)),
                    _ => return None,
                },
                b'"' => return bytes.next().is_none().then_some(output),
                0x00..=0x1F | 0x7F..=0xFF => return None,
                byte => output.push(char::from(byte)),
            }
        }
    }

    /// A value is read as the specification parses a String. Without quotes it is read as it is.
    #[test]
    fn fuzz_idempotency_key() {
        let seeds = [r#""8e03978e-40d5""#, r#""a\"b\\";x=1"#, " 8e03978e ", r#""a", "b""#, "a,b"];
        let seeds = seeds.map(|value| value.as_bytes().to_vec());
        fuzz("idempotency_key", 20_000, &seeds, |input| {
            if HeaderValue::from_bytes(input).is_err() {
                return;
            }
            let found = value(input);
            let trimmed = input.trim_ascii();
            let is_bare = |byte: &u8| matches!(byte, b'!'..=b'~') && !b"\"\\,;".contains(byte);
            let expected = match string(trimmed) {
                Some(text) => Some(text),
                None if !trimmed.iter().all(is_bare) => None,
                None => Some(String::from_utf8(trimmed.to_vec()).expect("ASCII")),
            };
            let is_key = |text: &String| !is_blank(text) && text.len() <= MAX_ID_LEN;
            assert_eq!(found.ok().flatten(), expected.filter(is_key));
        });
    }

    fn value(text: &[u8]) -> Result<Option<String>, KeyErrorKind> {
        let mut headers = HeaderMap::new();
        headers.insert(NAME, HeaderValue::from_bytes(text).unwrap());
        Ok(read(&headers)?.map(Cow::into_owned))
    }

    #[test]
    fn value_is_read_with_or_without_quotes_or_is_malformed() {
        use KeyErrorKind::{Empty, InvalidString, NotUtf8, TooLong};
        let (longest, long) = ("x".repeat(255), "x".repeat(256));
        let quoted = |text: &str| format!("\"{text}\"");
        let [quoted_longest, quoted_long] = [&longest, &long].map(|text| quoted(text));
        for (text, wanted) in [
            (&br#""8e03978e-40d5""#[..], Ok("8e03978e-40d5")),
            (b"  \"a\"\t", Ok("a")),
            (br#""a b, c; d""#, Ok("a b, c; d")),
            (br#"" a ""#, Ok(" a ")),
            (br#""\"\\\"""#, Ok(r#""\""#)),
            (quoted_longest.as_bytes(), Ok(&longest)),
            (b"8e03978e-40d5", Ok("8e03978e-40d5")),
            (b"a=b", Ok("a=b")),
            (b"~!@#$%^&*()_|09+/'", Ok("~!@#$%^&*()_|09+/'")),
            (longest.as_bytes(), Ok(&longest)),
            (b"", Err(Empty)),
            (b"  ", Err(Empty)),
            (br#""""#, Err(Empty)),
            (br#"" ""#, Err(Empty)),
            (br#"""#, Err(InvalidString)),
            (br#""a"#, Err(InvalidString)),
            (br#"a""#, Err(InvalidString)),
            (br#""a"b""#, Err(InvalidString)),
            (br#""a\""#, Err(InvalidString)),
            (br#""a\b""#, Err(InvalidString)),
            (br#""a";x=1"#, Err(InvalidString)),
            (br#""a", "b""#, Err(InvalidString)),
            (b"a, b", Err(InvalidString)),
            (b"a;x=1", Err(InvalidString)),
            (b"a b", Err(InvalidString)),
            (b"a\\b", Err(InvalidString)),
            (b"\"a\tb\"", Err(InvalidString)),
            ("\"k\u{e9}y\"".as_bytes(), Err(InvalidString)),
            ("k\u{e9}y".as_bytes(), Err(InvalidString)),
            (b"k\xE9y", Err(NotUtf8)),
            (long.as_bytes(), Err(TooLong)),
            (quoted_long.as_bytes(), Err(TooLong)),
        ] {
            let wanted = wanted.map(|value: &str| Some(value.to_owned()));
            assert_eq!(value(text), wanted, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn repeated_header_is_malformed_and_none_is_missing() {
        let mut headers = HeaderMap::new();
        assert_eq!(read(&headers), Ok(None));
        headers.append(NAME, HeaderValue::from_static("a"));
        headers.append(NAME, HeaderValue::from_static("a"));
        assert_eq!(read(&headers), Err(KeyErrorKind::Repeated));
    }
}
