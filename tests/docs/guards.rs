//! `tests/guards.txt`: each guard stands in its file, and its tests exist. `scripts/guards` takes the guards out. The tests
//! that `docs/guarantees.md` names exist too.

use std::collections::{BTreeMap, BTreeSet};

use crate::guide::{sources, text};

const TABLE: &str = include_str!("../guards.txt");
const GUARANTEES: &str = include_str!("../../docs/guarantees.md");

/// A guard, by the names of the table's fields.
struct Guard<'t> {
    id: &'t str,
    file: &'t str,
    guard: &'t str,
    without: &'t str,
    binary: &'t str,
    fails: &'t str,
}

fn guards() -> Vec<Guard<'static>> {
    let blocks = TABLE.split("\n\n").filter(|block| block.starts_with("id "));
    let guards = blocks.map(|block| {
        let fields: Vec<_> =
            block.lines().map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
        let names: Vec<_> = fields.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["id", "file", "guard", "without", "binary", "fails"], "{block}");
        let [id, file, guard, without, binary, fails] = [0, 1, 2, 3, 4, 5].map(|at| fields[at].1);
        Guard { id, file, guard, without, binary, fails }
    });
    let guards: Vec<_> = guards.collect();
    assert_eq!(guards.len(), TABLE.matches("\nid ").count(), "a guard without an empty line above");
    assert!(guards.len() >= 30, "only {} guards", guards.len());
    guards
}

#[test]
fn text_of_each_guard_stands_once_in_its_file() {
    for Guard { id, file, guard, without, .. } in guards() {
        let source = text(file);
        assert_eq!(source.matches(guard).count(), 1, "{id}: `{guard}` in {file}");
        assert_ne!(guard, without, "{id}");
        assert!(!guard.is_empty(), "{id}");
    }
}

/// Returns the text of all Rust files of the folder.
fn text_of(folder: &str) -> String {
    sources(folder).map(|(_, text)| text).collect()
}

fn words(text: &str) -> BTreeSet<&str> {
    text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_').collect()
}

/// A generic function has its type parameter before the parenthesis.
fn is_declared(test: &str, source: &str) -> bool {
    ["(", "<"].iter().any(|end| source.contains(&format!("fn {test}{end}")))
}

/// A macro makes some tests of a function and the name of a module, so only the words are looked for.
#[test]
fn tests_of_each_guard_exist() {
    let mut texts = BTreeMap::new();
    for Guard { id, binary, fails, .. } in guards() {
        let from_suite = fails.contains("conformance::");
        let (sources, words) = texts.entry((binary, from_suite)).or_insert_with(|| {
            let mut sources = match binary {
                "lib" => text_of("src"),
                "queue" => text_of("tests/protocol/queue"),
                _ => text_of(&format!("tests/{binary}")),
            };
            if from_suite {
                sources += &text_of("conformance/src");
            }
            let words: BTreeSet<_> = words(&sources).into_iter().map(str::to_owned).collect();
            (sources, words)
        });
        assert!(!fails.is_empty(), "{id}");
        for test in fails.split(' ') {
            let name = test.rsplit("::").next().unwrap();
            assert!(is_declared(name, sources), "{id}: no test `{test}` in {binary}");
            for module in test.split("::") {
                assert!(words.contains(module), "{id}: no module `{module}` in {binary}");
            }
        }
    }
}

/// A long name in backticks is a test: of the file that is linked or named after it, or of any.
#[test]
fn tests_named_on_the_page_of_guarantees_exist() {
    let all = ["tests", "soak", "inbox/tests", "conformance/src"].map(text_of).concat();
    let pieces: Vec<_> = GUARANTEES.split('`').collect();
    let mut checked = [0, 0];
    for at in (1..pieces.len()).step_by(2) {
        let (name, after) = (pieces[at], pieces[at + 1]);
        let linked = after.strip_prefix("](../").and_then(|rest| rest.split(')').next());
        let named = (after == " in ").then(|| pieces[at + 2]);
        let file = linked.or(named).filter(|file| file.ends_with(".rs"));
        if file.is_none() && (name.len() <= 24 || name.matches('_').count() <= 3) {
            continue;
        }
        let source = file.map_or_else(|| all.clone(), text);
        assert!(is_declared(name, &source), "no test `{name}` in {file:?}");
        checked[usize::from(file.is_some())] += 1;
    }
    assert!(checked.iter().all(|count| *count >= 20), "have the forms changed? {checked:?}");
}
