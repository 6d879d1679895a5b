//! The checks of the verdict, which the small soak runs first. They show that the verdict can fail.

use crate::effects::Database;
use crate::log::{Faults, Kind, Window};
use crate::row::Row;
use crate::verdict::judge;

/// An effect: event, receiver, attempt, takeover, time.
type Effect = (u64, u32, u32, bool, u64);

/// Event 1 was sent at 10.0 s and acknowledged at 10.5 s, in milliseconds.
const EVENT: (u64, u64, u64) = (1, 10_000, 10_500);
/// The first run of event 1 took effect in receiver 7.
const RUN: Effect = (1, 7, 1, false, 10_200);
const TAKEOVER: Effect = (1, 8, 2, true, 13_500);
/// Its takeover has failed.
const AFTER_TAKEOVER: Effect = (1, 8, 3, false, 13_500);
/// After a failure of the handler.
const RETRY: Effect = (1, 8, 2, false, 13_500);
const STRAY: Effect = (2, 7, 1, false, 10_200);
const SECOND_FIRST: Effect = (1, 8, 1, false, 13_500);

fn killed(receiver: u32, at: u64) -> Faults {
    Faults { deaths: vec![(receiver, Window(at, at + 5))], ..Faults::default() }
}

fn failed(kind: Kind, from: u64, until: u64) -> Faults {
    Faults { store: vec![(kind, Window(from, until))], ..Faults::default() }
}

/// The same, while connections were silent.
fn failed_in_silence(kind: Kind, from: u64, until: u64) -> Faults {
    let store = vec![(Kind::Silence, Window(from, until)), (kind, Window(from, until))];
    Faults { store, ..Faults::default() }
}

/// Judges event 1, and asserts: lost, explained, doubled, explained.
async fn assert_counts(row: &str, effects: &[Effect], faults: &Faults, expected: [usize; 4]) {
    let row: Row = row.parse().expect("a row");
    let mut database = Database::connect("sqlite::memory:").await.expect("SQLite");
    database.create_tables().await.expect("tables");
    for (run, (event, receiver, attempt, takeover, at)) in effects.iter().enumerate() {
        let takeover = u8::from(*takeover);
        let sql = "INSERT INTO effects VALUES";
        let sql = format!("{sql} ({run},{event},{receiver},{attempt},{takeover},{at})");
        database.run(sql).await.expect("an effect");
    }
    let verdict = judge(row, &mut database, &[EVENT], faults).await.expect("a verdict");
    let counts = [verdict.lost, verdict.lost_explained, verdict.doubled, verdict.doubled_explained];
    assert_eq!(counts, expected, "{row}, {effects:?}, {faults:?}");
    let is_fine = expected[0] == expected[1] && expected[2] == expected[3];
    let stray = effects.iter().any(|effect| effect.0 != EVENT.0);
    assert_eq!(verdict.failures().is_empty(), is_fine && !stray, "{:?}", verdict.failures());
}

pub(crate) async fn verdict() {
    let none = Faults::default();
    for row in Row::all() {
        let row = row.to_string();
        assert_counts(&row, &[RUN], &none, [0, 0, 0, 0]).await;
        assert_counts(&row, &[], &none, [1, 0, 0, 0]).await;
        assert_counts(&row, &[RUN, TAKEOVER], &none, [0, 0, 1, 0]).await;
        // An effect of an event that nobody has sent.
        assert_counts(&row, &[RUN, STRAY], &none, [0, 0, 0, 0]).await;
    }
    // A loss.
    let on_arrival = "postgres/on-arrival";
    for (faults, explained) in [
        (killed(9, 9_000), 0),
        (killed(9, 10_300), 1),
        (killed(9, 12_000), 0),
        (failed(Kind::Restart, 9_000, 10_100), 1),
        (failed(Kind::Restart, 12_000, 13_000), 0),
    ] {
        assert_counts(on_arrival, &[], &faults, [1, explained, 0, 0]).await;
        for never in ["postgres/lease", "postgres/transactional"] {
            assert_counts(never, &[], &faults, [1, 0, 0, 0]).await;
        }
    }
    // A double.
    for (second, faults, explained) in [
        (TAKEOVER, killed(7, 10_210), 1),
        (TAKEOVER, killed(8, 10_210), 0),
        (TAKEOVER, killed(7, 8_000), 0),
        (TAKEOVER, killed(7, 14_000), 0),
        (AFTER_TAKEOVER, killed(7, 10_210), 1),
        (AFTER_TAKEOVER, killed(8, 10_210), 0),
        (RETRY, killed(7, 10_210), 0),
        (SECOND_FIRST, killed(7, 10_210), 0),
        (TAKEOVER, failed(Kind::Silence, 10_000, 20_000), 1),
        (TAKEOVER, failed(Kind::Restart, 3_000, 5_000), 0),
        (SECOND_FIRST, failed(Kind::Restart, 10_300, 10_310), 1),
        (SECOND_FIRST, failed(Kind::Backend, 10_300, 10_310), 1),
        (SECOND_FIRST, failed(Kind::Restart, 12_000, 13_000), 0),
        (SECOND_FIRST, failed(Kind::Restart, 3_000, 5_000), 0),
        (SECOND_FIRST, failed(Kind::Restart, 7_000, 8_000), 0),
        (SECOND_FIRST, failed_in_silence(Kind::Restart, 7_000, 8_000), 1),
        (SECOND_FIRST, failed(Kind::Silence, 10_000, 20_000), 0),
    ] {
        assert_counts("postgres/lease", &[RUN, second], &faults, [0, 0, 1, explained]).await;
        for never in [on_arrival, "postgres/transactional", "redis/on-arrival"] {
            assert_counts(never, &[RUN, second], &faults, [0, 0, 1, 0]).await;
        }
    }
    // A failover that loses writes.
    for (faults, explained) in [
        (failed(Kind::Failover, 11_000, 14_000), 1),
        (failed(Kind::Failover, 16_000, 18_000), 0),
        (failed(Kind::Restart, 11_000, 14_000), 0),
    ] {
        for row in ["sentinel/lease", "sentinel/on-arrival", "cluster/lease"] {
            let expected = [0, 0, 1, explained];
            assert_counts(row, &[RUN, SECOND_FIRST], &faults, expected).await;
        }
        assert_counts("redis/lease", &[RUN, SECOND_FIRST], &faults, [0, 0, 1, 0]).await;
    }
}
