//! The cases. Each takes a fresh store and panics where the store breaks a rule.

mod event_type;
mod inspection;
mod lease;
mod maintenance;
mod on_claim;
mod races;
mod refusal;
mod stored;

pub use event_type::event_type_is_stored_with_a_new_key;
pub use inspection::{
    foreign_cursor_is_refused, list_beside_writes_has_every_key_that_is_not_written,
    list_filters_by_state_namespace_id_age_and_attempts, list_in_pages_has_every_key_once,
    list_is_unsupported_without_the_ability, list_returns_the_state_of_each_key,
    purge_deletes_every_expired_key_in_a_round, stats_count_each_state_and_its_oldest_key,
};
pub use lease::{
    calls_for_4096_keys_reply_key_by_key, calls_for_several_keys_reply_key_by_key,
    claim_complete_at_once_counts_attempts_and_takeovers, claim_complete_at_once_respects_leases,
    claim_is_first_then_in_flight_then_duplicate,
    claim_repeated_with_its_token_returns_the_same_reply,
    completed_key_is_first_again_after_its_retention, completion_of_a_missing_row_inserts_the_row,
    further_claim_refreshes_the_retention, lapsed_lease_is_taken_over_once,
    late_completion_counts_and_returns_lease_lost,
    lease_claim_of_a_key_complete_at_once_is_a_duplicate,
    release_follows_the_permanence_of_its_terms, released_key_is_free_and_counts_its_attempts,
    renewal_keeps_the_lease, renewal_of_a_released_or_complete_key_is_lost,
    renewal_revives_a_lapsed_or_missing_row, repeated_completion_returns_the_same_reply,
    stale_token_changes_nothing,
};
pub use maintenance::{
    calls_after_close_fail, clock_set_back_makes_no_key_first_twice,
    completion_after_the_retention_is_remembered, expired_key_is_first_with_one_attempt,
    extreme_durations_neither_panic_nor_overflow, forget_get_and_stats_follow_the_state_of_a_key,
    hostile_keys_stay_distinct, live_lease_outlives_its_retention,
    purge_deletes_only_keys_that_expired_an_hour_ago,
};
pub use on_claim::{
    claim_complete_at_once_is_first_once, claim_complete_at_once_repeated_with_its_token_is_first,
    key_complete_at_once_is_first_again_after_its_release,
    key_complete_at_once_is_first_again_after_its_retention,
};
pub use races::{
    claims_of_overlapping_keys_do_not_deadlock,
    concurrent_calls_of_all_kinds_reply_for_their_own_keys, dropped_claim_can_be_released,
    dropped_claim_complete_at_once_can_be_released, dropped_completion_can_be_repeated,
    hanging_calls_block_no_other_call, purge_continues_after_a_dropped_call,
    purge_runs_beside_claims, workers_racing_for_a_claim_complete_at_once_have_one_winner,
    workers_racing_for_a_lapsed_lease_have_one_winner, workers_racing_for_a_lease_have_one_winner,
};
pub use refusal::unsupported_terms_are_refused_before_anything_is_written;
pub use stored::{
    claim_that_is_complete_at_once_stores_payloads, completion_stores_what_it_carries,
    duplicate_beside_completions_carries_whole_stored_data,
    duplicate_carries_what_the_call_fetches, each_key_has_its_own_stored_data,
    get_returns_the_stored_data_of_a_complete_key, hostile_responses_come_back_unchanged,
    late_completion_stores_what_it_carries, losers_of_a_race_get_the_stored_data_of_the_winner,
    stored_data_ends_with_the_retention,
};
