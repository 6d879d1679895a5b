//! The guide's page of presets agrees with the presets: its table, and the section of each sender.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Method;
use tower_dedup::internals::body_and_retries;
use tower_dedup::provider::{self, Preset};

const PAGE: &str = include_str!("../../src/docs/providers.md");
/// What a sender that never delivers again needs.
const INBOX: &str = ": [put an inbox around it](crate::guide::inbox)";
/// The longest cell, in characters, without the targets of links.
const LONGEST_CELL: usize = 75;

/// Returns the cells of a preset's row: the sender, the key, what is signed, and whether it retries.
fn row(preset: Preset) -> [&'static str; 4] {
    let at = provider::ALL.iter().position(|other| *other == preset).unwrap();
    rows()[at]
}

fn rows() -> Vec<[&'static str; 4]> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| [")?.strip_suffix(" |"));
    rows.map(|row| row.split(" | ").collect::<Vec<_>>().try_into().expect("four cells")).collect()
}

/// Returns the facts in a sender's section, by their labels, and the line below its title.
fn section(preset: Preset) -> (&'static str, BTreeMap<&'static str, String>) {
    let (title, _) = row(preset)[0].split_once(']').unwrap();
    let (_, section) = PAGE.split_once(&format!("\n## {title}\n\n")).expect(title);
    let section = section.split("\n#").next().unwrap();
    let (line, facts) = section.split_once("\n\n").expect(title);
    let facts = facts.trim_start_matches("- ").split("\n- ").map(|fact| {
        let (label, fact) = fact.split_once(':').expect(fact);
        (label, fact.split_whitespace().collect::<Vec<_>>().join(" "))
    });
    (line, facts.collect())
}

/// Returns this fact in the sender's section.
pub(crate) fn fact(preset: Preset, label: &str) -> Option<String> {
    section(preset).1.remove(label)
}

#[test]
fn page_has_a_row_and_a_section_for_each_preset() {
    assert_eq!(rows().len(), provider::ALL.len());
    assert_eq!(PAGE.matches("\n## ").count(), provider::ALL.len());
    for preset in provider::ALL {
        let constant = preset.name().to_uppercase().replace('-', "_");
        let aliases = preset.aliases().iter().map(|alias| format!("`{alias}`"));
        let aliases = aliases.collect::<Vec<_>>().join(", ");
        let (title, rest) = row(*preset)[0].split_once(']').unwrap();
        // As rustdoc makes it.
        let kept = |char: &char| char.is_alphanumeric() || " -".contains(*char);
        let anchor: String = title.to_lowercase().chars().filter(kept).collect();
        let comma = if aliases.is_empty() { "" } else { ", " };
        assert_eq!(rest, format!("(#{}){comma}{aliases}", anchor.replace(' ', "-")), "{title}");
        let also = if aliases.is_empty() { String::new() } else { format!(", also {aliases}") };
        let (line, facts) = section(*preset);
        assert_eq!(line, format!("[`{constant}`](crate::provider::{constant}){also}"));
        assert!(facts["[Source](https"].starts_with("//"), "{title}");
        assert!(!facts["Key"].is_empty(), "{title}");
        let labels =
            "Key Type Handshake Retries Retention Methods Bodies Response Note [Source](https";
        let more = ["Handshake, answered by the layer", "Not confirmed"];
        for label in facts.keys() {
            assert!(labels.split(' ').chain(more).any(|known| known == *label), "{title}: {label}");
        }
    }
}

#[test]
fn cells_of_the_table_are_short_and_true() {
    for preset in provider::ALL {
        let [sender, key, signed, retries] = row(*preset);
        for cell in [sender, key, signed, retries] {
            let shown = cell.split_once("](").map_or(cell.len(), |(text, rest)| {
                text.len() + rest.split_once(')').map_or(0, |(_, rest)| rest.len())
            });
            assert!(shown <= LONGEST_CELL, "{preset:?}: {cell}");
        }
        // A key of one part.
        let part = preset.key().map(|part| format!("{part:?}")).unwrap_or_default();
        let quoted = |part: &str| format!("`{}`", part.trim_end_matches(')'));
        let header = part.strip_prefix("header(").map(|part| format!("header {}", quoted(part)));
        if let Some(only) = header.or(part.strip_prefix("json(").map(quoted)) {
            assert_eq!(key.to_lowercase(), only, "{preset:?}");
            assert_eq!(fact(*preset, "Key").unwrap(), key, "{preset:?}");
        }
        let is_token = format!("{:?}", preset.scheme()).contains("proof: Token");
        let expected = match (preset.scheme(), preset.signed_id() == Some(true)) {
            (None, _) => "[check it yourself]",
            (Some(_), true) => "yes",
            (Some(_), false) if is_token => "**nothing**: a token",
            (Some(_), false) => "**not the id**",
        };
        assert_eq!(signed, expected, "{preset:?}");
        let expected = match &*body_and_retries(preset).1 {
            "Automatic" => "yes",
            "ConnectionFailure" => "**no status**",
            "Never" => "**never**",
            _ => "not documented",
        };
        assert_eq!(retries, expected, "{preset:?}");
    }
}

#[test]
fn section_has_the_facts_of_each_preset() {
    for preset in provider::ALL {
        let fact = |label| fact(*preset, label).unwrap_or_default();
        let (largest_body, retries) = body_and_retries(preset);
        let starts =
            ["**no status**, only failed connections, ", "**never**, ", "not documented, "];
        let start = match &*retries {
            "Automatic" => None,
            "ConnectionFailure" => Some(0),
            "Never" => Some(1),
            _ => Some(2),
        };
        let retries = fact("Retries");
        assert!(!retries.is_empty(), "{preset:?}");
        assert_eq!(starts.iter().position(|it| retries.starts_with(it)), start, "{preset:?}");
        assert_eq!(retries.contains(INBOX), matches!(start, Some(0 | 1)), "{preset:?}");
        let retention = fact("Retention");
        let stated = retention.split([',', '(']).next().unwrap().trim();
        assert_eq!(stated, duration(preset.retention_floor()), "{preset:?}");
        let days = preset.retention_floor().as_secs() / 86_400;
        assert!(!retention.contains("(estimate)") || days == 7 || days == 1, "{preset:?}");
        let by_get = preset.methods().contains(&Method::GET);
        assert_eq!(fact("Methods"), if by_get { "POST, GET" } else { "" }, "{preset:?}");
        // Without a largest body that is documented, the limit is the default.
        let bodies = fact("Bodies");
        let stated = bodies.strip_prefix("up to ").and_then(|rest| rest.split_once(" MiB ("));
        let bytes = stated.map(|(mib, _)| mib.parse::<usize>().unwrap() * 1024 * 1024);
        assert_eq!(bytes, largest_body, "{preset:?}");
        let others = ["", "below 2 MiB ([", "not documented; "];
        let is_other = bodies.is_empty() || others[1..].iter().any(|it| bodies.starts_with(it));
        assert_ne!(is_other, bytes.is_some(), "the largest body of {preset:?}");
        let has_source = bodies.contains("](https://");
        assert!(has_source || bytes.is_none() && !bodies.starts_with(others[1]), "{preset:?}");
    }
}

/// The answers are those of `verify::echo`.
#[test]
fn section_names_the_echo_of_each_preset_that_has_one() {
    for preset in provider::ALL {
        let constant = preset.name().to_uppercase().replace('-', "_");
        let echo = match (preset.echo(None), preset.echo(Some("secret"))) {
            (Ok(_), _) => Some("None"),
            (_, Ok(_)) => Some("Some("),
            _ => None,
        };
        let handshake = fact(*preset, "Handshake").unwrap_or_default();
        let Some(argument) = echo else {
            assert!(!handshake.contains(".echo("), "{preset:?}");
            continue;
        };
        assert!(handshake.contains(&format!("[`{constant}.echo({argument}")), "{preset:?}");
    }
}

/// Also of senders without a preset.
#[test]
fn sender_that_never_retries_gets_an_inbox() {
    let lines = PAGE.lines().filter(|line| line.starts_with("- **"));
    let never: Vec<_> = lines.filter(|line| line.contains("**never** retries")).collect();
    assert!(never.len() >= 2, "have the words changed?");
    assert!(never.iter().all(|line| line.contains(INBOX)), "{never:#?}");
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
