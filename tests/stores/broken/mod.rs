//! Broken stores. Each has one fault that loses or doubles events, and fails the case that is for it.
//!
//! The faults of the fence are those of SQL: of a store of plain statements on Postgres, behind the proxy of the suite.
//! The others are faults of a wrapper around the memory store.

mod plain;
mod wrapped;

use std::panic::{AssertUnwindSafe, catch_unwind};

use plain::{Edit, Fault, Plain, Sql};
use tower_dedup_conformance::cases;
use wrapped::WrappedStore;

/// Both stores are sound without a fault: it is the fault that fails a case.
mod sound {
    struct None;

    impl super::Fault for None {
        const EDITS: &'static [super::Edit] = &[];
    }

    mod plain {
        tower_dedup_conformance::conformance_suite!(super::super::Plain<super::None>: fence);
    }

    mod wrapped {
        tower_dedup_conformance::conformance_suite!(
            super::super::WrappedStore<{ super::super::wrapped::NO_FAULT }>: leases, stored_data, maintenance, corrupt_data
        );
    }
}

/// A case that races finds its fault in one of several runs.
const RUNS: usize = 20;

fn fails(case: impl Fn()) {
    let finds = |_| catch_unwind(AssertUnwindSafe(&case)).is_err();
    assert!((0..RUNS).any(finds), "the case does not find the fault");
}

/// A fault, the edits of the statements that make it, and the case that fails.
macro_rules! plain {
    ($($fault:ident => $case:ident: [$($edit:expr),+ $(,)?];)+) => {$(
        #[test]
        fn $fault() {
            struct Broken;

            impl Fault for Broken {
                const EDITS: &'static [Edit] = &[$($edit),+];
            }

            fails(|| cases::fence::<Plain<Broken>>(stringify!($case)));
        }
    )+};
}

const UPDATE_ONLY: &str = "UPDATE keys AS t SET token = NULL, lease_until = NULL, completed_at = NULL, \
     expires_at = CASE WHEN $4 THEN {now} ELSE t.expires_at END WHERE namespace = $1 AND id = $2 AND {own}";
const THEN_INSERT: &str = "UPDATE keys AS t SET version = t.version + 1, token = NULL, lease_until = NULL, \
     completed_at = NULL, expires_at = CASE WHEN $4 THEN {now} ELSE greatest(t.expires_at, {now}) END \
     WHERE namespace = $1 AND id = $2 AND {own};; \
     INSERT INTO keys AS t (namespace, id, attempts, takeover, first_seen_at, expires_at) \
     SELECT $1, $2, 0, false, {now}, {now} WHERE $3::bytea IS NOT NULL AND $4::boolean IS NOT NULL \
     ON CONFLICT (namespace, id) DO NOTHING";
const IS_FREE: &str = "$6::bigint IS NOT NULL AND (t.expires_at <= {now} OR t.completed_at IS NULL) \
     AND (t.lease_until IS NULL OR t.lease_until <= {now})";
const UPSERT: &str = "DO UPDATE SET token = excluded.token, lease_until = excluded.lease_until, \
     completed_at = excluded.completed_at, expires_at = excluded.expires_at, attempts = t.attempts + 1 \
     WHERE (t.expires_at <= {now} OR t.completed_at IS NULL) AND (t.lease_until IS NULL OR t.lease_until <= {now})";
const DELETE: &str = "DELETE FROM keys WHERE namespace = $1 AND id = $2 AND version = $3";

plain! {
    release_without_a_fence => late_claim_has_no_effect_after_its_release:
        [(Sql::Release, "", UPDATE_ONLY), (Sql::ReleaseAtOnce, "", UPDATE_ONLY)];
    release_at_once_that_deletes => late_claim_has_no_effect_after_its_release:
        [(Sql::ReleaseAtOnce, "", "DELETE FROM keys AS t WHERE namespace = $1 AND id = $2 AND {own}")];
    release_that_raises_no_version => late_claim_has_no_effect_after_its_release:
        [(Sql::Release, "version = t.version + 1", "version = t.version")];
    release_that_raises_no_version_of_others => late_claim_has_no_effect_after_its_release:
        [(Sql::Release, "{now}) END", "{now}) END WHERE {own}")];
    take_of_a_free_row_at_any_version => late_claim_has_no_effect_after_its_release:
        [(Sql::Take, "t.version = $6", IS_FREE)];
    usual_upsert => late_claim_has_no_effect_after_its_release:
        [
            (Sql::Insert, "DO NOTHING", UPSERT),
            (Sql::Release, "", UPDATE_ONLY),
            (Sql::ReleaseAtOnce, "", UPDATE_ONLY),
            (Sql::Forget, "", DELETE),
        ];
    release_in_two_statements => release_is_one_step:
        [(Sql::Release, "", THEN_INSERT)];
    release_of_an_expired_row_that_is_purged => release_keeps_every_row_for_an_hour:
        [(Sql::Release, "greatest(t.expires_at, {now})", "t.expires_at")];
    released_row_that_is_purged_at_once => release_keeps_every_row_for_an_hour:
        [(Sql::Release, "{now}, {now})", "{now}, {now} - interval '1 hour')")];
    renewal_of_a_released_row => late_renewal_has_no_effect_after_its_release:
        [
            (Sql::Release, "token = CASE WHEN {own} THEN NULL ELSE t.token END,", ""),
            (Sql::Renew, "AND t.lease_until IS NOT NULL", ""),
        ];
    forget_that_deletes => late_claim_of_a_forgotten_key_has_no_effect:
        [(Sql::Forget, "", DELETE)];
    forget_that_raises_no_version => late_claim_of_a_forgotten_key_has_no_effect:
        [(Sql::Forget, "version = version + 1,", "")];
    forget_at_any_version => late_forget_undoes_no_later_completion:
        [(Sql::Forget, "version = $3", "$3::bigint IS NOT NULL")];
    versions_that_repeat => late_take_of_a_purged_row_takes_no_other_row:
        [(Sql::Table, "(extract(epoch FROM {now}) * 1000000)::bigint", "1")];
}

/// A fault of the wrapper, and the case that fails.
macro_rules! wrapped {
    ($($fault:ident => $ability:ident::$case:ident: $number:ident;)+) => {$(
        #[test]
        fn $fault() {
            type Broken = WrappedStore<{ wrapped::$number }>;
            fails(|| cases::$ability::<Broken>(stringify!($case)));
        }
    )+};
}

wrapped! {
    repeated_insertion_of_a_completion_is_held => leases::calls_reply_by_the_state_of_the_row: INSERTED_ONCE;
    late_completion_takes_the_lease => leases::late_completion_counts_and_returns_lease_lost: LEASE_TAKEN;
    renewal_after_the_release_of_an_unclaimed_key => leases::calls_reply_by_the_state_of_the_row: REVIVED;
    repeated_takeover_of_an_expired_row_is_new => leases::calls_reply_by_the_state_of_the_row: TAKEN_ANEW;
    stored_data_of_a_second_step => stored_data::duplicate_beside_releases_carries_whole_stored_data: SECOND_STEP;
    purge_of_at_most_fifty_keys => maintenance::purge_deletes_as_many_keys_as_its_limit: PURGES_FIFTY;
    corrupt_response_that_is_none => corrupt_data::unreadable_response_is_told_and_never_replayed: REPLAYS_CORRUPT;
    replies_of_other_calls => leases::calls_of_2048_callers_reply_for_their_own_keys: MIXES_REPLIES;
    data_that_is_stored_after_its_claim => stored_data::duplicate_beside_releases_carries_whole_stored_data: STORES_LATE;
    data_of_a_duplicate_that_is_stored => stored_data::duplicate_beside_releases_carries_whole_stored_data: OVERWRITES_DATA;
    late_completion_without_its_data => stored_data::completion_stores_what_it_carries: LOSES_LATE_DATA;
    claim_that_nobody_has_polled => leases::dropped_claim_can_be_released: CLAIMS_UNPOLLED;
    entry_without_attempts => maintenance::calls_of_operators_reply_by_the_state_of_the_row: COUNTS_NO_ATTEMPTS;
    event_of_the_past_that_is_handled_now => maintenance::claim_of_an_event_of_the_past_has_its_times: IGNORES_THE_PAST;
    entries_of_other_keys => maintenance::entries_of_many_keys_are_those_of_each: SORTS_ENTRIES;
    statistics_of_forgotten_keys => maintenance::stats_count_each_state_and_its_oldest_key: COUNTS_FORGOTTEN;
}

#[test]
fn hidden_ability() {
    type Broken = WrappedStore<{ wrapped::HIDES_STORED_DATA }>;
    fails(|| cases::store_can_be_created::<Broken>(&["leases", "stored_data"]));
}
