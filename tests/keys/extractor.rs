//! Extractors: namespaces, second identities, handshakes, errors.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use http::Request;
use tower_dedup::KeyErrorKind::{self, Repeated};
use tower_dedup::KeyExtractor;
use tower_dedup::key::{self, Event, Extracted, Keys, RequestRef};

use crate::requests::{dedup_key, letters, sha256, with_body, with_headers};

fn extract(extractor: &KeyExtractor, request: Request<&'static str>) -> Extracted {
    let (head, body) = request.into_parts();
    extractor.extract(&RequestRef::new(&head, &Bytes::from(body))).unwrap()
}

fn is_valid(extractor: KeyExtractor) -> bool {
    extractor.checked().is_ok()
}

#[test]
fn a_namespace_is_1_to_64_bytes_without_control_characters() {
    let part = || key::header("x-id");
    for namespace in ["n", "a.b|c d", "\u{e9}", &"n".repeat(64)] {
        let extractor = part().namespace(namespace).checked().unwrap();
        let expected = Extracted::Keys(Keys::from(Event::new(dedup_key(namespace, "1"))));
        assert_eq!(extract(&extractor, with_headers(&[b"1"])), expected);
        assert_eq!(
            extract(&part().namespace("x").namespace(namespace), with_headers(&[b"1"])),
            expected
        );
    }
    for namespace in ["", "a\0b", "a\nb", "\u{7f}", &"n".repeat(65), &"\u{e9}".repeat(33)] {
        let refused = part().namespace(namespace).checked().unwrap_err();
        let rule = format!(
            "`namespace` must be 1 to 64 bytes without control characters, not {namespace:?}"
        );
        assert_eq!(refused.to_string(), rule);
        let closure = KeyExtractor::from_fn(namespace, |_| Ok(Extracted::Missing));
        assert_eq!(closure.checked().unwrap_err(), refused, "{namespace:?}");
        assert!(!is_valid(part().namespace("x").namespace(namespace)), "{namespace:?}");
        assert!(!is_valid(key::each("", part()).namespace(namespace)), "{namespace:?}");
    }
}

#[test]
fn alias_has_a_namespace_below_that_of_the_key() {
    let extractor = key::header("a").namespace("acme").alias("object", key::header("b"));
    let both = || letters(&[("a", "1"), ("b", "2")]);
    let event = |first: &str, second: &str| {
        let event = Event::new(dedup_key(first, "1"));
        let event = event.with_alias(dedup_key(second, "2"));
        Extracted::Keys(event.into())
    };
    assert_eq!(extract(&extractor, both()), event("acme", "acme.object"));
    // It moves with the key, also from a namespace with a dot.
    let moved = extractor.clone().namespace("acme.eu");
    assert_eq!(extract(&moved, both()), event("acme.eu", "acme.eu.object"));
    assert_eq!(extract(&moved.namespace("x"), both()), event("x", "x.object"));
    // Without its value the event has one identity; without the key it has none.
    let one = Extracted::Keys(Keys::from(Event::new(dedup_key("acme", "1"))));
    assert_eq!(extract(&extractor, letters(&[("a", "1")])), one);
    assert_eq!(extract(&extractor, letters(&[("b", "2")])), Extracted::Missing);
    assert_eq!(extract(&extractor, letters(&[("a", "1"), ("b", " ")])), one);
    // A malformed second identity makes the delivery malformed.
    let (head, body) = letters(&[("a", "1"), ("b", "2"), ("b", "3")]).into_parts();
    let error = extractor.extract(&RequestRef::new(&head, &Bytes::from(body))).unwrap_err();
    assert_eq!(error.kind(), Repeated);
    // One that equals the key is none.
    let key = dedup_key("acme", "1");
    assert_eq!(Event::new(key.clone()).with_alias(key).alias(), None);
}

#[test]
fn alias_refuses_a_namespace_that_is_too_long() {
    let extractor = |label: &str| key::header("a").namespace("acme").alias(label, key::header("b"));
    for label in ["", "a.b", "a\nb", &"l".repeat(60)] {
        assert!(!is_valid(extractor(label)), "{label:?}");
    }
    let longest = extractor(&"l".repeat(59));
    assert!(is_valid(longest.clone()));
    assert!(!is_valid(longest.namespace("acme2")));
    assert!(!is_valid(extractor("object").namespace(&"n".repeat(64))));
}

#[test]
fn extract_by_an_invalid_extractor_panics_with_the_text_of_checked() {
    let not_a_pointer = "`pointer` must be a JSON pointer (RFC 6901), not \"id\"";
    let part = || key::header("a").and(key::json("id").optional());
    for (extractor, rule) in [
        (part().namespace("n"), not_a_pointer),
        (key::header("a").namespace("n").event_type(part()), not_a_pointer),
        (key::header("a").namespace("n").alias("b", part()), not_a_pointer),
        (
            key::each("events", key::header("a")).namespace("n"),
            "`pointer` must be a JSON pointer (RFC 6901), not \"events\"",
        ),
        (key::each("", part()).namespace("n"), not_a_pointer),
        (
            key::header("a b").namespace("n"),
            "`header` must be the name of an HTTP header, not \"a b\"",
        ),
        (
            key::body_digest().namespace("orders.body"),
            "`namespace` must be a text that does not end with `.body`: such namespaces have content identities, \
             not \"orders.body\"",
        ),
        (
            key::header("a").namespace("n").alias("b", key::body_digest()),
            "a digest of the body is a `content_identity`",
        ),
    ] {
        assert_eq!(extractor.clone().checked().unwrap_err().to_string(), rule);
        let read = || extract(&extractor, letters(&[("a", "1")]));
        let panic = catch_unwind(AssertUnwindSafe(read)).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some(rule));
    }
}

#[test]
fn namespace_by_adds_a_value_to_the_namespaces_of_all_identities() {
    let extractor = key::header("a")
        .namespace("acme")
        .alias("change", key::header("b"))
        .namespace_by(|request| request.uri().path().strip_prefix('/').map(str::to_owned));
    let identities = |path: &str| {
        let mut request = letters(&[("a", "1"), ("b", "2")]);
        *request.uri_mut() = path.parse().unwrap();
        let Extracted::Keys(keys) = extract(&extractor, request) else { panic!("keys") };
        let [event] = keys.events() else { panic!("one") };
        [Some(event.key()), event.alias()].map(|identity| identity.unwrap().clone())
    };
    assert_eq!(
        identities("/billing"),
        [dedup_key("acme:billing", "1"), dedup_key("acme.change:billing", "2")]
    );
    assert_ne!(identities("/billing"), identities("/tax"));
    // 64 bytes fit, longer values are hashed.
    let fits = "x".repeat(59);
    assert_eq!(identities(&format!("/{fits}"))[0], dedup_key(&format!("acme:{fits}"), "1"));
    let long = "x".repeat(60);
    let hashed = format!("acme:{}", &sha256(long.as_bytes())[..16]);
    assert_eq!(identities(&format!("/{long}"))[0], dedup_key(&hashed, "1"));
}

#[test]
fn namespace_by_gives_two_pairs_of_namespace_and_value_two_namespaces() {
    let key = |namespace: &str, value: &str| {
        let value = value.to_owned();
        let extractor =
            key::header("a").namespace(namespace).namespace_by(move |_| Some(value.clone()));
        let Extracted::Keys(keys) = extract(&extractor, letters(&[("a", "1")])) else {
            panic!("keys")
        };
        keys.first().clone()
    };
    let long = "x".repeat(64);
    let digest = &sha256(long.as_bytes())[..16];
    let words = ["a", "a:b", "a%3Ab", "a%", "a%25", "b", "b:a", ":", "::a", "%3A", "3A", "a.b"];
    let mut seen = BTreeMap::new();
    for namespace in words {
        for value in words.into_iter().chain([&*long, digest, "a\n"]) {
            let found = key(namespace, value).namespace().to_owned();
            let other = seen.insert(found.clone(), (namespace, value));
            assert_eq!(other, None, "{namespace} by {value}: {found}");
        }
    }
    // These names must not change.
    for (namespace, value, expected) in [
        ("stripe", "/stripe/billing", "stripe:/stripe/billing"),
        ("stripe", "eu:acme", "stripe:eu:acme"),
        ("stripe:eu", "acme", "stripe%3Aeu:acme"),
        ("50%", "acme", "50%25:acme"),
    ] {
        assert_eq!(key(namespace, value).namespace(), expected);
    }
}

#[test]
fn namespace_by_without_a_value_is_malformed() {
    for value in [None, Some(String::new()), Some(" ".to_owned())] {
        let extractor = key::header("a").namespace("acme").namespace_by(move |_| value.clone());
        let (head, body) = letters(&[("a", "1")]).into_parts();
        let body = Bytes::from(body);
        let error = extractor.extract(&RequestRef::new(&head, &body)).unwrap_err();
        assert_eq!(error.kind(), KeyErrorKind::Missing);
    }
}

#[test]
fn namespace_by_refuses_a_namespace_without_room_for_a_value() {
    let scoped =
        |len: usize| is_valid(key::header("a").namespace(&"n".repeat(len)).namespace_by(|_| None));
    assert!(scoped(47) && !scoped(48));
    let by = || key::header("a").namespace("n").namespace_by(|_| None);
    assert!(!is_valid(by().namespace(&"n".repeat(48))));
    // `%3A` is three bytes.
    assert!(is_valid(by().namespace(&format!("{}:", "n".repeat(44)))));
    assert!(!is_valid(by().namespace(&format!("{}:", "n".repeat(45)))));
    assert!(!is_valid(by().alias(&"l".repeat(46), key::header("b"))));
}

#[test]
fn bypass_when_precedes_keys_and_malformed_keys() {
    let extractor = key::header("a")
        .namespace("acme")
        .bypass_when(|request| request.headers().contains_key("x-ping"))
        .bypass_when(|request| request.body().starts_with(b"challenge"));
    for request in [
        letters(&[("a", "1"), ("x-ping", "")]),
        letters(&[("a", "1"), ("a", "2"), ("x-ping", "")]),
        with_body("challenge=1"),
    ] {
        assert_eq!(extract(&extractor, request), Extracted::Bypass);
    }
    let one = Extracted::Keys(Keys::from(Event::new(dedup_key("acme", "1"))));
    assert_eq!(extract(&extractor, letters(&[("a", "1")])), one);
}

#[test]
fn errors_name_the_source_of_a_key_and_never_its_value() {
    let (head, body) = with_headers(&[b"secret-1", b"secret-2"]).into_parts();
    let body = Bytes::from(body);
    let request = RequestRef::new(&head, &body);
    let extractor = key::header("x-id").namespace("n");
    let error = extractor.extract(&request).unwrap_err();
    assert_eq!(error.to_string(), "header x-id is given more than once");
    assert!(!format!("{error:?} {extractor:?} {request:?}").contains("secret"));

    let (head, ()) = Request::post("/?id=%00").body(()).unwrap().into_parts();
    let body = Bytes::from_static(br#"{"id":"\u0000"}"#);
    for (part, text) in [
        (key::json("/id"), "JSON value /id holds a NUL"),
        (key::query("id"), "query parameter id holds a NUL"),
        (key::from_fn(|_| Ok(Some("\0".to_owned()))), "the extracted value holds a NUL"),
    ] {
        let error = part.namespace("n").extract(&RequestRef::new(&head, &body)).unwrap_err();
        assert_eq!(error.to_string(), text);
    }

    // A body that is not JSON is not the fault of one value in it.
    for (extractor, body, text) in [
        (key::json("/id").namespace("n"), "{", "the body is not valid JSON"),
        (key::each("", key::json("/id")).namespace("n"), "1", "the body is not a JSON array"),
        (
            key::each("/a", key::json("/id")).namespace("n"),
            r#"{"a":1}"#,
            "JSON array /a is not a JSON array",
        ),
    ] {
        let error = extractor.extract(&RequestRef::new(&head, &Bytes::from(body))).unwrap_err();
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn type_that_a_closure_gives_precedes_the_part_of_the_type() {
    let typed = |own: Option<&'static str>| {
        let extractor = KeyExtractor::from_fn("n", move |_| {
            let event = Event::new(dedup_key("n", "1"));
            let event = own.map_or(event.clone(), |own| event.with_event_type(own));
            Ok(Extracted::Keys(event.into()))
        });
        let extractor = extractor.event_type(key::json("/type"));
        let Extracted::Keys(keys) = extract(&extractor, with_body(r#"{"type":"read"}"#)) else {
            panic!("the closure gives a key");
        };
        keys.events()[0].event_type().map(ToOwned::to_owned)
    };
    assert_eq!(typed(None).as_deref(), Some("read"));
    assert_eq!(typed(Some("own")).as_deref(), Some("own"));
}
