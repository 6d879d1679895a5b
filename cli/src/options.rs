//! The command line.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use chrono::DateTime;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use tower_dedup::DedupKey;
use tower_dedup::adapter::maintenance::KeyState;
use tower_dedup::key::{self, KeyPart};
use tower_dedup_inbox::Parked;

use crate::failure::Failure;
use crate::output::Output;

const AFTER_HELP: &str = "\
Exit codes:
  0  done; the answer is yes
  1  the answer is no: the key is unknown or in flight, you did not confirm, `doctor` found an error,
     `migrate --check` found work, `missed` found an event, `import` could not read a line
  2  usage: an option, an argument, the URL, a file that cannot be read, or a line of `missed`
  3  the store cannot be reached, or did not reply in time
  4  the store refused the call: the password, a privilege, a missing table, a damaged file

Set the store in TOWER_DEDUP_STORE: other users of the machine can read a command line. Ids are printed
plainly, because you ask for them; --hash-ids prints their hashes, as the logs do.";

/// Operates a store of tower-dedup: looks keys up, repairs, checks the set-up.
#[derive(Parser)]
#[command(name = "tower-dedup", version, after_help = AFTER_HELP)]
pub(crate) struct Options {
    /// The store: `sqlite://FILE`, `postgres://…`, `redis://…`, `redis+sentinel://…` or
    /// `redis+cluster://…`. The parameters `dedup_table`, `dedup_schema` and `dedup_prefix` name other keys.
    // The text is no value of clap's, whose errors and help would print it with its password.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "TOWER_DEDUP_STORE",
        hide_env_values = true
    )]
    pub(crate) store: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
    /// How long to connect, and how long one statement may take: `500ms`, `10s`, `2m`, at most a day. A statement over a
    /// part of the table has six times as long.
    #[arg(long, global = true, value_name = "TIME", default_value = "10s", value_parser = timeout)]
    pub(crate) timeout: Duration,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Checks the store and its settings, and says what to do. Changes nothing, but on Redis it claims and
    /// releases 16 keys of its own.
    Doctor,
    /// Makes the table, if it does not exist. On Postgres, waits for open transactions for 10 min at most.
    Migrate(Migrate),
    /// Prints the state of one event.
    Get(Event),
    /// Lists keys: a page of up to --limit keys, the newest of them first. With --json, each as the store gives it.
    ///
    /// A store with more keys gives any of them, not the newest: select by --since, --state, --namespace or --id. The
    /// store holds no errors and no refused deliveries: search the service's log for them. A key of the on-arrival
    /// ledger is complete although its handler has failed.
    List(List),
    /// Prints how many keys are in each state. An estimate for a large table.
    Stats,
    /// Forgets an event, so that its next delivery runs. Refused while the event is running.
    ///
    /// This lets a complete event run again: forget it, then let the sender deliver it again. The output is
    /// the record of it, because the store keeps neither the time nor the reason. Of an event with two
    /// identities, forget the key. If another id was handled with the same body, also forget the identity that the
    /// log record `same body` names (`by_namespace`, `by_id`).
    ///
    /// Not refused under the on-arrival ledger: its keys are complete while their handlers run. Look at the
    /// service first, or two handlers may run.
    Forget(Forget),
    /// Prints which events of a list the store does not hold as complete, in the order of the list: on each line the id, a
    /// tab and its state. Reads stdin: an id on each line. The last line on stderr has the counts.
    ///
    /// `unknown`: the store has no such key, because the event never arrived, was refused before its claim, or has expired.
    /// `released`: the handler failed. `lapsed`: its process died. `in-flight`: it runs. `unreadable`: the data of the key is
    /// damaged.
    ///
    /// Let the sender deliver them again: an event that is complete meanwhile is a duplicate. A key of the on-arrival ledger is
    /// complete although its handler has failed. Ids are taken as they are, and the parts of a composed id are joined by
    /// `|`. A list may have any length, and an id any number of lines. Exits with 1 if any event is missing, and with 2 if
    /// a line could not be read: the first 20 are reported with their numbers.
    Missed(Missed),
    /// Imports ids that another program has handled, so that their events are duplicates. Reads stdin: on each line an
    /// id, a tab or a comma, and the time at which it was handled (`2026-01-31T12:00:00Z`, or with an offset).
    ///
    /// A key that is complete or in flight stays as it is. So the command may run beside the service, and a second run
    /// imports what the first has not. A line that cannot be read is left out: the first 20 are reported with their
    /// numbers, and so is one of more than 1 MiB. Ids are taken as they are, without quotes; one with a comma needs the
    /// tab, and one with a backslash needs --copy. The parts of a composed id are joined by `|`.
    Import(Import),
    /// Deletes keys that expired at least an hour ago. Redis deletes them by itself.
    Purge {
        /// How many keys one statement deletes. Fewer keys hold locks for a shorter time.
        #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
        keys_per_statement: u32,
    },
    /// Looks into the table of an inbox (`tower-dedup-inbox`), and repairs it. --store names its database; on SQLite, that is
    /// a file of its own.
    ///
    /// A statement takes 30 s at most.
    Inbox(Inbox),
    /// Prints the keys of a captured request, and the second identities that its events have under
    /// `content_identity`, as one line of JSON. Needs no store.
    Key(Key),
}

#[derive(Args)]
pub(crate) struct Migrate {
    /// Changes nothing; exits with 1 if the table is missing or of an older version.
    #[arg(long, conflicts_with = "print")]
    pub(crate) check: bool,
    /// Changes nothing; prints the statements that make the table. Needs no connection.
    #[arg(long)]
    pub(crate) print: bool,
}

#[derive(Args)]
pub(crate) struct Event {
    /// The namespace: a preset's is its name (`github`, `stripe`).
    namespace: String,
    /// The id, as the sender gives it.
    id: String,
}

impl Event {
    pub(crate) fn key(&self) -> Result<DedupKey, Failure> {
        DedupKey::new(&self.namespace, &self.id).map_err(Failure::usage)
    }
}

#[derive(Args)]
pub(crate) struct Forget {
    #[command(flatten)]
    pub(crate) event: Event,
    /// Why. It is printed, and stored nowhere.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Does not ask.
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Args)]
pub(crate) struct List {
    /// Only keys in this state: a live lease holds the key; the lease has lapsed, because the process died or
    /// lost the store; the handler failed; every further delivery is a duplicate.
    #[arg(long, value_parser = state())]
    pub(crate) state: Option<KeyState>,
    /// Only keys of this namespace.
    #[arg(long)]
    pub(crate) namespace: Option<String>,
    /// Only keys whose ids contain this text.
    #[arg(long, value_name = "PART")]
    pub(crate) id: Option<String>,
    /// Only keys first seen within this time: `30m`, `2h`, `7d`.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) since: Option<Duration>,
    /// Only keys with more attempts than this.
    #[arg(long, value_name = "N")]
    pub(crate) attempts_over: Option<u32>,
    /// Prints at most this many keys.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
}

#[derive(Args)]
pub(crate) struct Import {
    /// The namespace: a preset's is its name (`github`, `stripe`).
    pub(crate) namespace: String,
    /// How long a key is remembered from its time on; older ones are left out. Take the retention of the layer [default: the layer's own, 30d, or as long as the preset's sender may repeat]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) retention: Option<Duration>,
    /// Reads the output of Postgres' `COPY … TO STDOUT`: its text format, which escapes backslashes, tabs and line feeds.
    #[arg(long)]
    pub(crate) copy: bool,
}

#[derive(Args)]
pub(crate) struct Missed {
    /// The namespace: a preset's is its name (`github`, `stripe`).
    pub(crate) namespace: String,
    /// A line is JSON, and the id is at this pointer: `/guid`. Of several, the values are joined by `|`. With --json, the
    /// output has the line, too.
    #[arg(long, value_name = "POINTER", value_parser = pointer, conflicts_with = "preset")]
    pub(crate) id: Vec<KeyPart>,
    /// A line is a captured request in JSON, as `key` reads it, and has the keys of this preset. One without an event is
    /// passed over. With --json, the output has the line, too.
    #[arg(long, value_name = "NAME")]
    pub(crate) preset: Option<String>,
    /// Prints ids without their states.
    #[arg(long, conflicts_with = "json")]
    pub(crate) ids_only: bool,
}

#[derive(Args)]
pub(crate) struct Inbox {
    /// The name of the table; `schema.name` on Postgres.
    #[arg(long, global = true, value_name = "NAME", default_value = "webhook_inbox")]
    pub(crate) table: String,
    #[command(subcommand)]
    pub(crate) command: InboxCommand,
}

#[derive(Subcommand)]
pub(crate) enum InboxCommand {
    /// Lists rows without their requests: those that wait, that run, and that are parked for a person. The oldest number
    /// comes first.
    List(InboxList),
    /// Prints a row and its request. **The request is personal data**: mind where the output goes.
    ///
    /// With --json, the line is a captured request that `tower-dedup key` reads. With --hash-ids, the request is left out.
    Show {
        /// The number of the row.
        seq: i64,
        /// Writes the body to this new file, which only its owner can read, and does not print it.
        #[arg(long, value_name = "FILE", conflicts_with = "hash_ids")]
        body_to: Option<PathBuf>,
    },
    /// Makes rows due now, with all their attempts: mend the cause first. Asks before it does so.
    ///
    /// A row that runs is left as it is, and so is one that is parked as expired: its key may be forgotten, so that its event
    /// could run twice. A row whose event is complete ends as a duplicate; `tower-dedup forget` lets it run again.
    Retry(InboxChange),
    /// Deletes rows and their requests: **their events are not delivered again**. Asks before it does so.
    ///
    /// It forgets no key: see `tower-dedup forget`, which spares the row. A handler that runs goes on, and is not repeated if
    /// it fails. An event whose handler has failed can be run by a redelivery of its sender, if there is one.
    Drop(InboxChange),
}

#[derive(Args)]
pub(crate) struct InboxList {
    #[command(flatten)]
    pub(crate) rows: InboxRows,
    /// Only rows after the row of this number: the next page.
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) after: i64,
    /// Prints at most this many rows.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
}

#[derive(Args)]
pub(crate) struct InboxChange {
    /// The numbers of rows. Without one, an option must select rows.
    pub(crate) seqs: Vec<i64>,
    #[command(flatten)]
    pub(crate) rows: InboxRows,
    /// Does not ask.
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Which rows are meant.
#[derive(Args)]
pub(crate) struct InboxRows {
    /// Only rows of this service.
    #[arg(long)]
    pub(crate) service: Option<String>,
    /// Only rows of this namespace: that of the layer.
    #[arg(long)]
    pub(crate) namespace: Option<String>,
    /// Only rows with an event of exactly this id.
    #[arg(long)]
    pub(crate) id: Option<String>,
    /// Only parked rows, or those that are parked for this reason.
    #[arg(
        long,
        value_name = "REASON",
        num_args = 0..=1,
        require_equals = true,
        value_parser = reason()
    )]
    pub(crate) parked: Option<Option<Parked>>,
    /// Only rows that were received until then, and not again since: `2026-01-31T12:00:00Z`, or so long ago: `7d`.
    #[arg(long, value_name = "TIME", value_parser = time_or_ago)]
    pub(crate) received_until: Option<SystemTime>,
}

#[derive(Args)]
pub(crate) struct Key {
    /// The preset's name, or an alias.
    pub(crate) provider: String,
    /// The captured request in JSON; `-` or no argument reads stdin.
    pub(crate) file: Option<PathBuf>,
}

fn state() -> impl TypedValueParser<Value = KeyState> {
    let names = ["in-flight", "lapsed", "released", "complete"];
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

fn pointer(text: &str) -> Result<KeyPart, String> {
    let part = key::json(text);
    let checked = part.clone().namespace("any").checked();
    checked.map(|_| part).map_err(|error| error.to_string())
}

fn reason() -> impl TypedValueParser<Value = Parked> {
    use Parked::{Died, Expired, Failed, Mismatch, Misrouted, Refused, Unreadable};

    const ALL: [Parked; 7] = [Failed, Died, Refused, Mismatch, Misrouted, Expired, Unreadable];
    let find = |name: String| ALL.into_iter().find(|reason| reason.as_str() == name);
    PossibleValuesParser::new(ALL.map(Parked::as_str))
        .try_map(move |name| find(name).ok_or("no reason"))
}

/// Reads a time as `humantime` does: `500ms`, `10s`, `2h`, `7d`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    // A year of `humantime` has 365.25 days.
    const LONGEST: Duration = Duration::from_secs(36_525 * 86_400);

    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time < Duration::from_millis(1) || time > LONGEST {
        return Err("at least 1 ms and at most 100 years are needed".to_owned());
    }
    Ok(time)
}

/// Reads a time of RFC 3339. As in the output of Postgres, a space may stand for the `T`, and an offset may have no
/// minutes. A time without an offset is none.
pub(crate) fn time_of(text: &str) -> Option<SystemTime> {
    let text = text.replacen('T', " ", 1);
    DateTime::parse_from_str(&text, "%Y-%m-%d %H:%M:%S%.f%#z").ok().map(SystemTime::from)
}

/// Reads a point in time, or how long ago it was.
fn time_or_ago(text: &str) -> Result<SystemTime, String> {
    let ago = || SystemTime::now().checked_sub(time(text).ok()?);
    time_of(text).or_else(ago).ok_or_else(|| "no time like 2026-01-31T12:00:00Z or 7d".to_owned())
}

/// Reads a time that every store takes: sqlx panics at a longer one for SQLite.
fn timeout(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    let fits = time <= Duration::from_secs(86_400);
    fits.then_some(time).ok_or_else(|| "at most a day is needed".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn time_needs_a_unit_and_has_bounds() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("7d"), Ok(Duration::from_secs(604_800)));
        assert!(time("100y").is_ok());
        for text in ["", "2", "h", "-2h", "0s", "99999999999999999999d", "101y", "500000000000y"] {
            assert!(time(text).is_err(), "{text}");
        }
        assert_eq!(timeout("24h"), Ok(Duration::from_secs(86_400)));
        assert!(timeout("25d").is_err() && timeout("0s").is_err());
    }

    #[test]
    fn time_has_an_offset_and_may_be_as_postgres_prints_it() {
        let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(1_769_860_800);
        for (text, time) in [
            ("2026-01-31T12:00:00Z", Some(noon)),
            ("2026-01-31T12:00:00.000Z", Some(noon)),
            ("2026-01-31 12:00:00.000000+00", Some(noon)),
            ("2026-01-31T17:30:00+05:30", Some(noon)),
            ("2026-01-31 17:30:00+0530", Some(noon)),
            ("2026-01-31T03:00:00-09", Some(noon)),
            ("", None),
            ("2026-01-31", None),
            ("2026-01-31T12:00:00", None),
            ("2026-01-31 12:00:00+", None),
            ("2026-02-30T12:00:00Z", None),
            ("2026-01-31T12:00:00ZZ", None),
            ("1769860800", None),
            ("2026-01-31T12:00:00\u{20ac}Z", None),
            ("infinity", None),
        ] {
            assert_eq!(time_of(text), time, "{text}");
        }
    }
}
