//! The cases. Each takes a fresh store and panics where the store breaks a rule. They are called by name.

mod answers;
mod completion;
mod fence;
mod inspection;
mod maintenance;
mod races;
mod stored;

use tower_dedup::adapter::contract::DedupAdapter;

use crate::case::{Claiming, Maintaining, Remote, Transacting};
use crate::run::{Run, run};
use crate::store::{Maintained, RemoteStore, Store, Transactional};

conformance_suite! { @on_claim @table Claiming Store }
conformance_suite! { @leases @table Claiming Store }
conformance_suite! { @maintenance @table Maintaining Maintained }
conformance_suite! { @stored_data @table Maintaining Maintained }
conformance_suite! { @inspection @table Maintaining Maintained }
conformance_suite! { @fence @table Remote RemoteStore }
conformance_suite! { @held_rows @table Claiming Store }
conformance_suite! { @completion @table Transacting Transactional }
conformance_suite! { @corrupt_data @table Maintaining Maintained }

/// Asserts that the adapter announces these abilities. Names of other parts of the suite are ignored.
pub fn store_can_be_created<S: Store>(expanded: &[&'static str]) {
    run("store_can_be_created", announces(expanded.to_vec()), Claiming::<S>::of);
}

fn announces(expanded: Vec<&'static str>) -> Run {
    Box::new(move |store| {
        Box::pin(async move {
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
        })
    })
}
