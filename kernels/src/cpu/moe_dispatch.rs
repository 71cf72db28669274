//! Dispatch and combine of MoE layers over EP ranks: lists the tokens to send to each rank, and sums the rows
//! that the ranks return.

use device::{DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::shared_rows::SharedRows;
use crate::check::{check_combine, check_dispatch};
use crate::cpu::CpuBackend;
use crate::{CpuKernel, MoeCombine, MoeDispatchLayout};

impl CpuBackend {
    fn combine_rows<T: FloatElement>(
        &self,
        y: &mut MatMut<'_>,
        x: MatRef<'_>,
        token_rows: MatRef<'_>,
    ) {
        let (rows, cols) = (y.rows(), y.cols());
        let out = SharedRows::<T>::new(y);
        self.threads().split(rows, 1, min_rows(cols), &|range| {
            let mut sum = vec![0.0_f32; cols];
            for t in range {
                sum.fill(0.0);
                for row in
                    token_rows.row::<i32>(t).iter().filter_map(|&row| usize::try_from(row).ok())
                {
                    sum.iter_mut().zip(x.row::<T>(row)).for_each(|(sum, x)| *sum += x.load());
                }
                // SAFETY: each row belongs to one thread.
                let y = unsafe { out.row(t) };
                y.iter_mut().zip(&sum).for_each(|(y, sum)| *y = T::store(*sum));
            }
        });
    }
}

impl CpuKernel for MoeCombine<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        const KERNEL: &str = "moe_combine_ranks";
        let Self { mut y, x, token_rows } = self;
        check_combine(&y, x, token_rows)?;
        let limit = x.rows() as i32;
        let rows = (0..token_rows.rows()).flat_map(|t| token_rows.row::<i32>(t));
        if let Some(&bad) = rows.into_iter().find(|&&row| !(-1..limit).contains(&row)) {
            let (what, index, limit) = ("row", i64::from(bad), x.rows());
            return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
        }
        for_float!(KERNEL, x.dtype(), T => cpu.combine_rows::<T>(&mut y, x, token_rows));
        Ok(())
    }
}

impl CpuKernel for MoeDispatchLayout<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut tokens, mut token_rows, mut counts, experts, layout } = self;
        check_dispatch(&tokens, &token_rows, &counts, experts, layout)?;
        for t in 0..experts.rows() {
            let row_of_rank = token_rows.row_mut::<i32>(t);
            row_of_rank.fill(-1);
            for rank in experts.row::<i32>(t).iter().filter_map(|&expert| layout.rank_of(expert)) {
                row_of_rank[rank] = 0; // Replaced below.
            }
        }
        let mut next = 0;
        for rank in 0..layout.ranks {
            let first = next;
            for t in 0..experts.rows() {
                let row = &mut token_rows.row_mut::<i32>(t)[rank];
                if *row == 0 {
                    *row = next as i32;
                    tokens.row_mut::<i32>(0)[next] = t as i32;
                    next += 1;
                }
            }
            counts.row_mut::<i32>(0)[rank] = (next - first) as i32;
        }
        Ok(())
    }
}
