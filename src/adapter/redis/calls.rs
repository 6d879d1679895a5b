//! The calls of a layer: one script for one key.
//!
//! A claim inserts a row. A free row it takes by a second message, which names the version that it has read. So
//! a claim that arrives after its release finds another version, and changes nothing. `forget` writes in the
//! same way.

use std::future::Future;
use std::time::Duration;

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

/// How many versions a call names for one key, if the row changes each time.
const MOST_VERSIONS: usize = 5;

impl Shared {
    pub(super) async fn claim(&self, key: &DedupKey, terms: &CallTerms) -> Result<Claimed, Error> {
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
            // The call may still fail, and no handler may run for a known duplicate.
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

    pub(super) async fn release(&self, key: &DedupKey, terms: &CallTerms) -> Result<(), Error> {
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

    pub(super) async fn renew(&self, key: &DedupKey, terms: &CallTerms) -> Result<Renewed, Error> {
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
        key: &DedupKey,
        terms: &CallTerms,
    ) -> Result<Completed, Error> {
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
    use super::*;

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
