//! The rules of keys: what each place gives, what is malformed or missing, how values are
//! composed, and what the layer makes of it all.
//!
//! The property tests at the end hold the composite encoding (no two lists of parts share an id)
//! and say that no input whatsoever makes an extractor panic.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use tower::{Layer, ServiceExt, service_fn};
use tower_dedup::adapter::{MaintenanceAdapter, MemoryAdapter};
use tower_dedup::key::{self, Event, Extracted, KeyExtractor, KeyPart, Keys, Pointer, RequestRef};
use tower_dedup::{
    ConfigError, DedupKey, DedupLayer, Delivery, KeyError, KeyErrorKind, OnMissingKey,
};

use KeyErrorKind::{Empty, InvalidJson, NotAnId, NotUtf8, Nul, Repeated};

const FORM: &str = "application/x-www-form-urlencoded";

/// An id, nothing, or what is wrong.
type Answer = Result<Option<String>, KeyErrorKind>;

const MISSING: Answer = Ok(None);

fn id(text: &str) -> Answer {
    Ok(Some(text.to_owned()))
}

fn read<B: Into<Bytes>>(part: &KeyPart, request: Request<B>) -> Answer {
    let (head, body) = request.into_parts();
    let extractor = part.clone().namespace("n");
    match extractor.extract(&RequestRef::new(&head, &body.into())) {
        Ok(Extracted::Keys(keys)) => {
            let [event] = keys.events() else { panic!("not one event: {keys:?}") };
            assert_eq!((event.key().namespace(), event.second_identity()), ("n", None));
            id(event.key().id())
        }
        Ok(Extracted::Missing) => MISSING,
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.kind()),
    }
}

fn with_headers(values: &[&[u8]]) -> Request<&'static str> {
    let mut request = Request::post("/").body("").unwrap();
    for value in values {
        request.headers_mut().append("x-id", HeaderValue::from_bytes(value).unwrap());
    }
    request
}

fn with_form<B>(body: B) -> Request<B> {
    Request::post("/").header("content-type", FORM).body(body).unwrap()
}

fn with_body<B>(body: B) -> Request<B> {
    Request::post("/").body(body).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

// Headers

#[test]
fn a_header_gives_its_value_without_the_space_around_it() {
    let part = key::header("X-Id");
    for (value, expected) in [
        (&b"evt_1"[..], id("evt_1")),
        (b"  evt_1\t ", id("evt_1")),
        (b"a \t b", id("a \t b")),
        (b"0", id("0")),
        (b"a,b", id("a,b")),
        ("zur\u{fc}ck".as_bytes(), id("zur\u{fc}ck")),
        // Alone, a value is not escaped: it is the sender's id as it is.
        (b"50%|a", id("50%|a")),
    ] {
        assert_eq!(read(&part, with_headers(&[value])), expected, "{value:?}");
    }
    assert_eq!(read(&part, with_headers(&[])), MISSING);
}

#[test]
fn a_header_that_is_repeated_empty_or_not_utf8_is_malformed() {
    let part = key::header("x-id");
    for (values, expected) in [
        (&[&b"a"[..], b"b"][..], Repeated),
        (&[b"a", b"a"], Repeated),
        (&[b"a", b""], Repeated),
        (&[b""], Empty),
        (&[b" \t "], Empty),
        (&[b"caf\xe9"], NotUtf8),
        (&[b"\xff\xfe"], NotUtf8),
        // A surrogate, and an overlong slash.
        (&[b"\xed\xa0\x80"], NotUtf8),
        (&[b"\xc0\xaf"], NotUtf8),
    ] {
        assert_eq!(read(&part, with_headers(values)), Err(expected), "{values:?}");
    }
}

#[test]
fn ids_differ_by_case_and_by_unicode_normal_form() {
    let part = key::header("x-id");
    let of = |value: &str| read(&part, with_headers(&[value.as_bytes()]));
    assert_ne!(of("Evt_1"), of("evt_1"));
    assert_ne!(of("\u{e9}"), of("e\u{301}"));
}

#[test]
fn an_id_over_255_bytes_is_stored_as_its_sha256() {
    let part = key::header("x-id");
    for length in [256, 10 * 1024] {
        let long = "k".repeat(length);
        let stored = read(&part, with_headers(&[long.as_bytes()])).unwrap().unwrap();
        assert_eq!(stored, sha256(long.as_bytes()));
    }
    let longest = "k".repeat(key::MAX_ID_LEN);
    assert_eq!(read(&part, with_headers(&[longest.as_bytes()])), id(&longest));
    // Bytes, not characters.
    let wide = "\u{e9}".repeat(128);
    assert_eq!(read(&part, with_headers(&[wide.as_bytes()])), id(&sha256(wide.as_bytes())));
    // The parts of a composed id are joined first.
    let composed = part.clone().and(part);
    let half = "k".repeat(128);
    let joined = format!("{half}|{half}");
    assert_eq!(read(&composed, with_headers(&[half.as_bytes()])), id(&sha256(joined.as_bytes())));
}

// Forms and queries

#[test]
fn a_form_field_is_decoded() {
    let part = key::form("id");
    for (body, expected) in [
        ("id=evt_1", id("evt_1")),
        ("a=1&id=evt_1&b=2", id("evt_1")),
        ("id=a+b%20c%2B", id("a b c+")),
        ("%69d=evt_1", id("evt_1")),
        ("id=a=b", id("a=b")),
        ("id=a;b", id("a;b")),
        ("id=%C3%A9", id("\u{e9}")),
        // What is no percent-encoding stands for itself, as in every browser.
        ("id=%", id("%")),
        ("id=50%zz", id("50%zz")),
        ("id=%4", id("%4")),
        ("", MISSING),
        ("ID=a&idx=b&xid=c", MISSING),
        ("&&=&a", MISSING),
        // Other fields may be repeated.
        ("to=a&to=b&id=evt_1", id("evt_1")),
    ] {
        assert_eq!(read(&part, with_form(body)), expected, "{body}");
    }
}

#[test]
fn a_form_field_that_is_repeated_empty_not_utf8_or_holds_a_nul_is_malformed() {
    let part = key::form("id");
    for (body, expected) in [
        (&b"id=a&id=b"[..], Repeated),
        (b"id=a&id=a", Repeated),
        (b"id=a&%69d=b", Repeated),
        (b"id=&id=", Repeated),
        (b"id=", Empty),
        (b"id", Empty),
        (b"a=1&id&b=2", Empty),
        (b"id=%00", Nul),
        (b"id=a%00b", Nul),
        (b"id=a\0b", Nul),
        (b"id=%ff", NotUtf8),
        (b"id=a\xffb", NotUtf8),
        (b"id=%ed%a0%80", NotUtf8),
        (b"id=%c3", NotUtf8),
        // U+FFFD itself: it cannot be told from what stands for broken bytes.
        (b"id=%ef%bf%bd", NotUtf8),
    ] {
        let shown = String::from_utf8_lossy(body);
        assert_eq!(read(&part, with_form(body)), Err(expected), "{shown}");
    }
}

#[test]
fn broken_bytes_never_make_one_id_of_two() {
    // Both decode to "a\u{fffd}" where bytes are replaced instead of refused.
    for body in [&b"id=a%ff"[..], b"id=a%fe"] {
        assert_eq!(read(&key::form("id"), with_form(body)), Err(NotUtf8));
    }
}

#[test]
fn only_a_form_has_fields() {
    let part = key::form("id");
    let typed = |content_type: &str| {
        Request::post("/").header("content-type", content_type).body("id=evt_1").unwrap()
    };
    for content_type in [
        FORM,
        "application/x-www-form-urlencoded; charset=utf-8",
        "application/x-www-form-urlencoded;charset=\"UTF-8\"",
        " Application/X-WWW-Form-URLEncoded ; boundary=x",
    ] {
        assert_eq!(read(&part, typed(content_type)), id("evt_1"), "{content_type}");
    }
    // The sender may have left it out.
    assert_eq!(read(&part, with_body("id=evt_1")), id("evt_1"));
    for content_type in [
        "application/json",
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded2",
        "text/plain; application/x-www-form-urlencoded",
        "",
    ] {
        assert_eq!(read(&part, typed(content_type)), MISSING, "{content_type}");
    }
}

#[test]
fn a_query_parameter_is_read_like_a_form_field() {
    let part = key::query("id");
    for (target, expected) in [
        ("/hook?id=evt_1", id("evt_1")),
        ("https://example.com/hook?a=1&id=a+b%2B", id("a b+")),
        ("/hook?%69d=evt_1", id("evt_1")),
        ("/hook?id=a?b", id("a?b")),
        ("/hook", MISSING),
        ("/hook?", MISSING),
        ("/id=evt_1?a=1", MISSING),
        ("/hook?id=a&id=b", Err(Repeated)),
        ("/hook?id=", Err(Empty)),
        ("/hook?id", Err(Empty)),
        ("/hook?id=a%00", Err(Nul)),
        ("/hook?id=%ff", Err(NotUtf8)),
    ] {
        let request = Request::post(target).body("id=body").unwrap();
        assert_eq!(read(&part, request), expected, "{target}");
    }
}

// JSON

#[test]
fn a_json_value_is_an_id_if_it_is_surely_the_same_on_every_delivery() {
    let part = key::json("/id");
    for (value, expected) in [
        (r#""evt_1""#, id("evt_1")),
        (r#"" evt_1 ""#, id(" evt_1 ")),
        (r#""a|b%""#, id("a|b%")),
        ("17", id("17")),
        ("0", id("0")),
        ("-9223372036854775808", id("-9223372036854775808")),
        ("18446744073709551615", id("18446744073709551615")),
        ("true", id("true")),
        ("false", id("false")),
        ("null", MISSING),
        (r#""""#, Err(Empty)),
        (r#""\u0000""#, Err(Nul)),
        (r#""a\u0000b""#, Err(Nul)),
        ("18446744073709551616", Err(NotAnId)),
        ("-9223372036854775809", Err(NotAnId)),
        ("1.0", Err(NotAnId)),
        ("1e3", Err(NotAnId)),
        ("-0", Err(NotAnId)),
        ("[]", Err(NotAnId)),
        ("[1]", Err(NotAnId)),
        ("{}", Err(NotAnId)),
        (r#"{"id":1}"#, Err(NotAnId)),
        ("01", Err(InvalidJson)),
        ("+1", Err(InvalidJson)),
        ("NaN", Err(InvalidJson)),
        ("'a'", Err(InvalidJson)),
        ("\"a\nb\"", Err(InvalidJson)),
        ("\"a\0b\"", Err(InvalidJson)),
    ] {
        let body = format!(r#"{{"before":[{{"id":1}}],"id":{value},"after":null}}"#);
        assert_eq!(read(&part, with_body(body)), expected, "{value}");
    }
}

#[test]
fn one_json_string_is_one_id_however_it_is_escaped() {
    let part = key::json("/id");
    for (body, expected) in [
        (r#"{"id":"caf\u00e9"}"#, id("caf\u{e9}")),
        ("{\"id\":\"caf\u{e9}\"}", id("caf\u{e9}")),
        (r#"{"\u0069\u0064":"\u0065vt_1"}"#, id("evt_1")),
        (r#"{"id":"\ud83d\ude00"}"#, id("\u{1f600}")),
        ("{\"id\":\"\u{1f600}\"}", id("\u{1f600}")),
        // Half a pair is no character.
        (r#"{"id":"\ud83d"}"#, Err(InvalidJson)),
        (r#"{"id":"\ude00\ud83d"}"#, Err(InvalidJson)),
        (r#"{"id":"\ud83dx"}"#, Err(InvalidJson)),
    ] {
        assert_eq!(read(&part, with_body(body)), expected, "{body}");
    }
}

#[test]
fn a_json_name_that_is_repeated_on_the_way_is_malformed() {
    for (pointer, body) in [
        ("/id", r#"{"id":"a","id":"b"}"#),
        ("/id", r#"{"id":"a","id":"a"}"#),
        ("/id", r#"{"id":null,"id":"a"}"#),
        ("/id", r#"{"id":"a","x":{},"id":null}"#),
        ("/id", r#"{"id":"a","\u0069d":"b"}"#),
        ("/data/id", r#"{"data":{"id":"a"},"data":{"id":"a"}}"#),
        ("/data/id", r#"{"data":{},"data":{"id":"a"}}"#),
        ("/data/id", r#"{"data":{"id":"a","id":"b"}}"#),
    ] {
        assert_eq!(read(&key::json(pointer), with_body(body)), Err(Repeated), "{body}");
    }
    // Beside the way it is the handler's business.
    let beside = r#"{"x":{"id":"c","id":"d"},"id":"a","y":1,"y":2}"#;
    assert_eq!(read(&key::json("/id"), with_body(beside)), id("a"));
}

#[test]
fn a_body_that_is_not_one_json_value_is_malformed() {
    let part = key::json("/id");
    for body in [
        &b""[..],
        b"id=a",
        b"{",
        b"{\"id\":\"a\"",
        b"{\"id\":\"a\",}",
        b"{\"id\":\"a\"}{\"id\":\"a\"}",
        b"{\"id\":\"a\"} trailing",
        b"{\"id\":\"a\xff\"}",
        b"{\"id\xff\":1,\"id\":\"a\"}",
        b"{\"id\":\"a\"}\0",
        b"\xef\xbb\xbf{\"id\":\"a\"}",
        // UTF-16, with and without its mark.
        b"\xff\xfe{\0\"\0i\0d\0\"\0:\x001\0}\0",
        b"{\0\"\0i\0d\0\"\0:\x001\0}\0",
    ] {
        let shown = String::from_utf8_lossy(body);
        assert_eq!(read(&part, with_body(body)), Err(InvalidJson), "{shown:?}");
    }
    // White space around it is fine, and so is any content type.
    let spaced = Request::post("/")
        .header("content-type", "text/plain")
        .body("\r\n {\"id\" : \"a\"}\t\n")
        .unwrap();
    assert_eq!(read(&part, spaced), id("a"));
}

#[test]
fn a_json_pointer_names_one_place() {
    let body = r#"{"":{"":"empty"},"a/b":{"m~n":["x",{"id":"y"}]},"0":"zero"}"#;
    for (pointer, expected) in [
        ("//", id("empty")),
        ("/a~1b/m~0n/0", id("x")),
        ("/a~1b/m~0n/1/id", id("y")),
        ("/0", id("zero")),
        ("/a~1b/m~0n/2", MISSING),
        ("/a~1b/m~0n/00", MISSING),
        ("/a~1b/m~0n/+0", MISSING),
        ("/a~1b/m~0n/-", MISSING),
        ("/a~1b/m~0n/99999999999999999999999", MISSING),
        ("/a~1b/m~0n/0/id", MISSING),
        ("/A~1B", MISSING),
        ("", Err(NotAnId)),
    ] {
        assert_eq!(read(&key::json(pointer), with_body(body)), expected, "{pointer}");
    }
    assert_eq!(read(&key::json(""), with_body("\"whole\"")), id("whole"));
    for pointer in ["id", "/a~2", "/~", "#/id"] {
        assert_eq!(KeyPart::json(pointer).unwrap_err(), ConfigError::InvalidPointer, "{pointer}");
    }
    assert_eq!(Pointer::new("/a~1b").unwrap().as_str(), "/a~1b");
}

#[test]
fn depth_beside_the_way_costs_nothing_and_on_the_way_is_refused() {
    let deep =
        |open: &str, close: &str| format!("{}1{}", open.repeat(200_000), close.repeat(200_000));
    for (open, close) in [("[", "]"), (r#"{"id":"#, "}")] {
        let deep = deep(open, close);
        let beside = format!(r#"{{"x":{deep},"id":"a"}}"#);
        assert_eq!(read(&key::json("/id"), with_body(beside)), id("a"));
        let at = format!(r#"{{"id":{deep}}}"#);
        assert_eq!(read(&key::json("/id"), with_body(at)), Err(NotAnId));
    }
    let far = "/a".repeat(10_000);
    let along = deep(r#"{"a":"#, "}");
    assert_eq!(read(&key::json(&far), with_body(along)), Err(InvalidJson));
}

#[test]
fn a_long_json_string_is_an_id_too() {
    let long = "k".repeat(1 << 20);
    let body = format!(r#"{{"x":"{long}","id":"{long}"}}"#);
    assert_eq!(read(&key::json("/id"), with_body(body)), id(&sha256(long.as_bytes())));
}

// Digests and closures

#[test]
fn a_body_digest_is_over_the_raw_bytes() {
    let part = key::body_digest();
    // FIPS 180-4, the one-block example.
    let abc = "body_ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(read(&part, with_body("abc")), id(abc));
    // All empty bodies would be one event.
    assert_eq!(read(&part, with_body("")), Ok(None));
    assert_ne!(read(&part, with_body("{ }")), read(&part, with_body("{}")));
    assert!(read(&part, with_body(&b"\xff\0"[..])).unwrap().is_some());
}

#[test]
fn a_closure_reads_whatever_it_likes_by_the_same_rules() {
    let part = key::from_fn(|request| {
        if request.method() == http::Method::PUT {
            return Err(KeyError::new(KeyErrorKind::Rejected, "the method"));
        }
        Ok(request.uri().path().strip_prefix("/hook/").map(str::to_owned))
    });
    let at = |target: &str| Request::post(target).body("").unwrap();
    assert_eq!(read(&part, at("/hook/evt_1")), id("evt_1"));
    assert_eq!(read(&part, at("/other")), MISSING);
    assert_eq!(read(&part, at("/hook/")), Err(Empty));
    let put = Request::put("/hook/evt_1").body("").unwrap();
    assert_eq!(read(&part, put), Err(KeyErrorKind::Rejected));
    let nul = key::from_fn(|_| Ok(Some("a\0b".to_owned())));
    assert_eq!(read(&nul, at("/")), Err(Nul));
}

// Composition

/// A request with these headers, of one letter each.
fn letters(values: &[(&str, &str)]) -> Request<&'static str> {
    let mut request = Request::post("/").body("").unwrap();
    for (name, value) in values {
        let name: http::HeaderName = name.parse().unwrap();
        request.headers_mut().append(name, value.parse().unwrap());
    }
    request
}

#[test]
fn and_is_missing_if_any_part_is_and_malformed_if_any_part_is() {
    let part = key::header("a").and(key::header("b")).and(key::header("c"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2"), ("c", "3")])), id("1|2|3"));
    assert_eq!(read(&part, letters(&[("c", "3"), ("b", "2"), ("a", "1")])), id("1|2|3"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("c", "3")])), MISSING);
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", ""), ("c", "3")])), Err(Empty));
    assert_eq!(
        read(&part, letters(&[("a", "1"), ("b", "2"), ("c", "3"), ("c", "3")])),
        Err(Repeated)
    );
}

#[test]
fn the_separator_and_the_escape_are_escaped_inside_a_part() {
    let part = key::header("a").and(key::header("b"));
    for ((a, b), expected) in [
        (("x|y", "z"), "x%7Cy|z"),
        (("x", "y|z"), "x|y%7Cz"),
        (("%", "|"), "%25|%7C"),
        (("%7C", "%25"), "%257C|%2525"),
        (("50%", "a b"), "50%25|a b"),
    ] {
        assert_eq!(read(&part, letters(&[("a", a), ("b", b)])), id(expected));
    }
}

#[test]
fn a_composition_within_a_composition_is_one_part_of_it() {
    let all = letters(&[("a", "1"), ("b", "2"), ("c", "3")]);
    let [a, b, c] = ["a", "b", "c"].map(key::header);
    let flat = a.clone().and(b.clone()).and(c.clone());
    let nested = a.and(b.and(c));
    assert_eq!(read(&flat, all.clone()), id("1|2|3"));
    assert_eq!(read(&nested, all), id("1|2%7C3"));
}

#[test]
fn or_takes_the_first_that_is_present_and_passes_over_nothing_malformed() {
    let part = key::header("a").or(key::header("b")).or(key::header("c"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2")])), id("1"));
    assert_eq!(read(&part, letters(&[("c", "3"), ("b", "2")])), id("2"));
    assert_eq!(read(&part, letters(&[("c", "3")])), id("3"));
    assert_eq!(read(&part, letters(&[])), MISSING);
    assert_eq!(read(&part, letters(&[("a", ""), ("b", "2")])), Err(Empty));
    // Behind the first it is not looked at.
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "")])), id("1"));
    // Of a composition, all must be there.
    let either = key::header("a").and(key::header("b")).or(key::header("c"));
    assert_eq!(read(&either, letters(&[("a", "1"), ("c", "3")])), id("3"));
}

#[test]
fn an_optional_part_is_empty_where_it_is_missing() {
    let part = key::header("a").optional().and(key::header("b")).and(key::header("c").optional());
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2"), ("c", "3")])), id("1|2|3"));
    assert_eq!(read(&part, letters(&[("b", "2")])), id("|2|"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("c", "3")])), MISSING);
    assert_eq!(read(&part, letters(&[("b", "2"), ("c", " ")])), Err(Empty));
    // An id is never empty, nor made of separators only.
    let alone = key::header("a").optional();
    assert_eq!(read(&alone, letters(&[])), MISSING);
    let nothing = key::header("a").optional().and(key::header("b").optional());
    assert_eq!(read(&nothing, letters(&[])), MISSING);
    let nested = nothing.optional().and(key::header("c"));
    assert_eq!(read(&nested, letters(&[("c", "3")])), id("|3"));
    assert_eq!(read(&nested, letters(&[("a", "1"), ("c", "3")])), id("1%7C|3"));
}

#[test]
fn no_two_lists_of_two_or_three_parts_share_an_id() {
    // What the encoding is made of, in every combination.
    let atoms =
        ["|", "%", "%7C", "%25", "%257C", "||", "a", "a|"].map(|atom| Some(atom.to_owned()));
    let atoms: Vec<_> = atoms.into_iter().chain([None]).collect();
    let longer = |list: &Vec<Option<String>>| {
        let list = list.clone();
        atoms
            .iter()
            .map(move |atom| [&list[..], std::slice::from_ref(atom)].concat())
            .collect::<Vec<_>>()
    };
    let singles: Vec<_> = atoms.iter().map(|atom| vec![atom.clone()]).collect();
    let pairs: Vec<_> = singles.iter().flat_map(longer).collect();
    let triples: Vec<_> = pairs.iter().flat_map(longer).collect();
    let mut seen = HashMap::new();
    for list in pairs.iter().chain(&triples) {
        let Some(id) = read(&compose(list), with_body("")).unwrap() else {
            assert!(list.iter().all(Option::is_none), "{list:?}");
            continue;
        };
        let earlier = seen.insert(id, list);
        assert_eq!(earlier, None, "the id of {list:?}");
    }
    assert_eq!(seen.len(), 9 * 9 + 9 * 9 * 9 - 2);
}

// Extractors

fn extract(extractor: &KeyExtractor, request: Request<&'static str>) -> Extracted {
    let (head, body) = request.into_parts();
    extractor.extract(&RequestRef::new(&head, &Bytes::from(body))).unwrap()
}

fn panics(build: impl FnOnce() -> KeyExtractor) -> bool {
    catch_unwind(AssertUnwindSafe(build)).is_err()
}

fn dedup_key(namespace: &str, id: &str) -> DedupKey {
    DedupKey::new(namespace, id).unwrap()
}

#[test]
fn a_namespace_is_1_to_64_bytes_without_control_characters() {
    let part = || key::header("x-id");
    for namespace in ["n", "a.b|c d", "\u{e9}", &"n".repeat(64)] {
        let extractor = part().try_namespace(namespace).unwrap();
        let expected = Extracted::Keys(Keys::one(dedup_key(namespace, "1")));
        assert_eq!(extract(&extractor, with_headers(&[b"1"])), expected);
        assert_eq!(
            extract(&part().namespace("x").namespace(namespace), with_headers(&[b"1"])),
            expected
        );
    }
    for namespace in ["", "a\0b", "a\nb", "\u{7f}", &"n".repeat(65), &"\u{e9}".repeat(33)] {
        let refused = Some(ConfigError::InvalidNamespace);
        assert_eq!(part().try_namespace(namespace).err(), refused, "{namespace:?}");
        let closure = KeyExtractor::from_fn(namespace, |_| Ok(Extracted::Missing));
        assert_eq!(closure.err(), refused, "{namespace:?}");
        assert!(panics(|| part().namespace(namespace)), "{namespace:?}");
        assert!(panics(|| part().namespace("x").namespace(namespace)), "{namespace:?}");
    }
}

#[test]
fn one_id_in_two_namespaces_is_two_keys() {
    assert_ne!(dedup_key("a", "b"), dedup_key("b", "a"));
    assert_ne!(dedup_key("a", "bc"), dedup_key("ab", "c"));
    assert_ne!(dedup_key("github", "1"), dedup_key("stripe", "1"));
}

#[test]
fn a_second_identity_lives_in_a_namespace_below() {
    let extractor = key::header("a").namespace("acme").second_identity("object", key::header("b"));
    let both = || letters(&[("a", "1"), ("b", "2")]);
    let event = |first: &str, second: &str| {
        let event = Event::new(dedup_key(first, "1"));
        let event = event.with_second_identity(dedup_key(second, "2"));
        Extracted::Keys(event.into())
    };
    assert_eq!(extract(&extractor, both()), event("acme", "acme.object"));
    // It moves along, from a namespace with a dot as well.
    let moved = extractor.clone().namespace("acme.eu");
    assert_eq!(extract(&moved, both()), event("acme.eu", "acme.eu.object"));
    assert_eq!(extract(&moved.namespace("x"), both()), event("x", "x.object"));
    // Without its value there is one identity; without the first there is none.
    let one = Extracted::Keys(Keys::one(dedup_key("acme", "1")));
    assert_eq!(extract(&extractor, letters(&[("a", "1")])), one);
    assert_eq!(extract(&extractor, letters(&[("b", "2")])), Extracted::Missing);
    // Malformed is malformed.
    let (head, body) = letters(&[("a", "1"), ("b", "")]).into_parts();
    let error = extractor.extract(&RequestRef::new(&head, &Bytes::from(body))).unwrap_err();
    assert_eq!(error.kind(), Empty);
}

#[test]
fn the_namespace_of_a_second_identity_fits_too() {
    let extractor =
        |label: &str| key::header("a").namespace("acme").second_identity(label, key::header("b"));
    for label in ["", "a.b", "a\nb", &"l".repeat(60)] {
        assert!(panics(|| extractor(label)), "{label:?}");
    }
    let longest = extractor(&"l".repeat(59));
    assert!(panics(|| longest.namespace("acme2")));
    assert!(panics(|| extractor("object").namespace(&"n".repeat(64))));
}

#[test]
fn namespace_by_adds_a_value_to_the_namespaces_of_all_identities() {
    let extractor = key::header("a")
        .namespace("acme")
        .second_identity("change", key::header("b"))
        .namespace_by(|request| request.uri().path().strip_prefix('/').map(str::to_owned));
    let identities = |path: &str| {
        let mut request = letters(&[("a", "1"), ("b", "2")]);
        *request.uri_mut() = path.parse().unwrap();
        let Extracted::Keys(keys) = extract(&extractor, request) else { panic!("keys") };
        let [event] = keys.events() else { panic!("one") };
        event.identities().cloned().collect::<Vec<_>>()
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
fn namespace_by_without_a_value_is_malformed() {
    for value in [None, Some(String::new())] {
        let extractor = key::header("a").namespace("acme").namespace_by(move |_| value.clone());
        let (head, body) = letters(&[("a", "1")]).into_parts();
        let body = Bytes::from(body);
        let error = extractor.extract(&RequestRef::new(&head, &body)).unwrap_err();
        assert_eq!(error.kind(), KeyErrorKind::Missing);
    }
}

#[test]
fn namespace_by_leaves_room_for_its_value() {
    let scoped =
        |len: usize| panics(|| key::header("a").namespace(&"n".repeat(len)).namespace_by(|_| None));
    assert!(!scoped(47) && scoped(48));
    let by = || key::header("a").namespace("n").namespace_by(|_| None);
    assert!(panics(|| by().namespace(&"n".repeat(48))));
    assert!(panics(|| by().second_identity(&"l".repeat(46), key::header("b"))));
}

#[test]
fn a_bypass_wins_over_a_key_and_over_a_malformed_one() {
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
    let one = Extracted::Keys(Keys::one(dedup_key("acme", "1")));
    assert_eq!(extract(&extractor, letters(&[("a", "1")])), one);
}

#[test]
fn keys_say_where_they_were_read_and_never_what() {
    let (head, body) = with_headers(&[b"secret-1", b"secret-2"]).into_parts();
    let body = Bytes::from(body);
    let request = RequestRef::new(&head, &body);
    let extractor = key::header("x-id").namespace("n");
    let error = extractor.extract(&request).unwrap_err();
    assert_eq!(error.to_string(), "header x-id is given more than once");
    assert!(!format!("{error:?} {extractor:?} {request:?}").contains("secret"));

    let (head, ()) = Request::post("/?id=%00").body(()).unwrap().into_parts();
    let body = Bytes::from_static(br#"{"id":"\u0000"}"#);
    for (part, said) in [
        (key::json("/id"), "JSON value /id holds a NUL"),
        (key::query("id"), "query parameter id holds a NUL"),
        (key::from_fn(|_| Ok(Some("\0".to_owned()))), "the extracted value holds a NUL"),
    ] {
        let error = part.namespace("n").extract(&RequestRef::new(&head, &body)).unwrap_err();
        assert_eq!(error.to_string(), said);
    }
}

// What the layer makes of it

/// A handler behind a layer, counting its runs, and the store that the layer writes to.
struct Bench {
    layer: DedupLayer,
    store: Arc<dyn MaintenanceAdapter>,
    runs: Arc<AtomicUsize>,
}

impl Bench {
    fn new(key: KeyExtractor) -> Self {
        let store: Arc<dyn MaintenanceAdapter> = Arc::new(MemoryAdapter::new());
        let layer = DedupLayer::new(key, Arc::clone(&store));
        Self { layer, store, runs: Arc::default() }
    }

    /// How the request was answered: its status, and why if the layer did it.
    async fn send(&self, request: Request<&'static str>) -> (StatusCode, Option<String>) {
        let runs = Arc::clone(&self.runs);
        let handler = service_fn(move |request: Request<Full<Bytes>>| {
            runs.fetch_add(1, Ordering::SeqCst);
            let protected = request.extensions().get::<Delivery>().is_some();
            let status = if protected { StatusCode::CREATED } else { StatusCode::ACCEPTED };
            async move {
                let mut response = Response::new(Full::<Bytes>::default());
                *response.status_mut() = status;
                Ok::<_, Infallible>(response)
            }
        });
        let request = request.map(|body| Full::new(Bytes::from(body)));
        let response = self.layer.layer(handler).oneshot(request).await.unwrap();
        let why = response.headers().get("x-dedup-result");
        (response.status(), why.map(|why| why.to_str().unwrap().to_owned()))
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    async fn stored(&self) -> u64 {
        self.store.count().await.unwrap()
    }
}

/// The handler saw a `Delivery`.
fn ran() -> (StatusCode, Option<String>) {
    (StatusCode::CREATED, None)
}

/// The handler ran without one.
fn ran_unprotected() -> (StatusCode, Option<String>) {
    (StatusCode::ACCEPTED, None)
}

fn duplicate() -> (StatusCode, Option<String>) {
    (StatusCode::OK, Some("duplicate".to_owned()))
}

fn invalid() -> (StatusCode, Option<String>) {
    (StatusCode::BAD_REQUEST, Some("invalid-key".to_owned()))
}

#[tokio::test]
async fn a_malformed_key_is_answered_400_and_nothing_is_recorded() {
    for (part, request) in [
        (key::header("x-id"), with_headers(&[b"a", b"b"])),
        (key::header("x-id"), with_headers(&[b""])),
        (key::header("x-id"), with_headers(&[b"\xff"])),
        (key::form("id"), with_form("id=%00")),
        (key::form("id"), with_form("id=%ff")),
        (key::query("id"), Request::post("/?id=a&id=b").body("").unwrap()),
        (key::json("/id"), with_body(r#"{"id":"a\u0000"}"#)),
        (key::json("/id"), with_body(r#"{"id":"a","id":"b"}"#)),
        (key::json("/id"), with_body("{")),
    ] {
        // A policy for missing keys is none for malformed ones.
        for policy in [OnMissingKey::Reject, OnMissingKey::PassThrough, OnMissingKey::BodyDigest] {
            let mut bench = Bench::new(part.clone().namespace("n"));
            bench.layer = bench.layer.on_missing_key(policy);
            assert_eq!(bench.send(request.clone()).await, invalid(), "{part:?}");
            assert_eq!((bench.runs(), bench.stored().await), (0, 0), "{part:?}");
        }
    }
}

#[tokio::test]
async fn a_missing_key_is_answered_400_by_default() {
    let bench = Bench::new(key::header("x-id").namespace("n"));
    assert_eq!(bench.send(with_body("abc")).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (0, 0));
}

#[tokio::test]
async fn a_missing_key_can_be_let_through() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::PassThrough);
    for _ in 0..2 {
        assert_eq!(bench.send(with_body("abc")).await, ran_unprotected());
    }
    assert_eq!((bench.runs(), bench.stored().await), (2, 0));
}

#[tokio::test]
async fn a_missing_key_can_be_replaced_by_a_digest_of_the_body() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::BodyDigest);
    assert_eq!(bench.send(with_body("abc")).await, ran());
    assert_eq!(bench.send(with_body("abc")).await, duplicate());
    assert_eq!(bench.send(with_body("abd")).await, ran());
    let abc = dedup_key("n", &format!("body_{}", sha256(b"abc")));
    assert!(bench.store.get(&abc).await.unwrap().is_some());
}

/// The second delivery without a key and without a body would be taken for the first.
#[tokio::test]
async fn body_digest_of_an_empty_body_is_a_missing_key() {
    let mut bench = Bench::new(key::header("x-id").namespace("n"));
    bench.layer = bench.layer.on_missing_key(OnMissingKey::BodyDigest);
    assert_eq!(bench.send(with_body("")).await, invalid());
    let by_body = Bench::new(key::body_digest().namespace("n"));
    assert_eq!(by_body.send(with_body("")).await, invalid());
    assert_eq!((bench.stored().await, by_body.stored().await), (0, 0));
    let mut by_body = Bench::new(key::body_digest().namespace("n"));
    by_body.layer = by_body.layer.on_missing_key(OnMissingKey::PassThrough);
    for _ in 0..2 {
        assert_eq!(by_body.send(with_body("")).await, ran_unprotected());
    }
}

#[tokio::test]
async fn a_bypassed_request_always_reaches_the_handler() {
    let bench = Bench::new(
        key::header("x-id").namespace("n").bypass_when(|request| request.body() == "ping"),
    );
    let ping = || with_headers(&[b"1"]).map(|_| "ping");
    assert_eq!(bench.send(ping()).await, ran_unprotected());
    assert_eq!(bench.send(ping()).await, ran_unprotected());
    // It has burnt no id.
    assert_eq!(bench.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(bench.stored().await, 1);
}

#[tokio::test]
async fn a_delivery_is_a_duplicate_if_either_identity_is_complete() {
    let bench =
        Bench::new(key::header("a").namespace("n").second_identity("object", key::header("b")));
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, ran());
    assert_eq!(bench.stored().await, 2);
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "9"), ("b", "2")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "9")])).await, duplicate());
    assert_eq!(bench.send(letters(&[("a", "1")])).await, duplicate());
    // The namespaces of both differ: an id is not taken for the other's.
    assert_eq!(bench.send(letters(&[("a", "2"), ("b", "1")])).await, ran());
}

#[tokio::test]
async fn namespaces_share_a_store_and_nothing_else() {
    let bench = Bench::new(key::header("x-id").namespace("one"));
    let other = DedupLayer::new(key::header("x-id").namespace("two"), Arc::clone(&bench.store));
    let other = Bench { layer: other, store: Arc::clone(&bench.store), runs: Arc::default() };
    assert_eq!(bench.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(other.send(with_headers(&[b"1"])).await, ran());
    assert_eq!(bench.send(with_headers(&[b"1"])).await, duplicate());
    assert_eq!(bench.stored().await, 2);
}

/// One event per line.
fn lines() -> KeyExtractor {
    KeyExtractor::from_fn("lines", |request| {
        let body = std::str::from_utf8(request.body())
            .map_err(|_| KeyError::new(KeyErrorKind::Rejected, "the body"))?;
        let keys = body.lines().map(|line| DedupKey::new("lines", line).map(Event::new));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        Ok(Keys::new(keys).map_or(Extracted::Missing, Extracted::Keys))
    })
    .unwrap()
}

#[tokio::test]
async fn a_closure_gives_a_batch_of_keys() {
    let bench = Bench::new(lines());
    assert_eq!(bench.send(with_body("1\n2\n3")).await, ran());
    assert_eq!(bench.stored().await, 3);
    assert_eq!(bench.send(with_body("2")).await, duplicate());
    assert_eq!(bench.send(with_body("3\n1")).await, duplicate());
    // A batch with one new event runs.
    assert_eq!(bench.send(with_body("3\n4")).await, ran());
    assert_eq!(bench.send(with_body("")).await, invalid());
    assert_eq!(bench.send(with_body("5\n\n6")).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (2, 4));
}

#[tokio::test]
async fn more_keys_than_allowed_are_refused() {
    let mut bench = Bench::new(lines());
    bench.layer = bench.layer.max_keys(2);
    assert_eq!(bench.send(with_body("1\n2")).await, ran());
    assert_eq!(bench.send(with_body("3\n4\n5")).await, invalid());
    // Second identities count.
    let mut bench =
        Bench::new(key::header("a").namespace("n").second_identity("object", key::header("b")));
    bench.layer = bench.layer.max_keys(1);
    assert_eq!(bench.send(letters(&[("a", "1"), ("b", "2")])).await, invalid());
    assert_eq!((bench.runs(), bench.stored().await), (0, 0));
}

// Properties

/// The parts of a composite id: the encoding backwards.
fn decode(id: &str) -> Vec<String> {
    id.split('|').map(|part| part.replace("%7C", "|").replace("%25", "%")).collect()
}

/// A composition whose parts answer these values.
fn compose(parts: &[Option<String>]) -> KeyPart {
    parts
        .iter()
        .cloned()
        .map(|value| key::from_fn(move |_| Ok(value.clone())).optional())
        .reduce(KeyPart::and)
        .unwrap()
}

/// Rich in what the encoding is made of.
fn part() -> impl Strategy<Value = Option<String>> {
    prop_oneof![
        4 => "[%|257Cc]{1,6}".prop_map(Some),
        2 => "[^\0]{1,8}".prop_map(Some),
        1 => Just(None),
    ]
}

fn parts() -> impl Strategy<Value = Vec<Option<String>>> {
    prop::collection::vec(part(), 2..6)
        .prop_filter("at least one is there", |parts| parts.iter().any(Option::is_some))
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
        // Like JSON, and mostly not.
        r#"[{}\[\]":,a-z0-9.eE+\\ u-]{0,80}"#.prop_map(String::into_bytes),
        r#"\{"id":("[^"]{0,10}"|[0-9.eE+-]{1,12}|\[\]|\{\}|null|true)(,"id":1)?\}?"#
            .prop_map(String::into_bytes),
        // Like a form.
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

/// What a pointer names, by a parser that builds a tree.
fn by_tree(tree: &serde_json::Value, pointer: &str) -> Answer {
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

/// An extractor of every kind, and some compositions.
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
    fn a_composite_id_can_be_taken_apart_again(parts in parts()) {
        let stored = read(&compose(&parts), with_body("")).unwrap().unwrap();
        let plain: Vec<String> = parts.into_iter().map(Option::unwrap_or_default).collect();
        // The longest list here is far below the length at which ids are hashed.
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
    fn json_values_are_those_of_a_parser_that_builds_a_tree(tree in json_value()) {
        let body = tree.to_string();
        for pointer in ["", "/id", "/a", "/0", "/1", "/id/id", "/a/0", "/0/id", "/id/a/0"] {
            let read = read(&key::json(pointer), with_body(body.clone()));
            prop_assert_eq!(read, by_tree(&tree, pointer), "{} in {}", pointer, body);
        }
    }

    #[test]
    fn no_request_makes_an_extractor_panic_or_change_its_mind(
        headers in prop::collection::vec(header_bytes(), 0..3),
        content_type in prop::option::of(prop_oneof![Just(FORM.as_bytes().to_vec()), header_bytes()]),
        query in "[a-z0-9%&=+;?/]{0,30}",
        body in body_bytes(),
    ) {
        let mut request = Request::post(format!("/hook?id={query}")).body(body).unwrap();
        for value in headers {
            // What is no header value never arrives.
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
            for identity in keys.events()[0].identities() {
                let id = identity.id();
                prop_assert!((1..=key::MAX_ID_LEN).contains(&id.len()) && !id.contains('\0'));
            }
        }
    }
}
