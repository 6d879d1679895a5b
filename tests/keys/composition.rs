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
fn or_returns_the_first_value_and_never_skips_a_malformed_one() {
    let part = key::header("a").or(key::header("b")).or(key::header("c"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2")])), id("1"));
    assert_eq!(read(&part, letters(&[("c", "3"), ("b", "2")])), id("2"));
    assert_eq!(read(&part, letters(&[("c", "3")])), id("3"));
    assert_eq!(read(&part, letters(&[])), MISSING);
    assert_eq!(read(&part, letters(&[("a", ""), ("b", "2")])), Err(Empty));
    // Parts after the first value are not read.
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "")])), id("1"));
    // An alternative that is an `and` needs all its parts.
    let either = key::header("a").and(key::header("b")).or(key::header("c"));
    assert_eq!(read(&either, letters(&[("a", "1"), ("c", "3")])), id("3"));
}

#[test]
fn optional_makes_a_missing_part_empty() {
    let part = key::header("a").optional().and(key::header("b")).and(key::header("c").optional());
    assert_eq!(read(&part, letters(&[("a", "1"), ("b", "2"), ("c", "3")])), id("1|2|3"));
    assert_eq!(read(&part, letters(&[("b", "2")])), id("|2|"));
    assert_eq!(read(&part, letters(&[("a", "1"), ("c", "3")])), MISSING);
    assert_eq!(read(&part, letters(&[("b", "2"), ("c", " ")])), Err(Empty));
    // An id is never empty, and never consists of separators only.
    let alone = key::header("a").optional();
    assert_eq!(read(&alone, letters(&[])), MISSING);
    let nothing = key::header("a").optional().and(key::header("b").optional());
    assert_eq!(read(&nothing, letters(&[])), MISSING);
    let nested = nothing.optional().and(key::header("c"));
    assert_eq!(read(&nested, letters(&[("c", "3")])), id("|3"));
    assert_eq!(read(&nested, letters(&[("a", "1"), ("c", "3")])), id("1%7C|3"));
}
