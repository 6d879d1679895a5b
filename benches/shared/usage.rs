//! CPU time of this process and of a server.
//!
//! The rates of a busy machine or of a slow disk vary by a factor of ten. CPU time per call hardly varies.

use std::fs;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

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
}
