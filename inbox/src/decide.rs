//! What happens to a row after a run.
//!
//! 1. A row whose sender was told *stored* is deleted only if the ledger says that its events are
//!    complete. No status and no answer to a redelivery deletes it.
//! 2. If the sender has only got a failure, the row may end with that failure, as without an inbox.
//! 3. Each time the handler ends, an attempt is counted. No attempt is counted if another delivery
//!    runs the event, if the end is not known, or if the row reached no layer.

use std::any::Any;
use std::time::Duration;

use http::{Response, StatusCode};
use tower_dedup::DeliveryEnd;

use crate::row::{Counts, Fate, Parked};
use crate::settings::Settings;

/// How a run has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The service responded.
    Response { end: Option<DeliveryEnd>, status: StatusCode },
    /// It returned an error, or panicked.
    Failed,
    /// The runtime has dropped its task.
    Dropped,
}

/// How often the row has run, and what its sender knows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct History {
    pub(crate) attempts: i64,
    /// The sender was told *stored*.
    pub(crate) answered: bool,
    pub(crate) is_redelivery: bool,
}

/// How soon a row runs again that another delivery runs, or whose state is not known.
pub(crate) const SOON: Duration = Duration::from_secs(5);

impl End {
    pub(crate) fn of<B, E>(called: &Result<Result<Response<B>, E>, Box<dyn Any + Send>>) -> Self {
        match called {
            Ok(Ok(response)) => {
                let end = response.extensions().get().copied();
                Self::Response { end, status: response.status() }
            }
            Ok(Err(_)) | Err(_) => Self::Failed,
        }
    }

    /// Returns what an operator reads.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Response { end: Some(end), status } => format!("{} {end:?}", status.as_u16()),
            Self::Response { end: None, status } => status.as_u16().to_string(),
            Self::Failed => "an error or a panic".to_owned(),
            Self::Dropped => "the runtime ended".to_owned(),
        }
    }
}

/// Returns the delay, ± 20 %.
pub(crate) fn spread(delay: Duration) -> Duration {
    delay.mul_f64(rand::random_range(0.8..1.2))
}

/// The row is due after the delay, ± 20 %.
pub(crate) fn again(counts: Counts, delay: Duration) -> Fate {
    Fate::Due { after: spread(delay), counts }
}

/// Returns the next state of the row.
pub(crate) fn decide(settings: &Settings, end: End, history: History) -> Fate {
    let History { attempts, answered, is_redelivery } = history;
    let failed = || {
        let delay = settings.delay(attempts);
        delay.map_or(Fate::Park(Parked::Failed), |delay| again(Counts::Attempt, delay))
    };
    let (end, status) = match end {
        End::Response { end, status } => (end, status.as_u16()),
        End::Failed => return failed(),
        End::Dropped => return again(Counts::Nothing, SOON),
    };
    match end {
        Some(DeliveryEnd::Complete) => Fate::Delete,
        Some(DeliveryEnd::Mismatch) if answered => Fate::Park(Parked::Mismatch),
        Some(DeliveryEnd::Mismatch) => Fate::Delete,
        Some(DeliveryEnd::Released) => match status {
            400 | 405 | 410 | 413 | 414 | 415 | 422 if !answered => Fate::Park(Parked::Refused),
            401 | 403 if !answered => Fate::Delete,
            _ => failed(),
        },
        Some(DeliveryEnd::InFlight) => again(Counts::Nothing, SOON),
        // Undecided, or nothing at all.
        _ if !answered && !is_redelivery => Fate::Delete,
        _ => again(Counts::Nothing, settings.delay(attempts).unwrap_or(SOON)),
    }
}

/// Returns what becomes of a row whose redelivery has reached no layer with its keys. A handler
/// without the inbox may have run: then the row does not run again by itself.
pub(crate) fn misrouted(settings: &Settings, ran_nothing: bool, earlier: i64) -> Fate {
    match settings.delay(earlier) {
        Some(delay) if ran_nothing => again(Counts::Misrouted, delay),
        _ => Fate::Park(Parked::Misrouted),
    }
}

/// Returns `true` for the answers of routers and of layers that have called no handler.
pub(crate) fn is_of_no_handler(status: StatusCode) -> bool {
    matches!(status.as_u16(), 401 | 403 | 404 | 405 | 408 | 413 | 429 | 503)
}
