//! Elements in shared words.

use kernels::{DType, Element, MatMut, bf16, f16};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// An element that can be brought to a group. Words are read and written one by one; what orders them is the
/// flag that their writer raises behind them.
pub(crate) trait Lane: Element {
    /// Elements of a word.
    const EACH: usize;
    /// What lies where nobody brought anything.
    const BLANK: Self;

    /// Words of a row of `cols` elements.
    fn words(cols: usize) -> usize {
        cols.div_ceil(Self::EACH)
    }

    /// A row to words.
    fn put(row: &[Self], words: &[AtomicU32]);

    /// Words to a row.
    fn take(words: &[AtomicU32], row: &mut [Self]);
}

/// A lane that can be summed.
pub(crate) trait Summand: Lane {
    /// `sum += row`
    fn add_row(sum: &mut [f32], row: &[Self]);

    /// `sum += words`
    fn add_words(sum: &mut [f32], words: &[AtomicU32]);

    /// The sum, rounded once.
    fn store(sum: &[f32], row: &mut [Self]);
}

impl Lane for f32 {
    const EACH: usize = 1;
    const BLANK: Self = 0.0;

    fn put(row: &[Self], words: &[AtomicU32]) {
        row.iter().zip(words).for_each(|(x, word)| word.store(x.to_bits(), Relaxed));
    }

    fn take(words: &[AtomicU32], row: &mut [Self]) {
        row.iter_mut().zip(words).for_each(|(x, word)| *x = Self::from_bits(word.load(Relaxed)));
    }
}

impl Lane for i32 {
    const EACH: usize = 1;
    const BLANK: Self = -1;

    fn put(row: &[Self], words: &[AtomicU32]) {
        row.iter().zip(words).for_each(|(x, word)| word.store(*x as u32, Relaxed));
    }

    fn take(words: &[AtomicU32], row: &mut [Self]) {
        row.iter_mut().zip(words).for_each(|(x, word)| *x = word.load(Relaxed) as Self);
    }
}

impl Summand for f32 {
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

/// Types of two bytes, two of which lie in a word, the first in its lower half.
macro_rules! halves {
    ($($half:ty),*) => {$(
        impl Lane for $half {
            const EACH: usize = 2;
            const BLANK: Self = Self::ZERO;

            fn put(row: &[Self], words: &[AtomicU32]) {
                for (pair, word) in row.chunks(2).zip(words) {
                    let high = pair.get(1).map_or(0, |x| u32::from(x.to_bits()));
                    word.store(high << 16 | u32::from(pair[0].to_bits()), Relaxed);
                }
            }

            fn take(words: &[AtomicU32], row: &mut [Self]) {
                for (pair, word) in row.chunks_mut(2).zip(words) {
                    let word = word.load(Relaxed);
                    for (i, x) in pair.iter_mut().enumerate() {
                        *x = Self::from_bits((word >> (16 * i)) as u16);
                    }
                }
            }
        }

        impl Summand for $half {
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
halves!(bf16, f16);

/// The part of a matrix that fits into a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Rows.
    pub(crate) rows: std::ops::Range<usize>,
    /// Columns.
    pub(crate) cols: std::ops::Range<usize>,
}

impl Piece {
    /// The same without rows from `rows` on.
    pub(crate) fn up_to(&self, rows: usize) -> Self {
        let (start, end) = (self.rows.start.min(rows), self.rows.end.min(rows));
        Self { rows: start..end, cols: self.cols.clone() }
    }
}

/// Cuts a matrix into pieces of up to `slot` words: rows as long as one fits, else parts of rows.
pub(crate) fn pieces<T: Lane>(rows: usize, cols: usize, slot: usize) -> Vec<Piece> {
    let width = T::words(cols);
    if width == 0 {
        return Vec::new();
    }
    let (rows_each, cols_each) =
        if width <= slot { (slot / width, cols) } else { (1, slot * T::EACH) };
    let within = |r: usize| {
        (0..cols).step_by(cols_each).map(move |c| Piece {
            rows: r..(r + rows_each).min(rows),
            cols: c..(c + cols_each).min(cols),
        })
    };
    (0..rows).step_by(rows_each).flat_map(within).collect()
}

/// Part of a row.
pub(crate) fn part<'a, T: Lane>(x: &'a mut MatMut<'_>, row: usize, piece: &Piece) -> &'a mut [T] {
    &mut x.row_mut::<T>(row)[piece.cols.clone()]
}

/// What is refused, by type.
pub(crate) fn is_summed(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_element_once() {
        for (rows, cols, slot) in
            [(1, 1, 1), (5, 3, 7), (3, 10, 4), (2, 11, 4), (0, 4, 4), (4, 0, 4)]
        {
            let mut seen = vec![0; rows * cols];
            for piece in pieces::<bf16>(rows, cols, slot) {
                assert!(piece.rows.len() * bf16::words(piece.cols.len()) <= slot, "{piece:?}");
                for (r, c) in piece.rows.flat_map(|r| piece.cols.clone().map(move |c| (r, c))) {
                    seen[r * cols + c] += 1;
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{rows} x {cols} by {slot}");
        }
    }
}
