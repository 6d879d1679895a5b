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
    SqliteArguments, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Row, Sqlite};

use crate::decide::spread;
use crate::inspect::{Count, Selection, ShownRow};
use crate::line::{self, CHANGE, INSPECT, STORE, bounded, counted, shown, taken};
use crate::row::{Change, Counts, FORMAT, Fate, NewRow, Parked, Place, millis, number};
use crate::settings::LIFE;
use crate::table::{Changed, SWEPT, Stored, Swept, Table, TableFuture, Take, Took, WholeRow};

/// How long a statement waits for the write lock of another process.
const LOCK: Duration = Duration::from_millis(800);

const WEEK: i64 = 7 * 86_400_000;
/// How many refused rows stay.
const REFUSED: i64 = 10_000;

pub(crate) struct SqliteTable {
    options: SqliteConnectOptions,
    name: String,
    writer: Line,
    ender: Line,
    operator: Line,
}

type Line = line::Line<SqliteConnection>;
type Lent<'l> = line::Lent<'l, SqliteConnection>;

/// Begins a transaction with the write lock.
async fn begin(lent: &mut Lent<'_>, is_durable: bool) -> Result<(), sqlx::Error> {
    let level = if is_durable { "FULL" } else { "NORMAL" };
    let sql = format!("PRAGMA synchronous = {level}; BEGIN IMMEDIATE");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lent.connection).await.map(drop)
}

async fn commit(mut lent: Lent<'_>) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("COMMIT").execute(&mut lent.connection).await?;
    lent.back();
    Ok(())
}

impl SqliteTable {
    /// `name` is a checked name.
    pub(crate) fn new(options: SqliteConnectOptions, name: &str) -> Self {
        let options = options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(LOCK);
        let [writer, ender, operator] = [(); 3].map(|()| Line::new());
        Self { options, name: format!("\"{name}\""), writer, ender, operator }
    }

    async fn lend<'l>(&self, line: &'l Line) -> Result<Lent<'l>, sqlx::Error> {
        let open = async {
            self.create_file()?;
            self.options.connect().await
        };
        line.lend(open).await
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
        text.replace("{table}", &self.name)
            .replace("{now}", "CAST(unixepoch('subsec') * 1000 AS INTEGER)")
            .replace("{format}", &FORMAT.to_string())
    }

    async fn change_one(
        &self,
        connection: &mut SqliteConnection,
        change: &Change,
    ) -> Result<Changed, sqlx::Error> {
        let mut change = change.clone();
        if change.fate == Fate::Delete {
            let sql = self.sql("DELETE FROM {table} WHERE seq = ?1 AND version = ?2");
            let query = statement(&sql).bind(change.at.seq).bind(change.at.version);
            if query.execute(&mut *connection).await?.rows_affected() > 0 {
                return Ok(Changed::Done);
            }
            let sql = self.sql("SELECT 1 FROM {table} WHERE seq = ?1");
            if statement(&sql).bind(change.at.seq).fetch_optional(&mut *connection).await?.is_none()
            {
                return Ok(Changed::Done);
            }
            // Somebody was told *stored* meanwhile: the ledger has to be asked again.
            change.fate = Fate::NOW;
        }
        // Somebody was told *stored* meanwhile: then a refusal is no end.
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
        Box::pin(bounded(INSPECT, async move {
            let mut lent = self.lend(&self.operator).await?;
            begin(&mut lent, true).await?;
            let done = select(&sql, of).execute(&mut lent.connection).await?;
            commit(lent).await?;
            Ok(done.rows_affected())
        }))
    }
}

fn statement(sql: &str) -> Query<'_, Sqlite, SqliteArguments> {
    sqlx::query(AssertSqlSafe(sql.to_owned()))
}

impl Table for SqliteTable {
    fn migrate(&self) -> TableFuture<'_, ()> {
        Box::pin(bounded(INSPECT, async {
            let mut lent = self.lend(&self.operator).await?;
            begin(&mut lent, true).await?;
            let others = "SELECT name FROM sqlite_schema \
                 WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND '\"' || name || '\"' <> ?1";
            let other =
                statement(others).bind(&self.name).fetch_optional(&mut lent.connection).await?;
            if let Some(other) = other {
                let other: String = other.try_get(0)?;
                let text = format!(
                    "an inbox needs an SQLite file of its own: this one has the table `{other}`"
                );
                return Err(sqlx::Error::Configuration(text.into()));
            }
            let sql =
                include_str!("sql/sqlite.sql").replace("{table}", self.name.trim_matches('"'));
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lent.connection).await?;
            commit(lent).await
        }))
    }

    fn store<'t>(
        &'t self,
        service: &'t str,
        lasts: Duration,
        rows: &'t [NewRow],
    ) -> TableFuture<'t, Vec<Stored>> {
        Box::pin(bounded(STORE, async move {
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
            let mut lent = self.lend(&self.writer).await?;
            begin(&mut lent, true).await?;
            let mut replies = Vec::with_capacity(rows.len());
            for row in rows {
                let query = statement(&sql)
                    .bind(&row.key[..])
                    .bind(service)
                    .bind(&row.namespace)
                    .bind(&row.keys)
                    .bind(&row.event_type)
                    .bind(row.turn.map(|turn| turn.as_bytes().to_vec()))
                    .bind(millis(lasts))
                    .bind(&row.method)
                    .bind(&row.target)
                    .bind(&row.headers)
                    .bind(&row.body[..])
                    .bind(&row.verified);
                let found = query.fetch_one(&mut lent.connection).await?;
                let (seq, version) = (found.try_get(0)?, found.try_get(1)?);
                replies.push(if version == 1 {
                    Stored::New { seq, version }
                } else {
                    Stored::Known
                });
            }
            commit(lent).await?;
            Ok(replies)
        }))
    }

    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>> {
        Box::pin(bounded(CHANGE, async move {
            let mut lent = self.lend(&self.ender).await?;
            begin(&mut lent, changes.iter().any(|change| change.answered)).await?;
            let mut replies = Vec::with_capacity(changes.len());
            for change in changes {
                replies.push(self.change_one(&mut lent.connection, change).await?);
            }
            commit(lent).await?;
            Ok(replies)
        }))
    }

    fn take<'t>(&'t self, take: Take<'t>) -> TableFuture<'t, Took> {
        Box::pin(bounded(CHANGE, async move {
            let look = self.sql(
                "SELECT seq, turn IS NOT NULL AS has_lapsed, attempts FROM {table} \
                 WHERE service = ?1 AND namespace = ?2 AND due <= {now} AND format <= {format} AND received > {now} - ?3 \
                 ORDER BY due LIMIT ?4",
            );
            let ours = self.sql(
                "UPDATE {table} SET turn = ?2, due = {now} + ?3 WHERE seq = ?1 \
                 RETURNING seq, version, namespace, keys, attempts, misrouted, answered, method, target, headers, body, verified",
            );
            let lapse = self.sql(
                "UPDATE {table} SET turn = NULL, due = {now} + ?2, parked = CASE WHEN ?2 IS NULL THEN 'died' END, \
                 attempts = attempts + 1, deaths = deaths + 1, last = 'its process died, or lost its turn' WHERE seq = ?1",
            );
            let mut took = Took::default();
            let mut lent = self.lend(&self.ender).await?;
            // The write lock is taken for due rows only.
            let mut is_begun = false;
            for namespace in take.namespaces {
                let left = take.each.min(take.most - took.rows.len());
                let found = || {
                    let look =
                        statement(&look).bind(take.service).bind(namespace).bind(millis(LIFE));
                    look.bind(number(left))
                };
                let mut rows = found().fetch_all(&mut lent.connection).await?;
                if rows.is_empty() {
                    continue;
                }
                if !is_begun {
                    begin(&mut lent, false).await?;
                    is_begun = true;
                    rows = found().fetch_all(&mut lent.connection).await?;
                }
                for row in rows {
                    let seq: i64 = row.try_get(0)?;
                    if row.try_get::<bool, _>(1)? {
                        let attempts = usize::try_from(row.try_get::<i64, _>(2)?).unwrap_or(0);
                        let delay = take.delays.get(attempts).map(|delay| millis(spread(*delay)));
                        statement(&lapse)
                            .bind(seq)
                            .bind(delay)
                            .execute(&mut lent.connection)
                            .await?;
                        let parked = delay.is_none().then_some(Parked::Died);
                        took.lapsed.push((namespace.clone(), parked));
                    } else {
                        let ours = statement(&ours).bind(seq).bind(&take.turn.as_bytes()[..]);
                        let ours =
                            ours.bind(millis(take.lasts)).fetch_one(&mut lent.connection).await?;
                        took.rows.push(taken(&ours, take.turn)?);
                    }
                }
            }
            if is_begun {
                commit(lent).await?;
            } else {
                lent.back();
            }
            Ok(took)
        }))
    }

    fn renew<'t>(&'t self, runs: &'t [Place], lasts: Duration) -> TableFuture<'t, ()> {
        Box::pin(bounded(CHANGE, async move {
            let sql = self.sql("UPDATE {table} SET due = {now} + ?3 WHERE seq = ?1 AND turn = ?2");
            let mut lent = self.lend(&self.ender).await?;
            begin(&mut lent, false).await?;
            for run in runs {
                let query = statement(&sql)
                    .bind(run.seq)
                    .bind(&run.turn.as_bytes()[..])
                    .bind(millis(lasts));
                query.execute(&mut lent.connection).await?;
            }
            commit(lent).await
        }))
    }

    fn sweep(&self) -> TableFuture<'_, Vec<Swept>> {
        Box::pin(bounded(INSPECT, async {
            let expire = self.sql(
                "UPDATE {table} SET due = NULL, turn = NULL, parked = 'expired' WHERE seq IN ( \
                 SELECT seq FROM {table} WHERE due IS NOT NULL AND received <= {now} - ?1 AND format <= {format} \
                 AND (turn IS NULL OR due <= {now}) LIMIT ?2) RETURNING service, namespace",
            );
            let delete = self.sql(
                "DELETE FROM {table} WHERE seq IN ( \
                 SELECT seq FROM {table} WHERE parked IS NOT NULL AND format <= {format} AND (received <= {now} - ?1 \
                 OR parked = 'refused' AND (received <= {now} - ?2 OR seq <= ( \
                 SELECT seq FROM {table} WHERE parked = 'refused' ORDER BY seq DESC LIMIT 1 OFFSET ?3))) LIMIT ?4) \
                 RETURNING service, namespace",
            );
            let mut lent = self.lend(&self.operator).await?;
            begin(&mut lent, false).await?;
            let expire = statement(&expire).bind(millis(LIFE)).bind(SWEPT);
            let expired = expire.fetch_all(&mut lent.connection).await?;
            let delete =
                statement(&delete).bind(millis(LIFE) + WEEK).bind(WEEK).bind(REFUSED).bind(SWEPT);
            let deleted = delete.fetch_all(&mut lent.connection).await?;
            commit(lent).await?;
            let mut swept: Vec<Swept> = Vec::new();
            for (rows, parked) in [(expired, Some(Parked::Expired)), (deleted, None)] {
                for row in rows {
                    let (service, namespace) = (row.try_get(0)?, row.try_get(1)?);
                    let one = Swept { service, namespace, parked, rows: 1 };
                    let known = swept.iter_mut().find(|it| {
                        (&it.service, &it.namespace, it.parked)
                            == (&one.service, &one.namespace, parked)
                    });
                    match known {
                        Some(known) => known.rows += 1,
                        None => swept.push(one),
                    }
                }
            }
            Ok(swept)
        }))
    }

    fn count(&self) -> TableFuture<'_, Vec<Count>> {
        Box::pin(bounded(INSPECT, async {
            let sql = self.sql(
                "SELECT service, namespace, NULL, count(*), {now} - min(received), sum(bytes) \
                 FROM {table} WHERE due IS NOT NULL GROUP BY 1, 2 UNION ALL \
                 SELECT service, namespace, parked, count(*), {now} - min(received), sum(bytes) \
                 FROM {table} WHERE parked IS NOT NULL GROUP BY 1, 2, 3",
            );
            let mut lent = self.lend(&self.operator).await?;
            let rows = statement(&sql).fetch_all(&mut lent.connection).await?;
            lent.back();
            rows.iter().filter_map(|row| counted(row).transpose()).collect()
        }))
    }

    fn list<'t>(
        &'t self,
        of: &'t Selection,
        after: i64,
        most: usize,
    ) -> TableFuture<'t, Vec<ShownRow>> {
        Box::pin(bounded(INSPECT, async move {
            let sql = self.sql(&format!(
                "SELECT {SHOWN} FROM {{table}} WHERE seq > ?7 AND {SELECTED} ORDER BY seq LIMIT ?8"
            ));
            let mut lent = self.lend(&self.operator).await?;
            let query = select(&sql, of).bind(after).bind(number(most));
            let rows = query.fetch_all(&mut lent.connection).await?;
            lent.back();
            rows.iter().map(shown).collect()
        }))
    }

    fn show(&self, seq: i64) -> TableFuture<'_, Option<WholeRow>> {
        Box::pin(bounded(INSPECT, async move {
            let sql =
                self.sql(&format!("SELECT {SHOWN}, headers, body FROM {{table}} WHERE seq = ?1"));
            let mut lent = self.lend(&self.operator).await?;
            let row = statement(&sql).bind(seq).fetch_optional(&mut lent.connection).await?;
            lent.back();
            let read =
                |row: SqliteRow| Ok((shown(&row)?, row.try_get("headers")?, row.try_get("body")?));
            row.map(read).transpose()
        }))
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

/// The columns of [`shown`].
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
        let table = SqliteTable::new(options, "webhook_inbox");
        table.migrate().await.unwrap();
        let before = locks(&path);
        assert!(before > 0, "WAL mode holds a lock");
        table.lend(&table.writer).await.unwrap().back();
        assert_eq!(locks(&path), before);
    }
}
