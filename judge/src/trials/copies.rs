//! One event in several deliveries: one after the other, at once, while the first runs, after a failure.

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::kills;
use crate::delivery::Template;
use crate::judge::{Judge, RUNS, Shown, Stop, fail, in_rows, unknown};
use crate::trial::Trial;
use crate::wire;

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "first-and-second",
        sent: "one event, and once more after its 2xx",
        right: "both are answered 2xx, and there is one effect",
        look_up: &["idempotent consumer", "webhook deduplication by event id"],
        run: |judge| Box::pin(first_and_second(judge)),
    },
    Trial {
        name: "two-at-once",
        sent: "one event in two requests at the same moment, 12 times",
        right: "one effect; a copy that is refused is answered 2xx when it is repeated",
        look_up: RACE,
        run: |judge| Box::pin(at_once(judge, 2, 12)),
    },
    Trial {
        name: "sixteen-at-once",
        sent: "one event in sixteen requests at the same moment, 4 times",
        right: "one effect; a copy that is refused is answered 2xx when it is repeated",
        look_up: RACE,
        run: |judge| Box::pin(at_once(judge, 16, 4)),
    },
    Trial {
        name: "second-while-first-runs",
        sent: "a slow event, and the same event while it runs (--slow)",
        right: "no 2xx while the first run may still fail; one effect",
        look_up: &["in-flight idempotency key", "409 or 503 with Retry-After while processing"],
        run: |judge| Box::pin(second_while_first_runs(judge)),
    },
    Trial {
        name: "failure-then-retry",
        sent: "an event whose first run fails, and its retries (--failing)",
        right: "the retry runs, is answered 2xx, and there is one effect",
        look_up: &["release the idempotency key on failure", "one transaction for key and effect"],
        run: |judge| Box::pin(failure_then_retry(judge)),
    },
];

const RACE: &[&str] =
    &["check-then-act race", "unique constraint", "INSERT ON CONFLICT DO NOTHING"];

async fn first_and_second(judge: &Judge) -> Shown {
    let id = judge.id();
    let first = judge.handled(&id, judge.patience).await?;
    let second = judge.handled(&id, judge.settles()).await?;
    judge.with_effects(format!("answered {first}; {second}"))
}

async fn at_once(judge: &Judge, copies: usize, rounds: usize) -> Shown {
    let (mut ids, mut refused) = (Vec::new(), 0);
    for _ in 0..rounds {
        let id = judge.id();
        let request = wire::whole(&judge.target, &judge.event(&id)?);
        let (last, most) = request.split_last().expect("a request");
        // The last bytes leave at the same moment.
        let open = join_all((0..copies).map(|_| judge.open(most))).await;
        let answers = join_all(open.into_iter().map(async |mut copy| {
            copy.write(&[*last]).await;
            copy.answer().await
        }));
        let successes = answers.await.iter().filter(|answer| answer.is_success()).count();
        refused += copies - successes;
        if successes == 0 {
            judge.retry(&judge.template, &id, judge.patience).await?;
        }
        if successes < copies {
            judge.retry(&judge.template, &id, judge.settles()).await?;
        }
        ids.push(id);
    }
    judge.one_effect(&ids, judge.patience).await?;
    let all = rounds * copies;
    judge.with_effects(format!("{all} requests for {rounds} events, {refused} refused at first"))
}

async fn second_while_first_runs(judge: &Judge) -> Shown {
    let Some(slow) = &judge.slow else { return unknown("not run: it needs --slow FILE") };
    let mut shown = overlapping(judge, slow).await;
    for _ in 0..2 {
        // A busy machine may need another attempt.
        if matches!(shown, Err(Stop::Unknown(_))) {
            shown = overlapping(judge, slow).await;
        }
    }
    shown
}

async fn overlapping(judge: &Judge, slow: &Template) -> Shown {
    let id = judge.id();
    let request = judge.signed(slow.with(&id))?;
    let begun = Instant::now();
    let first = async {
        let answer = judge.send(&request).await;
        let took = begun.elapsed();
        // An answer before the work shows in effects that are still missing.
        let early = if took < 2 * RUNS { judge.effects(&id).await? } else { None };
        Ok::<_, Stop>((answer, took, early))
    };
    let second = async {
        sleep(RUNS).await;
        let before = judge.effects(&id).await?;
        let answer = judge.send(&request).await;
        let took = begun.elapsed();
        let after = judge.effects(&id).await?;
        Ok::<_, Stop>((answer, took, before.unwrap_or(0), after.unwrap_or(0)))
    };
    let (first, second) = tokio::join!(first, second);
    let ((first, first_took, early), (second, second_took, before, after)) = (first?, second?);
    let told = format!(
        "the first is answered {first} after {} ms, the second {second} after {} ms",
        first_took.as_millis(),
        second_took.as_millis()
    );
    let answers_before_work = first.is_success() && early == Some(0);
    if first_took < 2 * RUNS && !answers_before_work {
        return unknown(format!("{told}: --slow FILE needs an event that takes at least a second"));
    }
    // After its effect, an event can fail no more.
    if second.is_success() && second_took < first_took && before == 0 {
        if after > 0 {
            return unknown(format!("{told}, and the effect came meanwhile"));
        }
        // A receiver that has stored the event, and runs it again by itself, may answer so.
        let told = format!("{told}, while the first may still fail");
        return match kept(judge, slow).await? {
            Some(true) => Ok(format!("{told}; but an event that failed runs again by itself")),
            Some(false) => fail(format!("{told}; an event that fails then is lost")),
            None => unknown(format!(
                "{told}; whether an event that fails runs again by itself, --count and --start show"
            )),
        };
    }
    if !first.is_success() {
        judge.retry(slow, &id, judge.patience).await?;
    }
    if !second.is_success() {
        judge.retry(slow, &id, judge.settles()).await?;
    }
    judge.one_effect(&[id], judge.patience).await?;
    Ok(told)
}

/// Returns whether an event whose first run fails has its effect without a repetition; `None` if that is not seen.
async fn kept(judge: &Judge, slow: &Template) -> Result<Option<bool>, Stop> {
    let id = judge.id();
    if judge.counter.is_none() {
        return Ok(None);
    }
    if judge.receiver.is_some() {
        kills::while_it_runs(judge, slow, &id).await?;
    } else if let Some(failing) = &judge.failing {
        judge.send(&judge.signed(failing.with(&id))?).await;
    } else {
        return Ok(None);
    }
    if judge.effects(&id).await? > Some(0) {
        return Ok(None); // the effect was there before the kill
    }
    match judge.one_effect(&[id], judge.patience).await {
        Ok(()) => Ok(Some(true)),
        Err(Stop::Fail(_)) => Ok(Some(false)),
        Err(stop) => Err(stop),
    }
}

async fn failure_then_retry(judge: &Judge) -> Shown {
    let Some(failing) = &judge.failing else { return unknown("not run: it needs --failing FILE") };
    let id = judge.id();
    let first = judge.send(&judge.signed(failing.with(&id))?).await;
    if first.is_success() {
        if judge.effects(&id).await? != Some(0) {
            return unknown(format!(
                "answered {first} at once: --failing FILE needs an event that fails"
            ));
        }
        judge.one_effect(&[id], judge.patience).await?;
        return Ok(format!("answered {first} before the effect, which came without a retry"));
    }
    let (texts, is_done) = judge.attempts(failing, &id, judge.patience).await?;
    let told = format!("answered {first}, then {}", in_rows(&texts));
    if !is_done {
        return match texts.iter().all(|text| *text == first.to_string()) {
            true => {
                unknown(format!("{told}: --failing FILE needs an event whose later runs succeed"))
            }
            false => fail(format!("{told}, and never 2xx")),
        };
    }
    judge.one_effect(&[id], judge.patience).await?;
    judge.with_effects(told)
}
