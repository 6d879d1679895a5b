//! The calls of a layer: one script for each key.
//!
//! 1. The keys of a call go to their primaries at the same time, 64 at once: each key stands alone.
//! 2. A claim inserts a row. A free row it takes by a second message, which names the version that it has read.
//!    So a claim that arrives after its release finds another version, and changes nothing. `forget` writes in
//!    the same way.
//! 3. After an error of one key, a claim sends no further key, and waits for the calls under way. The other
//!    operations send every key. The outcome of the call is unknown if the outcome of any key is, or if any
//!    key has its reply.

use std::future::Future;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::Value;

use super::super::replies::{Claimed, Completed, Forgotten, Renewed, Seen};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Permanence};
use super::adapter::Shared;
use super::connections::Bound;
use super::script::{self, Script, ScriptCall};
use super::value::{Data, Row, data_sections, event_type_section};
use crate::error::{Error, ErrorKind};
use crate::key::DedupKey;

const CLAIMING: &str = "claiming keys";
const RELEASING: &str = "releasing keys";
const RENEWING: &str = "renewing leases";
const COMPLETING: &str = "completing keys";
const FORGETTING: &str = "forgetting a key";

/// How many keys of one call are sent at once.
const MAX_CONCURRENT: usize = 64;
/// How many versions a call names for one key, if the row changes each time.
const MOST_VERSIONS: usize = 5;

impl Shared {
    pub(super) async fn claim(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Claimed>, Error> {
        all(keys.iter().map(|key| self.claim_one(key, terms)).collect(), AfterError::Stop).await
    }

    async fn claim_one(&self, key: &DedupKey, terms: &CallTerms) -> Result<Claimed, Error> {
        let (lease, stored) = match terms.permanence() {
            Permanence::OnClaim => (String::new(), terms.stored_data_for(key)),
            Permanence::OnCompletion { .. } => (terms.lease_ms().to_string(), None),
        };
        let (flags, sections) = data_sections(stored.as_ref())?;
        let fetch = match terms.fetch() {
            Fetch::Nothing => 0,
            Fetch::Digest => 1,
            Fetch::DigestAndResponse => 2,
        };
        let bound = self.connections.bound();
        let reply = self.at_version(CLAIMING, MOST_VERSIONS, |version| {
            let call = self
                .call(&script::CLAIM, key)
                .arg(terms.token().as_bytes())
                .arg(terms.retention_ms())
                .arg(&lease)
                .arg(fetch)
                .arg(event_type_section(terms.event_type_for(key)))
                .arg(flags)
                .arg(&sections)
                .arg(version);
            async move { self.connections.run(&call, CLAIMING, bound).await }
        });
        let mut claimed = reply.await.and_then(|reply| claimed(&reply, terms.fetch()));
        if claimed.as_ref().is_err_and(|error| error.kind() == ErrorKind::Full)
            && let Some(duplicate) = self.duplicate(key, terms, bound).await
        {
            claimed = Ok(duplicate);
        }
        let may_be_duplicate = match &claimed {
            Ok(claimed) => matches!(claimed, Claimed::Duplicate(_)),
            Err(error) => error.kind() == ErrorKind::Corrupt,
        };
        if may_be_duplicate {
            // Another key of the call may fail, and no handler may run for a known duplicate.
            terms.note_duplicate();
        }
        claimed
    }

    /// Returns the reply to a claim that a full server has refused before it looked, if the key is complete.
    async fn duplicate(&self, key: &DedupKey, terms: &CallTerms, bound: Bound) -> Option<Claimed> {
        let (now, value) = self.value(key, bound).await.ok()??;
        let row = Row::read(&value)?;
        // A row of this token is that of a claim whose reply was lost.
        if row.token() == terms.token().as_bytes() {
            return None;
        }
        row.duplicate(now, terms.fetch()).map(Claimed::Duplicate)
    }

    pub(super) async fn release(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<()>, Error> {
        all(keys.iter().map(|key| self.release_one(key, terms)).collect(), AfterError::GoOn).await
    }

    async fn release_one(&self, key: &DedupKey, terms: &CallTerms) -> Result<(), Error> {
        let on_claim = terms.permanence() == Permanence::OnClaim;
        let call =
            self.call(&script::RELEASE, key).arg(terms.token().as_bytes()).arg(u8::from(on_claim));
        let reply = self.run(&call, RELEASING).await;
        let released = reply.and_then(|reply| Reply::read(reply, RELEASING).map(drop));
        match released {
            // This token has not claimed an unreadable value. An error would be repeated for minutes.
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(()),
            released => released,
        }
    }

    pub(super) async fn renew(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Renewed>, Error> {
        all(keys.iter().map(|key| self.renew_one(key, terms)).collect(), AfterError::GoOn).await
    }

    async fn renew_one(&self, key: &DedupKey, terms: &CallTerms) -> Result<Renewed, Error> {
        let call = self
            .call(&script::RENEW, key)
            .arg(terms.token().as_bytes())
            .arg(terms.retention_ms())
            .arg(terms.lease_ms())
            .arg(event_type_section(terms.event_type_for(key)));
        let reply = Reply::read(self.run(&call, RENEWING).await?, RENEWING)?;
        reply.one_of(&[Renewed::Held, Renewed::Lost])
    }

    pub(super) async fn complete(
        &self,
        keys: &[DedupKey],
        terms: &CallTerms,
    ) -> Result<Vec<Completed>, Error> {
        all(keys.iter().map(|key| self.complete_one(key, terms)).collect(), AfterError::GoOn).await
    }

    async fn complete_one(&self, key: &DedupKey, terms: &CallTerms) -> Result<Completed, Error> {
        let (flags, sections) = data_sections(terms.stored_data_for(key).as_ref())?;
        let call = self
            .call(&script::COMPLETE, key)
            .arg(terms.token().as_bytes())
            .arg(terms.retention_ms())
            .arg(event_type_section(terms.event_type_for(key)))
            .arg(flags)
            .arg(sections);
        let reply = Reply::read(self.run(&call, COMPLETING).await?, COMPLETING)?;
        reply.one_of(&[Completed::Held, Completed::LeaseLost, Completed::Inserted])
    }

    pub(super) async fn forget(&self, key: &DedupKey) -> Result<Forgotten, Error> {
        // The client of a cluster repeats a command by itself. So a row that has changed since it was read may have
        // changed by this call, and what is there now is a later delivery's.
        let most = if self.connections.repeats_commands() { 1 } else { MOST_VERSIONS };
        let bound = self.connections.bound();
        let reply = self.at_version(FORGETTING, most, |version| {
            let call = self.call(&script::FORGET, key).arg(version);
            async move {
                match version {
                    // Without a version, it only reads.
                    None => self.connections.read(&call, FORGETTING, bound).await,
                    Some(_) => {
                        let once = Bound { is_once: true, ..bound };
                        self.connections.run(&call, FORGETTING, once).await
                    }
                }
            }
        });
        reply.await?.one_of(&[Forgotten::Removed, Forgotten::Missing, Forgotten::InFlight])
    }

    async fn run(&self, call: &ScriptCall, context: &'static str) -> Result<Value, Error> {
        self.connections.run(call, context, self.connections.bound()).await
    }

    /// Sends a call that names no version, then the version of each reply that names one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the row changes each time.
    async fn at_version<F>(
        &self,
        context: &'static str,
        most_versions: usize,
        send: impl Fn(Option<i64>) -> F,
    ) -> Result<Reply, Error>
    where
        F: Future<Output = Result<Value, Error>>,
    {
        let mut reply = Reply::read(send(None).await?, context)?;
        for _ in 0..most_versions {
            let Some(version) = reply.version()? else { return Ok(reply) };
            reply = Reply::read(send(Some(version)).await?, context)?;
        }
        match reply.version()? {
            None => Ok(reply),
            Some(_) => Err(Error::new(ErrorKind::Unavailable, context)
                .with_source("the row has changed before each write")),
        }
    }

    pub(super) fn call(&self, script: &'static Script, key: &DedupKey) -> ScriptCall {
        ScriptCall::new(script, self.names.name(key))
    }
}

/// What happens after the error of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterError {
    /// No further key is sent: each key that is claimed now must be released later.
    Stop,
    /// The other keys are sent: a repetition would meet the same error first.
    GoOn,
}

/// Waits for the calls of several keys: rules 1 and 3. Returns their replies in the same order.
pub(super) async fn all<T, F: Future<Output = Result<T, Error>>>(
    calls: Vec<F>,
    after_error: AfterError,
) -> Result<Vec<T>, Error> {
    let mut replies: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    let mut waiting = calls.into_iter().enumerate();
    let mut running = FuturesUnordered::new();
    let mut failed: Option<Error> = None;
    loop {
        while (failed.is_none() || after_error == AfterError::GoOn)
            && running.len() < MAX_CONCURRENT
            && let Some((place, call)) = waiting.next()
        {
            running.push(async move { (place, call.await) });
        }
        match running.next().await {
            Some((place, Ok(reply))) => replies[place] = Some(reply),
            Some((_, Err(error))) => failed = Some(more_uncertain(failed, error)),
            None => break,
        }
    }
    match failed {
        Some(error) if replies.iter().any(Option::is_some) => Err(error.with_unknown_outcome()),
        Some(error) => Err(error),
        None => Ok(replies.into_iter().flatten().collect()),
    }
}

/// Returns the error after which less is known. After unreadable data the store executes nothing later.
fn more_uncertain(one: Option<Error>, other: Error) -> Error {
    let rank = |error: &Error| (error.is_unknown(), error.kind() != ErrorKind::Corrupt);
    match one {
        Some(one) if rank(&one) >= rank(&other) => one,
        _ => other,
    }
}

/// The reply of a script: integers, the first of which names the case, and bytes of stored data.
struct Reply {
    values: Vec<Value>,
    case: usize,
    context: &'static str,
}

impl Reply {
    /// # Errors
    ///
    /// [`ErrorKind::Corrupt`] for the reply of a script that cannot read the value, and for a reply of no
    /// script of this version.
    fn read(reply: Value, context: &'static str) -> Result<Self, Error> {
        let Value::Array(values) = reply else { return Err(unreadable(context)) };
        match values.first() {
            Some(Value::Int(case @ 0..=3)) => {
                let case = usize::try_from(*case).map_err(|_| unreadable(context))?;
                Ok(Self { values, case, context })
            }
            _ => Err(unreadable(context)),
        }
    }

    fn one_of<T: Copy>(&self, replies: &[T]) -> Result<T, Error> {
        replies.get(self.case).copied().ok_or_else(|| unreadable(self.context))
    }

    /// Returns the version of the row, if the call must name it.
    fn version(&self) -> Result<Option<i64>, Error> {
        (self.case == 3).then(|| self.number(1)).transpose()
    }

    fn number<T: TryFrom<i64>>(&self, place: usize) -> Result<T, Error> {
        match self.values.get(place) {
            Some(Value::Int(number)) => T::try_from(*number).map_err(|_| unreadable(self.context)),
            _ => Err(unreadable(self.context)),
        }
    }
}

fn claimed(reply: &Reply, fetch: Fetch) -> Result<Claimed, Error> {
    Ok(match reply.case {
        0 => Claimed::First { attempt: reply.number(1)?, takeover: reply.number::<u8>(2)? != 0 },
        1 => {
            let seen = Seen::new(Duration::from_millis(reply.number(1)?));
            if fetch == Fetch::Nothing {
                return Ok(Claimed::Duplicate(seen));
            }
            let flags = reply.number(2)?;
            let data = match reply.values.get(3) {
                Some(Value::BulkString(sections)) => Data::from_reply(flags, sections),
                _ => None,
            };
            let data = data.ok_or_else(|| unreadable(CLAIMING))?;
            let stored = data.stored(fetch == Fetch::DigestAndResponse)?;
            Claimed::Duplicate(seen.with_stored(stored.into()))
        }
        2 => Claimed::InFlight,
        _ => return Err(unreadable(CLAIMING)),
    })
}

pub(super) fn unreadable(context: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, context)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn calls_run_together_up_to_a_bound_and_reply_in_order() {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let call = async |place: usize| {
            let now = running.fetch_add(1, Ordering::Relaxed) + 1;
            most.fetch_max(now, Ordering::Relaxed);
            for _ in 0..place % 7 {
                tokio::task::yield_now().await;
            }
            running.fetch_sub(1, Ordering::Relaxed);
            Ok(place)
        };
        let replies = all((0..500).map(call).collect(), AfterError::Stop).await.unwrap();
        assert_eq!(replies, (0..500).collect::<Vec<_>>());
        assert_eq!(most.into_inner(), MAX_CONCURRENT);
        assert_eq!(
            all(Vec::<std::future::Ready<Result<(), Error>>>::new(), AfterError::Stop)
                .await
                .unwrap(),
            []
        );
    }

    #[tokio::test]
    async fn error_of_a_key_says_what_is_known_of_all() {
        use ErrorKind::{Corrupt, Full, Refused, Timeout, Unavailable};
        let sent = AtomicUsize::new(0);
        let call = async |reply: Result<(), ErrorKind>| {
            sent.fetch_add(1, Ordering::Relaxed);
            reply.map_err(|kind| Error::new(kind, CLAIMING))
        };
        let cases = [
            (vec![Err(Refused)], Refused),
            (vec![Err(Full), Err(Full)], Full),
            // One key was claimed.
            (vec![Ok(()), Err(Refused)], Unavailable),
            (vec![Err(Refused), Err(Timeout)], Timeout),
            (vec![Err(Timeout), Err(Refused)], Timeout),
            (vec![Err(Corrupt), Err(Refused), Ok(())], Corrupt),
            (vec![Err(Corrupt), Err(Timeout)], Timeout),
        ];
        for (replies, expected) in cases {
            let error = all(replies.iter().copied().map(call).collect(), AfterError::Stop)
                .await
                .unwrap_err();
            assert_eq!(error.kind(), expected, "{replies:?}");
        }
        // The rest is not sent.
        sent.store(0, Ordering::Relaxed);
        let refused = || vec![Err(Refused); 500].into_iter().map(call).collect();
        all(refused(), AfterError::Stop).await.unwrap_err();
        assert_eq!(sent.swap(0, Ordering::Relaxed), MAX_CONCURRENT);
        all(refused(), AfterError::GoOn).await.unwrap_err();
        assert_eq!(sent.into_inner(), 500);
    }

    #[test]
    fn reply_of_another_shape_is_corrupt() {
        let array = Value::Array;
        for reply in [
            Value::Nil,
            Value::Int(0),
            Value::Okay,
            array(Vec::new()),
            array(vec![Value::Int(-1)]),
            array(vec![Value::Int(3)]),
            array(vec![Value::Int(4)]),
            array(vec![Value::Nil]),
            array(vec![Value::Int(0)]),
            array(vec![Value::Int(0), Value::Int(-1), Value::Int(0), Value::Int(0)]),
            array(vec![Value::Int(1)]),
            array(vec![Value::Int(1), Value::Int(-1)]),
            array(vec![Value::Int(1), Value::Int(1), Value::Int(0x20), Value::Nil]),
            array(vec![
                Value::Int(1),
                Value::Int(1),
                Value::Int(0x20),
                Value::BulkString(vec![0; 31]),
            ]),
        ] {
            let claimed = Reply::read(reply.clone(), CLAIMING)
                .and_then(|reply| claimed(&reply, Fetch::DigestAndResponse));
            assert_eq!(claimed.unwrap_err().kind(), ErrorKind::Corrupt, "{reply:?}");
        }
    }
}
