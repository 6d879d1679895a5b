//! [`Sentinel`]: the master that the Sentinels name.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisConnectionInfo, RedisError};
use tokio::time::timeout;

use super::super::options::RedisOptions;
use super::super::url::{Address, Endpoint};
use super::failure::Failure;
use super::fitness::ServerInfo;
use super::target::{Timeouts, client, connect};
use crate::error::Error;

/// How long one Sentinel may take to name the master. A silent one costs this much of the call's time.
const SENTINEL: Duration = Duration::from_millis(250);

/// The Sentinels of one master.
pub(super) struct Sentinel {
    sentinels: Vec<(Address, Client)>,
    /// The one that named the master last. It is asked first.
    first: AtomicUsize,
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
            first: AtomicUsize::new(0),
            master: endpoint.master.clone(),
            tls: endpoint.tls,
            redis,
            options: options.clone(),
        })
    }

    /// Connects to the master. Asks each Sentinel in turn until one names a server that is a master.
    pub(super) async fn connect(
        &self,
        timeouts: Timeouts,
    ) -> Result<(MultiplexedConnection, Option<ServerInfo>, Address), Failure> {
        let mut last = Failure::Redis(RedisError::from((
            ErrorKind::MasterNameNotFoundBySentinel,
            "no Sentinel knows the master",
        )));
        let mut tried = Vec::new();
        for index in self.order() {
            match self.named_by(index).await {
                Ok(Some(address)) if tried.contains(&address) => {}
                Ok(Some(address)) => {
                    match self.connect_to(&address, timeouts).await {
                        Ok((connection, info)) => {
                            self.first.store(index, Ordering::Relaxed);
                            return Ok((connection, info, address));
                        }
                        Err(failure) => last = failure,
                    }
                    tried.push(address);
                }
                Ok(None) => {}
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Returns the master that the first Sentinel names that replies.
    pub(super) async fn master_now(&self) -> Option<Address> {
        for index in self.order() {
            if let Ok(Some(address)) = self.named_by(index).await {
                return Some(address);
            }
        }
        None
    }

    fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, count) = (self.first.load(Ordering::Relaxed), self.sentinels.len());
        (0..count).map(move |offset| (first + offset) % count)
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
