//! Runs fuzz targets: functions that take any bytes and fail if a property does not hold.
//!
//! 1. In `cargo test`, a target takes its seeds, each file of its corpus, and inputs that are made from
//!    both by a fixed sequence of random numbers. So every run takes the same inputs.
//! 2. With `--cfg fuzzing`, libFuzzer makes the inputs: `scripts/fuzz` builds and runs the targets so.
//! 3. The corpus of a target is the folder `tests/fuzz/corpus/TARGET`. An input that failed once belongs
//!    there, so that every run takes it again.
//!
//! `bolero` alone would take other inputs in every `cargo test`, because it asks the system for its seed.

use std::fs;
use std::path::Path;

/// Runs a target on its inputs: in `cargo test` on `runs` inputs besides the seeds and the corpus.
pub(crate) fn fuzz(name: &str, runs: u32, seeds: &[Vec<u8>], target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(name);
    #[cfg(fuzzing)]
    {
        let _ = (runs, corpus);
        if let Some(folder) = std::env::var_os("FUZZ_SEEDS") {
            for (index, seed) in seeds.iter().enumerate() {
                fs::write(Path::new(&folder).join(format!("seed-{index}")), seed).expect("a seed");
            }
        }
        bolero::check!(name = name).for_each(|input: &[u8]| target(input));
    }
    #[cfg(not(fuzzing))]
    {
        let files = fs::read_dir(&corpus).unwrap_or_else(|_| panic!("no {}", corpus.display()));
        let mut paths: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
        paths.sort();
        let files = paths.iter().map(|path| fs::read(path).expect("a file of the corpus"));
        let known: Vec<Vec<u8>> = seeds.iter().cloned().chain(files).collect();
        for input in &known {
            run(target, input);
        }
        let mut random = Random(0x5EED);
        for _ in 0..runs {
            run(target, &random.input(&known));
        }
    }
}

/// Prints the input if the target fails.
#[cfg(not(fuzzing))]
fn run(target: fn(&[u8]), input: &[u8]) {
    struct Shown<'i>(&'i [u8]);
    impl Drop for Shown<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the input: b\"{}\"", self.0.escape_ascii());
            }
        }
    }
    let _shown = Shown(input);
    target(input);
}

/// A sequence of random numbers (`SplitMix64`).
#[cfg(not(fuzzing))]
struct Random(u64);

#[cfg(not(fuzzing))]
impl Random {
    /// Returns a number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let below = (mixed ^ (mixed >> 31)) % bound as u64;
        usize::try_from(below).expect("below a usize")
    }

    fn byte(&mut self) -> u8 {
        // Bytes with a meaning in the formats that the targets read.
        const MARKS: &[u8] = b"\"\"{}[]:,/~*0123456789.-+eE%|&=?;\\ \t\0\xFF\xC3\xA9ux@#<_";
        let byte = if self.below(2) == 0 { MARKS[self.below(MARKS.len())] } else { 0 };
        if byte != 0 { byte } else { u8::try_from(self.below(256)).expect("below 256") }
    }

    /// Returns random bytes, or one of the known inputs with one to four changes.
    fn input(&mut self, known: &[Vec<u8>]) -> Vec<u8> {
        if known.is_empty() || self.below(8) == 0 {
            let length = self.below(64);
            return (0..length).map(|_| self.byte()).collect();
        }
        let mut input = known[self.below(known.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(input.len() + 1);
            let end = at + self.below((input.len() - at).min(16) + 1);
            match self.below(6) {
                0 => drop(input.drain(at..end)),
                1 => drop(input.splice(at..at, input[at..end].to_vec())),
                2 => {
                    let other = &known[self.below(known.len())];
                    let from = self.below(other.len() + 1);
                    let to = from + self.below((other.len() - from).min(16) + 1);
                    drop(input.splice(at..end, other[from..to].iter().copied()));
                }
                3 => input.insert(at, self.byte()),
                4 => input.truncate(at),
                _ if at < input.len() => input[at] = self.byte(),
                _ => {}
            }
        }
        input
    }
}
