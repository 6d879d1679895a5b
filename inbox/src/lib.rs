#![doc = include_str!("../README.md")]
//!
//! # What it promises
//!
//! - What was answered 2xx runs until it has succeeded, or until it is parked. **A parked event
//!   waits for a person: alert on it.** `tower-dedup inbox list`, `show`, `retry` and `drop` are
//!   for them, and so are [`Inbox::list`] and its neighbours.
//! - *Exactly once* stays the ledger's: a row is deleted when the ledger says that its events are
//!   complete, whoever has completed them. Only the ledger's word deletes a row whose sender was
//!   ever told *stored*.
//! - It is never worse than no inbox: if the table fails, does not answer within 1 s, or is full,
//!   the delivery goes to the layer without a row, and the layer's answer is the sender's. This is
//!   logged as a warning, and counted.
//! - *Stored* leaves after the COMMIT of the row, which waits for the disk and for synchronous
//!   standbys. A failover to an asynchronous standby loses acknowledged rows.
//!
//! # The answers
//!
//! A delivery is stored, and then goes to its layer in a task of its own, which no client can drop.
//!
//! | how it ends | the row | the sender gets |
//! |---|---|---|
//! | its events are complete, or were | is deleted | the response |
//! | the handler fails, panics, does not commit, or reaches [`handler_timeout`](tower_dedup::DedupLayer::handler_timeout) | runs again after the next of the [delays](Inbox::delays) | 200, *stored* |
//! | it still runs after [`answer_within`](Inbox::answer_within) | runs on | 200, *stored* |
//! | an event of it is in flight elsewhere, the store of the keys is away, or too many deliveries run | runs again soon; no attempt is counted | 200, *stored* |
//! | the handler answers 400, 405, 410, 413, 414, 415 or 422, before the sender was told *stored* | is parked as *refused*: no alert, for a week | the response |
//! | the handler answers 401 or 403, before the sender was told *stored* | is deleted | the response |
//! | [`compare_payload`](tower_dedup::DedupLayer::compare_payload) refuses another body under a complete id | is parked as *mismatch* if the sender was told *stored*; else is deleted | the response |
//! | the delivery has a row already, as within 20 ms of its end | is due now, and the ledger is asked again | 200, *stored* |
//!
//! *Stored* is in the header `x-dedup-result`, or in that of
//! [`result_header`](tower_dedup::DedupLayer::result_header). So a handler answers 422 to a request
//! that it can never take, and 2xx to an event that it ignores.
//!
//! A process that dies leaves its rows. Each belongs to a run for its [turn](Inbox::turn) of 60 s,
//! which a living process renews; then any process of the service takes it. The death counts as an
//! attempt, so that an event which kills its process is parked as *died*: it may never have run to
//! its end.
//!
//! # Rules
//!
//! 1. **The inbox is the outermost layer of the route, and verifies.**
//!    `post(handler).layer(inbox.around(dedup).verified_by(verify))` is one layer: verification,
//!    table, `dedup`. A redelivery is not verified again by the verification that it has passed,
//!    because its signature may be too old by then. A verifying layer outside of the inbox is the
//!    wrong order: nothing is stored, and an error is logged. If it has to be there
//!    ([`verified_outside`](Around::verified_outside)), it must let redeliveries pass.
//! 2. **[`Inbox::run`] gets the application from the top**, after `with_state`, so that routes and
//!    path parameters are found, and without the layers around it. A redelivery lacks these layers,
//!    their extensions, and `ConnectInfo`. A signature that the *handler* checks fails at a
//!    redelivery. Test with [`later`](Inbox::later), under which every event goes through the loop.
//! 3. **Whoever can write to the table can call any route of the application that you give to
//!    `run`.** Give it a router of the webhooks alone, and guard the table as the keys' one.
//! 4. Each process of the service spawns one `run`. Without one for a minute, an error is logged.
//! 5. **Rename with an empty table** (`tower-dedup inbox list`): the service, a namespace, the
//!    extractor of a key, the name of a verification. Otherwise the rows that wait reach no layer
//!    with their keys, and are parked as *misrouted*. A route that goes away, too, goes after its
//!    rows.
//! 6. **Retention**: a row waits for up to 14 days, so [`Inbox::around`] raises the
//!    [retention](tower_dedup::DedupLayer::retention) of its layer to the time in which the sender
//!    delivers again and 15 days (22 days without a preset). Everything else that completes keys of
//!    the namespace needs that retention, too.
//! 7. The layer has a ledger that releases what fails: [`DedupLayer::new`] or
//!    [`DedupLayer::transactional`]. Another one does not compile.
//!    [`replay`](tower_dedup::DedupLayer::replay), a layer for `Idempotency-Key`, and
//!    [`FailOpen`](tower_dedup::OnUnavailable::FailOpen) are invalid.
//! 8. Set [`handler_timeout`](tower_dedup::DedupLayer::handler_timeout), unless the handler itself
//!    has a bound: one that never ends keeps its row and its [slot](Inbox::slots), and only the age
//!    of the oldest waiting row shows it.
//! 9. While a layer of the namespace is not in the mode [`Enforce`](tower_dedup::Mode::Enforce),
//!    nothing is stored, and the rows wait.
//!
//! # What has no row
//!
//! - Handshakes, and requests that [`bypass_when`](tower_dedup::KeyExtractor::bypass_when) or
//!   `PassThrough` lets through: a failure there is the sender's affair, as without an inbox. So is
//!   a request that is refused before its key is known: not verified, malformed, too large.
//! - Methods that the layer does not deduplicate.
//! - Under [`require_verified`](tower_dedup::DedupLayer::require_verified), a request that is not
//!   verified.
//!
//! # Limits
//!
//! - The answer may leave before the handler has ended: not for interactions (Slack commands,
//!   Discord, `TwiML`) and `Idempotency-Key`.
//! - Under a lease, a handler may run twice, as ever. Order is not kept: see the guide's *Events in
//!   order*.
//! - Another body under the same id is another row, and the ledger decides between them.
//! - Bodies are stored in clear; tokens in a URL, too. A row is deleted with its end, a parked one
//!   three weeks after its event was last received, or by `tower-dedup inbox drop`. Headers that
//!   are *sensitive* are not stored (a `VerifyLayer` marks its tokens), nor `authorization`,
//!   `proxy-authorization`, `cookie`, and those of one connection.
//! - Beyond [`max_waiting`](Inbox::max_waiting) rows that wait, or 4 GiB, deliveries have no row.
//!
//! # Settings
//!
//! [`Inbox`] lists them with their defaults.
//!
//! - [`answer_within`](Inbox::answer_within): below the time for which the sender waits (Slack: 3
//!   s). A handler that is faster answers the sender itself.
//! - [`delays`](Inbox::delays): how long a failed event waits, and how often it runs: once more
//!   than there are delays. Then it is parked. Shorter delays park it sooner.
//! - [`slots`](Inbox::slots): how many redeliveries one process runs at once, beside the sender's
//!   own deliveries. Each may hold a connection of the handler's pool.
//! - [`turn`](Inbox::turn): how late an event runs again whose process has died.
//! - [`later`](Inbox::later): for tests.
//! - [`max_waiting`](Inbox::max_waiting): the bound of what waits.
//! - [`table`](Inbox::table): its name. Two inboxes of one service have one table.
//!
//! # Shutdown
//!
//! Stop accepting connections, resolve the `stop` of [`Inbox::run`] and await it, then await
//! [`Inbox::drain`], all within a bound. A row that is left is taken by the next process.
//!
//! # What to watch
//!
//! Alert on rows that are parked (but *refused*), on misrouted redeliveries, on an oldest waiting
//! row above 1 h, on deliveries without a row, and on a table that is half full. The example
//! `observability` has these alerts, and a dashboard. The guide's page on incidents says what to
//! do, by `tower-dedup inbox list`, `show`, `retry` and `drop`.
//!
//! # Log records
//!
//! The target is `tower_dedup_inbox`.
//!
//! | message | level | remarks |
//! |---|---|---|
//! | `stored` | debug | |
//! | `not stored` | warn, or error once a minute | the delivery went to its layer as without an inbox. `reason` and `error` say why; an error with `fix`: a layer outside of the inbox has verified the request |
//! | `the handler failed` | warn | the event runs again, `due_in_s` seconds later. `last` has the answer |
//! | `ended` | debug | `outcome` as in the metrics |
//! | `the process that ran a row has died` | warn | or it has lost its turn: the row runs after its next delay |
//! | `misrouted` | error, once a minute | a redelivery has not reached its layer. `why` and `fix` |
//! | `parked` | error, or info if it was `refused` | the row `seq` waits for a person. `reason` and `last`; without `seq`, `rows` counts them |
//! | `rows that were parked for long are deleted` | warn | `rows` counts them |
//! | `the table does not answer` | error, once a minute | `what` is not done, and `error` |
//! | `deliveries are stored, and no loop` | error, once a minute | nobody runs them in this process: spawn [`Inbox::run`] |
//!
//! # Metrics
//!
//! The feature `metrics` reports through the [`metrics`](https://docs.rs/metrics) facade.
#![cfg_attr(
    feature = "metrics",
    doc = "[`describe_metrics`] gives each metric its unit and its text."
)]
//!
#![doc = include_str!("metrics.md")]
//!
//! [`DedupLayer`]: tower_dedup::DedupLayer
//! [`DedupLayer::new`]: tower_dedup::DedupLayer::new
//! [`DedupLayer::transactional`]: tower_dedup::DedupLayer::transactional

#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "without a database there is no inbox")
)]

mod around;
mod core;
mod decide;
mod ender;
mod inbox;
mod inspect;
mod observe;
#[cfg(feature = "postgres")]
mod postgres;
mod row;
mod run;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;
mod ticket;
mod writer;

pub use around::{Around, Inboxed, Releases};
pub use inbox::Inbox;
pub use inspect::{Count, Selection, ShownRequest, ShownRow};
#[cfg(feature = "metrics")]
pub use observe::describe_metrics;
pub use row::Parked;
pub use settings::InboxError;
