//! The HTML. [`maud`] escapes every value.

use std::time::{Duration, SystemTime};

use maud::{DOCTYPE, Markup, PreEscaped, html};
use tower_dedup::{Mode, provider};
use tower_dedup_inbox::Count;
use tracing::Level;

use super::attempts::{self, Answer, Sent};
use super::records::{Held, Record};
use super::style::CSS;
use super::{Flights, Setup};

/// How often the page refreshes itself, in seconds.
const REFRESH: u32 = 2;
/// How many records beside the deliveries the page shows.
const OTHERS: usize = 10;

/// What the overview shows.
pub(super) struct Overview<'a> {
    pub(super) setup: &'a Setup,
    /// For how long the store is away from the layers.
    pub(super) away: Option<Duration>,
    /// The requests of the buttons, the newest first.
    pub(super) sent: &'a [Sent],
    /// The effects of the newest event of the buttons.
    pub(super) effects: Option<Result<i64, String>>,
    pub(super) flights: &'a Flights,
    /// `None` without an inbox.
    pub(super) inbox: Option<&'a Result<Vec<Count>, String>>,
    pub(super) records: &'a Held,
}

pub(super) fn overview(shown: &Overview<'_>) -> Markup {
    let Setup { store, ledger, mode, ref secret } = *shown.setup;
    let is_verified = secret.is_some();
    let content = html! {
        p {
            "A sender repeats a webhook until it gets a 2xx. This receiver runs the handler of each event "
            "once; the layer answers the repeats. Store: " (store) ". Ledger: " (ledger) ". Mode: " (mode) "."
        }
        @match mode {
            Mode::Shadow => p.warn {
                "In shadow, every delivery reaches the handler. The verdict says what the layer would have done."
            },
            Mode::Off => p.warn { "The layer is off: it claims no key and logs no delivery." },
            _ => {}
        }
        h2 { "Try it" }
        p {
            "Each button sends real requests to " code { (attempts::path()) }
            ". Deliver an event, deliver it again, and look at the answer."
            @if is_verified {
                " They are signed, because this receiver verifies the sender. A forged one has the signature of \
                 another body."
            }
        }
        (buttons(shown, is_verified))
        @if let Some(away) = shown.away {
            p.warn {
                "The store is away for " (duration(away)) " more: a delivery gets 503, and its sender tries again."
            }
        }
        (requests(shown))
        h2 { "Deliveries by outcome" }
        p { "Every delivery ends in one outcome. The numbers count since this process started." }
        (outcomes(shown.records))
        h2 { "In flight or lapsed" }
        p {
            "An event is in flight while its handler runs. A second delivery waits for it, and gets 503 after 2 s. "
            "A lease lapses if its process has died; then the next delivery takes over."
        }
        (flights(shown.flights))
        @if let Some(counts) = shown.inbox {
            h2 { "Inbox" }
            p {
                "A delivery is stored before it is handled. It waits here until it has succeeded: after a failure, it runs again "
                "without the sender. After the last attempt it is parked, and waits for a person."
            }
            (inbox(counts))
        }
        h2 { "Last deliveries" }
        p {
            "The newest first. The verdict is how the layer judged the delivery, the outcome how it ended. "
            "The attempt counts the runs of the event: the retry of a failed run is the second."
        }
        (deliveries(shown.records.deliveries.iter()))
        h2 { "Other records" }
        p { "What the layer logs beside its deliveries: takeovers, lost leases, refused signatures." }
        (others(shown.records))
        h2 { "Look up an event" }
        p { "The store says what became of an event. The page stops refreshing meanwhile." }
        form method="get" action="/" { button name="id" value="" { "Look up an event by its id" } }
    };
    page(Some(REFRESH), &content)
}

/// `facts` is `None` without an id.
pub(super) fn look_up(
    namespace: &str,
    id: &str,
    facts: Option<&Result<Vec<(&'static str, String)>, String>>,
    held: &Held,
) -> Markup {
    let content = html! {
        p { a href="/" { "Back to the overview" } }
        h2 { "Look up an event" }
        p { "The namespace is the sender; the id is what the sender puts into each delivery of the event." }
        form method="get" action="/" {
            select name="namespace" aria-label="namespace" {
                @for preset in provider::ALL {
                    option selected[preset.name() == namespace] { (preset.name()) }
                }
            }
            input name="id" value=(id) aria-label="id" placeholder="id" required;
            button { "Look up" }
        }
        @match facts {
            None => {}
            Some(Err(error)) => p.bad { (error) },
            Some(Ok(facts)) => {
                table {
                    tr { th { "event" } td.id { (namespace) " / " (id) } }
                    @for (name, value) in facts { tr { th { (name) } td { (value) } } }
                }
                h2 { "Its deliveries" }
                p { "Those of this process since its start, the newest first." }
                (deliveries(held.deliveries.iter().filter(|record| {
                    record.field("namespace") == namespace && record.field("id") == id
                })))
            }
        }
    };
    page(None, &content)
}

/// While the process starts again, nobody answers.
pub(super) fn crashed() -> Markup {
    let content = html! {
        h2 { "The receiver dies now" }
        p {
            "A handler runs, and the process ends in the middle of it, as after " code { "kill -9" } ". It starts again, \
             and this page goes back to the overview. There the event is in flight until its lease lapses."
        }
    };
    page(Some(3), &content)
}

/// The page goes to the overview after these seconds.
fn page(refresh: Option<u32>, content: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                @if let Some(seconds) = refresh { meta http-equiv="refresh" content={ (seconds) "; url=/" }; }
                title { "tower-dedup receiver" }
                style { (PreEscaped(CSS)) }
            }
            body {
                h1 { "tower-dedup receiver" }
                main { (content) }
                footer {
                    a href="/effects" { "/effects" } ": how often each event took effect. "
                    a href="/metrics" { "/metrics" } ": for Prometheus."
                }
            }
        }
    }
}

fn buttons(shown: &Overview<'_>, is_verified: bool) -> Markup {
    html! {
        form method="post" action="/try" {
            button name="button" value="once" { "Deliver an event" }
            button name="button" value="twice-at-once" { "Twice at once" }
            button name="button" value="slowly" { "Slowly (10 s)" }
            button name="button" value="failing" { "Failing" }
            @if is_verified { button name="button" value="forged" { "Forged" } }
            button name="button" value="store-away" { "Store away (20 s)" }
            // A store in memory dies, too.
            @if shown.setup.store != "memory" { button name="button" value="crash" { "Crash" } }
        }
        @if let Some(Sent { id, .. }) = shown.sent.first() {
            form method="post" action="/try" {
                input type="hidden" name="id" value=(id);
                button name="button" value="again" { "Deliver " (id) " again" }
                button name="button" value="other-payload" { "Again with another payload" }
            }
        }
    }
}

fn requests(shown: &Overview<'_>) -> Markup {
    let Some(last) = shown.sent.first() else { return html! {} };
    html! {
        div.scroll { table {
            tr { th { "webhook-id" } th.wide { "body" } th { "answer" } th { "what it means" } }
            @for sent in shown.sent {
                tr {
                    td.id { (sent.id) }
                    td.wide { code { (sent.body) } @if !sent.query.is_empty() { " " span.dim { (sent.query) } } }
                    @match &sent.answer {
                        None => { td.warn { "under way" } td { "The handler runs, or the delivery waits for it." } }
                        Some(answer) => {
                            td class=(tone_of(answer)) { (answer.status.as_u16()) " " (answer.result) }
                            td { (explained(answer)) }
                        }
                    }
                }
            }
        } }
        @match &shown.effects {
            Some(Ok(effects)) => p { "Effects of " code { (last.id) } ", which are rows that its handler has written: " strong { (effects) } },
            Some(Err(error)) => p.bad { "The effects cannot be read: " (error) },
            None => {}
        }
    }
}

fn tone_of(answer: &Answer) -> &'static str {
    if answer.status.is_success() { "good" } else { "bad" }
}

fn explained(answer: &Answer) -> &'static str {
    match (answer.status.as_u16(), answer.result.as_str()) {
        (200, "") => "The handler ran.",
        (200, "stored") => {
            "Stored: its handler has failed, or still runs. It runs again without the sender."
        }
        (200, "duplicate") => "A repeat, by its id: the handler did not run.",
        (503, "in-flight") => "The first delivery still runs: the sender has to try again.",
        (503, "unavailable") => "The store is away: the sender has to try again.",
        (401, _) => "The signature is wrong: refused before its id was looked at.",
        (500, "") => "The handler failed: the key is free, and the retry runs.",
        _ => "See the last deliveries.",
    }
}

fn outcomes(held: &Held) -> Markup {
    if held.outcomes.is_empty() {
        return html! { p.dim { "No delivery yet." } };
    }
    html! {
        table {
            tr { th { "outcome" } th.number { "deliveries" } th { "meaning" } }
            @for (outcome, count) in &held.outcomes {
                tr {
                    td.name { code { (outcome) } }
                    td.number { (count) }
                    td { (meaning(outcome)) }
                }
            }
        }
    }
}

/// Returns what an outcome means, as in the table of [`tower_dedup::observe`].
fn meaning(outcome: &str) -> &'static str {
    match outcome {
        "completed" => "The handler succeeded; repeats are duplicates.",
        "failed" => "The handler failed; the retry runs (on arrival: the event is lost).",
        "handler_timeout" => "The handler took too long and was dropped.",
        "panicked" => "The handler panicked.",
        "uncommitted" => "The handler succeeded, but its transaction did not commit.",
        "duplicate" => "The event is complete; the handler did not run.",
        "in_flight" => "Another delivery runs an event of this delivery.",
        "mismatch" => "The id is complete with another payload.",
        "broken_response" => "The response could not be stored.",
        "unavailable" => "The store did not reply.",
        "overloaded" => "Too many deliveries run or wait.",
        "invalid_key" => "The request has no valid id.",
        "too_large" | "broken_body" | "slow_body" => "The body could not be read to its end.",
        _ => "See the documentation of `observe`.",
    }
}

fn flights(flights: &Flights) -> Markup {
    html! {
        @if let Some(error) = &flights.error { p.bad { "The store cannot list its keys: " (error) } }
        @if flights.events.is_empty() { p.dim { "Nothing is in flight." } }
        @else { div.scroll { table {
            tr { th { "event" } th { "state" } th.number { "attempts" } th.number { "first seen (UTC)" } }
            @for flight in &flights.events {
                tr {
                    (event(flight.key.namespace(), flight.key.id()))
                    td.warn {
                        (flight.state)
                        @if let Some(event_type) = &flight.event_type { div.dim { (event_type) } }
                    }
                    td.number { (flight.attempts) }
                    td.number {
                        (clock(SystemTime::now() - flight.age)) div.dim { (duration(flight.age)) " ago" }
                        @if flight.key.namespace() == provider::STANDARD_WEBHOOKS.name() {
                            (again(flight.key.id()))
                        }
                    }
                }
            }
        } } }
        @if flights.is_part { p.dim { "The store is large. The page has read a part of it." } }
    }
}

fn inbox(counts: &Result<Vec<Count>, String>) -> Markup {
    let counts = match counts {
        Err(error) => return html! { p.bad { "The inbox cannot be counted: " (error) } },
        Ok(counts) if counts.is_empty() => {
            return html! { p.dim { "Nothing waits, and nothing is parked." } };
        }
        Ok(counts) => counts,
    };
    html! {
        table {
            tr { th { "sender" } th { "state" } th.number { "deliveries" } th.number { "oldest" } }
            @for count in counts {
                tr {
                    td { (count.namespace) }
                    @match count.parked {
                        None => td.warn { "waits or runs" },
                        Some(reason) => td.bad { "parked: " (reason.as_str()) }
                    }
                    td.number { (count.rows) }
                    td.number { (duration(count.oldest)) " ago" }
                }
            }
        }
    }
}

/// After a crash, the page knows no delivery to repeat.
fn again(id: &str) -> Markup {
    html! {
        form.right method="post" action="/try" {
            input type="hidden" name="id" value=(id);
            button name="button" value="again" { "Deliver again" }
        }
    }
}

fn deliveries<'a>(records: impl Iterator<Item = &'a Record>) -> Markup {
    let mut records = records.peekable();
    if records.peek().is_none() {
        return html! { p.dim { "No delivery yet." } };
    }
    html! {
        div.scroll { table {
            tr {
                th { "event" } th.wide { "verdict" } th { "outcome" } th.number.wide { "attempt" } th.number { "status" }
                th.number.wide { "took" } th.number { "ended (UTC)" }
            }
            @for record in records {
                tr {
                    (event(record.field("namespace"), record.field("id")))
                    td.wide { (verdict(record)) }
                    td class=(tone_of_outcome(record)) {
                        (record.field("outcome"))
                        @if !record.field("error").is_empty() { div.dim { (record.field("error")) } }
                    }
                    td.number.wide {
                        (record.field("attempt"))
                        @if record.field("takeover") == "true" { " (takeover)" }
                    }
                    td.number { (record.field("status")) }
                    td.number.wide { (took(record)) }
                    td.number { (clock(record.at)) }
                }
            }
        } }
    }
}

/// Returns how the layer judged a delivery: the record's verdict, which a layer in shadow mode logs, or
/// what the outcome says.
fn verdict(record: &Record) -> &str {
    match (record.field("verdict"), record.field("outcome")) {
        ("", "invalid_key") => "no_key",
        (
            "",
            outcome @ ("duplicate" | "in_flight" | "mismatch" | "unavailable" | "overloaded"
            | "unverified"),
        ) => outcome,
        ("", _) if record.field("attempt").is_empty() => "",
        ("", _) => "first",
        (verdict, _) => verdict,
    }
}

fn took(record: &Record) -> String {
    let took: f64 = record.field("duration_ms").parse().unwrap_or_default();
    duration(Duration::from_secs_f64(took / 1e3))
}

fn others(held: &Held) -> Markup {
    if held.others.is_empty() {
        return html! { p.dim { "No other record." } };
    }
    html! {
        div.scroll { table {
            tr { th.wide { "level" } th { "record" } th.number { "logged (UTC)" } }
            @for record in held.others.iter().take(OTHERS) {
                tr {
                    td.wide class=(tone(record.level)) { (record.level) }
                    td {
                        (record.message) " " span.id { (record.field("namespace")) " " (record.field("id")) }
                        @for (name, value) in record.others() { div.dim { (name) ": " code { (value) } } }
                    }
                    td.number { (clock(record.at)) }
                }
            }
        } }
    }
}

/// Returns the cell of an event: a link to its look-up.
fn event(namespace: &str, id: &str) -> Markup {
    let query = || {
        let mut query = form_urlencoded::Serializer::for_suffix("/?".to_owned(), "/?".len());
        query.append_pair("namespace", namespace).append_pair("id", id).finish()
    };
    html! {
        td.id {
            @if id.is_empty() { span.dim { (namespace) } }
            @else { span.dim { (namespace) " " } a href=(query()) { (id) } }
        }
    }
}

fn tone_of_outcome(record: &Record) -> &'static str {
    match (tone(record.level), record.field("outcome")) {
        ("", "completed" | "duplicate") => "good",
        ("", "failed") => "bad",
        (tone, _) => tone,
    }
}

fn tone(level: Level) -> &'static str {
    match level {
        Level::ERROR => "bad",
        Level::WARN => "warn",
        _ => "",
    }
}

/// Returns the time of day, as the log has it.
pub(super) fn clock(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (hours, minutes) = (seconds / 3_600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}

/// Returns a duration with two figures or more: `0.42 ms`, `13 ms`, `4.2 s`, `3 min`.
pub(super) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        ..0.01 => format!("{:.2} ms", seconds * 1e3),
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        ..10.0 => format!("{seconds:.1} s"),
        ..120.0 => format!("{seconds:.0} s"),
        ..7_200.0 => format!("{:.0} min", seconds / 60.0),
        ..172_800.0 => format!("{:.0} h", seconds / 3_600.0),
        _ => format!("{:.0} days", seconds / 86_400.0),
    }
}
