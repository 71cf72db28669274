//! A short list of token ids that usually needs no allocation.
//!
//! A decode step moves one token id per request to the device and one back. Thousands of one-element vectors
//! per step would cost more than all decisions of the scheduler.

use crate::{Token, packed_list};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::{Deref, DerefMut};

/// Number of token ids stored inline: three, so that the type has the size of two machine words.
const INLINE_TOKENS: usize = 3;

/// A list of token ids; up to three are stored inline. Serialised as a packed list.
#[derive(Clone)]
pub struct TokenVec(TokenVecRepr);

#[derive(Clone)]
enum TokenVecRepr {
    Inline {
        len: u8,
        ids: [Token; INLINE_TOKENS],
    },
    #[expect(clippy::box_collection, reason = "long lists are rare, and rows carry short ones")]
    Heap(Box<Vec<Token>>),
}

impl TokenVec {
    /// Creates an empty list.
    pub const fn new() -> Self {
        Self(TokenVecRepr::Inline { len: 0, ids: [0; INLINE_TOKENS] })
    }

    /// Creates a list of one token id.
    #[inline]
    pub const fn one(id: Token) -> Self {
        Self(TokenVecRepr::Inline { len: 1, ids: [id, 0, 0] })
    }

    /// Appends a token id.
    #[inline]
    pub fn push(&mut self, id: Token) {
        match &mut self.0 {
            TokenVecRepr::Inline { len, ids } if usize::from(*len) < INLINE_TOKENS => {
                ids[usize::from(*len)] = id;
                *len += 1;
            }
            TokenVecRepr::Inline { ids, .. } => {
                let mut heap = Vec::with_capacity(2 * INLINE_TOKENS + 2);
                heap.extend(*ids);
                heap.push(id);
                self.0 = TokenVecRepr::Heap(Box::new(heap));
            }
            TokenVecRepr::Heap(heap) => heap.push(id),
        }
    }

    /// Drops all token ids except the first `count`.
    pub fn truncate(&mut self, count: usize) {
        match &mut self.0 {
            TokenVecRepr::Inline { len, .. } => *len = (*len).min(count.min(INLINE_TOKENS) as u8),
            TokenVecRepr::Heap(heap) => heap.truncate(count),
        }
    }
}

impl Serialize for TokenVec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        packed_list::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for TokenVec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        packed_list::deserialize(deserializer)
    }
}

impl Default for TokenVec {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for TokenVec {
    type Target = [Token];

    #[inline]
    fn deref(&self) -> &[Token] {
        match &self.0 {
            TokenVecRepr::Inline { len, ids } => &ids[..usize::from(*len)],
            TokenVecRepr::Heap(heap) => heap,
        }
    }
}

impl DerefMut for TokenVec {
    fn deref_mut(&mut self) -> &mut [Token] {
        match &mut self.0 {
            TokenVecRepr::Inline { len, ids } => &mut ids[..usize::from(*len)],
            TokenVecRepr::Heap(heap) => heap,
        }
    }
}

impl From<&[Token]> for TokenVec {
    fn from(ids: &[Token]) -> Self {
        if ids.len() > INLINE_TOKENS {
            return Self(TokenVecRepr::Heap(Box::new(ids.to_vec())));
        }
        let mut tokens = Self::new();
        tokens.extend(ids.iter().copied());
        tokens
    }
}

impl From<Vec<Token>> for TokenVec {
    fn from(ids: Vec<Token>) -> Self {
        if ids.len() > INLINE_TOKENS {
            return Self(TokenVecRepr::Heap(Box::new(ids)));
        }
        Self::from(ids.as_slice())
    }
}

impl From<TokenVec> for Vec<Token> {
    fn from(tokens: TokenVec) -> Self {
        match tokens.0 {
            TokenVecRepr::Inline { len, ids } => ids[..usize::from(len)].to_vec(),
            TokenVecRepr::Heap(heap) => *heap,
        }
    }
}

impl Extend<Token> for TokenVec {
    fn extend<I: IntoIterator<Item = Token>>(&mut self, ids: I) {
        for id in ids {
            self.push(id);
        }
    }
}

impl FromIterator<Token> for TokenVec {
    fn from_iter<I: IntoIterator<Item = Token>>(ids: I) -> Self {
        let mut tokens = Self::new();
        tokens.extend(ids);
        tokens
    }
}

impl IntoIterator for TokenVec {
    type Item = Token;
    type IntoIter = TokenVecIter;

    fn into_iter(self) -> TokenVecIter {
        TokenVecIter { tokens: self, next: 0 }
    }
}

impl<'a> IntoIterator for &'a TokenVec {
    type Item = &'a Token;
    type IntoIter = std::slice::Iter<'a, Token>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Iterates over the token ids of a list, in order.
#[derive(Debug, Clone)]
pub struct TokenVecIter {
    tokens: TokenVec,
    next: usize,
}

impl Iterator for TokenVecIter {
    type Item = Token;

    fn next(&mut self) -> Option<Token> {
        let id = self.tokens.get(self.next).copied();
        self.next += 1;
        id
    }
}

impl std::fmt::Debug for TokenVec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self[..].fmt(f)
    }
}

impl PartialEq for TokenVec {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Eq for TokenVec {}

impl PartialEq<Vec<Token>> for TokenVec {
    fn eq(&self, other: &Vec<Token>) -> bool {
        self[..] == other[..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behaves_like_vec_inline_and_on_heap() {
        for count in 0..8 {
            let ids: Vec<Token> = (10..10 + count).collect();
            let mut tokens: TokenVec = ids.iter().copied().collect();
            assert_eq!(tokens, ids);
            assert_eq!(TokenVec::from(ids.clone()), tokens);
            assert_eq!(Vec::from(tokens.clone()), ids);
            assert!(tokens.clone().into_iter().eq(ids.iter().copied()));
            tokens.truncate(2);
            assert_eq!(&*tokens, &ids[..ids.len().min(2)]);
        }
        assert_eq!(size_of::<TokenVec>(), 2 * size_of::<usize>());
    }
}
