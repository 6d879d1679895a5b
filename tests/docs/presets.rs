//! Each preset has a test, and the pages have the number of presets.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use tower_dedup::provider;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn each_preset_has_a_test_on_its_samples() {
    let tests = fs::read_to_string(root().join("tests/providers/main.rs")).unwrap();
    for preset in provider::ALL {
        // `box` is a reserved word.
        let test = preset.name().replace('-', "_").replace("box", "box_");
        let named = tests.lines().any(|line| line.trim().starts_with(&format!("{test}: ")));
        assert!(named, "no test {test}");
    }
    for file in fs::read_dir(root().join("tests/payloads/constructed")).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().and_then(OsStr::to_str).unwrap();
        let preset = provider::find(name);
        assert_eq!(preset.map(|preset| preset.name()), Some(name), "an unknown preset");
    }
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
