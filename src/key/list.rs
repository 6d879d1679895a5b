//! [`List`]: a list with one item in most cases.

use smallvec::SmallVec;

/// A list that allocates only for more than one item, because most deliveries carry one event.
pub(crate) type List<T> = SmallVec<[T; 1]>;
