//! PostgreSQL that is restarted or gone, and the start and end of the tests' own servers.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use sqlx::{Connection, PgConnection};

use crate::support::postgres::{Schema, Server};
use crate::support::until;

const PARENT: &str = "TOWER_DEDUP_TEST_POSTGRES_PARENT";
const MARK: &str = "server-is-at:";

/// Not a test: a process that has a server, if this binary is started as one.
#[test]
fn parent() {
    if std::env::var_os(PARENT).is_none() {
        return;
    }
    let server = Server::start();
    println!("\n{MARK}{} {}", server.port(), server.dir().display());
    loop {
        std::thread::park();
    }
}

async fn count(url: &str) -> sqlx::Result<i64> {
    let mut connection = PgConnection::connect(url).await?;
    sqlx::query_scalar("SELECT count(*) FROM rows_before_the_restart")
        .fetch_one(&mut connection)
        .await
}

async fn keep(url: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE rows_before_the_restart (n int); INSERT INTO rows_before_the_restart VALUES (1)")
        .execute(&mut connection)
        .await
        .unwrap();
}

#[tokio::test]
async fn restarted_server_has_what_was_committed() {
    let server = Server::start();
    let url = server.url();
    keep(&url).await;
    let mut connected = PgConnection::connect(&url).await.unwrap();
    server.restart_immediately();
    assert!(connected.ping().await.is_err(), "the session is gone");
    assert_eq!(count(&url).await.unwrap(), 1);

    server.stop_immediately();
    assert!(count(&url).await.is_err());
    server.start_again();
    assert_eq!(count(&url).await.unwrap(), 1);

    let (dir, port) = (server.dir().to_owned(), server.port());
    drop(server);
    assert!(gone(&dir, port));
}

#[tokio::test]
async fn killed_process_leaves_no_server() {
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["postgres_restart::parent", "--exact", "--nocapture"])
        .env(PARENT, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let (port, dir) = loop {
        let line = lines.next().expect("the parent starts").unwrap();
        if let Some((_, server)) = line.split_once(MARK) {
            let (port, dir) = server.split_once(' ').unwrap();
            break (port.parse().unwrap(), Path::new(dir).to_owned());
        }
    };
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok() && dir.exists());
    // SIGKILL: the process cannot clean up.
    parent.kill().unwrap();
    parent.wait().unwrap();
    until(|| gone(&dir, port)).await;
}

fn gone(dir: &Path, port: u16) -> bool {
    let address = ([127, 0, 0, 1], port).into();
    !dir.exists() && TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err()
}

#[tokio::test]
async fn schemas_of_two_tests_share_nothing() {
    let (one, other) = (Schema::fresh(), Schema::fresh());
    keep(&one.url()).await;
    keep(&other.url()).await;
    assert_eq!(count(&one.url()).await.unwrap(), 1);
    let url = one.url();
    drop(one);
    assert!(count(&url).await.is_err(), "the table is dropped with its schema");
    assert_eq!(count(&other.url()).await.unwrap(), 1);
}
