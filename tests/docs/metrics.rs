//! The tables of metrics and outcomes in `observe` equal the names in the code.

use std::collections::BTreeSet;
use std::path::Path;

use crate::records::sources;

const PAGE: &str = include_str!("../../src/observe.rs");

/// The code of `observe`, one text for each file.
fn code() -> Vec<String> {
    let mut code = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/observe"), &mut code);
    code
}

fn names(text: &str) -> BTreeSet<&str> {
    text.split(|char: char| !(char.is_ascii_alphanumeric() || char == '_'))
        .filter(|word| word.starts_with("tower_dedup_"))
        .collect()
}

#[test]
fn documented_metrics_are_the_metrics() {
    let code = code().concat();
    assert_eq!(names(PAGE), names(&code));
}

#[test]
fn outcomes_and_results_are_documented() {
    let mut found = 0;
    for code in code() {
        for text in code.split(" => \"").skip(1) {
            let name = text.split('"').next().unwrap();
            found += 1;
            assert!(PAGE.contains(&format!("`{name}`")), "`{name}` is not documented");
        }
    }
    assert!(found >= 22, "only {found} names: has their form changed?");
}
