//! The model: replies and rows of one key, written from the text of the contract.

use tower_dedup::adapter::contract::{CompleteReply, RenewReply};
use tower_dedup::adapter::maintenance::ForgetReply;

use super::call::{Call, FOR_EVER, Terms};

/// A row. Times are steps.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub(crate) token: Option<u8>,
    lease_until: u32,
    attempts: u32,
    takeover: bool,
    first_seen_at: u32,
    pub(crate) complete: bool,
    expires_at: u32,
    payload: Option<u8>,
}

impl Row {
    /// The first claim of a key.
    fn claimed(terms: Terms, now: u32) -> Self {
        Self {
            token: Some(terms.token),
            lease_until: now.saturating_add(terms.lease),
            attempts: 1,
            takeover: false,
            first_seen_at: now,
            complete: false,
            expires_at: now.saturating_add(terms.retention),
            payload: None,
        }
    }

    fn completed(terms: Terms, now: u32) -> Self {
        Self { complete: true, payload: terms.payload, ..Self::claimed(terms, now) }
    }

    /// What a release or `forget` may leave where a key has no row: it fences calls that are on their way.
    fn fence(now: u32) -> Self {
        let (payload, at_once, fetches) = (None, false, false);
        let terms = Terms { at_once, token: 0, retention: 0, lease: 0, payload, fetches };
        Self { token: None, attempts: 0, ..Self::claimed(terms, now) }
    }

    fn is_leased(&self, now: u32) -> bool {
        !self.complete && self.token.is_some() && self.lease_until > now
    }

    /// A row with a live lease never expires.
    pub(crate) fn is_expired(&self, now: u32) -> bool {
        self.expires_at <= now && !self.is_leased(now)
    }

    fn duplicate(&self, terms: Terms, now: u32) -> Reply {
        Reply::Duplicate(now - self.first_seen_at, terms.fetches.then_some(self.payload))
    }

    /// Returns the row after a claim of a row without a holder.
    fn claimed_again(&self, fresh: &Self) -> Self {
        Self {
            attempts: self.attempts + 1,
            // A released row is not taken over.
            takeover: self.token.is_some(),
            first_seen_at: self.first_seen_at,
            ..fresh.clone()
        }
    }

    fn is_claim_of(&self, terms: Terms) -> bool {
        !self.complete && self.token == Some(terms.token)
    }
}

/// A reply for one key, with times in whole steps, as in the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The attempt and the takeover of a claim.
    Granted(u32, bool),
    /// First seen this many steps ago; with the stored payload, if the call fetches it.
    Duplicate(u32, Option<Option<u8>>),
    InFlight,
    Renewed(RenewReply),
    Completed(CompleteReply),
    Released,
    Forgotten(ForgetReply),
    /// State, attempts, takeover, first seen this many steps ago, expires in this many.
    Entry(Option<(State, u32, bool, i64, i64)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// For this many more steps.
    InFlight(i64),
    Released,
    Complete,
}

/// Returns the reply for one key, and the rows that the call may leave behind.
///
/// A release and `forget` may leave a row that has expired in place of none, and a row whose retention has ended for
/// longer.
pub(crate) fn outcome(call: &Call, stored: Option<Row>, now: u32) -> (Reply, Vec<Option<Row>>) {
    let (reply, left) = contract(call, stored, now);
    let fence = match (&reply, &left) {
        (Reply::Released, None) | (Reply::Forgotten(ForgetReply::Removed), _) => Row::fence(now),
        (Reply::Released, Some(row)) if row.expires_at < now => {
            Row { expires_at: now, ..row.clone() }
        }
        _ => return (reply, vec![left]),
    };
    (reply, vec![left, Some(fence)])
}

/// Returns the reply for one key, and the row that the call leaves behind.
fn contract(call: &Call, stored: Option<Row>, now: u32) -> (Reply, Option<Row>) {
    // An expired row counts as absent, except for the call that holds it.
    let live = stored.clone().filter(|row| !row.is_expired(now));
    match (call, stored) {
        (Call::Claim(_, terms), stored) if terms.at_once => {
            let fresh = Row::completed(*terms, now);
            let claim = match live {
                Some(row) if row.complete && row.token == Some(terms.token) => {
                    // A repetition; a completion that was inserted counts no attempt.
                    return (Reply::Granted(row.attempts.max(1), row.takeover), stored);
                }
                Some(row) if row.complete => return (row.duplicate(*terms, now), stored),
                Some(row) if row.is_leased(now) => return (Reply::InFlight, stored),
                Some(row) => row.claimed_again(&fresh),
                None => fresh,
            };
            (Reply::Granted(claim.attempts, claim.takeover), Some(claim))
        }
        (Call::Release(_, terms), stored) if terms.at_once => match stored {
            Some(row) if row.complete && row.token == Some(terms.token) => (Reply::Released, None),
            stored => (Reply::Released, stored),
        },
        (Call::Claim(_, terms), stored) => {
            let fresh = Row::claimed(*terms, now);
            let claim = match (stored.clone().filter(|row| row.is_claim_of(*terms)), live) {
                // A repetition gets the reply of the first call.
                (Some(Row { attempts, takeover, first_seen_at, .. }), _) => {
                    Row { attempts, takeover, first_seen_at, ..fresh }
                }
                (None, Some(row)) if row.complete => {
                    return (row.duplicate(*terms, now), stored);
                }
                (None, Some(row)) if row.is_leased(now) => return (Reply::InFlight, stored),
                (None, Some(row)) => row.claimed_again(&fresh),
                (None, None) => fresh,
            };
            (Reply::Granted(claim.attempts, claim.takeover), Some(claim))
        }
        (Call::Renew(_, terms), stored) => {
            let fresh = Row::claimed(*terms, now);
            match stored {
                None => (Reply::Renewed(RenewReply::Held), Some(fresh)),
                Some(row) if row.is_claim_of(*terms) => {
                    let renewed = Row { lease_until: fresh.lease_until, ..row };
                    (Reply::Renewed(RenewReply::Held), Some(renewed))
                }
                stored => (Reply::Renewed(RenewReply::Lost), stored),
            }
        }
        (Call::Complete(_, terms), stored) => {
            let fresh = Row::completed(*terms, now);
            let is_known = |row: &Row| {
                if row.complete { row.expires_at > now } else { row.attempts > 0 }
            };
            let Some(row) = stored.filter(is_known) else {
                let inserted = Row { attempts: 0, ..fresh };
                return (Reply::Completed(CompleteReply::Inserted), Some(inserted));
            };
            let reply = match (row.token == Some(terms.token), row.attempts) {
                // Repeated: the first call inserted the row.
                (true, 0) => CompleteReply::Inserted,
                (true, _) => CompleteReply::Held,
                (false, _) => CompleteReply::LeaseLost,
            };
            let row = if row.complete {
                row
            } else {
                // A completion does not expire at once.
                let expired = row.expires_at <= now;
                let expires_at = if expired { fresh.expires_at } else { row.expires_at };
                Row { complete: true, payload: terms.payload, expires_at, ..row }
            };
            (Reply::Completed(reply), Some(row))
        }
        (Call::Release(_, terms), stored) => match stored {
            Some(row) if row.is_claim_of(*terms) => {
                (Reply::Released, Some(Row { token: None, ..row }))
            }
            stored => (Reply::Released, stored),
        },
        (Call::Get(_), stored) => {
            let entry = live.map(|row| {
                let state = match (row.complete, row.token) {
                    (true, _) => State::Complete,
                    (false, None) => State::Released,
                    (false, Some(_)) => State::InFlight(steps_from(now, row.lease_until)),
                };
                let ago = i64::from(now - row.first_seen_at);
                (state, row.attempts, row.takeover, ago, steps_from(now, row.expires_at))
            });
            (Reply::Entry(entry), stored)
        }
        (Call::Forget(_), stored) => match stored {
            None => (Reply::Forgotten(ForgetReply::Missing), None),
            Some(row) if row.is_expired(now) => (Reply::Forgotten(ForgetReply::Missing), Some(row)),
            Some(row) if row.is_leased(now) => (Reply::Forgotten(ForgetReply::InFlight), Some(row)),
            Some(_) => (Reply::Forgotten(ForgetReply::Removed), None),
        },
        (Call::Purge(_), _) => unreachable!("a purge has no key"),
    }
}

/// Returns [`FOR_EVER`] for all times that are far away.
fn steps_from(now: u32, at: u32) -> i64 {
    if at == FOR_EVER { FOR_EVER.into() } else { i64::from(at) - i64::from(now) }
}
