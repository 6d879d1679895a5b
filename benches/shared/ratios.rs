//! Output of the figures: beside their goals on the screen, and in `ratios.json` in the target folder.
//!
//! The file is one JSON object of names and values. A bench replaces its own figures and leaves the
//! others, so a figure that was not measured again is that of an earlier run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::goals::goal;
use super::rounds::median;
use super::run::Run;

/// Returns Cargo's target folder.
pub(crate) fn target() -> PathBuf {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    tmp.parent().expect("the folder for temporary files is in the target folder").to_owned()
}

/// Returns the path of the file with all figures.
pub(crate) fn file() -> PathBuf {
    target().join("ratios.json")
}

pub(crate) fn read(file: &Path) -> BTreeMap<String, f64> {
    match fs::read(file) {
        Ok(json) => serde_json::from_slice(&json)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
        Err(error) => panic!("{}: {error}", file.display()),
    }
}

/// Writes one figure. The rename is atomic, so a killed bench leaves a valid file.
pub(crate) fn write(file: &Path, name: &str, value: f64) {
    let mut figures = read(file);
    // Digits after the third decimal are noise.
    figures.insert(name.to_owned(), (value * 1e3).round() / 1e3);
    let next = file.with_extension("json.next");
    let json = serde_json::to_vec_pretty(&figures).expect("names and numbers");
    fs::write(&next, json).and_then(|()| fs::rename(&next, file)).expect("the target folder");
}

/// Prints a heading, except under `cargo test`.
pub(crate) fn heading(run: &Run, text: &str) {
    if !run.is_test() {
        println!("\n{text}");
    }
}

/// Computes a figure as the median of its rounds, prints it beside its goal, and writes it to the file.
///
/// `note` is printed after the verdict.
pub(crate) fn report(run: &Run, name: &str, values: &[f64], note: &str) {
    let goal = goal(name);
    let value = median(values.iter().copied());
    assert!(value.is_finite(), "`{name}` is {value}");
    if run.is_test() {
        return;
    }
    let (least, most) =
        values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
            (least.min(*value), most.max(*value))
        });
    println!(
        "{name:<26} {:>14}  {:<16} {:<7} {note}; {} to {} in {} rounds",
        goal.value(value),
        goal.goal(),
        goal.verdict(value),
        goal.value(least),
        goal.value(most),
        values.len(),
    );
    write(&file(), name, value);
}

/// Prints that this run skips a figure.
pub(crate) fn skipped(name: &str, why: &str) {
    println!("{name:<26} {:>14}  {:<16} not measured: {why}", "", goal(name).goal());
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("ratios.json");
    assert!(read(&file).is_empty());
    write(&file, "pg_claim_64", 7.123_456);
    write(&file, "layer_ns", 900.0);
    write(&file, "pg_claim_64", 8.0);
    let expected = [("layer_ns".to_owned(), 900.0), ("pg_claim_64".to_owned(), 8.0)];
    assert_eq!(read(&file), BTreeMap::from(expected));
}
