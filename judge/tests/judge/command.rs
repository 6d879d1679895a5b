//! The command: its exit codes, and that it leaves no process behind.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
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
fn start(address: &str, dir: &Path) -> String {
    let (receiver, dir) = (example("receiver"), dir.display());
    format!("({receiver} --listen {address} --store 'sqlite://{dir}/keys.db'; true) & wait; true")
}

/// Asserts that soon nothing listens.
fn assert_closed(address: &str) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "the receiver lives");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn request(dir: &Path) -> String {
    let file = dir.join("request");
    let text = "POST /webhooks/circleci HTTP/1.1\ncontent-type: application/json\n\n{\"id\":\"1\"}";
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn judge_that_is_stopped_kills_the_process_group_of_the_receiver() {
    for signal in ["INT", "TERM", "HUP"] {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let mut judge = judge(&address);
        judge.args(["--start", &start(&address, dir.path()), "--request", &request(dir.path())]);
        let mut judge = judge.spawn().unwrap();
        let mut lines = BufReader::new(judge.stdout.take().unwrap()).lines();
        let first = lines.next().expect("a trial").unwrap();
        assert!(first.starts_with("first-and-second"), "{first}");
        assert!(TcpStream::connect(&address).is_ok());
        let id = judge.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
        assert_eq!(judge.wait().unwrap().code(), Some(2), "{signal}");
        assert_closed(&address);
    }
}

#[test]
fn exit_code_says_whether_the_judge_did_its_work() {
    // The receiver, the options, the exit code, words on stdout or stderr.
    let once = "test ! -e once && touch once && ";
    let cases = [
        ("", "--only kill-before", 0, "after the kill, answered 200"),
        (
            "",
            "--only kill-before --count-url http://ADDRESS/none",
            2,
            "--count-url is answered 404",
        ),
        (once, "--only kill-before", 2, "has ended (exit status: 0) before it listens"),
        ("", "--only body-slow --timeout 2s", 2, "--timeout"),
    ];
    for (before, options, code, words) in cases {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let mut judge = judge(&address);
        let start = format!("{before}{}", start(&address, dir.path()));
        judge.args(["--start", &start, "--request", &request(dir.path())]);
        judge.args(options.replace("ADDRESS", &address).split(' ')).current_dir(dir.path());
        let Output { status, stdout, stderr } = judge.output().unwrap();
        let said = String::from_utf8([stdout, stderr].concat()).unwrap();
        assert!(status.code() == Some(code) && said.contains(words), "{options}: {status}: {said}");
        assert_closed(&address);
    }
}

#[test]
fn judge_that_cannot_judge_exits_with_2_and_says_why() {
    let address = format!("127.0.0.1:{}", free_port());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let start = |command| vec!["--start", command];
    let cases = [
        (&address, vec![], "Connection refused"),
        (&address, start("exit 3"), "has ended (exit status: 3)"),
        (&taken, start("sleep 9"), "something listens there already"),
        (&address, vec!["--count-url", "http://192.0.2.1/effects"], "--i-own-this-host"),
        (&address, vec!["--sender", "nobody"], "no sender `nobody`"),
        (&address, vec!["--sender", "github", "--secret-env", "NO_SUCH_NAME"], "NO_SUCH_NAME"),
        (&address, vec!["--request", "/no/such/file"], "/no/such/file"),
        (&address, vec!["--only", "no-such-trial"], "no-such-trial"),
    ];
    for (address, options, words) in cases {
        let Output { status, stderr, .. } = judge(address).args(&options).output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        assert!(status.code() == Some(2) && said.contains(words), "{options:?}: {status}: {said}");
    }
}

#[test]
fn list_and_guide_name_the_same_trials() {
    let mut judge = Command::new(env!("CARGO_BIN_EXE_tower-dedup-judge"));
    let listed = String::from_utf8(judge.arg("--list").output().unwrap().stdout).unwrap();
    let listed: BTreeSet<_> = listed.lines().filter(|line| !line.starts_with(' ')).collect();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/docs/testing.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, table) = page.split_once("| trials |").expect("the table of trials");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.split('|').nth(1).unwrap());
    let named: BTreeSet<_> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert_eq!(listed, named);
}
