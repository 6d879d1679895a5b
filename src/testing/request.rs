//! A request of a preset's sender.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, header};
use http_body_util::Full;
use serde_json::Value;

use crate::provider::Preset;

/// Returns a request from which the preset's extractor reads a key with this id.
///
/// 1. The id of the key is `id`. If the preset composes its key, `id` is the part of the key that
///    differs between two events; the other parts are the same in every request of this function.
/// 2. The body has the fields that the key needs, and few more. For a preset whose key is a header,
///    another body changes nothing: `request(…).map(|_| Full::from(payload))`.
/// 3. The request has no signature. Sign it after the last change to its body: `sign` does, with
///    the feature `verify`.
/// 4. For HubSpot, Postmark and Telegram, whose ids are numbers, an `id` of digits becomes a
///    number.
/// 5. If the key is the digest of the body, as for Zoom, the body has `id`.
///
/// Panics if the path is no path of a URL, or if the preset reads its id from a header and `id` is
/// no value of a header.
///
/// ```
/// use tower_dedup::key::{Extracted, RequestRef};
/// use tower_dedup::{provider, testing};
///
/// let (head, body) = testing::request(provider::STRIPE, "/stripe", "evt_1").into_parts();
/// # let body = tokio::runtime::Runtime::new().unwrap().block_on(async {
/// #     http_body_util::BodyExt::collect(body).await.unwrap().to_bytes()
/// # });
/// let extractor = provider::STRIPE.extractor();
/// let Ok(Extracted::Keys(keys)) = extractor.extract(&RequestRef::new(&head, &body)) else {
///     panic!("no key");
/// };
/// assert_eq!(keys.first().id(), "evt_1");
/// ```
#[must_use]
pub fn request(preset: Preset, path: &str, id: &str) -> Request<Full<Bytes>> {
    let (headers, body) = (preset.sample_headers, preset.sample);
    let is_form = headers.iter().any(|(_, value)| value.ends_with("x-www-form-urlencoded"));
    let body = if is_form {
        body.replace("{id}", &form_urlencoded::byte_serialize(id.as_bytes()).collect::<String>())
    } else {
        let body = body.replace("{number}", &number(id).to_string());
        body.replace(r#""{id}""#, &Value::from(id).to_string())
    };
    let mut request = Request::new(Full::from(body));
    *request.method_mut() = preset.methods()[0].clone();
    *request.uri_mut() = match path.parse() {
        Ok(uri) => uri,
        Err(error) => panic!("`{path}` is no path: {error}"),
    };
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(header::CONTENT_TYPE, json);
    for (name, value) in headers {
        let value = value.replace("{id}", id);
        let Ok(value) = HeaderValue::from_str(&value) else {
            panic!("`{value}` is no value of the header {name}");
        };
        request.headers_mut().insert(HeaderName::from_static(name), value);
    }
    request
}

/// Returns a number if its digits are those of `id`.
fn number(id: &str) -> Value {
    match id.parse::<u64>() {
        Ok(number) if number.to_string() == id => number.into(),
        _ => id.into(),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::key::{Extracted, RequestRef};
    use crate::provider;

    async fn key(preset: Preset, id: &str) -> String {
        let (head, body) = request(preset, "/hook", id).into_parts();
        assert_eq!(head.uri, "/hook");
        assert!(preset.methods().contains(&head.method), "{}", preset.name());
        let body = body.collect().await.unwrap().to_bytes();
        match preset.extractor().extract(&RequestRef::new(&head, &body)) {
            Ok(Extracted::Keys(keys)) => {
                assert_eq!(keys.events().len(), 1, "{}", preset.name());
                keys.first().id().to_owned()
            }
            other => panic!("{}: {other:?}", preset.name()),
        }
    }

    #[tokio::test]
    async fn request_of_every_preset_has_a_key_with_its_id() {
        for preset in provider::ALL {
            let composed = key(*preset, "evt_1").await;
            if preset.key().is_some_and(|key| key.is_body_digest()) {
                assert_ne!(key(*preset, "evt_2").await, composed);
                continue;
            }
            assert_eq!(composed.matches("evt_1").count(), 1, "{}", preset.name());
            for id in ["4711", "007", "a b&c\u{7d}\u{22}"] {
                let expected = composed.replace("evt_1", id);
                assert_eq!(key(*preset, id).await, expected, "{}", preset.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "is no value of the header x-github-delivery")]
    fn request_names_the_header_that_cannot_hold_the_id() {
        let _ = request(provider::GITHUB, "/", "a\nb");
    }
}
