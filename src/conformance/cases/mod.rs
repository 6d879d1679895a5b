//! The cases. Each takes a fresh store and panics where the store breaks a rule.

mod lease;
mod maintenance;
mod on_claim;
mod races;
mod refusal;
mod stored;

pub use lease::{
    a_claim_again_refreshes_the_retention, a_claim_is_first_then_in_flight_then_duplicate,
    a_claim_repeated_with_its_token_answers_the_same, a_completion_can_be_repeated,
    a_completion_of_a_missing_row_is_recorded, a_key_is_forgotten_after_its_retention,
    a_lapsed_lease_is_taken_over_by_one, a_late_completion_is_recorded_and_told,
    a_record_respects_leases, a_released_key_is_free_and_counts_its_attempts,
    a_renewal_keeps_a_lease, a_renewal_revives_nothing_that_was_given_up,
    a_renewal_revives_what_nobody_took, a_stale_token_changes_nothing,
    as_many_keys_as_a_request_may_carry, claim_complete_at_once_counts_attempts_and_takeovers,
    lease_claim_of_a_key_complete_at_once_is_a_duplicate,
    release_follows_the_permanence_of_its_terms, sets_are_answered_key_by_key,
};
pub use maintenance::{
    a_clock_that_goes_back_grants_nothing_twice, a_completion_is_never_expired_at_birth,
    a_live_lease_outlives_its_retention, an_expired_key_starts_anew, calls_after_close_fail,
    extreme_durations_do_no_harm, forget_get_and_count, hostile_keys_are_just_keys,
    purge_deletes_what_expired_an_hour_ago_and_nothing_else,
};
pub use on_claim::{
    a_key_is_first_once, a_record_repeated_with_its_token_is_first_again,
    an_undone_record_is_first_again, key_complete_at_once_is_forgotten_after_its_retention,
};
pub use races::{
    calls_of_all_kinds_at_once_keep_to_their_keys, calls_that_hang_hold_up_no_other,
    dropped_calls_can_be_undone, dropped_completions_can_be_repeated,
    dropped_records_can_be_undone, overlapping_sets_do_not_deadlock,
    purge_goes_on_after_a_dropped_call, purge_runs_beside_claims, workers_race_for_a_lapsed_lease,
    workers_race_for_claims, workers_race_for_records,
};
pub use refusal::unsupported_terms_are_refused_before_anything_is_written;
pub use stored::{
    claim_that_is_complete_at_once_stores_payloads, completion_stores_what_it_carries,
    duplicate_beside_completions_carries_whole_stored_data,
    duplicate_carries_what_the_call_fetches, each_key_has_its_own_stored_data,
    hostile_responses_come_back_unchanged, late_completion_stores_what_it_carries,
    losers_of_a_race_get_the_stored_data_of_the_winner, stored_data_ends_with_the_retention,
};
