//! Benchmark of the ops between the projections of GQA attention: RoPE, KV write and attention.
//!
//! Legend: T tokens, N query heads, K KV heads, D head size, C keys of a row.

use super::kv_batches::{KvPoolSize, UniformBatchShape, rope_table};
use super::random_weights::{activations, norm};
use super::{OpBenchRunner, OpCase, OpCost};
use crate::ExecutorError;
use ops::{
    AttentionKeyRange, AttentionLayerParams, DeviceBatchMetadata, KvCacheScaling, KvLayout, KvPool,
    Ops, QkNormRopeParams, RopeTable, Tensor,
};

/// Inputs that all timed launches of the GQA ops share.
struct AttentionBenchInputs {
    pool: KvPoolSize,
    kv: KvPool,
    rope: RopeTable,
    qk_norm: Option<Tensor>,
    eps: f32,
    shape: AttentionLayerParams<'static>,
    /// Number of columns of queries, keys and values together, (N + 2 K) x D.
    qkv_width: usize,
    /// Number of columns of the queries, N x D.
    query_width: usize,
}

impl AttentionBenchInputs {
    fn new(runner: &OpBenchRunner<'_>) -> Result<Self, ExecutorError> {
        let (ops, config) = (runner.ops(), runner.config());
        let model = &config.model;
        let (heads, kv_heads, head_dim) = (model.heads, model.kv_heads, model.head_dim);
        let tokens = runner.token_counts().max().unwrap_or(1);
        let context = config.context as usize;
        let longest =
            UniformBatchShape { rows: tokens, new_tokens: 1, context: context.max(tokens) };
        let token_bytes = 2 * kv_heads * head_dim * runner.element_bytes();
        let pool = KvPoolSize::new(longest, config.block_tokens as usize, token_bytes);
        let layout = KvLayout {
            layers: 1,
            blocks: pool.blocks,
            block_tokens: pool.block_tokens,
            kv_heads,
            head_dim,
            dtype: ops.dtype(),
            order: ops.device().kv_order(),
        };
        let positions = longest.context.max(pool.fill_tokens()) + 1;
        let qk_norm = model.qk_norm().then(|| norm(ops, head_dim)).transpose()?;
        let scale = (head_dim as f32).powf(-0.5);
        let bench = Self {
            pool,
            kv: KvPool::new(ops, layout)?,
            rope: rope_table(ops, positions, model.rotary() / 2)?,
            qk_norm,
            eps: model.rms_eps,
            shape: AttentionLayerParams {
                heads,
                group: 0,
                layer: 0,
                scale,
                keys: AttentionKeyRange::default(),
                sinks: None,
            },
            qkv_width: (heads + 2 * kv_heads) * head_dim,
            query_width: heads * head_dim,
        };
        bench.fill(ops)?;
        Ok(bench)
    }

    fn fill(&self, ops: &Ops) -> Result<(), ExecutorError> {
        self.pool.fill(ops, &mut |batch| {
            let qkv = activations(ops, batch.tokens(), self.qkv_width)?;
            let (weights, shape) = (self.weights(), &self.shape);
            ops.qk_norm_rope_kv_write(&qkv, &weights, shape, &self.kv, batch).map(drop)
        })
    }

    fn weights(&self) -> QkNormRopeParams<'_> {
        QkNormRopeParams {
            q_norm: self.qk_norm.as_ref(),
            k_norm: self.qk_norm.as_ref(),
            eps: self.eps,
            rope: &self.rope,
            kv_scales: KvCacheScaling::UNIT,
        }
    }

    /// Returns the bytes of one token's queries, keys and values, for elements of `element` bytes.
    fn widths(&self, element: usize) -> ActivationRowBytes {
        ActivationRowBytes { qkv: self.qkv_width * element, query: self.query_width * element }
    }

    /// Cost of attention without RoPE and KV write: it reads the queries, and the keys and values of the
    /// whole context, and writes the outputs.
    fn attention_cost(&self, rows: UniformBatchShape, element: usize) -> OpCost {
        let keys = rows.rows * rows.context * self.pool.token_bytes;
        let bytes = keys + 2 * rows.tokens() * self.widths(element).query;
        OpCost { bytes: bytes as u64, flops: (4 * rows.pairs() * self.query_width) as u64 }
    }

    /// Cost of RoPE with KV write: it reads queries, keys and values, writes the rotated queries, and writes
    /// the keys and values to the KV pool.
    fn write_cost(&self, tokens: usize, element: usize) -> OpCost {
        OpCost { bytes: (2 * tokens * self.widths(element).qkv) as u64, flops: 0 }
    }
}

/// Bytes of one token's queries, keys and values.
struct ActivationRowBytes {
    /// Bytes of queries, keys and values of one token together.
    qkv: usize,
    /// Bytes of the queries of one token.
    query: usize,
}

/// Times the ops between the projections of GQA attention.
pub(super) fn time(runner: &mut OpBenchRunner<'_>) -> Result<(), ExecutorError> {
    let ops = ["rope_kv_write", "attention_decode", "rope_attention_decode", "attention_prefill"];
    if !ops.iter().any(|op| runner.is_selected(op)) {
        return Ok(());
    }
    let bench = AttentionBenchInputs::new(runner)?;
    let context = runner.config().context as usize;
    for tokens in runner.token_counts() {
        time_paged_decode(
            runner,
            &bench,
            UniformBatchShape { rows: tokens, new_tokens: 1, context },
        )?;
    }
    for tokens in runner.token_counts().filter(|&tokens| tokens > 1) {
        let rows = UniformBatchShape { rows: 1, new_tokens: tokens, context: tokens };
        time_attention(runner, &bench, "attention_prefill", rows)?;
    }
    Ok(())
}

/// Times decode steps: rows with one new token each.
fn time_paged_decode(
    runner: &mut OpBenchRunner<'_>,
    bench: &AttentionBenchInputs,
    rows: UniformBatchShape,
) -> Result<(), ExecutorError> {
    let (ops, element, tokens) = (runner.ops(), runner.element_bytes(), rows.tokens());
    let batches = bench.pool.batches(ops, rows)?;
    let batch = |i: usize| &batches[i % batches.len()];
    let qkv = activations(ops, tokens, bench.qkv_width)?;
    let (weights, shape, kv) = (bench.weights(), &bench.shape, &bench.kv);
    let case = |op, shape, cost| OpCase { op, tokens, shape, cost, copies: batches.len() };
    let write = bench.write_cost(tokens, element);
    if runner.is_selected("rope_kv_write") {
        let sizes = format!("[{tokens}, {}]", bench.qkv_width);
        runner.time(case("rope_kv_write", sizes, write), &mut |i| {
            ops.qk_norm_rope_kv_write(&qkv, &weights, shape, kv, batch(i)).map(drop)
        })?;
    }
    time_attention(runner, bench, "attention_decode", rows)?;
    if runner.is_selected("rope_attention_decode") {
        let attention = bench.attention_cost(rows, element);
        let cost = OpCost { bytes: attention.bytes + write.bytes, flops: attention.flops };
        runner.time(case("rope_attention_decode", sizes(rows), cost), &mut |i| {
            ops.rope_attention(&qkv, &weights, shape, kv, batch(i)).map(drop)
        })?;
    }
    Ok(())
}

/// Times only paged attention (op `op`), over KV blocks that have already been written.
fn time_attention(
    runner: &mut OpBenchRunner<'_>,
    bench: &AttentionBenchInputs,
    op: &'static str,
    rows: UniformBatchShape,
) -> Result<(), ExecutorError> {
    if !runner.is_selected(op) {
        return Ok(());
    }
    let (ops, tokens) = (runner.ops(), rows.tokens());
    let batches: Vec<DeviceBatchMetadata> = bench.pool.batches(ops, rows)?;
    let q = activations(ops, tokens, bench.query_width)?;
    let cost = bench.attention_cost(rows, runner.element_bytes());
    let case = OpCase { op, tokens, shape: sizes(rows), cost, copies: batches.len() };
    runner.time(case, &mut |i| {
        let batch = &batches[i % batches.len()];
        ops.paged_attention(&q, &bench.shape, &bench.kv, batch).map(drop)
    })
}

/// Formats the shape of a batch for the report: rows, new tokens per row, keys per row.
pub(super) fn sizes(rows: UniformBatchShape) -> String {
    format!("{} x {} of {}", rows.rows, rows.new_tokens, rows.context)
}
