//! `--inbox`: a delivery is stored before it is handled, and handled again until it has succeeded.

use std::error::Error;
use std::time::Duration;

use axum::routing::MethodRouter;
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::SqliteConnectOptions;
use tower_dedup::DedupLayer;
use tower_dedup::ledger::Ledger;
use tower_dedup::verify::VerifyLayer;
use tower_dedup_inbox::{Inbox, Releases};

use crate::effects::Effects;

/// Short, so that there is something to see: a day's worth is the default. Afterwards, the row is parked.
const DELAYS: [u64; 5] = [1, 2, 4, 8, 16];
/// The longest turn of a row.
const LONGEST_TURN: u64 = 3_600;

/// Opens the inbox. An empty `url` is the store's, if it is Postgres, or a file. `seconds` is how long an event of a dead
/// receiver stays with it.
pub(crate) async fn connect(
    url: &str,
    store: &str,
    seconds: Option<u64>,
) -> Result<Inbox, Box<dyn Error>> {
    let url = match url {
        "" if store.starts_with("postgres") => store,
        "" => "sqlite://inbox.db",
        url => url,
    };
    let inbox = if url.starts_with("postgres") {
        Inbox::postgres(PgPoolOptions::new().connect_lazy(url)?, "receiver")
    } else if url.starts_with("sqlite:") {
        let options: SqliteConnectOptions = url.parse()?;
        Inbox::sqlite(options.get_filename(), "receiver")
    } else {
        return Err("--inbox needs a database: sqlite://FILE or postgres://…".into());
    };
    let mut inbox = inbox.delays(DELAYS.map(Duration::from_secs));
    if let Some(seconds) = seconds {
        inbox = inbox.turn(Duration::from_secs(seconds.min(LONGEST_TURN)));
    }
    inbox.migrate().await?;
    Ok(inbox)
}

/// The layers of a route, without an inbox.
pub(crate) fn without<L: Ledger>(
    route: MethodRouter<Effects>,
    dedup: DedupLayer<L>,
    verify: Option<VerifyLayer>,
) -> MethodRouter<Effects> {
    let route = route.layer(dedup);
    match verify {
        // The layer added last is outermost: an unsigned request uses up no id.
        Some(verify) => route.layer(verify),
        None => route,
    }
}

/// The layers of a route, with an inbox if there is one. It verifies.
pub(crate) fn with<L: Releases>(
    inbox: Option<&Inbox>,
) -> impl Fn(MethodRouter<Effects>, DedupLayer<L>, Option<VerifyLayer>) -> MethodRouter<Effects> {
    move |route, dedup, verify| match (inbox, verify) {
        (None, verify) => without(route, dedup, verify),
        (Some(inbox), Some(verify)) => route.layer(inbox.around(dedup).verified_by(verify)),
        (Some(inbox), None) => route.layer(inbox.around(dedup)),
    }
}
