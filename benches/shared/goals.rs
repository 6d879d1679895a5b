//! Every figure: its name, its description and its goal.

/// The goal of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// The figure has no goal, for example because it depends on the disk.
    NoGoal,
}

/// A figure.
#[derive(Debug)]
pub(crate) struct Goal {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) bound: Bound,
    /// The unit of a cost. A ratio has none.
    pub(crate) unit: &'static str,
}

impl Goal {
    /// Returns how the value compares with the goal: `met`, `missed`, or nothing without a goal.
    pub(crate) fn verdict(&self, value: f64) -> &'static str {
        let is_met = match self.bound {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
            Bound::NoGoal => return "",
        };
        if is_met { "met" } else { "missed" }
    }

    /// Returns the value as a multiple of the goal: 1 meets it, 2 is twice as good. Returns `None` without
    /// a goal.
    pub(crate) fn reached(&self, value: f64) -> Option<f64> {
        match self.bound {
            Bound::AtLeast(bound) => Some(value / bound),
            // A goal of 0 that is met would be 0 / 0.
            Bound::AtMost(bound) if (value - bound).abs() < f64::EPSILON => Some(1.0),
            Bound::AtMost(bound) => Some(bound / value),
            Bound::NoGoal => None,
        }
    }

    /// `≥ 7`, `≤ 1,500 ns`, `none`
    pub(crate) fn goal(&self) -> String {
        let (sign, bound) = match self.bound {
            Bound::AtLeast(bound) => ("≥", bound),
            Bound::AtMost(bound) => ("≤", bound),
            Bound::NoGoal => return "none".to_owned(),
        };
        let number = if bound < 1e3 { bound.to_string() } else { grouped(bound) };
        format!("{sign} {number} {}", self.unit).trim_end().to_owned()
    }

    /// Returns the value as printed: two decimals for a ratio, one for micro- and milliseconds, none for
    /// other costs.
    pub(crate) fn value(&self, value: f64) -> String {
        match self.unit {
            "" => format!("{value:.2}"),
            "ms" | "µs" => format!("{value:.1} {}", self.unit),
            unit => format!("{} {unit}", grouped(value)),
        }
    }
}

/// `1500` as `1,500`.
pub(crate) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut shown = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// Returns the goal of this name, and panics if there is none.
pub(crate) fn goal(name: &str) -> &'static Goal {
    let found = GOALS.iter().find(|goal| goal.name == name);
    found.unwrap_or_else(|| panic!("there is no goal `{name}`"))
}

macro_rules! goals {
    ($($name:ident: $bound:ident $(($value:literal))? $($unit:literal)?, $what:literal;)+) => {
        /// In the order of the README.
        pub(crate) const GOALS: &[Goal] = &[$(Goal {
            name: stringify!($name),
            what: $what,
            bound: Bound::$bound$(($value))?,
            unit: concat!($($unit)?),
        }),+];
    };
}

goals! {
    layer_ns: AtMost(1000.0) "ns",
        "what the layer with the memory adapter adds to an axum route, 1 KiB body, in process";
    layer_allocations: AtMost(10.0) "allocations",
        "allocations that the layer adds to the same call";
    sync_us: NoGoal "µs",
        "8 KiB written and synced on the disk of the Postgres server, median";
    pg_claim_64: NoGoal,
        "claims a second on Postgres, 64 callers, over one statement a call";
    pg_claim_256: NoGoal,
        "the same, 256 callers";
    pg_claim_64_of_limit: AtLeast(0.65),
        "claims a second on Postgres, 64 callers, over the server's own limit";
    pg_claim_256_of_limit: AtLeast(0.65),
        "the same, 256 callers";
    pg_claim_1_p50: AtMost(1.05),
        "median latency of a claim, one caller, over one statement a call";
    pg_claim_64_p50: AtMost(0.2),
        "the same, 64 callers";
    pg_held_64: AtLeast(0.9),
        "claims a second on Postgres, 64 callers of new keys beside 8 of leased rows that an open transaction holds, over the same without it";
    pg_event_64: NoGoal,
        "whole events (claim and completion) a second, 64 callers, over two statements an event";
    pg_duplicates_64: AtLeast(6.0),
        "duplicates a second, 64 callers, over `INSERT … ON CONFLICT DO NOTHING` one by one";
    pg_claim_server_us: AtMost(9.0) "µs",
        "CPU of all processes of the Postgres server for a claim, 64 callers";
    pg_claim_client_us: AtMost(3.0) "µs",
        "CPU of the client for a claim, callers included";
    pg_claim_wal_bytes: NoGoal "B",
        "WAL of a claim";
    pg_event_server_us: NoGoal "µs",
        "CPU of the server for an event (claim and completion), 64 callers";
    pg_event_client_us: NoGoal "µs",
        "CPU of the client for an event";
    pg_event_wal_bytes: NoGoal "B",
        "WAL of an event";
    pg_duplicate_server_us: NoGoal "µs",
        "CPU of the server for a duplicate, 64 callers";
    pg_duplicate_client_us: NoGoal "µs",
        "CPU of the client for a duplicate";
    pg_duplicate_wal_bytes: AtMost(0.0) "B",
        "WAL of a duplicate";
    pg_10m_64: NoGoal,
        "claims a second beside 10,000,000 live rows, 64 callers, over one statement a call on the same table";
    pg_10m_hold: AtLeast(0.5),
        "claims a second beside 10,000,000 live rows, over those on a small table";
    redis_claim_1: AtLeast(0.85),
        "claims a second on Redis, one caller, over the raw client's `SET NX PX`";
    redis_claim_64: AtLeast(0.55),
        "the same, 64 callers";
    redis_claim_256: AtLeast(0.45),
        "the same, 256 callers";
    redis_duplicate_1: AtLeast(0.7),
        "duplicates a second on Redis, one caller, over the raw client's `SET NX PX`";
    redis_duplicate_64: AtLeast(0.35),
        "the same, 64 callers";
    redis_duplicate_256: AtLeast(0.35),
        "the same, 256 callers";
    redis_event_64: AtLeast(0.45),
        "whole events (claim and completion) a second on Redis, 64 callers, over `SET NX PX` and `SET XX PX`";
    redis_key_bytes: AtMost(200.0) "B",
        "memory that a key with an id of 28 bytes takes on Redis";
    sqlite_claim_64: NoGoal,
        "claims a second on SQLite at `synchronous = FULL`, 64 callers, over one insert a commit";
    sqlite_claim_64_of_limit: AtLeast(0.75),
        "the same, over batches of that size by one caller, one statement and one sync each";
    memory_insert_ns: AtMost(400.0) "ns",
        "a new key in the memory adapter, over the first 1,000,000, expiry included";
    memory_bytes: AtMost(96.0) "B",
        "memory that such a key takes";
    memory_over_moka: AtLeast(5.0),
        "time of such a key in a moka cache, over ours";
    http_pg_64: NoGoal,
        "requests a second over HTTP, lease ledger on Postgres, 64 connections, over a handler with `INSERT … ON CONFLICT DO NOTHING`";
    http_pg_64_of_bare: AtLeast(0.6),
        "the same, over the same server without the layer and without a database";
    pg_concurrent_duplicate_ms: AtMost(12.0) "ms",
        "response time of a duplicate that reaches another process when a handler of 5 ms begins, median";
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    assert_eq!(goal("layer_ns").goal(), "≤ 1,000 ns");
    assert_eq!(goal("layer_ns").value(1_234_567.8), "1,234,568 ns");
    assert_eq!(goal("pg_claim_1_p50").goal(), "≤ 1.05");
    assert_eq!(goal("pg_claim_64").goal(), "none");
    assert_eq!(goal("pg_claim_64").value(7.256), "7.26");
    assert_eq!(goal("pg_claim_server_us").goal(), "≤ 9 µs");
    assert_eq!(goal("pg_claim_server_us").value(7.36), "7.4 µs");
    let duplicates = goal("pg_duplicates_64");
    assert_eq!((duplicates.verdict(6.0), duplicates.verdict(5.99)), ("met", "missed"));
    let bytes = goal("memory_bytes");
    assert_eq!((bytes.verdict(96.0), bytes.verdict(96.1)), ("met", "missed"));
    assert_eq!(goal("pg_claim_64").verdict(7.0), "");
    let reached = |name: &str, value: f64, expected: f64| {
        (goal(name).reached(value).expect("a goal") - expected).abs() < 1e-9
    };
    assert!(reached("memory_bytes", 48.0, 2.0) && reached("pg_duplicates_64", 3.0, 0.5));
    assert!(reached("pg_duplicate_wal_bytes", 0.0, 1.0));
    assert!(reached("pg_duplicate_wal_bytes", 1.0, 0.0));
    assert_eq!(goal("pg_claim_64").reached(7.0), None);
}
