//! [`Judge`]: what every trial needs: deliveries, retries as senders make them, effects.

use std::cell::RefCell;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::Request;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::delivery::{Ids, Signer, Template};
use crate::effects::{Counter, Counts};
use crate::process::Receiver;
use crate::target::Target;
use crate::wire::{self, Answer, Step};

/// How long a receiver may refuse an event that it has handled, and how long an effect may show after it.
const SETTLES: Duration = Duration::from_secs(5);
/// How long a second effect may take to show.
const LATE: Duration = Duration::from_millis(400);
/// After this time, a slow event runs.
pub(crate) const RUNS: Duration = Duration::from_millis(300);
/// The first pause between retries. Pauses double.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Why a trial does not pass.
#[derive(Debug)]
pub(crate) enum Stop {
    Fail(String),
    Unknown(String),
}

/// The evidence of a trial that passes.
pub(crate) type Shown = Result<String, Stop>;

pub(crate) fn fail<T>(evidence: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Fail(evidence.into()))
}

pub(crate) fn unknown<T>(evidence: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Unknown(evidence.into()))
}

/// A failure of the judge's own means says nothing about the receiver.
impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Unknown(error)
    }
}

#[derive(Debug)]
pub(crate) struct Judge {
    pub(crate) target: Target,
    pub(crate) template: Template,
    pub(crate) slow: Option<Template>,
    pub(crate) failing: Option<Template>,
    pub(crate) signer: Option<Signer>,
    pub(crate) counter: Option<Counter>,
    pub(crate) receiver: Option<Mutex<Receiver>>,
    pub(crate) patience: Duration,
    pub(crate) ids: Ids,
    /// The ids that had one effect.
    pub(crate) settled: RefCell<Vec<String>>,
}

/// Returns each text once, with the number of its repetitions.
pub(crate) fn in_rows(texts: &[String]) -> String {
    let row = |row: &[String]| match row.len() {
        1 => row[0].clone(),
        more => format!("{} (×{more})", row[0]),
    };
    texts.chunk_by(|one, other| one == other).map(row).collect::<Vec<_>>().join(", ")
}

impl Judge {
    /// How long the retries of an event that is complete go on.
    pub(crate) fn settles(&self) -> Duration {
        SETTLES.min(self.patience)
    }

    pub(crate) fn id(&self) -> String {
        self.ids.fresh()
    }

    /// Returns the ordinary delivery with this id, signed now.
    pub(crate) fn event(&self, id: &str) -> Result<Request<Bytes>, Stop> {
        self.signed(self.template.with(id))
    }

    pub(crate) fn signed(&self, request: Request<Bytes>) -> Result<Request<Bytes>, Stop> {
        match &self.signer {
            Some(signer) => Ok(signer.sign(request)?),
            None => Ok(request),
        }
    }

    /// Returns the head and half of the body.
    pub(crate) fn half(&self, request: &Request<Bytes>) -> Bytes {
        let whole = wire::whole(&self.target, request);
        whole.slice(..whole.len() - request.body().len().div_ceil(2))
    }

    pub(crate) async fn send(&self, request: &Request<Bytes>) -> Answer {
        self.exchange([Step::Write(wire::whole(&self.target, request))]).await
    }

    pub(crate) async fn exchange(&self, steps: impl IntoIterator<Item = Step>) -> Answer {
        wire::exchange(&self.target, steps.into_iter().collect()).await
    }

    /// Sends an event until a 2xx as senders do: after pauses that double, each time signed anew. Returns the answers, and
    /// whether the last is a 2xx.
    pub(crate) async fn attempts(
        &self,
        template: &Template,
        id: &str,
        bound: Duration,
    ) -> Result<(Vec<String>, bool), Stop> {
        let deadline = Instant::now() + bound;
        let (mut texts, mut pause) = (Vec::new(), FIRST_PAUSE);
        loop {
            let answer = self.send(&self.signed(template.with(id))?).await;
            texts.push(answer.to_string());
            let is_done = answer.is_success();
            if is_done || Instant::now() + pause > deadline {
                return Ok((texts, is_done));
            }
            sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// As [`attempts`](Self::attempts). Fails without a 2xx.
    pub(crate) async fn retry(&self, template: &Template, id: &str, bound: Duration) -> Shown {
        let (texts, is_done) = self.attempts(template, id, bound).await?;
        let told = in_rows(&texts);
        if is_done {
            return Ok(told);
        }
        fail(format!("no repetition is answered 2xx within {} s: {told}", bound.as_secs_f64()))
    }

    /// Sends an ordinary event until a 2xx, and sees its effect. Returns the answers.
    pub(crate) async fn handled(&self, id: &str, bound: Duration) -> Shown {
        let answers = self.retry(&self.template, id, bound).await?;
        self.one_effect(&[id.to_owned()], bound).await?;
        Ok(answers)
    }

    /// As [`handled`](Self::handled), of several events at the same time.
    pub(crate) async fn all_handled(
        &self,
        events: &[(&Template, String)],
        bound: Duration,
    ) -> Result<(), Stop> {
        let all = events.iter().map(|(template, id)| self.retry(template, id, bound));
        join_all(all).await.into_iter().try_for_each(|answers| answers.map(drop))?;
        let ids: Vec<_> = events.iter().map(|(_, id)| id.clone()).collect();
        self.one_effect(&ids, bound).await
    }

    /// Returns moments in the run of the slow event, which it measures: early, late and at the end. The effect may come
    /// first, or the rest of the work.
    pub(crate) async fn slow_moments(&self) -> Result<Vec<(&Template, Duration)>, Stop> {
        let Some(slow) = &self.slow else { return Ok(Vec::new()) };
        let begun = Instant::now();
        self.retry(slow, &self.id(), self.patience).await?;
        let took = begun.elapsed();
        let end = took.saturating_sub(Duration::from_millis(20));
        Ok([RUNS.min(took / 2), took * 3 / 4, end].map(|moment| (slow, moment)).into())
    }

    /// Returns the counts, or `None` if there is no counter. A receiver that has just started may need a moment.
    pub(crate) async fn counts(&self) -> Result<Option<Counts>, Stop> {
        let Some(counter) = &self.counter else { return Ok(None) };
        let deadline = Instant::now() + SETTLES;
        loop {
            match counter.read().await {
                Ok(counts) => return Ok(Some(counts)),
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => sleep(FIRST_PAUSE).await,
            }
        }
    }

    /// Waits until each of these events has an effect, and then whether one gets another.
    pub(crate) async fn one_effect(&self, ids: &[String], bound: Duration) -> Result<(), Stop> {
        // A trial reports what it sees: `late-effects` is about the other events.
        self.settled.borrow_mut().retain(|id| !ids.contains(id));
        let (all, deadline, mut is_last) = (ids.len(), Instant::now() + bound, ids.is_empty());
        while let Some(counts) = self.counts().await? {
            let counts: Vec<_> = ids.iter().map(|id| counts.of(id)).collect();
            let without = counts.iter().filter(|count| **count == 0).count();
            let doubled = counts.iter().filter(|count| **count > 1).count();
            match without {
                _ if doubled > 0 => {
                    let most = counts.iter().max().copied().unwrap_or_default();
                    return fail(format!("{doubled} of {all} events: {most} effects"));
                }
                0 if is_last => break,
                0 => {
                    is_last = true;
                    sleep(LATE).await;
                }
                _ if Instant::now() > deadline => {
                    return fail(format!("{without} of {all} events: answered 2xx, and no effect"));
                }
                _ => sleep(FIRST_PAUSE).await,
            }
        }
        self.settled.borrow_mut().extend_from_slice(ids);
        Ok(())
    }

    /// Fails if the event has an effect.
    pub(crate) async fn no_effect(&self, id: &str, what: &str) -> Result<(), Stop> {
        if self.counter.is_some() {
            sleep(LATE).await;
        }
        match self.counts().await? {
            Some(counts) if counts.of(id) > 0 => fail(format!("{what} takes effect")),
            _ => Ok(()),
        }
    }

    /// Passes if the effects were seen, too.
    pub(crate) fn with_effects(&self, evidence: impl Into<String>) -> Shown {
        let evidence = evidence.into();
        match self.counter {
            Some(_) => Ok(evidence),
            None => unknown(format!("{evidence}; effects not seen: give --count")),
        }
    }
}
