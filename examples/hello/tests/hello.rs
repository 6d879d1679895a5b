//! The program of the README does what its two commands show.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The address is in the program.
const ADDRESS: &str = "127.0.0.1:3000";

struct Hello(Child);

impl Drop for Hello {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends the request of the README. Returns the head of the response.
fn deliver() -> String {
    let mut stream = TcpStream::connect(ADDRESS).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let head =
        "POST /acme HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nwebhook-id: msg_1\r\n";
    write!(stream, "{head}content-length: 4\r\n\r\npaid").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn second_delivery_is_a_duplicate() {
    assert!(TcpStream::connect(ADDRESS).is_err(), "another program listens on {ADDRESS}: end it");
    let program = Command::new(env!("CARGO_BIN_EXE_hello")).stdout(Stdio::piped()).spawn();
    let mut hello = Hello(program.unwrap());
    let stdout = BufReader::new(hello.0.stdout.take().unwrap());
    let start = Instant::now();
    while TcpStream::connect(ADDRESS).is_err() {
        assert!(start.elapsed() < Duration::from_secs(30), "it listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (first, second) = (deliver(), deliver());
    assert!(first.starts_with("HTTP/1.1 200 ") && !first.contains("x-dedup-result"), "{first}");
    assert!(second.starts_with("HTTP/1.1 200 "), "{second}");
    assert!(second.contains("x-dedup-result: duplicate\r\n"), "{second}");
    drop(hello);
    let printed: Vec<_> = stdout.lines().map(Result::unwrap).collect();
    assert_eq!(printed, ["once: paid"]);
}
