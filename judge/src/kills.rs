//! The trials that kill the receiver with `kill -9`, and start it again.

use std::time::Duration;

use tokio::sync::{MutexGuard, oneshot};
use tokio::time::{Instant, sleep, timeout};

use crate::delivery::Template;
use crate::effects::Counter;
use crate::judge::{Judge, RUNS, Shown, Stop, unknown};
use crate::process::{Receiver, Signal};
use crate::wire::{self, Answer, Step};

/// How long the receiver runs between two looks at the effects.
const SLICE: Duration = Duration::from_micros(300);
/// How long a kill waits for the moment after the effect.
const SEARCH: Duration = Duration::from_secs(5);

/// Returns the receiver, which may not have come back in another trial.
async fn receiver(judge: &Judge) -> Result<MutexGuard<'_, Receiver>, Stop> {
    let Some(receiver) = &judge.receiver else { return unknown("not run: it needs --start CMD") };
    let mut receiver = receiver.lock().await;
    if judge.target.connect().await.is_err() {
        restart(judge, &mut receiver).await?;
    }
    Ok(receiver)
}

async fn restart(judge: &Judge, receiver: &mut Receiver) -> Result<(), Stop> {
    receiver.kill(&judge.target).await?;
    Ok(receiver.start(&judge.target).await?)
}

pub(crate) async fn before(judge: &Judge) -> Shown {
    let mut receiver = receiver(judge).await?;
    let id = judge.id();
    let half = judge.half(&judge.event(&id)?);
    // The connection is open when the receiver dies.
    let open = judge.exchange([Step::Write(half), Step::Pause(wire::ANSWER)]);
    let _ = timeout(RUNS, open).await;
    restart(judge, &mut receiver).await?;
    let told = judge.handled(&id, judge.patience).await?;
    judge.with_effects(format!("after the kill, answered {told}"))
}

/// Sends a slow event twice, and kills the receiver while the first delivery runs and the second is answered.
pub(crate) async fn while_it_runs(judge: &Judge, slow: &Template, id: &str) -> Result<(), Stop> {
    let mut receiver = receiver(judge).await?;
    let request = judge.signed(slow.with(id))?;
    let second = async {
        sleep(RUNS).await;
        judge.send(&request).await
    };
    tokio::select! {
        _ = judge.send(&request) => {}
        _ = second => {}
    }
    restart(judge, &mut receiver).await
}

/// When the receiver is killed, from the end of the request on.
#[derive(Debug, Clone, Copy)]
enum Moment {
    After(Duration),
    /// Once the event has its effect, and before the answer.
    AtEffect,
}

/// How an event met the death of its receiver.
#[derive(Debug)]
enum Met {
    BeforeAnswer,
    /// The effect was seen before.
    AfterEffect,
    AfterAnswer,
}

pub(crate) async fn within(judge: &Judge) -> Shown {
    let mut receiver = receiver(judge).await?;
    let millis = |millis| Moment::After(Duration::from_millis(millis));
    let ordinary = [millis(0), millis(2), millis(10), Moment::AtEffect, Moment::AtEffect];
    let mut rounds: Vec<_> = ordinary.map(|moment| (&judge.template, moment)).into();
    let slow = judge.slow_moments().await?.into_iter();
    rounds.extend(slow.map(|(slow, moment)| (slow, Moment::After(moment))));
    let (mut events, mut answered, mut seen) = (Vec::new(), Vec::new(), 0);
    for (template, moment) in rounds {
        let id = judge.id();
        match killed(judge, &mut receiver, template, &id, moment).await? {
            Met::AfterAnswer => answered.push(id.clone()),
            Met::AfterEffect => seen += 1,
            Met::BeforeAnswer => {}
        }
        events.push((template, id));
    }
    drop(receiver);
    // A sender repeats none that was answered 2xx.
    judge.one_effect(&answered, judge.patience).await?;
    judge.all_handled(&events, judge.patience).await?;
    match events.len() - answered.len() {
        0 => unknown("all events were answered before the kill: give --slow FILE"),
        kills => judge.with_effects(format!(
            "{kills} kills before the answer, {seen} of them after the effect; each retry is answered 2xx in the end"
        )),
    }
}

/// Sends an event, kills the receiver at this moment, and starts it.
async fn killed(
    judge: &Judge,
    receiver: &mut Receiver,
    template: &Template,
    id: &str,
    moment: Moment,
) -> Result<Met, Stop> {
    let request = judge.signed(template.with(id))?;
    let (sent, is_sent) = oneshot::channel();
    let steps = [Step::Write(wire::whole(&judge.target, &request)), Step::Tell(sent)];
    let mut met = Met::BeforeAnswer;
    let reach = async {
        let _ = is_sent.await;
        match moment {
            Moment::After(time) => sleep(time).await,
            Moment::AtEffect => {
                if at_effect(judge, receiver, id).await {
                    met = Met::AfterEffect;
                }
            }
        }
    };
    let answer = tokio::select! {
        answer = judge.exchange(steps) => Some(answer),
        () = reach => None,
    };
    if answer.as_ref().is_some_and(Answer::is_success) {
        met = Met::AfterAnswer;
    }
    restart(judge, receiver).await?;
    Ok(met)
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

pub(crate) async fn after(judge: &Judge) -> Shown {
    let mut receiver = receiver(judge).await?;
    let (mut ids, mut events) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let id = judge.id();
        judge.retry(&judge.template, &id, judge.patience).await?;
        restart(judge, &mut receiver).await?;
        ids.push(id.clone());
        events.push((&judge.template, id));
    }
    judge.one_effect(&ids, judge.patience).await?;
    judge.all_handled(&events, judge.patience).await?;
    judge.with_effects("3 kills after the answer, each repetition is answered 2xx")
}
