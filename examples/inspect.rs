//! Looks into a store of keys: what became of an event, and how to let it run again.
//!
//! ```text
//! cargo run --example inspect -- get standard-webhooks msg_1
//! cargo run --example inspect -- --store postgres://… forget stripe evt_1
//! cargo run --example inspect -- --store postgres://… --schema billing --table seen count
//! cargo run --example inspect -- purge --batch 500
//! ```
//!
//! The namespace of a preset is its name: `standard-webhooks`, `github`, `stripe`, `twilio`.
//!
//! The exit code is 1 if there is no such key, if `forget` is refused because the event is running,
//! and if the store cannot be asked. A table that is not there is made, as the layer would.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::{DateTime, SecondsFormat};
use clap::{Args, Parser, Subcommand};
use sqlx::sqlite::SqliteConnectOptions;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    self, CallTerms, Claimed, Entry, EntryState, Fetch, Forgotten, Identifier, MaintenanceAdapter,
    PostgresAdapter, PostgresOptions, SqliteAdapter, SqliteOptions, StoredData, Token,
};

mod shared;

/// Looks into a store of keys.
#[derive(Debug, Parser)]
struct Options {
    /// Where the keys are: `sqlite://FILE` or `postgres://…`.
    #[arg(long, global = true, default_value = "sqlite://dedup.db")]
    store: String,
    /// The table, if it is not the default one.
    #[arg(long, global = true, value_parser = Identifier::new)]
    table: Option<Identifier>,
    /// The table's schema, if it is not the first of the search path; Postgres only.
    #[arg(long, global = true, value_parser = Identifier::new)]
    schema: Option<Identifier>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Says what is known of an event.
    Get(Event),
    /// Forgets an event: its next delivery runs. Refused while it is running.
    Forget(Event),
    /// Counts the keys, with those that have expired and are not purged yet.
    Count,
    /// Deletes the keys that have expired.
    Purge {
        /// How many at a time; small batches hold locks shortly.
        #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
        batch: u32,
    },
}

#[derive(Debug, Args)]
struct Event {
    namespace: String,
    id: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Options::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {}", shared::in_one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Returns what is stored with a complete key: a claim of it changes nothing, and returns that.
async fn stored_data(
    store: &dyn MaintenanceAdapter,
    key: DedupKey,
) -> Result<Option<Arc<StoredData>>, tower_dedup::Error> {
    let keys = [key];
    let terms = CallTerms::on_claim(Token::random(), Duration::ZERO);
    let terms = terms.with_fetch(Fetch::DigestAndResponse);
    match store.claim(&keys, &terms).await?.pop() {
        Some(Claimed::Duplicate(seen)) => Ok(seen.stored),
        // The key has expired since.
        _ => store.release(&keys, &terms).await.map(|_| None),
    }
}

/// Answers whether what was asked for was there, or was done.
async fn run(options: Options) -> Result<bool, Box<dyn Error>> {
    let store = connect(&options).await?;
    let (found, text) = match &options.command {
        Command::Get(event) => match store.get(&event.key()?).await? {
            Some(entry) => {
                let stored = match entry.state {
                    EntryState::Complete { .. } => stored_data(&*store, event.key()?).await?,
                    _ => None,
                };
                (true, described(event, &entry, &stored.unwrap_or_default()))
            }
            None => (false, "there is no such key".to_owned()),
        },
        Command::Forget(event) => match store.forget(&event.key()?).await? {
            Forgotten::Removed => (true, "forgotten: the next delivery runs".to_owned()),
            Forgotten::InFlight => (false, "refused: the event is running".to_owned()),
            _ => (false, "there is no such key".to_owned()),
        },
        Command::Count => (true, format!("{} keys", store.count().await?)),
        Command::Purge { batch } => {
            let mut total = 0;
            loop {
                let purged = store.purge(*batch).await?;
                total += purged;
                if purged < u64::from(*batch) {
                    break (true, format!("{total} keys purged"));
                }
            }
        }
    };
    store.close().await;
    writeln!(io::stdout(), "{text}")?;
    Ok(found)
}

/// A store for which the default table is good enough is `adapter::connect(url)`, whatever it is.
async fn connect(options: &Options) -> Result<Arc<dyn MaintenanceAdapter>, Box<dyn Error>> {
    let url = options.store.as_str();
    if url.starts_with("sqlite:") {
        if options.schema.is_some() {
            return Err("--schema is for Postgres".into());
        }
        // To connect would make the file.
        let file = url.parse::<SqliteConnectOptions>()?;
        if !file.get_filename().exists() {
            return Err(format!("there is no file {}", file.get_filename().display()).into());
        }
        let mut names = SqliteOptions::new();
        if let Some(table) = options.table.clone() {
            names = names.table(table);
        }
        return Ok(Arc::new(SqliteAdapter::connect_with(url, names).await?));
    }
    if url.starts_with("postgres") {
        let mut names = PostgresOptions::new();
        if let Some(table) = options.table.clone() {
            names = names.table(table);
        }
        if let Some(schema) = options.schema.clone() {
            names = names.schema(schema);
        }
        return Ok(Arc::new(PostgresAdapter::connect_with(url, names).await?));
    }
    if url.starts_with("memory:") {
        return Err("what is in memory is known to its own process only".into());
    }
    Ok(adapter::connect(url).await?)
}

impl Event {
    fn key(&self) -> Result<DedupKey, Box<dyn Error>> {
        Ok(DedupKey::new(&self.namespace, &self.id)?)
    }
}

fn described(event: &Event, entry: &Entry, kept: &StoredData) -> String {
    let state = match entry.state {
        EntryState::Complete { completed_at } => format!("complete since {}", utc(completed_at)),
        EntryState::InFlight { lease_until } if lease_until > SystemTime::now() => {
            format!("running, under a lease until {}", utc(lease_until))
        }
        EntryState::InFlight { lease_until } => {
            format!("its lease lapsed at {}: the next delivery takes it over", utc(lease_until))
        }
        EntryState::Released => "failed: the next delivery runs it again".to_owned(),
        _ => "unknown".to_owned(),
    };
    let takeover = if entry.takeover { ", the last one a takeover" } else { "" };
    let mut lines = vec![
        format!("namespace   {}", event.namespace),
        format!("id          {}", event.id),
        format!("state       {state}"),
        format!("attempts    {}{takeover}", entry.attempts),
        format!("first seen  {}", utc(entry.first_seen_at)),
        format!("expires     {}", utc(entry.expires_at)),
    ];
    if let Some(digest) = kept.payload_sha256 {
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        lines.push(format!("payload     sha256 {hex}"));
    }
    if let Some(response) = &kept.response {
        // Its content may be personal data.
        lines.push(format!("response    {}, {} bytes", response.status, response.body.len()));
    }
    lines.join("\n")
}

fn utc(time: SystemTime) -> String {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    match DateTime::from_timestamp(seconds, 0) {
        Some(time) => time.to_rfc3339_opts(SecondsFormat::Secs, true),
        None => "the end of time".to_owned(),
    }
}
