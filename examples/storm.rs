//! A redelivery storm against a running [receiver](receiver/main.rs), and the count afterwards.
//!
//! ```text
//! cargo run --example receiver                      # in another terminal
//! cargo run --example storm
//! cargo run --example storm -- --url 'http://127.0.0.1:3000/webhooks/github?delay_ms=50'
//! cargo run --example storm -- --keys 20000 --copies 2 --until-acknowledged
//! cargo run --example storm -- --url http://127.0.0.1:3001/webhooks/standard-webhooks \
//!     --url http://127.0.0.1:3002/webhooks/standard-webhooks
//! ```
//!
//! It delivers `--keys` events, each of them `--copies` times. The copies of one event leave
//! together, so they race for its key. Several receivers on one store (`--url` for each) take
//! turns, as behind a load balancer: the copies of one event race between them. Afterwards the
//! storm asks the first receiver for the effects and counts:
//!
//! - *lost*: events that were acknowledged with a 2xx, and took no effect;
//! - *doubled*: events that took effect more than once.
//!
//! Neither may be, however the copies race: the exit code is 1 otherwise.
//!
//! With `--until-acknowledged` every delivery is repeated until it is acknowledged, as a patient
//! sender would: stop the receiver and start it again meanwhile. A `kill -9` shows where the
//! ledgers differ. Under `lease`, what died between its effect and its completion runs again, and
//! is doubled; under `on-arrival`, what died before its effect is lost; under `transactional`
//! neither happens.
//!
//! Nothing is signed: the receiver must have no secret of the sender in question.
//!
//! Ids are new in every run, and travel in the headers of Standard Webhooks and GitHub and in the
//! body, where Stripe has them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::iter;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use backon::{ExponentialBuilder, Retryable};
use clap::Parser;
use futures_util::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::{Client, StatusCode, Url};
use serde::Deserialize;
use tabled::builder::Builder;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Style};

/// When a sender gives an answer up; many do so sooner.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How many lost or doubled ids are named.
const NAMED: usize = 5;

/// Delivers events many times over and counts what took effect.
#[derive(Debug, Parser)]
struct Options {
    /// Where to deliver to. Several URLs take turns; the effects are asked for at `/effects` of
    /// the first one's host.
    #[arg(
        long = "url",
        value_name = "URL",
        default_value = "http://127.0.0.1:3000/webhooks/standard-webhooks"
    )]
    urls: Vec<Url>,
    /// How many events.
    #[arg(long, default_value_t = 1_000)]
    keys: usize,
    /// How often each is delivered.
    #[arg(long, default_value_t = 32)]
    copies: usize,
    /// How many deliveries are under way at once.
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    concurrency: usize,
    /// Repeat every delivery until it is answered with a 2xx.
    #[arg(long)]
    until_acknowledged: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least one".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Options::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Answers whether nothing was lost and nothing was doubled.
async fn run(options: Options) -> Result<bool, Box<dyn Error>> {
    let storm = Storm::new(options)?;
    storm.effects().await?; // Is there a receiver at all?

    let Options { keys, copies, concurrency, .. } = storm.options;
    let started = Instant::now();
    // All of it in this one task: at most `concurrency` deliveries exist at a time.
    stream::iter((0..keys).flat_map(|key| iter::repeat_n(key, copies)))
        .map(|key| storm.deliver(key))
        .buffer_unordered(concurrency)
        .for_each(async |()| storm.bar.inc(1))
        .await;
    let took = started.elapsed();
    storm.bar.finish_and_clear();

    let verdict = storm.verdict(&storm.effects().await?);
    writeln!(io::stdout(), "{}", storm.table(&verdict, took))?;
    for (what, keys) in [("lost", &verdict.lost), ("doubled", &verdict.doubled)] {
        for key in keys.iter().take(NAMED) {
            writeln!(io::stdout(), "{what}: {}", storm.id(*key))?;
        }
    }
    Ok(verdict.lost.is_empty() && verdict.doubled.is_empty())
}

struct Storm {
    options: Options,
    client: Client,
    effects: Url,
    /// How many requests were sent: whose turn it is.
    turn: Cell<usize>,
    /// What the ids of this run start with.
    prefix: String,
    tally: RefCell<Tally>,
    bar: ProgressBar,
}

/// What was answered so far, for every request.
#[derive(Default)]
struct Tally {
    sent: u64,
    first: u64,
    duplicate: u64,
    in_flight: u64,
    failed: BTreeMap<String, u64>,
    latencies: Latencies,
    /// By key: was any copy of it answered with a 2xx?
    acknowledged: Vec<bool>,
}

struct NotAcknowledged;

/// As the receiver says it.
#[derive(Deserialize)]
struct Effect {
    id: String,
    count: u64,
}

struct Verdict {
    lost: Vec<usize>,
    doubled: Vec<usize>,
}

impl Storm {
    fn new(options: Options) -> Result<Self, Box<dyn Error>> {
        let client = Client::builder()
            .timeout(TIMEOUT)
            .pool_max_idle_per_host(options.concurrency)
            .no_proxy()
            .build()?;
        let effects = options.urls.first().ok_or("no URL")?.join("/effects")?;
        let tally = Tally { acknowledged: vec![false; options.keys], ..Tally::default() };
        let deliveries = options.keys.saturating_mul(options.copies);
        let bar = ProgressBar::new(u64::try_from(deliveries)?);
        bar.set_style(ProgressStyle::with_template(
            "{bar:40} {pos}/{len} {per_sec} {elapsed} {msg}",
        )?);
        let prefix = format!("storm_{:016x}_", rand::random::<u64>());
        let (tally, turn) = (RefCell::new(tally), Cell::new(0));
        Ok(Self { options, client, effects, turn, prefix, tally, bar })
    }

    /// Whose turn it is.
    fn url(&self) -> Url {
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        self.options.urls[turn % self.options.urls.len()].clone()
    }

    fn id(&self, key: usize) -> String {
        format!("{}{key}", self.prefix)
    }

    /// One delivery, with its repetitions if they are asked for.
    async fn deliver(&self, key: usize) {
        let request = || self.request(key);
        let acknowledged =
            request.retry(soon_again()).when(|_| self.options.until_acknowledged).await;
        if acknowledged.is_ok() {
            self.tally.borrow_mut().acknowledged[key] = true;
        }
    }

    /// One request.
    async fn request(&self, key: usize) -> Result<(), NotAcknowledged> {
        let id = self.id(key);
        let request = self
            .client
            .post(self.url())
            .header("webhook-id", &id)
            .header("x-github-delivery", &id)
            .header("content-type", "application/json")
            .body(format!(r#"{{"id": "{id}", "type": "storm"}}"#));
        let started = Instant::now();
        // The body too, which is empty, so that the connection can be used again.
        let answer = match request.send().await {
            Ok(response) => {
                let result = response.headers().get("x-dedup-result");
                let result = result.and_then(|value| value.to_str().ok()).map(str::to_owned);
                let status = response.status();
                response.bytes().await.map(|_| (status, result))
            }
            Err(error) => Err(error),
        };
        let took = started.elapsed();

        let mut tally = self.tally.borrow_mut();
        tally.sent += 1;
        let failure = match answer {
            Ok((status, result)) => {
                tally.latencies.add(took);
                match (status.is_success(), result.as_deref()) {
                    (true, Some("duplicate")) => {
                        tally.duplicate += 1;
                        return Ok(());
                    }
                    (true, _) => {
                        tally.first += 1;
                        return Ok(());
                    }
                    (false, Some("in-flight")) => {
                        tally.in_flight += 1;
                        return Err(NotAcknowledged);
                    }
                    (false, Some(why)) => format!("{} {why}", status.as_u16()),
                    (false, None) => status.as_u16().to_string(),
                }
            }
            Err(error) if error.is_timeout() => "no answer in time".to_owned(),
            Err(error) if error.is_connect() => "no connection".to_owned(),
            Err(_) => "connection broken".to_owned(),
        };
        *tally.failed.entry(failure).or_default() += 1;
        self.bar.set_message(format!("{} failed", tally.failed.values().sum::<u64>()));
        Err(NotAcknowledged)
    }

    /// What took effect, in this run and in those before it.
    async fn effects(&self) -> Result<Vec<Effect>, Box<dyn Error>> {
        let ask = || async {
            let response = self.client.get(self.effects.clone()).send().await?;
            response.error_for_status()?.json().await
        };
        let effects = ask
            .retry(soon_again())
            .when(|error: &reqwest::Error| {
                let passes = error.is_connect() || error.status().is_some_and(is_passing);
                self.options.until_acknowledged && passes
            })
            .await;
        effects.map_err(|error| {
            let why =
                if error.is_connect() { "nobody answers there".into() } else { error.to_string() };
            format!(
                "cannot read {}: {why} (`cargo run --example receiver` starts a receiver)",
                self.effects
            )
            .into()
        })
    }

    fn verdict(&self, effects: &[Effect]) -> Verdict {
        let mut counts = vec![0; self.options.keys];
        for effect in effects {
            let key = effect.id.strip_prefix(&self.prefix).and_then(|key| key.parse().ok());
            if let Some(count) = key.and_then(|key: usize| counts.get_mut(key)) {
                *count += effect.count;
            }
        }
        let acknowledged = &self.tally.borrow().acknowledged;
        let keys = 0..counts.len();
        Verdict {
            lost: keys.clone().filter(|key| acknowledged[*key] && counts[*key] == 0).collect(),
            doubled: keys.filter(|key| counts[*key] > 1).collect(),
        }
    }

    fn table(&self, verdict: &Verdict, took: Duration) -> impl fmt::Display {
        let tally = self.tally.borrow();
        let acknowledged = tally.acknowledged.iter().filter(|yes| **yes).count();
        let rate = tally.sent as f64 / took.as_secs_f64();
        let ms = |latency: Duration| format!("{:.1} ms", latency.as_secs_f64() * 1_000.0);
        let mut table = Builder::new();
        let mut row = |what: &str, value: String| table.push_record([what.to_owned(), value]);
        row("sent", tally.sent.to_string());
        row("first", tally.first.to_string());
        row("duplicate", tally.duplicate.to_string());
        row("in flight", tally.in_flight.to_string());
        row("failed", tally.failed.values().sum::<u64>().to_string());
        for (why, count) in &tally.failed {
            row(&format!("  {why}"), count.to_string());
        }
        row("keys", self.options.keys.to_string());
        row("acknowledged", acknowledged.to_string());
        row("lost", verdict.lost.len().to_string());
        row("doubled", verdict.doubled.len().to_string());
        row("time", format!("{:.1} s", took.as_secs_f64()));
        row("requests/s", format!("{rate:.0}"));
        row("latency p50", ms(tally.latencies.percentile(50)));
        row("latency p99", ms(tally.latencies.percentile(99)));
        let mut table = table.build();
        table
            .with(Style::rounded().remove_horizontals())
            .modify(Columns::last(), Alignment::right());
        table
    }
}

/// Soon, then less soon, and without an end.
fn soon_again() -> ExponentialBuilder {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(1))
        .with_jitter()
        .without_max_times()
}

/// Whether a status may be another one in a moment.
fn is_passing(status: StatusCode) -> bool {
    status.is_server_error()
}

/// How long answers took, to 2 %: counts by microseconds, of which the upper seven bits are kept,
/// so that any number of answers takes little memory.
#[derive(Default)]
struct Latencies(BTreeMap<u64, u64>);

impl Latencies {
    fn add(&mut self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        let noise = micros.checked_ilog2().unwrap_or(0).saturating_sub(6);
        *self.0.entry(micros >> noise << noise).or_default() += 1;
    }

    fn percentile(&self, percent: u64) -> Duration {
        let rank = self.0.values().sum::<u64>() * percent / 100;
        let mut seen = 0;
        let found = self.0.iter().find(|(_, count)| {
            seen += **count;
            seen > rank
        });
        Duration::from_micros(found.map_or(0, |(micros, _)| *micros))
    }
}
