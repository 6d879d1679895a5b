//! The whole conformance suite.

tower_dedup::conformance_suite!(crate::server::Database);
tower_dedup::lease_conformance_suite!(crate::server::Database);
tower_dedup::stored_data_conformance_suite!(crate::server::Database);
tower_dedup::maintenance_conformance_suite!(crate::server::Database);
tower_dedup::inspection_conformance_suite!(crate::server::Database);
tower_dedup::held_row_conformance_suite!(crate::server::Database);
tower_dedup::completion_conformance_suite!(crate::server::Database);
tower_dedup::process_conformance_suite!(crate::server::Database);
