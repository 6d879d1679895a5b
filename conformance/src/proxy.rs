//! A proxy between an adapter and its server that can hold, cut or silence the connection at any message.

use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

const BOUND: Duration = Duration::from_secs(10);

/// Which connection breaks, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The message does not reach the server.
    Lost,
    /// The server executes the message, and its reply is lost.
    Unanswered,
    /// The same, and the client reads this in place of the reply.
    Replied(&'static [u8]),
    /// The client loses its connection at once, while the server executes the message. The server
    /// does not notice.
    Abandoned,
    /// The message does not reach the server. From then on the connection carries no byte in either
    /// direction, and neither side learns that the other one closes.
    Silent,
    /// The same, but the message reaches the server.
    SilentUnanswered,
    /// The message reaches the server when the test [delivers](Proxy::deliver) it. Then the connection goes on.
    Late,
}

#[derive(Debug, Default)]
struct Trap {
    /// Cuts after this many messages of the client.
    set: Option<(usize, Cut)>,
    /// The messages since the trap was set.
    messages: Vec<Vec<u8>>,
}

/// What the connections share.
#[derive(Debug, Default)]
struct Shared {
    trap: Mutex<Trap>,
    silenced: Notify,
    /// A message that is held back goes on.
    delivered: Notify,
    /// The server has replied to it.
    replied: Notify,
}

/// Forwards each connection to its port of 127.0.0.1 to the server.
#[derive(Debug, Clone)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    /// Accepts connections, and owns them: they close with it.
    task: AbortHandle,
}

impl Proxy {
    /// Starts a proxy to any server whose client waits for each reply.
    pub async fn to(host: &str, port: u16) -> Self {
        let server = (host.to_owned(), port);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::<Shared>::default();
        let of_all = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                // The server does not listen: the drop closes the client's connection.
                let Ok(mut server) = TcpStream::connect(&server).await else { continue };
                let shared = Arc::clone(&of_all);
                // If either side is gone, the drop closes the other.
                connections.spawn(async move {
                    tokio::select! {
                        _ = pass(&mut client, &mut server, &shared) => {}
                        () = shared.silenced.notified() => pending().await,
                    }
                });
            }
        });
        Self { port, shared, task: task.abort_handle() }
    }

    /// Returns the port of the proxy.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Counts the client's messages from now on, over all connections, and cuts the one after
    /// `spared` messages.
    pub fn set(&self, spared: usize, cut: Cut) {
        *self.trap() = Trap { set: Some((spared, cut)), messages: Vec::new() };
    }

    /// Waits until the message after `spared` messages is held back, for ten seconds at most.
    pub async fn until_held(&self, spared: usize) {
        let held = async {
            while self.messages() <= spared {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(BOUND, held).await.expect("a message is held");
    }

    /// Delivers a late message to the server, and waits for the server's reply.
    pub async fn deliver(&self) {
        self.shared.delivered.notify_one();
        let replied = tokio::time::timeout(BOUND, self.shared.replied.notified()).await;
        replied.expect("the server replies to the message that was held");
    }

    /// Silences all connections that are open now; new connections work.
    pub fn silence(&self) {
        self.shared.silenced.notify_waiters();
    }

    /// Closes all connections, also the silent ones. Otherwise a silent connection keeps its session of
    /// the server until the test ends, and the server has a limit of sessions.
    pub fn close(&self) {
        self.task.abort();
    }

    /// Returns the number of messages since the trap was set.
    pub fn messages(&self) -> usize {
        self.trap().messages.len()
    }

    /// Removes the trap. Returns the message that was cut, if one was.
    pub fn sprung(&self) -> Option<String> {
        let trap = std::mem::take(&mut *self.trap());
        let cut = trap.messages.last().filter(|_| trap.set.is_none())?;
        Some(String::from_utf8_lossy(cut).into_owned())
    }

    fn trap(&self) -> MutexGuard<'_, Trap> {
        self.shared.trap.lock().unwrap()
    }
}

/// A small message is one read, and two messages are two reads, because the client waits for each
/// reply.
async fn pass(
    client: &mut TcpStream,
    server: &mut TcpStream,
    shared: &Shared,
) -> std::io::Result<()> {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            read = client.read(&mut up) => {
                let message = &up[..read?];
                if message.is_empty() {
                    return Ok(());
                }
                let cut = spring(&mut shared.trap.lock().unwrap(), message);
                if cut == Some(Cut::Late) {
                    shared.delivered.notified().await;
                }
                if !matches!(cut, Some(Cut::Lost | Cut::Silent)) {
                    server.write_all(message).await?;
                }
                match cut {
                    None => {}
                    Some(Cut::Lost | Cut::Abandoned) => return Ok(()),
                    Some(Cut::Silent | Cut::SilentUnanswered) => pending().await,
                    Some(Cut::Unanswered) => return server.read(&mut down).await.map(drop),
                    Some(Cut::Replied(reply)) => {
                        let _ = server.read(&mut down).await?;
                        return client.write_all(reply).await;
                    }
                    Some(Cut::Late) => {
                        let read = server.read(&mut down).await?;
                        shared.replied.notify_one();
                        client.write_all(&down[..read]).await?;
                    }
                }
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

fn spring(trap: &mut Trap, message: &[u8]) -> Option<Cut> {
    let (spared, cut) = trap.set?;
    trap.messages.push(message.to_vec());
    let is_sprung = trap.messages.len() > spared;
    is_sprung.then(|| trap.set = None).map(|()| cut)
}
