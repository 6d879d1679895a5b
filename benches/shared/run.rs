//! How a bench is run.
//!
//! 1. `cargo bench` says so with `--bench`. `cargo test --all-targets` runs a bench without: then it
//!    does one tiny round, with no server and no figures, to show that it still works.
//! 2. `--quick` makes fewer and shorter rounds, and leaves the 10,000,000 rows out.
//! 3. Other words choose figures by a part of their name: `cargo bench --bench postgres -- event`.

use std::time::Duration;

use tokio::runtime::Runtime;

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Quick,
    Test,
}

/// What the command line asks for.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) length: Length,
    words: Vec<String>,
}

impl Run {
    /// Ends the process on an option that there is none of: one that is misspelt must not be
    /// measured for half an hour.
    pub(crate) fn from_args() -> Self {
        let run = Self::parse(std::env::args().skip(1), &[]);
        run.unwrap_or_else(|unknown| leave(&unknown))
    }

    /// The same, where there are these options too.
    pub(crate) fn from_args_with(known: &[&str]) -> Self {
        let run = Self::parse(std::env::args().skip(1), known);
        run.unwrap_or_else(|unknown| leave(&unknown))
    }

    /// Beside criterion, which has options of its own and says which it does not know. With one of
    /// them, the other words may be its values, and choose nothing.
    pub(crate) fn from_args_beside_criterion() -> Self {
        let args = || std::env::args().skip(1);
        let ours = args().filter(|arg| arg == "--bench" || arg == "--quick");
        let run = Self::parse(args(), &[]).or_else(|_| Self::parse(ours, &[]));
        run.unwrap_or_else(|unknown| leave(&unknown))
    }

    pub(crate) fn parse(
        args: impl IntoIterator<Item = String>,
        known: &[&str],
    ) -> Result<Self, String> {
        let (mut bench, mut quick, mut words) = (false, false, Vec::new());
        for arg in args {
            match arg.as_str() {
                "--bench" => bench = true,
                "--quick" => quick = true,
                // What test runners say to whatever they run.
                "--test" | "--nocapture" | "--no-capture" => {}
                word if !word.starts_with('-') => words.push(arg),
                option if known.contains(&option) => {}
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

    /// Whether any of these figures is asked for.
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

    /// How long one of a round's measurements takes.
    pub(crate) fn time(&self) -> Duration {
        match self.length {
            Length::Full => Duration::from_secs(3),
            Length::Quick => Duration::from_secs(1),
            Length::Test => Duration::from_millis(5),
        }
    }
}

fn leave(unknown: &str) -> ! {
    eprintln!("`{unknown}` is no option of this bench: there are `--quick` and names of figures");
    std::process::exit(2)
}

/// As a server has one: a worker for each core.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

/// What it has to be that no bench may get wrong unseen. Every bench under `cargo test` asks.
pub(crate) fn check() {
    let parse = |line: &str| Run::parse(line.split_whitespace().map(str::to_owned), &["--readme"]);
    assert_eq!(parse("").unwrap().length, Length::Test);
    assert_eq!(parse("--bench").unwrap().length, Length::Full);
    assert_eq!(parse("--bench --quick").unwrap().length, Length::Quick);
    assert_eq!(parse("--bench --quik").unwrap_err(), "--quik");
    assert!(parse("--bench --readme").unwrap().wants(&["any"]));
    let chosen = parse("--bench event sqlite").unwrap();
    assert!(chosen.wants(&["pg_claim_64", "pg_event_64"]));
    assert!(!chosen.wants(&["pg_claim_64"]));
}
