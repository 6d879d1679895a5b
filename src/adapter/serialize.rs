//! The serialized form of an [`Entry`] and of a [`KeyState`].

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::inspect::{Entry, KeyState};
use crate::key::hex;

#[derive(serde::Serialize)]
struct ResponseForm {
    status: u16,
    bytes: usize,
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = self.stored.as_deref();
        let response = stored.and_then(|stored| stored.response.as_ref());
        let response = response.map(|response| ResponseForm {
            status: response.status.as_u16(),
            bytes: response.body.len(),
        });
        let payload = stored.and_then(|stored| stored.payload_sha256).map(|digest| hex(&digest));
        let mut form = serializer.serialize_struct("Entry", 11)?;
        form.serialize_field("state", &self.state)?;
        form.serialize_field("event_type", &self.event_type)?;
        form.serialize_field("attempts", &self.attempts)?;
        form.serialize_field("takeover", &self.takeover)?;
        form.serialize_field("first_seen_at", &utc(self.first_seen_at))?;
        form.serialize_field("expires_at", &utc(self.expires_at))?;
        form.serialize_field("lease_until", &self.lease_until.map(utc))?;
        form.serialize_field("completed_at", &self.completed_at.map(utc))?;
        form.serialize_field("payload_sha256", &payload)?;
        form.serialize_field("response", &response)?;
        form.serialize_field("response_is_unreadable", &self.response_is_unreadable)?;
        form.end()
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

    use super::super::inspect::Stats;
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
        let mut entry = Entry::new(KeyState::Complete, at(0), at(951_782_400));
        entry.completed_at = Some(at(60));
        (entry.attempts, entry.takeover) = (2, true);
        entry.event_type = Some("push".to_owned());
        entry.stored = Some(stored.into());
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
    fn state_has_its_name_and_the_end_of_its_lease() {
        let mut lapsed = Entry::new(KeyState::Lapsed, at(0), at(60));
        lapsed.lease_until = Some(at(30));
        let released = Entry::new(KeyState::Released, at(0), at(60));
        for (entry, state, until) in
            [(lapsed, "lapsed", json!("1970-01-01T00:00:30Z")), (released, "released", json!(null))]
        {
            let form = form(&entry);
            assert_eq!((&form["state"], &form["lease_until"]), (&json!(state), &until));
        }
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
        assert_eq!((&form["released"], &form["oldest_lapsed_seconds"]), (&json!(0), &json!(1)));
        assert_eq!(form["oldest_expired_seconds"], json!(null));
        assert_eq!(form.as_object().unwrap().len(), 11);
    }
}
