//! A wire between a pool and its server that can be cut, or fall silent, to the message.

use std::future::pending;
use std::sync::{Arc, Mutex};

use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Which connection breaks, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The message does not reach the server.
    Lost,
    /// The server does what it is told, and its answer is lost.
    Unanswered,
    /// The client is cut off at once, while the server is at work: which it does not notice.
    Abandoned,
    /// The message does not reach the server, and from then on the connection carries no byte in
    /// either direction; neither side is told, not even if the other one closes.
    Silent,
    /// The same, but the server has the message.
    SilentUnanswered,
}

#[derive(Default)]
struct Trap {
    /// After so many messages of the client.
    set: Option<(usize, Cut)>,
    /// The messages since it was set.
    messages: Vec<Vec<u8>>,
}

#[derive(Clone)]
pub(crate) struct Proxy {
    port: u16,
    trap: Arc<Mutex<Trap>>,
    /// How often all connections were silenced.
    silenced: watch::Sender<u32>,
}

impl Proxy {
    /// To the server of these options.
    pub(crate) async fn start(options: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Self { port, trap: Arc::default(), silenced: watch::Sender::new(0) };
        let (trap, server) = (Arc::clone(&proxy.trap), server(options));
        let silenced = proxy.silenced.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                let (trap, mut silenced) = (Arc::clone(&trap), silenced.subscribe());
                // Either side is gone: the drop tells the other.
                tokio::spawn(async move {
                    let (mut client, mut server) = (client, server);
                    tokio::select! {
                        _ = pass(&mut client, &mut server, &trap) => {}
                        Ok(()) = silenced.changed() => pending().await,
                    }
                });
            }
        });
        proxy
    }

    /// The options, by way of the proxy.
    pub(crate) fn options(&self, options: PgConnectOptions) -> PgConnectOptions {
        options.host("127.0.0.1").port(self.port)
    }

    /// From now on, messages of the client are counted, over all connections; after `spared` of
    /// them the next one is cut.
    pub(crate) fn set(&self, spared: usize, cut: Cut) {
        *self.trap.lock().unwrap() = Trap { set: Some((spared, cut)), messages: Vec::new() };
    }

    /// All connections that are open now carry no byte any more; new ones do.
    pub(crate) fn silence(&self) {
        self.silenced.send_modify(|times| *times += 1);
    }

    /// How many messages there were since the trap was set, but for those that only ask whether the
    /// connection is alive (a Sync).
    pub(crate) fn messages(&self) -> usize {
        self.trap.lock().unwrap().messages.iter().filter(|message| message[0] != b'S').count()
    }

    /// The same with those.
    pub(crate) fn all_messages(&self) -> usize {
        self.trap.lock().unwrap().messages.len()
    }

    /// Takes the trap away, and answers the message that was cut, if one was.
    pub(crate) fn sprung(&self) -> Option<String> {
        let trap = std::mem::take(&mut *self.trap.lock().unwrap());
        if trap.set.is_some() {
            return None;
        }
        trap.messages.last().map(|message| String::from_utf8_lossy(message).into_owned())
    }
}

fn server(options: &PgConnectOptions) -> (String, u16) {
    (options.get_host().to_owned(), options.get_port())
}

/// A small message is one read, and no two are: the client waits for each answer.
async fn pass(
    client: &mut TcpStream,
    server: &mut TcpStream,
    trap: &Mutex<Trap>,
) -> std::io::Result<()> {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            read = client.read(&mut up) => {
                let message = &up[..read?];
                if message.is_empty() {
                    return Ok(());
                }
                let cut = spring(&mut trap.lock().unwrap(), message);
                match cut {
                    None => server.write_all(message).await?,
                    Some(Cut::Lost) => return Ok(()),
                    Some(Cut::Unanswered) => {
                        server.write_all(message).await?;
                        return server.read(&mut down).await.map(drop);
                    }
                    Some(Cut::Abandoned) => return server.write_all(message).await,
                    Some(Cut::Silent) => pending().await,
                    Some(Cut::SilentUnanswered) => {
                        server.write_all(message).await?;
                        pending::<()>().await;
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
    if trap.messages.len() <= spared {
        return None;
    }
    trap.set = None;
    Some(cut)
}
