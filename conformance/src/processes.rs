//! Several processes race on one store.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tower_dedup::StoreErrorKind;
use tower_dedup::adapter::contract::{
    ClaimReply, CompleteReply, DedupAdapter, Permanence, StoreFuture,
};

use super::case::{Case, Claiming};
use super::driver::{LEASE, SLACK, complete_at_once, key, leased};
use super::store::{SharedStore, runtime};

const WORKER: &str = "TOWER_DEDUP_CONFORMANCE_ADDRESS";
/// What the worker does that is killed, and the id of its key.
const HOLD: &str = "hold";
const TASKS: usize = 4;
const KEYS: usize = 200;
/// Marks a line of a worker among the lines of the test harness.
const MARK: &str = "conformance-worker:";

/// Starts [`PROCESSES`](SharedStore::PROCESSES) processes of four tasks each, which claim the same keys
/// under a lease and complete at once. Asserts that each key has exactly one winner. One process more is killed while it
/// holds a lease, and its key is taken over.
///
/// A worker process is the same test, started again: `name` is the full path of the test.
#[doc(hidden)]
pub fn processes_race_for_keys<S: SharedStore>(name: &str) {
    runtime().block_on(async {
        match std::env::var(WORKER) {
            Ok(address) => work(Arc::new(S::attach(&address).await)).await,
            Err(_) => {
                let store = S::create().await;
                let address = store.address();
                let case = Case::new(Claiming::of(store), Arc::default());
                lead(name, &case, S::PROCESSES, &address).await;
            }
        }
    });
}

async fn lead(name: &str, store: &Case, processes: usize, address: &str) {
    let mut workers: Vec<Worker> = (0..=processes).map(|_| Worker::start(name, address)).collect();
    for worker in &mut workers {
        worker.says("ready").await;
    }
    let mut killed = workers.pop().expect("the last worker");
    killed.tell(HOLD).await;
    killed.says("held").await;
    killed.process.kill().await.expect("SIGKILL");
    store.advance(LEASE + SLACK).await;
    let claimed = store.adapter().claim(&key(HOLD), &leased()).await.expect("a claim");
    let taken = ClaimReply::first(2, true);
    assert_eq!(claimed, taken, "after a process that held the lease was killed");
    // Only now, because all workers must be connected.
    for worker in &mut workers {
        worker.tell("go").await;
    }
    let mut won = Vec::new();
    for worker in &mut workers {
        won.extend(worker.says("won").await.split_whitespace().map(str::to_owned));
        let status = tokio::time::timeout(Duration::from_secs(60), worker.process.wait()).await;
        assert!(status.expect("a worker ends").expect("its status").success());
    }
    let mut keys: Vec<String> = (0..KEYS).flat_map(ids).collect();
    keys.sort();
    won.sort();
    assert_eq!(won, keys, "each key has one winner");
}

/// A process that runs the same test.
struct Worker {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(name: &str, address: &str) -> Self {
        let test = name.split_once("::").map_or(name, |(_crate, test)| test);
        let mut process = Command::new(std::env::current_exe().expect("the path of this test"))
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(WORKER, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("a worker process");
        let (input, output) = process.stdin.take().zip(process.stdout.take()).expect("its pipes");
        Self { process, input, output: BufReader::new(output).lines() }
    }

    async fn tell(&mut self, what: &str) {
        self.input.write_all(format!("{what}\n").as_bytes()).await.expect("a start");
    }

    /// Waits for a line of the worker. Returns what follows the word.
    async fn says(&mut self, word: &str) -> String {
        let mark = format!("{MARK}{word}");
        loop {
            let next = tokio::time::timeout(Duration::from_secs(120), self.output.next_line());
            let line = next.await.expect("a line of a worker in time").expect("its output");
            let line = line.unwrap_or_else(|| panic!("a worker ended before the line {word:?}"));
            // The test harness may have written the start of the line.
            if let Some((_, rest)) = line.split_once(&mark) {
                return rest.trim().to_owned();
            }
        }
    }
}

/// Returns the reply to a call. A store may refuse the call, which is then sent again: on a busy machine, another process
/// may keep a file locked for longer than a call waits.
async fn executed<'a, T>(call: impl Fn() -> StoreFuture<'a, T>) -> T {
    for _ in 0..60 {
        match call().await {
            Err(error) if error.kind() == StoreErrorKind::Refused => {}
            reply => return reply.expect("a reply"),
        }
    }
    panic!("the store refuses a call sixty times");
}

/// Returns the id of a key under a lease, and that of a key that is complete at once.
fn ids(round: usize) -> [String; 2] {
    [format!("leased-{round}"), format!("complete-{round}")]
}

#[expect(clippy::print_stdout, reason = "a worker writes its results to its output")]
async fn work(adapter: Arc<dyn DedupAdapter>) {
    println!("\n{MARK}ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await.expect("a start");
    if line.trim() == HOLD {
        adapter.claim(&key(HOLD), &leased()).await.expect("a claim");
        println!("\n{MARK}held");
        return std::future::pending().await;
    }
    let tasks = (0..TASKS).map(|_| {
        let adapter = adapter.clone();
        tokio::spawn(async move {
            let mut won = Vec::new();
            for round in 0..KEYS {
                for (id, mine) in ids(round).into_iter().zip([leased(), complete_at_once()]) {
                    let key = key(&id);
                    let claimed = executed(|| adapter.claim(&key, &mine)).await;
                    if !matches!(claimed, ClaimReply::First { .. }) {
                        continue;
                    }
                    if mine.permanence() != Permanence::OnClaim {
                        let done = executed(|| adapter.complete(&key, &mine)).await;
                        assert_eq!(done, CompleteReply::Held);
                    }
                    won.push(id);
                }
            }
            won
        })
    });
    let mut won = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        won.extend(task.await.expect("a task"));
    }
    println!("\n{MARK}won {}", won.join(" "));
}
