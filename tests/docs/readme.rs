//! The README is short, its program is the example, and its facts are those of the crate and of the page of guarantees.

const README: &str = include_str!("../../README.md");
const GUIDE: &str = include_str!("../../src/docs/guide.md");
const GUARANTEES: &str = include_str!("../../docs/guarantees.md");
const HELLO: &str = include_str!("../../examples/hello/src/main.rs");

#[test]
fn program_is_the_example_hello() {
    let (_, rest) = README.split_once("```rust,no_run\n").expect("a program");
    let (program, _) = rest.split_once("```\n").expect("the program ends");
    assert_eq!(program, HELLO);
    assert!(HELLO.lines().filter(|line| !line.is_empty()).count() <= 15);
}

#[test]
fn number_of_presets_is_right() {
    let all = tower_dedup::provider::ALL.len();
    for words in [format!(": {all} presets |"), format!("{} more senders", all - 3)] {
        assert!(README.contains(&words), "{words}");
    }
}

/// Returns the rows of the table whose first cell is `head`, without links and emphasis.
fn table(page: &str, head: &str) -> Vec<String> {
    let start = page.find(&format!("| {head} |")).unwrap_or_else(|| panic!("no table {head}"));
    let rows = page[start..].lines().take_while(|line| line.starts_with('|'));
    rows.map(plain).collect()
}

/// Removes the links from a line: `[text](target)` and `[text]` become `text`.
fn plain(line: &str) -> String {
    let mut plain = String::new();
    let mut rest = line;
    while let Some((before, link)) = rest.split_once('[') {
        let (text, after) = link.split_once(']').expect("a link ends");
        plain += before;
        plain += text;
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        rest = target.map_or(after, |(_, after)| after);
    }
    plain + rest
}

/// So the crate page has no second text on what the README says.
#[test]
fn crate_page_begins_with_the_readme() {
    let root = include_str!("../../src/lib.rs");
    let pages: Vec<_> = root.lines().filter(|line| line.starts_with("#![doc = ")).collect();
    let expected = ["../README.md", "docs/guide.md"];
    assert_eq!(pages, expected.map(|page| format!("#![doc = include_str!(\"{page}\")]")));
}

/// The page of guarantees has a copy of the README's table of ledgers, with a column for each ledger.
#[test]
fn guarantees_and_readme_have_the_same_table_of_ledgers() {
    let table = |text: &str, head: &str| -> Vec<Vec<String>> {
        let rows = text.lines().skip_while(|line| !line.starts_with(head));
        let rows = rows.take_while(|line| line.starts_with('|'));
        let cells = |row: &str| {
            // Without the marks of the tests, such as " (L1)".
            let cell = |cell: &str| match cell.trim().rsplit_once(" (") {
                Some((text, mark)) if mark.len() == 3 => text.to_owned(),
                _ => cell.trim().to_owned(),
            };
            row.trim_matches('|').split('|').map(cell).collect()
        };
        rows.map(cells).collect()
    };
    let page = table(README, "| ledger |");
    let guarantees = table(GUARANTEES, "| | lease:");
    assert_eq!(page.len(), 5, "{page:?}");
    for (column, property) in page[0].iter().enumerate().skip(1) {
        let row = guarantees.iter().find(|row| row[0] == *property).expect(property);
        let ledgers = page[2..].iter().map(|ledger| &ledger[column]);
        assert!(row[1..].iter().eq(ledgers), "{property}: {row:?}");
    }
}

#[test]
fn features_are_those_of_the_manifest() {
    let manifest = include_str!("../../Cargo.toml");
    let (_, rest) = manifest.split_once("[features]\n").expect("features");
    let (features, _) = rest.split_once("\n[").expect("the next section");
    let names = features.lines().filter(|line| !line.starts_with('#'));
    let names = names.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name);
    let names: Vec<_> = names.filter(|name| *name != "default").collect();
    let rows = table(GUIDE, "feature");
    let listed: Vec<_> =
        rows[2..].iter().map(|row| row.split('`').nth(1).expect("a name")).collect();
    assert_eq!(listed, names, "in the order of Cargo.toml");
}

/// `guards` checks that the tests exist.
#[test]
fn each_topology_of_redis_has_tests_or_the_reason_why_it_has_none() {
    const REDIS: &str = include_str!("../../src/docs/stores/redis.md");
    let name = |row: &str, column| row.split('|').nth(column).unwrap().trim().to_owned();
    let promised: Vec<_> = table(REDIS, "topology")[2..].iter().map(|row| name(row, 1)).collect();
    let tested = table(GUARANTEES, "| topology");
    let proved: Vec<_> = tested[2..].iter().map(|row| name(row, 2)).collect();
    assert_eq!(promised, proved);
    let has_tests = |tests: &str| tests.starts_with("none: ") || tests.contains("` in `tests/");
    assert!(tested[2..].iter().all(|row| has_tests(&name(row, 3))), "{tested:?}");
}

/// The crate page and the package's page have no files beside them.
#[test]
fn links_resolve_outside_of_a_clone() {
    let targets = README.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets: Vec<_> = targets.map(|(target, _)| target).collect();
    assert!(targets.len() >= 6, "{targets:?}");
    assert!(targets.iter().all(|target| target.starts_with("https://")), "{targets:?}");
}
