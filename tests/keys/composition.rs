//! Composed parts and their ids. `composed_key` in `tests/fuzz` compares ids with their documented form, and shows that two
//! lists never have one id.

use tower_dedup::KeyErrorKind::{Empty, Repeated};
use tower_dedup::key;

use crate::requests::{MISSING, id, letters, read};

#[test]
fn and_is_missing_or_malformed_if_any_part_is() {
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
fn and_takes_a_nested_and_as_one_part() {
    let all = letters(&[("a", "1"), ("b", "2"), ("c", "3")]);
    let [a, b, c] = ["a", "b", "c"].map(key::header);
    let flat = a.clone().and(b.clone()).and(c.clone());
    let nested = a.and(b.and(c));
    assert_eq!(read(&flat, all.clone()), id("1|2|3"));
    assert_eq!(read(&nested, all), id("1|2%7C3"));
}

#[test]
fn or_returns_the_first_value_and_skips_no_fault_but_a_blank_one() {
    let part = key::header("a").or(key::header("b")).or(key::header("c"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2")])), id("1"));
    assert_eq!(read(&part, letters(&[("c", "3"), ("b", "2")])), id("2"));
    assert_eq!(read(&part, letters(&[("c", "3")])), id("3"));
    assert_eq!(read(&part, letters(&[])), MISSING);
    for (values, expected) in [
        (&[("a", ""), ("b", "2")][..], id("2")),
        (&[("a", " "), ("b", "\t"), ("c", "3")], id("3")),
        // Alone, a blank value is no key.
        (&[("a", "")], Err(Empty)),
        (&[("c", "")], Err(Empty)),
        (&[("a", "1"), ("a", "1"), ("b", "2")], Err(Repeated)),
        (&[("a", ""), ("b", "2"), ("b", "2")], Err(Repeated)),
    ] {
        assert_eq!(read(&part, letters(values)), expected, "{values:?}");
    }
    // Parts after the first value are not read.
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "")])), id("1"));
    // An alternative that is an `and` needs all its parts.
    let either = key::header("a").and(key::header("b")).or(key::header("c"));
    assert_eq!(read(&either, letters(&[("a", "1"), ("c", "3")])), id("3"));
    assert_eq!(read(&either, letters(&[("a", "1"), ("b", ""), ("c", "3")])), id("3"));
    // A fault behind the blank value is reported, not skipped.
    let twice = [("a", ""), ("b", "2"), ("b", "2"), ("c", "3")];
    assert_eq!(read(&either, letters(&twice)), Err(Repeated));
}

#[test]
fn optional_makes_a_missing_part_empty() {
    let part = key::header("a").optional().and(key::header("b")).and(key::header("c").optional());
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2"), ("c", "3")])), id("1|2|3"));
    assert_eq!(read(&part, letters(&[("b", "2")])), id("|2|"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("c", "3")])), MISSING);
    assert_eq!(read(&part, letters(&[("a", ""), ("b", "2"), ("c", " ")])), id("|2|"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", " ")])), Err(Empty));
    let twice = [("b", "2"), ("c", "3"), ("c", "3")];
    assert_eq!(read(&part, letters(&twice)), Err(Repeated));
    // An id is never empty, and never consists of separators only.
    let alone = key::header("a").optional();
    assert_eq!(read(&alone, letters(&[])), MISSING);
    assert_eq!(read(&alone, letters(&[("a", "")])), MISSING);
    let nothing = key::header("a").optional().and(key::header("b").optional());
    assert_eq!(read(&nothing, letters(&[])), MISSING);
    assert_eq!(read(&nothing, letters(&[("a", ""), ("b", "")])), MISSING);
    let nested = nothing.optional().and(key::header("c"));
    assert_eq!(read(&nested, letters(&[("c", "3")])), id("|3"));
    assert_eq!(read(&nested, letters(&[("a", "1"), ("c", "3")])), id("1%7C|3"));
}
