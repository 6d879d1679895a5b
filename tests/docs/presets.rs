//! The pages have the number of presets.

use std::fs;
use std::path::Path;

use tower_dedup::provider;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn numbers_of_presets_on_the_pages_are_right() {
    let (all, verified) = (provider::ALL, provider::ALL.iter().filter(|it| it.has_verifier()));
    let (all, verified) = (all.len(), verified.count());
    // `verify-ecdsa` adds SendGrid.
    for (page, words) in [
        ("README.md", format!("| {all} presets |")),
        ("README.md", format!("{} more senders", all - 3)),
        ("CHANGELOG.md", format!("{all} presets")),
        ("CHANGELOG.md", format!("signatures of {verified} presets")),
        ("src/docs/how_it_works.md", format!("{all} presets")),
        ("src/docs/guide.md", format!("signatures of {} presets", verified - 1)),
    ] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains(&words), "{page}: {words}");
    }
}
