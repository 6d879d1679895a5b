//! [`Line`]: a key and its entry, as JSON and as text.

use serde::Serialize;
use serde_json::{Map, Value};
use tower_dedup::DedupKey;
use tower_dedup::adapter::{Entry, KeyState};

use crate::output::{Output, printable};

/// One key: what the library serializes an [`Entry`] to, after the names of the key.
#[derive(Serialize)]
pub(crate) struct Line {
    pub(crate) namespace: String,
    pub(crate) id: String,
    /// `None` for an unknown or expired key.
    pub(crate) state: Option<String>,
    #[serde(flatten)]
    entry: Map<String, Value>,
}

impl Line {
    /// `selected` is the state by which the store selected the key. Without it, this machine's clock decides
    /// whether a lease has lapsed.
    pub(crate) fn new(
        output: Output,
        key: &DedupKey,
        entry: Option<&Entry>,
        selected: Option<KeyState>,
    ) -> Self {
        let mut entry = match entry.map(serde_json::to_value) {
            Some(Ok(Value::Object(entry))) => entry,
            _ => Map::new(),
        };
        let state = entry.remove("state").as_ref().and_then(Value::as_str).map(str::to_owned);
        Self {
            namespace: key.namespace().to_owned(),
            id: output.id(key),
            state: selected.map(|state| state.to_string()).or(state),
            entry,
        }
    }

    /// Returns a member of the entry as text; `None` if it is null.
    pub(crate) fn get(&self, name: &str) -> Option<String> {
        match self.entry.get(name)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    /// Returns one line for each fact.
    pub(crate) fn text(&self) -> String {
        let Some(state) = self.state.as_deref() else { return "there is no such key".to_owned() };
        let fact = |name| self.get(name).unwrap_or_default();
        let is = |name| self.entry.get(name) == Some(&Value::Bool(true));
        let takeover = if is("takeover") { ", the last a takeover" } else { "" };
        let state = match state {
            "complete" => format!("complete since {}", fact("completed_at")),
            "in-flight" => format!("running, under a lease until {}", fact("lease_until")),
            "lapsed" => format!(
                "its lease lapsed at {}: the next delivery takes it over",
                fact("lease_until")
            ),
            "failed" => "failed: the next delivery runs it again".to_owned(),
            other => other.to_owned(),
        };
        let mut facts = vec![
            ("namespace", printable(&self.namespace)),
            ("id", printable(&self.id)),
            ("state", state),
            ("attempts", format!("{}{takeover}", fact("attempts"))),
            ("first seen", fact("first_seen_at")),
            ("expires", fact("expires_at")),
        ];
        facts.extend(self.get("event_type").map(|name| ("event type", printable(&name))));
        facts.extend(self.get("payload_sha256").map(|hex| ("payload", format!("sha256 {hex}"))));
        let response = self.entry.get("response").filter(|response| !response.is_null());
        facts.extend(response.map(|response| {
            ("response", format!("status {}, {} bytes", response["status"], response["bytes"]))
        }));
        if is("response_is_unreadable") {
            facts.push(("response", "unreadable: a replay of it answers 503".to_owned()));
        }
        let facts = facts.iter().map(|(name, value)| format!("{name:<12}{value}"));
        facts.collect::<Vec<_>>().join("\n")
    }
}
