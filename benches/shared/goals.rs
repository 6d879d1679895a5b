//! Every figure: its name, its description and its goal.

/// The goal of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// The figure has no goal, because it depends on the disk, or is a time of this machine.
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
    /// Returns the goal, and how the value compares with it: `≥ 7, met`, `no goal`.
    pub(crate) fn verdict(&self, value: f64) -> String {
        let (sign, bound, is_met) = match self.bound {
            Bound::AtLeast(bound) => ("≥", bound, value >= bound),
            Bound::AtMost(bound) => ("≤", bound, value <= bound),
            Bound::NoGoal => return "no goal".to_owned(),
        };
        format!("{sign} {bound}, {}", if is_met { "met" } else { "missed" })
    }

    /// Returns the value as printed: with two decimals for a ratio, without for a cost.
    pub(crate) fn value(&self, value: f64) -> String {
        match self.unit {
            "" => format!("{value:.2}"),
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
    layer_over_axum_idempotent: AtMost(0.55),
        "time that the layer with the memory adapter adds to an axum route, 1 KiB body, in process, over what `axum-idempotent` with its store in memory adds to the same route";
    layer_ns: NoGoal "ns",
        "the same time of the layer";
    memory_over_moka: AtLeast(1.0),
        "time of a new key in a moka cache, over the same in the memory adapter; 1,000,000 keys";
    memory_insert_ns: NoGoal "ns",
        "the same time of the memory adapter";
    memory_bytes: AtMost(200.0) "B",
        "memory that such a key takes";
    pg_claim_64: NoGoal,
        "claims a second on Postgres, over one statement a call";
    pg_event_64: NoGoal,
        "events (claim and completion) a second, over two statements an event";
    pg_duplicates_64: AtLeast(6.0),
        "duplicates a second, over `INSERT … ON CONFLICT DO NOTHING` one by one";
    pg_held_64: AtLeast(0.9),
        "claims a second of new keys beside 8 leased rows that an open transaction holds, over the same without it";
    pg_transactional_64: AtLeast(0.55),
        "events a second whose handler writes one row in a transaction that completes them, over `INSERT … ON CONFLICT DO NOTHING` in the same transaction by hand";
    pg_transactional_server: AtMost(1.8),
        "CPU of the server for such an event, over the same by hand";
    inbox_64: AtLeast(0.6),
        "events a second through an inbox around the layer, over the layer without it: transactional on Postgres, one row written by the handler, bodies of 1 kB";
    inbox_50k_64: NoGoal,
        "the same with bodies of 50 kB that do not compress";
    redis_claim_64: AtLeast(0.48),
        "claims a second on Redis, over the raw client's `SET NX PX`";
    redis_event_64: AtLeast(0.45),
        "events a second on Redis, over `SET NX PX` and `SET XX PX`";
    redis_duplicate_64: AtLeast(0.35),
        "duplicates a second on Redis, over `SET NX PX`";
    redis_key_bytes: AtMost(200.0) "B",
        "memory that a key with an id of 28 bytes takes on Redis";
    sqlite_claim_64: NoGoal,
        "claims a second on SQLite at `synchronous = FULL`, over one insert a commit";
    sqlite_event_64: NoGoal,
        "events a second on SQLite, over an insert and an update, a commit each";
    sqlite_duplicate_64: NoGoal,
        "duplicates a second on SQLite, over an insert that changes nothing";
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    assert_eq!(goal("layer_ns").value(1_234_567.8), "1,234,568 ns");
    assert_eq!(goal("pg_claim_64").value(7.256), "7.26");
    assert_eq!(goal("pg_claim_64").verdict(7.0), "no goal");
    assert_eq!(goal("pg_duplicates_64").verdict(6.0), "≥ 6, met");
    assert_eq!(goal("pg_duplicates_64").verdict(5.99), "≥ 6, missed");
    assert_eq!(goal("memory_bytes").verdict(200.1), "≤ 200, missed");
}
