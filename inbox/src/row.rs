//! A row of the table: what is stored of a delivery, and what a take returns of it.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, header, request};
use http_body_util::Full;
use sha2::{Digest, Sha256};
use tower_dedup::adapter::contract::Token;
use tower_dedup::key::Keys;

/// The newest format of a row that this version writes and reads. A row of a newer format is left
/// alone.
pub(crate) const FORMAT: i16 = 1;

/// The headers that no row has: secrets of the client, and headers of one connection.
const NEVER_STORED: [HeaderName; 10] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::TE,
    header::TRAILER,
    header::UPGRADE,
    header::EXPECT,
    HeaderName::from_static("keep-alive"),
];

/// Parts of the names of headers that differ by attempt: the row's key does not cover them. One
/// that is missing here costs a second row of the event, which ends as a duplicate.
const OF_ONE_ATTEMPT: [&str; 9] = [
    "signature",
    "timestamp",
    "retry",
    "attempt",
    "trace",
    "request-id",
    "forwarded",
    "ray",
    "span",
];
const OF_ONE_ATTEMPT_WHOLE: [&str; 6] =
    ["date", "via", "host", "user-agent", "content-length", "baggage"];

/// A delivery to be stored.
#[derive(Debug, Clone)]
pub(crate) struct NewRow {
    pub(crate) key: [u8; 32],
    pub(crate) namespace: String,
    /// The [identities] of the events.
    pub(crate) keys: String,
    pub(crate) event_type: Option<String>,
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<u8>,
    pub(crate) body: Bytes,
    /// The name of the verification that the delivery has passed.
    pub(crate) verified: Option<String>,
    /// The turn of the run that follows at once; `None` if the loop runs the row.
    pub(crate) turn: Option<Token>,
}

impl NewRow {
    /// Makes the row of a request with these events.
    pub(crate) fn new(
        service: &str,
        namespace: &str,
        keys: &Keys,
        head: &request::Parts,
        body: &Bytes,
        verified: Option<String>,
    ) -> Self {
        let target = target(head);
        let stored: Vec<_> =
            head.headers.iter().filter(|(name, value)| is_stored(name, value)).collect();
        let mut key = Sha256::new();
        let mut part = |bytes: &[u8]| {
            key.update((bytes.len() as u64).to_be_bytes());
            key.update(bytes);
        };
        part(service.as_bytes());
        let keys_text = identities(keys);
        part(keys_text.as_bytes());
        part(head.method.as_str().as_bytes());
        part(target.as_bytes());
        part(body);
        for (name, value) in stored.iter().filter(|(name, _)| !is_of_one_attempt(name)) {
            part(name.as_str().as_bytes());
            part(value.as_bytes());
        }
        let first = keys.events().first();
        Self {
            key: key.finalize().into(),
            namespace: namespace.to_owned(),
            keys: keys_text,
            event_type: first.and_then(|event| event.event_type()).map(str::to_owned),
            method: head.method.as_str().to_owned(),
            target,
            headers: encode(stored),
            body: body.clone(),
            verified,
            turn: None,
        }
    }

    /// Returns about how many bytes a statement with this row has.
    pub(crate) fn size(&self) -> usize {
        self.body.len() + self.headers.len() + self.target.len() + self.keys.len() + 200
    }
}

/// A row that this process runs.
#[derive(Debug, Clone)]
pub(crate) struct TakenRow {
    pub(crate) at: Place,
    pub(crate) namespace: String,
    pub(crate) keys: String,
    pub(crate) attempts: i64,
    pub(crate) misrouted: i64,
    /// The sender has got a 2xx for it.
    pub(crate) answered: bool,
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<u8>,
    /// `None` if it is large: then it is read for its run alone.
    pub(crate) body: Option<Bytes>,
    pub(crate) verified: Option<String>,
}

impl TakenRow {
    /// Makes the request again. `None` for a row that cannot be read.
    pub(crate) fn request(&self, body: Bytes) -> Option<Request<Full<Bytes>>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::from_bytes(self.method.as_bytes()).ok()?;
        *request.uri_mut() = self.target.parse().ok()?;
        *request.headers_mut() = decode(&self.headers)?;
        Some(request)
    }
}

/// A row, in the version and the turn of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) seq: i64,
    pub(crate) version: i64,
    pub(crate) turn: Token,
}

/// The state of a row after a run.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) at: Place,
    pub(crate) fate: Fate,
    /// The sender gets a 2xx for it. Its version rises.
    pub(crate) answered: bool,
    /// The last answer, to be read by people.
    pub(crate) last: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Deleted, if it still has this version. Otherwise it is due.
    Delete,
    /// It runs on.
    Keep,
    /// Due after this time.
    Due {
        after: Duration,
        counts: Counts,
    },
    Park(Parked),
}

impl Fate {
    /// Returns `true` if the row stays for the event: its sender is told *stored* in place of the
    /// response.
    pub(crate) const fn is_stored(self) -> bool {
        !matches!(self, Self::Delete | Self::Park(Parked::Refused))
    }
}

/// The columns of a change, for every database.
impl Change {
    /// Returns after how many milliseconds the row is due; `None` if it runs on or waits for a
    /// person. A row that is not deleted because of its version is due now.
    pub(crate) fn due_after(&self) -> Option<i64> {
        match self.fate {
            Fate::Due { after, .. } => Some(millis(after)),
            Fate::Delete => Some(0),
            Fate::Keep | Fate::Park(_) => None,
        }
    }

    /// Returns 1 if the change counts as this.
    pub(crate) fn counts(&self, as_this: Counts) -> i64 {
        let counts = match self.fate {
            Fate::Due { counts, .. } => counts,
            Fate::Park(Parked::Failed | Parked::Refused) => Counts::Attempt,
            _ => Counts::Nothing,
        };
        i64::from(counts == as_this)
    }

    pub(crate) fn parked(&self) -> Option<&'static str> {
        match self.fate {
            Fate::Park(reason) => Some(reason.as_str()),
            _ => None,
        }
    }
}

/// How a run is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    Nothing,
    /// The handler has ended.
    Attempt,
    /// No handler ran.
    Misrouted,
}

/// Why a row waits for a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Parked {
    /// The handler has failed at every attempt.
    Failed,
    /// The process died, or lost its turn, at the last attempt.
    Died,
    /// The handler answered the sender's own delivery with a status by which it refuses such a
    /// request for good: 400, 405, 410, 413, 414, 415 or 422. There is no alert. The row is deleted
    /// a week later.
    Refused,
    /// The layer refuses another body under the id of a complete event.
    Mismatch,
    /// The redelivery reached no layer with the events of the row.
    Misrouted,
    /// The row is too old to run: the store may have forgotten its key.
    Expired,
    /// The row cannot be read.
    Unreadable,
}

impl Parked {
    pub(crate) const ALL: [Self; 7] = [
        Self::Failed,
        Self::Died,
        Self::Refused,
        Self::Mismatch,
        Self::Misrouted,
        Self::Expired,
        Self::Unreadable,
    ];

    /// Returns the reason as it is written in the table, the records and the metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Died => "died",
            Self::Refused => "refused",
            Self::Mismatch => "mismatch",
            Self::Misrouted => "misrouted",
            Self::Expired => "expired",
            Self::Unreadable => "unreadable",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
    }
}

/// Returns the identities of all events, `namespace`, tab and `id` in a line: a redelivery has to
/// have the same.
pub(crate) fn identities(keys: &Keys) -> String {
    let mut all = String::new();
    for event in keys.events() {
        // A content identity is the body's digest.
        for key in [Some(event.key()), event.alias()].into_iter().flatten() {
            all.extend([key.namespace(), "\t", key.id(), "\n"]);
        }
    }
    all
}

/// Returns the target of the request as the client sent it, without scheme and authority.
fn target(head: &request::Parts) -> String {
    #[cfg(feature = "axum")]
    let uri = head.extensions.get::<axum::extract::OriginalUri>().map_or(&head.uri, |it| &it.0);
    #[cfg(not(feature = "axum"))]
    let uri = &head.uri;
    uri.path_and_query().map_or_else(|| "/".to_owned(), |it| it.as_str().to_owned())
}

fn is_stored(name: &HeaderName, value: &HeaderValue) -> bool {
    !value.is_sensitive() && !NEVER_STORED.contains(name) && !name.as_str().starts_with("proxy-")
}

fn is_of_one_attempt(name: &HeaderName) -> bool {
    let name = name.as_str();
    OF_ONE_ATTEMPT.iter().any(|part| name.contains(part)) || OF_ONE_ATTEMPT_WHOLE.contains(&name)
}

/// Writes headers as HTTP/1 does, a line each. No value has a line feed.
fn encode<'h>(headers: impl IntoIterator<Item = (&'h HeaderName, &'h HeaderValue)>) -> Vec<u8> {
    let mut text = Vec::new();
    for (name, value) in headers {
        text.extend_from_slice(name.as_str().as_bytes());
        text.extend_from_slice(b": ");
        text.extend_from_slice(value.as_bytes());
        text.push(b'\n');
    }
    text
}

fn decode(text: &[u8]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let value = line.get(colon + 2..)?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        headers.append(name, HeaderValue::from_bytes(value).ok()?);
    }
    Some(headers)
}

/// Returns a number as the databases take it.
pub(crate) fn number(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Returns whole milliseconds.
pub(crate) fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX / 1_000_000)
}
