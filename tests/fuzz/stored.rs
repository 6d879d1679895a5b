//! Stored responses, and the names of tables.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tower_dedup::ErrorKind;
use tower_dedup::adapter::Identifier;
use tower_dedup::adapter::contract::StoredResponse;

use crate::fuzz::fuzz;
use crate::input::Input;

/// A response comes back as it was stored.
#[test]
fn stored_response() {
    fuzz("stored_response", 5_000, &[], |input| {
        let mut input = Input(input);
        let status = u16::from_be_bytes([input.byte(), input.byte()]) % 900 + 100;
        let status = StatusCode::from_u16(status).unwrap();
        let mut headers = HeaderMap::new();
        for _ in 0..input.byte() % 5 {
            let name = HeaderName::from_bytes(input.bytes());
            // The layer stores no response with a value that is not UTF-8.
            let value = HeaderValue::from_str(&input.text());
            let is_sensitive = input.byte() & 1 == 1;
            if let (Ok(name), Ok(mut value)) = (name, value) {
                value.set_sensitive(is_sensitive);
                headers.append(name, value);
            }
        }
        let response = StoredResponse::new(status, headers, input.0.to_vec().into());
        let text = response.headers_json();
        let again = StoredResponse::from_stored(status.as_u16().into(), &text, input.0.to_vec());
        assert_eq!(again.unwrap(), response);
    });
}

/// Any stored text is headers or corrupt, and what is read is read again after it is stored again.
#[test]
fn stored_headers() {
    fuzz("stored_headers", 10_000, &[], |input| {
        let mut input = Input(input);
        let status = i64::from(i16::from_be_bytes([input.byte(), input.byte()]));
        let text = String::from_utf8_lossy(input.0);
        match StoredResponse::from_stored(status, &text, Vec::new()) {
            Ok(response) => {
                assert_eq!(i64::from(response.status.as_u16()), status);
                let text = response.headers_json();
                let again = StoredResponse::from_stored(status, &text, Vec::new());
                assert_eq!(again.unwrap(), response);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    });
}

/// An accepted name has the documented alphabet, so it is safe between quotes and as a part of a name.
#[test]
fn identifier() {
    fuzz("identifier", 10_000, &[], |input| {
        let text = String::from_utf8_lossy(input);
        let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
        let is_valid = (1..=48).contains(&text.len())
            && text.bytes().all(is_word)
            && !text.as_bytes()[0].is_ascii_digit()
            && !text.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("sqlite_"));
        let name = Identifier::new(&text);
        assert_eq!(name.is_ok(), is_valid);
        if let Ok(name) = name {
            assert_eq!((name.as_str(), name.to_string()), (&*text, text.to_string()));
        }
    });
}
