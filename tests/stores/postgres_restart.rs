//! The end of the tests' own servers.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::postgres::Server;
use crate::support::until;

const PARENT: &str = "TOWER_DEDUP_TEST_POSTGRES_PARENT";
const MARK: &str = "server-is-at:";

/// Not a test: a process that has a server, if this binary is started as one.
#[test]
fn parent() {
    if std::env::var_os(PARENT).is_none() {
        return;
    }
    let server = Server::start();
    println!("\n{MARK}{} {}", server.port(), server.dir().display());
    loop {
        std::thread::park();
    }
}

#[tokio::test]
async fn killed_process_leaves_no_server() {
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["postgres_restart::parent", "--exact", "--nocapture"])
        .env(PARENT, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let (port, dir) = loop {
        let line = lines.next().expect("the parent starts").unwrap();
        if let Some((_, server)) = line.split_once(MARK) {
            let (port, dir) = server.split_once(' ').unwrap();
            break (port.parse().unwrap(), Path::new(dir).to_owned());
        }
    };
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok() && dir.exists());
    // SIGKILL: the process cannot clean up.
    parent.kill().unwrap();
    parent.wait().unwrap();
    until(|| gone(&dir, port)).await;
}

fn gone(dir: &Path, port: u16) -> bool {
    let address = ([127, 0, 0, 1], port).into();
    !dir.exists() && TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err()
}
