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
    /// Claims under `OnClaim`.
    ClaimAtOnce(Keys, Terms),
    /// Releases under `OnClaim`.
    ReleaseAtOnce(Keys, Terms),
    Claim(Keys, Terms),
    Renew(Keys, Terms),
    Complete(Keys, Terms),
    Release(Keys, Terms),
    Get(usize),
    Forget(usize),
    Purge(u32),
    Count,
    /// Advances the time by this many steps.
    Advance(u32),
}

/// Numbers of keys, ascending.
pub(crate) type Keys = Vec<usize>;

#[derive(Clone, Copy)]
pub(crate) struct Terms {
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
            Self::ClaimAtOnce(keys, terms) => write!(f, "claim at once {keys:?} {terms:?}"),
            Self::ReleaseAtOnce(keys, terms) => write!(f, "release at once {keys:?} {terms:?}"),
            Self::Claim(keys, terms) => write!(f, "claim {keys:?} {terms:?}"),
            Self::Renew(keys, terms) => write!(f, "renew {keys:?} {terms:?}"),
            Self::Complete(keys, terms) => write!(f, "complete {keys:?} {terms:?}"),
            Self::Release(keys, terms) => write!(f, "release {keys:?} {terms:?}"),
            Self::Get(key) => write!(f, "get {key}"),
            Self::Forget(key) => write!(f, "forget {key}"),
            Self::Purge(limit) => write!(f, "purge at most {limit}"),
            Self::Count => write!(f, "count"),
            Self::Advance(steps) => write!(f, "{steps} steps pass"),
        }
    }
}

impl fmt::Debug for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, retention, lease, .. } = self;
        write!(f, "by {token}, lease {lease}, retention ")?;
        if *retention == FOR_EVER { write!(f, "for ever") } else { write!(f, "{retention}") }?;
        self.payload.map_or(Ok(()), |payload| write!(f, ", payload {payload}"))?;
        if self.fetches { write!(f, ", fetches") } else { Ok(()) }
    }
}

fn some_keys(of: usize) -> impl Strategy<Value = Keys> {
    let of_mask = move |mask: u8| (0..of).filter(|place| mask >> place & 1 == 1).collect();
    // Most calls have one key.
    prop_oneof![
        3 => (0..of).prop_map(|place| vec![place]),
        1 => (1_u8..1 << of).prop_map(of_mask),
    ]
}

fn terms() -> impl Strategy<Value = Terms> {
    let retention = prop_oneof![
        8 => 1_u32..6,
        1 => Just(0),
        1 => Just(FOR_EVER),
    ];
    let lease = prop_oneof![
        8 => 1_u32..4,
        1 => Just(0),
        1 => 6_u32..10,
    ];
    (1_u8..4, retention, lease, prop::option::of(0_u8..2), any::<bool>()).prop_map(
        |(token, retention, lease, payload, fetches)| Terms {
            token,
            retention,
            lease,
            payload,
            fetches,
        },
    )
}

/// A call whose replies the check can compare key by key, whatever else runs.
pub(crate) fn asked(of: usize) -> impl Strategy<Value = Call> {
    let asked = move || (some_keys(of), terms());
    prop_oneof![
        3 => asked().prop_map(|(keys, terms)| Call::ClaimAtOnce(keys, terms)),
        2 => asked().prop_map(|(keys, terms)| Call::ReleaseAtOnce(keys, terms)),
        6 => asked().prop_map(|(keys, terms)| Call::Claim(keys, terms)),
        3 => asked().prop_map(|(keys, terms)| Call::Renew(keys, terms)),
        4 => asked().prop_map(|(keys, terms)| Call::Complete(keys, terms)),
        3 => asked().prop_map(|(keys, terms)| Call::Release(keys, terms)),
        2 => (0..of).prop_map(Call::Get),
        1 => (0..of).prop_map(Call::Forget),
    ]
}

pub(crate) fn purge() -> impl Strategy<Value = Call> {
    prop_oneof![1_u32..4, Just(100)].prop_map(Call::Purge)
}

/// Calls that follow each other.
pub(crate) fn sequence() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        25 => asked(KEYS),
        2 => purge(),
        2 => Just(Call::Count),
        5 => (1_u32..4).prop_map(Call::Advance),
    ];
    prop::collection::vec(call, 1..60)
}
