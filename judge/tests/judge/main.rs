//! The judge, run on receivers that are wrong by design and on the example `receiver`, over each store and ledger.
//!
//! `cargo test` builds the receivers. `cargo test --test judge` does not: it runs the programs of the last build.

mod receivers;
mod table;

use std::collections::BTreeSet;
use std::fmt::Write;

use futures_util::{StreamExt, stream};
use receivers::{CASES, Case};
use table::Verdicts;

/// How many receivers are judged at the same time. They wait most of the time.
const AT_ONCE: usize = 10;

#[tokio::test(flavor = "multi_thread")]
async fn each_receiver_fails_what_it_must_and_nothing_else() {
    let judged = stream::iter(CASES).map(async |case| (case, case.judge().await));
    let judged: Vec<(&Case, Verdicts)> = judged.buffered(AT_ONCE).collect().await;
    let mut wrong = String::new();
    for (case, verdicts) in &judged {
        let expected: BTreeSet<_> = case.fails.iter().copied().collect();
        let failed: BTreeSet<_> = verdicts.failed().collect();
        for trial in expected.symmetric_difference(&failed) {
            let evidence = &verdicts.0[*trial];
            writeln!(wrong, "{}: {trial}: {evidence:?}", case.name()).unwrap();
        }
    }
    println!("{}", table::written(&judged));
    assert!(wrong.is_empty(), "other verdicts than expected:\n{wrong}");
}
