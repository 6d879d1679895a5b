//! Requests that no handler may see, or that only look strange.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::load::Load;
use crate::receiver::BODY_LIMIT;
use crate::receivers::RECEIVERS;

/// One hostile request in so many deliveries.
const EVERY: u64 = 100;
/// Each of them sends one request at a time.
const SENDERS: u64 = 8;
/// Every request is answered within this time.
const ANSWERED: Duration = Duration::from_secs(20);

/// A request, and the only status that it may get, but for 503 while the store or the receiver is away.
struct Hostile {
    name: &'static str,
    head: Vec<u8>,
    status: u16,
}

fn all() -> Vec<Hostile> {
    let made = |name, status, head: &str| Hostile { name, head: head.as_bytes().to_vec(), status };
    let post = "POST /hook HTTP/1.1\r\nhost: localhost\r\n";
    let raw_id = |name, id: &[u8]| {
        let head = [post.as_bytes(), b"webhook-id: ", id, b"\r\ncontent-length: 0\r\n\r\n"];
        Hostile { name, head: head.concat(), status: 400 }
    };
    let long = "x".repeat(10_240);
    let huge = BODY_LIMIT + 1;
    let chunked = format!("{post}webhook-id: hostile\r\ntransfer-encoding: chunked\r\n\r\n");
    vec![
        made("no id", 400, &format!("{post}content-length: 0\r\n\r\n")),
        made(
            "two ids",
            400,
            &format!(
                "{post}webhook-id: event-0\r\nwebhook-id: event-1\r\ncontent-length: 0\r\n\r\n"
            ),
        ),
        raw_id("an empty id", b""),
        raw_id("an id with NUL", b"event-\x000"),
        raw_id("an id that is not UTF-8", b"event-\xff\xfe"),
        // The layer stores the digest of an id of more than 255 bytes.
        made(
            "an id of 10 KB",
            200,
            &format!("{post}webhook-id: {long}\r\ncontent-length: 0\r\n\r\n"),
        ),
        made("a broken chunk", 400, &format!("{chunked}3\r\nabc\r\nnot a length\r\n")),
        made(
            "a body over the limit",
            413,
            &format!(
                "{post}webhook-id: hostile\r\ncontent-length: {huge}\r\n\r\n{}",
                "x".repeat(huge)
            ),
        ),
        made("chunks over the limit", 413, &format!("{chunked}{huge:x}\r\n{}", "x".repeat(huge))),
        made(
            "a slow body",
            408,
            &format!("{post}webhook-id: hostile\r\ncontent-length: 512\r\n\r\nhalf"),
        ),
        made(
            "another method",
            405,
            "GET /hook HTTP/1.1\r\nhost: localhost\r\nwebhook-id: event-0\r\n\r\n",
        ),
        made("no HTTP", 400, "\u{16}\u{3}\u{1} event-0\r\n\r\n"),
    ]
}

/// Counts of the hostile requests.
#[derive(Default)]
pub(crate) struct Requests {
    pub(crate) sent: AtomicU64,
    /// The answers that were not the expected ones.
    pub(crate) wrong: Mutex<BTreeMap<String, u64>>,
}

impl Requests {
    /// Sends hostile requests while the load goes on.
    pub(crate) async fn run(&self, load: &Load) {
        let hostile = all();
        futures_util::future::join_all((0..SENDERS).map(|_| self.send(&hostile, load))).await;
    }

    async fn send(&self, hostile: &[Hostile], load: &Load) {
        while !load.has_ended() {
            if self.sent.load(Ordering::Relaxed) * EVERY >= load.acknowledged() {
                sleep(Duration::from_millis(5)).await;
                continue;
            }
            let number =
                usize::try_from(self.sent.fetch_add(1, Ordering::Relaxed)).expect("a count");
            let request = &hostile[number % hostile.len()];
            let port = load.port(number % RECEIVERS);
            let status = match timeout(ANSWERED, status_of(port, &request.head)).await {
                // The receiver is away.
                Ok(None) => continue,
                Ok(Some(status)) if status == request.status || status == 503 => continue,
                Ok(Some(status)) => format!("{}: {status}", request.name),
                Err(_) => format!("{}: no answer within {ANSWERED:?}", request.name),
            };
            *self.wrong.lock().unwrap().entry(status).or_default() += 1;
        }
    }
}

/// Returns the status of the answer, if there is one.
async fn status_of(port: u16, head: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    // The receiver may answer and close before it has read everything.
    let _ = stream.write_all(head).await;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.ok()?;
    std::str::from_utf8(&answer).ok()?.strip_prefix("HTTP/1.1 ")?.parse().ok()
}
