//! The command: its exit codes, and that it leaves no process behind.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::postgres::free_port;

use crate::receivers::example;

fn judge(address: &str) -> Command {
    let mut judge = Command::new(env!("CARGO_BIN_EXE_tower-dedup-judge"));
    judge.arg(format!("http://{address}/webhook")).args(["--id", "json:/id"]);
    judge.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    judge
}

/// A command that runs a receiver in a child of a child.
fn start(address: &str, database: &str) -> String {
    let receiver = example("receiver");
    format!("({receiver} --listen {address} --store 'sqlite://{database}'; true) & wait; true")
}

fn is_open(address: &str) -> bool {
    TcpStream::connect(address).is_ok()
}

#[test]
fn judge_that_is_stopped_kills_the_process_group_of_the_receiver() {
    for signal in ["INT", "TERM", "HUP"] {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let database = dir.path().join("keys.db");
        let mut judge = judge(&address);
        judge.args(["--start", &start(&address, database.to_str().unwrap())]);
        judge.args(["--request", request(dir.path()).to_str().unwrap()]);
        let mut judge = judge.spawn().unwrap();
        let mut lines = BufReader::new(judge.stdout.take().unwrap()).lines();
        let first = lines.next().expect("a trial").unwrap();
        assert!(first.starts_with("first-and-second"), "{first}");
        assert!(is_open(&address));
        let id = judge.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        assert_eq!(judge.wait().unwrap().code(), Some(2), "{signal}");
        let deadline = Instant::now() + Duration::from_secs(5);
        while is_open(&address) {
            assert!(Instant::now() < deadline, "{signal}: the receiver lives");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn request(dir: &std::path::Path) -> std::path::PathBuf {
    let file = dir.join("request");
    let text = "POST /webhooks/circleci HTTP/1.1\ncontent-type: application/json\n\n{\"id\":\"1\"}";
    std::fs::write(&file, text).unwrap();
    file
}

#[test]
fn judge_that_cannot_judge_exits_with_2_and_says_why() {
    let address = format!("127.0.0.1:{}", free_port());
    let start = |command| vec!["--start", command];
    let cases = [
        (vec![], "Connection refused"),
        (start("exit 3"), "has ended (exit status: 3)"),
        (vec!["--count-url", "http://192.0.2.1/effects"], "--i-own-this-host"),
        (vec!["--sender", "nobody"], "no sender `nobody`"),
        (vec!["--sender", "github", "--secret-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (vec!["--request", "/no/such/file"], "/no/such/file"),
    ];
    for (options, words) in cases {
        let Output { status, stderr, .. } = judge(&address).args(&options).output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        assert!(status.code() == Some(2) && said.contains(words), "{options:?}: {status}: {said}");
    }
}

#[test]
fn guide_names_each_trial() {
    let mut judge = Command::new(env!("CARGO_BIN_EXE_tower-dedup-judge"));
    let listed = String::from_utf8(judge.arg("--list").output().unwrap().stdout).unwrap();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/docs/testing.md");
    let page = std::fs::read_to_string(page).unwrap();
    let trials: Vec<_> = listed.lines().filter(|line| !line.starts_with(' ')).collect();
    assert!(trials.len() > 20, "{listed}");
    let missing = trials.iter().filter(|trial| !page.contains(&format!("`{trial}`")));
    assert_eq!(missing.collect::<Vec<_>>(), [&""; 0]);
}
