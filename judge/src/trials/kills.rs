//! Receivers that die by `kill -9`, and start again.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::delivery::Template;
use crate::effects::Counter;
use crate::judge::{Judge, RUNS, Shown, Stop, unknown};
use crate::process::{Receiver, Signal};
use crate::trial::Trial;
use crate::wire;

pub(super) const TRIALS: &[Trial] = &[
    Trial {
        name: "kill-before",
        sent: "half a request, `kill -9` of the receiver, its start, then the whole event (--start)",
        right: "the event is answered 2xx, and has one effect",
        look_up: &["crash recovery", "idempotency key with a lease"],
        run: |judge| Box::pin(before(judge)),
    },
    Trial {
        name: "kill-in",
        sent: "events whose receiver is killed at several moments before its answer, its start, then retries (--start)",
        right: "each retry is answered 2xx, and each event has one effect",
        look_up: &[
            "transactional inbox",
            "one transaction for key and effect",
            "idempotency key with a lease",
        ],
        run: |judge| Box::pin(within(judge)),
    },
    Trial {
        name: "kill-after",
        sent: "events whose receiver is killed at its answer 2xx, its start, then the same events (--start)",
        right: "what was answered 2xx has its effect, and no repetition adds another",
        look_up: &["durable idempotency keys", "synchronous_commit, fsync", "transactional inbox"],
        run: |judge| Box::pin(after(judge)),
    },
];

/// How long the receiver runs between two looks at the effects.
const SLICE: Duration = Duration::from_micros(300);
/// How long a kill waits for the moment after the effect.
const SEARCH: Duration = Duration::from_secs(5);

async fn before(judge: &Judge) -> Shown {
    let receiver = judge.receiver()?;
    let id = judge.id();
    // The connection is open when the receiver dies.
    let open = judge.open_half(&judge.event(&id)?).await;
    sleep(RUNS).await;
    receiver.restart().await?;
    drop(open);
    let told = judge.handled(&id, judge.patience).await?;
    judge.with_effects(format!("after the kill, answered {told}"))
}

/// Sends a slow event twice, and kills the receiver while the first delivery runs and the second is answered.
pub(super) async fn while_it_runs(judge: &Judge, slow: &Template, id: &str) -> Result<(), Stop> {
    let request = judge.signed(slow.with(id))?;
    let second = async {
        sleep(RUNS).await;
        judge.send(&request).await
    };
    tokio::select! {
        _ = judge.send(&request) => {}
        _ = second => {}
    }
    Ok(judge.receiver()?.restart().await?)
}

async fn within(judge: &Judge) -> Shown {
    let receiver = judge.receiver()?;
    // The moments of the kills after the end of the request; `None` is that of the effect.
    let millis = |millis| Some(Duration::from_millis(millis));
    let ordinary = [millis(0), millis(2), millis(10), None, None];
    let mut rounds: Vec<_> = ordinary.map(|moment| (&judge.template, moment)).into();
    let slow = judge.slow_moments().await?.into_iter();
    rounds.extend(slow.map(|(slow, moment)| (slow, Some(moment))));
    let (mut events, mut answered, mut seen) = (Vec::new(), Vec::new(), 0);
    for (template, moment) in rounds {
        let id = judge.id();
        let request = wire::whole(&judge.target, &judge.signed(template.with(&id))?);
        let open = judge.open(&request).await;
        let reached = async {
            match moment {
                Some(time) => sleep(time).await,
                None if at_effect(judge, receiver, &id).await => seen += 1,
                None => {}
            }
        };
        tokio::select! {
            answer = open.answer() => answered.extend(answer.is_success().then(|| id.clone())),
            () = reached => {}
        }
        receiver.restart().await?;
        events.push((template, id));
    }
    // A sender repeats none that was answered 2xx.
    judge.one_effect(&answered, judge.patience).await?;
    judge.all_handled(&events).await?;
    match events.len() - answered.len() {
        0 => unknown("all events were answered before the kill: give --slow FILE"),
        kills => judge.with_effects(format!(
            "{kills} kills before the answer, {seen} of them after the effect; each retry is answered 2xx in the end"
        )),
    }
}

/// Lets the receiver run in slices, until the event has an effect. Returns `false` if it has none in time.
async fn at_effect(judge: &Judge, receiver: &Receiver, id: &str) -> bool {
    let deadline = Instant::now() + SEARCH;
    while Instant::now() < deadline {
        receiver.signal(Signal::Stop);
        // The answer may be there already: the exchange ends this search.
        sleep(Duration::from_millis(1)).await;
        // A receiver that is stopped serves no --count-url.
        let counts = match &judge.counter {
            Some(counter @ Counter::Command(_)) => counter.read().await,
            _ => break,
        };
        if counts.is_ok_and(|counts| counts.of(id) > 0) {
            return true;
        }
        receiver.signal(Signal::Continue);
        sleep(SLICE).await;
    }
    receiver.signal(Signal::Continue);
    false
}

async fn after(judge: &Judge) -> Shown {
    let receiver = judge.receiver()?;
    let (mut ids, mut events) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let id = judge.id();
        judge.retry(&judge.template, &id, judge.patience).await?;
        receiver.restart().await?;
        ids.push(id.clone());
        events.push((&judge.template, id));
    }
    judge.one_effect(&ids, judge.patience).await?;
    judge.all_handled(&events).await?;
    judge.with_effects("3 kills after the answer, each repetition is answered 2xx")
}
