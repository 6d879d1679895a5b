//! [`SentinelSet`]: a primary, two replicas and three Sentinels.

use std::sync::OnceLock;

use super::link::{Cut, Link};
use super::{Server, block_until, wait_until};

/// The name of the primary in the Sentinels.
const NAME: &str = "mymaster";

/// A primary with two replicas, and three Sentinels, of which two decide. A primary that is silent for a
/// second is replaced, about three seconds after its death.
pub struct SentinelSet {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
    /// One before each server, if the network can be cut.
    links: Vec<Link>,
}

impl SentinelSet {
    /// Starts the servers, and returns when all Sentinels know all of them. Takes about three seconds and
    /// blocks.
    pub fn start() -> Self {
        Self::started(&[], false, 1_000)
    }

    /// Starts servers whose network can be [cut](Self::cut_from_peers). Each link is the address of its server, for
    /// clients too.
    pub fn start_linked(directives: &[&str]) -> Self {
        Self::started(directives, true, 1_000)
    }

    /// Returns the set that all tests of this process share. No test may stop a part of it. Its primary may
    /// be silent for a minute, because the machine may be busy.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<SentinelSet> = OnceLock::new();
        SHARED.get_or_init(|| Self::started(&[], false, 60_000))
    }

    fn started(directives: &[&str], linked: bool, down_after_ms: u32) -> Self {
        let mut set = Self { servers: Vec::new(), sentinels: Vec::new(), links: Vec::new() };
        for number in 0..3 {
            let mut lines: Vec<_> = directives.iter().map(|line| (*line).to_owned()).collect();
            if linked {
                let link = Link::start();
                lines.push("replica-announce-ip 127.0.0.1".to_owned());
                lines.push(format!("replica-announce-port {}", link.port()));
                set.links.push(link);
            }
            let follow = (number > 0).then(|| set.follow(0));
            set.servers
                .push(Server::started(|_| lines.iter().chain(&follow).cloned().collect(), false));
            if let Some(link) = set.links.last() {
                link.lead_to(set.servers[number].port());
            }
        }
        block_until("two replicas", || set.replicas_of(0).filter(|replicas| *replicas == 2));
        let port = set.port(0);
        for _ in 0..3 {
            let lines = [
                format!("sentinel monitor {NAME} 127.0.0.1 {port} 2"),
                format!("sentinel down-after-milliseconds {NAME} {down_after_ms}"),
                format!("sentinel failover-timeout {NAME} 3000"),
                format!("sentinel parallel-syncs {NAME} 2"),
            ];
            set.sentinels.push(Server::started(|_| lines.to_vec(), true));
        }
        block_until("Sentinels that know each other", || set.is_quiet().then_some(()));
        set
    }

    /// Returns `redis+sentinel://HOST:PORT,HOST:PORT,HOST:PORT/mymaster`.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self.sentinels.iter().map(Server::address).collect();
        format!("redis+sentinel://{}/{NAME}", addresses.join(","))
    }

    /// Returns the name of the primary in the Sentinels.
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// Returns the three servers. Server 0 is the first primary.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Returns the number of the server that all running Sentinels name as the primary.
    pub fn primary(&self) -> Option<usize> {
        let named = self.named();
        let first = *named.first()?;
        named.iter().all(|next| *next == first).then_some(first)
    }

    /// Returns the number of the first server that says it is a primary.
    pub fn primary_by_role(&self) -> Option<usize> {
        let is_primary = |server: &Server| server.info("role").as_deref() == Some("master");
        self.servers.iter().position(is_primary)
    }

    /// Returns the number of the server that each running Sentinel names as the primary.
    fn named(&self) -> Vec<usize> {
        let named = self.sentinels.iter().filter_map(|sentinel| {
            let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
            let (_, port): (String, String) = sentinel.ask(&words).ok()?;
            (0..3).find(|number| self.port(*number).to_string() == port)
        });
        named.collect()
    }

    /// Waits until the Sentinels name one primary, that says it is one, and that has this many replicas
    /// or more, and until no Sentinel replaces a primary.
    pub async fn settled(&self, replicas: usize) -> usize {
        wait_until("a primary with its replicas", || {
            let primary = self.primary()?;
            (self.replicas_of(primary)? >= replicas && self.is_quiet()).then_some(primary)
        })
        .await
    }

    /// Waits until two Sentinels name another server than this one as the primary, and it is one. Returns its
    /// number. On a busy machine, the third Sentinel may name another server for minutes.
    pub async fn failover_from(&self, old: usize) -> usize {
        wait_until("a failover", || {
            let named = self.named();
            let new = (0..3).find(|new| named.iter().filter(|named| *named == new).count() >= 2)?;
            let is_primary = new != old && self.replicas_of(new).is_some();
            is_primary.then_some(new)
        })
        .await
    }

    /// Starts a killed server as a replica of the primary. Returns the primary when it has two replicas and the
    /// failover has ended everywhere: the next one may not begin before.
    pub async fn restart_as_replica(&self, number: usize) -> usize {
        let primary = wait_until("a primary", || self.primary()).await;
        self.servers[number].start_again_with(&[&self.follow(primary)]);
        self.settled(2).await
    }

    /// Cuts a server from the other servers and from the Sentinels. Clients still reach it.
    pub fn cut_from_peers(&self, number: usize) {
        self.link(number).cut(Cut::peers());
    }

    /// Silences the connections that clients have open to a server now.
    pub fn silence(&self, number: usize) {
        self.link(number).silence();
    }

    /// Ends all cuts of a server.
    pub fn heal(&self, number: usize) {
        self.link(number).cut(Cut::default());
    }

    fn link(&self, number: usize) -> &Link {
        self.links.get(number).expect("a set from start_linked")
    }

    /// Returns the port by which clients and other servers know a server.
    pub fn port(&self, number: usize) -> u16 {
        self.links.get(number).map_or_else(|| self.servers[number].port(), Link::port)
    }

    fn follow(&self, number: usize) -> String {
        format!("replicaof 127.0.0.1 {}", self.port(number))
    }

    /// Returns the number of replicas that follow this server, if it is a primary.
    fn replicas_of(&self, number: usize) -> Option<usize> {
        let info: String = self.servers[number].ask(&["INFO", "replication"]).ok()?;
        // The primary calls a replica `online` while the replica still loads the data.
        let online = info.matches("state=online").count();
        let loaded = self.servers.iter().filter(|server| follows(server)).count();
        info.contains("role:master").then_some(online.min(loaded))
    }

    /// Returns whether each Sentinel knows the two others and two replicas, and none replaces the primary.
    ///
    /// A Sentinel that still ends one failover while the new primary dies may return to the one before it.
    /// Then one Sentinel makes the last replica follow a dead server, and no failover succeeds any more.
    fn is_quiet(&self) -> bool {
        self.sentinels.iter().all(|sentinel| {
            let words = ["SENTINEL", "MASTER", NAME];
            let fields: Vec<String> = sentinel.ask(&words).unwrap_or_default();
            let value = |field: &str| {
                let at = fields.iter().position(|name| name == field)?;
                fields.get(at + 1).map(String::as_str)
            };
            value("num-slaves") == Some("2")
                && value("num-other-sentinels") == Some("2")
                && value("flags") == Some("master")
        })
    }
}

/// Returns whether a server is a replica that is connected and has the data of its primary.
fn follows(server: &Server) -> bool {
    server.info("master_link_status").as_deref() == Some("up")
}
