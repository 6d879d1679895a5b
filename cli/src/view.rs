//! A key and its entry, as text and as JSON.

use std::time::SystemTime;

use serde::Serialize;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{Entry, EntryState, KeyState, Rerun};

use crate::output::{Output, printable, utc};

/// One key. The body of a stored response may be personal data, so only its size is shown.
#[derive(Serialize)]
pub(crate) struct KeyView {
    pub(crate) namespace: String,
    pub(crate) id: String,
    /// `None` for an unknown or expired key.
    pub(crate) state: Option<String>,
    #[serde(flatten)]
    pub(crate) entry: Option<EntryView>,
}

#[derive(Serialize)]
pub(crate) struct EntryView {
    pub(crate) event_type: Option<String>,
    pub(crate) attempts: u32,
    takeover: bool,
    pub(crate) first_seen_at: String,
    expires_at: String,
    /// The end of the lease, of a key that is in flight or lapsed.
    lease_until: Option<String>,
    completed_at: Option<String>,
    payload_sha256: Option<String>,
    response: Option<ResponseView>,
    response_is_unreadable: bool,
    pub(crate) rerun: Option<RerunView>,
}

#[derive(Serialize)]
struct ResponseView {
    status: u16,
    bytes: usize,
    #[serde(skip)]
    status_text: String,
}

/// The audit of a rerun.
#[derive(Serialize)]
pub(crate) struct RerunView {
    pub(crate) at: String,
    pub(crate) by: String,
    reason: String,
}

impl KeyView {
    /// `state` is the state by which the store selected the key. Without it, this machine's clock decides
    /// whether a lease has lapsed.
    pub(crate) fn new(
        output: Output,
        key: &DedupKey,
        entry: Option<&Entry>,
        state: Option<KeyState>,
    ) -> Self {
        let state = entry.map(|entry| state.map_or_else(|| state_of(entry), |s| s.to_string()));
        Self {
            namespace: key.namespace().to_owned(),
            id: output.id(key),
            state,
            entry: entry.map(EntryView::new),
        }
    }

    /// Returns one line for each fact.
    pub(crate) fn text(&self) -> String {
        let Some(entry) = &self.entry else { return "there is no such key".to_owned() };
        let state = match (self.state.as_deref(), &entry.lease_until, &entry.completed_at) {
            (Some("complete"), _, Some(at)) => format!("complete since {at}"),
            (Some("in-flight"), Some(until), _) => format!("running, under a lease until {until}"),
            (Some("lapsed"), Some(until), _) => {
                format!("its lease lapsed at {until}: the next delivery takes it over")
            }
            (Some("failed"), ..) => match &entry.rerun {
                Some(_) => "failed, or a rerun was allowed: the next delivery runs".to_owned(),
                None => "failed: the next delivery runs it again".to_owned(),
            },
            (state, ..) => state.unwrap_or("unknown").to_owned(),
        };
        let takeover = if entry.takeover { ", the last a takeover" } else { "" };
        let mut lines = vec![
            ("namespace", printable(&self.namespace)),
            ("id", printable(&self.id)),
            ("state", state),
            ("attempts", format!("{}{takeover}", entry.attempts)),
            ("first seen", entry.first_seen_at.clone()),
            ("expires", entry.expires_at.clone()),
        ];
        lines.extend(entry.event_type.as_ref().map(|name| ("event type", printable(name))));
        lines.extend(entry.payload_sha256.as_ref().map(|hex| ("payload", format!("sha256 {hex}"))));
        lines.extend(entry.response.as_ref().map(|response| {
            ("response", format!("{}, {} bytes", response.status_text, response.bytes))
        }));
        if entry.response_is_unreadable {
            lines.push(("response", "unreadable: a replay of it answers 503".to_owned()));
        }
        if let Some(rerun) = &entry.rerun {
            lines.push(("rerun", rerun.text()));
        }
        let lines = lines.iter().map(|(name, value)| format!("{name:<12}{value}"));
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl EntryView {
    fn new(entry: &Entry) -> Self {
        let (lease_until, completed_at) = match entry.state {
            EntryState::InFlight { lease_until } => (Some(utc(lease_until)), None),
            EntryState::Complete { completed_at } => (None, Some(utc(completed_at))),
            _ => (None, None),
        };
        let stored = entry.stored.as_deref();
        let hex = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            event_type: entry.event_type.clone(),
            attempts: entry.attempts,
            takeover: entry.takeover,
            first_seen_at: utc(entry.first_seen_at),
            expires_at: utc(entry.expires_at),
            lease_until,
            completed_at,
            payload_sha256: stored.and_then(|stored| stored.payload_sha256).map(hex),
            response: stored.and_then(|stored| stored.response.as_ref()).map(|response| {
                ResponseView {
                    status: response.status.as_u16(),
                    bytes: response.body.len(),
                    status_text: response.status.to_string(),
                }
            }),
            response_is_unreadable: entry.response_is_unreadable,
            rerun: entry.rerun.as_ref().map(RerunView::new),
        }
    }
}

impl RerunView {
    fn new(rerun: &Rerun) -> Self {
        Self {
            at: utc(rerun.at),
            by: rerun.order.by().to_owned(),
            reason: rerun.order.reason().to_owned(),
        }
    }

    pub(crate) fn text(&self) -> String {
        format!("allowed at {} by {}: {}", self.at, printable(&self.by), printable(&self.reason))
    }
}

fn state_of(entry: &Entry) -> String {
    let state = match entry.state {
        EntryState::Complete { .. } => KeyState::Complete,
        EntryState::InFlight { lease_until } if lease_until > SystemTime::now() => {
            KeyState::InFlight
        }
        EntryState::InFlight { .. } => KeyState::Lapsed,
        EntryState::Released => KeyState::Released,
        _ => return "unknown".to_owned(),
    };
    state.to_string()
}
