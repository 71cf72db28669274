//! The table that leads each kernel of the trait to its file.

use super::device::GpuDevice;
use super::fp8;
use super::moe_call::{fuses_shared_experts, prefers_secondary_stream};
use crate::step::{
    DraftHiddenStates, DraftPass, DraftPassArrays, PreparedStep, SamplerOutputArrays,
    SequenceSlotArrays, StageView, StepArrays,
};
use crate::{
    AttentionMetadata, Buffer, DType, DeviceError, DeviceStream, ExpertLoadArgs,
    ExpertParallelLayout, ExpertWeights, GatherFn, HostMat, Kernels, KvLayout, LinearFusion,
    LinearPrologue, MatMut, MatRef, MlaAttentionArgs, MlaKvLayout, MlaKvWriteArgs, PackedGroup,
    PackedMatrix, PagedAttentionArgs, QkNormRopeArgs, RouterLogits, RouterRuleArgs, TopKRoutes,
    VocabParallelSupport, VocabShard,
};

impl Kernels for GpuDevice {
    fn supports_dtype(&self, dtype: DType) -> bool {
        dtype == DType::F32 || dtype == self.half_dtype()
    }

    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError> {
        self.load(parts, dtype)
    }

    fn experts_dtype(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> DType {
        let keeps = dtype == self.half_dtype()
            && fp8::supports_fp8_experts(gate_up, true)
            && fp8::supports_fp8_experts(down, false);
        let widens = || self.dequantizes_experts(gate_up, down, layers);
        if keeps && !widens() { DType::F8E4M3 } else { dtype }
    }

    fn can_fuse_shared_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> bool {
        let fp8 = self.experts_dtype(gate_up, down, layers, dtype) == DType::F8E4M3;
        !(fp8 && self.supports_tma_in(DType::F8E4M3, gate_up, down))
    }

    fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        self.load_stack(matrices, dtype, gated)
    }

    fn linear(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: &PackedMatrix,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        self.linear_rows(s, y, x, w, bias)
    }

    fn fuses_linear(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        self.fits_small_m(rows, dtype, w) || self.fits_medium_m(rows, dtype, w)
    }

    fn fuses_linear_silu_mul(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        self.fuses_linear(rows, dtype, w) || self.fits_large_m(rows, dtype, w)
    }

    fn fused_linear(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: &PackedMatrix,
        around: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        self.fused_linear_checked(s, y, x, w, around)
    }

    fn fuses_prologue(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        self.fuses_fp8_prologue(rows, dtype, w)
    }

    fn linear_with_prologue(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        before: LinearPrologue<'_>,
        w: &PackedMatrix,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        self.fp8_linear_with_prologue(s, y, before, w, bias)
    }

    fn embed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: MatRef<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_table(s, y, ids, table, first)
    }

    fn embed_packed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: &PackedMatrix,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_matrix(s, y, ids, table, first)
    }

    fn rms_norm(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_rows(s, y, x, w, eps)
    }

    fn add_rms_norm(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.add_norm_rows(s, y, x, delta, w, eps)
    }

    fn qk_norm_rope_kv_write(
        &self,
        s: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkNormRopeArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.rope_and_store(s, q, kv, args)
    }

    fn paged_attention(
        &self,
        s: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &PagedAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.paged_attention_rows(s, o, kv, args)
    }

    fn fuses_rope_attention(
        &self,
        qk: &QkNormRopeArgs<'_>,
        rows: &AttentionMetadata<'_>,
        layout: &KvLayout,
    ) -> bool {
        self.prefers_rope_attention(qk, rows, layout)
    }

    fn rope_attention(
        &self,
        s: &DeviceStream,
        o: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        qk: &QkNormRopeArgs<'_>,
        (rows, scale): (&AttentionMetadata<'_>, f32),
    ) -> Result<(), DeviceError> {
        self.attend_projections(s, o, kv, qk, rows, scale)
    }

    fn pack_mla_heads(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedGroup, DeviceError> {
        self.load_mla_heads(matrices, dtype)
    }

    fn has_mla(&self) -> bool {
        true
    }

    fn mla_kv_write(
        &self,
        s: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &MlaKvLayout),
        args: &MlaKvWriteArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.write_mla_kv(s, q, kv, args)
    }

    fn mla_attention(
        &self,
        s: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &MlaKvLayout),
        args: &MlaAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.attend_mla(s, o, kv, args)
    }

    fn silu_mul(&self, s: &DeviceStream, y: MatMut<'_>, x: MatRef<'_>) -> Result<(), DeviceError> {
        self.silu_mul_rows(s, y, x)
    }

    fn add(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        a: MatRef<'_>,
        b: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.add_rows(s, y, a, b)
    }

    fn gather_rows(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        rows: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.gather(s, y, x, rows)
    }

    fn moe_route_softmax(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &RouterLogits<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError> {
        self.route_softmax(s, experts, weights, scores, count)
    }

    fn moe_route(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: MatRef<'_>,
        rule: &RouterRuleArgs<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError> {
        self.route(s, experts, weights, logits, rule, count)
    }

    fn moe_mlp_from_logits(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        scores: &RouterLogits<'_>,
        experts: &ExpertWeights<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<bool, DeviceError> {
        self.expert_mlp_from_logits(s, y, x, scores, experts, count)
    }

    fn eplb_map_experts(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        positions: MatRef<'_>,
        tokens: Option<MatRef<'_>>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.map_chosen_experts(s, experts, (positions, tokens), places)
    }

    fn fuses_shared_experts(&self, tokens: usize) -> bool {
        fuses_shared_experts(tokens)
    }

    fn prefers_secondary_stream(&self, tokens: usize, w: &PackedMatrix) -> bool {
        prefers_secondary_stream(tokens, w)
    }

    fn moe_dispatch(
        &self,
        s: &DeviceStream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: MatRef<'_>,
        spread: &ExpertParallelLayout,
    ) -> Result<(), DeviceError> {
        self.dispatch(s, (tokens, places, counts), experts, spread)
    }

    fn moe_combine_ranks(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.combine_named_rows(s, y, x, places)
    }

    fn moe_mlp(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        routes: &TopKRoutes<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError> {
        self.expert_mlp(s, y, x, routes, experts)
    }

    fn prepare_step(
        &self,
        s: &DeviceStream,
        stage: &StageView<'_>,
        seats: &mut SequenceSlotArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        self.prepare_step(s, stage, seats, step, block_tokens)
    }

    fn prepare_draft_pass(
        &self,
        s: &DeviceStream,
        stage: MatRef<'_>,
        to: &mut DraftPassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        self.lay_out_draft_pass(s, stage, to, pass)
    }

    fn gather_draft_inputs(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<MatRef<'_>>, &DraftHiddenStates<'_>),
    ) -> Result<(), DeviceError> {
        self.gather_previous_states(s, (step.0, step.1, rows), y, from)
    }

    fn store_draft_states(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        states: &mut DraftHiddenStates<'_>,
        hidden: (MatRef<'_>, usize),
        tables: (MatRef<'_>, usize),
    ) -> Result<(), DeviceError> {
        self.store_draft_state_rows(s, step, states, hidden, tables)
    }

    fn draft_argmax(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.argmax_drafts(s, drafts, place, logits)
    }

    fn draft_argmax_vocab_parallel(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (MatRef<'_>, &VocabShard),
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError> {
        self.argmax_drafts_vocab_parallel(s, drafts, place, logits, gather)
    }

    fn map_draft_ids(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.map_draft_token_ids(s, drafts, place, names)
    }

    fn insert_drafts(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.insert_draft_tokens(s, (step.0, step.1, rows), to, drafts)
    }

    fn sample_rows(
        &self,
        s: &DeviceStream,
        logits: MatRef<'_>,
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
    ) -> Result<(), DeviceError> {
        self.sample_logits_rows(s, logits, asked, seats, answers)
    }

    fn vocab_parallel_support(&self, part: &VocabShard) -> VocabParallelSupport {
        Self::vocab_parallel_support_of(part)
    }

    fn sample_vocab_parallel(
        &self,
        s: &DeviceStream,
        logits: (MatRef<'_>, &VocabShard),
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError> {
        self.sample_vocab_parallel_rows(s, logits, asked, seats, answers, gather)
    }
}
