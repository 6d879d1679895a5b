//! The rows of the table: a ledger on a store each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StoreKind {
    Sqlite,
    Postgres,
    PostgresSync,
    Redis,
    Sentinel,
    Cluster,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LedgerKind {
    Lease,
    OnArrival,
    Transactional,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) store: StoreKind,
    pub(crate) ledger: LedgerKind,
}

const STORES: [(StoreKind, &str); 6] = [
    (StoreKind::Sqlite, "sqlite"),
    (StoreKind::Postgres, "postgres"),
    (StoreKind::PostgresSync, "postgres-sync"),
    (StoreKind::Redis, "redis"),
    (StoreKind::Sentinel, "sentinel"),
    (StoreKind::Cluster, "cluster"),
];

const LEDGERS: [(LedgerKind, &str); 3] = [
    (LedgerKind::Lease, "lease"),
    (LedgerKind::OnArrival, "on-arrival"),
    (LedgerKind::Transactional, "transactional"),
];

impl Row {
    /// Returns every ledger that a store has, on every store.
    pub(crate) fn all() -> Vec<Self> {
        let rows = STORES.into_iter().flat_map(|(store, _)| {
            LEDGERS.into_iter().map(move |(ledger, _)| Self { store, ledger })
        });
        let keeps_effects = |store| {
            matches!(store, StoreKind::Sqlite | StoreKind::Postgres | StoreKind::PostgresSync)
        };
        rows.filter(|row| row.ledger != LedgerKind::Transactional || keeps_effects(row.store))
            .collect()
    }

    pub(crate) fn store_name(self) -> &'static str {
        STORES.iter().find(|store| store.0 == self.store).expect("every store").1
    }

    pub(crate) fn ledger_name(self) -> &'static str {
        LEDGERS.iter().find(|ledger| ledger.0 == self.ledger).expect("every ledger").1
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.store_name(), self.ledger_name())
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::all().into_iter().find(|row| row.to_string() == name);
        named.ok_or_else(|| format!("no row `{name}`: see --list"))
    }
}
