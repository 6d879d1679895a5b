//! `GET /`: a page that shows what the layer does, and buttons that deliver events.
//!
//! The page is HTML without a script, and refreshes itself. The outcomes come from the layer's log
//! records ([`records`]), the events in flight from the store and from the handlers of this process
//! ([`running`]). The buttons send requests through the receiver's own router ([`attempts`]).

mod attempts;
pub(crate) mod guard;
pub(crate) mod records;
pub(crate) mod running;
mod style;
mod view;

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use std::{env, process};

use axum::extract::{Query, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY};
use axum::http::{HeaderName, StatusCode};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Form, Router};
use serde::Deserialize;
use tokio::time::timeout;
use tower_dedup::adapter::maintenance::{Entry, KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::testing::Fault;
use tower_dedup::{DedupKey, Mode, provider};
use tower_dedup_inbox::{Count, Inbox};
use tower_http::csrf::CsrfLayer;

use crate::effects::Effects;
use crate::shared::in_one_line;
use attempts::{Attempts, Button};
use records::Records;
use running::Running;

/// The time limit of a call to the store, because a silent connection never replies.
const BOUND: Duration = Duration::from_secs(2);
/// How many keys the page lists in each state.
const LISTED: u32 = 20;
/// How many portions of the store one view of the page reads at most.
const PORTIONS: usize = 5;

/// For how long a button takes the store away.
const AWAY: Duration = Duration::from_secs(20);

/// Sets the fault of each call of the layers to the store.
pub(crate) type Faults = Arc<dyn Fn(Fault) + Send + Sync>;

/// What the page shows.
#[derive(Clone)]
pub(crate) struct Page {
    pub(crate) store: Arc<dyn MaintenanceAdapter>,
    pub(crate) faults: Faults,
    pub(crate) effects: Effects,
    pub(crate) inbox: Option<Inbox>,
    pub(crate) records: Records,
    pub(crate) running: Running,
    pub(crate) setup: Setup,
}

/// How the receiver was started, in words. The URL of the store may have a password.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) store: &'static str,
    pub(crate) ledger: &'static str,
    pub(crate) mode: Mode,
    /// The secret that signs the events of the buttons, if the receiver verifies them.
    pub(crate) secret: Option<Arc<str>>,
}

#[derive(Clone)]
struct Shown {
    page: Page,
    attempts: Attempts,
    /// When the store comes back.
    back_at: Arc<Mutex<Option<Instant>>>,
}

impl Page {
    /// Returns the routes of the page. `webhooks` is the router that the buttons deliver to.
    pub(crate) fn routes(self, webhooks: Router) -> Router {
        const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; \
             base-uri 'none'; frame-ancestors 'none'";
        let headers: [(HeaderName, &str); 2] =
            [(CACHE_CONTROL, "no-store"), (CONTENT_SECURITY_POLICY, POLICY)];
        let attempts = Attempts::new(webhooks, self.setup.secret.clone(), self.inbox.is_some());
        let shown = Shown { page: self, attempts, back_at: Arc::default() };
        Router::new()
            .route("/", get(async move |state, query| (headers, show(state, query).await)))
            .route("/try", post(press))
            // A foreign site must not press the buttons.
            .layer(CsrfLayer::new())
            .with_state(shown)
    }
}

/// The query of the page. Without an `id`, the page refreshes itself.
#[derive(Debug, Deserialize)]
struct LookUp {
    id: Option<String>,
    namespace: Option<String>,
}

async fn show(State(shown): State<Shown>, Query(query): Query<LookUp>) -> impl IntoResponse {
    let html = match query.id {
        None => shown.overview().await,
        Some(id) => {
            let namespace = query.namespace;
            let default = || provider::STANDARD_WEBHOOKS.name().to_owned();
            shown.look_up(&namespace.unwrap_or_else(default), &id).await
        }
    };
    Html(html)
}

#[derive(Debug, Deserialize)]
struct Pressed {
    button: Button,
    #[serde(default)]
    id: String,
}

/// Sends the deliveries of a button, and shows the page again.
async fn press(
    State(shown): State<Shown>,
    Form(Pressed { button, id }): Form<Pressed>,
) -> Result<Response, StatusCode> {
    shown.attempts.press(button, &id).await.ok_or(StatusCode::BAD_REQUEST)?;
    match button {
        Button::StoreAway => shown.take_store_away(),
        Button::Crash => {
            tokio::spawn(crash());
            return Ok(Html(view::crashed().into_string()).into_response());
        }
        _ => {}
    }
    Ok(Redirect::to("/").into_response())
}

/// Ends every handler where it is, as SIGKILL does, and starts this program again with its arguments.
async fn crash() {
    // The handler runs, and the browser has its answer.
    tokio::time::sleep(Duration::from_millis(500)).await;
    #[cfg(unix)]
    if let Ok(program) = env::current_exe() {
        use std::os::unix::process::CommandExt;

        // Returns only if it fails. A process keeps its id, and nothing else.
        let error = process::Command::new(program).args(env::args_os().skip(1)).exec();
        tracing::error!(error = in_one_line(&error), "the receiver does not start again");
    }
    process::abort();
}

/// An event in flight or lapsed.
#[derive(Debug)]
struct Flight {
    key: DedupKey,
    event_type: Option<String>,
    state: String,
    attempts: u32,
    age: Duration,
}

/// The events in flight or lapsed.
#[derive(Debug, Default)]
struct Flights {
    events: Vec<Flight>,
    /// Whether the store has more keys than one view of the page reads.
    is_part: bool,
    error: Option<String>,
}

impl Shown {
    fn take_store_away(&self) {
        (self.page.faults)(Fault::Fail);
        let back_at = Instant::now() + AWAY;
        *self.back_at() = Some(back_at);
        let this = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(back_at.into()).await;
            // The button may have been pressed again.
            let mut latest = this.back_at();
            if *latest == Some(back_at) {
                (this.page.faults)(Fault::None);
                *latest = None;
            }
        });
    }

    fn back_at(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.back_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn overview(&self) -> String {
        let sent = self.attempts.list();
        let last = sent.first().and_then(|sent| attempts::key(&sent.id));
        let effects = async { Some(self.effects_of(last.as_ref()?).await) };
        let (flights, effects, inbox) = tokio::join!(self.flights(), effects, self.inbox());
        view::overview(&view::Overview {
            setup: &self.page.setup,
            away: self.back_at().map(|back_at| back_at.saturating_duration_since(Instant::now())),
            sent: &sent,
            effects,
            flights: &flights,
            inbox: inbox.as_ref(),
            records: &self.page.records.lock(),
        })
        .into_string()
    }

    /// Returns what waits and what is parked; `None` without an inbox.
    async fn inbox(&self) -> Option<Result<Vec<Count>, String>> {
        Some(bounded(self.page.inbox.as_ref()?.count()).await)
    }

    async fn effects_of(&self, key: &DedupKey) -> Result<i64, String> {
        bounded(self.page.effects.count(key)).await
    }

    /// Returns the events that the store lists as in flight or lapsed, and those whose handlers run in
    /// this process: a store may have no list, and a transactional ledger has not committed their keys.
    async fn flights(&self) -> Flights {
        let mut flights = Flights::default();
        for state in [KeyState::InFlight, KeyState::Lapsed] {
            if let Err(error) = self.list(state, &mut flights).await {
                flights.error = Some(error);
                break;
            }
        }
        for run in self.page.running.list() {
            if flights.events.iter().all(|flight| flight.key != run.key) {
                flights.events.push(Flight {
                    key: run.key,
                    event_type: None,
                    state: "handler runs here".to_owned(),
                    attempts: run.attempt,
                    age: run.since.elapsed(),
                });
            }
        }
        flights
    }

    /// Adds the first keys in this state; none if the store has no list.
    async fn list(&self, state: KeyState, flights: &mut Flights) -> Result<(), String> {
        if !self.page.store.abilities().inspection {
            return Ok(());
        }
        let mut filter = ListFilter::default();
        filter.state = Some(state);
        let most = flights.events.len() + LISTED as usize;
        let mut after = None;
        for _ in 0..PORTIONS {
            let portion = bounded(self.page.store.list(&filter, after.as_deref(), LISTED)).await?;
            flights.events.extend(portion.keys.into_iter().map(|(key, entry)| Flight {
                key,
                event_type: entry.event_type,
                state: state.to_string(),
                attempts: entry.attempts,
                age: since(entry.first_seen_at),
            }));
            after = portion.next;
            if after.is_none() || flights.events.len() >= most {
                break;
            }
        }
        flights.is_part |= after.is_some();
        Ok(())
    }

    async fn look_up(&self, namespace: &str, id: &str) -> String {
        let facts = match DedupKey::new(namespace, id) {
            _ if id.is_empty() => None,
            Err(error) => Some(Err(in_one_line(&error))),
            Ok(key) => Some(self.facts(&key).await),
        };
        view::look_up(namespace, id, facts.as_ref(), &self.page.records.lock()).into_string()
    }

    /// Returns what the store knows about a key: names and values.
    async fn facts(&self, key: &DedupKey) -> Result<Vec<(&'static str, String)>, String> {
        let entry = bounded(self.page.store.get(key)).await?;
        let effects = self.effects_of(key).await?;
        let mut facts = match entry {
            None => vec![("state", "unknown: the next delivery runs".to_owned())],
            Some(entry) => facts_of(&entry),
        };
        facts.push(("effects", effects.to_string()));
        Ok(facts)
    }
}

fn facts_of(entry: &Entry) -> Vec<(&'static str, String)> {
    let state = match (entry.lease_until, entry.completed_at) {
        (Some(lease_until), _) => match lease_until.duration_since(SystemTime::now()) {
            Ok(left) => format!("in flight; the lease lapses in {}", view::duration(left)),
            Err(ago) => format!("lapsed {} ago", view::duration(ago.duration())),
        },
        (_, Some(completed_at)) => {
            format!("complete since {}", view::duration(since(completed_at)))
        }
        _ => "released: its handler failed, and the next delivery runs".to_owned(),
    };
    let mut facts = vec![
        ("state", state),
        ("attempts", entry.attempts.to_string()),
        (
            "first seen",
            format!(
                "{} UTC, {} ago",
                view::clock(entry.first_seen_at),
                view::duration(since(entry.first_seen_at))
            ),
        ),
    ];
    let left = entry.expires_at.duration_since(SystemTime::now()).unwrap_or_default();
    facts.push(("expires", format!("in {}", view::duration(left))));
    let payload = entry.stored.as_ref().and_then(|stored| stored.payload_sha256);
    facts.extend(payload.map(|digest| {
        let hex = digest[..8].iter().map(|byte| format!("{byte:02x}"));
        ("payload", format!("SHA-256 {}…", hex.collect::<String>()))
    }));
    facts.extend(entry.event_type.clone().map(|event_type| ("type", event_type)));
    facts
}

/// Returns the time since `then`. The store's clock may be ahead.
fn since(then: SystemTime) -> Duration {
    then.elapsed().unwrap_or_default()
}

/// Runs a call to the store within [`BOUND`]. The error is in one line.
async fn bounded<T, E>(call: impl Future<Output = Result<T, E>>) -> Result<T, String>
where
    E: std::error::Error,
{
    match timeout(BOUND, call).await {
        Ok(reply) => reply.map_err(|error| in_one_line(&error)),
        Err(_) => Err("the store timed out".to_owned()),
    }
}
