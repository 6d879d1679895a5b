//! The conformance suite on the further configurations of each adapter. `tests/stores` has the default ones.
//! `scripts/faults` runs it.

mod conformance;
