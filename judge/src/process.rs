//! [`Receiver`]: the program of `--start`, in a process group of its own.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::target::Target;

/// How long a receiver may take until it listens.
const STARTS: Duration = Duration::from_secs(60);
/// How long the socket of a killed receiver may be open.
const ENDS: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Returns a shell that runs a command without input and output, and that is killed if nobody waits for it any more.
pub(crate) fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).kill_on_drop(true);
    shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    shell
}

/// A signal to a process group.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Signal {
    Kill,
    Stop,
    Continue,
}

/// The program of `--start`. Its process group is killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Receiver {
    command: String,
    log: Option<File>,
    target: Target,
    child: RefCell<Option<Child>>,
    /// Members of the group may outlive the child.
    group: Cell<Option<u32>>,
}

impl Receiver {
    pub(crate) fn new(command: String, log: Option<File>, target: Target) -> Self {
        Self { command, log, target, child: RefCell::default(), group: Cell::default() }
    }

    /// Starts the program, and waits until it listens.
    pub(crate) async fn start(&self) -> Result<(), String> {
        let mut shell = shell(&self.command);
        #[cfg(unix)]
        shell.process_group(0);
        if let Some(log) = &self.log {
            let output = || log.try_clone().map_err(|error| format!("--log: {error}"));
            shell.stdout(output()?).stderr(output()?);
        }
        let mut child = shell.spawn().map_err(|error| format!("--start does not run: {error}"))?;
        self.group.set(child.id());
        let deadline = Instant::now() + STARTS;
        while self.target.connect().await.is_err() {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(format!("--start has ended ({status}) before it listens; see --log"));
            }
            if Instant::now() > deadline {
                let limit = STARTS.as_secs();
                return Err(format!("--start does not listen within {limit} s; see --log"));
            }
            sleep(PAUSE).await;
        }
        self.child.replace(Some(child));
        Ok(())
    }

    /// Kills the process group, waits until nothing listens, and starts the program again.
    pub(crate) async fn restart(&self) -> Result<(), String> {
        self.signal(Signal::Kill);
        if let Some(mut child) = self.child.take() {
            let _ = child.wait().await;
        }
        self.group.set(None);
        let deadline = Instant::now() + ENDS;
        while self.target.connect().await.is_ok() {
            if Instant::now() > deadline {
                return Err(
                    "something still listens after the process group of --start was killed: \
                     --start runs the receiver in the foreground, and nothing else listens there"
                        .to_owned(),
                );
            }
            sleep(PAUSE).await;
        }
        self.start().await
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(group) = self.group.get() {
            send(group, signal);
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.signal(Signal::Kill);
    }
}

#[cfg(unix)]
fn send(group: u32, signal: Signal) {
    use rustix::process::{Pid, Signal as Unix, kill_process_group};

    let signal = match signal {
        Signal::Kill => Unix::KILL,
        Signal::Stop => Unix::STOP,
        Signal::Continue => Unix::CONT,
    };
    if let Some(group) = i32::try_from(group).ok().and_then(Pid::from_raw) {
        // The group may have ended by itself.
        let _ = kill_process_group(group, signal);
    }
}

#[cfg(not(unix))]
fn send(_: u32, _: Signal) {}
