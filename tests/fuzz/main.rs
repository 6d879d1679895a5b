//! Fuzz targets. Each compares with a reference or states a property.
#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

#[expect(dead_code, reason = "the targets take the requests, not what each must give")]
#[path = "../providers/cases.rs"]
mod cases;
mod fields;
mod fuzz;
mod input;
mod json;
mod presets;
#[allow(dead_code, reason = "`tests/keys` uses the others")]
#[path = "../keys/requests.rs"]
mod requests;
mod stored;
mod verify;

use requests::{ReadId, read, sha256};

/// Returns `true` for a text without a visible character, or with characters of which a terminal shows none.
fn is_blank(text: &str) -> bool {
    let hidden = ['\u{200b}'..='\u{200d}', '\u{2028}'..='\u{202e}', '\u{2060}'..='\u{2060}'];
    let hidden = |char| hidden.iter().any(|range| range.contains(&char));
    let shows_nothing = |char: char| {
        char.is_whitespace()
            || char.is_control()
            || hidden(char)
            || ('\u{2066}'..='\u{2069}').contains(&char)
            || char == '\u{feff}'
    };
    text.chars().all(shows_nothing)
}

/// Returns a text as an id: a reference for the rule that a long id is hashed.
fn stored_id(text: &str) -> String {
    if text.len() <= 255 { text.to_owned() } else { sha256(text.as_bytes()) }
}

/// Returns the id of a list of parts: `%` and `|` escaped, joined by `|`.
fn composed(parts: &[Option<String>]) -> String {
    let escaped = |part: &Option<String>| {
        part.as_deref().unwrap_or_default().replace('%', "%25").replace('|', "%7C")
    };
    parts.iter().map(escaped).collect::<Vec<_>>().join("|")
}
