//! A list that is nearly always empty, as wide as one pointer.
//!
//! Steps of thousands of rows stream rows, results and events through the caches. What few of them
//! carry (log-probabilities, block tables, errors) must not widen them all.

use serde::{Deserialize, Serialize, Serializer};
use std::ops::{Deref, DerefMut};

/// A `Vec` behind one pointer; empty lists own nothing. On the wire it is a sequence.
#[derive(Clone, Deserialize)]
#[serde(from = "Vec<T>")]
pub struct ThinVec<T>(
    #[expect(clippy::box_collection, reason = "the point: one word instead of three")]
    Option<Box<Vec<T>>>,
);

impl<T> ThinVec<T> {
    /// An empty list.
    pub const fn new() -> Self {
        Self(None)
    }

    /// Appends one item.
    pub fn push(&mut self, item: T) {
        self.0.get_or_insert_default().push(item);
    }

    /// Keeps the first `count` items.
    pub fn truncate(&mut self, count: usize) {
        if let Some(items) = &mut self.0 {
            items.truncate(count);
        }
    }
}

impl<T: Serialize> Serialize for ThinVec<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self[..].serialize(serializer)
    }
}

impl<T> Default for ThinVec<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for ThinVec<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.0.as_ref().map_or(&[], |items| items)
    }
}

impl<T> DerefMut for ThinVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.0.as_mut().map_or(&mut [], |items| items)
    }
}

impl<T> From<Vec<T>> for ThinVec<T> {
    fn from(items: Vec<T>) -> Self {
        Self((!items.is_empty()).then(|| Box::new(items)))
    }
}

impl<T> From<ThinVec<T>> for Vec<T> {
    fn from(items: ThinVec<T>) -> Self {
        items.0.map_or_else(Vec::new, |items| *items)
    }
}

impl<T> Extend<T> for ThinVec<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        items.into_iter().for_each(|item| self.push(item));
    }
}

impl<T> FromIterator<T> for ThinVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Vec::from_iter(items).into()
    }
}

impl<T> IntoIterator for ThinVec<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        Vec::from(self).into_iter()
    }
}

impl<'a, T> IntoIterator for &'a ThinVec<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for ThinVec<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self[..].fmt(f)
    }
}

impl<T: PartialEq> PartialEq for ThinVec<T> {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl<T: Eq> Eq for ThinVec<T> {}

impl<T: PartialEq> PartialEq<Vec<T>> for ThinVec<T> {
    fn eq(&self, other: &Vec<T>) -> bool {
        self[..] == other[..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_like_a_vector() {
        for count in 0..4 {
            let items: Vec<u32> = (0..count).collect();
            let mut thin = ThinVec::new();
            thin.extend(items.iter().copied());
            assert_eq!(thin, items);
            assert_eq!(ThinVec::from(items.clone()), thin);
            assert_eq!(Vec::from(thin.clone()), items);
            assert!(thin.clone().into_iter().eq(items.iter().copied()));
            thin.truncate(2);
            assert_eq!(&*thin, &items[..items.len().min(2)]);
        }
        assert_eq!(size_of::<ThinVec<u32>>(), size_of::<usize>());
    }
}
