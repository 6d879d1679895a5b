//! Two events that a receiver may take for one, and one event that it may take for two.

use bytes::Bytes;
use http::Request;
use tokio::time::{Instant, sleep};

use crate::delivery::{Place, with_member};
use crate::judge::{Judge, LATE, RUNS, Shown, Stop, fail};
use crate::trial::Trial;

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "other-body-same-id",
        sent: "one event, and another body under its id",
        right: "one effect; the second is no 5xx, which a sender repeats without an end",
        look_up: &[
            "idempotency key reused with another payload",
            "webhook deduplication by event id",
        ],
        run: |judge| Box::pin(other_body_same_id(judge)),
    },
    Trial {
        name: "equal-bytes",
        sent: "two events with equal bytes apart from their ids",
        right: "both take effect",
        look_up: &["deduplication by payload hash", "webhook deduplication by event id"],
        run: |judge| Box::pin(equal_bytes(judge)),
    },
    Trial {
        name: "order-swapped",
        sent: "two events, the later one first",
        right: "both take effect",
        look_up: &["out-of-order webhooks", "high-water mark of ids"],
        run: |judge| Box::pin(order_swapped(judge)),
    },
    Trial {
        name: "id-empty",
        sent: "two events whose ids are empty",
        right: "both are refused, or both take effect: neither is a duplicate of the other",
        look_up: &["missing idempotency key", "input validation of the event id"],
        run: |judge| Box::pin(id_empty(judge)),
    },
    Trial {
        name: "id-long",
        sent: "two events with ids of 10 KB that differ at their ends",
        right: "each is refused, or has one effect: neither is a duplicate of the other",
        look_up: &["truncated key", "VARCHAR length of the event id", "hash long keys"],
        run: |judge| Box::pin(id_long(judge)),
    },
    Trial {
        name: "id-odd",
        sent: "events whose ids differ in a letter that is not ASCII, or is percent-encoded; in the case of a letter; in JSON, one with U+0000",
        right: "each is refused, or has one effect: none is a duplicate of another",
        look_up: &["lossy UTF-8 decoding", "case-insensitive collation", "NUL in Postgres text"],
        run: |judge| Box::pin(id_odd(judge)),
    },
];

async fn other_body_same_id(judge: &Judge) -> Shown {
    let id = judge.id();
    judge.handled(&id, judge.patience).await?;
    let other = judge.template.with(&id);
    let body = with_member(other.body(), "judge_other", "yes");
    let answer = judge.send_patiently(&judge.signed(other.map(|_| body))?).await;
    let told = format!("the other body is answered {answer}");
    if answer.status().is_none_or(|status| status.is_server_error()) {
        return fail(format!("{told}: a sender repeats it"));
    }
    judge.one_effect(&[id], judge.settles()).await?;
    judge.with_effects(told)
}

async fn equal_bytes(judge: &Judge) -> Shown {
    let ids = [judge.id(), judge.id()];
    for id in &ids {
        let event = judge.signed(judge.template.noted(id, "equal bytes"))?;
        let answer = judge.send_patiently(&event).await;
        if !answer.is_success() {
            return fail(format!("an event with the bytes of another is answered {answer}"));
        }
    }
    judge.one_effect(&ids, judge.patience).await?;
    judge.with_effects("both are answered 2xx")
}

async fn order_swapped(judge: &Judge) -> Shown {
    let [earlier, later] = [judge.id(), judge.id()];
    let ids = [later, earlier];
    for id in &ids {
        judge.retry(&judge.template, id, judge.settles()).await?;
    }
    judge.one_effect(&ids, judge.patience).await?;
    judge.with_effects("both are answered 2xx")
}

async fn id_empty(judge: &Judge) -> Shown {
    let event = || {
        let event = judge.template.with("");
        let body = with_member(event.body(), "judge_note", &judge.id());
        judge.signed(event.map(|_| body))
    };
    unusual(judge, &[event()?, event()?], false).await
}

async fn id_long(judge: &Judge) -> Shown {
    let long = "7".repeat(10 * 1024);
    let event = || judge.event(&format!("{long}{}", judge.id()));
    unusual(judge, &[event()?, event()?], true).await
}

async fn id_odd(judge: &Judge) -> Shown {
    let id = judge.id();
    let event = |end: &str| judge.event(&format!("{id}{end}"));
    // Some schemes sign no id that is not ASCII.
    let mut events = vec![event("'\\%41"), event("'\\A")];
    let beyond = [event("'\\%;\u{e9}"), event("'\\%;\u{e8}")];
    if beyond.iter().all(Result::is_ok) {
        events = beyond.into();
    }
    let mut events: Vec<_> = events.into_iter().collect::<Result<_, _>>()?;
    events.extend([event("X")?, event("x")?]);
    if matches!(judge.template.place, Place::Json(_)) {
        events.extend(event("\u{0}").ok());
    }
    unusual(judge, &events, true).await
}

/// Sends events with unusual ids: of the first two, both are refused or none, and each that is accepted has an effect.
/// With `is_repeatable`, a repetition has none.
async fn unusual(judge: &Judge, events: &[Request<Bytes>], is_repeatable: bool) -> Shown {
    // A receiver may count an effect under a hash of the id, so all effects are counted.
    let before = judge.effects("").await?.unwrap_or(0);
    let mut answers = Vec::new();
    for event in events {
        answers.push(judge.send_patiently(event).await);
    }
    let told: Vec<_> = answers.iter().map(ToString::to_string).collect();
    let told = format!("answered {}", told.join(", "));
    let successes = answers.iter().filter(|answer| answer.is_success()).count() as u64;
    if answers[0].is_success() != answers[1].is_success() {
        return fail(format!("{told}: events of one kind are treated differently"));
    }
    if let Err(Stop::Fail(why)) = judge.handled(&judge.id(), judge.patience).await {
        return fail(format!("{told}; of an ordinary event after it, {why}"));
    }
    for is_repetition in [false, true] {
        if is_repetition && is_repeatable {
            for event in events {
                judge.send(event).await;
            }
        }
        let deadline = Instant::now() + judge.settles();
        loop {
            sleep(if is_repetition { LATE } else { RUNS }).await;
            let Some(now) = judge.effects("").await? else { break };
            // Without that of the ordinary event.
            let effects = now.saturating_sub(before + 1);
            if successes == effects {
                break;
            }
            if successes < effects || Instant::now() > deadline {
                return fail(format!("{told}: {effects} effects of {} events", events.len()));
            }
        }
    }
    if successes == 0 { Ok(told) } else { judge.with_effects(told) }
}
