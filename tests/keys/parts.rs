//! The value that each part reads, and its malformed and missing values.

use http::Request;
use tower_dedup::KeyErrorKind::{Empty, InvalidJson, NotAnId, NotUtf8, Nul, Repeated};
use tower_dedup::key;
use tower_dedup::{DedupKey, KeyError, KeyErrorKind};

use crate::requests::{
    FORM, MISSING, id, letters, read, sha256, with_body, with_form, with_headers,
};

// Headers

#[test]
fn header_returns_the_value_without_surrounding_white_space() {
    let part = key::header("X-Id");
    for (value, expected) in [
        (&b"evt_1"[..], id("evt_1")),
        (b"  evt_1\t ", id("evt_1")),
        (b"a \t b", id("a \t b")),
        (b"0", id("0")),
        (b"a,b", id("a,b")),
        ("zur\u{fc}ck".as_bytes(), id("zur\u{fc}ck")),
        // A single value is not escaped: the id is the sender's id.
        (b"50%|a", id("50%|a")),
    ] {
        assert_eq!(read(&part, with_headers(&[value])), expected, "{value:?}");
    }
    assert_eq!(read(&part, with_headers(&[])), MISSING);
}

#[test]
fn header_is_malformed_if_repeated_empty_or_not_utf8() {
    let part = key::header("x-id");
    for (values, expected) in [
        (&[&b"a"[..], b"b"][..], Repeated),
        (&[b"a", b"a"], Repeated),
        (&[b"a", b""], Repeated),
        (&[b""], Empty),
        (&[b" \t "], Empty),
        // White space of Unicode.
        (&["\u{a0}".as_bytes()], Empty),
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
fn an_id_over_255_bytes_is_replaced_by_its_sha256() {
    let part = key::header("x-id");
    for length in [256, 10 * 1024] {
        let long = "k".repeat(length);
        let stored = read(&part, with_headers(&[long.as_bytes()])).unwrap().unwrap();
        assert_eq!(stored, sha256(long.as_bytes()));
    }
    let longest = "k".repeat(255);
    assert_eq!(read(&part, with_headers(&[longest.as_bytes()])), id(&longest));
    // Bytes, not characters.
    let wide = "\u{e9}".repeat(128);
    assert_eq!(read(&part, with_headers(&[wide.as_bytes()])), id(&sha256(wide.as_bytes())));
    // A composed id is hashed after its parts are joined.
    let composed = part.clone().and(part);
    let half = "k".repeat(128);
    let joined = format!("{half}|{half}");
    assert_eq!(read(&composed, with_headers(&[half.as_bytes()])), id(&sha256(joined.as_bytes())));
}

// Forms and queries

#[test]
fn form_decodes_the_value() {
    let part = key::form("id");
    for (body, expected) in [
        ("id=evt_1", id("evt_1")),
        ("a=1&id=evt_1&b=2", id("evt_1")),
        ("id=a+b%20c%2B", id("a b c+")),
        ("%69d=evt_1", id("evt_1")),
        ("id=a=b", id("a=b")),
        ("id=a;b", id("a;b")),
        ("id=%C3%A9", id("\u{e9}")),
        // Invalid percent-encoding is taken literally, as in browsers.
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
        // A literal U+FFFD, which cannot be distinguished from a replaced byte.
        (b"id=%ef%bf%bd", NotUtf8),
    ] {
        let shown = String::from_utf8_lossy(body);
        assert_eq!(read(&part, with_form(body)), Err(expected), "{shown}");
    }
}

#[test]
fn form_is_missing_if_the_content_type_is_no_form() {
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
    // A sender may omit the content type.
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
fn query_follows_the_rules_of_form() {
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
fn json_reads_strings_booleans_and_64_bit_integers() {
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
        ("1E0", Err(NotAnId)),
        ("[]", Err(NotAnId)),
        ("[1]", Err(NotAnId)),
        ("{}", Err(NotAnId)),
        (r#"{"id":1}"#, Err(NotAnId)),
        ("01", Err(InvalidJson)),
        ("+1", Err(InvalidJson)),
        ("-", Err(InvalidJson)),
        ("1.", Err(InvalidJson)),
        ("0x1", Err(InvalidJson)),
        (r#""\x""#, Err(InvalidJson)),
        (r#""\u12""#, Err(InvalidJson)),
        (r#""\""#, Err(InvalidJson)),
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
fn json_gives_one_id_for_every_escaping_of_a_string() {
    let part = key::json("/id");
    for (body, expected) in [
        (r#"{"id":"caf\u00e9"}"#, id("caf\u{e9}")),
        ("{\"id\":\"caf\u{e9}\"}", id("caf\u{e9}")),
        (r#"{"\u0069\u0064":"\u0065vt_1"}"#, id("evt_1")),
        (r#"{"id":"a\"\\\/\n\u0022"}"#, id("a\"\\/\n\"")),
        (r#"{"id":"\ud83d\ude00"}"#, id("\u{1f600}")),
        ("{\"id\":\"\u{1f600}\"}", id("\u{1f600}")),
        // A lone surrogate is not a character.
        (r#"{"id":"\ud83d"}"#, Err(InvalidJson)),
        (r#"{"id":"\ude00\ud83d"}"#, Err(InvalidJson)),
        (r#"{"id":"\ud83dx"}"#, Err(InvalidJson)),
    ] {
        assert_eq!(read(&part, with_body(body)), expected, "{body}");
    }
}

#[test]
fn json_is_malformed_if_a_name_on_the_way_is_repeated() {
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
    // A repeated name beside the way does not matter.
    let beside = r#"{"x":{"id":"c","id":"d"},"id":"a","y":1,"y":2}"#;
    assert_eq!(read(&key::json("/id"), with_body(beside)), id("a"));
}

#[test]
fn json_is_malformed_if_the_body_is_not_one_json_value() {
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
        // Two byte order marks, one after white space, and one inside.
        b"\xef\xbb\xbf\xef\xbb\xbf{\"id\":\"a\"}",
        b" \xef\xbb\xbf{\"id\":\"a\"}",
        b"{\xef\xbb\xbf\"id\":\"a\"}",
        // UTF-16, with and without a byte order mark.
        b"\xff\xfe{\0\"\0i\0d\0\"\0:\x001\0}\0",
        b"{\0\"\0i\0d\0\"\0:\x001\0}\0",
    ] {
        let shown = String::from_utf8_lossy(body);
        assert_eq!(read(&part, with_body(body)), Err(InvalidJson), "{shown:?}");
    }
    // White space around the value and any content type are accepted.
    let spaced = Request::post("/")
        .header("content-type", "text/plain")
        .body("\r\n {\"id\" : \"a\"}\t\n")
        .unwrap();
    assert_eq!(read(&part, spaced), id("a"));
}

#[test]
fn json_follows_rfc_6901() {
    let body = r#"{"":{"":"empty"},"a/b":{"m~n":["x",{"id":"y"}]},"0":"zero",
        "*":"a name in a pointer to a value"}"#;
    for (pointer, expected) in [
        ("//", id("empty")),
        ("/*", id("a name in a pointer to a value")),
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
        let refused = key::json(pointer).namespace("n").checked().unwrap_err();
        let rule = format!("`pointer` must be a JSON pointer (RFC 6901), not {pointer:?}");
        assert_eq!(refused.to_string(), rule);
    }
    assert_eq!(format!("{:?}", key::json("/a~1b")), "json(/a~1b)");
}

#[test]
fn json_skips_deep_nesting_beside_the_way_and_refuses_it_on_the_way() {
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
fn json_reads_long_strings() {
    let long = "k".repeat(1 << 20);
    let body = format!(r#"{{"x":"{long}","id":"{long}"}}"#);
    assert_eq!(read(&key::json("/id"), with_body(body)), id(&sha256(long.as_bytes())));
}

// Byte order marks and blank values

/// RFC 8259, section 8.1: a parser may ignore a byte order mark.
#[test]
fn byte_order_mark_before_json_or_a_form_is_skipped() {
    const MARKED: &[u8] = b"\xef\xbb\xbf{\"id\":\"a\",\"type\":\"t\"}";
    for part in [
        key::json("/id"),
        key::json("/id").and(key::json("/none").optional()).or(key::json("/id")),
        key::json("/none").or(key::json("/id")),
    ] {
        let plain = read(&part, with_body(&MARKED[3..]));
        assert!(matches!(&plain, Ok(Some(_))), "{part:?}");
        assert_eq!(read(&part, with_body(MARKED)), plain, "{part:?}");
    }
    let extractor = key::json("/id").namespace("n").event_type(key::json("/type"));
    let (head, body) = with_body(bytes::Bytes::from_static(MARKED)).into_parts();
    let found = extractor.extract(&key::RequestRef::new(&head, &body));
    let Ok(key::Extracted::Keys(keys)) = found else { panic!("{found:?}") };
    assert_eq!(keys.events()[0].event_type(), Some("t"));
    assert_eq!(read(&key::form("id"), with_form("\u{feff}id=a&b=c")), id("a"));
    assert_eq!(read(&key::form("b"), with_form("\u{feff}id=a&b=c")), id("c"));
    // The digest is that of the bytes.
    let digest = key::body_digest();
    assert_ne!(read(&digest, with_body(MARKED)), read(&digest, with_body(&MARKED[3..])));
}

/// A blank value in place of an id would make all such events one.
#[test]
fn blank_value_is_malformed_wherever_it_comes_from() {
    for blank in [" ", "\t\n", "\u{a0}", "\u{3000}\u{2003}", "\u{200b}", "\u{feff}", "\u{1}\u{7f}"]
    {
        let encoded: String = blank.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let json = serde_json::json!({ "id": blank, "other": "b" }).to_string();
        let form = with_form(format!("id={encoded}&other=b"));
        let query = Request::post(format!("/?id={encoded}")).body("").unwrap();
        assert_eq!(read(&key::json("/id"), with_body(json.clone())), Err(Empty), "{blank:?}");
        assert_eq!(read(&key::form("id"), form), Err(Empty), "{blank:?}");
        assert_eq!(read(&key::query("id"), query), Err(Empty), "{blank:?}");
        let value = blank.to_owned();
        let closure = key::from_fn(move |_| Ok(Some(value.clone())));
        assert_eq!(read(&closure, with_body("")), Err(Empty), "{blank:?}");
        let other = || key::json("/other");
        for (composed, expected) in [
            (key::json("/id").and(other()), Err(Empty)),
            (other().and(key::json("/id")), Err(Empty)),
            (key::json("/none").or(key::json("/id")), Err(Empty)),
            // Where no value is needed, or another one may follow, it is missing.
            (key::json("/id").optional().and(other()), id("|b")),
            (key::json("/id").or(other()), id("b")),
        ] {
            assert_eq!(read(&composed, with_body(json.clone())), expected, "{blank:?}");
        }
        assert_eq!(DedupKey::new("n", blank).unwrap_err().kind(), Empty, "{blank:?}");
    }
    for header in ["\u{a0}", "\u{3000}", "\u{200b}"] {
        let read = read(&key::header("x-id"), with_headers(&[header.as_bytes()]));
        assert_eq!(read, Err(Empty), "{header:?}");
    }
}

/// Two events that differ only in such a value would have one id without it.
#[test]
fn json_value_that_is_no_id_is_malformed_unless_an_alternative_has_the_id() {
    let body = r#"{"object":{},"list":[1],"half":0.5,"id":"a","blank":"","twice":1,"twice":1}"#;
    let digest = read(&key::body_digest(), with_body(body)).unwrap().unwrap();
    for place in ["/object", "/list", "/half"] {
        let [part, sound] = [place, "/id"].map(key::json);
        for (part, expected) in [
            (part.clone(), Err(NotAnId)),
            (part.clone().optional(), Err(NotAnId)),
            (part.clone().optional().and(sound.clone()), Err(NotAnId)),
            (sound.clone().and(part.clone()), Err(NotAnId)),
            (part.clone().or(key::json("/none")), Err(NotAnId)),
            (key::json("/blank").and(part.clone()), Err(NotAnId)),
            (part.clone().or(key::json("/twice")), Err(Repeated)),
            (part.clone().and(key::json("/twice")).or(sound.clone()), Err(Repeated)),
            (part.clone().or(sound.clone()), id("a")),
            (part.clone().optional().and(sound.clone()).or(sound), id("a")),
            (part.or(key::body_digest()), id(&digest)),
        ] {
            assert_eq!(read(&part, with_body(body)), expected, "{place}: {part:?}");
        }
    }
}

// Digests and closures

#[test]
fn body_digest_is_over_the_raw_bytes() {
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
fn closure_follows_the_rules_of_the_other_extractors() {
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
    let composed = part.and(key::query("q"));
    assert_eq!(read(&composed, at("/hook/evt_1?q=2")), id("evt_1|2"));
    assert_eq!(read(&composed, at("/hook/?q=2")), Err(Empty));
    let nul = key::from_fn(|_| Ok(Some("a\0b".to_owned())));
    assert_eq!(read(&nul, at("/")), Err(Nul));
}

// Composed parts. `composed_key` and `json_pointer` in `tests/fuzz` compare ids with their documented form.

#[test]
fn and_takes_a_nested_and_as_one_part() {
    let all = letters(&[("a", "1"), ("b", "2"), ("c", "3")]);
    let [a, b, c] = ["a", "b", "c"].map(key::header);
    let flat = a.clone().and(b.clone()).and(c.clone());
    let nested = a.and(b.and(c));
    assert_eq!(read(&flat, all.clone()), id("1|2|3"));
    assert_eq!(read(&nested, all), id("1|2%7C3"));
}
