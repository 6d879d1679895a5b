//! Every preset: any headers and bodies, and bodies of real samples that are changed.

use std::sync::LazyLock;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, request};
use serde_json::Value;
use tower_dedup::KeyErrorKind;
use tower_dedup::KeyExtractor;
use tower_dedup::key::{Extracted, RequestRef};
use tower_dedup::provider::{self, Preset};

use crate::cases;
use crate::fuzz::fuzz;
use crate::input::Input;
use crate::json::Tree;

/// A request of the sender of a preset.
struct Sample {
    preset: Preset,
    extractor: KeyExtractor,
    head: request::Parts,
    body: Bytes,
}

/// The samples of all presets, in the order of the presets.
static SAMPLES: LazyLock<Vec<Sample>> = LazyLock::new(|| {
    let of = |preset: &Preset| -> Vec<Sample> {
        let parts = cases::of(*preset).into_iter().map(|case| case.parts());
        let sample =
            |(head, body)| Sample { preset: *preset, extractor: preset.extractor(), head, body };
        parts.map(sample).collect()
    };
    provider::ALL.iter().flat_map(of).collect()
});

/// The names of all headers of the samples.
static NAMES: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
    let names = SAMPLES.iter().flat_map(|sample| sample.head.headers.keys().cloned());
    let mut names: Vec<_> = names.collect();
    names.sort_by(|one, other| one.as_str().cmp(other.as_str()));
    names.dedup();
    names
});

/// One input for each sample: the place of the sample, and its body.
fn seeds() -> Vec<Vec<u8>> {
    // Longer bodies have nothing more that a preset reads.
    let short = |(_, sample): &(usize, &Sample)| sample.body.len() < 3_000;
    let seed = |(at, sample): (usize, &Sample)| {
        [&u16::try_from(at).unwrap().to_be_bytes()[..], &sample.body].concat()
    };
    SAMPLES.iter().enumerate().filter(short).map(seed).collect()
}

fn sample(input: &mut Input<'_>) -> &'static Sample {
    let at = u16::from_be_bytes([input.byte(), input.byte()]);
    &SAMPLES[usize::from(at) % SAMPLES.len()]
}

/// The outcome of a preset: its ids in alphabetic order, or the kind of the error.
#[derive(Debug, PartialEq)]
enum Outcome {
    Ids(Vec<String>),
    Bypass,
    Missing,
    Malformed(KeyErrorKind),
}

impl Outcome {
    /// Returns `true` if another form of the same JSON has another outcome: an id is the digest of the
    /// bytes, or the preset reads forms.
    fn depends_on_bytes(&self, preset: Preset) -> bool {
        // A long id is hashed, and may have had a digest in it.
        let is_hashed =
            |id: &str| id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_digest = |id: &String| id.contains("body_") || is_hashed(id);
        matches!(self, Self::Ids(ids) if ids.iter().any(is_digest))
            || preset.name().starts_with("twilio")
    }
}

/// Returns `true` if the sender's own text may be a `|`, as it is or as `%7C` or `\u007c`.
fn has_bar(head: &request::Parts, body: &Bytes) -> bool {
    let has = |text: &[u8]| {
        text.contains(&b'|') || text.windows(2).any(|pair| pair.eq_ignore_ascii_case(b"7c"))
    };
    let query = head.uri.query().unwrap_or_default();
    has(body) || has(query.as_bytes()) || head.headers.values().any(|value| has(value.as_bytes()))
}

/// Reads the keys twice, and checks what holds for all keys.
fn outcome(sample: &Sample, head: &request::Parts, body: &Bytes) -> Outcome {
    let extracted = sample.extractor.extract(&RequestRef::new(head, body));
    assert_eq!(extracted, sample.extractor.extract(&RequestRef::new(head, body)));
    let keys = match extracted {
        Ok(Extracted::Keys(keys)) => keys,
        Ok(Extracted::Bypass) => return Outcome::Bypass,
        Ok(_) => return Outcome::Missing,
        Err(error) => return Outcome::Malformed(error.kind()),
    };
    assert!(!keys.events().is_empty());
    assert!(keys.is_multi_event() || keys.events().len() == 1);
    assert!(sample.preset.key().is_none() || !keys.is_multi_event());
    let has_bar = has_bar(head, body);
    let within = body.as_ptr_range();
    let mut ids = Vec::new();
    for event in keys.events() {
        let [id, namespace] = [event.key().id(), event.key().namespace()];
        assert_eq!(namespace, sample.preset.name());
        assert!((1..=255).contains(&id.len()) && !id.contains('\0'), "{id:?}");
        // Not only separators: that would be the id of many events.
        assert!(has_bar || id.bytes().any(|byte| byte != b'|'), "{id:?}");
        if let Some(payload) = event.payload() {
            let payload = payload.as_ptr_range();
            assert!(within.start <= payload.start && payload.end <= within.end, "a copy");
        }
        if let Some(text) = event.event_type() {
            assert!((1..=100).contains(&text.len()) && !text.contains(char::is_control));
        }
        ids.push(id.to_owned());
    }
    ids.sort();
    Outcome::Ids(ids)
}

/// Writes a value with white space and with the members of objects in the opposite order.
fn rewritten(value: &Value, text: &mut String) {
    let separator = |index: usize| if index == 0 { " " } else { " ,\n" };
    match value {
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                text.push_str(separator(index));
                rewritten(item, text);
            }
            text.push_str("\t]");
        }
        Value::Object(members) => {
            text.push('{');
            let members: Vec<_> = members.iter().collect();
            for (index, (name, value)) in members.into_iter().rev().enumerate() {
                text.push_str(separator(index));
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push_str(" :\r\n");
                rewritten(value, text);
            }
            text.push('}');
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

/// Any body under the head of a sample: nothing panics, and the keys are the same if the sender adds a field, and
/// writes the body with other white space and another order of the members.
#[test]
fn preset_body() {
    fuzz("preset_body", 2_500, &seeds(), |input| {
        let mut input = Input(input);
        let sample = sample(&mut input);
        let body = Bytes::copy_from_slice(input.0);
        let outcome_of_body = outcome(sample, &sample.head, &body);
        let Ok(mut tree) = serde_json::from_slice::<Value>(&body) else { return };
        // Of two members with one name, a `Value` has the last.
        let is_repeated =
            serde_json::from_slice(&body).is_ok_and(|it: Tree| it.has_repeated_names());
        if is_repeated || outcome_of_body.depends_on_bytes(sample.preset) {
            return;
        }
        add_field(&mut tree);
        let mut text = String::new();
        rewritten(&tree, &mut text);
        let again = outcome(sample, &sample.head, &text.clone().into());
        // Another order has another first error.
        if !matches!((&outcome_of_body, &again), (Outcome::Malformed(_), Outcome::Malformed(_))) {
            assert_eq!(again, outcome_of_body, "{}: {text}", sample.preset.name());
        }
    });
}

/// Returns the place of each sample, with the same bytes after it.
fn places(rest: &[u8]) -> Vec<Vec<u8>> {
    let places = 0..u16::try_from(SAMPLES.len()).unwrap();
    places.map(|at| [&at.to_be_bytes()[..], rest].concat()).collect()
}

/// Adds a field that no preset knows to every object.
fn add_field(tree: &mut Value) {
    match tree {
        Value::Array(items) => items.iter_mut().for_each(add_field),
        Value::Object(members) => {
            members.values_mut().for_each(add_field);
            members.insert("a_field_of_a_later_version".to_owned(), Value::from(1.5));
        }
        _ => {}
    }
}

/// Any headers, with the body of a sample.
#[test]
fn preset_head() {
    fuzz("preset_head", 2_500, &places(b"\x07a|%b\xFE\x21\"c\"\xFE"), |input| {
        let mut input = Input(input);
        let sample = sample(&mut input);
        let mut head = sample.head.clone();
        for _ in 0..8 {
            if input.0.is_empty() {
                break;
            }
            let (name, is_more) = (input.pick(&NAMES), input.byte() % 4 == 0);
            let Ok(value) = HeaderValue::from_bytes(input.bytes()) else { continue };
            match is_more {
                true => drop(head.headers.append(name, value)),
                false => drop(head.headers.insert(name, value)),
            }
        }
        outcome(sample, &head, &sample.body);
    });
}
