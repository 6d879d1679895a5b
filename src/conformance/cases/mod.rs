//! The cases. Each takes a fresh store and panics where the store breaks a rule. They are called by name.

mod answers;
mod completion;
mod fence;
mod inspection;
mod maintenance;
mod races;
mod stored;

use super::store::{Maintained, RemoteStore, Store, Transactional};
use super::trace::{Case, run};
use crate::adapter::contract::DedupAdapter;

conformance_suite! { @on_claim @table Store }
conformance_suite! { @leases @table Store }
conformance_suite! { @maintenance @table Maintained }
conformance_suite! { @stored_data @table Maintained }
conformance_suite! { @inspection @table Maintained }
conformance_suite! { @fence @table RemoteStore }
conformance_suite! { @held_rows @table Store }
conformance_suite! { @completion @table Transactional }
conformance_suite! { @corrupt_data @table Maintained }

/// Asserts that the adapter announces these abilities. Names of other parts of the suite are ignored.
pub fn store_can_be_created<S: Store>(expanded: &[&'static str]) {
    let expanded = expanded.to_vec();
    run("store_can_be_created", |store: Case<S>| async move {
        let abilities = store.adapter().abilities();
        let announced = [
            ("leases", abilities.leases),
            ("stored_data", abilities.stored_data),
            ("inspection", abilities.inspection),
            ("completion", abilities.completion),
        ];
        for (name, is_announced) in announced {
            let is_right = is_announced || !expanded.contains(&name);
            assert!(is_right, "the adapter does not announce `{name}`");
        }
    });
}
