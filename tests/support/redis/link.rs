//! [`Link`]: a TCP address before a server, which can be cut from the other servers.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// After this time, silent connections close.
pub const SILENT: Duration = Duration::from_secs(10);

/// Whose connections carry no byte in either direction. Neither side learns that the other one closes.
/// When the cut ends, these connections close.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cut {
    /// Replicas, Sentinels and all nodes of the cluster bus.
    pub(super) peers: bool,
    /// One node of the cluster bus, by its id.
    pub(super) node: Option<String>,
}

impl Cut {
    pub(super) fn peers() -> Self {
        Self { peers: true, node: None }
    }

    pub(super) fn node(id: String) -> Self {
        Self { peers: false, node: Some(id) }
    }

    fn concerns(&self, sender: &Sender) -> bool {
        match sender {
            Sender::Client => false,
            Sender::Peer => self.peers,
            Sender::Node(id) => self.peers || self.node.as_ref() == Some(id),
        }
    }
}

/// Who has opened a connection. Its first bytes say it.
enum Sender {
    Client,
    /// A replica or a Sentinel.
    Peer,
    /// A node of the cluster, by its id.
    Node(String),
}

impl Sender {
    fn of(heard: &[u8]) -> Self {
        // The header of the cluster bus: 40 bytes, then the id of the sender.
        if heard.starts_with(b"RCmb") && heard.len() >= 80 {
            return Self::Node(String::from_utf8_lossy(&heard[40..80]).into_owned());
        }
        // A Sentinel names its connection `sentinel-…` first.
        let says = |text: &[u8]| heard.windows(text.len()).any(|part| part == text);
        if says(b"REPLCONF") || says(b"\r\nsentinel-") { Self::Peer } else { Self::Client }
    }
}

pub struct Link {
    port: u16,
    target: Arc<AtomicU16>,
    cut: watch::Sender<Cut>,
    /// How often the open connections of clients were silenced.
    silenced: watch::Sender<u32>,
}

impl Link {
    /// Starts a link. [`lead_to`](Self::lead_to) says to which server.
    pub fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (cut, target) = (watch::Sender::new(Cut::default()), Arc::new(AtomicU16::new(0)));
        let silenced = watch::Sender::new(0);
        let (cuts, silences, to) = (cut.clone(), silenced.clone(), Arc::clone(&target));
        runtime().spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((client, _)) = listener.accept().await {
                let (cut, silenced) = (cuts.subscribe(), silences.subscribe());
                let port = to.load(Ordering::SeqCst);
                tokio::spawn(async move {
                    // The server does not listen: the drop closes the client's connection.
                    if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                        let _ = pass(client, server, cut, silenced).await;
                    }
                });
            }
        });
        Self { port, target, cut, silenced }
    }

    /// New connections go to this port of 127.0.0.1.
    pub fn lead_to(&self, port: u16) {
        self.target.store(port, Ordering::SeqCst);
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn cut(&self, cut: Cut) {
        self.cut.send_replace(cut);
    }

    /// Silences the connections that clients have open now: they carry no byte, and close after
    /// [`SILENT`]. New connections work.
    pub fn silence(&self) {
        self.silenced.send_modify(|times| *times += 1);
    }
}

async fn pass(
    mut client: TcpStream,
    mut server: TcpStream,
    mut cut: watch::Receiver<Cut>,
    mut silenced: watch::Receiver<u32>,
) -> std::io::Result<()> {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut heard, mut sender) = (Vec::new(), Sender::Client);
    loop {
        if cut.borrow_and_update().concerns(&sender) {
            let _ = cut.wait_for(|cut| !cut.concerns(&sender)).await;
            return Ok(());
        }
        tokio::select! {
            changed = cut.changed() => if changed.is_err() {
                return Ok(());
            },
            changed = silenced.changed() => match sender {
                Sender::Client if changed.is_ok() => {
                    tokio::time::sleep(SILENT).await;
                    return Ok(());
                }
                _ => changed.map_err(std::io::Error::other)?,
            },
            read = client.read(&mut up) => {
                let message = &up[..read?];
                if message.is_empty() {
                    return Ok(());
                }
                if heard.len() < 1_024 && matches!(sender, Sender::Client) {
                    heard.extend_from_slice(message);
                    sender = Sender::of(&heard);
                    if cut.borrow().concerns(&sender) {
                        continue;
                    }
                }
                server.write_all(message).await?;
            }
            read = server.read(&mut down) => {
                let message = &down[..read?];
                if message.is_empty() {
                    return Ok(());
                }
                client.write_all(message).await?;
            }
        }
    }
}

/// Links outlive the runtime of one test, and work while a test blocks its own runtime.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
    })
}
