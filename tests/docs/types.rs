//! The types that a program names first have an example on their page of the documentation.

use crate::guide::sources;

/// Beside the adapters and layers.
const TYPES: [&str; 7] =
    ["DedupHandle", "DedupTx", "Deduplicator", "Delivery", "KeyExtractor", "Replay", "Verifier"];

#[test]
fn pages_of_types_have_an_example() {
    let mut seen = Vec::new();
    for (file, source) in sources("src") {
        let mut has_example = false;
        for line in source.lines() {
            if let Some(name) = line.strip_prefix("pub struct ") {
                let end = name.find(|letter: char| !letter.is_alphanumeric());
                let name = &name[..end.unwrap_or(name.len())];
                let is_store_or_layer = name.ends_with("Adapter") || name.ends_with("Layer");
                if is_store_or_layer || TYPES.contains(&name) {
                    assert!(has_example, "{name} has no example: {}", file.display());
                    seen.push(name.to_owned());
                }
            }
            let is_doc = line.starts_with("///");
            has_example =
                (has_example || line.starts_with("/// ```")) && (is_doc || line.starts_with('#'));
        }
    }
    assert!(TYPES.iter().all(|name| seen.iter().any(|seen| seen == name)), "{seen:?}");
    assert!(seen.len() >= TYPES.len() + 7, "adapters and layers: {seen:?}");
}
