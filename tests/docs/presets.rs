//! The rows of the guide's table of presets are made from the presets.

use std::fs;
use std::path::Path;
use std::time::Duration;

use http::Method;
use tower_dedup::provider::{self, Preset, Retries};

/// Returns the row of a preset.
fn row(preset: &Preset) -> String {
    let constant = preset.name().to_uppercase().replace('-', "_");
    let [title, key, _, _, _, _, source, unverified] = preset.texts();
    let mut sender = format!("[{title}](crate::provider::{constant})");
    for alias in preset.aliases() {
        sender += &format!(", `{alias}`");
    }
    let key = key.replace('|', "\\|");
    let mut facts = facts(preset).join("; ");
    if !unverified.is_empty() {
        facts += &format!(". Not confirmed: {unverified}");
    }
    format!("| {sender} | {key} | {facts}. [Source]({source}) |")
}

fn facts(preset: &Preset) -> Vec<String> {
    let [_, _, event_type, floor, body, how, ..] = preset.texts();
    let retries = match preset.retries() {
        Retries::Automatic => "retries",
        Retries::ConnectionFailure => "retries failed connections only",
        Retries::Never => "**never retries**",
        _ => "retries not documented",
    };
    let mut facts = vec![format!("{retries} ({how})")];
    facts.push(format!("retention {}{}", duration(preset.retention_floor()), basis(floor)));
    if !preset.signed_id() {
        facts.push("**id not signed**".to_owned());
    }
    if preset.answer_matters() {
        facts.push("**reads the response**".to_owned());
    }
    if preset.methods() != [Method::POST] {
        let methods: Vec<_> = preset.methods().iter().map(Method::as_str).collect();
        facts.push(format!("by {}", methods.join(", ")));
    }
    facts.extend(
        preset
            .max_body()
            .map(|bytes| format!("bodies up to {} MiB ({body})", bytes / (1024 * 1024))),
    );
    if !event_type.is_empty() {
        facts.push(format!("type: {event_type}"));
    }
    facts.extend(preset.handshakes().map(|(words, is_for_layer)| {
        let whose = if is_for_layer { ", answered by the layer" } else { "" };
        format!("handshake{whose}: {words}")
    }));
    facts
}

/// Returns the reason for a retention, unless the page states it for all senders.
fn basis(floor: &str) -> String {
    match floor {
        basis if basis.starts_with("our estimate") => " (estimate)".to_owned(),
        basis if basis.ends_with("of the schedule") || basis.ends_with("of the specification") => {
            String::new()
        }
        basis => format!(" ({basis})"),
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn rows_of_presets_are_made_from_the_presets() {
    let page = fs::read_to_string(root().join("src/docs/providers.md")).unwrap();
    let stand = page.lines().filter(|line| line.contains("](crate::provider::"));
    let stand: Vec<_> = stand.filter(|line| line.starts_with("| [")).collect();
    let made: Vec<_> = provider::ALL.iter().map(row).collect();
    assert!(stand == made, "the rows of src/docs/providers.md have to be:\n{}", made.join("\n"));
    for row in made {
        assert_eq!(row.replace("\\|", "").matches('|').count(), 4, "three columns: {row}");
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
