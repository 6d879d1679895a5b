//! [`CountedAs`]: the namespace under which metrics count a key.

use std::sync::{PoisonError, RwLock};

/// The namespace under which metrics count a key, where it is not the key's own.
///
/// Tenants have namespaces of their own under [`namespace_by`](super::KeyExtractor::namespace_by). A metric with
/// one series for each of them would grow without a bound.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CountedAs {
    /// A place in [`NAMES`], counted from 1. Each key has it, so it has two bytes.
    place: u16,
}

/// The namespaces that count in this process. A recorder of metrics never forgets a namespace either.
static NAMES: RwLock<Vec<Box<str>>> = RwLock::new(Vec::new());

impl CountedAs {
    /// Beyond 65,535 namespaces, a key counts under its own.
    pub(crate) fn new(namespace: &str) -> Self {
        let mut names = NAMES.write().unwrap_or_else(PoisonError::into_inner);
        let known = names.iter().position(|name| **name == *namespace);
        let at = known.or_else(|| {
            let has_room = names.len() < usize::from(u16::MAX);
            has_room.then(|| names.push(namespace.into())).map(|()| names.len() - 1)
        });
        let place = at.and_then(|at| u16::try_from(at + 1).ok());
        Self { place: place.unwrap_or_default() }
    }

    pub(super) fn name(self, own: &str) -> String {
        let names = NAMES.read().unwrap_or_else(PoisonError::into_inner);
        let name = usize::from(self.place).checked_sub(1).and_then(|at| names.get(at));
        name.map_or(own, |name| name).to_owned()
    }
}
