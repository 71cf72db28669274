//! Host-side accessors of [`AttentionMetadata`]: token ranges, context lengths and block tables of rows. Used
//! by the CPU backend, whose kernels read these arrays in host memory.

use device::DeviceError;

use crate::{AttentionKeyRange, AttentionMetadata};

impl AttentionMetadata<'_> {
    /// Number of rows of the step.
    #[must_use]
    pub fn len(&self) -> usize {
        self.context_lens.cols()
    }

    /// Whether the step has no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Token range `[from, to)` of row `r`, as indices of tokens in the step.
    pub(crate) fn tokens(&self, r: usize) -> (usize, usize) {
        let cu_q = self.cu_q.row::<i32>(0);
        (cu_q[r] as usize, cu_q[r + 1] as usize)
    }

    /// Context length of row `r`, in keys.
    pub(crate) fn context(&self, r: usize) -> usize {
        self.context_lens.row::<i32>(0)[r] as usize
    }

    /// Block table of row `r`.
    pub(crate) fn table(&self, r: usize) -> &[i32] {
        let table_row = self.table_rows.map_or(r, |rows| rows.row::<i32>(0)[r] as usize);
        self.block_tables.row::<i32>(table_row)
    }

    /// Whether row `r` is padding: its context length is 0.
    pub(crate) fn is_padding(&self, r: usize) -> bool {
        self.context(r) == 0
    }

    /// Checks the arrays: rows must not overlap or exceed `tokens`, and the block ids of the keys in `keys`
    /// must be inside a KV pool of `blocks` blocks of `block_tokens` tokens.
    pub(crate) fn check(
        &self,
        tokens: usize,
        blocks: usize,
        block_tokens: usize,
        keys: AttentionKeyRange,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "paged_attention";
        let shape =
            |what, got, expected| DeviceError::Shape { kernel: KERNEL, what, got, expected };
        let rows = self.len();
        if self.cu_q.cols() != rows + 1 {
            return Err(shape("cu_q", self.cu_q.cols(), rows + 1));
        }
        match self.table_rows {
            None if self.block_tables.rows() != rows && rows > 0 => {
                return Err(shape("block_tables", self.block_tables.rows(), rows));
            }
            Some(table_rows) => {
                let limit = self.block_tables.rows();
                let table_rows = &table_rows.row::<i32>(0)[..rows];
                let outside = table_rows.iter().find(|&&row| row < 0 || row as usize >= limit);
                if let Some(&table_row) = outside {
                    let (what, index) = ("table", i64::from(table_row));
                    return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
                }
            }
            None => {}
        }
        let cu_q = self.cu_q.row::<i32>(0);
        if cu_q[0] != 0 || cu_q[rows] as usize != tokens || !cu_q.is_sorted() {
            return Err(shape("cu_q", cu_q[rows] as usize, tokens));
        }
        for r in 0..rows {
            let (from, to) = self.tokens(r);
            let context = self.context_lens.row::<i32>(0)[r];
            if context < (to - from) as i32 && context != 0 {
                return Err(shape("context_lens", context.max(0) as usize, to - from));
            }
            let used = (context as usize).div_ceil(block_tokens);
            let table = self.table(r);
            if used > table.len() {
                return Err(shape("block_tables", table.len(), used));
            }
            let first = keys.first_key((context as usize).saturating_sub(to - from)) / block_tokens;
            for &block in &table[first.min(used)..used] {
                if block < 0 || block as usize >= blocks {
                    let (what, index, limit) = ("block", i64::from(block), blocks);
                    return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
                }
            }
        }
        Ok(())
    }
}
