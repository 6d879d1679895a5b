//! The storm: a sender that delivers each event once and never again, and receivers that are killed.
//!
//! 1. **Receivers.** Three processes, of which one is a newer version of the application: it has another namespace or another
//!    key for a route, it lacks a route, and a layer of it loses the mark of redeliveries. One handler of five fails: by a
//!    status, a panic, or a 2xx without a COMMIT. Each effect is a row of the database of the keys.
//! 2. **Events.** Each is delivered once, whatever the answer; lists come a second time with other events, and a person
//!    delivers a few by hand. One client of 30 hangs up. Some events always fail.
//! 3. **Faults.** A receiver is killed with SIGKILL twice a second; one of six is told to stop before. In turn, the table of
//!    the inbox is locked, the server of the keys crashes, the table is away, and a process hangs for longer than its turns.
//! 4. **Counting.** The loops drain the table. What is parked as misrouted runs again under the older version. Then every
//!    event that was answered with a 2xx has its effect, or its row is parked for a reason that this event has; under the
//!    transactional ledger no event has two effects.
//!
//! `TOWER_DEDUP_STORM_SECONDS` is how long events are sent, 25 by default. `scripts/faults` runs it; with `--nocapture` it
//! prints its table.

mod receiver;
mod row;
mod sender;

use std::time::Duration;

use row::{Place, Row};

/// Not a test: the receiver, if this binary is started as one.
#[test]
fn receiver() {
    if let Ok(setup) = std::env::var(receiver::SETUP) {
        receiver::run(&setup);
    }
}

#[test]
fn storm_loses_doubles_and_leaves_no_acknowledged_event() {
    let seconds = std::env::var("TOWER_DEDUP_STORM_SECONDS").ok();
    let seconds: f64 = seconds.map_or(25.0, |text| text.parse().expect("seconds"));
    let row = |place, is_transactional, share: f64| Row {
        place,
        is_transactional,
        time: Duration::from_secs_f64(seconds * share),
    };
    let rows = [
        row(Place::Postgres, true, 1.0),
        row(Place::Postgres, false, 1.0),
        row(Place::Sqlite, true, 0.6),
    ];
    // At the same time, because processes and servers that start take most of it.
    let reports = std::thread::scope(|scope| {
        let started = rows.map(|row| scope.spawn(move || row.run()));
        started.map(|row| row.join().expect("no panic"))
    });
    println!("\n{}", row::HEAD);
    for report in &reports {
        println!("{report}");
    }
    for report in &reports {
        assert!(report.faults.is_empty(), "{}", report.faults.join("\n"));
    }
}
