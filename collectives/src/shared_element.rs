//! Encoding of matrix elements as 32-bit words of shared memory, and splitting of matrices into chunks.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use device::{DType, DeviceElement, MatMut, bf16, f16};

/// Element type that shared memory groups can transfer. Words are accessed with relaxed atomics; the writer
/// then sets a flag, which makes the words visible to readers.
pub(crate) trait SharedMemoryElement: DeviceElement {
    /// Number of elements per 32-bit word.
    const PER_WORD: usize;
    /// Value of the elements of padding rows in `all_gather_rows`.
    const PADDING: Self;

    /// Number of words of a row of `cols` elements.
    fn words(cols: usize) -> usize {
        cols.div_ceil(Self::PER_WORD)
    }

    /// Encodes a row of elements as 32-bit words of shared memory.
    fn write_words(row: &[Self], words: &[AtomicU32]);

    /// Decodes a row of elements from 32-bit words of shared memory.
    fn read_words(words: &[AtomicU32], row: &mut [Self]);
}

/// Element type that shared memory groups can reduce by summation.
pub(crate) trait ReducibleElement: SharedMemoryElement {
    /// Adds the elements of `row` to `sum`.
    fn add_row(sum: &mut [f32], row: &[Self]);

    /// Decodes a row from words and adds its elements to `sum`.
    fn add_words(sum: &mut [f32], words: &[AtomicU32]);

    /// Rounds each sum to the element type and stores it in `row`.
    fn store(sum: &[f32], row: &mut [Self]);
}

impl SharedMemoryElement for f32 {
    const PER_WORD: usize = 1;
    const PADDING: Self = 0.0;

    fn write_words(row: &[Self], words: &[AtomicU32]) {
        row.iter().zip(words).for_each(|(x, word)| word.store(x.to_bits(), Relaxed));
    }

    fn read_words(words: &[AtomicU32], row: &mut [Self]) {
        row.iter_mut().zip(words).for_each(|(x, word)| *x = Self::from_bits(word.load(Relaxed)));
    }
}

impl SharedMemoryElement for i32 {
    const PER_WORD: usize = 1;
    const PADDING: Self = -1;

    fn write_words(row: &[Self], words: &[AtomicU32]) {
        row.iter().zip(words).for_each(|(x, word)| word.store(*x as u32, Relaxed));
    }

    fn read_words(words: &[AtomicU32], row: &mut [Self]) {
        row.iter_mut().zip(words).for_each(|(x, word)| *x = word.load(Relaxed) as Self);
    }
}

impl ReducibleElement for f32 {
    fn add_row(sum: &mut [f32], row: &[Self]) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }

    fn add_words(sum: &mut [f32], words: &[AtomicU32]) {
        sum.iter_mut()
            .zip(words)
            .for_each(|(sum, word)| *sum += f32::from_bits(word.load(Relaxed)));
    }

    fn store(sum: &[f32], row: &mut [Self]) {
        row.copy_from_slice(sum);
    }
}

/// Implements `SharedMemoryElement` and `ReducibleElement` for 16-bit types: a word contains two elements,
/// with the first element in the lower half.
macro_rules! impl_16_bit {
    ($($half:ty),*) => {$(
        impl SharedMemoryElement for $half {
            const PER_WORD: usize = 2;
            const PADDING: Self = Self::ZERO;

            fn write_words(row: &[Self], words: &[AtomicU32]) {
                for (pair, word) in row.chunks(2).zip(words) {
                    let high = pair.get(1).map_or(0, |x| u32::from(x.to_bits()));
                    word.store(high << 16 | u32::from(pair[0].to_bits()), Relaxed);
                }
            }

            fn read_words(words: &[AtomicU32], row: &mut [Self]) {
                for (pair, word) in row.chunks_mut(2).zip(words) {
                    let word = word.load(Relaxed);
                    for (i, x) in pair.iter_mut().enumerate() {
                        *x = Self::from_bits((word >> (16 * i)) as u16);
                    }
                }
            }
        }

        impl ReducibleElement for $half {
            fn add_row(sum: &mut [f32], row: &[Self]) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f32());
            }

            fn add_words(sum: &mut [f32], words: &[AtomicU32]) {
                for (pair, word) in sum.chunks_mut(2).zip(words) {
                    let word = word.load(Relaxed);
                    for (i, sum) in pair.iter_mut().enumerate() {
                        *sum += Self::from_bits((word >> (16 * i)) as u16).to_f32();
                    }
                }
            }

            fn store(sum: &[f32], row: &mut [Self]) {
                row.iter_mut().zip(sum).for_each(|(x, sum)| *x = Self::from_f32(*sum));
            }
        }
    )*};
}
impl_16_bit!(bf16, f16);

/// Part of a matrix that fits into a slot of shared memory and is sent in one round (exchange of one chunk
/// between all ranks).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MatrixChunk {
    /// Range of the matrix rows in the chunk.
    pub(crate) rows: std::ops::Range<usize>,
    /// Range of the matrix columns in the chunk.
    pub(crate) cols: std::ops::Range<usize>,
}

impl MatrixChunk {
    /// Returns the part of the chunk with the matrix rows below index `rows`.
    pub(crate) fn truncate_rows(&self, rows: usize) -> Self {
        let (start, end) = (self.rows.start.min(rows), self.rows.end.min(rows));
        Self { rows: start..end, cols: self.cols.clone() }
    }
}

/// Splits a matrix into chunks of up to `slot_words` words. A chunk consists of whole rows, or of a part of
/// one row if a row exceeds `slot_words` words.
pub(crate) fn split_into_chunks<T: SharedMemoryElement>(
    rows: usize,
    cols: usize,
    slot_words: usize,
) -> Vec<MatrixChunk> {
    let width = T::words(cols);
    if width == 0 {
        return Vec::new();
    }
    let (rows_each, cols_each) = if width <= slot_words {
        (slot_words / width, cols)
    } else {
        (1, slot_words * T::PER_WORD)
    };
    let row_chunks = |r: usize| {
        (0..cols).step_by(cols_each).map(move |c| MatrixChunk {
            rows: r..(r + rows_each).min(rows),
            cols: c..(c + cols_each).min(cols),
        })
    };
    (0..rows).step_by(rows_each).flat_map(row_chunks).collect()
}

/// Returns the elements of row `row` of `x` in the columns of `chunk`.
pub(crate) fn row_of_chunk<'a, T: SharedMemoryElement>(
    x: &'a mut MatMut<'_>,
    row: usize,
    chunk: &MatrixChunk,
) -> &'a mut [T] {
    &mut x.row_mut::<T>(row)[chunk.cols.clone()]
}

/// Whether shared memory groups can sum elements of this type.
pub(crate) fn is_reducible(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_each_element_once() {
        for (rows, cols, slot_words) in
            [(1, 1, 1), (5, 3, 7), (3, 10, 4), (2, 11, 4), (0, 4, 4), (4, 0, 4)]
        {
            let mut seen = vec![0; rows * cols];
            for chunk in split_into_chunks::<bf16>(rows, cols, slot_words) {
                assert!(
                    chunk.rows.len() * bf16::words(chunk.cols.len()) <= slot_words,
                    "{chunk:?}"
                );
                for (r, c) in chunk.rows.flat_map(|r| chunk.cols.clone().map(move |c| (r, c))) {
                    seen[r * cols + c] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{rows} x {cols}, slots of {slot_words} words");
        }
    }
}
