//! The table in Postgres.
//!
//! 1. An answer *stored* leaves only after a COMMIT that is as durable as
//!    `synchronous_commit = on`, whatever the role or the database is set to. Other statements need
//!    not be durable: what a crash undoes is done again, as a duplicate.
//! 2. Insertions lock rows in the order of their keys, and every other statement skips locked rows.
//! 3. Connections are opened by the connect options of the user's pool, but are not part of the
//!    pool. Each call has a time limit. A call that exceeds it, fails, or is dropped, drops its
//!    connection, so no caller waits for a ping.
//! 4. The server ends the session of such a call, whatever it waits for, because its client has
//!    gone.
//! 5. `clock_timestamp()` is the only clock.

use std::collections::HashSet;
use std::time::SystemTime;

use sqlx::postgres::{PgArguments, PgConnection, PgPool, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection, Postgres, Row};
use tower_dedup::adapter::contract::Token;

use crate::inspect::{Count, Selection, ShownRequest, ShownRow};
use crate::line::{Found, Line, Lines};
use crate::row::{Change, Counts, FORMAT, Fate, NewRow, Place, millis, number};
use crate::settings::Settings;
use crate::table::{Changed, Stored, Swept, Table, TableError, TableFuture, Took};

/// How often a statement is repeated after a conflict.
const REPEATS: usize = 5;

const DURABLE: &str = "CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') \
     THEN set_config('synchronous_commit', 'on', true) END";
const NOT_DURABLE: &str = "set_config('synchronous_commit', 'off', true)";
/// `tower-dedup` sets the same for its own sessions.
const CHECK_CLIENT: &str = "SELECT set_config('client_connection_check_interval', '1s', false) \
     WHERE current_setting('client_connection_check_interval') = '0'";

/// The rows of runs that still have their turns.
const LOOK: &str = "SELECT r.seq FROM unnest($1::int8[], $2::bytea[]) AS a(seq, turn) \
     JOIN {table} AS r ON r.seq = a.seq AND r.turn = a.turn";

pub(crate) struct PostgresTable {
    pool: PgPool,
    service: String,
    /// How long a turn lasts, and the delays, in milliseconds.
    turn: i64,
    delays: Vec<i64>,
    /// The name as the statements have it.
    name: String,
    store: String,
    delete: String,
    /// Not durable, and durable.
    change: [String; 2],
    look: String,
    take: String,
    renew: String,
    lines: Lines<PgConnection>,
}

/// Returns `true` after a serialization failure or a deadlock.
fn is_conflict(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code == "40001" || code == "40P01")
}

impl PostgresTable {
    pub(crate) fn new(pool: PgPool, service: &str, settings: &Settings) -> Self {
        let parts = settings.table.split('.').map(|part| format!("\"{part}\""));
        let name = parts.collect::<Vec<_>>().join(".");
        let with = |sql: &str, durability| text(&name, sql).replace("{durability}", durability);
        let change = include_str!("sql/change.sql");
        Self {
            pool,
            service: service.to_owned(),
            turn: millis(settings.turn),
            delays: settings.delays.iter().map(|delay| millis(*delay)).collect(),
            store: with(include_str!("sql/store.sql"), DURABLE),
            delete: with(include_str!("sql/delete.sql"), NOT_DURABLE),
            change: [NOT_DURABLE, DURABLE].map(|durability| with(change, durability)),
            look: with(LOOK, ""),
            take: with(include_str!("sql/take.sql"), NOT_DURABLE),
            renew: with(include_str!("sql/renew.sql"), NOT_DURABLE),
            name,
            lines: Lines::new(),
        }
    }

    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        if self.pool.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        let mut connection = PgConnection::connect_with(&self.pool.connect_options()).await?;
        query(CHECK_CLIENT).execute(&mut connection).await?;
        Ok(connection)
    }

    /// Runs a call, and repeats it after a conflict.
    async fn call<T>(
        &self,
        line: &Line<PgConnection>,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error> + Clone,
    ) -> Result<T, TableError> {
        let repeated = async move |connection: &mut PgConnection| {
            for _ in 0..REPEATS {
                match call.clone()(connection).await {
                    Err(error) if is_conflict(&error) => {}
                    done => return done,
                }
            }
            call(connection).await
        };
        line.call(self.connect(), repeated).await
    }

    async fn store_once(
        &self,
        connection: &mut PgConnection,
        rows: &[&NewRow],
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let texts = |of: fn(&NewRow) -> &str| rows.iter().map(|row| of(row)).collect::<Vec<&str>>();
        let bytes =
            |of: fn(&NewRow) -> &[u8]| rows.iter().map(|row| of(row)).collect::<Vec<&[u8]>>();
        let optional =
            |of: fn(&NewRow) -> Option<&str>| rows.iter().map(|row| of(row)).collect::<Vec<_>>();
        let turn = |row: &&NewRow| row.turn.map(|it| it.as_bytes().to_vec());
        query(&self.store)
            .bind(&self.service)
            .bind(self.turn)
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

    /// Executes changes, and returns the rows that are changed.
    async fn change_once(
        &self,
        connection: &mut PgConnection,
        changes: &[&Change],
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let numbers = |of: fn(&Change) -> i64| changes.iter().map(|it| of(it)).collect::<Vec<_>>();
        let flags = |of: fn(&Change) -> bool| changes.iter().map(|it| of(it)).collect::<Vec<_>>();
        let is_durable = changes.iter().any(|change| change.answered);
        query(&self.change[usize::from(is_durable)])
            .bind(numbers(|it| it.at.seq))
            .bind(turns(changes.iter().map(|it| &it.at)))
            .bind(numbers(|it| it.at.version))
            .bind(flags(|it| it.fate == Fate::Delete))
            .bind(flags(|it| it.fate == Fate::Keep))
            .bind(numbers(|it| it.due_after().unwrap_or(-1)))
            .bind(changes.iter().map(|it| it.parked()).collect::<Vec<_>>())
            .bind(numbers(|it| it.counts(Counts::Attempt)))
            .bind(numbers(|it| it.counts(Counts::Misrouted)))
            .bind(flags(|it| it.answered))
            .bind(changes.iter().map(|it| it.last.as_deref()).collect::<Vec<_>>())
            .fetch_all(connection)
            .await
    }

    /// Executes the statement of an operator on selected rows.
    fn execute<'t>(&'t self, sql: String, of: &'t Selection) -> TableFuture<'t, u64> {
        let call = async move |connection: &mut PgConnection| {
            Ok(select(&sql, of).execute(connection).await?.rows_affected())
        };
        Box::pin(self.call(&self.lines.operator, call))
    }
}

/// Inserts the name of the table into a statement.
fn text(name: &str, sql: &str) -> String {
    sql.replace("{table}", name).replace("{format}", &FORMAT.to_string())
}

fn query(sql: &str) -> Query<'_, Postgres, PgArguments> {
    sqlx::query(AssertSqlSafe(sql.to_owned()))
}

fn turns<'p>(places: impl Iterator<Item = &'p Place>) -> Vec<Vec<u8>> {
    places.map(|place| place.turn.as_bytes().to_vec()).collect()
}

fn seqs_of(rows: &[PgRow]) -> Result<HashSet<i64>, sqlx::Error> {
    rows.iter().map(|row| row.try_get(0)).collect()
}

impl Table for PostgresTable {
    fn migrate(&self) -> TableFuture<'_, ()> {
        let index = self.name.rsplit('.').next().unwrap_or_default().trim_matches('"');
        let sql = text(&self.name, include_str!("sql/postgres.sql")).replace("{index}", index);
        let call = async move |connection: &mut PgConnection| {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
        };
        Box::pin(self.call(&self.lines.operator, call))
    }

    fn store<'t>(&'t self, rows: &'t [NewRow]) -> TableFuture<'t, Vec<Stored>> {
        let call = async move |connection: &mut PgConnection| {
            let mut sorted: Vec<&NewRow> = rows.iter().collect();
            sorted.sort_unstable_by_key(|row| row.key);
            let found = self.store_once(connection, &sorted).await?;
            let reply = |row: &NewRow| {
                let it = found.iter().find(|it| it.try_get(0).ok() == Some(&row.key[..]))?;
                let is_new = it.try_get::<i64, _>(2).ok()? == 1;
                Some(if is_new { Stored::New(it.try_get(1).ok()?) } else { Stored::Known })
            };
            let replies = rows.iter().map(reply).collect::<Option<Vec<_>>>();
            replies.ok_or_else(|| sqlx::Error::Protocol("a row has no reply".into()))
        };
        Box::pin(self.call(&self.lines.writer, call))
    }

    fn change<'t>(&'t self, changes: &'t [Change]) -> TableFuture<'t, Vec<Changed>> {
        let call = async move |connection: &mut PgConnection| {
            let mut done = HashSet::new();
            let deletes = changes.iter().filter(|it| it.fate == Fate::Delete).map(|it| it.at);
            let (seqs, versions): (Vec<_>, Vec<_>) = deletes.map(|at| (at.seq, at.version)).unzip();
            if !seqs.is_empty() {
                let query = query(&self.delete).bind(seqs).bind(versions);
                done = seqs_of(&query.fetch_all(&mut *connection).await?)?;
            }
            let left: Vec<&Change> =
                changes.iter().filter(|it| !done.contains(&it.at.seq)).collect();
            if !left.is_empty() {
                done.extend(seqs_of(&self.change_once(connection, &left).await?)?);
            }
            let left = changes.iter().map(|it| &it.at).filter(|at| !done.contains(&at.seq));
            let seqs: Vec<i64> = left.clone().map(|at| at.seq).collect();
            let mut locked = HashSet::new();
            if !seqs.is_empty() {
                let query = query(&self.look).bind(seqs).bind(turns(left));
                locked = seqs_of(&query.fetch_all(connection).await?)?;
            }
            let reply = |it: &Change| match it.at.seq {
                seq if done.contains(&seq) => Changed::Done,
                seq if locked.contains(&seq) => Changed::Locked,
                _ => Changed::Lost,
            };
            Ok(changes.iter().map(reply).collect())
        };
        Box::pin(self.call(&self.lines.ender, call))
    }

    fn take<'t>(&'t self, namespaces: &'t [String], most: usize) -> TableFuture<'t, Took> {
        let call = async move |connection: &mut PgConnection| {
            let turn = Token::random();
            let query = query(&self.take)
                .bind(&self.service)
                .bind(namespaces)
                .bind(number(most.div_ceil(namespaces.len())))
                .bind(number(most))
                .bind(&turn.as_bytes()[..])
                .bind(self.turn)
                .bind(&self.delays);
            let mut took = Took::default();
            for row in query.fetch_all(connection).await? {
                Found(&row).took(turn, &mut took)?;
            }
            Ok(took)
        };
        Box::pin(self.call(&self.lines.ender, call))
    }

    fn renew<'t>(&'t self, runs: &'t [Place]) -> TableFuture<'t, ()> {
        let call = async move |connection: &mut PgConnection| {
            let seqs: Vec<i64> = runs.iter().map(|run| run.seq).collect();
            let query = query(&self.renew).bind(seqs).bind(turns(runs.iter())).bind(self.turn);
            query.execute(connection).await.map(drop)
        };
        Box::pin(self.call(&self.lines.ender, call))
    }

    fn sweep(&self) -> TableFuture<'_, Vec<Swept>> {
        let sql = text(&self.name, include_str!("sql/sweep.sql"));
        let call = async move |connection: &mut PgConnection| {
            let rows = query(&sql).fetch_all(connection).await?;
            rows.iter().map(|row| Found(row).swept()).collect()
        };
        Box::pin(self.call(&self.lines.operator, call))
    }

    fn count(&self) -> TableFuture<'_, Vec<Count>> {
        let sql = text(&self.name, include_str!("sql/count.sql"));
        let call = async move |connection: &mut PgConnection| {
            let rows = query(&sql).fetch_all(connection).await?;
            rows.iter().filter_map(|row| Found(row).counted().transpose()).collect()
        };
        Box::pin(self.call(&self.lines.operator, call))
    }

    fn list<'t>(
        &'t self,
        of: &'t Selection,
        after: i64,
        most: usize,
    ) -> TableFuture<'t, Vec<ShownRow>> {
        let start = format!("SELECT {SHOWN} FROM {} AS r WHERE r.seq > $7 AND", self.name);
        let sql = format!("{start} {SELECTED} ORDER BY r.seq LIMIT $8");
        let call = async move |connection: &mut PgConnection| {
            let query = select(&sql, of).bind(after).bind(number(most));
            let rows = query.fetch_all(connection).await?;
            rows.iter().map(|row| Found(row).shown()).collect()
        };
        Box::pin(self.call(&self.lines.operator, call))
    }

    fn show(&self, seq: i64) -> TableFuture<'_, Option<(ShownRow, ShownRequest)>> {
        let sql = format!("SELECT {SHOWN}, headers, body FROM {} AS r WHERE seq = $1", self.name);
        let call = async move |connection: &mut PgConnection| {
            let row = query(&sql).bind(seq).fetch_optional(connection).await?;
            row.map(|row| Found(&row).whole()).transpose()
        };
        Box::pin(self.call(&self.lines.operator, call))
    }

    fn retry<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        let sql = format!(
            "UPDATE {} AS r SET due = clock_timestamp(), parked = NULL, attempts = 0, deaths = 0, misrouted = 0, \
             version = version + 1 WHERE turn IS NULL AND parked IS DISTINCT FROM 'expired' \
             AND received > clock_timestamp() - interval '14 days' AND {SELECTED}",
            self.name
        );
        self.execute(sql, of)
    }

    fn delete<'t>(&'t self, of: &'t Selection) -> TableFuture<'t, u64> {
        self.execute(format!("DELETE FROM {} AS r WHERE {SELECTED}", self.name), of)
    }
}

/// The columns of [`Found::shown`]. A time that is not whole milliseconds is rounded up, so that
/// `received_until` selects its row.
const SHOWN: &str = "seq, service, namespace, keys, event_type, ceil(extract(epoch FROM received) * 1000)::int8 AS received, \
     ceil(extract(epoch FROM due) * 1000)::int8 AS due, turn IS NOT NULL AS is_running, parked, attempts::int8, \
     deaths::int8, answered, method, target, verified, last, octet_length(body)::int8 AS body_bytes";

/// The rows of a [`Selection`].
const SELECTED: &str = "($1::int8 IS NULL OR r.seq = $1) AND ($2::text IS NULL OR r.service = $2) \
     AND ($3::text IS NULL OR r.namespace = $3) \
     AND ($4::text IS NULL OR position(E'\\t' || $4 || E'\\n' IN r.keys) > 0) \
     AND ($5::text IS NULL OR r.parked = $5 OR ($5 = 'any' AND r.parked IS NOT NULL)) \
     AND ($6::float8 IS NULL OR r.received <= to_timestamp($6))";

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
