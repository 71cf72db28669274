//! Benchmark of embedding, norms, linear layers (projections, gated MLP) and LM head.
//!
//! Legend: T tokens, H hidden size, K inputs, N outputs, I intermediate size, V vocabulary size.

use super::random_weights::{MatrixSize, RandomWeights, activations, copies, norm};
use super::{OpBenchRunner, OpCase, OpCost};
use crate::ExecutorError;
use ops::{EmbeddingTable, GateActivation, OpError, Ops, PackedLinear, Tensor};

/// Maximum number of tokens for which the LM head is measured. A step computes logits only for the last token
/// of each row.
pub(super) const LM_HEAD_TOKENS_MAX: usize = 512;

/// Epilogue of a linear layer: how the output of the layer is computed from `x Wᵀ`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinearEpilogue {
    /// `y = x Wᵀ`.
    Plain,
    /// `y = silu(gate) · up`, where gate and up are the two halves of the columns of `x Wᵀ`.
    GatedSilu,
    /// `y = x Wᵀ` in f32.
    Logits,
}

/// A linear layer of a model that the benchmark times.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearOp {
    pub(super) op: &'static str,
    pub(super) inputs: usize,
    /// Number of outputs. For a gated layer, this is the number of gate outputs plus the number of up
    /// outputs.
    pub(super) outputs: usize,
    pub(super) kind: LinearEpilogue,
    /// Number of layers of the model that contain this linear layer.
    pub(super) layers: usize,
    /// Maximum number of tokens per launch. Configured token counts above this value are not measured for
    /// this layer.
    pub(super) tokens_max: usize,
}

impl LinearOp {
    /// Creates a linear layer without epilogue.
    pub(super) fn plain(op: &'static str, inputs: usize, outputs: usize, layers: usize) -> Self {
        Self { op, inputs, outputs, kind: LinearEpilogue::Plain, layers, tokens_max: usize::MAX }
    }

    /// Creates a fused gate and up projection, with `intermediate` gate outputs and `intermediate` up
    /// outputs.
    pub(super) fn gated(
        op: &'static str,
        inputs: usize,
        intermediate: usize,
        layers: usize,
    ) -> Self {
        let kind = LinearEpilogue::GatedSilu;
        Self { kind, ..Self::plain(op, inputs, 2 * intermediate, layers) }
    }

    fn launch(&self, ops: &Ops, x: &Tensor, w: &PackedLinear) -> Result<(), OpError> {
        let y = match self.kind {
            LinearEpilogue::Plain => ops.linear(x, w),
            LinearEpilogue::GatedSilu => ops.linear_activation(x, w, GateActivation::Silu),
            LinearEpilogue::Logits => ops.linear_f32(x, w),
        };
        y.map(drop)
    }

    /// Cost of one launch, which reads the weights (`weight_bytes` bytes) and the inputs once and writes the
    /// outputs once.
    fn cost(&self, tokens: usize, weight_bytes: usize, element: usize) -> OpCost {
        let output = match self.kind {
            LinearEpilogue::Plain => self.outputs * element,
            LinearEpilogue::GatedSilu => self.outputs / 2 * element,
            LinearEpilogue::Logits => self.outputs * 4,
        };
        OpCost {
            bytes: (weight_bytes + tokens * (self.inputs * element + output)) as u64,
            flops: (2 * tokens * self.inputs * self.outputs) as u64,
        }
    }
}

/// Times a linear layer with random weights at every configured number of tokens.
pub(super) fn time_linear(
    runner: &mut OpBenchRunner<'_>,
    op: &LinearOp,
) -> Result<(), ExecutorError> {
    if !runner.is_selected(op.op) {
        return Ok(());
    }
    let (ops, size) = (runner.ops(), MatrixSize { rows: op.outputs, cols: op.inputs });
    let random = RandomWeights::new(size);
    let first = random.linear(ops, size)?;
    let bytes = first.bytes();
    let mut weights = vec![first];
    while weights.len() < copies(bytes, op.layers) {
        weights.push(random.linear(ops, size)?);
    }
    time_packed(runner, op, &weights)
}

/// Times a linear layer at every configured number of tokens. Successive launches use the given copies of its
/// weights in turn.
fn time_packed(
    runner: &mut OpBenchRunner<'_>,
    op: &LinearOp,
    weights: &[PackedLinear],
) -> Result<(), ExecutorError> {
    let (ops, element) = (runner.ops(), runner.element_bytes());
    let (bytes, copies) = (weights[0].bytes(), weights.len());
    for tokens in runner.token_counts().filter(|&tokens| tokens <= op.tokens_max) {
        let x = activations(ops, tokens, op.inputs)?;
        let case = OpCase {
            op: op.op,
            tokens,
            shape: format!("[{tokens}, {}] x [{}, {}]", op.inputs, op.outputs, op.inputs),
            cost: op.cost(tokens, bytes, element),
            copies,
        };
        runner.time(case, &mut |i| op.launch(ops, &x, &weights[i % copies]))?;
    }
    Ok(())
}

/// Times the ops before attention: embedding, norms, and the projections to queries, keys and values.
pub(super) fn time_before_attention(runner: &mut OpBenchRunner<'_>) -> Result<(), ExecutorError> {
    let model = &runner.config().model;
    let (hidden, layers) = (model.hidden, model.layers);
    time_embedding(runner)?;
    time_norms(runner, hidden)?;
    let Some(mla) = model.mla else {
        let gates = if model.gated_delta.is_some() { model.heads } else { 0 };
        let heads = model.heads + gates + 2 * model.kv_heads;
        let qkv = LinearOp::plain("qkv_proj", hidden, heads * model.head_dim, layers);
        return time_linear(runner, &qkv);
    };
    let queries = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    match mla.q_lora_rank {
        None => time_linear(runner, &LinearOp::plain("q_proj", hidden, queries, layers))?,
        Some(width) => {
            time_linear(runner, &LinearOp::plain("q_a_proj", hidden, width, layers))?;
            time_linear(runner, &LinearOp::plain("q_b_proj", width, queries, layers))?;
        }
    }
    let key_value = mla.kv_lora_rank + mla.qk_rope_head_dim;
    time_linear(runner, &LinearOp::plain("kv_a_proj", hidden, key_value, layers))
}

/// Times the ops after attention: its output projection, and the dense MLP if the model has one.
pub(super) fn time_after_attention(runner: &mut OpBenchRunner<'_>) -> Result<(), ExecutorError> {
    let model = &runner.config().model;
    let (hidden, layers) = (model.hidden, model.layers);
    let value_width = model.heads * model.value_dim();
    time_linear(runner, &LinearOp::plain("o_proj", value_width, hidden, layers))?;
    let dense = (0..layers).filter(|&layer| model.moe_at(layer).is_none()).count();
    if dense == 0 {
        return Ok(());
    }
    let inner = model.intermediate;
    time_linear(runner, &LinearOp::gated("gate_up_silu", hidden, inner, dense))?;
    time_silu_mul(runner, inner)?;
    time_linear(runner, &LinearOp::plain("down_proj", inner, hidden, dense))
}

/// Times the LM head.
pub(super) fn time_lm_head(runner: &mut OpBenchRunner<'_>) -> Result<(), ExecutorError> {
    let model = &runner.config().model;
    let head = LinearOp {
        kind: LinearEpilogue::Logits,
        tokens_max: LM_HEAD_TOKENS_MAX,
        ..LinearOp::plain("lm_head", model.hidden, model.vocab, 1)
    };
    time_linear(runner, &head)
}

/// Times the gather of embedding rows by token id. Tied embeddings are gathered from the packed LM head.
fn time_embedding(runner: &mut OpBenchRunner<'_>) -> Result<(), ExecutorError> {
    if !runner.is_selected("embedding") {
        return Ok(());
    }
    let (ops, element, model) = (runner.ops(), runner.element_bytes(), &runner.config().model);
    let (vocab, hidden, tied) = (model.vocab, model.hidden, model.tied);
    let size = MatrixSize { rows: vocab, cols: hidden };
    let random = RandomWeights::new(size);
    let table = if tied {
        random.linear(ops, size)?.tied_embedding(0)
    } else {
        EmbeddingTable::from_rows(random.table(ops, size)?, 0)
    };
    for tokens in runner.token_counts() {
        let ids: Vec<i32> = (0..tokens).map(|i| (i * 7919 % vocab) as i32).collect();
        let ids = ops.ids(&ids)?;
        let cost = OpCost { bytes: (tokens * (4 + 2 * hidden * element)) as u64, flops: 0 };
        let shape = format!("[{tokens}] of [{vocab}, {hidden}]");
        let case = OpCase { op: "embedding", tokens, shape, cost, copies: 1 };
        runner.time(case, &mut |_| ops.embed(&table, &ids).map(drop))?;
    }
    Ok(())
}

fn time_norms(runner: &mut OpBenchRunner<'_>, hidden: usize) -> Result<(), ExecutorError> {
    let (ops, eps) = (runner.ops(), runner.config().model.rms_eps);
    let weight = norm(ops, hidden)?;
    for tokens in runner.token_counts() {
        let row_bytes = tokens * hidden * runner.element_bytes();
        let case = |op, rows: usize| OpCase {
            op,
            tokens,
            shape: format!("[{tokens}, {hidden}]"),
            cost: OpCost { bytes: (rows * row_bytes) as u64, flops: 0 },
            copies: 1,
        };
        let (mut x, delta) = (activations(ops, tokens, hidden)?, activations(ops, tokens, hidden)?);
        if runner.is_selected("rms_norm") {
            runner.time(case("rms_norm", 2), &mut |_| ops.rms_norm(&x, &weight, eps).map(drop))?;
        }
        if runner.is_selected("add_rms_norm") {
            runner.time(case("add_rms_norm", 4), &mut |_| {
                ops.add_rms_norm(&mut x, &delta, &weight, eps).map(drop)
            })?;
        }
    }
    Ok(())
}

fn time_silu_mul(runner: &mut OpBenchRunner<'_>, inner: usize) -> Result<(), ExecutorError> {
    if !runner.is_selected("silu_mul") {
        return Ok(());
    }
    let ops = runner.ops();
    for tokens in runner.token_counts() {
        let x = activations(ops, tokens, 2 * inner)?;
        let bytes = 3 * tokens * inner * runner.element_bytes();
        let case = OpCase {
            op: "silu_mul",
            tokens,
            shape: format!("[{tokens}, {}]", 2 * inner),
            cost: OpCost { bytes: bytes as u64, flops: 0 },
            copies: 1,
        };
        runner.time(case, &mut |_| ops.gated_activation(&x, GateActivation::Silu).map(drop))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_cost_counts_weights_inputs_outputs() {
        let plain = LinearOp::plain("o_proj", 8, 4, 1).cost(3, 64, 2);
        assert_eq!((plain.bytes, plain.flops), (64 + 3 * (16 + 8), 2 * 3 * 8 * 4));
        let gated = LinearOp::gated("gate_up_silu", 8, 4, 1).cost(3, 128, 2);
        assert_eq!((gated.bytes, gated.flops), (128 + 3 * (16 + 8), 2 * 3 * 8 * 8));
        let logits =
            LinearOp { kind: LinearEpilogue::Logits, ..LinearOp::plain("router", 8, 4, 1) };
        assert_eq!(logits.cost(1, 64, 2).bytes, 64 + 16 + 16);
    }
}
