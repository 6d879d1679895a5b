//! Looks up, forgets, counts and purges keys in a store.
//!
//! ```text
//! cargo run --example inspect -- get standard-webhooks msg_1
//! cargo run --example inspect -- --store postgres://… forget stripe evt_1
//! cargo run --example inspect -- --store postgres://… --schema billing --table seen count
//! cargo run --example inspect -- purge --keys-per-statement 500
//! ```
//!
//! The namespace of a preset is its name: `standard-webhooks`, `github`, `stripe`, `twilio`.
//!
//! The exit code is 1 if the key does not exist, if the event of `forget` is running, or if the store
//! fails. A missing table is created, as by the layer.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, SecondsFormat};
use clap::{Args, Parser, Subcommand};
use sqlx::sqlite::SqliteConnectOptions;
use tower_dedup::DedupKey;
use tower_dedup::adapter::{
    self, Entry, EntryState, Forgotten, Identifier, MaintenanceAdapter, PostgresAdapter,
    PostgresOptions, SqliteAdapter, SqliteOptions,
};

mod shared;

/// Looks up, forgets, counts and purges keys in a store.
#[derive(Debug, Parser)]
struct Options {
    /// The store: `sqlite://FILE` or `postgres://…`.
    #[arg(long, global = true, default_value = "sqlite://dedup.db")]
    store: String,
    /// The table, if not the default.
    #[arg(long, global = true, value_parser = Identifier::new)]
    table: Option<Identifier>,
    /// The table's schema, if not the first of the search path; Postgres only.
    #[arg(long, global = true, value_parser = Identifier::new)]
    schema: Option<Identifier>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints the state of an event.
    Get(Event),
    /// Forgets an event, so that its next delivery runs. Refused while the event is running.
    Forget(Event),
    /// Counts the keys, including expired keys that are not purged yet.
    Count,
    /// Deletes keys that expired at least an hour ago.
    Purge {
        /// How many keys one statement deletes. Fewer keys hold locks for a shorter time.
        #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
        keys_per_statement: u32,
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

/// Returns `false` if the key does not exist or the call was refused.
async fn run(options: Options) -> Result<bool, Box<dyn Error>> {
    let store = connect(&options).await?;
    let (found, text) = match &options.command {
        Command::Get(event) => match store.get(&event.key()?).await? {
            Some(entry) => (true, describe(event, &entry)),
            None => (false, "there is no such key".to_owned()),
        },
        Command::Forget(event) => match store.forget(&event.key()?).await? {
            Forgotten::Removed => (true, "forgotten: the next delivery runs".to_owned()),
            Forgotten::InFlight => (false, "refused: the event is running".to_owned()),
            _ => (false, "there is no such key".to_owned()),
        },
        Command::Count => (true, format!("{} keys", store.stats().await?.rows)),
        Command::Purge { keys_per_statement: limit } => {
            let mut total = 0;
            loop {
                let purged = store.purge(*limit).await?;
                total += purged.deleted;
                if purged.is_round_complete {
                    break (true, format!("{total} keys purged"));
                }
            }
        }
    };
    store.close().await;
    writeln!(io::stdout(), "{text}")?;
    Ok(found)
}

/// Opens the store. With the default table, `adapter::connect(url)` is enough for any store.
async fn connect(options: &Options) -> Result<Arc<dyn MaintenanceAdapter>, Box<dyn Error>> {
    let url = options.store.as_str();
    if url.starts_with("sqlite:") {
        if options.schema.is_some() {
            return Err("--schema is for Postgres".into());
        }
        // `connect` would create the file.
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
        return Err("a memory store exists only in its own process".into());
    }
    Ok(adapter::connect(url).await?)
}

impl Event {
    fn key(&self) -> Result<DedupKey, Box<dyn Error>> {
        Ok(DedupKey::new(&self.namespace, &self.id)?)
    }
}

fn describe(event: &Event, entry: &Entry) -> String {
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
    let takeover = if entry.takeover { ", the last a takeover" } else { "" };
    let mut lines = vec![
        format!("namespace   {}", event.namespace),
        format!("id          {}", event.id),
        format!("state       {state}"),
        format!("attempts    {}{takeover}", entry.attempts),
        format!("first seen  {}", utc(entry.first_seen_at)),
        format!("expires     {}", utc(entry.expires_at)),
    ];
    let stored = entry.stored.as_deref();
    if let Some(digest) = stored.and_then(|stored| stored.payload_sha256) {
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        lines.push(format!("payload     sha256 {hex}"));
    }
    if let Some(response) = stored.and_then(|stored| stored.response.as_ref()) {
        // The body may be personal data, so only its size is printed.
        lines.push(format!("response    {}, {} bytes", response.status, response.body.len()));
    }
    if entry.response_is_unreadable {
        lines.push("response    unreadable: a replay of it answers 503".to_owned());
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
