//! Benchmark of MLA: KV write, then absorbed (decode) or non-absorbed (prefill) attention over compressed KV.
//!
//! Legend: T tokens, N heads, C `kv_lora_rank`, P `qk_rope_head_dim`, M `qk_nope_head_dim`, V `v_head_dim`.

use super::attention_ops::sizes;
use super::kv_batches::{KvPoolSize, UniformBatchShape, rope_table};
use super::random_weights::{MatrixSize, RandomWeights, activations, norm};
use super::{OpBenchRunner, OpCase, OpCost};
use crate::ExecutorError;
use models::config::MlaConfig;
use ops::{
    AttentionKeyRange, AttentionLayerParams, DeviceBatchMetadata, KvPool, MlaKvLayout, MlaWeights,
    Ops, PackedMlaUpProjections, RopeTable, Tensor,
};

/// Inputs that all timed launches of MLA share.
struct MlaBenchInputs {
    pool: KvPoolSize,
    kv: KvPool,
    rope: RopeTable,
    norm: Tensor,
    eps: f32,
    heads: PackedMlaUpProjections,
    shape: AttentionLayerParams<'static>,
    mla: MlaConfig,
}

impl MlaBenchInputs {
    fn new(runner: &OpBenchRunner<'_>, mla: MlaConfig) -> Result<Self, ExecutorError> {
        let (ops, config) = (runner.ops(), runner.config());
        let model = &config.model;
        ops.check_mla(ops.dtype())?;
        let tokens = runner.token_counts().max().unwrap_or(1);
        let context = (config.context as usize).max(tokens);
        let longest = UniformBatchShape { rows: tokens, new_tokens: 1, context };
        let token_bytes = (mla.kv_lora_rank + mla.qk_rope_head_dim) * runner.element_bytes();
        let pool = KvPoolSize::new(longest, config.block_tokens as usize, token_bytes);
        let layout = MlaKvLayout {
            layers: 1,
            blocks: pool.blocks,
            block_tokens: pool.block_tokens,
            kv_lora_rank: mla.kv_lora_rank,
            rope_dim: mla.qk_rope_head_dim,
            dtype: ops.dtype(),
        };
        let rows = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim);
        let kv_b = MatrixSize { rows, cols: mla.kv_lora_rank };
        let random = RandomWeights::for_matrix(kv_b);
        let scale = (model.head_dim as f32).powf(-0.5);
        let bench = Self {
            pool,
            kv: KvPool::new(ops, layout)?,
            rope: rope_table(ops, context.max(pool.fill_tokens()) + 1, mla.qk_rope_head_dim / 2)?,
            norm: norm(ops, mla.kv_lora_rank)?,
            eps: model.rms_eps,
            heads: ops.pack_mla_heads(
                &random.matrix(kv_b)?,
                mla.qk_nope_head_dim,
                mla.v_head_dim,
            )?,
            shape: AttentionLayerParams {
                heads: model.heads,
                group: 0,
                layer: 0,
                scale,
                keys: AttentionKeyRange::default(),
                sinks: None,
            },
            mla,
        };
        bench.fill(ops)?;
        Ok(bench)
    }

    fn fill(&self, ops: &Ops) -> Result<(), ExecutorError> {
        self.pool.fill(ops, &mut |batch| {
            let kv = activations(ops, batch.tokens(), self.kv_width())?;
            ops.mla_write_kv_only(&kv, &self.weights(), 0, &self.kv, batch)
        })
    }

    fn weights(&self) -> MlaWeights<'_> {
        MlaWeights { norm: &self.norm, eps: self.eps, rope: &self.rope, heads: &self.heads }
    }

    fn kv_width(&self) -> usize {
        self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
    }

    fn query_width(&self) -> usize {
        self.shape.heads * (self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim)
    }

    /// Cost of a step. Decode steps count the multiplications of absorbed MLA; prefill steps count
    /// non-absorbed MLA, which computes the keys and values of all heads.
    fn cost(&self, rows: UniformBatchShape, element: usize) -> OpCost {
        let MlaConfig {
            kv_lora_rank: c,
            qk_nope_head_dim: m,
            qk_rope_head_dim: p,
            v_head_dim: v,
            ..
        } = self.mla;
        let (heads, tokens) = (self.shape.heads, rows.tokens());
        let products = if rows.new_tokens == 1 {
            tokens * c * (m + v) + rows.pairs() * (c + p + c)
        } else {
            tokens * c * (m + v) + rows.pairs() * (m + p + v)
        };
        let weights = heads * c * (m + v) * element;
        let cached = rows.rows * rows.context * self.pool.token_bytes;
        let activations = tokens * (self.query_width() + self.kv_width() + heads * v) * element;
        OpCost {
            bytes: (weights + cached + activations) as u64,
            flops: (2 * heads * products) as u64,
        }
    }
}

/// Times MLA in decode and prefill steps, including the KV write.
pub(super) fn time(runner: &mut OpBenchRunner<'_>, mla: &MlaConfig) -> Result<(), ExecutorError> {
    if !["mla_decode", "mla_prefill"].iter().any(|op| runner.is_selected(op)) {
        return Ok(());
    }
    let bench = MlaBenchInputs::new(runner, *mla)?;
    let context = runner.config().context as usize;
    for tokens in runner.token_counts() {
        let rows = UniformBatchShape { rows: tokens, new_tokens: 1, context };
        time_attention(runner, &bench, "mla_decode", rows)?;
    }
    for tokens in runner.token_counts().filter(|&tokens| tokens > 1) {
        let rows = UniformBatchShape { rows: 1, new_tokens: tokens, context: tokens };
        time_attention(runner, &bench, "mla_prefill", rows)?;
    }
    Ok(())
}

fn time_attention(
    runner: &mut OpBenchRunner<'_>,
    bench: &MlaBenchInputs,
    op: &'static str,
    rows: UniformBatchShape,
) -> Result<(), ExecutorError> {
    if !runner.is_selected(op) {
        return Ok(());
    }
    let (ops, tokens) = (runner.ops(), rows.tokens());
    let batches: Vec<DeviceBatchMetadata> = bench.pool.batches(ops, rows)?;
    let kv = activations(ops, tokens, bench.kv_width())?;
    // Each launch of `mla_attention` consumes its queries, for which it allocates uninitialised memory. A
    // buffer of the same size with finite values is freed here, so that each launch reuses the memory of this
    // buffer and has finite queries.
    drop(activations(ops, tokens, bench.query_width())?);
    let cost = bench.cost(rows, runner.element_bytes());
    let case = OpCase { op, tokens, shape: sizes(rows), cost, copies: batches.len() };
    runner.time(case, &mut |i| {
        let (batch, query) = (&batches[i % batches.len()], [tokens, bench.query_width()]);
        let q = ops.scratch(ops.dtype(), &query)?;
        let (weights, shape) = (bench.weights(), &bench.shape);
        ops.mla_attention(q, &kv, &weights, shape, &bench.kv, batch).map(drop)
    })
}
