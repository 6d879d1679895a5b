//! [`Cluster`]: three primaries with one replica each.

use std::ops::RangeInclusive;
use std::sync::{LazyLock, OnceLock};

use super::link::{Cut, Link};
use super::{Server, block_until, field_of, wait_until};

const SLOTS: usize = 16_384;

/// Three primaries, each with one replica. A primary that is silent for 1.5 s is replaced, about three
/// seconds after its death.
pub struct Cluster {
    /// Nodes 0 to 2 are the first primaries. Node 3 replicates node 0, and so on.
    nodes: Vec<Server>,
    ids: Vec<String>,
    /// Before each node, one for clients and replicas and one for the bus, if the network can be cut.
    links: Vec<(Link, Link)>,
}

impl Cluster {
    /// Starts the nodes, and returns when each of them says that the cluster is complete. Takes about four
    /// seconds and blocks.
    pub fn start() -> Self {
        Self::started(&[], false)
    }

    /// Starts nodes whose network can be [cut](Self::cut_from_peers). Each link is the address of its
    /// node, for clients too.
    pub fn start_linked(directives: &[&str]) -> Self {
        Self::started(directives, true)
    }

    /// Returns the cluster that all tests of this process share. No test may stop a part of it. Its nodes
    /// may be silent for a minute, because the machine may be busy.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        SHARED.get_or_init(|| Self::started(&["cluster-node-timeout 60000"], false))
    }

    fn started(directives: &[&str], linked: bool) -> Self {
        let mut cluster = Self { nodes: Vec::new(), ids: Vec::new(), links: Vec::new() };
        for _ in 0..6 {
            let mut lines = vec![
                "cluster-enabled yes".to_owned(),
                "cluster-node-timeout 1500".to_owned(),
                // A replica may be promoted however old its data are.
                "cluster-replica-validity-factor 0".to_owned(),
                "cluster-allow-replica-migration no".to_owned(),
            ];
            lines.extend(directives.iter().map(|line| (*line).to_owned()));
            if linked {
                let (link, bus) = (Link::start(), Link::start());
                lines.push("cluster-announce-ip 127.0.0.1".to_owned());
                lines.push(format!("cluster-announce-port {}", link.port()));
                lines.push(format!("cluster-announce-bus-port {}", bus.port()));
                cluster.links.push((link, bus));
            }
            let node = Server::started(|_| lines.clone(), false);
            if let Some((link, bus)) = cluster.links.last() {
                link.lead_to(node.port());
                bus.lead_to(node.port() + 10_000);
            }
            cluster.ids.push(node.run(&["CLUSTER", "MYID"]));
            cluster.nodes.push(node);
        }
        cluster.join();
        cluster
    }

    fn join(&self) {
        for (number, node) in self.nodes.iter().enumerate() {
            node.run::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            if number < 3 {
                let slots = (SLOTS * number / 3)..(SLOTS * (number + 1) / 3);
                let slots: Vec<_> = slots.map(|slot| slot.to_string()).collect();
                let mut words = vec!["CLUSTER", "ADDSLOTS"];
                words.extend(slots.iter().map(String::as_str));
                node.run::<()>(&words);
            }
            for other in 0..number {
                let port = self.port(other).to_string();
                let bus = self.links.get(other).map(|(_, bus)| bus.port());
                let bus = bus.unwrap_or_else(|| self.nodes[other].port() + 10_000).to_string();
                node.run::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
            }
        }
        for number in 3..6 {
            // The node refuses a primary that it has not met yet.
            block_until("a node that is met", || {
                let words = ["CLUSTER", "REPLICATE", &self.ids[number - 3]];
                self.nodes[number].ask::<()>(&words).ok()
            });
        }
        block_until("a complete cluster", || self.is_complete().then_some(()));
    }

    /// Returns `redis+cluster://HOST:PORT,…` with all six nodes.
    pub fn url(&self) -> String {
        let addresses: Vec<_> =
            (0..6).map(|node| format!("127.0.0.1:{}", self.port(node))).collect();
        format!("redis+cluster://{}", addresses.join(","))
    }

    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns the ids of the nodes in the cluster.
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// Returns the slot of a key.
    pub fn slot_of(&self, key: &str) -> u16 {
        block_until("a slot", || {
            self.nodes.iter().find_map(|node| node.ask(&["CLUSTER", "KEYSLOT", key]).ok())
        })
    }

    /// Returns an id that begins so and whose key `PREFIX:test:ID` is in a slot. An adapter lets no part in braces
    /// choose the slot.
    pub fn id_in_slot(prefix: &str, start: &str, slot: u16) -> String {
        let start = format!("{start}-");
        // A CRC is linear: that of the whole is that of the start, with zeros, and that of the end.
        let known = crc(0, format!("{prefix}:test:{start}\0\0\0\0\0").as_bytes());
        start + &ENDS[(usize::from(known) ^ usize::from(slot)) % SLOTS]
    }

    /// Returns the number of the node that owns a slot, if all running nodes agree on it.
    pub fn owner_of(&self, slot: u16) -> Option<usize> {
        let mut views = self.nodes.iter().filter_map(View::of);
        let owner = |view: Vec<View>| {
            let serves = |node: &View| node.slots.iter().any(|range| range.contains(&slot));
            let owner = view.into_iter().find(serves)?;
            self.ids.iter().position(|id| *id == owner.id)
        };
        let first = owner(views.next()?)?;
        views.all(|view| owner(view) == Some(first)).then_some(first)
    }

    /// Returns the number of the primary that owns the slot of a key. Waits until the nodes agree.
    pub async fn primary_of(&self, key: &str) -> usize {
        let slot = self.slot_of(key);
        wait_until("one owner of a slot", || self.owner_of(slot)).await
    }

    /// Waits until six nodes run, serve all slots, and each primary has a replica.
    pub async fn settled(&self) {
        wait_until("a complete cluster", || self.is_complete().then_some(())).await;
    }

    /// Moves a slot with its keys to another primary, as `redis-cli --cluster reshard` does.
    pub async fn move_slot(&self, slot: u16, to: usize) {
        let from = wait_until("one owner of a slot", || self.owner_of(slot)).await;
        assert_ne!(from, to, "the slot is there");
        let (source, target, text) = (&self.nodes[from], &self.nodes[to], slot.to_string());
        let set = |node: &Server, state: &str, id: &str| {
            node.run::<()>(&["CLUSTER", "SETSLOT", &text, state, id]);
        };
        set(target, "IMPORTING", &self.ids[from]);
        set(source, "MIGRATING", &self.ids[to]);
        let port = target.port().to_string();
        loop {
            let words = ["CLUSTER", "GETKEYSINSLOT", &text, "10"];
            let keys: Vec<Vec<u8>> = source.run(&words);
            if keys.is_empty() {
                break;
            }
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg("127.0.0.1").arg(&port).arg("").arg(0).arg(5_000).arg("KEYS").arg(keys);
            let moved = source.connection().and_then(|mut source| migrate.query::<()>(&mut source));
            moved.expect("keys that move");
            tokio::task::yield_now().await;
        }
        // The target first: else the slot would have no owner for a moment.
        set(target, "NODE", &self.ids[to]);
        set(source, "NODE", &self.ids[to]);
        wait_until("a slot that has moved", || self.owner_of(slot).filter(|owner| *owner == to))
            .await;
    }

    /// Cuts a node from the other nodes, in both directions. Clients still reach it.
    pub fn cut_from_peers(&self, number: usize) {
        for (other, (link, bus)) in self.links().iter().enumerate() {
            if other == number {
                link.cut(Cut::peers());
                bus.cut(Cut::peers());
            } else {
                bus.cut(Cut::node(self.ids[number].clone()));
            }
        }
    }

    /// Silences the connections that clients have open to a node now.
    pub fn silence(&self, number: usize) {
        self.links()[number].0.silence();
    }

    /// Ends all cuts.
    pub fn heal(&self) {
        for (link, bus) in self.links() {
            link.cut(Cut::default());
            bus.cut(Cut::default());
        }
    }

    fn links(&self) -> &[(Link, Link)] {
        assert!(!self.links.is_empty(), "a cluster from start_linked");
        &self.links
    }

    /// Returns the port by which clients and other nodes know a node.
    pub fn port(&self, number: usize) -> u16 {
        self.links.get(number).map_or_else(|| self.nodes[number].port(), |(link, _)| link.port())
    }

    /// Returns whether each running node sees all slots served by nodes that run.
    pub fn serves_all(&self) -> bool {
        let running = self.nodes.iter().filter_map(|node| {
            let info: String = node.ask(&["CLUSTER", "INFO"]).ok()?;
            Some((field_of(&info, "cluster_state")?, field_of(&info, "cluster_slots_ok")?))
        });
        let mut running = running.peekable();
        running.peek().is_some()
            && running.all(|(state, slots)| state == "ok" && slots == SLOTS.to_string())
    }

    fn is_complete(&self) -> bool {
        let has_replica = |node: &Server| {
            let info: String = node.ask(&["INFO", "replication"]).unwrap_or_default();
            info.contains("state=online") || info.contains("master_link_status:up")
        };
        let is_well = |node: &Server| {
            let view = View::of(node).unwrap_or_default();
            let is_well =
                |node: &View| !node.flags.contains("fail") && !node.flags.contains("handshake");
            view.len() == 6 && view.iter().all(is_well)
        };
        self.serves_all() && self.nodes.iter().all(|node| is_well(node) && has_replica(node))
    }
}

/// A text of five characters for each value of the CRC's last bits.
static ENDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let (mut ends, mut left) = (vec![String::new(); SLOTS], SLOTS);
    for end in (0..).map(|number: u32| format!("{number:05x}")) {
        let place = &mut ends[usize::from(crc(0, end.as_bytes())) % SLOTS];
        if place.is_empty() {
            *place = end;
            left -= 1;
        }
        if left == 0 {
            break;
        }
    }
    ends
});

/// CRC-16/XMODEM of these bytes, after those that `crc` is of.
fn crc(mut crc: u16, bytes: &[u8]) -> u16 {
    for byte in bytes {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    crc
}

/// What one node knows of another.
struct View {
    id: String,
    flags: String,
    slots: Vec<RangeInclusive<u16>>,
}

impl View {
    /// Returns what a node knows of all nodes, or `None` if it does not reply.
    fn of(node: &Server) -> Option<Vec<Self>> {
        let nodes: String = node.ask(&["CLUSTER", "NODES"]).ok()?;
        // id address flags primary ping pong epoch link [slots…]
        let read = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            // A slot that moves is written in brackets, after the slots that are served.
            let ranges = words[8..].iter().filter(|range| !range.starts_with('[')).map(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                first.parse().expect("a slot")..=last.parse().expect("a slot")
            });
            let slots = ranges.collect();
            Self { id: words[0].to_owned(), flags: words[2].to_owned(), slots }
        };
        Some(nodes.lines().map(read).collect())
    }
}
