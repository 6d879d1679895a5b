//! As much of the crate's error as the queue needs, so that the model needs no build of the crate.

#[derive(Debug, Clone)]
pub(crate) struct StoreError {
    kind: StoreErrorKind,
    _context: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreErrorKind {
    Unavailable,
    Refused,
    Overloaded,
}

impl StoreError {
    pub(crate) fn new(kind: StoreErrorKind, context: &'static str) -> Self {
        Self { kind, _context: context }
    }

    pub(crate) fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}
