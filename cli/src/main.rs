//! The command `tower-dedup`.

use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    tower_dedup_cli::run().await
}
