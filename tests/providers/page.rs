//! The guide's table of presets agrees with the presets.

use std::time::Duration;

use http::Method;
use tower_dedup::internals::body_and_retries;
use tower_dedup::provider::{self, Preset};

const PAGE: &str = include_str!("../../src/docs/providers.md");
/// What a sender that never delivers again needs.
const INBOX: &str = ": [put an inbox around it](crate::guide::inbox)";

/// Returns the cells of a preset's row: the sender, the key, and what to know about it.
pub(crate) fn row(preset: Preset) -> [&'static str; 3] {
    let at = provider::ALL.iter().position(|other| *other == preset).unwrap();
    rows()[at]
}

fn rows() -> Vec<[&'static str; 3]> {
    let lines = PAGE.lines().filter(|line| line.contains("](crate::provider::"));
    let rows = lines.filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    rows.map(|row| row.split(" | ").collect::<Vec<_>>().try_into().expect("three cells")).collect()
}

#[test]
fn table_has_a_row_for_each_preset() {
    assert_eq!(rows().len(), provider::ALL.len());
    for preset in provider::ALL {
        let [sender, key, facts] = row(*preset);
        let constant = preset.name().to_uppercase().replace('-', "_");
        let aliases: String = preset.aliases().iter().map(|alias| format!(", `{alias}`")).collect();
        let (title, rest) = sender.split_once(']').unwrap();
        assert!(title.len() > 1 && !key.trim().is_empty(), "{preset:?}");
        assert_eq!(rest, format!("(crate::provider::{constant}){aliases}"));
        assert!(facts.contains(". [Source](https://"), "{preset:?}");
    }
}

#[test]
fn table_has_the_facts_of_each_preset() {
    for preset in provider::ALL {
        let [_, _, facts] = row(*preset);
        let (largest_body, retries) = body_and_retries(preset);
        let retries = match &*retries {
            "Automatic" => "retries (",
            "ConnectionFailure" => "**retries no status**, only failed connections (",
            "Never" => "**never retries** (",
            _ => "retries not documented (",
        };
        assert!(facts.starts_with(retries), "{preset:?}");
        assert_eq!(facts.contains("**retries no status**"), retries.contains("no status"));
        let loses = retries.starts_with("**never") || retries.contains("no status");
        assert_eq!(facts.contains(INBOX), loses, "{preset:?}");
        let stated = |fact: &str| facts.split_once(fact).map(|(_, rest)| rest);
        let retention = stated("; retention ").unwrap().split([';', '.', '(']).next().unwrap();
        assert_eq!(retention.trim(), duration(preset.retention_floor()), "{preset:?}");
        let is_signed = preset.signed_id() == Some(true);
        assert_ne!(stated("; **id not signed**").is_some(), is_signed, "{preset:?}");
        let by_get = preset.methods().contains(&Method::GET);
        assert_eq!(stated("; by POST, GET").is_some(), by_get, "{preset:?}");
        let body = stated("; bodies up to ").and_then(|rest| rest.split_once(" MiB ("));
        let bytes = body.map(|(mib, _)| mib.parse::<usize>().unwrap() * 1024 * 1024);
        assert_eq!(bytes, largest_body, "{preset:?}");
        assert!(body.is_none_or(|(_, source)| source.contains("](https://")), "{preset:?}");
        // A sender whose largest body nobody knows may send more than the default of the layers.
        let below_default = stated("; bodies below 2 MiB ([").is_some();
        let unknown = stated("; largest body not documented: 2 MiB").is_some();
        let count =
            usize::from(bytes.is_some()) + usize::from(below_default) + usize::from(unknown);
        assert_eq!(count, 1, "the largest body of {preset:?}");
        let days = preset.retention_floor().as_secs() / 86_400;
        assert!(stated("(estimate)").is_none() || days == 7 || days == 1, "{preset:?}");
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
