//! Which events are lost or doubled, and what explains them.
//!
//! An event is *lost* if one of its deliveries got a 2xx and it has no effect. It is *doubled* if it has
//! more than one effect. The database of the effects counts both.
//!
//! | ledger | lost | doubled |
//! |---|---|---|
//! | transactional | never | never |
//! | lease | never | explained as below |
//! | on arrival | explained as below | only by a failover of Redis |
//!
//! A doubled event under the lease ledger is explained if for each two runs in the order of their attempts
//! one of these holds:
//!
//! 1. The later run is a takeover, or follows runs without effect of which one was (its number is higher by
//!    two or more). And the receiver of the earlier run was killed: from 1 s before the earlier effect to
//!    the later effect, and no later than a lease and 5 s after the earlier effect.
//! 2. The same, and the store had a fault in this time, which begins 4 s before the first of the two
//!    effects.
//! 3. On Sentinel and Cluster: the earlier effect is from 5 s before a failover began to 1 s after it had ended.
//! 4. On Postgres without a synchronous standby: the earlier effect is from 1 s before a restart without a shutdown
//!    began to 1 s after it had ended, and the later effect came after it began. The claim had not waited for the disk.
//!    If connections were silent then, the earlier effect may come 3 s later: a handler waits so long for its write.
//!
//! A lost event under the on-arrival ledger is explained if a receiver was killed, or the store had a
//! fault, between its first request and 1 s after the last acknowledgement of its first three copies. The
//! claim of the receiver that dies is complete. So is a claim whose reply the store loses, until its
//! release; another receiver takes the event for a duplicate in this time.

use std::collections::BTreeMap;

use crate::effects::Database;
use crate::log::{Faults, Kind, Millis, Window};
use crate::receiver::LEASE;
use crate::row::{LedgerKind, Row, StoreKind};

/// The most events that are printed of those that nothing explains.
const SHOWN: usize = 10;

#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) lost: usize,
    pub(crate) lost_explained: usize,
    pub(crate) doubled: usize,
    pub(crate) doubled_explained: usize,
    /// Effects of events that were not acknowledged.
    strays: usize,
    /// Some of the events that nothing explains.
    unexplained: Vec<String>,
}

impl Verdict {
    /// Returns what the promise of the ledger excludes.
    pub(crate) fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        let (lost, doubled) =
            (self.lost - self.lost_explained, self.doubled - self.doubled_explained);
        if lost > 0 {
            failures.push(format!("{lost} events are lost without an explanation"));
        }
        if doubled > 0 {
            failures.push(format!("{doubled} events are doubled without an explanation"));
        }
        if self.strays > 0 {
            failures.push(format!("{} effects have no event", self.strays));
        }
        failures.extend(self.unexplained.iter().take(SHOWN).cloned());
        failures
    }
}

#[derive(Debug, Clone, Copy)]
struct Effect {
    receiver: u32,
    attempt: i64,
    takeover: bool,
    at: Millis,
}

/// Counts the effects of the acknowledged events: number, first request, acknowledgement.
pub(crate) async fn judge(
    row: Row,
    database: &mut Database,
    acknowledged: &[(u64, Millis, Millis)],
    faults: &Faults,
) -> sqlx::Result<Verdict> {
    database.load(acknowledged).await?;
    let mut verdict = Verdict::default();
    let lost = "SELECT a.id, a.sent_ms, a.acknowledged_ms FROM acknowledged a \
         LEFT JOIN effects e ON e.id = a.id WHERE e.id IS NULL";
    for event in database.rows(lost.to_owned()).await? {
        let window = Window(unsigned(event[1]), unsigned(event[2]) + 1_000);
        verdict.lost += 1;
        if row.ledger == LedgerKind::OnArrival && is_loss_explained(window, faults) {
            verdict.lost_explained += 1;
        } else {
            verdict.unexplained.push(format!("event {} is lost: {window:?}", event[0]));
        }
    }
    let doubled = "SELECT e.id, receiver, attempt, takeover, at_ms FROM effects e JOIN \
         (SELECT id FROM effects GROUP BY id HAVING count(*) > 1) d ON d.id = e.id";
    let mut events: BTreeMap<i64, Vec<Effect>> = BTreeMap::new();
    for effect in database.rows(doubled.to_owned()).await? {
        events.entry(effect[0]).or_default().push(Effect {
            receiver: u32::try_from(effect[1]).expect("the number of a receiver"),
            attempt: effect[2],
            takeover: effect[3] != 0,
            at: unsigned(effect[4]),
        });
    }
    for (event, mut effects) in events {
        effects.sort_by_key(|effect| (effect.attempt, effect.at));
        verdict.doubled += 1;
        let mut pairs = effects.windows(2);
        if pairs.all(|pair| is_double_explained(row, pair[0], pair[1], faults)) {
            verdict.doubled_explained += 1;
        } else {
            verdict.unexplained.push(format!("event {event} is doubled: {effects:?}"));
        }
    }
    if !verdict.unexplained.is_empty() {
        verdict.unexplained.push(format!("{faults:?}"));
    }
    // Every event that was sent is acknowledged before the row is judged.
    let strays = "SELECT count(*) FROM effects e LEFT JOIN acknowledged a ON a.id = e.id \
         WHERE a.id IS NULL";
    let strays = database.rows(strays.to_owned()).await?[0][0];
    verdict.strays = usize::try_from(strays).expect("a count");
    Ok(verdict)
}

fn is_loss_explained(window: Window, faults: &Faults) -> bool {
    faults.deaths.iter().any(|death| death.1.meets(window))
        || faults.store.iter().any(|fault| fault.1.meets(window))
}

fn is_double_explained(row: Row, earlier: Effect, later: Effect, faults: &Faults) -> bool {
    let failover_has_lost = || {
        let during = |failover: Window| {
            Window(failover.0.saturating_sub(5_000), failover.1.saturating_add(1_000))
                .meets(Window(earlier.at, earlier.at))
        };
        matches!(row.store, StoreKind::Sentinel | StoreKind::Cluster)
            && faults.store.iter().any(|fault| fault.0 == Kind::Failover && during(fault.1))
    };
    let restart_has_lost = || {
        let was_silent = |restart: Window| {
            faults.store.iter().any(|of| of.0 == Kind::Silence && of.1.meets(restart))
        };
        let lost = |(kind, restart): &(Kind, Window)| {
            let late = if was_silent(*restart) { 4_000 } else { 1_000 };
            let first = Window(restart.0.saturating_sub(1_000), restart.1.saturating_add(late));
            matches!(kind, Kind::Restart | Kind::Backend)
                && first.meets(Window(earlier.at, earlier.at))
                && later.at >= restart.0
        };
        row.store == StoreKind::Postgres && faults.store.iter().any(lost)
    };
    if row.ledger == LedgerKind::Transactional {
        return false;
    }
    if row.ledger == LedgerKind::OnArrival {
        return failover_has_lost();
    }
    let lapsed = earlier.at + Millis::try_from(LEASE.as_millis()).expect("a lease") + 5_000;
    let end = later.at.max(earlier.at).min(lapsed);
    let death = Window(earlier.at.saturating_sub(1_000), end);
    let fault = Window(earlier.at.min(later.at).saturating_sub(4_000), end);
    let died = || {
        let mut deaths = faults.deaths.iter().filter(|death| death.0 == earlier.receiver);
        deaths.any(|of| of.1.meets(death))
    };
    let failed = || faults.store.iter().any(|of| of.1.meets(fault));
    let may_take_over = later.takeover || later.attempt > earlier.attempt + 1;
    (may_take_over && (died() || failed())) || failover_has_lost() || restart_has_lost()
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).expect("a count")
}
