//! The header `Idempotency-Key`, and composed keys.

use bytes::Bytes;
use http::{HeaderValue, Request};
use tower_dedup::internals;
use tower_dedup::key::{self, Extracted, KeyPart, RequestRef};

use crate::fuzz::fuzz;
use crate::input::Input;
use crate::{composed, is_blank, read, stored_id};

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

/// An `Idempotency-Key` is read as the specification parses a String. Without quotes it is read as it is.
#[test]
fn idempotency_key() {
    let seeds = [r#""8e03978e-40d5""#, r#""a\"b\\";x=1"#, " 8e03978e ", r#""a", "b""#, "a,b"];
    fuzz("idempotency_key", 10_000, &seeds.map(|value| value.as_bytes().to_vec()), |input| {
        let Ok(value) = HeaderValue::from_bytes(input) else { return };
        let request = Request::post("/").header("idempotency-key", value).body(()).unwrap();
        let (head, ()) = request.into_parts();
        let extractor = internals::idempotency_key(key::from_fn(|_| Ok(Some("s".to_owned()))));
        let found = match extractor.extract(&RequestRef::new(&head, &Bytes::new())) {
            Ok(Extracted::Keys(keys)) => Some(keys.first().id().to_owned()),
            _ => None,
        };
        let trimmed = input.trim_ascii();
        let is_bare = |byte: &u8| matches!(byte, b'!'..=b'~') && !b"\"\\,;".contains(byte);
        let bare = || trimmed.iter().all(is_bare).then(|| trimmed.to_vec());
        let value = string(trimmed).or_else(|| bare().map(|bare| String::from_utf8(bare).unwrap()));
        let value = value.filter(|text| !is_blank(text) && text.len() <= 255);
        let id = value.map(|value| {
            let parts = ["s", "POST", "/", &value];
            stored_id(&composed(&parts.map(|part| Some(part.to_owned()))))
        });
        assert_eq!(found, id);
    });
}

/// A part with this value. `None` is missing.
fn part(value: Option<String>) -> KeyPart {
    key::from_fn(move |_| Ok(value.clone()))
}

/// Two different lists of parts never have one id, and an id is the list in the documented form.
#[test]
fn composed_key() {
    fuzz("composed_key", 10_000, &[], |input| {
        let mut input = Input(input);
        let mut ids = Vec::new();
        let lengths = [2 + usize::from(input.byte() % 3), 2 + usize::from(input.byte() % 3)];
        for length in lengths {
            let mut values = Vec::new();
            for _ in 0..length {
                let value = input.text().replace('\0', "");
                values.push(Some(value).filter(|value| !is_blank(value)));
            }
            let parts = values.iter().cloned().map(|value| part(value).optional());
            let request = Request::post("/").body("").unwrap();
            let id = read(&parts.reduce(KeyPart::and).unwrap(), request).unwrap();
            let is_present = values.iter().any(Option::is_some);
            assert_eq!(id, is_present.then(|| stored_id(&composed(&values))));
            // The first value that is present, and all values without `optional`.
            let any = values.iter().cloned().map(part).reduce(KeyPart::or).unwrap();
            let request = Request::post("/").body("").unwrap();
            let first = values.iter().flatten().next();
            assert_eq!(read(&any, request), Ok(first.map(|value| stored_id(value))));
            let all = values.iter().cloned().map(part).reduce(KeyPart::and).unwrap();
            let request = Request::post("/").body("").unwrap();
            let is_whole = values.iter().all(Option::is_some);
            assert_eq!(read(&all, request), Ok(id.clone().filter(|_| is_whole)));
            ids.push((values, id));
        }
        let [(one, id_of_one), (other, id_of_other)] = &ids[..] else { unreachable!() };
        if id_of_one.is_some() || id_of_other.is_some() {
            assert_eq!(one == other, id_of_one == id_of_other);
        }
    });
}
