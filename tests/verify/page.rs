//! The guide's table of what each sender signs.

use tower_dedup::provider::Preset;

use crate::vectors::senders;

/// One row for each scheme, as the code knows it.
#[test]
fn guide_lists_what_each_scheme_signs() {
    let page = include_str!("../../src/docs/verification.md");
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    let expected: Vec<_> = senders().into_iter().map(row).collect();
    assert_eq!(rows.len(), expected.len(), "print them:\n{}", expected.join("\n"));
    for (row, expected) in rows.iter().zip(&expected) {
        assert_eq!(row, expected, "print them:\n{}", expected);
    }
}

fn row(sender: Preset) -> String {
    let [title, ..] = sender.texts();
    let [header, signed] = sender.signature_in_words().expect("a scheme");
    let header = if header.contains(' ') { header.to_owned() } else { format!("`{header}`") };
    let not_signed = match (sender.signed_id(), sender.signs_time()) {
        (true, true) => " ",
        (true, false) => " time ",
        (false, true) => " **id** ",
        (false, false) => " **id**, time ",
    };
    format!("| {title} | {header} | {signed} |{not_signed}|")
}
