//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use clap::builder::PossibleValuesParser;

use crate::trials;

const AFTER_HELP: &str = "\
Exit codes:
  0  no trial failed
  1  a trial failed
  2  usage, or the receiver cannot be judged: it is not reached, it does not start again, an ordinary event
     is refused, its effect is not counted, or --timeout is over
Only http:// is spoken: judge a receiver behind its TLS.";

/// Attacks a webhook receiver over HTTP as senders do, and says which trials it fails: duplicates, races, crashes,
/// forged signatures, broken requests.
///
/// The receiver handles hundreds of made-up events: give it a database for tests.
#[derive(Debug, Parser)]
#[command(name = "tower-dedup-judge", version, after_help = AFTER_HELP)]
pub(crate) struct Options {
    /// Where the receiver takes deliveries: `http://localhost:3000/webhooks/stripe`.
    #[arg(required_unless_present = "list", default_value = "", hide_default_value = true)]
    pub(crate) url: String,
    /// The sender whose deliveries are made: `stripe`, `github`, …: a preset of tower-dedup.
    #[arg(long, value_name = "NAME")]
    pub(crate) sender: Option<String>,
    /// The environment variable with the secret of --sender, by which each delivery is signed; for SendGrid and Ed25519, the
    /// private key in hexadecimal.
    #[arg(long, value_name = "NAME", requires = "sender")]
    pub(crate) secret_env: Option<String>,
    /// The URL that a sender signs, without its path, where it signs the URL [default: that of the receiver].
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// A delivery, as HTTP writes it: request line, headers, an empty line, body.
    #[arg(long, value_name = "FILE")]
    pub(crate) request: Option<PathBuf>,
    /// The place of the id: `header:NAME`, or `json:/POINTER` in the body [default: that of --sender].
    #[arg(long, value_name = "PLACE")]
    pub(crate) id: Option<String>,
    /// A command whose lines are `ID COUNT`: how often each event took effect. It is run often.
    #[arg(long, value_name = "CMD", conflicts_with = "count_url")]
    pub(crate) count: Option<String>,
    /// A URL with these counts as JSON: `[{"id": "evt_1", "count": 1}]`.
    #[arg(long, value_name = "URL")]
    pub(crate) count_url: Option<String>,
    /// A delivery, as that of --request, that the receiver handles for some seconds.
    #[arg(long, value_name = "FILE")]
    pub(crate) slow: Option<PathBuf>,
    /// A delivery, as that of --request, whose first run fails. Its later runs succeed.
    #[arg(long, value_name = "FILE")]
    pub(crate) failing: Option<PathBuf>,
    /// A command that runs the receiver in the foreground. The judge starts it, kills its process group with
    /// SIGKILL, and starts it again.
    #[arg(long, value_name = "CMD")]
    pub(crate) start: Option<String>,
    /// The file to which the output of --start is appended. Without, the output is dropped.
    #[arg(long, value_name = "FILE", requires = "start")]
    pub(crate) log: Option<PathBuf>,
    /// Runs only this trial; may be repeated.
    #[arg(long, value_name = "TRIAL", value_parser = PossibleValuesParser::new(trials::all().map(|it| it.name)), hide_possible_values = true)]
    pub(crate) only: Vec<String>,
    /// Lists the trials: what is sent, and what is right.
    #[arg(long)]
    pub(crate) list: bool,
    /// How long retries of an event go on until a 2xx, and how long an effect may take: longer than the receiver's
    /// lease.
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = humantime::parse_duration)]
    pub(crate) patience: Duration,
    /// How long all trials may take together. Those without a verdict by then have none.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    pub(crate) timeout: Duration,
    /// Prints JSON: one object for each trial, one a line.
    #[arg(long)]
    pub(crate) json: bool,
    /// Permits an address outside of loopback and private networks.
    #[arg(long)]
    pub(crate) i_own_this_host: bool,
}
