//! What a call costs beside time: CPU of the client, CPU of the server, and WAL.
//!
//! The rates of a busy machine or of a slow disk vary by a factor of ten. CPU time per call hardly varies.

use std::fs;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

/// What the client and the server have used since they started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    /// CPU time of this process: the callers and the client.
    pub(crate) client: Duration,
    /// CPU time of all processes of the server, or `None` if it is unknown.
    pub(crate) server: Option<Duration>,
    /// The end of the WAL, in bytes.
    pub(crate) wal: i64,
}

/// What one call costs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) client_us: f64,
    pub(crate) server_us: Option<f64>,
    pub(crate) wal_bytes: f64,
}

impl Cost {
    /// Returns the cost of each of these calls.
    pub(crate) fn of_each(calls: f64, before: Usage, after: Usage) -> Self {
        let us = |before: Duration, after: Duration| (after - before).as_secs_f64() * 1e6 / calls;
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2⁵² bytes")]
        let wal = (after.wal - before.wal) as f64;
        Self {
            client_us: us(before.client, after.client),
            server_us: before.server.zip(after.server).map(|(before, after)| us(before, after)),
            // The server writes some bytes even without calls.
            wal_bytes: (wal / calls).round(),
        }
    }
}

/// Returns the CPU time of this process.
pub(crate) fn own_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("a time")
}

/// Returns the CPU time of a process, of its living children, and of the children that it has waited for.
/// Returns `None` on other systems than Linux.
///
/// Every process of a PostgreSQL server is a child of the first one.
pub(crate) fn family_cpu(first: u32) -> Option<Duration> {
    let of_first = Stat::read(first)?;
    let mut ticks = of_first.own + of_first.waited;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // A process may end meanwhile.
        let stat = id.and_then(Stat::read).filter(|stat| stat.parent == first);
        ticks += stat.map_or(0, |stat| stat.own);
    }
    Some(Duration::from_micros(ticks * 1_000_000 / clock_ticks_per_second()))
}

/// Some fields of `/proc/<id>/stat`, with times in clock ticks.
#[derive(Debug, PartialEq)]
struct Stat {
    parent: u32,
    /// `utime` and `stime`
    own: u64,
    /// `cutime` and `cstime`
    waited: u64,
}

impl Stat {
    fn read(id: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
    }

    fn parse(line: &str) -> Option<Self> {
        // The name, in parentheses, may contain spaces and parentheses.
        let (_, rest) = line.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            own: ticks(11)? + ticks(12)?,
            waited: ticks(13)? + ticks(14)?,
        })
    }
}

/// The tests of this module, which `postgres` runs under `cargo test`.
pub(crate) fn check() {
    let line = "77 (a (b) c) S 5 77 77 0 -1 4194560 1 2 3 4 100 20 3 1 20 0 1 0 99";
    assert_eq!(Stat::parse(line), Some(Stat { parent: 5, own: 120, waited: 4 }));
    assert_eq!(Stat::parse("77"), None);
    assert_eq!(family_cpu(std::process::id()).is_some(), cfg!(target_os = "linux"));
    let usage = |ms, wal| Usage {
        client: Duration::from_millis(ms),
        server: Some(Duration::from_millis(2 * ms)),
        wal,
    };
    let cost = Cost::of_each(1_000.0, usage(1, 10), usage(3, 200_010));
    assert!((cost.client_us - 2.0).abs() < 1e-9 && (cost.wal_bytes - 200.0).abs() < 1e-9);
    assert!((cost.server_us.expect("a server") - 4.0).abs() < 1e-9);
}
