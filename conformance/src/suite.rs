//! [`conformance_suite!`](crate::conformance_suite): the table of the cases.

/// Expands to one `#[test]` for every case of claims that are complete at once, which every adapter has to pass, and
/// for every case of the listed abilities.
///
/// | ability | for |
/// |---|---|
/// | `leases` | [`leases`](tower_dedup::adapter::contract::Abilities::leases) |
/// | `maintenance` | `leases`, and a [`MaintenanceAdapter`](tower_dedup::adapter::maintenance::MaintenanceAdapter) |
/// | `stored_data` | `maintenance` and [`stored_data`](tower_dedup::adapter::contract::Abilities::stored_data) |
/// | `inspection` | `stored_data` and [`inspection`](tower_dedup::adapter::contract::Abilities::inspection) |
/// | `fence` | `maintenance`, in a store behind a network: a [`RemoteStore`](crate::RemoteStore) |
/// | `completion` | `leases` and [`completion`](tower_dedup::adapter::contract::Abilities::completion), in a [`TransactionalStore`](crate::TransactionalStore) store |
/// | `held_rows` | `leases`, in a store whose rows open transactions hold: [`hold`](crate::Store::hold) |
/// | `corrupt_data` | `stored_data`, in a store that the test can write: [`corrupt`](crate::Store::corrupt) |
/// | `processes` | `leases`, in a store that processes share: a [`SharedStore`](crate::SharedStore) |
#[macro_export]
macro_rules! conformance_suite {
    ($store:ty $(: $($ability:ident),+ $(,)?)?) => {
        /// The store can be created, and its adapter announces the abilities of the suite.
        #[test]
        fn store_can_be_created() {
            $crate::cases::store_can_be_created::<$store>(&[$($(stringify!($ability)),+)?]);
        }
        $crate::conformance_suite! { @on_claim @tests $store }
        $($($crate::conformance_suite! { @$ability @tests $store })+)?
    };
    (@on_claim @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to on_claim $($of)+:
            [answers]
            claim_complete_at_once_is_first_once,
            key_complete_at_once_is_first_again_after_its_release_or_retention,
            unsupported_terms_are_refused_before_anything_is_written,
            [races]
            workers_racing_for_a_claim_complete_at_once_have_one_winner,
            dropped_claim_complete_at_once_can_be_released,
        }
    };
    (@leases @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to leases $($of)+:
            [answers]
            calls_reply_by_the_state_of_the_row,
            terms_without_a_lease_renew_and_complete,
            release_follows_the_permanence_of_its_terms,
            completed_key_is_first_again_after_its_retention,
            claim_is_first_then_in_flight_then_duplicate,
            claim_repeated_with_its_token_returns_the_same_reply,
            lapsed_lease_is_taken_over_once,
            stale_token_changes_nothing,
            late_completion_counts_and_returns_lease_lost,
            renewal_keeps_or_revives_the_lease,
            [races]
            workers_racing_for_a_lease_have_one_winner,
            workers_racing_for_a_lapsed_lease_have_one_winner,
            claims_of_overlapping_keys_have_one_winner_for_each,
            calls_of_2048_callers_reply_for_their_own_keys,
            dropped_claim_can_be_released,
            dropped_completion_can_be_repeated,
        }
    };
    (@stored_data @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to stored_data $($of)+:
            [stored]
            completion_stores_what_it_carries,
            each_key_has_its_own_stored_data,
            duplicate_carries_what_the_call_fetches,
            stored_data_ends_with_the_retention,
            get_returns_the_stored_data_of_a_complete_key,
            duplicate_beside_completions_carries_whole_stored_data,
            duplicate_beside_releases_carries_whole_stored_data,
            hostile_responses_come_back_unchanged,
        }
    };
    (@maintenance @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to maintenance $($of)+:
            [answers]
            calls_of_operators_reply_by_the_state_of_the_row,
            [maintenance]
            extreme_durations_neither_panic_nor_overflow,
            claim_of_an_event_of_the_past_has_its_times,
            hostile_keys_stay_distinct,
            clock_set_back_makes_no_key_first_twice,
            purge_deletes_only_keys_that_expired_an_hour_ago,
            purge_deletes_as_many_keys_as_its_limit,
            calls_after_close_fail,
            [races]
            hanging_calls_block_no_other_call,
            purges_run_beside_claims_and_after_dropped_purges,
            [inspection]
            stats_count_each_state_and_its_oldest_key,
            list_is_unsupported_without_the_ability,
            entries_of_many_keys_are_those_of_each,
        }
    };
    (@inspection @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to inspection $($of)+:
            [inspection]
            list_returns_the_state_of_each_key,
            list_filters_by_state_namespace_id_age_and_attempts,
            list_in_pages_has_every_key_once,
            list_beside_writes_has_every_key_that_is_not_written,
            foreign_cursor_is_refused,
            event_type_is_stored_with_a_new_key,
        }
    };
    (@fence @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to fence $($of)+:
            [fence]
            late_claim_has_no_effect_after_its_release,
            late_renewal_has_no_effect_after_its_release,
            late_claim_of_a_forgotten_key_has_no_effect,
            late_forget_undoes_no_later_completion,
            late_take_of_a_purged_row_takes_no_other_row,
            release_is_one_step,
            release_keeps_every_row_for_an_hour,
        }
    };
    (@held_rows @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to held_rows $($of)+:
            [completion]
            claims_beside_held_rows_return_at_once,
            renewal_of_a_held_row_returns_at_once_and_is_not_lost,
            completions_and_releases_of_held_rows_delay_no_other_call,
        }
    };
    (@completion @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to completion $($of)+:
            [completion]
            first_commit_wins_in_every_state,
            complete_or_missing_row_refuses_all,
            rollback_leaves_every_row_as_it_was,
            response_commits_with_the_key_or_follows,
            transactions_that_race_complete_once,
        }
    };
    (@corrupt_data @$to:ident $($of:tt)+) => {
        $crate::conformance_suite! { @$to corrupt_data $($of)+:
            [stored]
            unreadable_response_is_told_and_never_replayed,
        }
    };
    (@processes @tests $store:ty) => {
        #[test]
        fn processes_race_for_keys() {
            let name = concat!(module_path!(), "::processes_race_for_keys");
            $crate::processes_race_for_keys::<$store>(name);
        }
    };
    (@tests $ability:ident $store:ty: $([$module:ident] $($case:ident,)+)+) => {$($(
        #[test]
        fn $case() {
            $crate::cases::$ability::<$store>(stringify!($case));
        }
    )+)+};
    (@table $ability:ident $wrapper:ident $bound:ident: $([$module:ident] $($case:ident,)+)+) => {
        /// Runs a case of this ability.
        pub fn $ability<S: $bound>(case: &str) {
            fn named(case: &str) -> Run {
                match case {
                    $($(stringify!($case) => Box::new(|case| Box::pin($module::$case(case))),)+)+
                    _ => panic!("no case of this name: {case}"),
                }
            }
            run(case, named(case), $wrapper::<S>::of);
        }
    };
}
