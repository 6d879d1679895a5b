//! A server for tests that replies what the test says.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::super::url::Address;

/// Returns the reply to a command, as it is sent; an empty one is never sent.
type Replies = dyn Fn(&[String]) -> String + Send + Sync;

pub(super) const OK: &str = "+OK\r\n";

pub(super) struct Fake {
    port: u16,
    received: Mutex<Vec<Vec<String>>>,
    connections: AtomicUsize,
    replies: Box<Replies>,
}

impl Fake {
    pub(super) async fn start(
        replies: impl Fn(&[String]) -> String + Send + Sync + 'static,
    ) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fake = Arc::new(Self {
            port: listener.local_addr().unwrap().port(),
            received: Mutex::default(),
            connections: AtomicUsize::new(0),
            replies: Box::new(replies),
        });
        let serving = Arc::clone(&fake);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::Relaxed);
                let fake = Arc::clone(&serving);
                tokio::spawn(async move { fake.serve(stream).await });
            }
        });
        fake
    }

    pub(super) fn address(&self) -> Address {
        Address { host: "127.0.0.1".to_owned(), port: self.port }
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns the commands of this name that have arrived.
    pub(super) fn received(&self, name: &str) -> Vec<Vec<String>> {
        let received = self.received.lock().unwrap();
        received.iter().filter(|words| words[0] == name).cloned().collect()
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let count = number(&mut stream).await?;
            let mut words = Vec::new();
            for _ in 0..count {
                let mut word = vec![0; number(&mut stream).await? + 2];
                stream.read_exact(&mut word).await.ok()?;
                words.push(String::from_utf8_lossy(&word[..word.len() - 2]).into_owned());
            }
            let reply = match words[0].as_str() {
                "CLIENT" | "SELECT" => OK.to_owned(),
                _ => (self.replies)(&words),
            };
            self.received.lock().unwrap().push(words);
            stream.write_all(reply.as_bytes()).await.ok()?;
        }
    }
}

async fn number(stream: &mut BufReader<TcpStream>) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    line.trim_end().get(1..)?.parse().ok()
}

/// Returns a text as a reply.
pub(super) fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}
