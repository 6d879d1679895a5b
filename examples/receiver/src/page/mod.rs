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
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::{Query, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Redirect};
use axum::routing::{get, post};
use axum::{Form, Router};
use serde::Deserialize;
use tokio::time::timeout;
use tower_dedup::adapter::inspect::{Entry, KeyState, ListFilter, MaintenanceAdapter};
use tower_dedup::{DedupKey, Mode, provider};
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

/// What the page shows.
#[derive(Clone)]
pub(crate) struct Page {
    pub(crate) store: Arc<dyn MaintenanceAdapter>,
    pub(crate) effects: Effects,
    pub(crate) records: Records,
    pub(crate) running: Running,
    pub(crate) setup: Setup,
}

/// How the receiver was started, in words. The URL of the store may have a password.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) store: &'static str,
    pub(crate) ledger: &'static str,
    pub(crate) mode: Mode,
    /// Whether the events of the buttons have to be signed, which they are not.
    pub(crate) is_verified: bool,
}

#[derive(Clone)]
struct Shown {
    page: Page,
    attempts: Attempts,
}

impl Page {
    /// Returns the routes of the page. `webhooks` is the router that the buttons deliver to.
    pub(crate) fn routes(self, webhooks: Router) -> Router {
        const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; \
             base-uri 'none'; frame-ancestors 'none'";
        let headers: [(HeaderName, &str); 2] =
            [(CACHE_CONTROL, "no-store"), (CONTENT_SECURITY_POLICY, POLICY)];
        let shown = Shown { page: self, attempts: Attempts::new(webhooks) };
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
    ([(CONTENT_TYPE, "text/html; charset=utf-8")], html)
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
    Form(pressed): Form<Pressed>,
) -> Result<Redirect, StatusCode> {
    let pressed = shown.attempts.press(pressed.button, &pressed.id).await;
    pressed.map(|()| Redirect::to("/")).ok_or(StatusCode::BAD_REQUEST)
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
    async fn overview(&self) -> String {
        let sent = self.attempts.list();
        let last = sent.first().and_then(|sent| attempts::key(&sent.id));
        let effects = async { Some(self.effects_of(last.as_ref()?).await) };
        let (flights, effects) = tokio::join!(self.flights(), effects);
        view::overview(&view::Overview {
            setup: &self.page.setup,
            sent: &sent,
            effects,
            flights: &flights,
            records: &self.page.records.lock(),
        })
        .into_string()
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
        view::look_up(namespace, id, facts.as_ref()).into_string()
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
        _ => "failed: the next delivery runs".to_owned(),
    };
    let mut facts = vec![
        ("state", state),
        ("attempts", entry.attempts.to_string()),
        ("first seen", format!("{} ago", view::duration(since(entry.first_seen_at)))),
    ];
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
