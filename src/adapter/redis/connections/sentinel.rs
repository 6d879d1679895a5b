//! [`Sentinel`]: the master that the Sentinels name.
//!
//! All Sentinels are asked, and the master is the one that most of them name: a Sentinel that is cut off with
//! an old master names that one for as long as it is cut off.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisConnectionInfo, RedisError};
use tokio::time::timeout;

use super::super::options::RedisOptions;
use super::super::url::{Address, Endpoint};
use super::failure::Failure;
use super::fitness::ServerInfo;
use super::target::{Timeouts, client, connect};
use crate::error::Error;

/// How long the Sentinels may take to name the master. A silent one costs this much of the call's time, if the
/// others do not agree.
const SENTINEL: Duration = Duration::from_millis(250);

/// The Sentinels of one master.
pub(super) struct Sentinel {
    sentinels: Vec<(Address, Client)>,
    /// The master of the last connection.
    current: Mutex<Option<Address>>,
    master: String,
    tls: bool,
    redis: RedisConnectionInfo,
    options: RedisOptions,
}

impl Sentinel {
    pub(super) fn new(
        endpoint: &Endpoint,
        redis: RedisConnectionInfo,
        options: &RedisOptions,
    ) -> Result<Self, Error> {
        let mut own = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(password) = &options.sentinel_password {
            own = own.set_password(String::from_utf8_lossy(&password.0));
            if let Some(name) = &options.sentinel_username {
                own = own.set_username(name);
            }
        }
        let sentinels = endpoint.addresses.iter().map(|address| {
            let client = client(address, endpoint.tls, own.clone(), options)?;
            Ok((address.clone(), client))
        });
        Ok(Self {
            sentinels: sentinels.collect::<Result<_, Error>>()?,
            current: Mutex::default(),
            master: endpoint.master.clone(),
            tls: endpoint.tls,
            redis,
            options: options.clone(),
        })
    }

    /// Connects to the master.
    pub(super) async fn connect(
        &self,
        timeouts: Timeouts,
    ) -> Result<(MultiplexedConnection, Option<ServerInfo>, Address), Failure> {
        let mut last = Failure::Redis(RedisError::from((
            ErrorKind::MasterNameNotFoundBySentinel,
            "no Sentinel knows the master",
        )));
        for address in self.named().await? {
            match self.connect_to(&address, timeouts).await {
                Ok((connection, info)) => {
                    *self.current.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(address.clone());
                    return Ok((connection, info, address));
                }
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Returns the master that most of the Sentinels name that reply.
    pub(super) async fn master_now(&self) -> Option<Address> {
        self.named().await.ok()?.into_iter().next()
    }

    /// Asks all Sentinels at once. Returns the address that most of them name; if there are several, all
    /// of these, and the current one first. Fails if all Sentinels do.
    async fn named(&self) -> Result<Vec<Address>, Failure> {
        let mut replies: FuturesUnordered<_> =
            (0..self.sentinels.len()).map(|index| self.named_by(index)).collect();
        let (mut named, mut failure) = (Vec::new(), None);
        while let Some(reply) = replies.next().await {
            match reply {
                Ok(address) => named.push(address),
                Err(error) => failure = Some(error),
            }
            // The others cannot change the result.
            let agree = |one: &Option<Address>| named.iter().filter(|other| *other == one).count();
            if let Some(last @ Some(_)) = named.last()
                && agree(last) > self.sentinels.len() / 2
            {
                break;
            }
        }
        match failure {
            Some(failure) if named.is_empty() => Err(failure),
            _ => {
                let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let named: Vec<_> = named.into_iter().flatten().collect();
                Ok(most_named(&named, current.as_ref()))
            }
        }
    }

    async fn named_by(&self, index: usize) -> Result<Option<Address>, Failure> {
        let (own, client) = &self.sentinels[index];
        let bound = self.options.connect_timeout.min(SENTINEL);
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(bound))
            .set_response_timeout(Some(bound));
        let asked = timeout(bound, async {
            let mut connection =
                client.get_multiplexed_async_connection_with_config(&config).await?;
            let mut command = Cmd::new();
            command.arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
            command.query_async::<Option<(String, u16)>>(&mut connection).await
        });
        let Ok(named) = asked.await else {
            return Err(Failure::Redis(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
        };
        Ok(named?.map(|(host, port)| Address { host: own.host_or_own(&host), port }))
    }

    /// Connects to the server at this address, which must be a master.
    pub(super) async fn connect_to(
        &self,
        address: &Address,
        timeouts: Timeouts,
    ) -> Result<(MultiplexedConnection, Option<ServerInfo>), Failure> {
        let client =
            client(address, self.tls, self.redis.clone(), &self.options).map_err(|_| {
                RedisError::from((
                    ErrorKind::InvalidClientConfig,
                    "the master has no valid address",
                ))
            })?;
        let (connection, info) = connect(&client, timeouts).await?;
        if info.as_ref().is_some_and(|info| !info.is_master()) {
            // The Sentinel does not know of the failover yet.
            let error = (ErrorKind::Io, "the server that Sentinel names is a replica");
            return Err(Failure::Redis(error.into()));
        }
        Ok((connection, info))
    }
}

/// Returns the addresses that occur most often, each once, and the current one first.
fn most_named(named: &[Address], current: Option<&Address>) -> Vec<Address> {
    let count = |address: &Address| named.iter().filter(|other| *other == address).count();
    let most = named.iter().map(count).max().unwrap_or(0);
    let mut winners: Vec<Address> = Vec::new();
    for address in named.iter().filter(|address| count(address) == most) {
        if !winners.contains(address) {
            winners.push(address.clone());
        }
    }
    winners.sort_by_key(|address| Some(address) != current);
    winners
}

#[cfg(test)]
mod tests {
    use super::super::fake::{Fake, bulk};
    use super::*;

    fn at(port: u16) -> Address {
        Address { host: "127.0.0.1".to_owned(), port }
    }

    #[test]
    fn master_is_the_one_that_most_sentinels_name() {
        for (named, current, expected) in [
            (&[1, 2, 2][..], Some(1), &[2][..]),
            (&[1, 2], Some(2), &[2, 1]),
            (&[1, 2], Some(1), &[1, 2]),
            (&[1, 2], Some(3), &[1, 2]),
            (&[1], Some(2), &[1]),
            (&[], Some(1), &[]),
        ] {
            let named: Vec<_> = named.iter().map(|port| at(*port)).collect();
            let found = most_named(&named, current.map(at).as_ref());
            assert_eq!(found, expected.iter().map(|port| at(*port)).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn sentinel_that_was_cut_off_with_an_old_master_does_not_decide() {
        let mut sentinels = Vec::new();
        for port in ["1", "2", "2"] {
            let reply = move |_: &[String]| format!("*2\r\n{}{}", bulk("127.0.0.1"), bulk(port));
            sentinels.push(Fake::start(reply).await);
        }
        let addresses: Vec<_> = sentinels.iter().map(|one| one.address().to_string()).collect();
        let endpoint = Endpoint::read(&format!("redis+sentinel://{}/main", addresses.join(",")));
        let sentinel =
            Sentinel::new(&endpoint.unwrap(), Default::default(), &RedisOptions::new()).unwrap();
        assert_eq!(sentinel.master_now().await, Some(at(2)));
    }
}
