//! [`Storm`]: whether it is worth to look before inserting.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether most keys are known already, as when a sender delivers again what it thinks was lost.
///
/// An insertion tells for nothing whether a key is new, but what is stored of one that is not has
/// to be read by a second statement. So in quiet times rows are inserted first; while at least half
/// of them turn out to be known, they are looked up first, and a known one costs one read.
#[derive(Debug, Default)]
pub(super) struct Storm(AtomicBool);

impl Storm {
    /// Whether to look first.
    pub(super) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// So many of the rows of a statement were known.
    pub(super) fn saw(&self, known: usize, rows: usize) {
        if rows == 0 {
            return;
        }
        let on = known * 2 >= rows;
        // Read by every statement, and hardly ever another.
        if on != self.is_on() {
            self.0.store(on, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_on_while_half_of_the_rows_are_known() {
        let storm = Storm::default();
        assert!(!storm.is_on());
        for (known, rows, on) in
            [(1, 3, false), (1, 2, true), (0, 1, false), (0, 0, false), (1, 1, true)]
        {
            storm.saw(known, rows);
            assert_eq!(storm.is_on(), on, "{known} of {rows}");
        }
    }
}
