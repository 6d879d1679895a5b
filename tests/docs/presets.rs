//! The guide's page of presets is made from the presets.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use http::Method;
use tower_dedup::provider::{self, Preset, Retries};

/// Returns the guide's page: a table of all presets, and a section for each.
fn page() -> String {
    let mut text = String::from(PAGE_HEAD);
    for preset in provider::ALL {
        let (title, key) = (preset.title(), preset.key_in_words().replace('|', "\\|"));
        let facts = to_know(preset);
        writeln!(text, "| [{title}](#{}) | {key} | {facts} |", anchor(title)).expect("a string");
    }
    text.push_str(PAGE_RULES);
    for preset in provider::ALL {
        text.push_str(&section(preset));
    }
    text
}

/// Returns the third column of the table.
fn to_know(preset: &Preset) -> String {
    let mut facts = vec![match preset.retries() {
        Retries::Automatic => "retries".to_owned(),
        Retries::ConnectionFailure => "retries failed connections only".to_owned(),
        Retries::Never => "**never retries**".to_owned(),
        _ => "retries not documented".to_owned(),
    }];
    facts.push(format!("retention at least {}", duration(preset.retention_floor())));
    if let Some(bytes) = preset.max_body() {
        facts.push(format!("bodies up to {} MiB", bytes / (1024 * 1024)));
    }
    if !preset.signed_id() {
        facts.push("id not signed".to_owned());
    }
    if preset.answer_matters() {
        facts.push("reads the response".to_owned());
    }
    facts.join("; ")
}

/// Returns what the table leaves out.
fn section(preset: &Preset) -> String {
    let names = [&[preset.name()], preset.aliases()].concat();
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    let constant = preset.name().to_uppercase().replace('-', "_");
    let methods: Vec<_> = preset.methods().iter().map(Method::as_str).collect();
    let retries = match preset.retries() {
        Retries::Automatic => "yes",
        Retries::ConnectionFailure => "only after a failed connection",
        Retries::Never => "**never**",
        _ => "not documented",
    };
    // `box` is a reserved word.
    let test = preset.name().replace('-', "_").replace("box", "box_");
    let mut lines = vec![
        format!("[`{constant}`](crate::provider::{constant}), by name {}.\n", names.join(", ")),
        format!("- Methods: {}", methods.join(", ")),
        format!(
            "- Retention: at least {} ({})",
            duration(preset.retention_floor()),
            preset.floor_basis()
        ),
        format!("- Retries: {retries} ({})", preset.retries_how()),
        format!("- Id signed: {}", if preset.signed_id() { "yes" } else { "no" }),
    ];
    lines.extend(preset.max_body().map(|bytes| {
        format!("- Body: up to {} MiB ({})", bytes / (1024 * 1024), preset.max_body_basis())
    }));
    lines.extend(preset.event_type_in_words().map(|words| format!("- Event type: {words}")));
    lines.extend(preset.handshakes().map(|(words, is_for_layer)| {
        format!("- Handshakes, for the {}: {words}", if is_for_layer { "layer" } else { "handler" })
    }));
    lines.extend(preset.unverified().map(|words| format!("- Not verified: {words}")));
    lines.push(format!("- [Source]({}); test `{test}`", preset.source()));
    format!("\n# {}\n\n{}\n", preset.title(), lines.join("\n"))
}

/// Returns the id that rustdoc gives to a heading.
fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase().replace(' ', "-");
    heading.chars().filter(|char| char.is_alphanumeric() || *char == '-').collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn page_of_presets_is_made_from_the_presets() {
    let made = page();
    let stands = fs::read_to_string(root().join("src/docs/providers.md")).unwrap();
    let differs = made.lines().zip(stands.lines()).find(|(made, stands)| made != stands);
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join("providers.md");
    fs::write(&fresh, &made).unwrap();
    assert!(
        made == stands,
        "src/docs/providers.md is out of date: cp {} src/docs/providers.md\n\
         first difference: {differs:?}",
        fresh.display()
    );
}

/// Each preset has a row of three columns, and a section that names a test that exists.
#[test]
fn page_of_presets_names_tests_that_exist() {
    let page = fs::read_to_string(root().join("src/docs/providers.md")).unwrap();
    let tests = fs::read_to_string(root().join("tests/providers/main.rs")).unwrap();
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| [")).collect();
    assert_eq!(rows.len(), provider::ALL.len());
    for row in rows {
        let columns = row.replace("\\|", "").matches('|').count() - 1;
        assert_eq!(columns, 3, "{row}");
    }
    let sections: Vec<_> = page.split("\n# ").skip(1).collect();
    assert_eq!(sections.len(), provider::ALL.len());
    for (section, preset) in sections.iter().zip(provider::ALL) {
        assert_eq!(section.lines().next(), Some(preset.title()));
        let test = section.rsplit("test `").next().unwrap().trim_end().trim_end_matches('`');
        let named = tests.lines().any(|line| line.trim().starts_with(&format!("{test}: ")));
        assert!(named, "no test {test}");
    }
    for file in fs::read_dir(root().join("tests/payloads/constructed")).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().and_then(OsStr::to_str).unwrap();
        assert_eq!(
            provider::find(name).map(|preset| preset.name()),
            Some(name),
            "an unknown preset"
        );
    }
}

const PAGE_HEAD: &str = "\
Every preset: its key, and what else to know about its sender.

1. If the sender has a preset, use it. [Other senders](crate::guide::providers) have a recipe.
2. If a sender **never** retries, every response other than 2xx loses an event: commit a job and respond
   at once, as in `examples/ack_fast`.
3. If the id is not signed, an attacker can send a signed body again under another id. Add a
   [second identity](crate::guide::keys#an-id-that-is-not-signed).
4. If the sender reads the response, [replay](crate::guide::responses#a-response-that-matters) it to
   duplicates.

| sender | key | what to know |
|---|---|---|
";

const PAGE_RULES: &str = "
- **Key**: header names, form fields, and JSON pointers into the body, or into the event after *each*.
  `?` marks a part that may be missing, and `|` joins parts.
- **Retention**: how long the sender may deliver an event again. This is the shortest safe
  [retention](crate::DedupLayer::retention).
- **Id signed**: *yes* if the sender's signature covers the id. *No* also if nothing is signed, or if the
  signed bytes are not documented.
- **Body**: the largest body, if the sender documents it. The default
  [`body_limit`](crate::DedupLayer::body_limit) is not below it.
- **Event type**: where the sender names the kind of an event. Operators see it in lists, and
  [`Delivery::event_type`](crate::Delivery::event_type) returns it.
- **Handshakes** carry no event. The layer answers 200 if the sender needs no more than a 2xx; other
  handshakes are for the handler.
- **Not verified**: what the sender's own documentation does not state.
- **Test**: the test in `tests/providers` that runs the preset on its samples.

The test `page_of_presets_is_made_from_the_presets` makes this page.
";

/// Formats a duration: `30 days`, `151 h 10 min`.
fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds.is_multiple_of(86_400) && seconds > 2 * 86_400 {
        return format!("{} days", seconds / 86_400);
    }
    let parts = [(seconds / 3_600, "h"), (seconds / 60 % 60, "min"), (seconds % 60, "s")];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    parts.map(|(count, unit)| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}
