//! [`Keeper`]: a shell that keeps a server of the tests.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A shell that executes the lines that it is told, and answers each by a line.
pub(super) struct Keeper {
    process: Child,
    /// `None` when the keeper was told to end.
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Keeper {
    pub(super) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().expect("`sh` starts");
        Self {
            commands: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().expect("a pipe")),
            process,
        }
    }

    /// Sends a line. Returns the answer.
    pub(super) fn tell(&mut self, command: &str) -> String {
        let commands = self.commands.as_mut().expect("a keeper until the drop");
        writeln!(commands, "{command}").expect("the keeper lives");
        self.answer()
    }

    pub(super) fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the keeper answers");
        line.trim_end().to_owned()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.process.wait();
    }
}

/// Returns whether no process has this port.
pub(super) fn is_free(port: u16) -> bool {
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => false,
        Err(error) => panic!("no port on 127.0.0.1: {error}"),
    }
}

/// Returns what `scripts/NAME --find` finds: the program of a server, or the folder of its programs. Panics with what to
/// install, or which variable to set, if there is none.
pub(super) fn find(name: &str, url: &str) -> PathBuf {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
    let found = Command::new(scripts.join(name)).arg("--find").output().expect("bash");
    let [path, why] =
        [found.stdout, found.stderr].map(|text| String::from_utf8(text).expect("text"));
    assert!(found.status.success(), "{why}or set {url} to the URL of a server that runs");
    path.trim_end().into()
}
