//! The judge, run on receivers that are wrong by design and on the example `receiver`, over each store and ledger.
//!
//! `cargo test` builds the receivers. `cargo test --test judge` does not: it runs the programs of the last build.

mod command;
mod receivers;
mod table;

use std::collections::BTreeSet;
use std::fmt::Write;

use futures_util::future::join_all;
use receivers::{CASES, Case};
use table::Verdicts;

/// Judges a receiver; again, if one of its faults does not show, because a busy machine may hide it. It makes no right
/// receiver fail.
async fn judge(Case(receiver, fails): &Case) -> Verdicts {
    let mut verdicts = receiver.judge().await;
    for _ in 0..2 {
        let failed: Vec<_> = verdicts.are("fail").collect();
        if failed.len() >= fails.len() || failed.iter().any(|trial| !fails.contains(trial)) {
            break;
        }
        verdicts = receiver.judge().await;
    }
    verdicts
}

#[tokio::test(flavor = "multi_thread")]
async fn each_receiver_fails_what_it_must_and_nothing_else() {
    // All at the same time: they wait most of the time.
    let judged = join_all(CASES.iter().map(judge)).await;
    let mut wrong = String::new();
    for (case, verdicts) in CASES.iter().zip(&judged) {
        for (verdict, expected) in [("fail", case.1), ("unknown", case.0.untold())] {
            let expected: BTreeSet<_> = expected.iter().copied().collect();
            let found: BTreeSet<_> = verdicts.are(verdict).collect();
            for trial in expected.symmetric_difference(&found) {
                let evidence = verdicts.evidence(trial);
                writeln!(wrong, "{}: {trial}: {evidence}", case.0.name()).unwrap();
            }
        }
    }
    let tables = table::tables(&judged);
    println!("{}\n{}", table::evidence(&judged), tables.join("\n"));
    assert!(wrong.is_empty(), "other verdicts than expected:\n{wrong}");
    // A trial that nobody fails may be blind.
    let failed: BTreeSet<_> = judged.iter().flat_map(|verdicts| verdicts.are("fail")).collect();
    let blind: Vec<_> = judged[0].trials().filter(|trial| !failed.contains(trial)).collect();
    assert_eq!(blind, ["an-hour-later"], "no receiver fails these");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/judge.md");
    let page = std::fs::read_to_string(page).unwrap();
    for table in tables {
        assert!(page.contains(&table), "docs/judge.md has another table than:\n{table}");
    }
}
