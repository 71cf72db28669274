//! The table that leads each kernel of the trait to its file.

use super::device::HipDevice;
use super::fp8;
use super::moe_call::{joins_shared, runs_beside};
use crate::step::{
    AnswerArrays, DraftPass, DraftStates, Laid, PassArrays, SeatArrays, StageView, StepArrays,
};
use crate::{
    Around, Attention, BatchRows, Before, Buffer, DType, DeviceError, ExpertCount, Experts, Gather,
    HostMat, InParts, Kernels, KvLayout, LatentAttention, LatentLayout, LatentWrite, Mat, MatMut,
    Packed, PackedGroup, QkRope, RouteRule, Routes, Scores, Spread, Stream, VocabPart,
};

impl Kernels for HipDevice {
    fn computes_in(&self, dtype: DType) -> bool {
        dtype == DType::F32 || dtype == self.half()
    }

    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<Packed, DeviceError> {
        self.load(parts, dtype)
    }

    fn experts_dtype(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> DType {
        let keeps = dtype == self.half() && fp8::keeps(gate_up, true) && fp8::keeps(down, false);
        let widens = || self.widens_experts(gate_up, down, layers);
        if keeps && !widens() { DType::F8E4M3 } else { dtype }
    }

    fn takes_shared(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> bool {
        let fp8 = self.experts_dtype(gate_up, down, layers, dtype) == DType::F8E4M3;
        !(fp8 && self.streams_in(DType::F8E4M3, gate_up, down))
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
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        self.linear_rows(s, y, x, w, bias)
    }

    fn fuses(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        self.fits_skinny(rows, dtype, w) || self.streams_rows(rows, dtype, w)
    }

    fn fuses_silu_mul(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        self.fuses(rows, dtype, w) || self.fits_many(rows, dtype, w)
    }

    fn linear_around(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        around: &Around<'_>,
    ) -> Result<(), DeviceError> {
        self.linear_fused(s, y, x, w, around)
    }

    fn joins(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        self.joins_fp8(rows, dtype, w)
    }

    fn linear_after(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        before: Before<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        self.fp8_after(s, y, before, w, bias)
    }

    fn embed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: Mat<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_table(s, y, ids, table, first)
    }

    fn embed_packed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: &Packed,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_matrix(s, y, ids, table, first)
    }

    fn rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_rows(s, y, x, w, eps)
    }

    fn add_rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.add_norm_rows(s, y, x, delta, w, eps)
    }

    fn qk_norm_rope_kv_write(
        &self,
        s: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkRope<'_>,
    ) -> Result<(), DeviceError> {
        self.rope_and_store(s, q, kv, args)
    }

    fn paged_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &Attention<'_>,
    ) -> Result<(), DeviceError> {
        self.attend(s, o, kv, args)
    }

    fn fuses_attention(&self, qk: &QkRope<'_>, rows: &BatchRows<'_>, layout: &KvLayout) -> bool {
        self.prefers_rope_attention(qk, rows, layout)
    }

    fn rope_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        qk: &QkRope<'_>,
        (rows, scale): (&BatchRows<'_>, f32),
    ) -> Result<(), DeviceError> {
        self.attend_projections(s, o, kv, qk, rows, scale)
    }

    fn pack_heads(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedGroup, DeviceError> {
        self.load_heads(matrices, dtype)
    }

    fn has_latent_attention(&self) -> bool {
        true
    }

    fn latent_write(
        &self,
        s: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &LatentLayout),
        args: &LatentWrite<'_>,
    ) -> Result<(), DeviceError> {
        self.store_latents(s, q, kv, args)
    }

    fn latent_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &LatentLayout),
        args: &LatentAttention<'_>,
    ) -> Result<(), DeviceError> {
        self.attend_latent(s, o, kv, args)
    }

    fn silu_mul(&self, s: &Stream, y: MatMut<'_>, x: Mat<'_>) -> Result<(), DeviceError> {
        self.silu_mul_rows(s, y, x)
    }

    fn add(&self, s: &Stream, y: MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> Result<(), DeviceError> {
        self.add_rows(s, y, a, b)
    }

    fn gather_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        rows: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.gather(s, y, x, rows)
    }

    fn moe_route_softmax(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &Scores<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError> {
        self.route_softmax(s, experts, weights, scores, count)
    }

    fn moe_route(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: Mat<'_>,
        rule: &RouteRule<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError> {
        self.route(s, experts, weights, logits, rule, count)
    }

    fn moe_mlp_of_scores(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        scores: &Scores<'_>,
        experts: &Experts<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<bool, DeviceError> {
        self.expert_mlp_of_scores(s, y, x, scores, experts, count)
    }

    fn place_experts(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        positions: Mat<'_>,
        tokens: Option<Mat<'_>>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.place_chosen(s, experts, (positions, tokens), places)
    }

    fn joins_shared(&self, tokens: usize) -> bool {
        joins_shared(tokens)
    }

    fn runs_beside(&self, tokens: usize, w: &Packed) -> bool {
        runs_beside(tokens, w)
    }

    fn moe_dispatch(
        &self,
        s: &Stream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: Mat<'_>,
        spread: &Spread,
    ) -> Result<(), DeviceError> {
        self.dispatch(s, (tokens, places, counts), experts, spread)
    }

    fn sum_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.sum_named_rows(s, y, x, places)
    }

    fn moe_mlp(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        self.expert_mlp(s, y, x, routes, experts)
    }

    fn prepare(
        &self,
        s: &Stream,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        self.prepare_step(s, stage, seats, step, block_tokens)
    }

    fn draft_rows(
        &self,
        s: &Stream,
        stage: Mat<'_>,
        to: &mut PassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        self.lay_out_pass(s, stage, to, pass)
    }

    fn draft_before(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<Mat<'_>>, &DraftStates<'_>),
    ) -> Result<(), DeviceError> {
        self.states_before(s, (step.0, step.1, rows), y, from)
    }

    fn draft_carry(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        states: &mut DraftStates<'_>,
        hidden: (Mat<'_>, usize),
        tables: (Mat<'_>, usize),
    ) -> Result<(), DeviceError> {
        self.carry_states(s, step, states, hidden, tables)
    }

    fn draft_argmax(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.choose_drafts(s, drafts, place, logits)
    }

    fn draft_argmax_parts(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (Mat<'_>, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        self.choose_drafts_of_parts(s, drafts, place, logits, gather)
    }

    fn draft_name(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.name_drafts(s, drafts, place, names)
    }

    fn draft_place(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.place_drafts(s, (step.0, step.1, rows), to, drafts)
    }

    fn sample_rows(
        &self,
        s: &Stream,
        logits: Mat<'_>,
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
    ) -> Result<(), DeviceError> {
        self.answer_questions(s, logits, asked, seats, answers)
    }

    fn samples_in_parts(&self, part: &VocabPart) -> InParts {
        Self::parts_answered(part)
    }

    fn sample_parts(
        &self,
        s: &Stream,
        logits: (Mat<'_>, &VocabPart),
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        self.answer_in_parts(s, logits, asked, seats, answers, gather)
    }
}
