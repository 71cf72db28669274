//! A short list of token ids that usually needs no allocation.
//!
//! A decode step moves one id per request into the device and one out of it. Thousands of
//! one-element vectors per step cost more than everything the scheduler decides.

use crate::{Token, packed};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::{Deref, DerefMut};

/// Ids held in place: with these the type takes two words.
const INLINE: usize = 3;

/// A list of token ids; up to three of them are held in place. On the wire it is packed.
#[derive(Clone)]
pub struct Tokens(Repr);

#[derive(Clone)]
enum Repr {
    Inline {
        len: u8,
        ids: [Token; INLINE],
    },
    #[expect(clippy::box_collection, reason = "long lists are rare, and rows carry short ones")]
    Heap(Box<Vec<Token>>),
}

impl Tokens {
    /// No ids.
    pub const fn new() -> Self {
        Self(Repr::Inline { len: 0, ids: [0; INLINE] })
    }

    /// One id.
    #[inline]
    pub const fn one(id: Token) -> Self {
        Self(Repr::Inline { len: 1, ids: [id, 0, 0] })
    }

    /// Appends one id.
    #[inline]
    pub fn push(&mut self, id: Token) {
        match &mut self.0 {
            Repr::Inline { len, ids } if usize::from(*len) < INLINE => {
                ids[usize::from(*len)] = id;
                *len += 1;
            }
            Repr::Inline { ids, .. } => {
                let mut heap = Vec::with_capacity(2 * INLINE + 2);
                heap.extend(*ids);
                heap.push(id);
                self.0 = Repr::Heap(Box::new(heap));
            }
            Repr::Heap(heap) => heap.push(id),
        }
    }

    /// Keeps the first `count` ids.
    pub fn truncate(&mut self, count: usize) {
        match &mut self.0 {
            Repr::Inline { len, .. } => *len = (*len).min(count.min(INLINE) as u8),
            Repr::Heap(heap) => heap.truncate(count),
        }
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        packed::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        packed::deserialize(deserializer)
    }
}

impl Default for Tokens {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for Tokens {
    type Target = [Token];

    #[inline]
    fn deref(&self) -> &[Token] {
        match &self.0 {
            Repr::Inline { len, ids } => &ids[..usize::from(*len)],
            Repr::Heap(heap) => heap,
        }
    }
}

impl DerefMut for Tokens {
    fn deref_mut(&mut self) -> &mut [Token] {
        match &mut self.0 {
            Repr::Inline { len, ids } => &mut ids[..usize::from(*len)],
            Repr::Heap(heap) => heap,
        }
    }
}

impl From<&[Token]> for Tokens {
    fn from(ids: &[Token]) -> Self {
        if ids.len() > INLINE {
            return Self(Repr::Heap(Box::new(ids.to_vec())));
        }
        let mut tokens = Self::new();
        tokens.extend(ids.iter().copied());
        tokens
    }
}

impl From<Vec<Token>> for Tokens {
    fn from(ids: Vec<Token>) -> Self {
        if ids.len() > INLINE {
            return Self(Repr::Heap(Box::new(ids)));
        }
        Self::from(ids.as_slice())
    }
}

impl From<Tokens> for Vec<Token> {
    fn from(tokens: Tokens) -> Self {
        match tokens.0 {
            Repr::Inline { len, ids } => ids[..usize::from(len)].to_vec(),
            Repr::Heap(heap) => *heap,
        }
    }
}

impl Extend<Token> for Tokens {
    fn extend<I: IntoIterator<Item = Token>>(&mut self, ids: I) {
        for id in ids {
            self.push(id);
        }
    }
}

impl FromIterator<Token> for Tokens {
    fn from_iter<I: IntoIterator<Item = Token>>(ids: I) -> Self {
        let mut tokens = Self::new();
        tokens.extend(ids);
        tokens
    }
}

impl IntoIterator for Tokens {
    type Item = Token;
    type IntoIter = TokensIter;

    fn into_iter(self) -> TokensIter {
        TokensIter { tokens: self, next: 0 }
    }
}

impl<'a> IntoIterator for &'a Tokens {
    type Item = &'a Token;
    type IntoIter = std::slice::Iter<'a, Token>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Ids of a list, in order.
#[derive(Debug, Clone)]
pub struct TokensIter {
    tokens: Tokens,
    next: usize,
}

impl Iterator for TokensIter {
    type Item = Token;

    fn next(&mut self) -> Option<Token> {
        let id = self.tokens.get(self.next).copied();
        self.next += 1;
        id
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self[..].fmt(f)
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Eq for Tokens {}

impl PartialEq<Vec<Token>> for Tokens {
    fn eq(&self, other: &Vec<Token>) -> bool {
        self[..] == other[..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_like_a_vector_on_both_sides_of_the_bound() {
        for count in 0..8 {
            let ids: Vec<Token> = (10..10 + count).collect();
            let mut tokens: Tokens = ids.iter().copied().collect();
            assert_eq!(tokens, ids);
            assert_eq!(Tokens::from(ids.clone()), tokens);
            assert_eq!(Vec::from(tokens.clone()), ids);
            assert!(tokens.clone().into_iter().eq(ids.iter().copied()));
            tokens.truncate(2);
            assert_eq!(&*tokens, &ids[..ids.len().min(2)]);
        }
        assert_eq!(size_of::<Tokens>(), 2 * size_of::<usize>());
    }
}
