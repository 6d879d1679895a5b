//! The table in Postgres.
//!
//! 1. An answer *stored* leaves only after a COMMIT that is as durable as
//!    `synchronous_commit = on`, whatever the role or the database is set to. Other statements need
//!    not be durable: what a crash undoes is done again, as a duplicate.
//! 2. Insertions lock rows in the order of their keys, and every other statement skips locked rows.
//! 3. Connections are opened by the connect options of the user's pool, but are not part of the
//!    pool. Each call has a time limit. A call that exceeds it, or that is dropped, drops its
//!    connection, so no caller waits for a ping.
//! 4. The server ends the session of such a call, whatever it waits for, because its client has
//!    gone.
//! 5. `clock_timestamp()` is the only clock.

use std::time::{Duration, SystemTime};

use sqlx::postgres::{PgArguments, PgConnection, PgPool, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection, Postgres, Row};

use crate::inspect::{Count, Selection, ShownRow};
use crate::line::{self, CHANGE, INSPECT, STORE, bounded, counted, shown, taken};
use crate::row::{Change, Counts, FORMAT, Fate, NewRow, Parked, Place, millis, number};
use crate::table::{Changed, Stored, Swept, Table, TableFuture, Take, Took, WholeRow};

/// How often a statement is repeated after a conflict.
const REPEATS: usize = 5;

const DURABLE: &str = "CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') \
     THEN set_config('synchronous_commit', 'on', true) END";
const NOT_DURABLE: &str = "set_config('synchronous_commit', 'off', true)";
/// `tower-dedup` sets the same for its own sessions.
const CHECK_CLIENT: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
     WHERE current_setting('client_connection_check_interval') = '0'";

pub(crate) struct PostgresTable {
    pool: PgPool,
    sql: Statements,
    writer: Line,
    ender: Line,
    operator: Line,
}

type Line = line::Line<PgConnection>;
type Lent<'l> = line::Lent<'l, PgConnection>;

/// Gives a connection back, if it still works after this.
fn back<T>(lent: Lent<'_>, done: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
    let works = done.as_ref().err().is_none_or(|it| it.as_database_error().is_some_and(keeps));
    if works {
        lent.back();
    }
    done
}

/// Repeats a call after a conflict.
macro_rules! repeated {
    ($call:expr) => {{
        let mut left = REPEATS;
        loop {
            match $call {
                Err(error) if left > 0 && is_conflict(&error) => left -= 1,
                done => break done,
            }
        }
    }};
}

struct Statements {
    name: String,
    /// The start of the names of the indexes.
    index: String,
    store: String,
    delete: String,
    change: [String; 2],
    look: String,
    take: String,
    renew: String,
    sweep: String,
    count: String,
}

impl PostgresTable {
    /// `name` is a checked name.
    pub(crate) fn new(pool: PgPool, name: &str) -> Self {
        let [writer, ender, operator] = [(); 3].map(|()| Line::new());
        Self { pool, sql: Statements::new(name), writer, ender, operator }
    }

    async fn lend<'l>(&self, line: &'l Line) -> Result<Lent<'l>, sqlx::Error> {
        let lent = line.lend(self.connect()).await?;
        if self.pool.is_closed() { Err(sqlx::Error::PoolClosed) } else { Ok(lent) }
    }

    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        if self.pool.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        let mut connection = PgConnection::connect_with(&self.pool.connect_options()).await?;
        sqlx::query(CHECK_CLIENT).execute(&mut connection).await?;
        Ok(connection)
    }

    async fn change_once(
        &self,
        connection: &mut PgConnection,
        changes: &[Change],
    ) -> Result<Vec<Changed>, sqlx::Error> {
        let mut replies: Vec<Option<Changed>> = vec![None; changes.len()];
        let is_delete = |change: &Change| change.fate == Fate::Delete;
        if changes.iter().any(is_delete) {
            let of = |part: fn(&Place) -> i64| -> Vec<i64> {
                changes.iter().filter(|it| is_delete(it)).map(|it| part(&it.at)).collect()
            };
            let query = query(&self.sql.delete).bind(of(|it| it.seq)).bind(of(|it| it.version));
            for row in query.fetch_all(&mut *connection).await? {
                let seq: i64 = row.try_get(0)?;
                for (reply, change) in replies.iter_mut().zip(changes) {
                    if is_delete(change) && change.at.seq == seq {
                        *reply = Some(Changed::Done);
                    }
                }
            }
        }
        let others: Vec<Change> = changes.iter().filter(|it| !is_delete(it)).cloned().collect();
        self.update(connection, &others, changes, &mut replies).await?;
        let missing = |replies: &[Option<Changed>]| -> Vec<i64> {
            let open = changes.iter().zip(replies).filter(|(_, reply)| reply.is_none());
            open.map(|(change, _)| change.at.seq).collect()
        };
        let left = missing(&replies);
        if left.is_empty() {
            return Ok(replies.into_iter().flatten().collect());
        }
        let found = query(&self.sql.look).bind(left).fetch_all(&mut *connection).await?;
        let mut changed = Vec::new();
        for (reply, change) in replies.iter_mut().zip(changes) {
            if reply.is_some() {
                continue;
            }
            let row = found.iter().find(|row| row.try_get(0).ok() == Some(change.at.seq));
            let is_ours = |row: &PgRow| {
                row.try_get::<Option<&[u8]>, _>(2).ok().flatten()
                    == Some(&change.at.turn.as_bytes()[..])
            };
            *reply = match row {
                None if is_delete(change) => Some(Changed::Done),
                None => Some(Changed::Lost),
                Some(row) if !is_ours(row) => Some(Changed::Lost),
                Some(row)
                    if is_delete(change) && row.try_get::<i64, _>(1)? != change.at.version =>
                {
                    // Somebody was told *stored* meanwhile: the ledger has to be asked again.
                    changed.push(Change { fate: Fate::NOW, ..change.clone() });
                    None
                }
                Some(_) => Some(Changed::Locked),
            };
        }
        self.update(connection, &changed, changes, &mut replies).await?;
        Ok(replies.into_iter().map(|reply| reply.unwrap_or(Changed::Locked)).collect())
    }

    /// Executes changes that delete nothing, and notes the replies at the places of `all`.
    async fn update(
        &self,
        connection: &mut PgConnection,
        changes: &[Change],
        all: &[Change],
        replies: &mut [Option<Changed>],
    ) -> Result<(), sqlx::Error> {
        if changes.is_empty() {
            return Ok(());
        }
        let column = |of: fn(&Change) -> i64| changes.iter().map(of).collect::<Vec<i64>>();
        let is_durable = changes.iter().any(|change| change.answered);
        let query = query(&self.sql.change[usize::from(is_durable)])
            .bind(column(|it| it.at.seq))
            .bind(turns(changes.iter().map(|it| &it.at)))
            .bind(column(|it| it.due_after().unwrap_or(-1)))
            .bind(changes.iter().map(|it| it.fate == Fate::Keep).collect::<Vec<bool>>())
            .bind(changes.iter().map(Change::parked).collect::<Vec<_>>())
            .bind(column(|it| it.counts(Counts::Attempt)))
            .bind(column(|it| it.counts(Counts::Misrouted)))
            .bind(changes.iter().map(|it| it.answered).collect::<Vec<bool>>())
            .bind(changes.iter().map(|it| it.last.clone()).collect::<Vec<_>>())
            .bind(column(|it| it.at.version));
        for row in query.fetch_all(&mut *connection).await? {
            let seq: i64 = row.try_get(0)?;
            for (reply, change) in replies.iter_mut().zip(all) {
                if change.at.seq == seq {
                    *reply = Some(Changed::Done);
                }
            }
        }
        Ok(())
    }
}

fn turns<'p>(places: impl Iterator<Item = &'p Place>) -> Vec<Vec<u8>> {
    places.map(|place| place.turn.as_bytes().to_vec()).collect()
}

/// Returns `true` if the connection still works after this error.
fn keeps(error: &dyn sqlx::error::DatabaseError) -> bool {
    // A server that has become a standby, that ends its sessions, or whose pooler fails.
    error
        .code()
        .is_some_and(|code| !["25006", "57P", "08", "58"].iter().any(|it| code.starts_with(it)))
}

/// Returns `true` after a serialization failure or a deadlock.
fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code == "40001" || code == "40P01")
}

impl PostgresTable {
    async fn store_once(
        &self,
        connection: &mut PgConnection,
        service: &str,
        lasts: Duration,
        rows: &[&NewRow],
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let texts = |of: fn(&NewRow) -> &str| rows.iter().map(|row| of(row)).collect::<Vec<&str>>();
        let bytes =
            |of: fn(&NewRow) -> &[u8]| rows.iter().map(|row| of(row)).collect::<Vec<&[u8]>>();
        let optional =
            |of: fn(&NewRow) -> Option<&str>| rows.iter().map(|row| of(row)).collect::<Vec<_>>();
        let turn = |row: &&NewRow| row.turn.map(|it| it.as_bytes().to_vec());
        query(&self.sql.store)
            .bind(service)
            .bind(millis(lasts))
            .bind(bytes(|row| &row.key))
            .bind(texts(|row| &row.namespace))
            .bind(texts(|row| &row.keys))
            .bind(optional(|row| row.event_type.as_deref()))
            .bind(texts(|row| &row.method))
            .bind(bytes(|row| row.target.as_bytes()))
            .bind(bytes(|row| &row.headers))
            .bind(bytes(|row| &row.body))
            .bind(optional(|row| row.verified.as_deref()))
            .bind(rows.iter().map(turn).collect::<Vec<_>>())
            .fetch_all(connection)
            .await
    }

    /// Executes the statement of an operator on selected rows.
    fn execute<'t>(&'t self, sql: String, of: &'t Selection) -> TableFuture<'t, u64> {
        Box::pin(bounded(INSPECT, async move {
            let mut lent = self.lend(&self.operator).await?;
            let done = select(&sql, of).execute(&mut lent.connection).await;
            back(lent, done).map(|done| done.rows_affected())
        }))
    }
}

impl Table for PostgresTable {
    fn migrate(&self) -> TableFuture<'_, ()> {
        Box::pin(bounded(INSPECT, async {
            let sql = include_str!("sql/postgres.sql")
                .replace("{table}", &self.sql.name)
                .replace("{index}", &self.sql.index);
            let mut lent = self.lend(&self.operator).await?;
            let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lent.connection).await;
            back(lent, done).map(drop)
        }))
    }

    fn store<'t>(
        &'t self,
        service: &'t str,
        lasts: Duration,
        rows: &'t [NewRow],
    ) -> TableFuture<'t, Vec<Stored>> {
        Box::pin(bounded(STORE, async move {
            let mut sorted: Vec<&NewRow> = rows.iter().collect();
            sorted.sort_unstable_by_key(|row| row.key);
            let mut lent = self.lend(&self.writer).await?;
            let found =
                repeated!(self.store_once(&mut lent.connection, service, lasts, &sorted).await);
            let found = back(lent, found)?;
            let reply = |row: &NewRow| {
                let it = found.iter().find(|it| it.try_get(0).ok() == Some(&row.key[..]))?;
                let (seq, version) = (it.try_get(1).ok()?, it.try_get(2).ok()?);
                Some(if version == 1 { Stored::New { seq, version } } else { Stored::Known })
            };
            let replies = rows.iter().map(reply).collect::<Option<Vec<_>>>();
            replies.ok_or_else(|| sqlx::Error::Protocol("a row has no reply".into()))
        }))
    }

    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>> {
        Box::pin(bounded(CHANGE, async move {
            let mut lent = self.lend(&self.ender).await?;
            let done = repeated!(self.change_once(&mut lent.connection, changes).await);
            back(lent, done)
        }))
    }

    fn take<'t>(&'t self, take: Take<'t>) -> TableFuture<'t, Took> {
        Box::pin(bounded(CHANGE, async move {
            let mut lent = self.lend(&self.ender).await?;
            let delays: Vec<i64> = take.delays.iter().map(|it| millis(*it)).collect();
            let found = repeated!(
                query(&self.sql.take)
                    .bind(take.service)
                    .bind(take.namespaces)
                    .bind(number(take.each))
                    .bind(number(take.most))
                    .bind(&take.turn.as_bytes()[..])
                    .bind(millis(take.lasts))
                    .bind(&delays)
                    .fetch_all(&mut lent.connection)
                    .await
            );
            let mut took = Took::default();
            for row in back(lent, found)? {
                if row.try_get::<bool, _>("is_ours")? {
                    took.rows.push(taken(&row, take.turn)?);
                } else {
                    let parked: Option<&str> = row.try_get("parked")?;
                    took.lapsed.push((row.try_get("namespace")?, parked.and_then(Parked::parse)));
                }
            }
            Ok(took)
        }))
    }

    fn renew<'t>(&'t self, runs: &'t [Place], lasts: Duration) -> TableFuture<'t, ()> {
        Box::pin(bounded(CHANGE, async move {
            let seqs: Vec<i64> = runs.iter().map(|run| run.seq).collect();
            let mut lent = self.lend(&self.ender).await?;
            let query =
                query(&self.sql.renew).bind(seqs).bind(turns(runs.iter())).bind(millis(lasts));
            let done = query.execute(&mut lent.connection).await;
            back(lent, done).map(drop)
        }))
    }

    fn sweep(&self) -> TableFuture<'_, Vec<Swept>> {
        Box::pin(bounded(INSPECT, async {
            let mut lent = self.lend(&self.operator).await?;
            let rows = repeated!(query(&self.sql.sweep).fetch_all(&mut lent.connection).await);
            let swept = |row: &PgRow| {
                let parked: Option<&str> = row.try_get(2)?;
                Ok(Swept {
                    service: row.try_get(0)?,
                    namespace: row.try_get(1)?,
                    parked: parked.and_then(Parked::parse),
                    rows: row.try_get(3)?,
                })
            };
            back(lent, rows)?.iter().map(swept).collect()
        }))
    }

    fn count(&self) -> TableFuture<'_, Vec<Count>> {
        Box::pin(bounded(INSPECT, async {
            let mut lent = self.lend(&self.operator).await?;
            let rows = query(&self.sql.count).fetch_all(&mut lent.connection).await;
            back(lent, rows)?.iter().filter_map(|row| counted(row).transpose()).collect()
        }))
    }

    fn list<'t>(
        &'t self,
        of: &'t Selection,
        after: i64,
        most: usize,
    ) -> TableFuture<'t, Vec<ShownRow>> {
        Box::pin(bounded(INSPECT, async move {
            let start = format!("SELECT {SHOWN} FROM {} AS r WHERE r.seq > $7 AND", self.sql.name);
            let sql = selected(&start, " ORDER BY r.seq LIMIT $8");
            let mut lent = self.lend(&self.operator).await?;
            let query = select(&sql, of).bind(after).bind(number(most));
            let rows = query.fetch_all(&mut lent.connection).await;
            back(lent, rows)?.iter().map(shown).collect()
        }))
    }

    fn show(&self, seq: i64) -> TableFuture<'_, Option<WholeRow>> {
        Box::pin(bounded(INSPECT, async move {
            let sql =
                format!("SELECT {SHOWN}, headers, body FROM {} AS r WHERE seq = $1", self.sql.name);
            let mut lent = self.lend(&self.operator).await?;
            let row = query(&sql).bind(seq).fetch_optional(&mut lent.connection).await;
            let read =
                |row: PgRow| Ok((shown(&row)?, row.try_get("headers")?, row.try_get("body")?));
            back(lent, row)?.map(read).transpose()
        }))
    }

    fn retry<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        let start = format!(
            "UPDATE {} AS r SET due = clock_timestamp(), parked = NULL, attempts = 0, deaths = 0, misrouted = 0, \
             version = version + 1 WHERE turn IS NULL AND parked IS DISTINCT FROM 'expired' \
             AND received > clock_timestamp() - interval '14 days' AND",
            self.sql.name
        );
        self.execute(selected(&start, ""), of)
    }

    fn delete<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        self.execute(selected(&format!("DELETE FROM {} AS r WHERE", self.sql.name), ""), of)
    }
}

fn query(sql: &str) -> Query<'_, Postgres, PgArguments> {
    sqlx::query(AssertSqlSafe(sql.to_owned()))
}

/// The columns of [`shown`]. A time that is not whole milliseconds is rounded up, so that
/// `received_until` selects its row.
const SHOWN: &str = "seq, service, namespace, keys, event_type, ceil(extract(epoch FROM received) * 1000)::int8 AS received, \
     ceil(extract(epoch FROM due) * 1000)::int8 AS due, turn IS NOT NULL AS is_running, parked, attempts::int8, \
     deaths::int8, answered, method, target, verified, last, octet_length(body)::int8 AS body_bytes";

/// Binds the parameters of a selection.
fn select<'q>(sql: &'q str, of: &'q Selection) -> Query<'q, Postgres, PgArguments> {
    let until = of
        .received_until
        .map(|at| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    query(sql)
        .bind(of.seq)
        .bind(of.service.as_deref())
        .bind(of.namespace.as_deref())
        .bind(of.id.as_deref())
        .bind(of.parked_text())
        .bind(until)
}

impl Statements {
    fn new(table: &str) -> Self {
        let name = table.split('.').map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(".");
        let with = |text: &str, durability: &str| {
            text.replace("{table}", &name)
                .replace("{durability}", durability)
                .replace("{format}", &FORMAT.to_string())
        };
        let change = |durability| with(include_str!("sql/change.sql"), durability);
        Self {
            store: with(include_str!("sql/store.sql"), DURABLE),
            delete: with(include_str!("sql/delete.sql"), NOT_DURABLE),
            change: [change(NOT_DURABLE), change(DURABLE)],
            look: with("SELECT seq, version, turn FROM {table} WHERE seq = ANY ($1)", ""),
            take: with(include_str!("sql/take.sql"), NOT_DURABLE),
            renew: with(include_str!("sql/renew.sql"), NOT_DURABLE),
            sweep: with(include_str!("sql/sweep.sql"), ""),
            count: with(include_str!("sql/count.sql"), ""),
            index: table.rsplit('.').next().unwrap_or(table).to_owned(),
            name,
        }
    }
}

/// Returns a statement for the rows of a [`Selection`].
fn selected(start: &str, end: &str) -> String {
    let rule = "($1::int8 IS NULL OR r.seq = $1) AND ($2::text IS NULL OR r.service = $2) \
         AND ($3::text IS NULL OR r.namespace = $3) \
         AND ($4::text IS NULL OR position(E'\\t' || $4 || E'\\n' IN r.keys) > 0) \
         AND ($5::text IS NULL OR r.parked = $5 OR ($5 = 'any' AND r.parked IS NOT NULL)) \
         AND ($6::float8 IS NULL OR r.received <= to_timestamp($6))";
    format!("{start} {rule}{end}")
}
