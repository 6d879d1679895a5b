//! The conformance suite: tests of the rules that every store follows, for your own store.
//!
//! 1. Implement [`Store`] for your adapter. It creates a fresh store and lets time pass in it.
//! 2. In a test module, expand [`conformance_suite!`](crate::conformance_suite) and the macro of each
//!    ability that the adapter has. Each macro makes one named `#[test]` of every case.
//! 3. A store that cannot be reached has to panic in [`Store::create`], with a message that says what is
//!    missing. The suite skips nothing.
//!
//! Minor versions of this crate add cases: an adapter that passes today may fail a case of tomorrow.
//!
//! # Example
//!
//! ```
//! # #[cfg(all(feature = "memory", feature = "testing"))] mod example {
//! use std::sync::Arc;
//! use std::time::Duration;
//! use tower_dedup::adapter::MemoryAdapter;
//! use tower_dedup::conformance::Store;
//!
//! struct Memory(Arc<MemoryAdapter>);
//!
//! impl Store for Memory {
//!     type Adapter = MemoryAdapter;
//!
//!     async fn create() -> Self {
//!         Self(Arc::new(MemoryAdapter::new()))
//!     }
//!
//!     fn adapter(&self) -> Arc<MemoryAdapter> {
//!         Arc::clone(&self.0)
//!     }
//!
//!     async fn advance(&self, by: Duration) {
//!         self.0.advance(by);
//!     }
//!
//!     async fn set_back(&self, by: Duration) {
//!         self.0.set_back(by);
//!     }
//! }
//!
//! mod memory {
//!     tower_dedup::conformance_suite!(super::Memory);
//!     tower_dedup::lease_conformance_suite!(super::Memory);
//!     tower_dedup::stored_data_conformance_suite!(super::Memory);
//!     tower_dedup::maintenance_conformance_suite!(super::Memory);
//! }
//! # // One case, because the macro's tests are compiled in tests only.
//! # pub(crate) fn one() {
//! #     tower_dedup::conformance::run_case::<Memory>("claim_complete_at_once_is_first_once");
//! # }
//! # }
//! # #[cfg(all(feature = "memory", feature = "testing"))]
//! # example::one();
//! ```

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "the cases are tests, and a failed test panics"
)]

mod driver;
mod processes;
mod store;

pub use cases::{run_case, run_maintenance_case};
pub use processes::processes_race_for_keys;
pub use store::{SharedStore, Store};

/// Expands to one `#[test]` for every case of claims that are complete at once. Every adapter has to
/// pass them.
#[macro_export]
macro_rules! conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_case:
            on_claim {
                claim_complete_at_once_is_first_once,
                key_complete_at_once_is_first_again_after_its_release,
                key_complete_at_once_is_first_again_after_its_retention,
            }
            races {
                workers_racing_for_a_claim_complete_at_once_have_one_winner,
                dropped_claim_complete_at_once_can_be_released,
            }
        }
    };
    (@cases $store:ty: $run:ident: $($module:ident { $($case:ident,)+ })+) => {$($(
        #[test]
        fn $case() {
            $crate::conformance::$run::<$store>(stringify!($case));
        }
    )+)+};
    // Runs the case of a name. Only the crate itself can name the cases.
    (@cases $store:ty, $name:ident: $run:ident: $($module:ident { $($case:ident,)+ })+) => {$($(
        if $name == stringify!($case) {
            return run($module::$case::<$store>);
        }
    )+)+};
}

/// Expands to one `#[test]` for every case of an adapter with [leases](crate::adapter::contract::Abilities::leases).
#[macro_export]
macro_rules! lease_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_case:
            lease {
                claim_complete_at_once_counts_attempts_and_takeovers,
                release_follows_the_permanence_of_its_terms,
                completed_key_is_first_again_after_its_retention,
                claim_is_first_then_in_flight_then_duplicate,
                claim_repeated_with_its_token_returns_the_same_reply,
                lapsed_lease_is_taken_over_once,
                stale_token_changes_nothing,
                late_completion_counts_and_returns_lease_lost,
                completion_of_a_missing_row_inserts_the_row,
                renewal_keeps_or_revives_the_lease,
                renewal_of_a_released_or_complete_key_is_lost,
                calls_for_several_keys_reply_key_by_key,
                calls_for_4096_keys_reply_key_by_key,
            }
            races {
                workers_racing_for_a_lease_have_one_winner,
                workers_racing_for_a_lapsed_lease_have_one_winner,
                claims_of_overlapping_keys_have_one_winner_for_each,
                concurrent_calls_of_all_kinds_reply_for_their_own_keys,
                dropped_completion_can_be_repeated,
            }
        }
    };
}

/// Expands to one `#[test]` for every case of an adapter with leases and
/// [stored data](crate::adapter::contract::Abilities::stored_data).
#[macro_export]
macro_rules! stored_data_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_maintenance_case:
            stored {
                completion_stores_what_it_carries,
                each_key_has_its_own_stored_data,
                late_completion_stores_what_it_carries,
                duplicate_carries_what_the_call_fetches,
                stored_data_ends_with_the_retention,
                get_returns_the_stored_data_of_a_complete_key,
                duplicate_beside_completions_carries_whole_stored_data,
                losers_of_a_race_get_the_stored_data_of_the_winner,
                hostile_responses_come_back_unchanged,
            }
        }
    };
}

/// Expands to one `#[test]` for every case of an adapter with leases that is a
/// [`MaintenanceAdapter`](crate::adapter::inspect::MaintenanceAdapter).
#[macro_export]
macro_rules! maintenance_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_maintenance_case:
            maintenance {
                expired_key_is_first_with_one_attempt,
                live_lease_outlives_its_retention,
                completion_after_the_retention_is_remembered,
                extreme_durations_neither_panic_nor_overflow,
                hostile_keys_stay_distinct,
                clock_set_back_makes_no_key_first_twice,
                purge_deletes_only_keys_that_expired_an_hour_ago,
                calls_after_close_fail,
                forget_get_and_stats_follow_the_state_of_a_key,
            }
            races {
                hanging_calls_block_no_other_call,
                dropped_claim_can_be_released,
                purges_run_beside_claims_and_after_dropped_purges,
            }
            inspection {
                stats_count_each_state_and_its_oldest_key,
                purge_deletes_every_expired_key_in_a_round,
                list_is_unsupported_without_the_ability,
            }
        }
    };
}

/// Expands to one `#[test]` for every case of an adapter with leases, stored data and
/// [inspection](crate::adapter::contract::Abilities::inspection).
#[macro_export]
macro_rules! inspection_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_maintenance_case:
            inspection {
                list_returns_the_state_of_each_key,
                list_filters_by_state_namespace_id_age_and_attempts,
                list_in_pages_has_every_key_once,
                list_beside_writes_has_every_key_that_is_not_written,
                foreign_cursor_is_refused,
                event_type_is_stored_with_a_new_key,
            }
        }
    };
}

/// Expands to one `#[test]` for every case of rows that an open transaction holds, for an adapter with leases and a store
/// with [`hold`](crate::conformance::Store::hold).
#[macro_export]
macro_rules! held_row_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_case:
            held {
                claims_beside_held_rows_return_at_once,
                renewal_of_a_held_row_returns_at_once_and_is_not_lost,
                completions_and_releases_of_held_rows_delay_no_other_call,
            }
        }
    };
}

/// Expands to one `#[test]` for an adapter without leases or without stored data.
#[macro_export]
macro_rules! refusal_conformance_suite {
    ($store:ty $(, $name:ident)?) => {
        $crate::conformance_suite! { @cases $store $(, $name)?: run_case:
            on_claim {
                unsupported_terms_are_refused_before_anything_is_written,
            }
        }
    };
}

/// Expands to one `#[test]` in which processes race, for a [`SharedStore`](crate::conformance::SharedStore)
/// with leases.
#[macro_export]
macro_rules! process_conformance_suite {
    ($store:ty) => {
        #[test]
        fn processes_race_for_keys() {
            let name = concat!(module_path!(), "::processes_race_for_keys");
            $crate::conformance::processes_race_for_keys::<$store>(name);
        }
    };
}

// Below the macros, which list its cases.
mod cases;
