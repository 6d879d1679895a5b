//! Every record of the crate is in the table of `observe`, because the table is made from their definitions.

use std::path::PathBuf;

use crate::guide::sources;

/// Returns the code of the Rust files of `folder`, without comments and in one line each.
pub(super) fn code(folder: &str) -> Vec<String> {
    let code = |(_, source): (PathBuf, String)| {
        let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
        code.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    };
    sources(folder).map(code).collect()
}

#[test]
fn only_observe_emits_records() {
    let all = code("src");
    let mut records = Vec::new();
    for source in &all {
        for rest in source.split("tracing::").skip(1) {
            let Some((level, rest)) = rest.split_once("!(") else { continue };
            if ["error", "warn", "info", "debug", "trace", "event", "$level"].contains(&level) {
                let target = rest.trim_start().split(',').next();
                assert_eq!(target, Some("target: \"tower_dedup\""), "{rest:.80}");
                records.push(level);
            }
        }
    }
    records.sort_unstable();
    // The macro `records` of `observe/records.rs`, and the record of a delivery.
    assert_eq!(records, ["$level", "event"], "a record that is not in the table");
}
