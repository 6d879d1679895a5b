//! [`List`]: a list that is mostly of one.

use smallvec::SmallVec;

/// A list that allocates only for more than one item, because most deliveries carry one event.
pub(crate) type List<T> = SmallVec<[T; 1]>;
