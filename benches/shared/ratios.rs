//! Output of the figures: beside their goals on the screen, and in `ratios.json` in the target folder.
//!
//! The file is one JSON object of names, values and the commits that were measured. A bench replaces its own figures and
//! leaves the others, so a figure that was not measured again is that of an earlier run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::goals::goal;
use super::rounds::median;
use super::run::Run;

/// The value of each figure, and the commit.
pub(crate) type Figures = BTreeMap<String, (f64, String)>;

/// Returns the path of the file with all figures, in Cargo's target folder.
pub(crate) fn file() -> PathBuf {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tmp.with_file_name("ratios.json")
}

pub(crate) fn read(file: &Path) -> Figures {
    match fs::read(file) {
        Ok(json) => serde_json::from_slice(&json)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Figures::new(),
        Err(error) => panic!("{}: {error}", file.display()),
    }
}

/// Writes one figure. The rename is atomic, so a killed bench leaves a valid file.
pub(crate) fn write(file: &Path, name: &str, value: f64) {
    let mut figures = read(file);
    // Digits after the third decimal are noise.
    figures.insert(name.to_owned(), ((value * 1e3).round() / 1e3, commit()));
    let next = file.with_extension("json.next");
    let json = serde_json::to_vec_pretty(&figures).expect("names and numbers");
    fs::write(&next, json).and_then(|()| fs::rename(&next, file)).expect("the target folder");
}

/// Returns the name of the commit; empty outside of a clone.
fn commit() -> String {
    let git = Command::new("git").args(["rev-parse", "--short=8", "HEAD"]).output();
    git.map(|it| String::from_utf8_lossy(&it.stdout).trim().to_owned()).unwrap_or_default()
}

/// Computes a figure as the median of its rounds, prints it beside its goal, and writes it to the file. Does neither
/// under `cargo test`.
///
/// `note` is printed after the verdict.
pub(crate) fn report(run: &Run, name: &str, values: &[f64], note: &str) {
    let goal = goal(name);
    let value = median(values.iter().copied());
    assert!(value.is_finite(), "`{name}` is {value}");
    if run.is_test() {
        return;
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    println!(
        "{name:<26} {:>10}  {:<16} {note}; {} to {} in {} rounds",
        goal.value(value),
        goal.verdict(value),
        goal.value(least),
        goal.value(most),
        values.len(),
    );
    write(&file(), name, value);
}

/// Prints that this run skips a figure.
pub(crate) fn skipped(run: &Run, name: &str, why: &str) {
    if !run.is_test() {
        println!("{name:<26} not measured: {why}");
    }
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("ratios.json");
    assert!(read(&file).is_empty());
    write(&file, "pg_claim_64", 7.123_456);
    write(&file, "layer_ns", 900.0);
    write(&file, "pg_claim_64", 8.0);
    let values: Vec<_> = read(&file).into_iter().map(|(name, (value, _))| (name, value)).collect();
    assert_eq!(values, [("layer_ns".to_owned(), 900.0), ("pg_claim_64".to_owned(), 8.0)]);
}
