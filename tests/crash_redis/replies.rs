//! Replies that are lost on their way from a node of a cluster: the client, or the adapter above it, repeats the command.
//! The repeated command does not take its own first attempt for another delivery. `tests/stores` loses the replies of one
//! server.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::cluster::ClusterClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::RedisAdapter;
use tower_dedup::adapter::contract::{ClaimReply, DedupAdapter};
use tower_dedup::adapter::maintenance::MaintenanceAdapter;

use support::redis::{Server, command, connection};
use support::{FIRST, dedup_key, on_claim, terms};

/// A TCP address before the one node of a cluster, which tells clients the address. It loses replies, and closes the
/// connection with each lost reply.
#[derive(Clone)]
struct Lossy {
    port: u16,
    /// How many replies to scripts are lost from now on.
    next: Arc<AtomicUsize>,
    /// A setting of the server that changes with the next lost reply.
    sets: Arc<Mutex<Option<[&'static str; 2]>>>,
    lost: Arc<AtomicUsize>,
}

impl Lossy {
    async fn start() -> (Self, Server) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let lossy = Self {
            port: listener.local_addr().unwrap().port(),
            next: Arc::default(),
            sets: Arc::default(),
            lost: Arc::default(),
        };
        let announced = format!("cluster-announce-port {}", lossy.port);
        let server = ["cluster-enabled yes", "cluster-announce-ip 127.0.0.1", &announced];
        let server = Server::start_with(&server);
        let (shared, to) = (lossy.clone(), server.port());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, server) =
                    (shared.clone(), TcpStream::connect(("127.0.0.1", to)).await);
                tokio::spawn(async move { shared.pass(client, server.unwrap()).await });
            }
        });
        server.run::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        while !server.run::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        (lossy, server)
    }

    fn url(&self) -> String {
        format!("redis+cluster://127.0.0.1:{}", self.port)
    }

    async fn pass(&self, mut client: TcpStream, mut server: TcpStream) -> std::io::Result<()> {
        let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
        let mut runs_script = false;
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

async fn claim_is_first_to_its_own_token(lossy: &Lossy, adapter: RedisAdapter) {
    adapter.claim(&dedup_key("warm"), &terms()).await.unwrap();
    for replies in [1, 2] {
        for terms in [terms(), on_claim(&terms())] {
            let key = dedup_key(&format!("{replies}-{:?}", terms.token()));
            let claimed = lossy.losing(replies, adapter.claim(&key, &terms)).await.unwrap();
            assert_eq!(claimed, FIRST, "{terms:?}");
            let other = adapter.claim(&key, &self::terms()).await.unwrap();
            let duplicate = matches!(&other, ClaimReply::Duplicate(_) | ClaimReply::InFlight);
            assert!(duplicate, "{other:?}");
            // The first reply was lost: the second one may say that nothing is held any more.
            lossy.losing(1, adapter.release(&key, &terms)).await.unwrap();
            adapter.release(&key, &terms).await.unwrap();
        }
    }
}

/// The cluster client of the crate `redis` repeats the command by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_repeated_after_a_lost_reply_is_first() {
    let (lossy, _server) = Lossy::start().await;
    claim_is_first_to_its_own_token(&lossy, RedisAdapter::connect(&lossy.url()).await.unwrap())
        .await;
    let node = format!("redis://127.0.0.1:{}", lossy.port);
    let client = ClusterClient::new(vec![node]).unwrap();
    claim_is_first_to_its_own_token(&lossy, RedisAdapter::new(client)).await;
}

/// The first attempt of the claim was executed. The cluster client tells only that the second one was refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claim_that_a_cluster_refuses_after_a_lost_reply_may_have_been_executed() {
    let (lossy, server) = Lossy::start().await;
    let adapter = RedisAdapter::connect(&lossy.url()).await.unwrap();
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
