//! `key::each`: a key for every event of a JSON array. `each` in `tests/fuzz` compares it with a tree of the body.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use bytes::Bytes;
use http::Request;
use tower_dedup::key::{self, Event, Extracted, Keys, RequestRef};
use tower_dedup::{DedupKey, KeyError, KeyErrorKind, KeyExtractor};

fn read(extractor: &KeyExtractor, body: &str) -> Result<Extracted, KeyError> {
    let request = Request::post("/hook").header("x-shop", "a|b");
    let request = request.header("x-twice", "1").header("x-twice", "1").body(()).unwrap();
    let (head, ()) = request.into_parts();
    let body = Bytes::copy_from_slice(body.as_bytes());
    extractor.extract(&RequestRef::new(&head, &body))
}

fn keys(extractor: &KeyExtractor, body: &str) -> Keys {
    match read(extractor, body) {
        Ok(Extracted::Keys(keys)) => keys,
        other => panic!("no keys in {body}: {other:?}"),
    }
}

fn ids(extractor: &KeyExtractor, body: &str) -> Vec<String> {
    keys(extractor, body).events().iter().map(|event| event.key().id().to_owned()).collect()
}

fn events() -> KeyExtractor {
    key::each("/events", key::json("/id")).namespace("acme")
}

#[test]
fn head_of_an_event_is_that_of_the_delivery_and_its_body_is_its_item() {
    let part = key::header("x-shop").and(key::json("/id").optional()).and(key::body_digest());
    let extractor = key::each("/events", part).namespace("acme");
    let [first, second] = &ids(&extractor, r#"{"events":[ {"id" : 1} ,{}]}"#)[..] else {
        panic!("two");
    };
    // `printf '{"id" : 1}' | sha256sum`, and of `{}`.
    assert_eq!(
        first,
        "a%7Cb|1|body_cbfc4615dbf492cd23b3f345513c4421bd384d687510c717aed525af7fa8c13e"
    );
    assert_eq!(
        second,
        "a%7Cb||body_44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    );
}

#[test]
fn each_composes_parts_of_the_head() {
    let by = |part: key::KeyPart| key::each("", part).namespace("acme");
    let first_present = by(key::header("x-none").or(key::query("none")).or(key::json("/id")));
    assert_eq!(ids(&first_present, r#"[{"id":1},{"id":2}]"#), ["1", "2"]);
    let optional = by(key::header("x-none").optional().and(key::json("/id")));
    assert_eq!(ids(&optional, r#"[{"id":1}]"#), ["|1"]);
    let required = by(key::header("x-none").and(key::json("/id")));
    assert_eq!(read(&required, r#"[{"id":1}]"#), Ok(Extracted::Missing));
    // Two headers are malformed, but not for an empty list.
    let twice = by(key::header("x-twice").optional().and(key::json("/id")));
    let error = read(&twice, r#"[{"id":1}]"#).unwrap_err();
    assert_eq!(error.kind(), KeyErrorKind::Repeated);
    assert_eq!(read(&twice, "[]"), Ok(Extracted::Bypass));
}

/// The items that a pointer names, as they are written.
fn items(pointer: &str, body: &str) -> Result<Option<Vec<String>>, KeyErrorKind> {
    let text = |event: &Event| String::from_utf8(event.payload().unwrap().to_vec()).unwrap();
    match read(&key::each(pointer, key::body_digest()).namespace("acme"), body) {
        Ok(Extracted::Keys(keys)) => Ok(Some(keys.events().iter().map(text).collect())),
        Ok(Extracted::Bypass) => Ok(Some(Vec::new())),
        Ok(_) => Ok(None),
        Err(error) => Err(error.kind()),
    }
}

#[test]
fn items_are_the_bytes_between_the_commas_of_all_arrays_on_the_way() {
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let nested = r#"{"e":[{"c":[1,2]},{"c":[]},{"c":[3]}]}"#;
    for (pointer, body, expected) in [
        (
            "",
            " [ {\"a\": 1} ,\n2,\"x\" , null,[ ] ]\r\n",
            &["{\"a\": 1}", "2", "\"x\"", "null", "[ ]"][..],
        ),
        ("/a/1", r#"{"a":[0,[1,2],3]}"#, &["1", "2"]),
        ("/e/*/c", nested, &["1", "2", "3"]),
        ("/*", "[[1],[2,3]]", &["1", "2", "3"]),
        ("/*/*", "[[[1]],[]]", &["1"]),
        ("", &format!("[{deep}]"), &[&deep]),
        ("/e", &format!(r#"{{"x":{deep},"e":[1]}}"#), &["1"]),
        ("", "[]", &[]),
        ("/e/*/c", r#"{"e":[]}"#, &[]),
        ("/e", r#"{"e": [ ] }"#, &[]),
    ] {
        let expected = expected.iter().map(|&item| item.to_owned()).collect();
        assert_eq!(items(pointer, body), Ok(Some(expected)), "{pointer} of {body:.80}");
    }
}

#[test]
fn bound_on_events_holds_for_all_arrays_together() {
    let array = |length: usize| format!("[{}0]", "0,".repeat(length - 1));
    assert_eq!(items("", &array(65_536)).unwrap().unwrap().len(), 65_536);
    assert_eq!(items("", &array(65_537)), Err(KeyErrorKind::TooMany));
    let two = format!("[{0},{0}]", array(65_536 / 2 + 1));
    assert_eq!(items("/*", &two), Err(KeyErrorKind::TooMany));
    let without_keys = format!("{{\"events\":[{}]}}", vec!["{}"; 65_537].join(","));
    let error = read(&events(), &without_keys).unwrap_err();
    assert_eq!(error.kind(), KeyErrorKind::TooMany);
}

#[test]
fn event_payloads_are_slices_of_the_body_unless_they_change_on_a_retry() {
    let body = r#"{"events":[ {"id":1} , {"id":2} ]}"#;
    let payloads = |keys: &Keys| -> Vec<Option<Bytes>> {
        keys.events().iter().map(|event| event.payload().cloned()).collect()
    };
    let (head, ()) = Request::post("/").body(()).unwrap().into_parts();
    let bytes = Bytes::from_static(body.as_bytes());
    let Ok(Extracted::Keys(found)) = events().extract(&RequestRef::new(&head, &bytes)) else {
        panic!("keys");
    };
    let with = payloads(&found);
    assert_eq!(with, [Some(bytes.slice(12..20)), Some(bytes.slice(23..31))]);
    for payload in with.iter().flatten() {
        assert!(bytes.as_ptr_range().contains(&payload.as_ptr()), "a copy");
    }
    let each = key::each("/events", key::json("/id")).without_payload();
    assert_eq!(payloads(&keys(&each.namespace("acme"), body)), [None, None]);
}

#[test]
fn malformed_item_is_named_by_its_number() {
    for (body, kind, fault) in [
        (
            r#"{"events":[{},{"id":1},{"id":[]}]}"#,
            KeyErrorKind::NotAnId,
            "JSON value /id of event 2 is neither a string, an integer nor a boolean",
        ),
        (
            r#"{"events":[{"id":1},{"id":" "}]}"#,
            KeyErrorKind::Empty,
            "JSON value /id of event 1 is empty",
        ),
    ] {
        let error = read(&events(), body).unwrap_err();
        assert_eq!((error.kind(), &*error.to_string()), (kind, fault));
    }
}

/// A sender that leaves one id out must not lose the events beside it.
#[test]
fn event_without_a_usable_id_has_the_alternative_and_refuses_no_neighbour() {
    let extractor = key::each("/events", key::json("/id").or(key::body_digest())).namespace("acme");
    for event in [r#"{"id":""}"#, r#"{"id":" "}"#, r#"{"id":{}}"#, r#"{"id":[1]}"#, "{}", "7"] {
        let found = ids(&extractor, &format!(r#"{{"events":[{{"id":1}},{event},{{"id":2}}]}}"#));
        assert_eq!((&*found[0], &*found[2]), ("1", "2"), "{event}");
        assert!(found[1].starts_with("body_"), "{event}");
    }
}

#[test]
fn array_of_one_is_multi_event_and_one_event_is_not() {
    assert!(keys(&events(), r#"{"events":[{"id":1}]}"#).is_multi_event());
    assert!(!keys(&key::json("/id").namespace("acme"), r#"{"id":1}"#).is_multi_event());
    let key = DedupKey::new("acme", "1").unwrap();
    assert!(Keys::new(vec![Event::new(key.clone())]).unwrap().is_multi_event());
    assert!(!Keys::from(Event::new(key)).is_multi_event());
}

#[test]
fn second_identities_are_read_from_the_item() {
    let extractor = events().alias("object", key::json("/object"));
    let body = r#"{"object":"x","events":[{"id":1,"object":"o"},{"id":2},{"id":3,"object":""}]}"#;
    let found = keys(&extractor, body);
    let seconds: Vec<_> = found
        .events()
        .iter()
        .map(|event| event.alias().map(|key| (key.namespace(), key.id())))
        .collect();
    assert_eq!(seconds, [Some(("acme.object", "o")), None, None]);
    // The same holds in a list of one: the whole body is not its identity.
    let by_body = events().content_identity();
    let one = keys(&by_body, r#"{"events":[{}, {"id":1}]}"#.replace("{}, ", "").as_str());
    let two = keys(&by_body, r#"{"events":[{"id":2}, {"id":1}]}"#);
    assert_eq!(one.events()[0].content_identity(), two.events()[1].content_identity());
    assert!(one.events()[0].content_identity().is_some());
}

/// A value of the head is part of the id of every event.
#[test]
fn long_header_is_not_copied_for_every_event() {
    let by_query = key::each("", key::query("q").and(key::json(""))).namespace("acme");
    let second = key::each("", key::json("")).namespace("acme").alias("q", key::query("q"));
    let body = |count: usize| Bytes::from(format!("[{}7]", "7,".repeat(count - 1)));
    let target = format!("/{0}?q={0}", "x".repeat(20_000));
    let (head, ()) = Request::post(target).body(()).unwrap().into_parts();
    for extractor in [by_query, second] {
        let read = |count| extractor.extract(&RequestRef::new(&head, &body(count)));
        assert!(matches!(read(100), Ok(Extracted::Keys(_))));
        assert_eq!(read(65_536).unwrap_err().kind(), KeyErrorKind::TooMany);
    }
}
