//! The command `tower-dedup`: operates a store.
//!
//! [`run`] is the command. [`run_on`] is the command over a store of your own: write a program of these lines beside your
//! adapter. It has every command but `doctor`, `inbox` and `migrate`.
//!
//! ```no_run
//! # use tower_dedup::adapter::MemoryAdapter as MyAdapter;
//! # trait Connect { async fn connect(url: &str) -> Result<MyAdapter, tower_dedup::StoreError>; }
//! # impl Connect for MyAdapter {
//! #     async fn connect(_: &str) -> Result<MyAdapter, tower_dedup::StoreError> { Ok(MyAdapter::new()) }
//! # }
//! use std::process::ExitCode;
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> ExitCode {
//!     tower_dedup_cli::run_on(async |url: String| MyAdapter::connect(&url).await).await
//! }
//! ```
//!
//! The URL is that of `--store` or `TOWER_DEDUP_STORE`; the command neither reads nor prints it. An adapter that has no
//! [`list`](MaintenanceAdapter::list) gives this error to the command of that name.
//!
//! # Rules
//!
//! 1. A command that only reads (`doctor`, `migrate --check`, `get`, `list`, `missed`, `stats`, `inbox list`,
//!    `inbox show`) never makes the table, never starts a purge, and needs no right but SELECT.
//! 2. No output contains the URL of the store or a part of its password.
//! 3. `doctor` gathers facts apart from the judgement of the facts, so that each judgement has a test.

mod doctor;
mod failure;
mod import;
mod inbox;
mod key;
mod keys;
mod lines;
mod missed;
mod options;
mod output;
mod store;
mod table;

use std::process::{self, ExitCode};
use std::rc::Rc;
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use tower_dedup::StoreError;
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use failure::Failure;
use options::{Command, Options};
use store::{Connect, Target};

/// Runs the command with the arguments of this process, on a store of the library.
pub async fn run() -> ExitCode {
    run_with(None).await
}

/// Runs the command with the arguments of this process, on the store that `connect` opens at the URL of `--store` or
/// `TOWER_DEDUP_STORE`. A command that needs no store does not call it.
///
/// The adapter should delete no expired keys by itself while the command runs, and make no table.
pub async fn run_on<A: MaintenanceAdapter>(
    connect: impl AsyncFn(String) -> Result<A, StoreError> + 'static,
) -> ExitCode {
    let connect = Rc::new(connect);
    let open: Connect = Box::new(move |url| {
        let connect = Rc::clone(&connect);
        Box::pin(async move { Ok(Arc::new(connect(url).await?) as Arc<dyn MaintenanceAdapter>) })
    });
    run_with(Some(open)).await
}

async fn run_with(own: Option<Connect>) -> ExitCode {
    let options = Options::try_parse().unwrap_or_else(|error| refuse(&error));
    let output = options.output;
    match answer(options, own).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            output.failure(&failure);
            ExitCode::from(failure.code)
        }
    }
}

/// Ends the process with help or a usage error. The error names the arguments, and one may be a URL with
/// its password.
fn refuse(error: &clap::Error) -> ! {
    use ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand as NoCommand, DisplayVersion,
    };

    if matches!(error.kind(), DisplayHelp | NoCommand | DisplayVersion) {
        error.exit();
    }
    let text = error.render().to_string();
    if text.contains("://") {
        let usage = Options::command().render_usage();
        output::tell(&format!("error: {} (a URL is not printed)\n\n{usage}", error.kind()));
    } else {
        output::tell(text.trim_end());
    }
    process::exit(failure::USAGE.into())
}

/// Runs a command. Returns `false` if the answer is no.
async fn answer(options: Options, own: Option<Connect>) -> Result<bool, Failure> {
    let Options { store, output, timeout, command } = options;
    let target = || Target::new(store.as_deref().unwrap_or_default(), timeout, own);
    match command {
        Command::Key(options) => key::run(&options),
        Command::Migrate(options) if options.print => table::print(&target()?, output),
        Command::Migrate(options) => table::migrate(&target()?, &options, output).await,
        Command::Stats => table::stats(&target()?, output).await,
        Command::Get(event) => keys::get(&target()?, &event, output).await,
        Command::List(options) => keys::list(&target()?, &options, output).await,
        Command::Forget(options) => keys::forget(&target()?, &options, output).await,
        Command::Import(options) => import::import(&target()?, &options, output).await,
        Command::Missed(options) => missed::missed(&target()?, &options, output).await,
        Command::Purge { keys_per_statement } => {
            table::purge(&target()?, keys_per_statement, output).await
        }
        Command::Inbox(options) => inbox::run(&target()?, options, output).await,
        Command::Doctor => doctor::doctor(&target()?, output).await,
    }
}
