//! The table in an SQLite file of its own.
//!
//! 1. Every write is a transaction that begins with the write lock (`BEGIN IMMEDIATE`), so no row
//!    is locked by another one.
//! 2. A transaction before an answer *stored* is on the disk: `synchronous = FULL`. Other
//!    transactions are `NORMAL`: what a crash of the machine undoes is done again, as a duplicate.
//! 3. Only the owner of the file may read it.

use std::io::ErrorKind;
use std::time::{Duration, SystemTime};

use sqlx::query::Query;
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Row, Sqlite};
use tower_dedup::adapter::contract::Token;

use crate::inspect::{Count, Selection, ShownRequest, ShownRow};
use crate::line::{Found, Line, Lines};
use crate::row::{Change, Counts, FORMAT, Fate, NewRow, Place, millis, number};
use crate::settings::{LIFE, Settings};
use crate::table::{Changed, SWEPT, Stored, Swept, Table, TableError, TableFuture, Took};

/// How long a statement waits for the write lock of another process.
const LOCK: Duration = Duration::from_millis(800);

const WEEK: i64 = 7 * 86_400_000;
/// How many refused rows stay.
const REFUSED: i64 = 10_000;

pub(crate) struct SqliteTable {
    options: SqliteConnectOptions,
    service: String,
    /// How long a turn lasts, in milliseconds.
    turn: i64,
    /// A JSON array of milliseconds.
    delays: String,
    /// The name of the table, without quotes.
    name: String,
    lines: Lines<SqliteConnection>,
}

impl SqliteTable {
    pub(crate) fn new(options: SqliteConnectOptions, service: &str, settings: &Settings) -> Self {
        let delays: Vec<i64> = settings.delays.iter().map(|delay| millis(*delay)).collect();
        Self {
            options: options
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .synchronous(SqliteSynchronous::Full)
                .busy_timeout(LOCK),
            service: service.to_owned(),
            turn: millis(settings.turn),
            delays: format!("{delays:?}"),
            name: settings.table.clone(),
            lines: Lines::new(),
        }
    }

    async fn open(&self) -> Result<SqliteConnection, sqlx::Error> {
        self.create_file()?;
        self.options.connect().await
    }

    /// Runs `write` in a transaction that begins with the write lock.
    async fn transaction<T>(
        &self,
        line: &Line<SqliteConnection>,
        is_durable: bool,
        write: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, TableError> {
        let level = if is_durable { "FULL" } else { "NORMAL" };
        let begin = format!("PRAGMA synchronous = {level}; BEGIN IMMEDIATE");
        let call = async move |connection: &mut SqliteConnection| {
            sqlx::raw_sql(AssertSqlSafe(begin)).execute(&mut *connection).await?;
            let done = write(connection).await?;
            sqlx::raw_sql("COMMIT").execute(connection).await?;
            Ok(done)
        };
        line.call(self.open(), call).await
    }

    /// Creates the file for its owner alone: it has the bodies of deliveries in clear.
    ///
    /// Opens no file that exists: to close a descriptor of a file drops the locks of this process
    /// on it. Another process, such as `sqlite3`, then deletes the WAL, and with it each later row.
    fn create_file(&self) -> Result<(), sqlx::Error> {
        let mut open = std::fs::OpenOptions::new();
        open.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut open, 0o600);
        match open.open(self.options.get_filename()) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(sqlx::Error::Io(error)),
            _ => Ok(()),
        }
    }

    fn sql(&self, text: &str) -> String {
        text.replace("{table}", &format!("\"{}\"", self.name))
            .replace("{index}", &self.name)
            .replace("{now}", "CAST(unixepoch('subsec') * 1000 AS INTEGER)")
            .replace("{format}", &FORMAT.to_string())
    }

    async fn change_one(
        &self,
        connection: &mut SqliteConnection,
        change: &Change,
    ) -> Result<Changed, sqlx::Error> {
        if change.fate == Fate::Delete {
            let sql = self.sql("DELETE FROM {table} WHERE seq = ?1 AND version = ?2");
            let query = statement(&sql).bind(change.at.seq).bind(change.at.version);
            if query.execute(&mut *connection).await?.rows_affected() > 0 {
                return Ok(Changed::Done);
            }
        }
        // Somebody was told *stored* meanwhile: then neither success nor refusal is an end.
        let sql = self.sql(
            "UPDATE {table} SET \
             due = CASE WHEN ?4 THEN due WHEN ?5 = 'refused' AND version <> ?9 THEN {now} WHEN ?3 IS NOT NULL THEN {now} + ?3 END, \
             turn = CASE WHEN ?4 THEN turn END, \
             parked = CASE WHEN ?5 <> 'refused' OR version = ?9 THEN ?5 END, \
             attempts = attempts + ?6, misrouted = misrouted + ?7, answered = answered OR ?8, version = version + ?8, \
             last = coalesce(?10, last) \
             WHERE seq = ?1 AND turn = ?2",
        );
        let query = statement(&sql)
            .bind(change.at.seq)
            .bind(&change.at.turn.as_bytes()[..])
            .bind(change.due_after())
            .bind(change.fate == Fate::Keep)
            .bind(change.parked())
            .bind(change.counts(Counts::Attempt))
            .bind(change.counts(Counts::Misrouted))
            .bind(i64::from(change.answered))
            .bind(change.at.version)
            .bind(change.last.as_deref());
        let is_changed = query.execute(connection).await?.rows_affected() > 0;
        Ok(if is_changed { Changed::Done } else { Changed::Lost })
    }

    /// Executes the statement of an operator on selected rows.
    fn execute<'t>(&'t self, sql: String, of: &'t Selection) -> TableFuture<'t, u64> {
        let write = async move |connection: &mut SqliteConnection| {
            Ok(select(&sql, of).execute(connection).await?.rows_affected())
        };
        Box::pin(self.transaction(&self.lines.operator, true, write))
    }
}

fn statement(sql: &str) -> Query<'_, Sqlite, SqliteArguments> {
    sqlx::query(AssertSqlSafe(sql.to_owned()))
}

impl Table for SqliteTable {
    fn migrate(&self) -> TableFuture<'_, ()> {
        let sql = self.sql(include_str!("sql/sqlite.sql"));
        let write = async move |connection: &mut SqliteConnection| {
            let others = "SELECT name FROM sqlite_schema \
                 WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND name <> ?1";
            let other = statement(others).bind(&self.name).fetch_optional(&mut *connection).await?;
            if let Some(other) = other {
                let other: String = other.try_get(0)?;
                let text = format!(
                    "an inbox needs an SQLite file of its own: this one has the table `{other}`"
                );
                return Err(sqlx::Error::Configuration(text.into()));
            }
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
        };
        Box::pin(self.transaction(&self.lines.operator, true, write))
    }

    fn store<'t>(&'t self, rows: &'t [NewRow]) -> TableFuture<'t, Vec<Stored>> {
        let sql = self.sql(
            "INSERT INTO {table} AS r (key, service, namespace, keys, event_type, received, due, turn, format, method, \
             target, headers, body, verified, answered) \
             VALUES (?1, ?2, ?3, ?4, ?5, {now}, {now} + CASE WHEN ?6 IS NULL THEN 0 ELSE ?7 END, ?6, {format}, ?8, ?9, \
             ?10, ?11, ?12, ?6 IS NULL) \
             ON CONFLICT (key) DO UPDATE SET version = version + 1, answered = 1, received = {now}, \
             due = CASE WHEN turn IS NULL THEN {now} ELSE due END, parked = NULL, \
             attempts = CASE WHEN parked IS NULL THEN attempts ELSE 0 END, \
             deaths = CASE WHEN parked IS NULL THEN deaths ELSE 0 END, \
             misrouted = CASE WHEN parked IS NULL THEN misrouted ELSE 0 END, \
             verified = coalesce(excluded.verified, verified) \
             RETURNING seq, version",
        );
        let write = async move |connection: &mut SqliteConnection| {
            let mut replies = Vec::with_capacity(rows.len());
            for row in rows {
                let query = statement(&sql)
                    .bind(&row.key[..])
                    .bind(&self.service)
                    .bind(&row.namespace)
                    .bind(&row.keys)
                    .bind(&row.event_type)
                    .bind(row.turn.map(|turn| turn.as_bytes().to_vec()))
                    .bind(self.turn)
                    .bind(&row.method)
                    .bind(&row.target)
                    .bind(&row.headers)
                    .bind(&row.body[..])
                    .bind(&row.verified);
                let found = query.fetch_one(&mut *connection).await?;
                let is_new = found.try_get::<i64, _>(1)? == 1;
                let new = Stored::New(found.try_get(0)?);
                replies.push(if is_new { new } else { Stored::Known });
            }
            Ok(replies)
        };
        Box::pin(self.transaction(&self.lines.writer, true, write))
    }

    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>> {
        let is_durable = changes.iter().any(|change| change.answered);
        let write = async move |connection: &mut SqliteConnection| {
            let mut replies = Vec::with_capacity(changes.len());
            for change in changes {
                replies.push(self.change_one(connection, change).await?);
            }
            Ok(replies)
        };
        Box::pin(self.transaction(&self.lines.ender, is_durable, write))
    }

    fn take<'t>(&'t self, namespaces: &'t [String], most: usize) -> TableFuture<'t, Took> {
        let sql = self.sql(
            "UPDATE {table} SET \
             turn = CASE WHEN turn IS NULL THEN ?5 END, \
             due = {now} + CASE WHEN turn IS NULL THEN ?6 ELSE CAST( \
               json_extract(?7, '$[' || attempts || ']') * (0.8 + 0.4 * abs(random() / 9223372036854775808.0)) AS INTEGER) END, \
             parked = CASE WHEN turn IS NOT NULL AND attempts >= json_array_length(?7) THEN 'died' END, \
             attempts = attempts + (turn IS NOT NULL), \
             deaths = deaths + (turn IS NOT NULL), \
             last = CASE WHEN turn IS NOT NULL THEN 'its process died, or lost its turn' ELSE last END \
             WHERE seq IN (SELECT seq FROM {table} WHERE service = ?1 AND namespace = ?2 AND due <= {now} \
               AND format <= {format} AND received > {now} - ?3 ORDER BY due LIMIT ?4) \
             RETURNING turn IS NOT NULL AS is_ours, seq, version, namespace, keys, attempts, misrouted, answered, parked, \
             method, target, headers, body, verified",
        );
        let turn = Token::random();
        let write = async move |connection: &mut SqliteConnection| {
            let mut took = Took::default();
            for namespace in namespaces {
                let left = most.div_ceil(namespaces.len()).min(most - took.rows.len());
                let query = statement(&sql)
                    .bind(&self.service)
                    .bind(namespace)
                    .bind(millis(LIFE))
                    .bind(number(left))
                    .bind(&turn.as_bytes()[..])
                    .bind(self.turn)
                    .bind(&self.delays);
                for row in query.fetch_all(&mut *connection).await? {
                    Found(&row).took(turn, &mut took)?;
                }
            }
            Ok(took)
        };
        Box::pin(self.transaction(&self.lines.ender, false, write))
    }

    fn renew<'t>(&'t self, runs: &'t [Place]) -> TableFuture<'t, ()> {
        let sql = self.sql("UPDATE {table} SET due = {now} + ?3 WHERE seq = ?1 AND turn = ?2");
        let write = async move |connection: &mut SqliteConnection| {
            for run in runs {
                let query = statement(&sql).bind(run.seq).bind(&run.turn.as_bytes()[..]);
                query.bind(self.turn).execute(&mut *connection).await?;
            }
            Ok(())
        };
        Box::pin(self.transaction(&self.lines.ender, false, write))
    }

    fn sweep(&self) -> TableFuture<'_, Vec<Swept>> {
        let expire = self.sql(
            "UPDATE {table} SET due = NULL, turn = NULL, parked = 'expired' WHERE seq IN ( \
             SELECT seq FROM {table} WHERE due IS NOT NULL AND received <= {now} - ?1 AND format <= {format} \
             AND (turn IS NULL OR due <= {now}) LIMIT ?2) RETURNING service, namespace, parked",
        );
        let delete = self.sql(
            "DELETE FROM {table} WHERE seq IN ( \
             SELECT seq FROM {table} WHERE parked IS NOT NULL AND format <= {format} AND (received <= {now} - ?1 \
             OR parked = 'refused' AND (received <= {now} - ?2 OR seq <= ( \
             SELECT seq FROM {table} WHERE parked = 'refused' ORDER BY seq DESC LIMIT 1 OFFSET ?3))) LIMIT ?4) \
             RETURNING service, namespace, NULL AS parked",
        );
        let write = async move |connection: &mut SqliteConnection| {
            let expire = statement(&expire).bind(millis(LIFE)).bind(number(SWEPT));
            let mut rows = expire.fetch_all(&mut *connection).await?;
            let delete = statement(&delete).bind(millis(LIFE) + WEEK).bind(WEEK).bind(REFUSED);
            rows.extend(delete.bind(number(SWEPT)).fetch_all(connection).await?);
            rows.iter().map(|row| Found(row).swept()).collect()
        };
        Box::pin(self.transaction(&self.lines.operator, false, write))
    }

    fn count(&self) -> TableFuture<'_, Vec<Count>> {
        let sql = self.sql(
            "SELECT service, namespace, NULL AS parked, count(*) AS rows, {now} - min(received) AS oldest, sum(bytes) AS bytes \
             FROM {table} WHERE due IS NOT NULL GROUP BY 1, 2 UNION ALL \
             SELECT service, namespace, parked, count(*), {now} - min(received), sum(bytes) \
             FROM {table} WHERE parked IS NOT NULL GROUP BY 1, 2, 3",
        );
        let call = async move |connection: &mut SqliteConnection| {
            let rows = statement(&sql).fetch_all(connection).await?;
            rows.iter().filter_map(|row| Found(row).counted().transpose()).collect()
        };
        Box::pin(self.lines.operator.call(self.open(), call))
    }

    fn list<'t>(
        &'t self,
        of: &'t Selection,
        after: i64,
        most: usize,
    ) -> TableFuture<'t, Vec<ShownRow>> {
        let sql = self.sql(&format!(
            "SELECT {SHOWN} FROM {{table}} WHERE seq > ?7 AND {SELECTED} ORDER BY seq LIMIT ?8"
        ));
        let call = async move |connection: &mut SqliteConnection| {
            let query = select(&sql, of).bind(after).bind(number(most));
            let rows = query.fetch_all(connection).await?;
            rows.iter().map(|row| Found(row).shown()).collect()
        };
        Box::pin(self.lines.operator.call(self.open(), call))
    }

    fn show(&self, seq: i64) -> TableFuture<'_, Option<(ShownRow, ShownRequest)>> {
        let sql = self.sql(&format!("SELECT {SHOWN}, headers, body FROM {{table}} WHERE seq = ?1"));
        let call = async move |connection: &mut SqliteConnection| {
            let row = statement(&sql).bind(seq).fetch_optional(connection).await?;
            row.map(|row| Found(&row).whole()).transpose()
        };
        Box::pin(self.lines.operator.call(self.open(), call))
    }

    fn retry<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        let sql = self.sql(&format!(
            "UPDATE {{table}} SET due = {{now}}, parked = NULL, attempts = 0, deaths = 0, misrouted = 0, version = version + 1 \
             WHERE turn IS NULL AND parked IS NOT 'expired' AND received > {{now}} - {} AND {SELECTED}",
            millis(LIFE)
        ));
        self.execute(sql, of)
    }

    fn delete<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        self.execute(self.sql(&format!("DELETE FROM {{table}} WHERE {SELECTED}")), of)
    }
}

/// The rows of a [`Selection`].
const SELECTED: &str = "(?1 IS NULL OR seq = ?1) AND (?2 IS NULL OR service = ?2) AND (?3 IS NULL OR namespace = ?3) \
     AND (?4 IS NULL OR instr(keys, char(9) || ?4 || char(10)) > 0) \
     AND (?5 IS NULL OR parked = ?5 OR (?5 = 'any' AND parked IS NOT NULL)) AND (?6 IS NULL OR received <= ?6)";

/// The columns of [`Found::shown`].
const SHOWN: &str = "seq, service, namespace, keys, event_type, received, due, turn IS NOT NULL AS is_running, parked, \
     attempts, deaths, answered, method, target, verified, last, length(body) AS body_bytes";

/// Binds the parameters of a selection.
fn select<'q>(sql: &'q str, of: &'q Selection) -> Query<'q, Sqlite, SqliteArguments> {
    let until = of
        .received_until
        .map(|at| millis(at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()));
    statement(sql)
        .bind(of.seq)
        .bind(of.service.as_deref())
        .bind(of.namespace.as_deref())
        .bind(of.id.as_deref())
        .bind(of.parked_text())
        .bind(until)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::{fs, process};

    use super::*;

    /// Returns how many locks this process has on a file.
    fn locks(path: &Path) -> usize {
        let (pid, inode) = (process::id().to_string(), fs::metadata(path).unwrap().ino());
        let is_ours = |lock: &&str| {
            let mut fields = lock.split_whitespace().skip(4);
            fields.next() == Some(&pid)
                && fields.next().is_some_and(|file| file.ends_with(&format!(":{inode}")))
        };
        fs::read_to_string("/proc/locks").unwrap().lines().filter(is_ours).count()
    }

    #[tokio::test]
    async fn connections_keep_their_lock_while_another_one_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("inbox.db");
        let options = SqliteConnectOptions::new().filename(&path);
        let table = SqliteTable::new(options, "shop", &Settings::default());
        table.migrate().await.unwrap();
        let before = locks(&path);
        assert!(before > 0, "WAL mode holds a lock");
        let _another = table.open().await.unwrap();
        assert_eq!(locks(&path), before);
    }
}
