//! The trials of requests; `kills` has those that kill the receiver.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, HeaderName, Request};
use tokio::sync::Barrier;
use tokio::time::{Instant, sleep};

use crate::delivery::{Place, Template, changed, with_member};
use crate::judge::{Judge, RUNS, Shown, Stop, fail, in_rows, unknown};
use crate::kills;
use crate::wire::{self, Answer, Step};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Runs the trial of this name.
pub(crate) async fn run(judge: &Judge, name: &str) -> Shown {
    match name {
        "first-and-second" => first_and_second(judge).await,
        "two-at-once" => at_once(judge, 2, 12).await,
        "sixteen-at-once" => at_once(judge, 16, 4).await,
        "second-while-first-runs" => second_while_first_runs(judge).await,
        "failure-then-retry" => failure_then_retry(judge).await,
        "signature-forged" | "signature-missing" | "signature-stale" => {
            signature_wrong(judge, name).await
        }
        "signature-doubled" => signature_doubled(judge).await,
        "other-body-same-id" => other_body_same_id(judge).await,
        "id-empty" => id_empty(judge).await,
        "id-long" => id_long(judge).await,
        "id-odd" => id_odd(judge).await,
        "body-slow" => body_slow(judge).await,
        "body-broken" => body_broken(judge).await,
        "body-chunked" => body_chunked(judge).await,
        "equal-bytes" => equal_bytes(judge).await,
        "order-swapped" => order_swapped(judge).await,
        "hang-up" => hang_up(judge).await,
        "kill-before" => kills::before(judge).await,
        "kill-in" => kills::within(judge).await,
        "kill-after" => kills::after(judge).await,
        "late-effects" => late_effects(judge).await,
        _ => unknown("out of scope: compare how long ids are kept with the schedule of the sender"),
    }
}

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
        let answers = copies_at_once(judge, &id, copies).await?;
        let successes = answers.iter().filter(|answer| answer.is_success()).count();
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

/// Sends copies whose last bytes leave at the same moment.
async fn copies_at_once(judge: &Judge, id: &str, copies: usize) -> Result<Vec<Answer>, Stop> {
    let request = judge.event(id)?;
    let mut most = wire::whole(&judge.target, &request);
    let last = most.split_off(most.len() - 1);
    let barrier = Arc::new(Barrier::new(copies));
    let copy = |_| {
        let meet = Step::Meet(Arc::clone(&barrier));
        judge.exchange([Step::Write(most.clone()), meet, Step::Write(last.clone())])
    };
    Ok(join_all((0..copies).map(copy)).await)
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
    let effects = async |id: &str| Ok::<_, Stop>(judge.counts().await?.map(|it| it.of(id)));
    let id = judge.id();
    let request = judge.signed(slow.with(&id))?;
    let begun = Instant::now();
    let first = async {
        let answer = judge.send(&request).await;
        let took = begun.elapsed();
        // An answer before the work shows in effects that are still missing.
        let early = if took < 2 * RUNS { effects(&id).await? } else { None };
        Ok::<_, Stop>((answer, took, early))
    };
    let second = async {
        sleep(RUNS).await;
        let before = effects(&id).await?;
        let answer = judge.send(&request).await;
        let took = begun.elapsed();
        Ok::<_, Stop>((answer, took, before.unwrap_or(0), effects(&id).await?.unwrap_or(0)))
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
    if judge.counts().await?.is_some_and(|counts| counts.of(&id) > 0) {
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
        let done = judge.counts().await?.map(|counts| counts.of(&id));
        if done != Some(0) {
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

/// Sends an event that is to be refused, and then the genuine one with its id.
async fn refused(judge: &Judge, what: &str, id: &str, request: &Request<Bytes>) -> Shown {
    let answer = judge.send(request).await;
    if answer.is_success() {
        return fail(format!("{what} is answered {answer}"));
    }
    judge.no_effect(id, what).await?;
    match judge.handled(id, judge.settles()).await {
        Err(Stop::Fail(why)) => {
            fail(format!("{what} is answered {answer}; of the genuine one after it, {why}"))
        }
        shown => shown.map(|_| format!("{what} is answered {answer}")),
    }
}

const NO_SECRET: &str = "not run: it needs --sender and --secret-env";

async fn signature_wrong(judge: &Judge, name: &str) -> Shown {
    let Some(signer) = &judge.signer else { return unknown(NO_SECRET) };
    let [id, other_id] = [judge.id(), judge.id()];
    let event = judge.template.with(&id);
    let (what, request) = match name {
        "signature-forged" => ("an event signed with another secret", signer.forger().sign(event)?),
        "signature-missing" => ("an event without a signature", signer.unsigned(event)?),
        _ if !signer.signs_time(&event)? => return unknown("not run: this sender signs no time"),
        _ => ("an event signed a day ago", signer.sign_at(event, SystemTime::now() - DAY)?),
    };
    let mut told = refused(judge, what, &id, &request).await?;
    if name == "signature-forged" {
        let signed = judge.event(&other_id)?;
        let body = with_member(signed.body(), "forged", "yes");
        let changed = signed.clone().map(|_| body);
        // A shared token covers no body, and Adyen's signature not all of it.
        if signer.sign(changed.clone())?.headers() != signed.headers() {
            let what = "an event changed after it was signed";
            told = format!("{told}; {}", refused(judge, what, &other_id, &changed).await?);
        }
    }
    judge.with_effects(told)
}

/// Sends events with two signatures. A receiver may refuse one of which one is valid, because it may also read the other.
async fn signature_doubled(judge: &Judge) -> Shown {
    let Some(signer) = &judge.signer else { return unknown(NO_SECRET) };
    let now = SystemTime::now();
    let pair = |id: &str| -> Result<_, Stop> {
        let event = judge.template.with(id);
        let valid = signer.sign_at(event.clone(), now)?;
        let forged = signer.forger().sign_at(event, now)?;
        let names = changed(valid.headers(), forged.headers());
        Ok((valid, forged, names))
    };
    let doubled = |mut request: Request<Bytes>, second: &HeaderMap, names: &[HeaderName]| {
        for name in names {
            second.get(name).map(|value| request.headers_mut().append(name, value.clone()));
        }
        request
    };
    let id = judge.id();
    let (_, forged, names) = pair(&id)?;
    if names.is_empty() {
        return unknown("not run: the signature of this sender is in the body");
    }
    let second = forged.headers().clone();
    let request = doubled(forged, &second, &names);
    let mut told = refused(judge, "an event with two forged signatures", &id, &request).await?;
    for order in ["valid, forged", "forged, valid"] {
        let id = judge.id();
        let (valid, forged, names) = pair(&id)?;
        let is_swapped = order.starts_with('f');
        let (first, second) = if is_swapped { (forged, valid) } else { (valid, forged) };
        let answer = judge.send(&doubled(first, second.headers(), &names)).await;
        judge.handled(&id, judge.settles()).await?;
        told = format!("{told}; {order}: {answer}");
    }
    judge.with_effects(told)
}

async fn other_body_same_id(judge: &Judge) -> Shown {
    let id = judge.id();
    judge.handled(&id, judge.patience).await?;
    let other = judge.template.with(&id);
    let body = with_member(other.body(), "judge_other", "yes");
    let answer = judge.send(&judge.signed(other.map(|_| body))?).await;
    if answer.status().is_none_or(|status| status.is_server_error()) {
        return fail(format!("the other body is answered {answer}: a sender repeats it"));
    }
    judge.one_effect(&[id], judge.settles()).await?;
    judge.with_effects(format!("the other body is answered {answer}"))
}

/// Sends events with unusual ids: of the first two, both are refused or none, and each that is accepted has an effect.
/// With `is_repeatable`, a repetition has none.
async fn unusual(judge: &Judge, events: Vec<Request<Bytes>>, is_repeatable: bool) -> Shown {
    // A receiver may count an effect under a hash of the id, so all effects are counted.
    let all_effects = async || Ok::<_, Stop>(judge.counts().await?.map(|counts| counts.of("")));
    let before = all_effects().await?;
    let mut answers = Vec::new();
    for event in &events {
        answers.push(accepted(judge, event).await);
    }
    let told: Vec<_> = answers.iter().map(Answer::to_string).collect();
    let told = format!("answered {}", told.join(", "));
    let successes = answers.iter().filter(|answer| answer.is_success()).count() as u64;
    if answers[0].is_success() != answers[1].is_success() {
        return fail(format!("{told}: events of one kind are treated differently"));
    }
    let mut deadline = Instant::now() + judge.settles();
    let mut is_last = !is_repeatable;
    loop {
        sleep(RUNS).await;
        let Some((now, before)) = all_effects().await?.zip(before) else { break };
        let effects = now.saturating_sub(before);
        if successes > effects && Instant::now() < deadline {
            continue;
        }
        if successes != effects {
            return fail(format!("{told}: {effects} effects of {} events", events.len()));
        }
        if is_last {
            break;
        }
        for event in &events {
            judge.send(event).await;
        }
        (is_last, deadline) = (true, Instant::now());
    }
    if let Err(Stop::Fail(why)) = judge.handled(&judge.id(), judge.patience).await {
        return fail(format!("{told}; of an ordinary event after it, {why}"));
    }
    if successes == 0 { Ok(told) } else { judge.with_effects(told) }
}

/// Sends an event; up to three times, if it is refused for the moment.
async fn accepted(judge: &Judge, event: &Request<Bytes>) -> Answer {
    let mut answer = judge.send(event).await;
    for _ in 0..2 {
        let status = answer.status().map(|status| status.as_u16());
        if !matches!(status, Some(425 | 429 | 503)) {
            break;
        }
        sleep(Duration::from_secs(1)).await;
        answer = judge.send(event).await;
    }
    answer
}

async fn id_empty(judge: &Judge) -> Shown {
    let event = |note: &str| {
        let event = judge.template.noted("", note);
        let body = with_member(event.body(), "judge_note", note);
        judge.signed(event.map(|_| body))
    };
    unusual(judge, vec![event(&judge.id())?, event(&judge.id())?], false).await
}

async fn id_long(judge: &Judge) -> Shown {
    let long = "7".repeat(10 * 1024);
    let event = || judge.event(&format!("{long}{}", judge.id()));
    unusual(judge, vec![event()?, event()?], true).await
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
    unusual(judge, events, true).await
}

async fn body_slow(judge: &Judge) -> Shown {
    let id = judge.id();
    let request = judge.event(&id)?;
    let body = request.body();
    let mut steps = vec![Step::Write(wire::head_of(&judge.target, &request))];
    for piece in body.chunks(body.len().div_ceil(4).max(1)) {
        steps.push(Step::Pause(Duration::from_millis(500)));
        steps.push(Step::Write(Bytes::copy_from_slice(piece)));
    }
    let answer = judge.exchange(steps).await;
    then_whole(judge, &id, &answer, "the slow body").await
}

async fn body_chunked(judge: &Judge) -> Shown {
    let id = judge.id();
    let chunks = wire::chunked(&judge.target, &judge.event(&id)?);
    let answer =
        judge.exchange(chunks.into_iter().chain([wire::LAST_CHUNK]).map(Step::Write)).await;
    then_whole(judge, &id, &answer, "the chunked body").await
}

/// Sends the whole event after one whose body came in another way.
async fn then_whole(judge: &Judge, id: &str, answer: &Answer, what: &str) -> Shown {
    let bound = if answer.is_success() { judge.settles() } else { judge.patience };
    let whole = judge.handled(id, bound).await?;
    judge.with_effects(format!("{what} is answered {answer}, then {whole}"))
}

async fn body_broken(judge: &Judge) -> Shown {
    let mut events = Vec::new();
    for way in 0..4 {
        let id = judge.id();
        let request = judge.event(&id)?;
        let half = Step::Write(judge.half(&request));
        let chunks = wire::chunked(&judge.target, &request).into_iter().map(Step::Write);
        let broken = Step::Write(Bytes::from_static(b"no size\r\n"));
        let steps: Vec<_> = match way {
            0 => vec![half, Step::End],
            1 => vec![half, Step::Pause(RUNS / 3), Step::Reset],
            2 => chunks.chain([Step::End]).collect(),
            _ => chunks.take(2).chain([broken, Step::End]).collect(),
        };
        judge.exchange(steps).await;
        events.push((&judge.template, id));
    }
    sleep(RUNS).await;
    judge.all_handled(&events, judge.patience).await?;
    judge.with_effects("each whole event after a broken one is answered 2xx")
}

async fn equal_bytes(judge: &Judge) -> Shown {
    let ids = [judge.id(), judge.id()];
    for id in &ids {
        let event = judge.signed(judge.template.noted(id, "equal bytes"))?;
        let answer = accepted(judge, &event).await;
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

async fn hang_up(judge: &Judge) -> Shown {
    let ordinary = [100, 100, 0, 2, 5, 20, 100].map(Duration::from_millis);
    let ordinary = ordinary.map(|pause| (&judge.template, pause)).into_iter();
    let slow = judge.slow_moments().await?;
    let hung_up = async |(at, (template, pause)): (usize, (&Template, _))| {
        let id = judge.id();
        let request = judge.signed(template.with(&id))?;
        let part = match at {
            0 => wire::head_of(&judge.target, &request),
            1 => judge.half(&request),
            _ => wire::whole(&judge.target, &request),
        };
        judge.exchange([Step::Write(part), Step::Pause(pause), Step::HangUp]).await;
        // At once: the first run may go on.
        judge.retry(template, &id, judge.patience).await.map(|_| id)
    };
    let ids = join_all(ordinary.chain(slow).enumerate().map(hung_up)).await;
    let ids: Vec<_> = ids.into_iter().collect::<Result<_, _>>()?;
    judge.one_effect(&ids, judge.patience).await?;
    judge.with_effects(format!("{} hang-ups, each retry is answered 2xx in the end", ids.len()))
}

async fn late_effects(judge: &Judge) -> Shown {
    let Some(counts) = judge.counts().await? else {
        return unknown("not run: it needs --count or --count-url");
    };
    let ids = judge.settled.borrow();
    let changed = ids.iter().filter(|id| counts.of(id) != 1).count();
    match changed {
        0 => Ok(format!("each of {} events has one effect still", ids.len())),
        _ => {
            fail(format!("{changed} of {} events that had one effect have more or none", ids.len()))
        }
    }
}
