//! [`Link`]: the connection to one server, or to the master that Sentinel names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Client, Cmd, Pipeline, RedisError, Value};

use super::super::errors::code;
use super::super::options::RedisOptions;
use super::super::script::{Form, ScriptCall};
use super::super::url::Address;
use super::failure::{
    Failure, is_of_another_master, is_of_the_connection, is_unknown_script, is_unreadable_script,
};
use super::fitness::ServerInfo;
use super::sentinel::Sentinel;
use super::single::Single;
use super::target::{connect, longest_step, warn_without_info};
use crate::error::ConfigError;
use crate::observe;

/// How long the verdict about an unfit server holds. Then a call asks the server again.
const VERDICT_HOLDS: Duration = Duration::from_secs(1);

/// Where a link leads.
#[derive(Clone)]
pub(super) enum Target {
    Server { client: Arc<Client>, address: Address, in_cluster: bool },
    Sentinel(Arc<Sentinel>),
}

/// The connection to a target. It is opened when it is first needed, and anew after it has failed.
pub(super) struct Link {
    target: Target,
    response_timeout: Duration,
    connect_timeout: Duration,
    evictable: bool,
    live: Arc<Single<Live>>,
    replicas_seen: ReplicasSeen,
}

/// An open connection.
pub(super) struct Live {
    connection: MultiplexedConnection,
    address: Address,
    /// For the connection of a lane: the main connection at whose side it was opened.
    main: Weak<Self>,
    knows_flags: AtomicBool,
    fitness: Mutex<Fitness>,
    opened: Instant,
    /// When the first command was sent whose caller went away, if no reply has come since: in
    /// milliseconds after `opened`, plus 1. 0 for none.
    abandoned_at: AtomicU64,
}

#[derive(Default)]
struct Fitness {
    fault: Option<ConfigError>,
    /// `None` for a replica of a cluster, which is not judged before it is a primary.
    asked_at: Option<Instant>,
}

impl Link {
    /// `extra` is added to the response timeout.
    pub(super) fn new(target: Target, options: &RedisOptions, extra: Duration) -> Arc<Self> {
        Arc::new(Self {
            target,
            response_timeout: options.response_timeout + extra,
            connect_timeout: options.connect_timeout,
            evictable: options.evictable,
            live: Single::new(longest_step(options) + extra),
            replicas_seen: ReplicasSeen::default(),
        })
    }

    /// Returns the address of the server. That of a master is known after the first connection.
    pub(super) fn address(&self) -> Option<Address> {
        match &self.target {
            Target::Server { address, .. } => Some(address.clone()),
            Target::Sentinel(_) => self.live.current().map(|live| live.address.clone()),
        }
    }

    /// Returns the open connection. Opens it, if there is none.
    pub(super) async fn live(self: &Arc<Self>) -> Result<Arc<Live>, Failure> {
        if let Some(live) = self.live.current()
            && live.is_silent(self.response_timeout)
        {
            self.live.forget(&live);
        }
        let link = Arc::clone(self);
        self.live.get(move || async move { link.open(None).await }).await
    }

    /// Returns the open connection of a lane. It leads to the server of `main`, the main connection, and
    /// was opened after `main`: the address of a server may lead to another one by now.
    pub(super) async fn live_beside(
        self: &Arc<Self>,
        main: &Arc<Live>,
    ) -> Result<Arc<Live>, Failure> {
        if let Some(live) = self.live.current()
            && (live.is_silent(self.response_timeout) || !live.is_beside(main))
        {
            self.live.forget(&live);
        }
        let (link, beside) = (Arc::clone(self), (main.address.clone(), Arc::downgrade(main)));
        let live = self.live.get(move || async move { link.open(Some(beside)).await }).await?;
        if live.is_beside(main) {
            return Ok(live);
        }
        // An earlier call had begun to open it.
        self.live.forget(&live);
        Err(Failure::Interrupted)
    }

    /// Asks Sentinel whether this server is the master still, because its replicas are missing or it takes
    /// no connection.
    pub(super) async fn doubt(self: &Arc<Self>) {
        if matches!(self.target, Target::Sentinel(_)) {
            // A server that cannot be asked is dropped too. The next call finds the next one.
            let _ = self.check().await;
        }
    }

    pub(super) fn close(&self) {
        self.live.close();
    }

    /// Runs a script.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        asking: bool,
    ) -> Result<Value, Failure> {
        let live = self.fit().await?;
        let form = live.form(false);
        let reply = match self.command(&live, &call.by_hash(form), asking).await {
            Err(Failure::Redis(error)) if is_unknown_script(&error) => {
                self.command(&live, &call.by_text(form), asking).await
            }
            reply => reply,
        };
        match reply {
            Err(Failure::Redis(error)) if form.knows_flags && is_unreadable_script(&error) => {
                live.forgets_flags();
                self.command(&live, &call.by_text(live.form(false)), asking).await
            }
            reply => reply,
        }
    }

    /// Sends a command.
    pub(super) async fn send(
        self: &Arc<Self>,
        command: &Cmd,
        asking: bool,
    ) -> Result<Value, Failure> {
        let live = self.live().await?;
        self.command(&live, command, asking).await
    }

    async fn command(
        &self,
        live: &Arc<Live>,
        command: &Cmd,
        asking: bool,
    ) -> Result<Value, Failure> {
        if asking {
            let mut pipeline = Pipeline::with_capacity(2);
            pipeline.cmd("ASKING").add_command(command.clone());
            let replies = self.pipeline(live, &pipeline).await?;
            // Both are sent at once: `ASKING` holds for the next command of the connection.
            let reply = replies.into_iter().nth(1).unwrap_or(Value::Nil);
            return self.checked(live, reply.extract_error());
        }
        let unanswered = Unanswered::of(live);
        let reply = live.connection.clone().send_packed_command(command).await;
        unanswered.end(reply.is_ok());
        // A script's error is a value of its reply.
        self.checked(live, reply.and_then(Value::extract_error))
    }

    /// Sends commands at once. A refusal is a value among the replies.
    pub(super) async fn pipeline(
        &self,
        live: &Arc<Live>,
        pipeline: &Pipeline,
    ) -> Result<Vec<Value>, Failure> {
        let unanswered = Unanswered::of(live);
        let replies =
            live.connection.clone().send_packed_commands(pipeline, 0, pipeline.len()).await;
        unanswered.end(replies.is_ok());
        self.checked(live, replies)
    }

    /// Drops the connection after an error that says that it is of no use any more.
    pub(super) fn checked<T>(
        &self,
        live: &Arc<Live>,
        reply: Result<T, RedisError>,
    ) -> Result<T, Failure> {
        reply.map_err(|error| {
            let is_moved = match &self.target {
                Target::Sentinel(_) => is_of_another_master(&error),
                // The name of the server may lead to another one by now.
                Target::Server { .. } => code(&error) == Some("READONLY"),
            };
            if is_moved || is_of_the_connection(&error) {
                self.live.forget(live);
            }
            Failure::Redis(error)
        })
    }

    /// Returns the connection, if its server may be used.
    pub(super) async fn fit(self: &Arc<Self>) -> Result<Arc<Live>, Failure> {
        let live = self.live().await?;
        let is_old = {
            let fitness = live.fitness();
            fitness
                .asked_at
                .is_none_or(|at| fitness.fault.is_some() && at.elapsed() >= VERDICT_HOLDS)
        };
        if is_old {
            self.ask_fitness(&live).await?;
        }
        match live.fault() {
            None => Ok(live),
            Some(fault) => Err(Failure::Unfit(fault)),
        }
    }

    /// Asks the server again whether it may be used, and Sentinel whether it is the master.
    pub(super) async fn check(self: &Arc<Self>) -> Result<(), Failure> {
        let live = self.live().await?;
        self.ask_fitness(&live).await?;
        if let Target::Sentinel(sentinel) = &self.target
            && let Some(address) = sentinel.master_now().await
            && address != live.address
        {
            // The connection to the old master works for as long as the old master does.
            self.live.forget(&live);
            self.live().await?;
            return Ok(());
        }
        match live.fault() {
            None => Ok(()),
            Some(fault) => Err(Failure::Unfit(fault)),
        }
    }

    async fn ask_fitness(&self, live: &Arc<Live>) -> Result<(), Failure> {
        let asked = ServerInfo::ask(&mut live.connection.clone()).await;
        let info = self.checked(live, asked)?.unwrap_or_default();
        // In a cluster, the address stays that of the replica.
        if !self.in_cluster() && !info.is_master() {
            self.live.forget(live);
        }
        self.note_replicas(&info);
        self.judge(live, &info);
        Ok(())
    }

    fn note_replicas(&self, info: &ServerInfo) {
        if info.replicas() > 0 {
            self.replicas_seen.note();
        }
    }

    /// Remembers the replicas of the server at the other end, or of the one before it.
    pub(super) fn replicas_seen(&self) -> &ReplicasSeen {
        &self.replicas_seen
    }

    /// Returns the number of replicas that take the server's writes now.
    pub(super) async fn replicas(&self, live: &Arc<Live>) -> Result<u32, Failure> {
        let asked = ServerInfo::ask(&mut live.connection.clone()).await;
        Ok(self.checked(live, asked)?.map_or(0, |info| info.replicas()))
    }

    fn in_cluster(&self) -> bool {
        matches!(self.target, Target::Server { in_cluster: true, .. })
    }

    /// Ends by itself, because each of its steps has a timeout.
    async fn open(&self, beside: Option<(Address, Weak<Live>)>) -> Result<Live, Failure> {
        let timeouts = (self.connect_timeout, self.response_timeout);
        let (connection, info, address) = match (&self.target, &beside) {
            (Target::Server { client, address, .. }, _) => {
                let (connection, info) = connect(client, timeouts).await?;
                (connection, info, address.clone())
            }
            (Target::Sentinel(sentinel), Some((address, _))) => {
                let (connection, info) = sentinel.connect_to(address, timeouts).await?;
                (connection, info, address.clone())
            }
            (Target::Sentinel(sentinel), None) => sentinel.connect(timeouts).await?,
        };
        if info.is_none() {
            warn_without_info();
        }
        let info = info.unwrap_or_default();
        self.note_replicas(&info);
        let live = Live {
            connection,
            address,
            main: beside.map(|(_, main)| main).unwrap_or_default(),
            knows_flags: AtomicBool::new(info.knows_flags()),
            fitness: Mutex::default(),
            opened: Instant::now(),
            abandoned_at: AtomicU64::new(0),
        };
        self.judge(&live, &info);
        Ok(live)
    }

    fn judge(&self, live: &Live, info: &ServerInfo) {
        if self.in_cluster() && !info.is_master() {
            *live.fitness() = Fitness::default();
        } else {
            live.judge(info.fault(self.evictable, self.in_cluster()));
        }
    }
}

impl Live {
    pub(super) fn form(&self, force_write: bool) -> Form {
        Form { knows_flags: self.knows_flags.load(Ordering::Relaxed), force_write }
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    fn is_beside(&self, main: &Arc<Self>) -> bool {
        // The pointer is of no other connection, because `Weak` keeps its place.
        Weak::as_ptr(&self.main) == Arc::as_ptr(main)
    }

    pub(super) fn forgets_flags(&self) {
        self.knows_flags.store(false, Ordering::Relaxed);
    }

    pub(super) fn fault(&self) -> Option<ConfigError> {
        self.fitness().fault.clone()
    }

    fn judge(&self, fault: Option<ConfigError>) {
        let mut fitness = self.fitness();
        if let Some(fault) = &fault
            && fitness.fault.as_ref() != Some(fault)
        {
            observe::redis_is_unfit(&self.address, fault);
        }
        *fitness = Fitness { fault, asked_at: Some(Instant::now()) };
    }

    fn fitness(&self) -> MutexGuard<'_, Fitness> {
        self.fitness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if callers have gone without a reply for as long as a reply may take.
    fn is_silent(&self, response_timeout: Duration) -> bool {
        let since = self.abandoned_at.load(Ordering::Relaxed);
        since > 0 && Duration::from_millis(since - 1) + response_timeout <= self.opened.elapsed()
    }
}

/// When a primary last had a replica, or the primary before it.
#[derive(Default)]
pub(super) struct ReplicasSeen(Mutex<Option<Instant>>);

impl ReplicasSeen {
    /// How long a primary that has lost its replicas is expected to get them back. A primary without
    /// replicas may be an old one: one of its replicas may have taken its place.
    const MISSED: Duration = Duration::from_secs(600);

    pub(super) fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Returns for how many replicas a release waits, if the primary has `count` of them now.
    pub(super) fn wanted(&self, count: u32) -> u32 {
        if count > 0 {
            self.note();
        }
        let seen = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|seen| seen.elapsed() < Self::MISSED).into()
    }
}

/// A command that has no reply yet.
struct Unanswered<'l> {
    live: &'l Live,
    since: Instant,
}

impl<'l> Unanswered<'l> {
    fn of(live: &'l Live) -> Self {
        Self { live, since: Instant::now() }
    }

    fn end(self, replied: bool) {
        if replied && self.live.abandoned_at.load(Ordering::Relaxed) != 0 {
            self.live.abandoned_at.store(0, Ordering::Relaxed);
        }
        std::mem::forget(self);
    }
}

impl Drop for Unanswered<'_> {
    /// The caller has gone, perhaps because its own bound is shorter than the response timeout.
    fn drop(&mut self) {
        let sent = self.since.saturating_duration_since(self.live.opened).as_millis();
        let sent = u64::try_from(sent).unwrap_or(u64::MAX - 1) + 1;
        // The first one counts.
        let _ =
            self.live.abandoned_at.compare_exchange(0, sent, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::fake::{Fake, bulk};
    use super::super::target::client;
    use super::*;
    use crate::adapter::redis::script::RELEASE;

    fn link(server: &Fake, in_cluster: bool) -> Arc<Link> {
        let (address, options) = (server.address(), RedisOptions::new());
        let client = client(&address, false, Default::default(), &options).unwrap().into();
        Link::new(Target::Server { client, address, in_cluster }, &options, Duration::ZERO)
    }

    fn release() -> ScriptCall {
        ScriptCall::new(&RELEASE, b"dedup:test:a".to_vec())
    }

    #[tokio::test]
    async fn connection_to_a_server_that_became_a_replica_is_dropped() {
        let is_replica = Arc::new(AtomicBool::new(false));
        let is = Arc::clone(&is_replica);
        let server = Fake::start(move |words| match words[0].as_str() {
            "INFO" if is.load(Ordering::Relaxed) => bulk("role:slave\r\n"),
            "INFO" => bulk("role:master\r\n"),
            // Of a server before 7.0.
            _ => "-ERR Error running script (call to f_d3c2): @user_script:1: @user_script: 1: \
                -READONLY You can't write against a read only replica.\r\n"
                .to_owned(),
        })
        .await;
        let link = link(&server, false);
        link.run(&release(), false).await.unwrap_err();
        assert!(link.live.current().is_none());
        tokio::time::sleep(Duration::from_millis(30)).await;
        link.live().await.unwrap();
        assert_eq!(server.connections(), 2);
        link.check().await.unwrap();
        assert!(link.live.current().is_some());
        is_replica.store(true, Ordering::Relaxed);
        let _ = link.check().await;
        assert!(link.live.current().is_none());
    }

    #[tokio::test]
    async fn replica_of_a_cluster_is_judged_once_it_is_a_primary() {
        let role = Arc::new(Mutex::new("slave"));
        let its_role = Arc::clone(&role);
        let server = Fake::start(move |words| match words[0].as_str() {
            "INFO" => {
                let role = its_role.lock().unwrap();
                bulk(&format!("role:{role}\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\n"))
            }
            _ => ":7\r\n".to_owned(),
        })
        .await;
        let link = link(&server, true);
        link.run(&release(), false).await.unwrap();
        assert_eq!(link.live().await.unwrap().fault(), None);
        *role.lock().unwrap() = "master";
        let failure = link.run(&release(), false).await.unwrap_err();
        assert!(matches!(failure, Failure::Unfit(ConfigError::RedisEvictsKeys)), "{failure:?}");
        assert_eq!(server.connections(), 1);
    }
}
