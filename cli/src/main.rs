//! The command `tower-dedup`: operates a store.
//!
//! 1. A command that only reads (`doctor`, `migrate --check`, `get`, `list`, `stats`)
//!    never makes the table, never starts a purge, and needs no right but SELECT.
//! 2. No output contains the URL of the store or a part of its password.
//! 3. `doctor` gathers facts apart from the judgement of the facts, so that each judgement has a test.

mod doctor;
mod failure;
mod key;
mod keys;
mod options;
mod output;
mod store;
mod table;

use std::process::{self, ExitCode};

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use failure::Failure;
use options::{Command, Options};
use store::Target;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::try_parse().unwrap_or_else(|error| refuse(&error));
    let output = options.output;
    match run(options).await {
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
async fn run(Options { store, output, timeout, command }: Options) -> Result<bool, Failure> {
    let target = || Target::new(store.as_deref().unwrap_or_default(), timeout);
    match command {
        Command::Key(options) => key::run(&options, output),
        Command::Migrate(options) if options.print => table::print(&target()?, output),
        Command::Migrate(options) => table::migrate(&target()?, &options, output).await,
        Command::Stats => table::stats(&target()?, output).await,
        Command::Get(event) => keys::get(&target()?, &event, output).await,
        Command::List(options) => keys::list(&target()?, &options, output).await,
        Command::Forget(options) => keys::forget(&target()?, &options, output).await,
        Command::Purge { keys_per_statement } => {
            table::purge(&target()?, keys_per_statement, output).await
        }
        Command::Doctor => doctor::doctor(&target()?, output).await,
    }
}
