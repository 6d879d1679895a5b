//! An example that runs as a process and serves HTTP.
#![allow(dead_code, reason = "every test takes a part of it")]

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

/// Returns the program at this path, without the secrets and settings of this process.
pub(crate) fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env_remove("RUST_LOG");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let of_an_example = ["DATABASE_URL", "REDIS_URL", "LISTEN", "PUBLIC_URL", "BOOKINGS_URL"];
        let is_secret = name.contains("WEBHOOK_SECRET") || name.ends_with("_TOKEN");
        if is_secret || of_an_example.contains(&&*name) {
            command.env_remove(name);
        }
    }
    command
}

/// An example that serves.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: String,
    said: Arc<Mutex<String>>,
    readers: [JoinHandle<()>; 2],
    pub(crate) client: Client,
}

impl Server {
    /// Starts a program that takes its address from an option.
    pub(crate) async fn spawn(command: &mut Command) -> Self {
        Self::start(command.args(["--listen", "127.0.0.1:0"])).await
    }

    /// Starts a program that takes its address from the environment.
    pub(crate) async fn spawn_with_env(command: &mut Command) -> Self {
        Self::start(command.env("LISTEN", "127.0.0.1:0")).await
    }

    async fn start(command: &mut Command) -> Self {
        let mut process = command.spawn().unwrap();
        let said = Arc::<Mutex<String>>::default();
        let readers = [
            collect(process.stdout.take().unwrap(), &said),
            collect(process.stderr.take().unwrap(), &said),
        ];
        let address = || {
            let said = said.lock().unwrap();
            let (_, rest) = said.split_once("listening on ")?;
            Some(rest.split_once('\n')?.0.to_owned())
        };
        eventually(|| address().is_some() || readers.iter().all(JoinHandle::is_finished)).await;
        let address = address().unwrap_or_else(|| panic!("{command:?}: {}", said.lock().unwrap()));
        let client = Client::builder().no_proxy().timeout(Duration::from_secs(30)).build();
        Self { process, address, said, readers, client: client.unwrap() }
    }

    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) fn post(&self, path: &str) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.address))
    }

    /// A GET request.
    pub(crate) fn request(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.address))
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let answer = self.request(path).send().await.unwrap();
        answer.error_for_status().unwrap().json().await.unwrap()
    }

    /// Delivers to a receiver.
    pub(crate) async fn deliver(&self, id: &str, query: &str) -> Answer {
        let request =
            self.post(&format!("/webhooks/standard-webhooks{query}")).header("webhook-id", id);
        answer(&request.send().await.unwrap())
    }

    /// Sends SIGTERM, and waits for an orderly end, which the program logs.
    pub(crate) async fn stop(self) {
        let said = self.end().await;
        assert!(said.contains("stopped"), "{said}");
    }

    /// Sends SIGTERM, and waits for the end. Returns the output.
    pub(crate) async fn end(self) -> String {
        self.end_by("-TERM").await
    }

    /// Sends SIGINT, as Ctrl-C does, and waits for the end. Returns the output.
    pub(crate) async fn interrupt(self) -> String {
        self.end_by("-INT").await
    }

    async fn end_by(mut self, signal: &str) -> String {
        let id = self.process.id().unwrap().to_string();
        let killed = std::process::Command::new("kill").args([signal, &id]).status();
        assert!(killed.unwrap().success());
        let ended = tokio::time::timeout(Duration::from_secs(30), self.process.wait()).await;
        for reader in &mut self.readers {
            reader.await.unwrap();
        }
        assert!(ended.expect("the process ends").unwrap().success(), "{}", self.said());
        self.said()
    }
}

/// Waits for processes, which are slow on a busy machine.
pub(crate) async fn eventually(condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.expect("the condition holds in time");
}

fn collect(
    stream: impl AsyncRead + Unpin + Send + 'static,
    said: &Arc<Mutex<String>>,
) -> JoinHandle<()> {
    let (mut lines, said) = (BufReader::new(stream).lines(), Arc::clone(said));
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            *said.lock().unwrap() += &(line + "\n");
        }
    })
}

/// The status, and the result header.
pub(crate) type Answer = (u16, Option<String>);

pub(crate) fn answer(response: &Response) -> Answer {
    let result = response.headers().get("x-dedup-result");
    let result = result.map(|result| result.to_str().unwrap().to_owned());
    (response.status().as_u16(), result)
}

pub(crate) fn first() -> Answer {
    (200, None)
}

pub(crate) fn duplicate() -> Answer {
    (200, Some("duplicate".to_owned()))
}

pub(crate) fn effect(id: &str, count: u64) -> Value {
    json!({ "namespace": "standard-webhooks", "id": id, "count": count })
}
