//! Replies that are lost on their way from the server: the client, or the adapter above it, repeats the
//! command. The repeated command does not take its own first attempt for another delivery. A proxy that has lost a
//! reply answers in its place.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::cluster::ClusterClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::{CallTerms, ClaimReply, DedupAdapter, Permanence, Token};
use tower_dedup::adapter::inspect::MaintenanceAdapter;

use super::failover::{end, loads};
use crate::support::redis::{Server, command, connection};
use crate::support::{FIRST, dedup_key, on_claim, terms};

/// A TCP address before one server that loses replies, and closes the connection with each lost reply; or answers
/// in the place of each.
#[derive(Clone)]
struct Lossy {
    port: u16,
    /// How many replies to scripts are lost from now on.
    next: Arc<AtomicUsize>,
    /// Loses one reply in fifty.
    at_random: Arc<AtomicBool>,
    /// A setting of the server that changes with the next lost reply.
    sets: Arc<Mutex<Option<[&'static str; 2]>>>,
    /// The answer in the place of a lost reply.
    answer: Arc<Mutex<Option<&'static str>>>,
    lost: Arc<AtomicUsize>,
}

impl Lossy {
    /// `server` returns a server that is known by the given port.
    async fn before(server: impl FnOnce(u16) -> Server) -> (Self, Server) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let lossy = Self {
            port,
            next: Arc::default(),
            at_random: Arc::default(),
            sets: Arc::default(),
            answer: Arc::default(),
            lost: Arc::default(),
        };
        let server = server(port);
        let (shared, to) = (lossy.clone(), server.port());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, server) =
                    (shared.clone(), TcpStream::connect(("127.0.0.1", to)).await);
                tokio::spawn(async move { shared.pass(client, server.unwrap()).await });
            }
        });
        (lossy, server)
    }

    async fn pass(&self, mut client: TcpStream, mut server: TcpStream) -> std::io::Result<()> {
        let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
        let (mut runs_script, mut replies) = (false, Vec::new());
        loop {
            tokio::select! {
                read = client.read(&mut up) => {
                    let message = &up[..read?];
                    if message.is_empty() {
                        return Ok(());
                    }
                    runs_script = message.windows(4).any(|word| word == b"EVAL");
                    server.write_all(message).await?;
                }
                read = server.read(&mut down) => {
                    let reply = &down[..read?];
                    if reply.is_empty() {
                        return Ok(());
                    }
                    let answer = *self.answer.lock().unwrap();
                    if let Some(answer) = answer {
                        replies.extend_from_slice(reply);
                        while let Some(length) = length_of_reply(&replies) {
                            let reply: Vec<u8> = replies.drain(..length).collect();
                            if self.loses(runs_script) {
                                self.lost.fetch_add(1, Ordering::SeqCst);
                                client.write_all(format!("{answer}\r\n").as_bytes()).await?;
                            } else {
                                client.write_all(&reply).await?;
                            }
                        }
                        continue;
                    }
                    if self.loses(runs_script) {
                        self.lost.fetch_add(1, Ordering::SeqCst);
                        self.change_setting(server.peer_addr()?);
                        return Ok(());
                    }
                    client.write_all(reply).await?;
                }
            }
        }
    }

    fn loses(&self, runs_script: bool) -> bool {
        let next = |left: usize| left.checked_sub(1).filter(|_| runs_script);
        self.next.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
            || self.at_random.load(Ordering::SeqCst) && rand::random_ratio(1, 50)
    }

    fn change_setting(&self, server: SocketAddr) {
        let Some([name, value]) = self.sets.lock().unwrap().take() else { return };
        let mut admin = connection(&format!("redis://{server}")).unwrap();
        command(&["CONFIG", "SET", name, value]).exec(&mut admin).unwrap();
    }

    /// Runs `work` while this many replies to scripts are lost.
    async fn losing<T>(&self, replies: usize, work: impl Future<Output = T>) -> T {
        let lost = self.lost.load(Ordering::SeqCst);
        self.next.store(replies, Ordering::SeqCst);
        let done = work.await;
        assert_eq!(self.lost.load(Ordering::SeqCst) - lost, replies, "lost replies");
        done
    }
}

/// Returns the length of the first reply, if it is whole.
fn length_of_reply(replies: &[u8]) -> Option<usize> {
    let line = replies.windows(2).position(|end| end == b"\r\n")? + 2;
    let number = || std::str::from_utf8(&replies[1..line - 2]).unwrap().parse::<i64>().unwrap();
    let length = match replies[0] {
        b'$' => line + usize::try_from(number() + 2).unwrap_or_default(),
        b'*' => (0..number())
            .try_fold(line, |length, _| Some(length + length_of_reply(&replies[length..])?))?,
        _ => line,
    };
    (length <= replies.len()).then_some(length)
}

/// One server behind the address.
async fn server() -> (Lossy, Server, String) {
    let (lossy, server) = Lossy::before(|_| Server::start()).await;
    let url = format!("redis://127.0.0.1:{}", lossy.port);
    (lossy, server, url)
}

/// A cluster of one node, which tells clients the address.
async fn cluster() -> (Lossy, Server, String) {
    let start = |port: u16| {
        let announced = format!("cluster-announce-port {port}");
        Server::start_with(&["cluster-enabled yes", "cluster-announce-ip 127.0.0.1", &announced])
    };
    let (lossy, server) = Lossy::before(start).await;
    server.run::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    while !server.run::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let url = format!("redis+cluster://127.0.0.1:{}", lossy.port);
    (lossy, server, url)
}

/// Returns the same terms with another token.
fn other(terms: &CallTerms) -> CallTerms {
    match terms.permanence() {
        Permanence::OnCompletion { lease } => {
            CallTerms::on_completion(Token::random(), terms.retention(), lease)
        }
        _ => CallTerms::on_claim(Token::random(), terms.retention()),
    }
}

async fn claim_is_first_to_its_own_token(lossy: &Lossy, adapter: RedisAdapter) {
    adapter.claim(&dedup_key("warm"), &terms()).await.unwrap();
    for replies in [1, 2] {
        for terms in [terms(), on_claim(&terms())] {
            let key = dedup_key(&format!("{replies}-{:?}", terms.token()));
            let claimed = lossy.losing(replies, adapter.claim(&key, &terms)).await.unwrap();
            assert_eq!(claimed, FIRST, "{terms:?}");
            let other = adapter.claim(&key, &other(&terms)).await.unwrap();
            let duplicate = matches!(&other, ClaimReply::Duplicate(_) | ClaimReply::InFlight);
            assert!(duplicate, "{other:?}");
            // The first reply was lost: the second one may say that nothing is held any more.
            lossy.losing(1, adapter.release(&key, &terms)).await.unwrap();
            adapter.release(&key, &terms).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_repeated_after_a_lost_reply_is_first_on_one_server() {
    let (lossy, _server, url) = server().await;
    claim_is_first_to_its_own_token(&lossy, RedisAdapter::connect(&url).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_repeated_after_a_lost_reply_is_first_in_a_cluster() {
    let (lossy, _server, url) = cluster().await;
    claim_is_first_to_its_own_token(&lossy, RedisAdapter::connect(&url).await.unwrap()).await;
}

/// The cluster client of the crate `redis` repeats the command by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_repeated_by_the_users_cluster_client_is_first() {
    let (lossy, _server, _) = cluster().await;
    let client = ClusterClient::new(vec![format!("redis://127.0.0.1:{}", lossy.port)]).unwrap();
    claim_is_first_to_its_own_token(&lossy, RedisAdapter::new(client)).await;
}

/// The first attempt of the claim was executed. The cluster client tells only that the second one was refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_that_a_cluster_refuses_after_a_lost_reply_may_have_been_executed() {
    let (lossy, server, url) = cluster().await;
    let adapter = RedisAdapter::connect(&url).await.unwrap();
    adapter.claim(&dedup_key("warm"), &terms()).await.unwrap();
    for terms in [terms(), on_claim(&terms())] {
        let key = |name: &str| dedup_key(&format!("{name}-{:?}", terms.token()));
        let refused = key("min-replicas-to-write");
        *lossy.sets.lock().unwrap() = Some(["min-replicas-to-write", "1"]);
        let error = lossy.losing(1, adapter.claim(&refused, &terms)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        server.run::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        assert!(adapter.get(&refused).await.unwrap().is_some());
        // A repetition needs no room.
        *lossy.sets.lock().unwrap() = Some(["maxmemory", "1"]);
        let claimed = lossy.losing(1, adapter.claim(&key("maxmemory"), &terms)).await;
        assert_eq!(claimed.unwrap(), FIRST);
        server.run::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    }
}

/// No event is acknowledged without having run, and none runs twice.
async fn replies_lost_at_random(lossy: &Lossy, url: &str) {
    let loads = loads(url).await;
    lossy.at_random.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(4)).await;
    lossy.at_random.store(false, Ordering::SeqCst);
    let lost = lossy.lost.load(Ordering::SeqCst);
    assert!(lost > 20, "{lost} replies were lost: too few to show anything");
    for verdict in end(&loads).await {
        assert_eq!((verdict.doubled, verdict.missing), (0, 0), "{verdict:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn replies_lost_at_random_by_one_server_lose_and_double_nothing() {
    let (lossy, _server, url) = server().await;
    replies_lost_at_random(&lossy, &url).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn replies_lost_at_random_in_a_cluster_lose_and_double_nothing() {
    let (lossy, _server, url) = cluster().await;
    replies_lost_at_random(&lossy, &url).await;
}

/// Not one of Redis's own refusals: the script may have run. So says a proxy that has lost the reply of its server.
const NO_REFUSALS: [&str; 7] = [
    "-upstream failure",
    "-ERR server closed connection",
    "-BACKEND no backend is left",
    "-WRONGTYPE the proxy says so",
    // Of no shape that a script returns.
    "+OK",
    ":0",
    "*1\r\n:7",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn answer_of_a_proxy_is_no_refusal_of_the_server() {
    let (lossy, _server, url) = server().await;
    let adapter = RedisAdapter::connect(&url).await.unwrap();
    // From now on, the server knows the scripts.
    adapter.claim(&dedup_key("warm"), &terms()).await.unwrap();
    adapter.release(&dedup_key("warm"), &terms()).await.unwrap();
    for answer in NO_REFUSALS {
        for terms in [terms(), on_claim(&terms())] {
            let layer = format!("{answer} {:?}", terms.permanence());
            *lossy.answer.lock().unwrap() = Some(answer);
            let key = dedup_key(&format!("{:?}", terms.token()));
            let error = lossy.losing(1, adapter.claim(&key, &terms)).await.unwrap_err();
            let is_unknown =
                matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Corrupt);
            assert!(is_unknown, "{layer}: {error:?}");
            assert!(adapter.get(&key).await.unwrap().is_some(), "{layer}");
            // The value of another program is there for the release, too.
            if answer.starts_with("-WRONGTYPE") {
                continue;
            }
            let released = lossy.losing(1, adapter.release(&key, &terms)).await;
            released.expect_err(&layer);
        }
    }
}

/// Nor does a key stay held for a lease: no load would end in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn answers_of_a_proxy_at_random_lose_and_double_nothing() {
    let (lossy, _server, url) = server().await;
    for answer in ["-upstream failure", "+OK"] {
        *lossy.answer.lock().unwrap() = Some(answer);
        replies_lost_at_random(&lossy, &url).await;
    }
}
