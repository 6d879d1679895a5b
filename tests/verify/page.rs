//! The guide's table of what each sender signs.

use tower_dedup::provider;
use tower_dedup::verify::Scheme;

/// One row for each scheme, as the code knows it.
#[test]
fn guide_lists_what_each_scheme_signs() {
    let page = include_str!("../../src/docs/verification.md");
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    let expected: Vec<_> = Scheme::ALL.iter().map(|scheme| row(*scheme)).collect();
    assert_eq!(rows.len(), expected.len(), "print them:\n{}", expected.join("\n"));
    for (row, expected) in rows.iter().zip(&expected) {
        assert_eq!(row, expected, "print them:\n{}", expected);
    }
}

fn row(scheme: Scheme) -> String {
    let title = provider::find(scheme.name()).expect("a preset").title();
    let [header, signed] = scheme.in_words();
    let header = if header.contains(' ') { header.to_owned() } else { format!("`{header}`") };
    let id = if scheme.signs_id() { "yes" } else { "**no**" };
    let time = if scheme.signs_time() { "yes" } else { "no" };
    format!("| {title} | {header} | {signed} | {id} | {time} |")
}
