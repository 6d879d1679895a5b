//! As much of the crate's error as the queue needs, so that the model needs no build of the crate.

#[derive(Debug, Clone)]
pub(crate) struct Error {
    kind: ErrorKind,
    _context: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    Unavailable,
    Refused,
    Overloaded,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, context: &'static str) -> Self {
        Self { kind, _context: context }
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        self.kind
    }
}
