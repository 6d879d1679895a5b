//! The database that holds the effects of the handlers, and counts them.

use std::fmt::Write;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row, SqliteConnection};
use tokio::sync::{mpsc, oneshot};

/// How long a statement of Postgres may take: its connection may be silent.
const POSTGRES_BOUND: Duration = Duration::from_secs(3);
/// How long a statement of SQLite may take. It waits for the write lock.
const SQLITE_BOUND: Duration = Duration::from_secs(30);

const TABLES: &str = "CREATE TABLE effects (run bigint PRIMARY KEY, id bigint NOT NULL, \
     receiver bigint NOT NULL, attempt bigint NOT NULL, takeover bigint NOT NULL, at_ms bigint NOT NULL); \
     CREATE TABLE acknowledged (id bigint PRIMARY KEY, sent_ms bigint NOT NULL, acknowledged_ms bigint NOT NULL)";

/// The effect of one run of a handler.
pub(crate) struct Effect {
    pub(crate) event: u64,
    /// The number of the receiver's process.
    pub(crate) receiver: u32,
    pub(crate) attempt: u32,
    pub(crate) takeover: bool,
}

impl Effect {
    /// Returns a row of the table. `now` is the SQL of the time.
    fn values(&self, now: &str) -> String {
        let Self { event, receiver, attempt, takeover } = self;
        let run: i64 = rand::random();
        format!("({run},{event},{receiver},{attempt},{},{now})", u8::from(*takeover))
    }
}

/// Milliseconds since the Unix epoch, by the clock of the database.
pub(crate) const POSTGRES_NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint";
pub(crate) const SQLITE_NOW: &str = "CAST(unixepoch('subsec') * 1000 AS INTEGER)";

/// Returns the statement that writes these effects. A repetition with the same rows changes nothing.
pub(crate) fn insert<'a>(effects: impl IntoIterator<Item = &'a Effect>, now: &str) -> String {
    let rows: Vec<_> = effects.into_iter().map(|effect| effect.values(now)).collect();
    format!("INSERT INTO effects VALUES {} ON CONFLICT (run) DO NOTHING", rows.join(","))
}

/// A connection to the database of the effects.
pub(crate) enum Database {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Database {
    pub(crate) async fn connect(url: &str) -> sqlx::Result<Self> {
        if url.starts_with("sqlite:") {
            let options: SqliteConnectOptions = url.parse()?;
            let options = options.create_if_missing(true).busy_timeout(SQLITE_BOUND);
            return Ok(Self::Sqlite(options.journal_mode(SqliteJournalMode::Wal).connect().await?));
        }
        let options: PgConnectOptions = url.parse()?;
        Ok(Self::Postgres(options.connect().await?))
    }

    pub(crate) async fn create_tables(&mut self) -> sqlx::Result<()> {
        for table in TABLES.split(';') {
            self.run(table.trim().to_owned()).await?;
        }
        Ok(())
    }

    pub(crate) async fn run(&mut self, sql: String) -> sqlx::Result<()> {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        match self {
            Self::Postgres(connection) => sql.execute(connection).await.map(drop),
            Self::Sqlite(connection) => sql.execute(connection).await.map(drop),
        }
    }

    /// Returns the rows of a query, all of whose columns are integers.
    pub(crate) async fn rows(&mut self, sql: String) -> sqlx::Result<Vec<Vec<i64>>> {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        match self {
            Self::Postgres(connection) => {
                let rows = sql.fetch_all(connection).await?;
                rows.iter().map(|row| (0..row.len()).map(|at| row.try_get(at)).collect()).collect()
            }
            Self::Sqlite(connection) => {
                let rows = sql.fetch_all(connection).await?;
                rows.iter().map(|row| (0..row.len()).map(|at| row.try_get(at)).collect()).collect()
            }
        }
    }

    /// Loads the acknowledged events: number, first sending, acknowledgement.
    pub(crate) async fn load(&mut self, events: &[(u64, u64, u64)]) -> sqlx::Result<()> {
        for part in events.chunks(1_000) {
            let mut sql = "INSERT INTO acknowledged VALUES ".to_owned();
            for (place, (id, sent, acknowledged)) in part.iter().enumerate() {
                let comma = if place == 0 { "" } else { "," };
                let _ = write!(sql, "{comma}({id},{sent},{acknowledged})");
            }
            self.run(sql).await?;
        }
        Ok(())
    }

    fn now(&self) -> &'static str {
        if matches!(self, Self::Postgres(_)) { POSTGRES_NOW } else { SQLITE_NOW }
    }

    fn bound(&self) -> Duration {
        if matches!(self, Self::Postgres(_)) { POSTGRES_BOUND } else { SQLITE_BOUND }
    }
}

/// Writes effects that arrive together by one statement, on one connection.
#[derive(Clone)]
pub(crate) struct EffectWriter(mpsc::Sender<(Effect, oneshot::Sender<()>)>);

impl EffectWriter {
    pub(crate) fn start(url: String) -> Self {
        let (sender, receiver) = mpsc::channel(1_024);
        tokio::spawn(write_all(url, receiver));
        Self(sender)
    }

    /// Writes an effect. Returns when the database has committed it.
    pub(crate) async fn write(&self, effect: Effect) {
        let (written, wait) = oneshot::channel();
        self.0.send((effect, written)).await.expect("the writer runs");
        wait.await.expect("the writer runs");
    }
}

async fn write_all(url: String, mut effects: mpsc::Receiver<(Effect, oneshot::Sender<()>)>) {
    let mut database = None;
    let mut batch = Vec::new();
    while effects.recv_many(&mut batch, 256).await > 0 {
        let mut sql = None;
        loop {
            if database.is_none() {
                let connected = tokio::time::timeout(POSTGRES_BOUND, Database::connect(&url)).await;
                database = connected.ok().and_then(Result::ok);
            }
            if let Some(connected) = &mut database {
                // The same text each time: the rows have their numbers.
                let (now, bound) = (connected.now(), connected.bound());
                let sql = sql.get_or_insert_with(|| insert(batch.iter().map(|row| &row.0), now));
                let written = tokio::time::timeout(bound, connected.run(sql.clone())).await;
                if matches!(written, Ok(Ok(()))) {
                    break;
                }
                database = None;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // A handler whose task is gone does not wait.
        for (_, written) in batch.drain(..) {
            let _ = written.send(());
        }
    }
}
