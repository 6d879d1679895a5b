//! [`Lane`]: durable calls, on a connection of their own.
//!
//! 1. `WAIT` holds up everything behind it on its connection, so no other call uses the lane.
//! 2. `WAIT` waits for the writes of its own connection only. The scripts and their `WAIT` are sent at once,
//!    and each script writes its value even if the value stays the same.
//! 3. The lane leads where the main connection leads, and opens its own after it. A lane that stayed with an
//!    old master would not find what the main connection has claimed on the new one.
//! 4. While scripts and their `WAIT` are being sent, the next calls gather. They are sent together.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Pipeline, Value};
use tokio::sync::oneshot;

use super::super::script::ScriptCall;
use super::failure::{Failure, is_unknown_script, is_unreadable_script};
use super::link::{Link, Live};

/// How many scripts are sent with one `WAIT`.
const MOST_SCRIPTS: usize = 128;
/// How long the number of replicas is believed.
const COUNT_HOLDS: Duration = Duration::from_secs(1);

/// How many replicas must have a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Durability {
    /// `None` for one replica, if the primary has one or had one lately.
    pub(super) replicas: Option<u32>,
    /// How long a call waits for them.
    pub(super) bound: Duration,
}

/// The durable calls to one primary.
pub(super) struct Lane {
    link: Arc<Link>,
    /// The connection for most calls, which is checked regularly.
    main: Arc<Link>,
    durability: Durability,
    /// Longer than a task that is polled takes for a step of its calls.
    bound: Duration,
    queue: Mutex<Queue>,
    /// The number of replicas, and when it was read.
    count: Mutex<Option<(u32, Instant)>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// The task that sends the calls, and when it last took some.
    serving: Option<(u64, Instant)>,
    /// How many tasks have been started.
    started: u64,
}

struct Waiting {
    call: ScriptCall,
    asking: bool,
    reply: oneshot::Sender<Result<Value, Failure>>,
}

impl Lane {
    pub(super) fn new(
        link: Arc<Link>,
        main: Arc<Link>,
        durability: Durability,
        bound: Duration,
    ) -> Arc<Self> {
        let (queue, count) = (Mutex::default(), Mutex::default());
        Arc::new(Self { link, main, durability, bound, queue, count })
    }

    pub(super) fn close(&self) {
        self.link.close();
    }

    /// Runs a script. A caller that goes away leaves its call in the lane, which sends it or not.
    pub(super) async fn run(
        self: &Arc<Self>,
        call: &ScriptCall,
        asking: bool,
    ) -> Result<Value, Failure> {
        let (reply, replied) = oneshot::channel();
        let started = {
            let mut queue = self.queue();
            queue.waiting.push_back(Waiting { call: call.clone(), asking, reply });
            // A task belongs to the runtime of a caller, which may not be polled any more.
            let is_served = queue.serving.is_some_and(|(_, since)| since.elapsed() < self.bound);
            (!is_served).then(|| {
                queue.started += 1;
                queue.serving = Some((queue.started, Instant::now()));
                queue.started
            })
        };
        // Without the queue's lock: a runtime that is shutting down drops the task at once, which takes it.
        if let Some(number) = started {
            tokio::spawn(Serving { lane: Arc::clone(self), number }.serve());
        }
        replied.await.unwrap_or(Err(Failure::Interrupted))
    }

    /// Ends by itself, because each of its steps has a timeout.
    async fn send(&self, batch: Vec<Waiting>) {
        let main = match self.main.fit().await {
            Ok(main) => main,
            Err(failure) => return fail(batch, &failure),
        };
        let (mut batch, live) = match self.link.live_beside(&main).await {
            Ok(live) => (batch, live),
            Err(failure) => {
                fail(batch, &failure);
                return self.main.doubt().await;
            }
        };
        let replicas = match self.wanted(&live).await {
            Ok(replicas) => replicas,
            Err(failure) => return fail(batch, &failure),
        };
        let mut is_durable = true;
        // By the hash; then, those that the server does not know, by their text. A server that refuses
        // `INFO` may turn out to be of a version before 7.0 then, which needs another text.
        for by_text in [false, true, true] {
            let has_replicas;
            (batch, has_replicas) = self.send_once(&live, batch, replicas, by_text).await;
            is_durable &= has_replicas;
            if batch.is_empty() {
                break;
            }
        }
        if !is_durable {
            self.main.doubt().await;
        }
    }

    /// Sends the scripts and their `WAIT`. Returns those that the server cannot run in this form, and
    /// `false` if too few replicas have the writes.
    async fn send_once(
        &self,
        live: &Arc<Live>,
        batch: Vec<Waiting>,
        replicas: u32,
        by_text: bool,
    ) -> (Vec<Waiting>, bool) {
        let form = live.form(true);
        let mut pipeline = Pipeline::with_capacity(batch.len() + 1);
        for Waiting { call, asking, .. } in &batch {
            if *asking {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(if by_text { call.by_text(form) } else { call.by_hash(form) });
        }
        if replicas > 0 {
            pipeline.cmd("WAIT").arg(replicas).arg(millis(self.durability.bound));
        }
        let mut replies = match self.link.pipeline(live, &pipeline).await {
            Ok(replies) => replies,
            Err(failure) => {
                fail(batch, &failure);
                return (Vec::new(), true);
            }
        };
        let is_durable = replicas == 0
            || matches!(replies.pop(), Some(Value::Int(have)) if have >= i64::from(replicas));
        let mut replies = replies.into_iter();
        let mut unknown = Vec::new();
        for waiting in batch {
            if waiting.asking {
                replies.next();
            }
            let reply = replies.next().unwrap_or(Value::Nil).extract_error();
            match reply {
                Err(error) if !by_text && is_unknown_script(&error) => unknown.push(waiting),
                Err(error) if form.knows_flags && is_unreadable_script(&error) => {
                    live.forgets_flags();
                    unknown.push(waiting);
                }
                reply => {
                    let reply = match self.link.checked(live, reply) {
                        Ok(_) if !is_durable => Err(Failure::TooFewReplicas),
                        reply => reply,
                    };
                    // The caller may have gone.
                    let _ = waiting.reply.send(reply);
                }
            }
        }
        (unknown, is_durable)
    }

    /// Returns for how many replicas to wait.
    async fn wanted(&self, live: &Arc<Live>) -> Result<u32, Failure> {
        if let Some(replicas) = self.durability.replicas {
            return Ok(replicas);
        }
        let known = *self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let count = match known {
            Some((count, at)) if at.elapsed() < COUNT_HOLDS => count,
            _ => {
                let count = self.link.replicas(live).await?;
                let mut known = self.count.lock().unwrap_or_else(PoisonError::into_inner);
                *known = Some((count, Instant::now()));
                count
            }
        };
        Ok(self.main.replicas_seen().wanted(count))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn millis(bound: Duration) -> u64 {
    u64::try_from(bound.as_millis()).unwrap_or(u64::MAX)
}

fn fail(batch: Vec<Waiting>, failure: &Failure) {
    for waiting in batch {
        let _ = waiting.reply.send(Err(failure.clone()));
    }
}

/// The task that sends the calls of a lane. If its runtime ends or is not polled, a later call starts another
/// one.
struct Serving {
    lane: Arc<Lane>,
    number: u64,
}

impl Serving {
    async fn serve(self) {
        while let Some(batch) = self.next() {
            self.lane.send(batch).await;
        }
    }

    fn next(&self) -> Option<Vec<Waiting>> {
        let mut queue = self.lane.queue();
        if !self.is_current(&queue) {
            return None;
        }
        queue.waiting.retain(|waiting| !waiting.reply.is_closed());
        let count = queue.waiting.len().min(MOST_SCRIPTS);
        if count == 0 {
            queue.serving = None;
            return None;
        }
        queue.serving = Some((self.number, Instant::now()));
        Some(queue.waiting.drain(..count).collect())
    }

    fn is_current(&self, queue: &Queue) -> bool {
        queue.serving.is_some_and(|(number, _)| number == self.number)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let mut queue = self.lane.queue();
        // After its end, another task may serve the lane.
        if self.is_current(&queue) {
            queue.serving = None;
            queue.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
    use std::task::{Context, Poll, Waker};

    use super::super::fake::{Fake, bulk};
    use super::super::link::Target;
    use super::super::node::{Node, Sent};
    use super::super::sentinel::Sentinel;
    use super::super::target::client;
    use super::*;
    use crate::adapter::redis::options::RedisOptions;
    use crate::adapter::redis::script::RELEASE;
    use crate::adapter::redis::url::Endpoint;

    fn release() -> ScriptCall {
        ScriptCall::new(&RELEASE, b"dedup:test:a".to_vec())
    }

    /// Returns the reply of a master with one replica.
    fn master(words: &[String]) -> String {
        match words[0].as_str() {
            "INFO" => bulk("role:master\r\nslave0:state=online\r\n"),
            "WAIT" => ":1\r\n".to_owned(),
            _ => ":7\r\n".to_owned(),
        }
    }

    async fn send(node: &Node, durably: bool) -> Result<Value, Failure> {
        node.send(Sent::Script { call: &release(), durably }, false).await
    }

    fn server_node(server: &Fake) -> Node {
        let (address, options) = (server.address(), RedisOptions::new());
        let client = client(&address, false, Default::default(), &options).unwrap();
        Node::new(&Target::Server { client: client.into(), address, in_cluster: false }, &options)
    }

    /// Returns a node, and the port of the master that its Sentinel names.
    async fn behind_sentinel(master: &Fake) -> (Node, Arc<AtomicU16>) {
        let named = Arc::new(AtomicU16::new(master.address().port));
        let naming = Arc::clone(&named);
        let sentinel = Fake::start(move |_| {
            let port = naming.load(Ordering::Relaxed).to_string();
            format!("*2\r\n{}{}", bulk("127.0.0.1"), bulk(&port))
        })
        .await;
        let (url, options) =
            (format!("redis+sentinel://{}/main", sentinel.address()), RedisOptions::new());
        let endpoint = Endpoint::read(&url).unwrap();
        let sentinel = Sentinel::new(&endpoint, Default::default(), &options).unwrap();
        (Node::new(&Target::Sentinel(sentinel.into()), &options), named)
    }

    #[tokio::test]
    async fn lane_leads_where_the_main_connection_leads() {
        let (old, new) = (Fake::start(master).await, Fake::start(master).await);
        let (node, named) = behind_sentinel(&old).await;
        send(&node, true).await.unwrap();
        named.store(new.address().port, Ordering::Relaxed);
        node.link.check().await.unwrap();
        send(&node, true).await.unwrap();
        assert_eq!(old.received("EVALSHA").len(), 1);
        assert_eq!(new.received("EVALSHA").len(), 1);
    }

    #[tokio::test]
    async fn release_waits_for_the_replica_that_the_primary_had() {
        let has_replica = Arc::new(AtomicBool::new(true));
        let has = Arc::clone(&has_replica);
        let server = Fake::start(move |words| match words[0].as_str() {
            "INFO" if !has.load(Ordering::Relaxed) => bulk("role:master\r\n"),
            "WAIT" => format!(":{}\r\n", u8::from(has.load(Ordering::Relaxed))),
            _ => master(words),
        })
        .await;
        let node = server_node(&server);
        send(&node, false).await.unwrap();
        has_replica.store(false, Ordering::Relaxed);
        assert!(matches!(send(&node, true).await, Err(Failure::TooFewReplicas)));
    }

    #[tokio::test]
    async fn lane_uses_the_plain_form_before_redis_7_where_info_is_refused() {
        let old = |words: &[String]| match words[0].as_str() {
            "INFO" => "-NOPERM no\r\n".to_owned(),
            "EVALSHA" => "-NOSCRIPT No matching script\r\n".to_owned(),
            "EVAL" if words[1].starts_with("#!lua") => {
                "-ERR Error compiling script (new function)\r\n".to_owned()
            }
            _ => master(words),
        };
        let server = Fake::start(old).await;
        let node = server_node(&server);
        let (one, other) = tokio::join!(send(&node, true), send(&node, true));
        assert_eq!((one.unwrap(), other.unwrap()), (Value::Int(7), Value::Int(7)));
        assert_eq!(server.received("WAIT").len(), 0);
    }

    #[test]
    fn call_on_a_runtime_that_shuts_down_ends() {
        struct CallsWhenDropped(Option<(Arc<Lane>, std::sync::mpsc::Sender<bool>)>);
        impl Drop for CallsWhenDropped {
            fn drop(&mut self) {
                let (lane, ended) = self.0.take().unwrap();
                let call = release();
                let mut run = Box::pin(lane.run(&call, false));
                let mut context = Context::from_waker(Waker::noop());
                let reply = run.as_mut().poll(&mut context);
                let interrupted = matches!(reply, Poll::Ready(Err(Failure::Interrupted)));
                ended.send(interrupted).unwrap();
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ended, has_ended) = std::sync::mpsc::channel();
        let node = runtime.block_on(async {
            let server = Fake::start(master).await;
            server_node(&server)
        });
        let lane = Arc::clone(node.lane());
        let calls = CallsWhenDropped(Some((lane, ended)));
        runtime.spawn(async move {
            let _calls = calls;
            std::future::pending::<()>().await;
        });
        std::thread::spawn(move || drop(runtime));
        assert!(has_ended.recv_timeout(Duration::from_secs(5)).expect("the call hangs"));
    }

    #[test]
    fn calls_behind_an_idle_runtime_are_sent_by_another_one() {
        let runtime = || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap()
        };
        let idle = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (first, second, servers) = (idle(), idle(), runtime());
        let server = servers.block_on(Fake::start(master));
        let (node, bound) = (server_node(&server), Duration::from_millis(200));
        let lane = Lane::new(
            Arc::clone(&node.lane().link),
            Arc::clone(&node.link),
            node.lane().durability,
            bound,
        );
        let (call, short, long) = (release(), Duration::from_millis(50), Duration::from_secs(5));
        let run = async |bound| tokio::time::timeout(bound, lane.run(&call, false)).await;
        second.block_on(run(long)).unwrap().unwrap();
        // The connection belongs to the second runtime: it brings no reply.
        first.block_on(run(short)).unwrap_err();
        second.block_on(run(short)).unwrap_err();
        std::thread::sleep(bound);
        second.block_on(run(long)).unwrap().unwrap();
        let sent = server.received("EVALSHA").len();
        first.block_on(async { tokio::time::sleep(short).await });
        second.block_on(run(long)).unwrap().unwrap();
        assert_eq!(server.received("EVALSHA").len(), sent + 1);
    }

    #[tokio::test]
    async fn missing_replicas_make_the_main_connection_ask_sentinel() {
        let alone = |words: &[String]| match words[0].as_str() {
            "WAIT" => ":0\r\n".to_owned(),
            _ => master(words),
        };
        let (old, new) = (Fake::start(alone).await, Fake::start(master).await);
        let (node, named) = behind_sentinel(&old).await;
        send(&node, false).await.unwrap();
        named.store(new.address().port, Ordering::Relaxed);
        assert!(matches!(send(&node, true).await, Err(Failure::TooFewReplicas)));
        send(&node, true).await.unwrap();
        send(&node, false).await.unwrap();
        assert_eq!(new.received("EVALSHA").len(), 2);
    }
}
