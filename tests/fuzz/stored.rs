//! Stored responses.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::StoredResponse;
use tower_dedup::internals::{stored_headers as headers_of, stored_response as read};

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
        let text = headers_of(&response);
        let again = read(status.as_u16().into(), &text, input.0.to_vec());
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
        match read(status, &text, Vec::new()) {
            Ok(response) => {
                assert_eq!(i64::from(response.status.as_u16()), status);
                let text = headers_of(&response);
                let again = read(status, &text, Vec::new());
                assert_eq!(again.unwrap(), response);
            }
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Corrupt),
        }
    });
}
