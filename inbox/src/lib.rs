#![doc = include_str!("../README.md")]
//!
//! # What it promises
//!
//! - A delivery that was answered 2xx runs until it has succeeded, or until it is parked. **A
//!   parked event waits for a person: alert on it.** The commands `tower-dedup inbox list`, `show`,
//!   `retry` and `drop` handle parked rows, and so do [`Inbox::list`] and its related methods.
//! - The ledger decides whether an effect happens *exactly once*. A row is deleted when the ledger
//!   says that its events are complete, whoever has completed them. Unless it is parked, a
//!   row whose sender was told *stored* is deleted only if the ledger says so.
//! - It is never worse than no inbox. If the table fails, does not answer within 1 s, or is full,
//!   the delivery goes to the layer without a row, and the sender gets the layer's answer. This is
//!   logged as a warning, and counted.
//! - The answer *stored* leaves after the COMMIT of the row, which waits for the disk and for
//!   synchronous standbys. A failover to an asynchronous standby loses acknowledged rows.
//!
//! # The answers
//!
//! A delivery is stored, and then goes to its layer in a task of its own, which no client can drop.
//!
//! | how the delivery ends | the row | the sender gets |
//! |---|---|---|
//! | its events are complete, or were complete before | is deleted | the response |
//! | the handler fails, panics, does not commit, or reaches [`handler_timeout`](tower_dedup::DedupLayer::handler_timeout) | runs again after the next of the [delays](Inbox::delays) | 200, *stored* |
//! | it still runs after [`answer_within`](Inbox::answer_within) | runs on | 200, *stored* |
//! | one of its events is in flight elsewhere, the store of the keys is unavailable, or too many deliveries run | runs again soon; no attempt is counted | 200, *stored* |
//! | the handler answers 400, 405, 410, 413, 414, 415 or 422, before the sender was told *stored* | is parked as *refused*: no alert, for a week | the response |
//! | the handler answers 401 or 403, before the sender was told *stored* | is deleted | the response |
//! | [`compare_payload`](tower_dedup::DedupLayer::compare_payload) refuses another body under a complete id | is parked as *mismatch* if the sender was told *stored*; else is deleted | the response |
//! | the delivery has a row already, as within 20 ms of its end | is due now, and the ledger is asked again | 200, *stored* |
//!
//! *Stored* is in the header `x-dedup-result`, or in the header that
//! [`result_header`](tower_dedup::DedupLayer::result_header) names. So a handler should answer 422
//! to a request that it can never accept, and 2xx to an event that it ignores.
//!
//! A process that dies leaves its rows. A row belongs to its run for a [turn](Inbox::turn) of 60 s,
//! which a living process renews. When the turn has ended, any process of the service takes the
//! row. The death counts as an attempt, so an event that kills its process is parked as *died*.
//! Such an event may never have run to its end.
//!
//! # Rules
//!
//! 1. **The inbox is the outermost layer of the route, and verifies.**
//!    `post(handler).layer(inbox.around(dedup).verified_by(verify))` is one layer: verification,
//!    table, `dedup`. A redelivery is not verified again by the verification that it has passed,
//!    because its signature may be too old by then. A verifying layer outside the inbox is the
//!    wrong order: nothing is stored, and an error is logged. If it has to be there
//!    ([`verified_outside`](Around::verified_outside)), it must let redeliveries pass.
//! 2. **Give [`Inbox::run`] the whole application**, after `with_state`, so that it finds routes
//!    and path parameters, and without the layers around it. A redelivery lacks these layers, their
//!    extensions, and `ConnectInfo`. If the *handler* checks a signature, the check fails at a
//!    redelivery. Test with [`later`](Inbox::later), under which every event goes through the loop.
//! 3. **Whoever can write to the table can call any route of the application that you give to
//!    `run`.** Give it a router with the webhooks only, and protect the table like that of the
//!    keys.
//! 4. Each process of the service spawns one `run`. If none runs for a minute, an error is logged.
//! 5. **Empty the table before you rename** (`tower-dedup inbox list`) the service, a namespace,
//!    the extractor of a key, or a verification. Otherwise the waiting rows reach no layer with
//!    their keys, and are parked as *misrouted*. Remove a route only after its rows.
//! 6. **Retention**: a row waits for up to 14 days. So [`Inbox::around`] raises the
//!    [retention](tower_dedup::DedupLayer::retention) of its layer to 15 days more than the time in
//!    which the sender delivers again (22 days without a preset). Everything else that completes
//!    keys of the namespace needs that retention, too.
//! 7. Use a ledger that releases what fails: [`DedupLayer::new`] or [`DedupLayer::transactional`].
//!    Another ledger does not compile. [`replay`](tower_dedup::DedupLayer::replay), a layer for
//!    `Idempotency-Key`, and [`FailOpen`](tower_dedup::OnUnavailable::FailOpen) are invalid.
//! 8. Set [`handler_timeout`](tower_dedup::DedupLayer::handler_timeout), unless the handler itself
//!    has a time limit. A handler that never ends keeps its row and its [slot](Inbox::slots). Only
//!    the age of the oldest waiting row shows it.
//! 9. While a layer of the namespace is not in the mode [`Enforce`](tower_dedup::Mode::Enforce),
//!    nothing is stored, and the rows wait.
//!
//! # What has no row
//!
//! - Handshakes, and requests that [`bypass_when`](tower_dedup::KeyExtractor::bypass_when) or
//!   `PassThrough` lets through. A failure is left to the sender, as without an inbox.
//! - Requests that are refused before their key is known: not verified, malformed, too large.
//! - Methods that the layer does not deduplicate.
//! - Under [`require_verified`](tower_dedup::DedupLayer::require_verified), a request that is not
//!   verified.
//!
//! # Limits
//!
//! - The answer may leave before the handler has ended. So an inbox does not suit interactions
//!   (Slack commands, Discord, `TwiML`) and `Idempotency-Key`.
//! - Under a lease, a handler may run twice, as it may without an inbox.
//! - No order of events is promised: see *Events in order* in the guide.
//! - Another body under the same id is another row, and the ledger decides between them.
//! - Bodies are stored unencrypted, and so are tokens in a URL. A row is deleted when its event has
//!   ended. A parked row is deleted three weeks after its event was last received, or by
//!   `tower-dedup inbox drop`.
//! - Some headers are not stored: those marked as *sensitive* (a `VerifyLayer` marks its tokens),
//!   `authorization`, `proxy-authorization`, `cookie`, and those of one connection.
//! - Beyond [`max_waiting`](Inbox::max_waiting) waiting rows, or 4 GiB, deliveries have no row.
//!
//! # Settings
//!
//! [`Inbox`] lists them with their defaults.
//!
//! - [`answer_within`](Inbox::answer_within): set it below the time for which the sender waits
//!   (Slack: 3 s). A handler that is faster answers the sender itself.
//! - [`delays`](Inbox::delays): how long a failed event waits before each further run. It runs once
//!   more than there are delays, and is then parked. Shorter delays park it sooner.
//! - [`slots`](Inbox::slots): how many redeliveries one process runs at once, in addition to the
//!   sender's own deliveries. Each may hold a connection of the handler's pool.
//! - [`turn`](Inbox::turn): how long after the death of its process an event runs again.
//! - [`later`](Inbox::later): for tests.
//! - [`max_waiting`](Inbox::max_waiting): how many rows may wait.
//! - [`table`](Inbox::table): the name of the table. Two inboxes of one service share a table.
//!
//! # Shutdown
//!
//! Stop accepting connections, resolve the `stop` of [`Inbox::run`] and await `run`, then await
//! [`Inbox::drain`]. Give all of it a time limit. The next process takes the rows that are left.
//!
//! # What to watch
//!
//! Alert on parked rows (except *refused*), on misrouted redeliveries, on an oldest waiting row
//! above 1 h, on deliveries without a row, and on a table that is half full. The example
//! `observability` has these alerts, and a dashboard. The guide's page on incidents says what to
//! do with `tower-dedup inbox list`, `show`, `retry` and `drop`.
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
//! | `the process that ran a row has died` | warn | the process has died, or has lost its turn. The row runs after its next delay |
//! | `misrouted` | error, once a minute | a redelivery has not reached its layer; see `why` and `fix` |
//! | `parked` | error, or info if it was `refused` | the row `seq` waits for a person; see `reason` and `last`. Without `seq`, `rows` counts the parked rows |
//! | `rows that were parked for long are deleted` | warn | `rows` counts the deleted rows |
//! | `the table does not answer` | error, once a minute | `what` says what is not done, `error` why |
//! | `deliveries are stored, and no loop` | error, once a minute | no loop in this process runs the rows: spawn [`Inbox::run`] |
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
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod line;
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
