//! The three receivers, as the parent sees them.

use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, oneshot};
use tokio::time::timeout;

use crate::log::{Log, Window, now};
use crate::receiver::{LISTENS, SETUP, Setup};
use crate::row::Row;
use support::postgres::free_port;

pub(crate) const RECEIVERS: usize = 3;

/// A receiver listens after this time, even if its store is away when it starts.
const STARTS: Duration = Duration::from_secs(70);
/// The release of a claim of unknown outcome goes on for 20 s.
const DRAINED: Duration = Duration::from_secs(40);

pub(crate) struct Receivers {
    /// The numbers of the receivers are set when they start.
    setups: [Setup; RECEIVERS],
    children: [Mutex<Receiver>; RECEIVERS],
    next: AtomicU32,
    log: Log,
}

impl Receivers {
    /// Starts all receivers together.
    pub(crate) async fn start(
        row: Row,
        url: &str,
        effects: &str,
        seed: u64,
        log: &Log,
    ) -> Result<Self, String> {
        let mut number = 0;
        let setups = std::array::from_fn(|_| {
            number += 1;
            let (url, effects) = (url.to_owned(), effects.to_owned());
            Setup { row, url, effects, port: free_port(), receiver: number, seed }
        });
        let [first, second, third] = &setups;
        let children = tokio::try_join!(spawn(first, log), spawn(second, log), spawn(third, log))?;
        let children = [children.0, children.1, children.2].map(Mutex::new);
        Ok(Self { setups, children, next: AtomicU32::new(number + 1), log: log.clone() })
    }

    pub(crate) fn ports(&self) -> [u16; RECEIVERS] {
        std::array::from_fn(|place| self.setups[place].port)
    }

    /// Kills a receiver by SIGKILL, and starts it again at the same port.
    pub(crate) async fn kill(&self, place: usize) -> Result<(), String> {
        let mut child = self.children[place].lock().await;
        let (receiver, from) = (child.number, now());
        // Before the end of its output, which is an error unless its death is in the log.
        self.log.faults().deaths.push((receiver, Window(from, u64::MAX)));
        child
            .process
            .kill()
            .await
            .map_err(|error| format!("a receiver that cannot be killed: {error}"))?;
        for death in self.log.faults().deaths.iter_mut().filter(|death| death.0 == receiver) {
            death.1.1 = now();
        }
        let receiver = self.next.fetch_add(1, Ordering::Relaxed);
        *child = spawn(&Setup { receiver, ..self.setups[place].clone() }, &self.log).await?;
        Ok(())
    }

    /// Waits until the handlers of clients that hung up have ended, and no write is pending.
    pub(crate) async fn drain(&self) -> Result<(), String> {
        for port in self.ports() {
            let drained = timeout(DRAINED, async {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
                let request =
                    b"GET /drain HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
                stream.write_all(request).await?;
                let mut response = String::new();
                stream.read_to_string(&mut response).await?;
                std::io::Result::Ok(response.starts_with("HTTP/1.1 200"))
            });
            match drained.await {
                Ok(Ok(true)) => {}
                other => {
                    return Err(format!("a receiver is not idle after {DRAINED:?}: {other:?}"));
                }
            }
        }
        Ok(())
    }
}

struct Receiver {
    number: u32,
    process: Child,
}

/// Starts a receiver. Returns when it listens.
async fn spawn(setup: &Setup, log: &Log) -> Result<Receiver, String> {
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let setup_text = serde_json::to_string(setup).map_err(|error| error.to_string())?;
    let mut process = Command::new(this)
        .env(SETUP, setup_text)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("no receiver: {error}"))?;
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let (listening, listens) = oneshot::channel();
    let (number, log) = (setup.receiver, log.clone());
    tokio::spawn(async move {
        let mut listening = Some(listening);
        while let Ok(Some(line)) = lines.next_line().await {
            if line == LISTENS {
                listening.take().map(|listening| listening.send(()));
            }
        }
        let mut faults = log.faults();
        if !faults.deaths.iter().any(|death| death.0 == number) {
            faults.ended.push(number);
        }
    });
    match timeout(STARTS, listens).await {
        Ok(Ok(())) => Ok(Receiver { number, process }),
        _ => Err(format!("receiver {number} does not listen")),
    }
}
