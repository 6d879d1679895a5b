//! The calls of a schedule.

use std::fmt;

use proptest::prelude::*;

/// The number of keys in a schedule.
pub(crate) const KEYS: usize = 4;
/// Steps that never end.
pub(crate) const FOR_EVER: u32 = u32::MAX;

/// A call, with its keys and terms.
#[derive(Clone)]
pub(crate) enum Call {
    Claim(Keys, Terms),
    Renew(Keys, Terms),
    Complete(Keys, Terms),
    Release(Keys, Terms),
    Get(usize),
    Forget(usize),
    Purge(u32),
}

/// Numbers of keys, ascending.
pub(crate) type Keys = Vec<usize>;

#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// `true` if a claim is complete at once: `OnClaim`.
    pub(crate) at_once: bool,
    pub(crate) token: u8,
    pub(crate) retention: u32,
    pub(crate) lease: u32,
    pub(crate) payload: Option<u8>,
    /// `true` if a duplicate carries its stored payload.
    pub(crate) fetches: bool,
}

/// One line, so that a schedule is readable.
impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(keys, terms) => write!(f, "claim {keys:?} {terms:?}"),
            Self::Renew(keys, terms) => write!(f, "renew {keys:?} {terms:?}"),
            Self::Complete(keys, terms) => write!(f, "complete {keys:?} {terms:?}"),
            Self::Release(keys, terms) => write!(f, "release {keys:?} {terms:?}"),
            Self::Get(key) => write!(f, "get {key}"),
            Self::Forget(key) => write!(f, "forget {key}"),
            Self::Purge(limit) => write!(f, "purge at most {limit}"),
        }
    }
}

impl fmt::Debug for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_once, token, retention, lease, .. } = self;
        if *at_once { write!(f, "at once ") } else { Ok(()) }?;
        write!(f, "by {token}, lease {lease}, retention ")?;
        if *retention == FOR_EVER { write!(f, "for ever") } else { write!(f, "{retention}") }?;
        self.payload.map_or(Ok(()), |payload| write!(f, ", payload {payload}"))?;
        if self.fetches { write!(f, ", fetches") } else { Ok(()) }
    }
}

/// Mostly one key. The strategies below choose by a number: each level of `prop_oneof!` copies its generator for each
/// alternative, and the generation of a schedule takes longer than its calls then.
fn some_keys(of: usize) -> impl Strategy<Value = Keys> {
    (0..4, 0..of, 1_u8..1 << of).prop_map(move |(choice, place, mask)| match choice {
        0..3 => vec![place],
        _ => (0..of).filter(|place| mask >> place & 1 == 1).collect(),
    })
}

fn terms() -> impl Strategy<Value = Terms> {
    let retention = (0..10, 1_u32..6).prop_map(|(choice, steps)| match choice {
        0..8 => steps,
        8 => 0,
        _ => FOR_EVER,
    });
    let lease = (0..10, 1_u32..4, 6_u32..10).prop_map(|(choice, short, long)| match choice {
        0..8 => short,
        8 => 0,
        _ => long,
    });
    (1_u8..4, retention, lease, prop::option::of(0_u8..2), any::<bool>()).prop_map(
        |(token, retention, lease, payload, fetches)| Terms {
            at_once: false,
            token,
            retention,
            lease,
            payload,
            fetches,
        },
    )
}

/// A call: `purges` in `24 + purges` are purges. The replies to the others can be compared key by key, whatever else
/// runs.
pub(crate) fn call(of: usize, purges: u32) -> impl Strategy<Value = Call> {
    let at_once = |terms| Terms { at_once: true, ..terms };
    let asked = (0..24 + purges, some_keys(of), terms(), 1_u32..4, 0..of, any::<bool>());
    asked.prop_map(move |(choice, keys, terms, limit, key, all)| match choice {
        0..6 => Call::Claim(keys, terms),
        6..10 => Call::Complete(keys, terms),
        10..13 => Call::Release(keys, terms),
        13..16 => Call::Renew(keys, terms),
        16..19 => Call::Claim(keys, at_once(terms)),
        19..21 => Call::Release(keys, at_once(terms)),
        21..23 => Call::Get(key),
        23 => Call::Forget(key),
        _ => Call::Purge(if all { 100 } else { limit }),
    })
}
