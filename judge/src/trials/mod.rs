//! The trials, each with its words beside its function.

mod after;
mod copies;
mod ids;
mod kills;
mod requests;
mod signatures;

use crate::trial::Trial;

/// Returns all trials, in the order in which they run. Those that kill the receiver come late.
pub(crate) fn all() -> impl Iterator<Item = &'static Trial> {
    let parts = [
        copies::TRIALS,
        signatures::TRIALS,
        ids::TRIALS,
        requests::TRIALS,
        kills::TRIALS,
        after::TRIALS,
    ];
    parts.into_iter().flatten()
}
