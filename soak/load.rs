//! The senders.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::log::{Millis, now};
use crate::receivers::RECEIVERS;

/// Deliveries of each event.
pub(crate) const COPIES: u64 = 4;
/// Senders. Each has two deliveries under way at most.
const SENDERS: u64 = 64;
/// A request is answered within this time, or its connection is closed.
const ANSWERED: Duration = Duration::from_secs(20);
/// A delivery gets its 2xx within this time.
const ACKNOWLEDGED: Duration = Duration::from_secs(120);
/// One request in so many is one whose client hangs up.
const HANG_UP: u32 = 40;
/// The most events of one sender whose last copy is still to be sent.
const LATER: u64 = 32;

/// The place of the store's faults in [`Load::due`]. The other place is that of the kills.
pub(crate) const STORE: usize = 1;

static BODY: [u8; 512] = [b'x'; 512];

/// The events, and what became of them.
pub(crate) struct Load {
    ports: [u16; RECEIVERS],
    seed: u64,
    /// The time of the first request, and that of the last acknowledgement of the first three copies.
    /// 0: none.
    events: Vec<[AtomicU64; 2]>,
    next: AtomicU64,
    acknowledged: AtomicU64,
    pub(crate) hang_ups: AtomicU64,
    /// When the next fault is due, in acknowledged deliveries. The load waits for a fault that is late.
    pub(crate) due: [AtomicU64; 2],
    /// How many acknowledgements the load may be ahead of a fault that is due.
    slack: u64,
    stopped: AtomicBool,
    ended: AtomicBool,
    /// How often each answer was given, but for acknowledgements.
    answers: Mutex<BTreeMap<String, u64>>,
    /// The answers that no delivery may get.
    pub(crate) wrong: Mutex<BTreeMap<String, u64>>,
}

impl Load {
    pub(crate) fn new(ports: [u16; RECEIVERS], deliveries: u64, seed: u64) -> Self {
        Self {
            ports,
            seed,
            events: (0..deliveries / COPIES).map(|_| Default::default()).collect(),
            next: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            hang_ups: AtomicU64::new(0),
            due: [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)],
            slack: (deliveries / 50).min(2_000),
            stopped: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            answers: Mutex::default(),
            wrong: Mutex::default(),
        }
    }

    pub(crate) fn port(&self, place: usize) -> u16 {
        self.ports[place]
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Sends no new event from now on.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn answers(&self) -> String {
        format!("{:?}", self.answers.lock().unwrap())
    }

    /// Returns the acknowledged events: number, first request, acknowledgement.
    pub(crate) fn acknowledgements(&self) -> Vec<(u64, Millis, Millis)> {
        let times = |times: &[AtomicU64; 2]| {
            (times[0].load(Ordering::Relaxed), times[1].load(Ordering::Relaxed))
        };
        let all = (0..).zip(&self.events).map(|(event, at)| (event, times(at).0, times(at).1));
        all.filter(|event| event.2 > 0).collect()
    }

    /// Delivers all events.
    pub(crate) async fn run(&self) -> Result<(), String> {
        let senders = (0..SENDERS).map(|_| self.send_events());
        let sent = futures_util::future::try_join_all(senders).await;
        self.ended.store(true, Ordering::Relaxed);
        sent.map(drop)
    }

    async fn send_events(&self) -> Result<(), String> {
        let mut clients = [Client::new(self.ports), Client::new(self.ports)];
        let mut later = VecDeque::new();
        let events = self.events.len() as u64;
        let most_later = LATER.min(events / SENDERS / 4);
        loop {
            while self.due.iter().any(|due| self.is_ahead_of(due)) {
                sleep(Duration::from_millis(2)).await;
            }
            let event = self.next.fetch_add(1, Ordering::Relaxed);
            if event >= events || self.stopped.load(Ordering::Relaxed) {
                break;
            }
            let mut draws = StdRng::seed_from_u64(self.seed ^ (event << 20));
            let mut others = StdRng::seed_from_u64(draws.random());
            let first = draws.random_range(0..RECEIVERS);
            self.time(event, 0).store(now(), Ordering::Relaxed);
            let [one, other] = &mut clients;
            tokio::try_join!(
                self.deliver(one, event, 0, first, &mut draws),
                self.deliver(other, event, 1, first + 1, &mut others),
            )?;
            self.deliver(one, event, 2, first + 2, &mut draws).await?;
            later.push_back((event, draws));
            if later.len() as u64 > most_later
                && let Some((event, mut draws)) = later.pop_front()
            {
                self.deliver(one, event, 3, first, &mut draws).await?;
            }
        }
        for (event, mut draws) in later {
            let place = draws.random_range(0..RECEIVERS);
            self.deliver(&mut clients[0], event, 3, place, &mut draws).await?;
        }
        Ok(())
    }

    fn is_ahead_of(&self, due: &AtomicU64) -> bool {
        let due = due.load(Ordering::Relaxed);
        self.acknowledged() > due.saturating_add(self.slack)
    }

    fn time(&self, event: u64, which: usize) -> &AtomicU64 {
        &self.events[usize::try_from(event).expect("an event of the load")][which]
    }

    /// Delivers one copy until a 2xx, to the receivers in turn.
    async fn deliver(
        &self,
        client: &mut Client,
        event: u64,
        copy: u32,
        mut place: usize,
        draws: &mut StdRng,
    ) -> Result<(), String> {
        let begun = Instant::now();
        let mut last = "none".to_owned();
        loop {
            place %= RECEIVERS;
            if begun.elapsed() > ACKNOWLEDGED {
                return Err(format!(
                    "event {event}, copy {copy}: no 2xx within {ACKNOWLEDGED:?}. The last answer: {last}"
                ));
            }
            if draws.random_ratio(1, HANG_UP) {
                self.hang_up(client, event, place, draws).await;
            }
            last = match timeout(ANSWERED, client.send(place, event)).await {
                Ok(Ok((200, _))) => {
                    if copy < 3 {
                        self.time(event, 1).fetch_max(now(), Ordering::Relaxed);
                    }
                    self.acknowledged.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Ok(Ok((status, why))) => format!("{status} {why}"),
                Ok(Err(_)) => {
                    client.close(place);
                    "no connection".to_owned()
                }
                Err(_) => {
                    client.close(place);
                    format!("no answer within {ANSWERED:?}")
                }
            };
            // Only transactional receivers bound their handlers, which write over connections that fall silent.
            let known = [
                "500 handler",
                "503 in-flight",
                "503 unavailable",
                "504 handler-timeout",
                "no connection",
            ];
            let answers = if known.contains(&&*last) { &self.answers } else { &self.wrong };
            *answers.lock().unwrap().entry(last.clone()).or_default() += 1;
            place += 1;
            sleep(Duration::from_millis(draws.random_range(5..40))).await;
        }
    }

    /// Sends the event and hangs up: in the middle of the body, or before the response.
    async fn hang_up(&self, client: &mut Client, event: u64, place: usize, draws: &mut StdRng) {
        let wait = Duration::from_micros(draws.random_range(0..4_000));
        if draws.random_bool(0.5) {
            let port = self.ports[place];
            let head = format!(
                "POST /hook HTTP/1.1\r\nhost: localhost\r\nwebhook-id: event-{event}\r\n\
                 content-length: {}\r\n\r\nhalf",
                BODY.len()
            );
            let sent = async {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
                stream.write_all(head.as_bytes()).await?;
                sleep(wait).await;
                std::io::Result::Ok(())
            };
            if matches!(timeout(ANSWERED, sent).await, Ok(Ok(()))) {
                self.hang_ups.fetch_add(1, Ordering::Relaxed);
            }
        } else if timeout(wait, client.send(place, event)).await.is_err() {
            client.close(place);
            self.hang_ups.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One connection to each receiver, opened when it is needed.
struct Client {
    ports: [u16; RECEIVERS],
    connections: [Option<(SendRequest<Full<Bytes>>, AbortHandle)>; RECEIVERS],
}

impl Client {
    fn new(ports: [u16; RECEIVERS]) -> Self {
        Self { ports, connections: Default::default() }
    }

    /// Closes a connection, whatever it is doing.
    fn close(&mut self, place: usize) {
        if let Some((_, connection)) = self.connections[place].take() {
            connection.abort();
        }
    }

    /// Sends the event to a receiver. Returns the status, and the layer's result, or `handler`.
    async fn send(&mut self, place: usize, event: u64) -> Result<(u16, String), String> {
        let lost = |error: hyper::Error| error.to_string();
        if self.connections[place].as_ref().is_none_or(|(sender, _)| sender.is_closed()) {
            let stream = TcpStream::connect(("127.0.0.1", self.ports[place])).await;
            let stream = stream.map_err(|error| error.to_string())?;
            stream.set_nodelay(true).map_err(|error| error.to_string())?;
            let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(lost)?;
            let task = tokio::spawn(connection).abort_handle();
            self.connections[place] = Some((sender, task));
        }
        let (sender, _) = self.connections[place].as_mut().expect("a connection");
        sender.ready().await.map_err(lost)?;
        let id = HeaderValue::from_str(&format!("event-{event}")).expect("an id");
        let request = Request::post("/hook").header("host", "localhost").header("webhook-id", id);
        let request = request.body(Full::new(Bytes::from_static(&BODY))).expect("a request");
        let response = sender.send_request(request).await.map_err(lost)?;
        let status = response.status().as_u16();
        let why = response.headers().get("x-dedup-result");
        let why = why.and_then(|why| why.to_str().ok()).unwrap_or("handler").to_owned();
        response.into_body().collect().await.map_err(lost)?;
        Ok((status, why))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        (0..RECEIVERS).for_each(|place| self.close(place));
    }
}
