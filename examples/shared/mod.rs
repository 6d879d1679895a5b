//! Code that several examples share: logging and shutdown.
#![allow(dead_code, reason = "each example uses only some of these items")]

use std::error::Error;
use std::future::Future;
use std::io::{self, IsTerminal};

use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Logs to stderr, filtered by `RUST_LOG` or by this default. `LOG_FORMAT=json` makes each record a line of JSON.
pub(crate) fn log(default: &str) {
    // `EnvFilter` compiles regular expressions, for filters by span.
    let filter = std::env::var("RUST_LOG").ok().and_then(|filter| filter.parse::<Targets>().ok());
    let filter = filter.unwrap_or_else(|| default.parse().expect("targets with levels"));
    let stderr = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    let is_json = std::env::var("LOG_FORMAT").is_ok_and(|format| format == "json");
    let stderr = if is_json { stderr.json().boxed() } else { stderr.boxed() };
    tracing_subscriber::registry().with(stderr).with(filter).init();
}

/// Returns a future that ends on SIGTERM or Ctrl-C. The call itself installs the signal handlers.
pub(crate) fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        Ok(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    Ok(async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}

/// Returns the error and its causes in one line, without causes that the line already contains.
pub(crate) fn in_one_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = cause.source();
    }
    line
}
