//! The model: what the contract says of one key, written from its words.

use tower_dedup::adapter::{Completed, Forgotten, Released, Renewed};

use super::call::{Call, FOR_EVER, Terms};

/// Times are steps.
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
    /// Claimed by nobody before.
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

    fn is_leased(&self, now: u32) -> bool {
        !self.complete && self.token.is_some() && self.lease_until > now
    }

    /// A live lease never is.
    pub(crate) fn is_expired(&self, now: u32) -> bool {
        self.expires_at <= now && !self.is_leased(now)
    }

    /// Expired a step ago, and a lease that has outlived it lapsed as long ago.
    pub(crate) fn is_purged(&self, now: u32) -> bool {
        let is_past = |at: u32| at.saturating_add(1) <= now;
        is_past(self.expires_at)
            && (self.complete || self.token.is_none() || is_past(self.lease_until))
    }

    fn duplicate(&self, terms: Terms, now: u32) -> Answer {
        Answer::Duplicate(now - self.first_seen_at, terms.fetches.then_some(self.payload))
    }

    /// What a claim makes of a row that nobody holds.
    fn claimed_again(&self, anew: Self) -> Self {
        Self {
            attempts: self.attempts + 1,
            // Not if it was released.
            takeover: self.token.is_some(),
            first_seen_at: self.first_seen_at,
            ..anew
        }
    }

    fn is_claim_of(&self, terms: Terms) -> bool {
        !self.complete && self.token == Some(terms.token)
    }
}

/// An answer for one key: times in whole steps, as the model has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Of a claim: attempt and takeover.
    Granted(u32, bool),
    /// First seen so many steps ago; with the stored payload, if that is fetched.
    Duplicate(u32, Option<Option<u8>>),
    InFlight,
    Renewed(Renewed),
    Completed(Completed),
    Released(Released),
    Forgotten(Forgotten),
    /// State, attempts, takeover, first seen so many steps ago, expires in so many.
    Entry(Option<(State, u32, bool, i64, i64)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// For so many more steps.
    InFlight(i64),
    Released,
    Complete,
}

/// What the contract says of one key: the answer, and what is stored from then on.
pub(crate) fn contract(call: &Call, stored: Option<Row>, now: u32) -> (Answer, Option<Row>) {
    // What has expired is as good as absent, for all but those who hold it.
    let live = stored.clone().filter(|row| !row.is_expired(now));
    match (call, stored) {
        (Call::ClaimAtOnce(_, terms), stored) => {
            let anew = Row::completed(*terms, now);
            let claim = match live {
                Some(row) if row.complete && row.token == Some(terms.token) => {
                    // A repetition; a completion that was inserted counts no attempt.
                    return (Answer::Granted(row.attempts.max(1), row.takeover), stored);
                }
                Some(row) if row.complete => return (row.duplicate(*terms, now), stored),
                Some(row) if row.is_leased(now) => return (Answer::InFlight, stored),
                Some(row) => row.claimed_again(anew),
                None => anew,
            };
            (Answer::Granted(claim.attempts, claim.takeover), Some(claim))
        }
        (Call::ReleaseAtOnce(_, terms), stored) => match stored {
            Some(row) if row.complete && row.token == Some(terms.token) => {
                (Answer::Released(Released::Released), None)
            }
            stored => (Answer::Released(Released::NotHeld), stored),
        },
        (Call::Claim(_, terms), stored) => {
            let anew = Row::claimed(*terms, now);
            let claim = match (stored.clone().filter(|row| row.is_claim_of(*terms)), live) {
                // A repetition is told what it was told the first time.
                (Some(Row { attempts, takeover, first_seen_at, .. }), _) => {
                    Row { attempts, takeover, first_seen_at, ..anew }
                }
                (None, Some(row)) if row.complete => {
                    return (row.duplicate(*terms, now), stored);
                }
                (None, Some(row)) if row.is_leased(now) => return (Answer::InFlight, stored),
                (None, Some(row)) => row.claimed_again(anew),
                (None, None) => anew,
            };
            (Answer::Granted(claim.attempts, claim.takeover), Some(claim))
        }
        (Call::Renew(_, terms), stored) => {
            let anew = Row::claimed(*terms, now);
            match stored {
                None => (Answer::Renewed(Renewed::Held), Some(anew)),
                Some(row) if row.is_claim_of(*terms) => {
                    let renewed = Row { lease_until: anew.lease_until, ..row };
                    (Answer::Renewed(Renewed::Held), Some(renewed))
                }
                stored => (Answer::Renewed(Renewed::Lost), stored),
            }
        }
        (Call::Complete(_, terms), stored) => {
            let anew = Row::completed(*terms, now);
            let Some(row) = stored.filter(|row| !row.complete || row.expires_at > now) else {
                let inserted = Row { attempts: 0, ..anew };
                return (Answer::Completed(Completed::Inserted), Some(inserted));
            };
            let held = row.token == Some(terms.token);
            let answer = if held { Completed::Held } else { Completed::LeaseLost };
            let row = if row.complete {
                row
            } else {
                // Never expired at birth.
                let expired = row.expires_at <= now;
                let expires_at = if expired { anew.expires_at } else { row.expires_at };
                Row { complete: true, payload: terms.payload, expires_at, ..row }
            };
            (Answer::Completed(answer), Some(row))
        }
        (Call::Release(_, terms), stored) => match stored {
            Some(row) if row.is_claim_of(*terms) => {
                (Answer::Released(Released::Released), Some(Row { token: None, ..row }))
            }
            stored => (Answer::Released(Released::NotHeld), stored),
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
            (Answer::Entry(entry), stored)
        }
        (Call::Forget(_), stored) => match stored {
            None => (Answer::Forgotten(Forgotten::Missing), None),
            Some(row) if row.is_leased(now) => (Answer::Forgotten(Forgotten::InFlight), Some(row)),
            Some(_) => (Answer::Forgotten(Forgotten::Removed), None),
        },
        (Call::Purge(_) | Call::Count | Call::Advance(_), _) => {
            unreachable!("these ask for no key")
        }
    }
}

/// As many as [`FOR_EVER`] for all that is far away.
fn steps_from(now: u32, at: u32) -> i64 {
    if at == FOR_EVER { FOR_EVER.into() } else { i64::from(at) - i64::from(now) }
}
