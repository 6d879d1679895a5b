//! The serialized form of an [`Entry`] and of a [`KeyState`].

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Serialize, Serializer};

use super::inspection::KeyState;
use super::replies::{Entry, EntryState};

#[derive(Serialize)]
struct EntryForm<'a> {
    state: KeyState,
    event_type: Option<&'a str>,
    attempts: u32,
    takeover: bool,
    first_seen_at: String,
    expires_at: String,
    lease_until: Option<String>,
    completed_at: Option<String>,
    payload_sha256: Option<String>,
    response: Option<ResponseForm>,
    response_is_unreadable: bool,
}

#[derive(Serialize)]
struct ResponseForm {
    status: u16,
    bytes: usize,
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (state, lease_until, completed_at) = match self.state {
            EntryState::InFlight { lease_until } => {
                let is_live = lease_until > SystemTime::now();
                let state = if is_live { KeyState::InFlight } else { KeyState::Lapsed };
                (state, Some(utc(lease_until)), None)
            }
            EntryState::Released => (KeyState::Released, None, None),
            EntryState::Complete { completed_at } => {
                (KeyState::Complete, None, Some(utc(completed_at)))
            }
        };
        let stored = self.stored.as_deref();
        let hex = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let response = stored.and_then(|stored| stored.response.as_ref());
        let form = EntryForm {
            state,
            event_type: self.event_type.as_deref(),
            attempts: self.attempts,
            takeover: self.takeover,
            first_seen_at: utc(self.first_seen_at),
            expires_at: utc(self.expires_at),
            lease_until,
            completed_at,
            payload_sha256: stored.and_then(|stored| stored.payload_sha256).map(hex),
            response: response.map(|response| ResponseForm {
                status: response.status.as_u16(),
                bytes: response.body.len(),
            }),
            response_is_unreadable: self.response_is_unreadable,
        };
        form.serialize(serializer)
    }
}

impl Serialize for KeyState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns a time in whole seconds. A time that no calendar has becomes the first or last that one has.
fn utc(time: SystemTime) -> String {
    let time = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_secs())
            .ok()
            .and_then(|seconds| DateTime::from_timestamp(seconds, 0))
            .unwrap_or(DateTime::<Utc>::MAX_UTC),
        Err(_) => DateTime::UNIX_EPOCH,
    };
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http::{HeaderMap, StatusCode};
    use serde_json::{Value, json};

    use super::super::inspection::Stats;
    use super::super::stored::{StoredData, StoredResponse};
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn form(entry: &Entry) -> Value {
        serde_json::to_value(entry).unwrap()
    }

    #[test]
    fn entry_is_one_flat_object() {
        let body = Bytes::from_static(b"private");
        let response = StoredResponse::new(StatusCode::CREATED, HeaderMap::new(), body);
        let stored = StoredData::new(Some([0xab; 32]), Some(response.into()));
        let entry =
            Entry::new(EntryState::Complete { completed_at: at(60) }, at(0), at(951_782_400))
                .with_attempts(2, true)
                .with_event_type("push")
                .with_stored(stored.into());
        let expected = json!({
            "state": "complete",
            "event_type": "push",
            "attempts": 2,
            "takeover": true,
            "first_seen_at": "1970-01-01T00:00:00Z",
            "expires_at": "2000-02-29T00:00:00Z",
            "lease_until": null,
            "completed_at": "1970-01-01T00:01:00Z",
            "payload_sha256": "ab".repeat(32),
            "response": { "status": 201, "bytes": 7 },
            "response_is_unreadable": false,
        });
        assert_eq!(form(&entry), expected);
    }

    #[test]
    fn lease_that_has_ended_has_lapsed() {
        let lease = |lease_until| Entry::new(EntryState::InFlight { lease_until }, at(0), at(60));
        let lapsed = form(&lease(at(30)));
        assert_eq!(
            (&lapsed["state"], &lapsed["lease_until"]),
            (&json!("lapsed"), &json!("1970-01-01T00:00:30Z"))
        );
        let live = lease(SystemTime::now() + Duration::from_secs(60));
        assert_eq!(form(&live)["state"], "in-flight");
        let released = Entry::new(EntryState::Released, at(0), at(60));
        assert_eq!(
            (&form(&released)["state"], &form(&released)["lease_until"]),
            (&json!("failed"), &json!(null))
        );
    }

    #[test]
    fn time_outside_the_calendar_is_its_end() {
        let far = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(1 << 60)).unwrap();
        assert_eq!(utc(far), "+262142-12-31T23:59:59Z");
        assert_eq!(utc(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn statistics_name_the_states_and_the_seconds() {
        let stats = Stats { oldest_lapsed: Some(Duration::from_millis(1_900)), ..Stats::default() };
        let form = serde_json::to_value(stats).unwrap();
        assert_eq!((&form["failed"], &form["oldest_lapsed_seconds"]), (&json!(0), &json!(1)));
        assert_eq!(form["oldest_expired_seconds"], json!(null));
        assert_eq!(form.as_object().unwrap().len(), 11);
    }
}
