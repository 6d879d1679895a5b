//! [`fuzz`]: gives any bytes to a target, a function that fails if a property does not hold.
//!
//! 1. A target takes its seeds, each file of its corpus, and inputs that are made from both. Every run takes
//!    the same inputs. Ten times as many come with ten times proptest's usual `PROPTEST_CASES`.
//! 2. The corpus of a target is the folder `tests/fuzz/corpus/TARGET`. An input that failed once belongs
//!    there, so that every run takes it again.

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::Union;
use proptest::test_runner::{Config, RngSeed, TestError, TestRunner};

/// Runs a target on its known inputs, and on this many others.
pub(crate) fn fuzz(name: &str, runs: u32, seeds: &[Vec<u8>], target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(name);
    let files = fs::read_dir(&corpus).unwrap_or_else(|_| panic!("no {}", corpus.display()));
    let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    let files = paths.iter().map(|path| fs::read(path).unwrap());
    let known: Vec<Vec<u8>> = seeds.iter().cloned().chain(files).collect();
    for input in &known {
        run(name, 1, &Just(input.clone()), target);
    }
    let changed = (select(known.clone()), vec(change(&known), 1..=4));
    let changed = changed.prop_map(|(input, changes)| changes.iter().fold(input, apply));
    let inputs = Union::new_weighted(vec![(1, vec(byte(), 0..64).boxed()), (7, changed.boxed())]);
    run(name, runs * Config::default().cases / 256, &inputs, target);
}

fn run(name: &str, cases: u32, inputs: &impl Strategy<Value = Vec<u8>>, target: fn(&[u8])) {
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(0x5EED),
        failure_persistence: None,
        max_shrink_time: 30_000,
        ..Config::default()
    };
    let ran = TestRunner::new(config).run(inputs, |input| {
        target(&input);
        Ok(())
    });
    match ran {
        Err(TestError::Fail(why, input)) => panic!("{name}: {why}: b\"{}\"", input.escape_ascii()),
        ran => ran.unwrap(),
    }
}

/// A byte, often one with a meaning in the formats that the targets read.
fn byte() -> impl Strategy<Value = u8> + Clone {
    const MARKS: &[u8] = b"\"\"{}[]:,/~*0123456789.-+eE%|&=?;\\ \t\0\xFF\xC3\xA9ux@#<_";
    prop_oneof![select(MARKS), any::<u8>()]
}

/// A change of a part of an input: its kind, where the part begins, its length, a byte, and a part of a known
/// input.
type Change = (u8, Index, usize, u8, Vec<u8>);

fn change(known: &[Vec<u8>]) -> impl Strategy<Value = Change> + Clone + use<> {
    let part = (select(known.to_vec()), any::<Index>(), 0..=16_usize);
    let part = part.prop_map(|(other, from, length)| {
        let from = from.index(other.len() + 1);
        other[from..].iter().take(length).copied().collect::<Vec<_>>()
    });
    (0..6_u8, any::<Index>(), 0..=16_usize, byte(), part)
}

fn apply(mut input: Vec<u8>, (kind, at, length, byte, part): &Change) -> Vec<u8> {
    let at = at.index(input.len() + 1);
    let end = input.len().min(at + length);
    match kind {
        0 => drop(input.drain(at..end)),
        1 => drop(input.splice(at..at, input[at..end].to_vec())),
        2 => drop(input.splice(at..end, part.iter().copied())),
        3 => input.insert(at, *byte),
        4 => input.truncate(at),
        _ if at < input.len() => input[at] = *byte,
        _ => {}
    }
    input
}
