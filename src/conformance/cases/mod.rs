//! The cases. Each takes a fresh store and panics where the store breaks a rule.

mod held;
mod inspection;
mod lease;
mod maintenance;
mod on_claim;
mod races;
mod stored;

use super::store::{Store, run};
use crate::adapter::inspect::MaintenanceAdapter;

/// Runs a case of this name with a fresh store, on a runtime of its own with four threads.
///
/// # Panics
///
/// Panics if the case does, without a runtime, or without such a case.
#[doc(hidden)]
pub fn run_case<S: Store>(name: &str) {
    conformance_suite!(S, name);
    lease_conformance_suite!(S, name);
    held_row_conformance_suite!(S, name);
    refusal_conformance_suite!(S, name);
    panic!("no case {name}");
}

/// As [`run_case`], for the suites of a [`MaintenanceAdapter`](crate::adapter::inspect::MaintenanceAdapter).
///
/// # Panics
///
/// As [`run_case`].
#[doc(hidden)]
pub fn run_maintenance_case<S: Store<Adapter: MaintenanceAdapter>>(name: &str) {
    stored_data_conformance_suite!(S, name);
    maintenance_conformance_suite!(S, name);
    inspection_conformance_suite!(S, name);
    panic!("no case {name}");
}
