//! The sender, which delivers each event once.

use std::collections::{BTreeMap, BTreeSet};
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::RngExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::receiver::{POISON, REKEYED, SIGNED_UNTIL};

/// How many deliveries are under way.
const SENDERS: usize = 12;
const ANSWERED: Duration = Duration::from_secs(20);

#[derive(Default)]
pub(crate) struct Sender {
    next: AtomicU64,
    /// The events that were sent.
    pub(crate) sent: Mutex<BTreeSet<String>>,
    /// The events that were answered 2xx.
    pub(crate) acknowledged: Mutex<BTreeSet<String>>,
    /// How often each answer was given.
    pub(crate) answers: Mutex<BTreeMap<String, u64>>,
}

impl Sender {
    /// Delivers events to these ports for a time.
    pub(crate) async fn run(&self, ports: &[u16], time: Duration) {
        let until = Instant::now() + time;
        let send = async || {
            while Instant::now() < until {
                self.deliver_next(ports).await;
                let pause = rand::rng().random_range(0..40);
                sleep(Duration::from_millis(pause)).await;
            }
        };
        futures_util::future::join_all((0..SENDERS).map(|_| send())).await;
    }

    async fn deliver_next(&self, ports: &[u16]) {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let route = ["hook", "hook", "list", "signed", "lossy", "renamed", "rekeyed", "rekeyed"];
        let route = *route.get(rand::rng().random_range(0..9)).unwrap_or(&"left_out");
        let port = || ports[rand::rng().random_range(0..ports.len())];
        if route == "list" {
            // Regrouped: what has not succeeded comes in another list.
            let [one, other, next] = ["a", "b", "c"].map(|part| format!("list-{n}{part}"));
            let (first, second) = ([one.clone(), other], [one, next]);
            let first = self.deliver(port(), route, &first);
            let pause = Duration::from_millis(rand::rng().random_range(0..400));
            let second = async {
                sleep(pause).await;
                self.deliver(port(), route, &second).await;
            };
            tokio::join!(first, second);
            return;
        }
        let is_poison = route == "hook" && rand::rng().random_ratio(1, 50);
        let id = format!("{}-{n}", if is_poison { POISON } else { route });
        self.deliver(port(), route, slice::from_ref(&id)).await;
        if ["hook", "signed", "lossy"].contains(&route) && rand::rng().random_ratio(1, 12) {
            // A person delivers it again by hand.
            sleep(Duration::from_millis(rand::rng().random_range(0..1_500))).await;
            self.deliver(port(), route, &[id]).await;
        }
    }

    async fn deliver(&self, port: u16, route: &str, ids: &[String]) {
        self.sent.lock().unwrap().extend(ids.iter().cloned());
        let answer = match timeout(ANSWERED, post(port, route, ids)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => format!("{:?}", error.kind()),
            Err(_) => "no answer".to_owned(),
        };
        if answer.starts_with('2') {
            self.acknowledged.lock().unwrap().extend(ids.iter().cloned());
        }
        *self.answers.lock().unwrap().entry(format!("{route} {answer}")).or_default() += 1;
    }
}

/// Delivers once. Returns the status, and the layer's result. Some clients do not wait for the answer.
async fn post(port: u16, route: &str, ids: &[String]) -> std::io::Result<String> {
    let body = if route == "list" {
        let events: Vec<_> = ids.iter().map(|id| format!(r#"{{"id":"{id}"}}"#)).collect();
        format!(r#"{{"e":[{}]}}"#, events.join(","))
    } else {
        format!(r#"{{"id":"{REKEYED}{}"}}"#, ids[0])
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis();
    let head = format!(
        "POST /{route} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nwebhook-id: {}\r\n\
         {SIGNED_UNTIL}: {}\r\ncontent-length: {}\r\n\r\n",
        ids[0],
        now + 2_000,
        body.len()
    );
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut text = String::new();
    if rand::rng().random_ratio(1, 30) {
        let patience = Duration::from_millis(rand::rng().random_range(0..60));
        if timeout(patience, stream.read_to_string(&mut text)).await.is_err() {
            return Ok("hung up".to_owned());
        }
    } else {
        stream.read_to_string(&mut text).await?;
    }
    let Some(status) = text.get(9..12) else {
        return Ok("no response".to_owned());
    };
    let result = text.lines().find_map(|line| line.strip_prefix("x-dedup-result: "));
    Ok(format!("{status} {}", result.unwrap_or("handler")))
}
