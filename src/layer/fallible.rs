//! The setters of [`DedupLayer`] for values from a file: they return an error for a value without
//! meaning.

use std::time::Duration;

use http::{Method, StatusCode};

use super::builder::DedupLayer;
use super::config::ComparedPart;
use super::policy::{OnMismatch, Replay};
use crate::error::{ConfigError, NOT_ZERO, check};
use crate::key::KeyPart;
use crate::ledger::{CanReplay, Ledger};
use crate::observe;

/// Settings from a file.
impl<L> DedupLayer<L> {
    /// Sets [`methods`](Self::methods).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] if there is no method.
    pub fn try_methods(
        mut self,
        methods: impl IntoIterator<Item = Method>,
    ) -> Result<Self, ConfigError> {
        self.config.methods = methods.into_iter().collect();
        check(!self.config.methods.is_empty(), "methods", "at least one method")?;
        Ok(self)
    }

    /// Sets [`body_limit`](Self::body_limit).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_body_limit(mut self, bytes: usize) -> Result<Self, ConfigError> {
        check(bytes > 0, "body_limit", "at least 1 byte")?;
        self.config.body_limit = bytes;
        if let Some(largest) = self.config.key.largest_body()
            && bytes < largest
        {
            observe::small_body_limit(self.config.key.namespace_str(), bytes, largest);
        }
        Ok(self)
    }

    /// Sets [`body_timeout`](Self::body_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for zero.
    pub fn try_body_timeout(mut self, time: Duration) -> Result<Self, ConfigError> {
        check(!time.is_zero(), "body_timeout", NOT_ZERO)?;
        self.config.body_timeout = time;
        Ok(self)
    }

    /// Sets [`retention`](Self::retention).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for zero.
    pub fn try_retention(mut self, retention: Duration) -> Result<Self, ConfigError> {
        self.config.times.set_retention(retention)?;
        if let Some(floor) = self.config.key.floor()
            && retention < floor
        {
            observe::short_retention(self.config.key.namespace_str(), retention, floor);
        }
        Ok(self)
    }

    /// Sets [`lease`](Self::lease).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] below 100 ms.
    pub fn try_lease(mut self, lease: Duration) -> Result<Self, ConfigError> {
        self.config.times.set_lease(lease)?;
        Ok(self)
    }

    /// Sets [`store_timeout`](Self::store_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for zero.
    pub fn try_store_timeout(mut self, bound: Duration) -> Result<Self, ConfigError> {
        self.config.times.set_store_timeout(bound)?;
        Ok(self)
    }

    /// Sets [`handler_timeout`](Self::handler_timeout).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for zero.
    pub fn try_handler_timeout(mut self, bound: Duration) -> Result<Self, ConfigError> {
        self.config.times.set_handler_timeout(bound)?;
        Ok(self)
    }

    /// Sets [`max_keys`](Self::max_keys).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidSetting`] for 0.
    pub fn try_max_keys(mut self, keys: usize) -> Result<Self, ConfigError> {
        check(keys > 0, "max_keys", "at least 1 key")?;
        self.config.max_keys = keys;
        Ok(self)
    }

    /// Sets [`in_flight_status`](Self::in_flight_status).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidInFlightStatus`] for a 1xx, which is not a final response, and for a
    /// 2xx. After a 2xx the sender does not deliver again, although the first run may fail.
    pub fn try_in_flight_status(mut self, status: StatusCode) -> Result<Self, ConfigError> {
        if status.is_success() || status.is_informational() {
            return Err(ConfigError::InvalidInFlightStatus);
        }
        self.config.in_flight_status = status;
        Ok(self)
    }

    /// Sets [`duplicate_status`](Self::duplicate_status).
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidDuplicateStatus`] for all but a 2xx, because senders retry anything
    /// else, and some disable the endpoint.
    pub fn try_duplicate_status(mut self, status: StatusCode) -> Result<Self, ConfigError> {
        if !status.is_success() {
            return Err(ConfigError::InvalidDuplicateStatus);
        }
        self.config.duplicate_status = status;
        Ok(self)
    }
}

/// Settings for an adapter that is chosen at run time.
impl<L: Ledger> DedupLayer<L> {
    /// Sets [`compare_payload`](Self::compare_payload).
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`stored_data`](crate::adapter::Abilities::stored_data).
    pub fn try_compare_payload(
        mut self,
        part: KeyPart,
        on_mismatch: OnMismatch,
    ) -> Result<Self, ConfigError> {
        self.check_stored_data()?;
        self.config.compare_payload = Some(ComparedPart { part, on_mismatch });
        Ok(self)
    }

    fn check_stored_data(&self) -> Result<(), ConfigError> {
        if self.ledger.stores_data() {
            return Ok(());
        }
        Err(ConfigError::UnsupportedByAdapter("stored data"))
    }
}

impl<L: CanReplay> DedupLayer<L> {
    /// Sets [`replay`](Self::replay).
    ///
    /// # Errors
    ///
    /// [`ConfigError::UnsupportedByAdapter`] if the adapter has no
    /// [`stored_data`](crate::adapter::Abilities::stored_data).
    pub fn try_replay(mut self, replay: Replay) -> Result<Self, ConfigError> {
        self.check_stored_data()?;
        self.config.replay = Some(replay);
        Ok(self)
    }
}
