//! The header `Idempotency-Key`.

use bytes::Bytes;
use http::{HeaderValue, Request};
use tower_dedup::KeyErrorKind::{Empty, InvalidString, NotUtf8, Repeated, TooLong};
use tower_dedup::internals;
use tower_dedup::key::{self, Extracted, RequestRef};

use crate::requests::{MISSING, ReadId, id, sha256};

/// Reads these headers.
fn read(values: &[&[u8]]) -> ReadId {
    let mut request = Request::patch("/refunds|1").body(()).unwrap();
    for value in values {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append("idempotency-key", value);
    }
    let (head, ()) = request.into_parts();
    let extractor = internals::idempotency_key(key::from_fn(|_| Ok(Some("a".to_owned()))));
    match extractor.extract(&RequestRef::new(&head, &Bytes::new())) {
        Ok(Extracted::Keys(keys)) => {
            assert_eq!(keys.first().namespace(), "idempotency-key");
            id(keys.first().id())
        }
        Ok(_) => MISSING,
        Err(error) => Err(error.kind()),
    }
}

#[test]
fn idempotency_key_is_read_with_or_without_quotes() {
    for (text, value) in [
        (r#""8e03978e-40d5""#, "8e03978e-40d5"),
        ("  \"a\"\t", "a"),
        (r#""a b, c; d""#, "a b, c; d"),
        (r#"" a ""#, " a "),
        (r#""\"\\\"""#, r#""\""#),
        ("8e03978e-40d5", "8e03978e-40d5"),
        ("a=b", "a=b"),
        ("~!@#$^&*()_09+/'", "~!@#$^&*()_09+/'"),
        ("a%|b", "a%25%7Cb"),
    ] {
        assert_eq!(
            read(&[text.as_bytes()]),
            id(&format!("a|PATCH|/refunds%7C1|{value}")),
            "{text}"
        );
    }
    let longest = "x".repeat(255);
    let stored = id(&sha256(format!("a|PATCH|/refunds%7C1|{longest}").as_bytes()));
    for text in [format!("\"{longest}\""), longest] {
        assert_eq!(read(&[text.as_bytes()]), stored);
    }
    assert_eq!(read(&[]), MISSING);
}

#[test]
fn idempotency_key_that_is_repeated_empty_too_long_or_no_string_is_malformed() {
    let long = "x".repeat(256);
    for (kind, texts) in [
        (Empty, &["", "  ", r#""""#, r#"" ""#][..]),
        (InvalidString, &[r#"""#, r#""a"#, r#"a""#, r#""a"b""#, r#""a\""#, r#""a\b""#]),
        (InvalidString, &[r#""a";x=1"#, r#""a", "b""#, "a, b", "a;x=1", "a b", r"a\b"]),
        (InvalidString, &["\"a\tb\"", "\"k\u{e9}y\"", "k\u{e9}y"]),
        (TooLong, &[&long, &format!("\"{long}\"")]),
    ] {
        for text in texts {
            assert_eq!(read(&[text.as_bytes()]), Err(kind), "{text}");
        }
    }
    assert_eq!(read(&[b"k\xE9y"]), Err(NotUtf8));
    assert_eq!(read(&[b"a", b"a"]), Err(Repeated));
}
