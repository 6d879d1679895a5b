//! Every figure: its name, its description and its goal.

/// The goal of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
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
    pub(crate) fn is_met(&self, value: f64) -> bool {
        match self.bound {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        }
    }

    /// Returns the value as a multiple of the goal: 1 meets it, 2 is twice as good.
    pub(crate) fn reached(&self, value: f64) -> f64 {
        match self.bound {
            Bound::AtLeast(bound) => value / bound,
            Bound::AtMost(bound) => bound / value,
        }
    }

    /// `≥ 7`, `≤ 1,500 ns`
    pub(crate) fn goal(&self) -> String {
        match self.bound {
            Bound::AtLeast(bound) => format!("≥ {}", self.shown(bound)),
            Bound::AtMost(bound) => format!("≤ {}", self.shown(bound)),
        }
    }

    /// Returns the value as printed: two decimals for a ratio, none for a cost.
    pub(crate) fn value(&self, value: f64) -> String {
        if self.unit.is_empty() { format!("{value:.2}") } else { self.shown(value.round()) }
    }

    fn shown(&self, value: f64) -> String {
        if self.unit.is_empty() {
            return value.to_string();
        }
        format!("{} {}", grouped(value), self.unit)
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
    ($($name:ident: $bound:ident($value:literal) $($unit:literal)?, $what:literal;)+) => {
        /// In the order of the README.
        pub(crate) const GOALS: &[Goal] = &[$(Goal {
            name: stringify!($name),
            what: $what,
            bound: Bound::$bound($value),
            unit: concat!($($unit)?),
        }),+];
    };
}

goals! {
    layer_ns: AtMost(1500.0) "ns",
        "what the layer with the memory adapter adds to an axum route, 1 KiB body, in process";
    pg_claim_64: AtLeast(7.0),
        "claims a second on Postgres, 64 callers, over one statement a call";
    pg_claim_256: AtLeast(12.0),
        "the same, 256 callers";
    pg_claim_1_p50: AtMost(1.05),
        "median latency of a claim, one caller, over one statement a call";
    pg_claim_64_p50: AtMost(0.2),
        "the same, 64 callers";
    pg_event_64: AtLeast(7.0),
        "whole events (claim and completion) a second, 64 callers, over two statements an event";
    pg_duplicates_64: AtLeast(6.0),
        "duplicates a second, 64 callers, over `INSERT … ON CONFLICT DO NOTHING` one by one";
    pg_10m_64: AtLeast(5.0),
        "claims a second beside 10,000,000 live rows, 64 callers, over one statement a call on the same table";
    pg_10m_hold: AtLeast(0.5),
        "claims a second beside 10,000,000 live rows, over those on a small table";
    redis_claim_1: AtLeast(0.8),
        "claims a second on Redis, one caller, over the raw client's `SET NX PX`";
    redis_claim_64: AtLeast(0.8),
        "the same, 64 callers";
    redis_claim_256: AtLeast(0.8),
        "the same, 256 callers";
    redis_duplicate_1: AtLeast(0.8),
        "duplicates a second on Redis, one caller, over the raw client's `SET NX PX`";
    redis_duplicate_64: AtLeast(0.8),
        "the same, 64 callers";
    redis_duplicate_256: AtLeast(0.8),
        "the same, 256 callers";
    redis_event_64: AtLeast(0.8),
        "whole events (claim and completion) a second on Redis, 64 callers, over `SET NX PX` and `SET XX PX`";
    redis_key_bytes: AtMost(200.0) "B",
        "memory that a key with an id of 28 bytes takes on Redis";
    sqlite_claim_64: AtLeast(8.0),
        "claims a second on SQLite at `synchronous = FULL`, 64 callers, over one insert a commit";
    memory_insert_ns: AtMost(400.0) "ns",
        "a new key in the memory adapter, over the first 1,000,000, expiry included";
    memory_bytes: AtMost(96.0) "B",
        "memory that such a key takes";
    memory_over_moka: AtLeast(5.0),
        "time of such a key in a moka cache, over ours";
    http_pg_64: AtLeast(3.0),
        "requests a second over HTTP, lease ledger on Postgres, 64 connections, over a handler with `INSERT … ON CONFLICT DO NOTHING`";
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    assert_eq!(goal("layer_ns").goal(), "≤ 1,500 ns");
    assert_eq!(goal("layer_ns").value(1_234_567.8), "1,234,568 ns");
    assert_eq!(goal("pg_claim_1_p50").goal(), "≤ 1.05");
    assert_eq!(goal("pg_claim_64").value(7.256), "7.26");
    assert!(goal("pg_claim_64").is_met(7.0) && !goal("pg_claim_64").is_met(6.99));
    assert!(goal("memory_bytes").is_met(96.0) && !goal("memory_bytes").is_met(96.1));
    assert!((goal("memory_bytes").reached(48.0) - 2.0).abs() < 1e-9);
    assert!((goal("pg_claim_64").reached(3.5) - 0.5).abs() < 1e-9);
}
