//! [`Inbox`]: its settings, and its methods for users and operators.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower_dedup::DedupLayer;
use tower_service::Service;

use crate::around::{Around, Releases};
use crate::core::{Core, MakeTable};
use crate::inspect::{Count, Selection, ShownRequest, ShownRow};
use crate::run::Loop;
use crate::settings::{InboxError, Settings};
use crate::table::Table;

/// Stores deliveries before they are handled, and delivers them again until their events have
/// ended.
///
/// | setting | default |
/// |---|---|
/// | [`answer_within`](Self::answer_within) | 5 s |
/// | [`delays`](Self::delays) | 5 s, 30 s, 2 min, 10 min, 30 min, 1 h, 2 h, 4 h, 8 h, 8 h, each ± 20 %: a day |
/// | [`slots`](Self::slots) | 16 |
/// | [`turn`](Self::turn) | 60 s |
/// | [`later`](Self::later) | off |
/// | [`max_waiting`](Self::max_waiting) | 1,000,000 rows, and 4 GiB of requests |
/// | [`table`](Self::table) | `webhook_inbox` |
///
/// # Clone
///
/// A clone is a handle to the same inbox. A setter makes a separate inbox: set it up before you use
/// or clone it.
#[derive(Clone)]
pub struct Inbox {
    make: Arc<MakeTable>,
    service: String,
    settings: Settings,
    core: Arc<OnceLock<Arc<Core>>>,
}

/// The setting up.
impl Inbox {
    /// Makes the inbox of a service, with its table in Postgres. The inbox opens up to three
    /// connections of its own when it needs them, by the connect options of the pool.
    ///
    /// `service` names the application: it does not touch the rows of another service. All
    /// deployments of an application share its name. Rename it only while the table has no row of
    /// it.
    #[cfg(feature = "postgres")]
    #[must_use]
    pub fn postgres(pool: sqlx::PgPool, service: &str) -> Self {
        Self::new(service, move |service, settings| {
            Arc::new(crate::postgres::PostgresTable::new(pool.clone(), service, settings))
        })
    }

    /// Makes the inbox of a service, with its table in an SQLite file of its own, which is created.
    /// Do not use the file of the keys: each would wait for the other's write lock. Otherwise, see
    /// [`postgres`](Self::postgres).
    #[cfg(feature = "sqlite")]
    #[must_use]
    pub fn sqlite(file: impl AsRef<std::path::Path>, service: &str) -> Self {
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(file);
        Self::new(service, move |service, settings| {
            Arc::new(crate::sqlite::SqliteTable::new(options.clone(), service, settings))
        })
    }

    fn new<T>(service: &str, make: T) -> Self
    where
        T: Fn(&str, &Settings) -> Arc<dyn Table> + Send + Sync + 'static,
    {
        let (make, service, settings) = (Arc::new(make), service.to_owned(), Settings::default());
        Self { make, service, settings, core: Arc::default() }
    }

    fn set(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        set(&mut self.settings);
        self.core = Arc::default();
        self
    }

    /// Sets after which time a sender is answered 200, *stored*, while its handler still runs. The
    /// default is 5 s; Slack waits for 3 s.
    ///
    /// Zero is invalid.
    #[must_use]
    pub fn answer_within(self, time: Duration) -> Self {
        self.set(|it| it.answer_within = time)
    }

    /// Sets how long a row waits after each failure of its handler, ± 20 %. After a failure beyond
    /// the last delay, the row is parked.
    ///
    /// An empty list is invalid.
    #[must_use]
    pub fn delays(self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.set(|it| it.delays = delays.into_iter().collect())
    }

    /// Sets how many rows one process delivers again at the same time.
    ///
    /// 0 is invalid, and so is more than 10,000.
    #[must_use]
    pub fn slots(self, rows: usize) -> Self {
        self.set(|it| it.slots = rows)
    }

    /// Sets how long a row belongs to a process that does not renew it. After the death of its
    /// process, a row waits for this time. A process renews the rows that it runs after a third of
    /// this time.
    ///
    /// Less than 1 s is invalid, and so is more than 1 h.
    #[must_use]
    pub fn turn(self, time: Duration) -> Self {
        self.set(|it| it.turn = time)
    }

    /// Only stores deliveries: every event goes through the loop. Use it in tests, which then show
    /// what a redelivery lacks: layers around the application, extensions, a signature that the
    /// handler itself checks.
    #[must_use]
    pub fn later(self) -> Self {
        self.set(|it| it.later = true)
    }

    /// Sets about how many rows may wait in the table. Beyond that, or 4 GiB of requests including
    /// parked ones, deliveries go to the layer without a row, as without an inbox.
    ///
    /// 0 is invalid.
    #[must_use]
    pub fn max_waiting(self, rows: u64) -> Self {
        self.set(|it| it.max_waiting = rows)
    }

    /// Sets the name of the table: `name`, or `schema.name` on Postgres. On SQLite, a point is part
    /// of the name. The default is `webhook_inbox`.
    ///
    /// A name with other characters than letters, digits and `_`, or with more than 48 characters,
    /// is invalid.
    #[must_use]
    pub fn table(self, name: &str) -> Self {
        self.set(|it| name.clone_into(&mut it.table))
    }

    /// Returns the inbox, if it is valid.
    ///
    /// # Errors
    ///
    /// [`InboxError::Setting`] for the first setting with an invalid value.
    pub fn checked(self) -> Result<Self, InboxError> {
        self.core().check()?;
        Ok(self)
    }
}

/// The use.
impl Inbox {
    /// Creates the table, if it does not exist. Any number of processes may do so at the same time.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn migrate(&self) -> Result<(), InboxError> {
        Ok(self.checked_table()?.migrate().await?)
    }

    /// Makes the layer of a route: this inbox around a [`DedupLayer`] with a ledger that releases
    /// failed events.
    ///
    /// The layer's keys are remembered for at least 15 days more than its sender delivers an event
    /// again (22 days without a preset), so that no row outlives its key. Everything else that
    /// completes keys of its namespace needs this [retention](DedupLayer::retention), too.
    pub fn around<L: Releases, B>(&self, dedup: DedupLayer<L, B>) -> Around<L, B> {
        Around::new(Arc::clone(self.core()), dedup)
    }

    /// Delivers the rows of this service again, until `stop` resolves: rows whose handler failed or
    /// whose process died, and rows that were only stored.
    ///
    /// `app` is the whole application, so that a redelivery finds its route and its path
    /// parameters. It needs no layers around it, such as those for tracing. **Whoever can write to
    /// the table can call each of its routes.**
    ///
    /// Each process of the service runs this loop. After `stop`, the loop waits for the rows that
    /// it runs.
    ///
    /// # Panics
    ///
    /// If a setting is invalid.
    pub fn run<S, B, F>(&self, app: S, stop: F) -> impl Future<Output = ()> + Send + use<S, B, F>
    where
        F: Future<Output = ()> + Send,
        S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
        S: Clone + Send + 'static,
        S::Future: Send,
        B: Send + 'static,
    {
        if let Err(error) = self.core().check() {
            panic!("{error}");
        }
        Loop { core: Arc::clone(self.core()), app }.run(stop)
    }

    /// Waits until every delivery of a sender has ended, and its row is written. Stop accepting
    /// connections first. It waits for the handlers, and has no time limit of its own.
    pub async fn drain(&self) {
        if let Some(core) = self.core.get() {
            core.tasks.close();
            core.tasks.wait().await;
            core.ender.flush().await;
        }
    }

    /// Returns what the clones share. The settings may be invalid.
    fn core(&self) -> &Arc<Core> {
        let make = || Core::new(&*self.make, &self.service, self.settings.clone());
        self.core.get_or_init(|| Arc::new(make()))
    }

    fn checked_table(&self) -> Result<&dyn Table, InboxError> {
        let core = self.core();
        core.check()?;
        Ok(&*core.table)
    }
}

/// For operators. The command `tower-dedup inbox` uses these.
impl Inbox {
    /// Counts the rows of every service, by namespace and reason.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn count(&self) -> Result<Vec<Count>, InboxError> {
        Ok(self.checked_table()?.count().await?)
    }

    /// Returns the selected rows after the row of this number, in their order, at most `most` of
    /// them.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn list(
        &self,
        of: &Selection,
        after: i64,
        most: usize,
    ) -> Result<Vec<ShownRow>, InboxError> {
        Ok(self.checked_table()?.list(of, after, most).await?)
    }

    /// Returns one row with its request.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn show(&self, seq: i64) -> Result<Option<(ShownRow, ShownRequest)>, InboxError> {
        Ok(self.checked_table()?.show(seq).await?)
    }

    /// Makes selected rows due now, with all attempts, and returns how many. A row that runs stays
    /// as it is. So does a row that is parked as expired, because its key may be forgotten, and its
    /// event could run twice.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn retry(&self, of: &Selection) -> Result<u64, InboxError> {
        Ok(self.checked_table()?.retry(of).await?)
    }

    /// Deletes selected rows, and returns how many. Their events are not delivered again.
    ///
    /// # Errors
    ///
    /// An invalid setting, or the database's error.
    pub async fn delete(&self, of: &Selection) -> Result<u64, InboxError> {
        Ok(self.checked_table()?.delete(of).await?)
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("service", &self.service)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
