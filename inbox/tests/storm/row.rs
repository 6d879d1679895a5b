//! One row of the storm's table: servers, receivers, faults, and the count at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::RngExt;
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use tower_dedup_inbox::{Inbox, Parked, Selection, ShownRow};

use crate::receiver::{LISTENS, POISON, SETUP, Setup};
use crate::sender::Sender;
use support::postgres::{Schema, Server, free_port};

const RECEIVERS: usize = 3;
/// How long the loops have for what waits at the end.
const DRAINED: Duration = Duration::from_secs(90);
const STARTS: Duration = Duration::from_secs(60);

/// Where the table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Postgres,
    Sqlite,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) place: Place,
    pub(crate) is_transactional: bool,
    /// How long events are sent.
    pub(crate) time: Duration,
}

pub(crate) struct Report {
    row: Row,
    sent: usize,
    acknowledged: usize,
    kills: u64,
    locked: u64,
    away: u64,
    crashes: u64,
    hangs: u64,
    lost: usize,
    doubled: usize,
    left: usize,
    parked: BTreeMap<&'static str, usize>,
    seconds: u64,
    pub(crate) faults: Vec<String>,
}

pub(crate) const HEAD: &str = "| table | ledger | events | answered 2xx | kills | table locked | table away | keys' server crashed | process hung | lost | doubled | left | parked | seconds |\n\
     |---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { place, is_transactional, .. } = self.row;
        let ledger = if is_transactional { "transactional" } else { "lease" };
        let parked: Vec<_> =
            self.parked.iter().map(|(why, rows)| format!("{rows} {why}")).collect();
        let Self { sent, acknowledged, kills, locked, away, crashes, hangs, .. } = self;
        let Self { lost, doubled, left, seconds, .. } = self;
        write!(
            f,
            "| {} | {ledger} | {sent} | {acknowledged} | {kills} | {locked} | {away} | {crashes} | {hangs} | {lost} | {doubled} \
             | {left} | {} | {seconds} |",
            if place == Place::Postgres { "Postgres" } else { "SQLite" },
            parked.join(", "),
        )
    }
}

/// The faults that were done.
#[derive(Default)]
struct Done {
    /// Every event is sent.
    ended: AtomicBool,
    kills: AtomicU64,
    locked: AtomicU64,
    away: AtomicU64,
    crashes: AtomicU64,
    hangs: AtomicU64,
}

fn count(of: &AtomicU64) -> u64 {
    of.load(Ordering::Relaxed)
}

impl Row {
    pub(crate) fn run(self) -> Report {
        let server = Arc::new(Server::start());
        let schema = (self.place == Place::Postgres).then(Schema::fresh);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let report = runtime.expect("a runtime").block_on(self.run_on(&server, schema.as_ref()));
        drop(schema);
        report
    }

    async fn run_on(self, server: &Arc<Server>, schema: Option<&Schema>) -> Report {
        let start = Instant::now();
        let folder = tempfile::tempdir().unwrap();
        let table = schema
            .map_or_else(|| folder.path().join("inbox.db").display().to_string(), Schema::url);
        let setup = Setup {
            port: 0,
            is_transactional: self.is_transactional,
            is_newer: false,
            keys: server.url(),
            table,
        };
        server
            .run("CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, id text NOT NULL)");
        let store = tower_dedup::adapter::PostgresAdapter::connect(&setup.keys).await.unwrap();
        store.migrate().await.unwrap();
        drop(store);
        let inbox = setup.inbox();
        inbox.migrate().await.unwrap();
        let setups = [false, false, true].map(|is_newer| {
            let port = free_port();
            Setup { port, is_newer, ..setup.clone() }
        });
        let ports: [u16; RECEIVERS] = [0, 1, 2].map(|place| setups[place].port);
        let starts = setups.iter().map(start_receiver);
        let started = futures_util::future::join_all(starts).await;
        let children: Vec<_> = started.into_iter().map(Mutex::new).collect();

        let (sender, done) = (Sender::default(), Done::default());
        let send = async {
            sender.run(&ports, self.time).await;
            done.ended.store(true, Ordering::Relaxed);
        };
        tokio::join!(
            send,
            kill(&setups, &children, &done),
            inflict(self.place, &setup, server, &children, &done),
        );
        let parked = parked(&drained(&inbox).await);
        // What was parked as misrouted runs when the older version is everywhere, and a person says so.
        let newer = RECEIVERS - 1;
        let mut child = children[newer].lock().await;
        child.kill().await.expect("a receiver that can be killed");
        *child = start_receiver(&Setup { is_newer: false, ..setups[newer].clone() }).await;
        let mut misrouted = Selection::default();
        misrouted.parked = Some(Some(Parked::Misrouted));
        inbox.retry(&misrouted).await.unwrap();
        let rows = drained(&inbox).await;
        let effects = effects(&setup.keys).await;
        let report = self.judge(&sender, &done, &effects, &rows, parked, start.elapsed());
        eprintln!("{report}\n{:?}", sender.answers.lock().unwrap());
        report
    }

    fn judge(
        self,
        sender: &Sender,
        done: &Done,
        effects: &BTreeMap<String, i64>,
        rows: &[ShownRow],
        reasons: BTreeMap<&'static str, usize>,
        time: Duration,
    ) -> Report {
        let acknowledged = sender.acknowledged.lock().unwrap();
        let mut faults = Vec::new();
        let parked: BTreeSet<&str> = rows
            .iter()
            .filter(|row| row.parked.is_some())
            .flat_map(|row| row.keys.iter().map(|(_, id)| id.trim_start_matches("v2.")))
            .collect();
        let lost: Vec<_> = acknowledged
            .iter()
            .filter(|id| !effects.contains_key(*id) && !parked.contains(&***id))
            .collect();
        let doubled: Vec<_> = effects.iter().filter(|(_, count)| **count > 1).collect();
        let left: Vec<_> = rows.iter().filter(|row| row.parked.is_none()).collect();
        let mut fault = |what: &str, found: &dyn fmt::Debug, is_any: bool| {
            if is_any {
                faults.push(format!("{self:?}: {what}: {found:#?}"));
            }
        };
        fault("lost", &lost, !lost.is_empty());
        fault("doubled", &doubled, self.is_transactional && !doubled.is_empty());
        fault("left", &left, !left.is_empty());
        // Acknowledged, and nobody has handled it.
        let open: BTreeSet<&str> =
            acknowledged.iter().map(|id| &**id).filter(|id| !effects.contains_key(*id)).collect();
        let strange: Vec<_> = rows.iter().filter(|row| !is_explained(row, &open)).collect();
        fault("parked without a reason of the storm", &strange, !strange.is_empty());
        let few = acknowledged.len() < effects.len() / 2 || count(&done.kills) == 0;
        fault("hardly a storm", &acknowledged.len(), few);
        Report {
            row: self,
            sent: sender.sent.lock().unwrap().len(),
            acknowledged: acknowledged.len(),
            kills: count(&done.kills),
            locked: count(&done.locked),
            away: count(&done.away),
            crashes: count(&done.crashes),
            hangs: count(&done.hangs),
            lost: lost.len(),
            doubled: doubled.len(),
            left: left.len(),
            parked: reasons,
            seconds: time.as_secs(),
            faults,
        }
    }
}

/// Counts the parked rows by their reasons.
fn parked(rows: &[ShownRow]) -> BTreeMap<&'static str, usize> {
    let mut reasons = BTreeMap::new();
    for reason in rows.iter().filter_map(|row| row.parked) {
        *reasons.entry(reason.as_str()).or_default() += 1;
    }
    reasons
}

/// Returns whether the storm has made this row park. A row that waits is none of these.
fn is_explained(row: &ShownRow, open: &BTreeSet<&str>) -> bool {
    let of = |start: &str| row.keys.iter().all(|(_, id)| id.starts_with(start));
    match row.parked {
        None => true,
        Some(Parked::Failed | Parked::Died) => of(POISON),
        // Nobody was told *stored*, or another delivery of the event has gone without a row and succeeded. A list shares
        // events with another one.
        Some(Parked::Refused) => of("list") || row.keys.iter().all(|(_, id)| !open.contains(&**id)),
        // Stored by the newer version, whose key the older one does not read.
        Some(Parked::Misrouted) => of("v2."),
        Some(_) => false,
    }
}

/// Waits until nothing waits, and returns the rows.
async fn drained(inbox: &Inbox) -> Vec<ShownRow> {
    let until = Instant::now() + DRAINED;
    loop {
        let (mut rows, mut after) = (Vec::new(), 0);
        loop {
            let page = inbox.list(&Selection::default(), after, 1_000).await.unwrap();
            let Some(last) = page.last() else { break };
            after = last.seq;
            rows.extend(page);
        }
        if rows.iter().all(|row| row.parked.is_some()) || Instant::now() > until {
            return rows;
        }
        sleep(Duration::from_millis(200)).await;
    }
}

async fn effects(url: &str) -> BTreeMap<String, i64> {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let all = sqlx::query_as("SELECT id, count(*) FROM effects GROUP BY id");
    let all: Vec<(String, i64)> = all.fetch_all(&mut connection).await.unwrap();
    all.into_iter().collect()
}

/// Starts a receiver. Returns when it listens.
async fn start_receiver(setup: &Setup) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["receiver", "--exact", "--nocapture"])
        .env(SETUP, setup.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("a receiver");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let listens = async {
        while let Some(line) = lines.next_line().await.expect("its output") {
            if line == LISTENS {
                return;
            }
        }
        panic!("a receiver that does not listen");
    };
    timeout(STARTS, listens).await.expect("a receiver that listens in time");
    child
}

/// Kills one receiver after the other, and starts it again.
async fn kill(setups: &[Setup], children: &[Mutex<Child>], done: &Done) {
    while !done.ended.load(Ordering::Relaxed) {
        let pause = rand::rng().random_range(200..800);
        sleep(Duration::from_millis(pause)).await;
        let place = rand::rng().random_range(0..children.len());
        let mut child = children[place].lock().await;
        if rand::rng().random_ratio(1, 6) {
            // A deploy: a process that does not end in time is killed.
            signal(&child, "TERM").await;
            let _ = timeout(3 * SHORT, child.wait()).await;
        }
        child.kill().await.expect("a receiver that can be killed");
        done.kills.fetch_add(1, Ordering::Relaxed);
        *child = start_receiver(&setups[place]).await;
    }
}

async fn signal(child: &Child, name: &str) {
    let Some(id) = child.id() else { return };
    let mut kill = Command::new("kill");
    let status = kill.args(["-s", name, &id.to_string()]).status().await;
    assert!(status.is_ok_and(|status| status.success()), "`kill -s {name} {id}`");
}

const SHORT: Duration = Duration::from_millis(2_500);

/// Locks the table, crashes the server of the keys, and takes the table away, in turn.
async fn inflict(
    place: Place,
    setup: &Setup,
    server: &Arc<Server>,
    children: &[Mutex<Child>],
    done: &Done,
) {
    let faults = [Fault::Locked, Fault::Crashed, Fault::Away, Fault::Hung];
    let mut next = faults.into_iter().cycle();
    loop {
        sleep(SHORT).await;
        let fault = next.next().expect("a cycle");
        if done.ended.load(Ordering::Relaxed) {
            return;
        }
        match fault {
            Fault::Locked => {
                let lock = match place {
                    Place::Postgres => "BEGIN; LOCK TABLE webhook_inbox IN ACCESS EXCLUSIVE MODE",
                    Place::Sqlite => "BEGIN EXCLUSIVE",
                };
                let locked = run(place, setup, lock).await;
                sleep(SHORT).await;
                drop(locked);
                done.locked.fetch_add(1, Ordering::Relaxed);
            }
            Fault::Crashed => {
                let of = |crash: fn(&Server)| {
                    let server = Arc::clone(server);
                    tokio::task::spawn_blocking(move || crash(&server))
                };
                of(Server::stop_immediately).await.expect("a crash");
                sleep(SHORT).await;
                of(Server::start_again).await.expect("a start");
                done.crashes.fetch_add(1, Ordering::Relaxed);
            }
            Fault::Away => {
                run(place, setup, "ALTER TABLE webhook_inbox RENAME TO away").await;
                sleep(SHORT).await;
                run(place, setup, "ALTER TABLE away RENAME TO webhook_inbox").await;
                done.away.fetch_add(1, Ordering::Relaxed);
            }
            Fault::Hung => {
                let child = children[rand::rng().random_range(0..children.len())].lock().await;
                signal(&child, "STOP").await;
                // Longer than a turn and a lease.
                sleep(2 * SHORT).await;
                signal(&child, "CONT").await;
                done.hangs.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Fault {
    Locked,
    Crashed,
    Away,
    Hung,
}

/// Holds the lock of the table until it is dropped.
#[expect(dead_code, reason = "their drops close them")]
enum Session {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

async fn run(place: Place, setup: &Setup, sql: &str) -> Session {
    let sql = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    match place {
        Place::Postgres => {
            let mut session = PgConnection::connect(&setup.table).await.expect("the database");
            sql.execute(&mut session).await.expect("a statement that runs");
            Session::Postgres(session)
        }
        Place::Sqlite => {
            let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&setup.table);
            let options = options.busy_timeout(Duration::from_secs(30));
            let mut session = SqliteConnection::connect_with(&options).await.expect("the file");
            sql.execute(&mut session).await.expect("a statement that runs");
            Session::Sqlite(session)
        }
    }
}
