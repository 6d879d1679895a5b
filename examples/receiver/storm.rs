//! A storm of redeliveries against a running [receiver](src/main.rs), with a count of the effects.
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
//! The storm delivers `--keys` events, each `--copies` times. The copies of one event leave together,
//! so they race for its key. With several receivers on one store (`--url` for each), requests go to the
//! receivers in turn, as behind a load balancer. Afterwards the storm reads the effects from the first
//! receiver and counts:
//!
//! - *lost*: events that were acknowledged with a 2xx and took no effect;
//! - *doubled*: events that took effect more than once.
//!
//! If an event is lost or doubled, the exit code is 1.
//!
//! With `--until-acknowledged`, the storm repeats every delivery until it is acknowledged. Stop the
//! receiver during the storm and start it again. A `kill -9` shows how the ledgers differ.
//! Under `lease`, an event whose receiver died between effect and completion runs again, and is
//! doubled. Under `on-arrival`, an event whose receiver died before the effect is lost. Under
//! `transactional`, neither happens.
//!
//! The storm signs nothing, so the receiver must have no secret for that sender.
//!
//! Ids are new in every run. Each request carries its id in the headers of Standard Webhooks and
//! GitHub, and in the body, where Stripe has it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::iter;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::body::{self, Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode, Uri};
use backon::{ExponentialBuilder, Retryable};
use clap::Parser;
use futures_util::{StreamExt, stream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use tokio::time::timeout;

/// The time limit of a request; many senders have a shorter one.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How many lost or doubled ids the storm prints.
const MAX_PRINTED: usize = 5;

/// Delivers events many times and counts their effects.
#[derive(Debug, Parser)]
struct Options {
    /// The URL to deliver to. Several URLs are used in turn. The effects are read from `/effects` on
    /// the host of the first one.
    #[arg(
        long = "url",
        value_name = "URL",
        default_value = "http://127.0.0.1:3000/webhooks/standard-webhooks"
    )]
    urls: Vec<Uri>,
    /// The number of events.
    #[arg(long, default_value_t = 1_000)]
    keys: usize,
    /// How often each event is delivered.
    #[arg(long, default_value_t = 32)]
    copies: usize,
    /// How many deliveries run at once.
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    concurrency: usize,
    /// Repeats every delivery until its response is a 2xx.
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

/// Returns `true` if no event was lost or doubled.
async fn run(options: Options) -> Result<bool, Box<dyn Error>> {
    let storm = Storm::new(options)?;
    storm.effects().await?; // fails if no receiver runs

    let Options { keys, copies, concurrency, .. } = storm.options;
    let started = Instant::now();
    // One task polls all deliveries; at most `concurrency` exist at a time.
    stream::iter((0..keys).flat_map(|key| iter::repeat_n(key, copies)))
        .map(|key| storm.deliver(key))
        .buffer_unordered(concurrency)
        .count()
        .await;
    let took = started.elapsed();

    let verdict = storm.verdict(&storm.effects().await?);
    write!(io::stdout(), "{}", storm.table(&verdict, took))?;
    for (what, keys) in [("lost", &verdict.lost), ("doubled", &verdict.doubled)] {
        for key in keys.iter().take(MAX_PRINTED) {
            writeln!(io::stdout(), "{what}: {}", storm.id(*key))?;
        }
    }
    Ok(verdict.lost.is_empty() && verdict.doubled.is_empty())
}

struct Storm {
    options: Options,
    client: Client<HttpConnector, Body>,
    effects: Uri,
    /// The number of requests so far, which selects the next URL.
    sent: Cell<usize>,
    /// The prefix of all ids of this run.
    prefix: String,
    tally: RefCell<Tally>,
}

/// Counts of the responses so far.
#[derive(Default)]
struct Tally {
    sent: u64,
    first: u64,
    duplicate: u64,
    in_flight: u64,
    failed: BTreeMap<String, u64>,
    /// For each key, `true` if any copy got a 2xx.
    acknowledged: Vec<bool>,
}

struct NotAcknowledged;

/// Why there is no response.
enum Unanswered {
    NoConnection,
    Broken,
    Timeout,
}

/// An effect, as the receiver lists it.
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
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(options.concurrency)
            .build_http();
        let url = options.urls.first().ok_or("no URL")?;
        let mut effects = url.clone().into_parts();
        effects.path_and_query = Some("/effects".parse()?);
        let effects = Uri::from_parts(effects).map_err(|error| format!("--url {url}: {error}"))?;
        let tally = Tally { acknowledged: vec![false; options.keys], ..Tally::default() };
        let prefix = format!("storm_{:016x}_", rand::random::<u64>());
        let (tally, sent) = (RefCell::new(tally), Cell::new(0));
        Ok(Self { options, client, effects, sent, prefix, tally })
    }

    /// Returns the URL of the next request.
    fn url(&self) -> Uri {
        let sent = self.sent.get();
        self.sent.set(sent.wrapping_add(1));
        self.options.urls[sent % self.options.urls.len()].clone()
    }

    fn id(&self, key: usize) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Delivers once, or until acknowledged.
    async fn deliver(&self, key: usize) {
        let request = || self.request(key);
        let acknowledged = request.retry(backoff()).when(|_| self.options.until_acknowledged).await;
        if acknowledged.is_ok() {
            self.tally.borrow_mut().acknowledged[key] = true;
        }
    }

    /// Sends one request and counts its response.
    async fn request(&self, key: usize) -> Result<(), NotAcknowledged> {
        let id = self.id(key);
        let request = Request::post(self.url())
            .header("webhook-id", &id)
            .header("x-github-delivery", &id)
            .header("content-type", "application/json")
            .body(format!(r#"{{"id": "{id}", "type": "storm"}}"#).into())
            .expect("a request");
        let response = self.send(request).await;
        let mut tally = self.tally.borrow_mut();
        tally.sent += 1;
        let failure = match response {
            Ok((status, headers, _)) => {
                let result = headers.get("x-dedup-result").and_then(|value| value.to_str().ok());
                match (status.is_success(), result) {
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
            Err(why) => why.in_words().to_owned(),
        };
        *tally.failed.entry(failure).or_default() += 1;
        Err(NotAcknowledged)
    }

    /// Reads an empty body, too, so that the connection can be reused.
    async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), Unanswered> {
        let exchange = async {
            let (head, body) = self.client.request(request).await?.into_parts();
            let body = body::to_bytes(Body::new(body), usize::MAX).await;
            Ok((head.status, head.headers, body.map_err(|_| Unanswered::Broken)?))
        };
        timeout(TIMEOUT, exchange).await.unwrap_or(Err(Unanswered::Timeout))
    }

    /// Returns the effects of this run and of earlier runs.
    async fn effects(&self) -> Result<Vec<Effect>, Box<dyn Error>> {
        let read = || async {
            let request = Request::get(&self.effects).body(Body::empty()).expect("a request");
            match self.send(request).await {
                Ok((StatusCode::OK, _, effects)) => Ok(effects),
                Ok((status, ..)) => Err((status.is_server_error(), status.to_string())),
                Err(Unanswered::NoConnection) => Err((true, "no receiver listens there".into())),
                Err(why) => Err((false, why.in_words().into())),
            }
        };
        let effects = read
            .retry(backoff())
            .when(|(is_transient, _)| self.options.until_acknowledged && *is_transient)
            .await;
        let effects = effects.map_err(|(_, why)| {
            format!(
                "cannot read {}: {why} (`cargo run --example receiver` starts a receiver)",
                self.effects
            )
        })?;
        Ok(serde_json::from_slice(&effects)?)
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

    fn table(&self, verdict: &Verdict, took: Duration) -> String {
        let tally = self.tally.borrow();
        let acknowledged = tally.acknowledged.iter().filter(|yes| **yes).count();
        let rate = tally.sent as f64 / took.as_secs_f64();
        let mut table = String::new();
        let mut row = |what: &str, value: String| table += &format!("{what:<18}{value:>12}\n");
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
        table
    }
}

impl From<ClientError> for Unanswered {
    fn from(error: ClientError) -> Self {
        if error.is_connect() { Self::NoConnection } else { Self::Broken }
    }
}

impl Unanswered {
    fn in_words(&self) -> &'static str {
        match self {
            Self::NoConnection => "no connection",
            Self::Broken => "connection broken",
            Self::Timeout => "timeout",
        }
    }
}

/// Returns pauses from 50 ms to 1 s, without an end.
fn backoff() -> ExponentialBuilder {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(1))
        .with_jitter()
        .without_max_times()
}
