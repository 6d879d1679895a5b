//! [`RedisAdapter`]: how it is made, and its calls: one script for one key. A free row is taken by
//! a second message, which names the version that the first one has read. `forget` writes in the
//! same way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, Value};

use super::super::contract::{Abilities, DedupAdapter, StoreFuture};
use super::super::maintenance::ForgetReply;
use super::super::replies::{ClaimReply, CompleteReply, RenewReply, Seen};
use super::super::stored::Fetch;
use super::super::terms::{CallTerms, Permanence};
use super::client::RedisClient;
use super::errors::Failure;
use super::key_names;
use super::options::RedisOptions;
use super::row::{RedisRow, stored_data};
use super::script::{self, Script, ScriptCall};
use super::slot::{Bound, Live, Slot};
use super::url::Endpoint;
use crate::error::{StoreError, StoreErrorKind};
use crate::key::DedupKey;

/// How many versions a call names for one key, if the row changes each time.
const MOST_VERSIONS: usize = 5;

/// Keeps keys in Redis or Valkey: one server, Sentinel, or Cluster.
///
/// ```no_run
/// # async fn example() -> Result<(), tower_dedup::StoreError> {
/// use tower_dedup::adapter::RedisAdapter;
/// use tower_dedup::{DedupLayer, provider};
///
/// let store = RedisAdapter::connect("redis://127.0.0.1").await?;
/// let dedup = DedupLayer::new(provider::STRIPE, store);
/// # let _ = dedup;
/// # Ok(())
/// # }
/// ```
///
/// A clone is another handle to the same connections and the same state.
///
#[doc = include_str!("../../docs/stores/redis.md")]
#[derive(Clone)]
pub struct RedisAdapter(pub(super) Arc<Slot>);

impl RedisAdapter {
    /// Connects to the server, the Sentinels or the cluster that a URL names.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config), with a
    /// [`ConfigError`](crate::ConfigError) as its source, for a URL that cannot be read, and for a
    /// server that evicts keys, is older than version 6.0, or is of another kind than the URL says.
    /// [`StoreErrorKind::Unavailable`](crate::StoreErrorKind::Unavailable) or
    /// [`StoreErrorKind::Timeout`](crate::StoreErrorKind::Timeout) if the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::connect_with(url, RedisOptions::new()).await
    }

    /// Connects with these options.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect), and
    /// [`StoreErrorKind::Config`](crate::StoreErrorKind::Config) for an option that is not valid.
    pub async fn connect_with(url: &str, options: RedisOptions) -> Result<Self, StoreError> {
        let mut endpoint = Endpoint::read(url)?;
        let prefix = endpoint.prefix.take();
        let options = RedisOptions { prefix: prefix.unwrap_or(options.prefix), ..options };
        let adapter = Self::with_options(RedisClient::of_url(endpoint)?, options.checked()?);
        // Tries once.
        match adapter.0.live(true).await {
            Ok(_) => Ok(adapter),
            Err(Failure::Unfit(fault)) => Err(fault.into()),
            Err(failure) => Err(failure.into_error("connecting to Redis")),
        }
    }

    /// Returns an adapter over your own client: a `redis::Client`, a `SentinelClient` or a
    /// `ClusterClient`.
    ///
    /// The first call connects. A server that may not be used refuses every call with
    /// [`StoreErrorKind::Refused`](crate::StoreErrorKind::Refused).
    #[must_use]
    pub fn new(client: impl Into<RedisClient>) -> Self {
        Self(Slot::new(client.into(), RedisOptions::new()))
    }

    /// Returns an adapter over your own client, with these options. An invalid option is the error
    /// ([`StoreErrorKind::Config`](crate::StoreErrorKind::Config)) of every call.
    #[must_use]
    pub fn with_options(client: impl Into<RedisClient>, options: RedisOptions) -> Self {
        Self(Slot::new(client.into(), options))
    }

    /// Sends a command without a key to every primary. Returns the address and the reply of each.
    ///
    /// # Errors
    ///
    /// The errors of the connection to any primary. A refusal is a reply.
    pub(crate) async fn ask_primaries(
        &self,
        command: &Cmd,
        context: &'static str,
    ) -> Result<Vec<(String, Result<Value, StoreError>)>, StoreError> {
        let send = |live: Arc<Live>| async move { Ok(live.main.ask_all(command).await?) };
        let replies = self.0.repeat(self.0.bound(context), send).await?.into_iter();
        let error = |error| Failure::from(error).into_error(context);
        Ok(replies.map(|(address, reply)| (address, reply.map_err(error))).collect())
    }

    /// Makes a row a fence row: see
    /// [`MaintenanceAdapter::forget`](super::super::maintenance::MaintenanceAdapter::forget).
    pub(super) async fn forget_key(&self, key: &DedupKey) -> Result<ForgetReply, StoreError> {
        // The client of a cluster repeats a command by itself. So a row that has changed since it
        // was read may have changed by this call, and what is there now is a later delivery's.
        let most = if self.0.client.is_cluster() { 1 } else { MOST_VERSIONS };
        let bound = Bound { is_once: true, ..self.0.bound("forgetting a key") };
        let reply = self.at_version(&self.call(&script::FORGET, key), bound, most).await?;
        reply.one_of(&[ForgetReply::Removed, ForgetReply::Missing, ForgetReply::InFlight])
    }

    /// Reads a key of Redis, with its stored data or without.
    pub(super) async fn row(
        &self,
        name: &str,
        fetch: Fetch,
        bound: Bound,
    ) -> Result<Option<RedisRow>, StoreError> {
        let call = ScriptCall::new(&script::GET, name).arg(fetched(fetch));
        let reply = self.reply(&call, bound).await?;
        if reply.case == 0 {
            return Ok(None);
        }
        RedisRow::read(reply.values()?).ok_or_else(|| unreadable(bound.context)).map(Some)
    }

    /// Sends a call that names no version, then the version of each reply that names one. Without a
    /// version, the call may be sent again in any case, because it changes no row that is there.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Unavailable`] if the row changes each time.
    async fn at_version(
        &self,
        call: &ScriptCall,
        bound: Bound,
        most_versions: usize,
    ) -> Result<ScriptReply, StoreError> {
        let mut named = None;
        for _ in 0..=most_versions {
            let bound = Bound { is_once: bound.is_once && named.is_some(), ..bound };
            let reply = self.reply(named.as_ref().unwrap_or(call), bound).await?;
            if reply.case != 3 {
                return Ok(reply);
            }
            let (version,): (i64,) = reply.values()?;
            named = Some(call.clone().arg(version));
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, bound.context)
            .with_source("the row has changed before each write"))
    }

    async fn reply(&self, call: &ScriptCall, bound: Bound) -> Result<ScriptReply, StoreError> {
        ScriptReply::read(self.0.run(call, bound).await?, bound.context)
    }

    /// Returns a call with the token, the retention and the event type.
    fn call_for(&self, script: &'static Script, key: &DedupKey, terms: &CallTerms) -> ScriptCall {
        let call = self.call(script, key).arg(terms.token().as_bytes()).arg(terms.retention_ms());
        call.arg(terms.event_type().unwrap_or_default())
    }

    fn call(&self, script: &'static Script, key: &DedupKey) -> ScriptCall {
        ScriptCall::new(script, &self.name(key))
    }

    /// Returns the key of Redis for an event.
    pub(super) fn name(&self, key: &DedupKey) -> String {
        key_names::name(&self.0.options.prefix, key)
    }
}

impl fmt::Debug for RedisAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAdapter").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl DedupAdapter for RedisAdapter {
    fn abilities(&self) -> Abilities {
        Abilities {
            leases: true,
            stored_data: true,
            inspection: true,
            expires_keys: true,
            ..Abilities::default()
        }
    }

    fn claim<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ClaimReply> {
        Box::pin(async move {
            let (lease, stored) = match terms.permanence() {
                Permanence::OnClaim => (String::new(), Some(terms)),
                Permanence::OnCompletion { .. } => (terms.lease_ms().to_string(), None),
            };
            let call = self.call_for(&script::CLAIM, key, terms);
            let call = with_data(call, stored).arg(lease).arg(fetched(terms.fetch()));
            let call = match terms.handled_at_ms() {
                Some(time) => call.arg(time),
                None => call.arg(""),
            };
            let bound = self.0.bound("claiming keys");
            let reply = self.at_version(&call, bound, MOST_VERSIONS).await;
            let mut claimed = reply.and_then(|reply| claimed(reply, terms.fetch()));
            // The client of a cluster repeats a call by itself: the first attempt may have claimed
            // the key.
            if let Err(error) = &claimed
                && error.kind() == StoreErrorKind::Refused
                && self.0.client.is_cluster()
            {
                let unknown = StoreError::new(StoreErrorKind::Unavailable, bound.context);
                claimed = claimed.map_err(|error| unknown.with_source(error));
            }
            let may_be_duplicate = match &claimed {
                Ok(claimed) => matches!(claimed, ClaimReply::Duplicate(_)),
                Err(error) => error.kind() == StoreErrorKind::Corrupt,
            };
            if may_be_duplicate {
                // The call may still fail, and no handler may run for a known duplicate.
                terms.note_duplicate();
            }
            claimed
        })
    }

    fn release<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let on_claim = terms.permanence() == Permanence::OnClaim;
            let call = self.call(&script::RELEASE, key).arg(terms.token().as_bytes());
            let bound = self.0.bound("releasing keys");
            match self.0.run(&call.arg(u8::from(on_claim)), bound).await {
                // This token has not claimed a value of another program. An error would be repeated
                // for minutes.
                Err(error) if error.kind() == StoreErrorKind::Corrupt => Ok(()),
                // After a reply of another shape, the release has not returned.
                reply => match ScriptReply::read(reply?, bound.context)?.case {
                    0 | 1 | UNREADABLE => Ok(()),
                    _ => Err(unreadable(bound.context)),
                },
            }
        })
    }

    fn renew<'a>(&'a self, key: &'a DedupKey, terms: &'a CallTerms) -> StoreFuture<'a, RenewReply> {
        Box::pin(async move {
            let call = self.call_for(&script::RENEW, key, terms).arg(terms.lease_ms());
            let reply = self.reply(&call, self.0.bound("renewing leases")).await?;
            reply.one_of(&[RenewReply::Held, RenewReply::Lost])
        })
    }

    fn complete<'a>(
        &'a self,
        key: &'a DedupKey,
        terms: &'a CallTerms,
    ) -> StoreFuture<'a, CompleteReply> {
        Box::pin(async move {
            let call = with_data(self.call_for(&script::COMPLETE, key, terms), Some(terms));
            let reply = self.reply(&call, self.0.bound("completing keys")).await?;
            reply.one_of(&[CompleteReply::Held, CompleteReply::LeaseLost, CompleteReply::Inserted])
        })
    }
}

/// Adds the data to store: the digest, and the status, the headers and the body of the response.
fn with_data(call: ScriptCall, stored: Option<&CallTerms>) -> ScriptCall {
    let digest = stored.and_then(CallTerms::payload_sha256);
    let call = call.arg(digest.as_ref().map_or(&[][..], |digest| digest));
    match stored.and_then(CallTerms::response) {
        Some(it) => call.arg(it.status.as_u16()).arg(it.headers_json()).arg(&it.body[..]),
        None => call.arg("").arg("").arg(""),
    }
}

fn fetched(fetch: Fetch) -> u8 {
    match fetch {
        Fetch::Nothing => 0,
        Fetch::Digest => 1,
        Fetch::DigestAndResponse => 2,
    }
}

/// The case of a script that cannot read the value.
const UNREADABLE: i64 = -1;

/// The reply of a script: a number that names the case, and the values of the case.
struct ScriptReply {
    case: i64,
    values: Value,
    context: &'static str,
}

impl ScriptReply {
    /// # Errors
    ///
    /// [`StoreErrorKind::Corrupt`] for a reply of no script of this version.
    fn read(reply: Value, context: &'static str) -> Result<Self, StoreError> {
        let mut values = match reply {
            Value::Array(values) if !values.is_empty() => values,
            _ => return Err(unreadable(context)),
        };
        let case = redis::from_redis_value(values.remove(0)).map_err(|_| unreadable(context))?;
        Ok(Self { case, values: Value::Array(values), context })
    }

    fn one_of<T: Copy>(&self, replies: &[T]) -> Result<T, StoreError> {
        let case = usize::try_from(self.case).ok();
        case.and_then(|case| replies.get(case)).copied().ok_or_else(|| unreadable(self.context))
    }

    fn values<T: FromRedisValue>(self) -> Result<T, StoreError> {
        redis::from_redis_value(self.values).map_err(|_| unreadable(self.context))
    }
}

fn claimed(reply: ScriptReply, fetch: Fetch) -> Result<ClaimReply, StoreError> {
    let seen = |age| Seen::new(Duration::from_millis(age));
    match reply.case {
        0 => reply.values().map(|(attempt, takeover)| ClaimReply::first(attempt, takeover)),
        1 if fetch == Fetch::Nothing => {
            reply.values().map(|(age,)| ClaimReply::Duplicate(seen(age)))
        }
        1 => {
            let (age, stored) = reply.values()?;
            Ok(ClaimReply::Duplicate(seen(age).with_stored(stored_data(stored)?.into())))
        }
        2 => Ok(ClaimReply::InFlight),
        _ => Err(unreadable(reply.context)),
    }
}

pub(super) fn unreadable(context: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, context)
}
