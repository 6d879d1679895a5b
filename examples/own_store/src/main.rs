//! The command `tower-dedup` over this store: `get`, `list`, `forget`, `stats`, `purge`, `import`.

use std::process::ExitCode;

use own_store::{MariaDbStore, Options};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let connect = async |url: String| MariaDbStore::connect(&url, Options::default()).await;
    tower_dedup_cli::run_on(connect).await
}
