//! Encodes a list of numbers as one little-endian MessagePack `bin`: a prompt of thousands of token ids is
//! copied, not parsed. Used through `#[serde(with = "crate::packed_list")]`.

use crate::{BlockId, BlockIds, ExpertTokenCount, ThinVec, Token, TokenVec};
use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};
use std::marker::PhantomData;
use std::ops::Deref;

/// Maximum size in bytes of a list that is encoded without an allocation, such as a list with one token id
/// (of a decode row) or with one new block id.
const INLINE_BYTES: usize = 64;

/// A number, or a pair of numbers, of a fixed encoded size.
pub(crate) trait PackedItem: Copy {
    /// Encoded size in bytes.
    const BYTES: usize;
    /// Writes exactly `BYTES` bytes.
    fn write(self, out: &mut [u8]);
    /// Reads exactly `BYTES` bytes.
    fn read(bytes: &[u8]) -> Self;
}

impl PackedItem for u32 {
    const BYTES: usize = 4;

    fn write(self, out: &mut [u8]) {
        out.copy_from_slice(&self.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        let mut word = [0; 4];
        word.copy_from_slice(bytes);
        Self::from_le_bytes(word)
    }
}

impl PackedItem for f32 {
    const BYTES: usize = 4;

    fn write(self, out: &mut [u8]) {
        self.to_bits().write(out);
    }

    fn read(bytes: &[u8]) -> Self {
        Self::from_bits(u32::read(bytes))
    }
}

impl PackedItem for BlockId {
    const BYTES: usize = 4;

    fn write(self, out: &mut [u8]) {
        self.0.write(out);
    }

    fn read(bytes: &[u8]) -> Self {
        Self(u32::read(bytes))
    }
}

impl PackedItem for (Token, f32) {
    const BYTES: usize = 8;

    fn write(self, out: &mut [u8]) {
        self.0.write(&mut out[..4]);
        self.1.to_bits().write(&mut out[4..]);
    }

    fn read(bytes: &[u8]) -> Self {
        (u32::read(&bytes[..4]), f32::from_bits(u32::read(&bytes[4..])))
    }
}

impl PackedItem for ExpertTokenCount {
    const BYTES: usize = 8;

    fn write(self, out: &mut [u8]) {
        (u32::from(self.layer) << 16 | u32::from(self.expert)).write(&mut out[..4]);
        self.tokens.write(&mut out[4..]);
    }

    fn read(bytes: &[u8]) -> Self {
        let index = u32::read(&bytes[..4]);
        let (layer, expert) = ((index >> 16) as u16, index as u16);
        Self { layer, expert, tokens: u32::read(&bytes[4..]) }
    }
}

/// A list type that can be encoded in packed form.
pub(crate) trait PackedList:
    Deref<Target = [Self::Item]> + FromIterator<Self::Item>
{
    type Item: PackedItem;
}

impl<T: PackedItem> PackedList for Vec<T> {
    type Item = T;
}

impl<T: PackedItem> PackedList for ThinVec<T> {
    type Item = T;
}

impl PackedList for BlockIds {
    type Item = BlockId;
}

impl PackedList for TokenVec {
    type Item = Token;
}

pub(crate) fn serialize<L: PackedList, S: Serializer>(
    list: &L,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let size = L::Item::BYTES;
    let bytes = list.len() * size;
    let (mut small, mut large) = ([0; INLINE_BYTES], Vec::new());
    let out = if bytes <= INLINE_BYTES {
        &mut small[..bytes]
    } else {
        large.resize(bytes, 0);
        &mut large[..]
    };
    for (item, out) in list.iter().zip(out.chunks_exact_mut(size)) {
        item.write(out);
    }
    serializer.serialize_bytes(out)
}

pub(crate) fn deserialize<'de, L: PackedList, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<L, D::Error> {
    deserializer.deserialize_bytes(PackedVisitor(PhantomData))
}

struct PackedVisitor<L>(PhantomData<L>);

impl<L: PackedList> Visitor<'_> for PackedVisitor<L> {
    type Value = L;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a multiple of {} bytes", L::Item::BYTES)
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<L, E> {
        let items = bytes.chunks_exact(L::Item::BYTES);
        if !items.remainder().is_empty() {
            return Err(E::invalid_length(bytes.len(), &self));
        }
        Ok(items.map(L::Item::read).collect())
    }
}
