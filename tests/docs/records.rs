//! The table of log records in `observe` names every record of the crate, and no other.

use std::path::Path;

/// Adds the code of the Rust files of `folder`, without comments and in one line each.
pub(super) fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(path).unwrap();
            let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
            found.push(code.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" "));
        }
    }
}

/// The arguments of a macro, up to its closing parenthesis. No record has one alone in its text.
fn arguments(rest: &str) -> &str {
    let mut depth = 1;
    for (at, char) in rest.char_indices() {
        depth += i32::from(char == '(') - i32::from(char == ')');
        if depth == 0 {
            return rest[..at].trim();
        }
    }
    panic!("the macro has no end: {rest:.80}");
}

/// The level, the target and the message of each record in the source.
fn records() -> Vec<(String, bool, String)> {
    let mut all = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    let message = |arguments: &str| arguments.rsplit('"').nth(1).expect("a message").to_owned();
    let mut records = Vec::new();
    for source in all {
        for rest in source.split("tracing::").skip(1) {
            let Some((level, rest)) = rest.split_once("!(") else { continue };
            if ["error", "warn", "info", "debug", "trace"].contains(&level) {
                let arguments = arguments(rest);
                let has_target = arguments.starts_with("target: \"tower_dedup\"");
                records.push((level.to_owned(), has_target, message(arguments)));
            }
        }
        // The macro of `observe`, which sets the target.
        for rest in source.split(" log!(").skip(1) {
            let arguments = arguments(rest);
            let (level, _) = arguments.split_once(',').expect("a level");
            records.push((level.to_lowercase(), true, message(arguments)));
        }
    }
    records
}

/// The beginning of each message, and its level.
fn rows() -> Vec<(String, String)> {
    let page = include_str!("../../src/observe.rs");
    let table = page.split("| message begins with |").nth(1).expect("the table");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("//! |"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let level = cells[2].split(',').next().expect("a level");
        (cells[1].trim_matches('`').to_owned(), level.to_owned())
    })
    .collect()
}

#[test]
fn table_has_every_record_with_its_level() {
    let (rows, records) = (rows(), records());
    for (level, has_target, message) in &records {
        let is_listed =
            |row: &(String, String)| message.starts_with(row.0.as_str()) && row.1 == *level;
        assert!(rows.iter().any(is_listed), "not in the table: {level} `{message}`");
        assert!(has_target, "no target: `{message}`");
    }
    for (begins, _) in &rows {
        let exists = records.iter().any(|(.., message)| message.starts_with(begins.as_str()));
        assert!(exists, "no record begins with `{begins}`");
    }
    assert!(records.len() >= 25, "only {} records: has their form changed?", records.len());
}
