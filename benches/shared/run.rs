//! The options of a bench.
//!
//! 1. `cargo bench` passes `--bench`. `cargo test --all-targets` runs a bench without it: the bench then
//!    does one short round without a server, and writes no figures.
//! 2. `--quick` makes fewer and shorter rounds.
//! 3. Other words select figures by a part of their name: `cargo bench --bench postgres -- event`.

use std::time::Duration;

use tokio::runtime::Runtime;

/// The length of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Quick,
    Test,
}

/// The parsed command line.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) length: Length,
    words: Vec<String>,
}

impl Run {
    /// Parses the arguments. Ends the process on an unknown option, before a long run starts.
    pub(crate) fn from_args() -> Self {
        Self::parse(std::env::args().skip(1)).unwrap_or_else(|unknown| {
            eprintln!("`{unknown}` is no option of a bench. It takes `--quick` and parts of names of figures");
            std::process::exit(2)
        })
    }

    pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let (mut bench, mut quick, mut words) = (false, false, Vec::new());
        for arg in args {
            match arg.as_str() {
                "--bench" => bench = true,
                "--quick" => quick = true,
                // Options of test runners, and of `table`.
                "--test" | "--nocapture" | "--no-capture" | "--readme" => {}
                word if !word.starts_with('-') => words.push(arg),
                _ => return Err(arg),
            }
        }
        let length = match (bench, quick) {
            (true, false) => Length::Full,
            (true, true) => Length::Quick,
            (false, _) => Length::Test,
        };
        Ok(Self { length, words })
    }

    pub(crate) fn is_test(&self) -> bool {
        self.length == Length::Test
    }

    /// Returns `true` if any of these figures is selected.
    pub(crate) fn wants(&self, names: &[&str]) -> bool {
        self.words.is_empty()
            || self.words.iter().any(|word| names.iter().any(|name| name.contains(word.as_str())))
    }

    pub(crate) fn rounds(&self) -> usize {
        match self.length {
            Length::Full => 9,
            Length::Quick => 3,
            Length::Test => 1,
        }
    }

    /// The duration of one measurement.
    pub(crate) fn time(&self) -> Duration {
        match self.length {
            Length::Full => Duration::from_millis(2_500),
            Length::Quick => Duration::from_secs(1),
            Length::Test => Duration::from_millis(5),
        }
    }
}

/// Returns a runtime with one worker per core, like that of a server.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let parse = |line: &str| Run::parse(line.split_whitespace().map(str::to_owned));
    assert_eq!(parse("").unwrap().length, Length::Test);
    assert_eq!(parse("--bench").unwrap().length, Length::Full);
    assert_eq!(parse("--bench --quick").unwrap().length, Length::Quick);
    assert_eq!(parse("--bench --quik").unwrap_err(), "--quik");
    assert!(parse("--bench").unwrap().wants(&["any"]));
    let chosen = parse("--bench event sqlite").unwrap();
    assert!(chosen.wants(&["pg_claim_64", "pg_event_64"]));
    assert!(!chosen.wants(&["pg_claim_64"]));
}
