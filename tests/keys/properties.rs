//! Properties of keys: two lists of parts never share an id, and no input makes an extractor panic.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use bytes::Bytes;
use http::{HeaderValue, Request};
use proptest::prelude::*;
use tower_dedup::DedupKey;
use tower_dedup::KeyErrorKind::{Empty, NotAnId, Nul};
use tower_dedup::key::{self, Extracted, KeyExtractor, KeyPart, RequestRef};

use crate::requests::{FORM, MISSING, ReadId, compose, id, read, with_body};

/// Decodes a composed id into its parts.
fn decode(id: &str) -> Vec<String> {
    id.split('|').map(|part| part.replace("%7C", "|").replace("%25", "%")).collect()
}

/// Values with many of the characters that the encoding uses.
fn part() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        4 => "[%|257Cc]{1,6}".prop_map(Some),
        2 => "[^\0]{1,8}".prop_map(Some),
        1 => Just(None),
    ]
}

fn parts() -> impl Strategy<Value = Vec<Option<String>>> {
    prop::collection::vec(part(), 2..6)
        .prop_filter("at least one part is present", |parts| parts.iter().any(Option::is_some))
}

/// A value as a client might send it in a header.
fn header_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        "[ -~]{0,40}".prop_map(String::into_bytes),
        "\\PC{0,20}".prop_map(String::into_bytes),
    ]
}

fn body_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        // Almost JSON.
        r#"[{}\[\]":,a-z0-9.eE+\\ u-]{0,80}"#.prop_map(String::into_bytes),
        r#"\{"id":("[^"]{0,10}"|[0-9.eE+-]{1,12}|\[\]|\{\}|null|true)(,"id":1)?\}?"#
            .prop_map(String::into_bytes),
        // Almost a form.
        "(id|a|%69d)=[%a-f0-9+&=;]{0,20}(&id=[a-z%0-9]{0,9})?".prop_map(String::into_bytes),
    ]
}

fn json_value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::btree_map("id|a|0|[^\0]{0,3}", inner, 0..4)
                .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Reads the id at a pointer with a parser that builds a tree.
fn by_tree(tree: &serde_json::Value, pointer: &str) -> ReadId {
    match tree.pointer(pointer) {
        None | Some(serde_json::Value::Null) => MISSING,
        Some(serde_json::Value::Bool(value)) => id(&value.to_string()),
        Some(serde_json::Value::Number(number)) if number.is_f64() => Err(NotAnId),
        Some(serde_json::Value::Number(number)) => id(&number.to_string()),
        Some(serde_json::Value::String(text)) if text.is_empty() => Err(Empty),
        Some(serde_json::Value::String(text)) if text.contains('\0') => Err(Nul),
        Some(serde_json::Value::String(text)) => id(DedupKey::new("n", text).unwrap().id()),
        Some(_) => Err(NotAnId),
    }
}

/// Extractors of every kind, and some compositions.
fn every_kind() -> Vec<KeyExtractor> {
    let [header, json, form, query] =
        [key::header("x-id"), key::json("/id"), key::form("id"), key::query("id")];
    let second = |part: &KeyPart| {
        part.clone().namespace("second").second_identity("json", json.clone().optional())
    };
    vec![
        header.clone().namespace("header"),
        json.clone().namespace("json"),
        form.clone().namespace("form"),
        query.clone().namespace("query"),
        key::body_digest().namespace("digest"),
        key::json("").namespace("whole"),
        key::json("/0/id/1").namespace("deep"),
        second(&header),
        header.clone().or(query.clone()).or(form.clone()).or(json.clone()).namespace("or"),
        header.optional().and(form.optional()).and(query.optional()).and(json).namespace("and"),
        tower_dedup::provider::TWILIO.into(),
    ]
}

proptest! {
    #[test]
    fn a_composed_id_decodes_to_its_parts(parts in parts()) {
        let stored = read(&compose(&parts), with_body("")).unwrap().unwrap();
        let plain: Vec<String> = parts.into_iter().map(Option::unwrap_or_default).collect();
        // The longest list here is shorter than the ids that are hashed.
        prop_assert_eq!(decode(&stored), plain);
    }

    #[test]
    fn moving_a_boundary_between_two_parts_changes_the_id(
        text in "[%|7C25a]{3,12}",
        one in 1_usize..11,
        two in 1_usize..11,
    ) {
        let (one, two) = (one.min(text.len() - 1), two.min(text.len() - 1));
        let id_of = |at: usize| {
            let (left, right) = text.split_at(at);
            let parts = [left, right].map(|part| Some(part.to_owned()));
            read(&compose(&parts), with_body("")).unwrap().unwrap()
        };
        prop_assert_eq!(one == two, id_of(one) == id_of(two));
    }

    #[test]
    fn long_lists_of_parts_differ_after_hashing_too(parts in parts(), at in 0_usize..8) {
        let long: Vec<_> =
            parts.iter().map(|part| part.as_deref().map(|part| part.repeat(300))).collect();
        let stored = read(&compose(&long), with_body("")).unwrap().unwrap();
        prop_assert_eq!(stored.len(), 64);
        let mut other = long.clone();
        let at = at % other.len();
        other[at] = Some(format!("{}x", other[at].take().unwrap_or_default()));
        prop_assert_ne!(read(&compose(&other), with_body("")).unwrap().unwrap(), stored);
    }

    #[test]
    fn json_agrees_with_a_parser_that_builds_a_tree(tree in json_value()) {
        let body = tree.to_string();
        for pointer in ["", "/id", "/a", "/0", "/1", "/id/id", "/a/0", "/0/id", "/id/a/0"] {
            let read = read(&key::json(pointer), with_body(body.clone()));
            prop_assert_eq!(read, by_tree(&tree, pointer), "{} in {}", pointer, body);
        }
    }

    #[test]
    fn extractor_never_panics_and_is_deterministic(
        headers in prop::collection::vec(header_bytes(), 0..3),
        content_type in prop::option::of(prop_oneof![Just(FORM.as_bytes().to_vec()), header_bytes()]),
        query in "[a-z0-9%&=+;?/]{0,30}",
        body in body_bytes(),
    ) {
        let mut request = Request::post(format!("/hook?id={query}")).body(body).unwrap();
        for value in headers {
            // Servers refuse other values.
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                request.headers_mut().append("x-id", value);
            }
        }
        if let Some(Ok(value)) = content_type.map(|value| HeaderValue::from_bytes(&value)) {
            request.headers_mut().insert("content-type", value);
        }
        let (head, body) = request.into_parts();
        let body = Bytes::from(body);
        let request = RequestRef::new(&head, &body);
        for extractor in every_kind() {
            let extracted = extractor.extract(&request);
            prop_assert_eq!(&extracted, &extractor.clone().extract(&request), "{:?}", extractor);
            let Ok(Extracted::Keys(keys)) = extracted else { continue };
            prop_assert_eq!(keys.events().len(), 1);
            let event = &keys.events()[0];
            for identity in [event.key()].into_iter().chain(event.second_identity()) {
                let id = identity.id();
                prop_assert!((1..=255).contains(&id.len()) && !id.contains('\0'));
            }
        }
    }
}
