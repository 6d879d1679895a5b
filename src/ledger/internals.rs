//! Ledgers for this crate's own tests, which stop a delivery at every point. Not part of the API.

use std::sync::Arc;

use super::arrival::OnArrival;
pub use super::contract::{Begin, BeginContext, Claim, HandlerSuccess};
use super::lease::Lease;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use super::transaction::Transactional;
use crate::adapter::DedupAdapter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use crate::adapter::TransactionAdapter;

pub fn lease(adapter: impl DedupAdapter) -> Arc<Lease> {
    Arc::new(Lease::new(Arc::new(adapter)))
}

pub fn on_arrival(adapter: impl DedupAdapter) -> Arc<OnArrival> {
    Arc::new(OnArrival::new(Arc::new(adapter)))
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub fn transactional<A: TransactionAdapter>(adapter: A) -> Arc<Transactional<A::Database>> {
    Arc::new(Transactional::new(Arc::new(adapter)))
}
