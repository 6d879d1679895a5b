//! What shows after all other trials, or later than a run.

use crate::judge::{Judge, Shown, fail, unknown};
use crate::trial::Trial;

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "late-effects",
        sent: "nothing: the effects of all trials are counted again",
        right: "no event has got another effect since its trial",
        look_up: &["idempotent consumer", "job queue at-least-once"],
        run: |judge| Box::pin(late_effects(judge)),
    },
    Trial {
        name: "an-hour-later",
        sent: "nothing: a redelivery after an hour or after days is out of scope",
        right: "ids are kept for longer than the sender repeats events",
        look_up: &["retention of idempotency keys", "retry schedule of the sender"],
        run: |_| {
            let compare = "compare how long ids are kept with the schedule of the sender";
            Box::pin(async move { unknown(format!("out of scope: {compare}")) })
        },
    },
];

async fn late_effects(judge: &Judge) -> Shown {
    let Some(counts) = judge.counts().await? else {
        return unknown("not run: it needs --count or --count-url");
    };
    let ids = judge.settled.borrow();
    let (all, changed) = (ids.len(), ids.iter().filter(|id| counts.of(id) != 1).count());
    match changed {
        0 => Ok(format!("each of {all} events has one effect still")),
        _ => fail(format!("{changed} of {all} events that had one effect have more or none")),
    }
}
