//! MLA of the GPU against the CPU: rows of one and of many tokens, random block tables, all dtypes.

use std::ops::Range;

use device::DType;

use crate::device_pair::{CpuGpuPair, pairs};
use crate::mla_case::MlaCase;

/// Number of heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, and tokens per block.
pub(crate) type MlaSizes = [usize; 6];

/// Number of queries and context length of each row. A row attends to the first `context` tokens, and its
/// queries are the last of these tokens.
pub(crate) type MlaRowLengths<'a> = &'a [(usize, usize)];

pub(crate) const SHORT: MlaRowLengths<'static> = &[(1, 75), (1, 1), (5, 70), (3, 3)];
/// Some rows with several splits of their keys, and one row without keys.
pub(crate) const LONG: MlaRowLengths<'static> = &[(1, 600), (1, 257), (1, 0), (1, 16), (3, 130)];

/// The rows of one attention step.
pub(crate) struct MlaStepRows<'a> {
    pub(crate) rows: MlaRowLengths<'a>,
    /// Number of leading rows with one query each.
    pub(crate) decode_rows: usize,
    /// First visible position; earlier positions are masked for all queries.
    pub(crate) first_position: usize,
    /// Sequence slot of each row.
    pub(crate) seq_slots: &'a [i32],
    pub(crate) max_rows_per_request: usize,
}

pub(crate) fn check(
    pair: &CpuGpuPair,
    sizes: MlaSizes,
    rows: MlaRowLengths<'_>,
    decode_rows: usize,
    dtype: DType,
) {
    check_from(pair, sizes, rows, decode_rows, dtype, 0);
}

/// Compares GPU and CPU for attention in which the positions before `first` are masked.
fn check_from(
    pair: &CpuGpuPair,
    sizes: MlaSizes,
    rows: MlaRowLengths<'_>,
    decode_rows: usize,
    dtype: DType,
    first_position: usize,
) {
    let seq_slots: Vec<i32> = (0..rows.len() as i32).collect();
    let step = MlaStepRows {
        rows,
        decode_rows,
        first_position,
        seq_slots: &seq_slots,
        max_rows_per_request: 1,
    };
    check_step(pair, sizes, dtype, &step);
}

/// Compares GPU and CPU, and compares the results of the step with the results of rows processed separately.
fn check_step(pair: &CpuGpuPair, sizes: MlaSizes, dtype: DType, step: &MlaStepRows<'_>) {
    let mut case = MlaCase::random(pair, sizes, dtype, step);
    case.run();
    case.check();
}

#[test]
fn mla_attention_agrees_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [3, 32, 8, 16, 16, 6], SHORT, 0, DType::F32);
        // Shapes that the tensor-core kernels do not support.
        check(pair, [2, 96, 16, 24, 40, 16], SHORT, 2, DType::BF16);
    }
}

#[test]
fn mla_on_tensor_cores_agrees_with_the_cpu() {
    for pair in &pairs() {
        check(pair, [2, 512, 64, 128, 128, 16], SHORT, 2, DType::BF16);
        check(pair, [17, 128, 32, 32, 48, 32], LONG, 4, DType::BF16);
    }
}

#[test]
fn mla_ignores_masked_first_position() {
    let short: MlaRowLengths<'_> = &[(1, 75), (1, 2), (1, 0), (5, 70), (3, 4)];
    let long: MlaRowLengths<'_> = &[(1, 600), (1, 257), (1, 0), (1, 2), (3, 130)];
    for pair in &pairs() {
        check_from(pair, [3, 32, 8, 16, 16, 6], short, 0, DType::F32, 1);
        check_from(pair, [2, 96, 16, 24, 40, 16], short, 3, DType::BF16, 1);
        check_from(pair, [17, 128, 32, 32, 48, 32], long, 4, DType::BF16, 1);
    }
}

/// Compares the one-token rows of requests with draft tokens, which are processed together, with the same
/// rows processed separately. Covers rows with several splits of their keys, rows of a request with different
/// splits, a request with more tokens than are processed together, neighbouring requests whose contexts
/// differ by one, and padding rows.
#[test]
fn successive_rows_match_single_rows() {
    let few = [(598..602, 0), (254..259, 3), (0..1, 0), (14..18, 1), (18..19, 2), (300..301, 5)];
    let many = (0..18).map(|i| (40 + i..42 + i, i as i32));
    let many: Vec<_> = many.chain([(1023..1026, 19)]).collect();
    for pair in &pairs() {
        let check = |sizes, requests: &[(Range<usize>, i32)], max_rows_per_request| {
            let rows = |(contexts, seq_slot): &(Range<usize>, i32)| {
                let seq_slot = *seq_slot;
                contexts.clone().map(move |context| ((1, context), seq_slot))
            };
            let (rows, seq_slots): (Vec<_>, Vec<_>) = requests.iter().flat_map(rows).unzip();
            let step = MlaStepRows {
                rows: &rows,
                decode_rows: rows.len(),
                first_position: 0,
                seq_slots: &seq_slots,
                max_rows_per_request,
            };
            check_step(pair, sizes, DType::BF16, &step);
        };
        check([17, 128, 32, 32, 48, 32], &few, 5);
        check([16, 128, 64, 32, 16, 16], &few, 4);
        check([5, 128, 64, 32, 32, 48], &few, 5);
        check([70, 128, 64, 32, 16, 16], &few, 2);
        check([32, 128, 64, 32, 16, 16], &many, 2);
        // The keys have few splits, so that each split gets a separate thread block.
        check([16, 128, 64, 32, 16, 16], &few[3..5], 4);
    }
}

/// Compares the WGMMA kernels, if supported, with the CPU: tiles of 64 heads, full and partial; rows with
/// several splits of the keys, with one split, and with none; batches in which no context, or only the long
/// contexts, are split; and padding rows.
#[test]
fn mla_decode_wgmma_agrees_with_the_cpu() {
    let mut many = [(1, 40); 18];
    (many[3].1, many[9].1, many[17].1) = (1030, 0, 129);
    let context = |i: usize| if i < 32 { 1 + i * 37 % 32 * 40 } else { 0 };
    let padded: Vec<_> = (0..38).map(|i| (1, context(i))).collect();
    for pair in &pairs() {
        check(pair, [70, 128, 64, 32, 16, 16], LONG, 4, DType::BF16);
        check(pair, [5, 256, 64, 32, 32, 48], SHORT, 0, DType::BF16);
        check(pair, [3, 128, 128, 32, 16, 32], &many, many.len(), DType::BF16);
        check(pair, [66, 128, 64, 32, 16, 16], &many, many.len(), DType::BF16);
        check(pair, [3, 128, 64, 32, 16, 16], &padded, padded.len(), DType::BF16);
    }
}
