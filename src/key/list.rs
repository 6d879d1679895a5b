//! [`List`]: what is mostly one.

use std::ops::{Deref, DerefMut};

/// A list that takes no allocation where it is of one, as almost every delivery's are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum List<T> {
    One([T; 1]),
    /// Any other number.
    Many(Vec<T>),
}

impl<T> List<T> {
    pub(crate) const fn one(item: T) -> Self {
        Self::One([item])
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

/// One by one, or lists of the same items would differ.
impl<T> From<Vec<T>> for List<T> {
    fn from(many: Vec<T>) -> Self {
        <[T; 1]>::try_from(many).map_or_else(Self::Many, Self::One)
    }
}

impl<T> From<List<T>> for Vec<T> {
    fn from(list: List<T>) -> Self {
        match list {
            List::One(one) => one.into(),
            List::Many(many) => many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_known_by_its_items() {
        for many in [vec![], vec![1], vec![1, 2]] {
            let list = List::from(many.clone());
            assert_eq!(*list, *many);
            assert_eq!(Vec::from(list), many);
        }
        assert_eq!(List::from(vec![1]), List::one(1));
    }
}
