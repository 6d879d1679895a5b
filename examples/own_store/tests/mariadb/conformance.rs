//! The whole conformance suite.

tower_dedup_conformance::conformance_suite!(
    crate::server::Database: leases, stored_data, maintenance, inspection, fence, completion, held_rows, corrupt_data,
    processes
);
