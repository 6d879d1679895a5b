//! [`Judge`]: what every trial needs: deliveries, retries as senders make them, effects.

use std::cell::{Cell, RefCell};
use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::Request;
use tokio::time::{Instant, sleep};

use crate::delivery::{Ids, Signer, Template};
use crate::effects::{Counter, Counts};
use crate::process::Receiver;
use crate::target::Target;
use crate::wire::{self, Answer, Connection};

/// How long a receiver may refuse an event that it has handled, and how long an effect may show after it; longer, if the
/// first effect needs longer.
const SETTLES: Duration = Duration::from_secs(5);
/// How long a second effect may take to show.
pub(crate) const LATE: Duration = Duration::from_millis(400);
/// After this time, a slow event runs.
pub(crate) const RUNS: Duration = Duration::from_millis(300);
/// How long the receiver may be unreachable between two trials, and how long the first event may be refused: whoever made
/// a mistake in the options waits for it.
const FIRST: Duration = Duration::from_secs(10);
/// The first pause between retries. Pauses double.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The evidence of a trial that passes.
pub(crate) type Shown = Result<String, Stop>;

/// Why a trial does not pass.
#[derive(Debug)]
pub(crate) enum Stop {
    Fail(String),
    /// The evidence does not suffice.
    Unknown(String),
    /// As `Unknown`, because the judge could not do its work: the exit code is 2.
    Cut(String),
}

pub(crate) fn fail<T>(evidence: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Fail(evidence.into()))
}

pub(crate) fn unknown<T>(evidence: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Unknown(evidence.into()))
}

/// A failure of the judge's own means says nothing about the receiver.
impl From<String> for Stop {
    fn from(error: String) -> Self {
        Self::Cut(error)
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
    pub(crate) receiver: Option<Receiver>,
    pub(crate) patience: Duration,
    pub(crate) ids: Ids,
    /// How long the first event took to have its effect.
    pub(crate) first_effect: Cell<Duration>,
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
    /// Starts the receiver, and sees that it handles an ordinary event.
    pub(crate) async fn begin(&self) -> Result<(), Stop> {
        if let Some(receiver) = &self.receiver {
            if self.target.connect().await.is_ok() {
                return unknown("something listens there already: --start starts the receiver");
            }
            receiver.start().await?;
        }
        let id = self.id();
        self.retry(&self.template, &id, FIRST).await?;
        let answered = Instant::now();
        self.one_effect(&[id], self.patience).await?;
        self.first_effect.set(answered.elapsed());
        Ok(())
    }

    /// Sees that the receiver listens, which may have died in the trial before: starts it again, or gives whoever started
    /// it the time.
    pub(crate) async fn ready(&self) -> Result<(), Stop> {
        let deadline = Instant::now() + FIRST;
        while let Err(error) = self.target.connect().await {
            match &self.receiver {
                Some(receiver) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return Ok(receiver.restart().await?);
                }
                _ if Instant::now() > deadline => {
                    return Err(Stop::Cut(format!("the receiver is not reached ({error})")));
                }
                _ => sleep(FIRST_PAUSE).await,
            }
        }
        Ok(())
    }

    pub(crate) fn receiver(&self) -> Result<&Receiver, Stop> {
        self.receiver.as_ref().map_or_else(|| unknown("not run: it needs --start CMD"), Ok)
    }

    pub(crate) fn signer(&self) -> Result<&Signer, Stop> {
        let needs = "not run: it needs --sender and --secret-env";
        self.signer.as_ref().map_or_else(|| unknown(needs), Ok)
    }

    /// How long the retries of an event that is complete go on.
    pub(crate) fn settles(&self) -> Duration {
        SETTLES.max(3 * self.first_effect.get()).min(self.patience)
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

    /// Connects, and writes the head and half of the body.
    pub(crate) async fn open_half(&self, request: &Request<Bytes>) -> Connection {
        let whole = wire::whole(&self.target, request);
        let half = whole.len() - request.body().len().div_ceil(2);
        self.open(&whole[..half]).await
    }

    /// Connects, and writes these bytes.
    pub(crate) async fn open(&self, part: &[u8]) -> Connection {
        Connection::open(&self.target, part).await
    }

    pub(crate) async fn send(&self, request: &Request<Bytes>) -> Answer {
        self.open(&wire::whole(&self.target, request)).await.answer().await
    }

    /// Sends a request, and again for two seconds while it is refused for the moment or not answered.
    pub(crate) async fn send_patiently(&self, request: &Request<Bytes>) -> Answer {
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            let answer = self.send(request).await;
            if !answer.is_momentary() || Instant::now() > deadline {
                return answer;
            }
            sleep(LATE).await;
        }
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

    /// As [`handled`](Self::handled), of several events at the same time, for as long as [`patience`](Self::patience).
    pub(crate) async fn all_handled(&self, events: &[(&Template, String)]) -> Result<(), Stop> {
        let all = events.iter().map(|(template, id)| self.retry(template, id, self.patience));
        join_all(all).await.into_iter().try_for_each(|answers| answers.map(drop))?;
        let ids: Vec<_> = events.iter().map(|(_, id)| id.clone()).collect();
        self.one_effect(&ids, self.patience).await
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

    /// Returns the effects of an event.
    pub(crate) async fn effects(&self, id: &str) -> Result<Option<u64>, Stop> {
        Ok(self.counts().await?.map(|counts| counts.of(id)))
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

    /// Passes if the effects were seen, too.
    pub(crate) fn with_effects(&self, evidence: impl Into<String>) -> Shown {
        let evidence = evidence.into();
        match self.counter {
            Some(_) => Ok(evidence),
            None => unknown(format!("{evidence}; effects not seen: give --count")),
        }
    }
}
