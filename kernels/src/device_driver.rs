//! What every device offers: memory (`DeviceDriver`) and maths on it (`Kernels`).

use crate::step::{
    DraftHiddenStates, DraftPass, DraftPassArrays, PreparedStep, SamplerOutputArrays,
    SequenceSlotArrays, StageView, StepArrays,
};
use crate::timestamps::HostTimestamps;
use crate::{
    AttentionMetadata, Buffer, CopyInFlight, DType, DeviceError, EventTimestamps, ExpertLoadArgs,
    ExpertParallelLayout, ExpertWeights, GatherFn, HostMat, KvLayout, KvOrder, LinearFusion,
    LinearPrologue, MatMut, MatRef, MlaAttentionArgs, MlaKvLayout, MlaKvWriteArgs, PackedGroup,
    PackedMatrix, PagedAttentionArgs, PinnedBuffer, QkNormRopeArgs, RouterLogits, RouterRuleArgs,
    TopKRoutes, VocabParallelSupport, VocabShard,
};
use std::sync::Arc;

/// An order of launches. The CPU device runs every launch to its end before it returns, so it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceStream(pub usize);

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// Bytes that can still be allocated.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

/// A recording of launches.
#[derive(Debug)]
pub struct CapturedGraph(pub Box<dyn GraphReplay>);

/// What a device keeps of a recording.
pub trait GraphReplay: Send + std::fmt::Debug {
    /// Runs it on `s`.
    fn replay(&self, s: &DeviceStream) -> Result<(), DeviceError>;
}

/// Memory, copies and order of one device.
pub trait DeviceDriver: Send + Sync {
    /// The device in words, for logs and reports.
    fn name(&self) -> String;

    /// Allocates zeroed memory.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `[offset, offset + from.len())` of a buffer.
    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies `[offset, offset + to.len())` of a buffer to the host, after all launches on `s`.
    fn download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Waits for all launches on `s`.
    fn synchronize(&self, s: &DeviceStream) -> Result<(), DeviceError>;

    /// Allocates zeroed host memory for copies that run by themselves.
    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError>;

    /// Starts a copy of the first `bytes` of `from` to the beginning of a buffer, in the order of `s`.
    fn start_upload(
        &self,
        s: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Starts a copy of the first `bytes` of a buffer to the beginning of `to`, in the order of `s`.
    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError>;

    /// Fills all of a buffer with zeros, in the order of `s`.
    fn zero(&self, s: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError>;

    /// Whether launches can be captured once and replayed.
    fn captures_graphs(&self) -> bool {
        false
    }

    /// From now on launches on `s` are recorded instead of run. No memory may be allocated, copied
    /// synchronously or freed until `end_capture`.
    fn begin_capture(&self, _: &DeviceStream) -> Result<(), DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// What has been recorded since `begin_capture`, ready to be replayed.
    fn end_capture(&self, _: &DeviceStream) -> Result<CapturedGraph, DeviceError> {
        Err(DeviceError::GraphsUnsupported { device: self.name() })
    }

    /// Runs a recording on `s`. Everything it reads and writes must still be allocated.
    fn replay(&self, s: &DeviceStream, graph: &CapturedGraph) -> Result<(), DeviceError> {
        graph.0.replay(s)
    }

    /// From now on launches do nothing, but what they would need is noted.
    fn begin_dry_run(&self) {}

    /// Launches run again, and all that the rehearsed ones need is ready: compiled side by side, where the
    /// launches would have had it compiled one by one. `progress` hears how many modules of how many are
    /// done, again and again for as long as it takes.
    fn end_dry_run(&self, _progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Where launches run beside those of the first stream, if anywhere: a device that runs one after the other, or marks each
    /// of them, has no such place.
    fn secondary_stream(&self) -> Option<DeviceStream> {
        None
    }

    /// Launches on `s` from now on come behind all that were made on `other`. In a capture of one of them the other becomes part
    /// of the recording, and must be followed by it before the end.
    fn stream_wait(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), DeviceError> {
        let _ = (s, other);
        Ok(())
    }

    /// Steps serve requests from now on: nothing is measured any more to choose between ways of computing,
    /// which would hold them up.
    fn freeze_autotuning(&self) {}

    /// `count` marks that have not been set. What is made here suits a device that runs every launch to
    /// its end before it returns.
    fn alloc_timestamps(&self, count: usize) -> Result<Arc<dyn EventTimestamps>, DeviceError> {
        Ok(Arc::new(HostTimestamps::new(count)))
    }

    /// From now on each launch is followed by one of `marks`, from `first` on, for as long as there are
    /// any, and begins only when its predecessor has ended. A device may mark nothing by itself.
    fn begin_kernel_timestamps(&self, _marks: &Arc<dyn EventTimestamps>, _first: usize) {}

    /// What the marks set since `begin_kernel_timestamps` are behind, in their order: names of kernels.
    fn end_kernel_timestamps(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// Order of keys and values in a block on this device.
    fn kv_order(&self) -> KvOrder;

    /// Free and total memory.
    fn mem_info(&self) -> MemInfo;
}

/// Maths on one device. Every output element is one sum in fixed order: a row's result depends on
/// neither its neighbours, nor the chunk it came in, nor the number of threads.
///
/// Sums, norms, softmax and rotations are f32; a result is rounded once, when it is stored.
pub trait Kernels: DeviceDriver {
    /// Packs the rows of `parts`, stacked, as a weight matrix for inputs of `dtype`, in that type, or in fp8 with
    /// scales where the parts are and the device multiplies it. All parts have equal columns.
    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError>;

    /// The type in which to pack experts with these projections, of which there are as many in `layers` layers, for
    /// inputs of `dtype`: that type, or fp8 where both are stored so, in a shape whose blocks of scales the device
    /// multiplies, and it is not faster with that type and has room for it.
    fn experts_dtype(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> DType {
        let _ = (gate_up, down, layers); // Only who multiplies fp8 wants to know.
        dtype
    }

    /// Whether experts that all tokens share are ever best computed among others with these projections, which are packed as `experts_dtype`
    /// says: [`Kernels::fuses_shared_experts`] then tells when.
    fn can_fuse_shared_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
        dtype: DType,
    ) -> bool {
        let _ = (gate_up, down, layers, dtype);
        true
    }

    /// Packs matrices of one shape that are used together, each the stack of its parts, in the type of their inputs, or
    /// in fp8 if `experts_dtype` says so. `gated`: the first half of the outputs are gates of the second.
    fn pack_group(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
        gated: bool,
    ) -> Result<PackedGroup, DeviceError> {
        let _ = gated; // Only who interleaves them wants to know.
        let packed = matrices.iter().map(|parts| self.pack(parts, dtype));
        PackedGroup::from_separate(packed.collect::<Result<_, _>>()?)
    }

    /// Packs what latent attention makes of latents, a matrix a head.
    fn pack_mla_heads(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedGroup, DeviceError> {
        self.pack_group(matrices, dtype, false)
    }

    /// `y = x Wᵀ + bias`: `x [T, K]`, `W [N, K]`, `bias [N]` f32, `y [T, N]` f32 or the dtype of `x`.
    fn linear(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: &PackedMatrix,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError>;

    /// Whether `linear_around` exists for `rows` rows of input in `dtype`.
    fn fuses_linear(&self, _rows: usize, _dtype: DType, _w: &PackedMatrix) -> bool {
        false
    }

    /// Whether `linear_around` exists for such rows with `silu_mul` and nothing else.
    fn fuses_linear_silu_mul(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        self.fuses_linear(rows, dtype, w)
    }

    /// A linear layer with its neighbours in one launch: `x [T, K]`, `y [T, N]` or `[T, N / 2]`.
    fn fused_linear(
        &self,
        _: &DeviceStream,
        _y: MatMut<'_>,
        x: MatRef<'_>,
        _w: &PackedMatrix,
        _around: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("linear_around", "input");
        Err(DeviceError::Unsupported { kernel, what, dtype: x.dtype() })
    }

    /// Whether products of `rows` rows of `dtype` with `w` take along what makes their inputs: `linear_after`.
    fn fuses_prologue(&self, _rows: usize, _dtype: DType, _w: &PackedMatrix) -> bool {
        false
    }

    /// `linear` of what `before` makes, `[T, K]`: which need not be stored in the type of activations.
    fn linear_with_prologue(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        _before: LinearPrologue<'_>,
        _w: &PackedMatrix,
        _bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("linear_after", "output");
        Err(DeviceError::Unsupported { kernel, what, dtype: y.dtype() })
    }

    /// `y[t] = table[ids[t] - first]`, zero where the id is outside: `ids` i32 `[T]`, `y [T, H]`.
    fn embed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: MatRef<'_>,
        first: usize,
    ) -> Result<(), DeviceError>;

    /// As `embed`, out of a packed matrix `[V, H]`: a tied head is held once.
    fn embed_packed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: &PackedMatrix,
        first: usize,
    ) -> Result<(), DeviceError>;

    /// `y = w · cast(x / sqrt(mean(x²) + eps))`: `x`, `y [T, H]`, `w [H]`.
    fn rms_norm(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// `x += delta; y = rms_norm(x)`: the residual stream is updated in place and rounded once.
    fn add_rms_norm(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// `q = rope(norm(q))` into `q [T, N D]`; `rope(norm(k))` and `v` into the pool by slot.
    fn qk_norm_rope_kv_write(
        &self,
        s: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkNormRopeArgs<'_>,
    ) -> Result<(), DeviceError>;

    /// `o = softmax(scale q kᵀ) v` over the keys at or before each query's position: `o [T, N D]`.
    fn paged_attention(
        &self,
        s: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &PagedAttentionArgs<'_>,
    ) -> Result<(), DeviceError>;

    /// Whether `rope_attention` is the way for these rows and this pool.
    fn fuses_rope_attention(
        &self,
        _: &QkNormRopeArgs<'_>,
        _rows: &AttentionMetadata<'_>,
        _: &KvLayout,
    ) -> bool {
        false
    }

    /// `qk_norm_rope_kv_write`, then `paged_attention` with its queries and a scale, in one launch, for rows of
    /// one token each: `o [T, N D]`.
    fn rope_attention(
        &self,
        _: &DeviceStream,
        _o: MatMut<'_>,
        _kv: (&mut Buffer, &KvLayout),
        qk: &QkNormRopeArgs<'_>,
        _: (&AttentionMetadata<'_>, f32),
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("rope_attention", "projections");
        Err(DeviceError::Unsupported { kernel, what, dtype: qk.qkv.dtype() })
    }

    /// Whether activations, weights, keys and values may be of `dtype`.
    fn supports_dtype(&self, dtype: DType) -> bool;

    /// Whether attention over latent rows exists here: `latent_write` and `latent_attention`.
    fn has_mla(&self) -> bool {
        false
    }

    /// What latent attention does before its scores: `norm(c)` and the turned key channels of `args.kv [T, C + P]` go into the
    /// pool by slot, and the last `P` channels of every head of `q [T, N (M + P)]` are turned in place.
    ///
    /// Errors: [`DeviceError::MlaUnsupported`] on devices that cannot.
    fn mla_kv_write(
        &self,
        s: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &MlaKvLayout),
        args: &MlaKvWriteArgs<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, q, kv, args);
        Err(DeviceError::MlaUnsupported { device: self.name() })
    }

    /// `o = softmax(scale q kᵀ) v` over the tokens at or before each query, keys and values made of the pool's rows:
    /// `o [T, N V]`.
    ///
    /// Errors: [`DeviceError::MlaUnsupported`] on devices that cannot.
    fn mla_attention(
        &self,
        s: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &MlaKvLayout),
        args: &MlaAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, o, kv, args);
        Err(DeviceError::MlaUnsupported { device: self.name() })
    }

    /// `y = silu(gate) · up`: `x [T, 2 I]` holds the gate columns, then the up columns; `y [T, I]`.
    fn silu_mul(&self, s: &DeviceStream, y: MatMut<'_>, x: MatRef<'_>) -> Result<(), DeviceError>;

    /// `y = a + b`, all of one shape.
    fn add(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        a: MatRef<'_>,
        b: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// `y[i] = x[rows[i]]`: `rows` i32 `[n]`, `x [T, H]`, `y [n, H]`.
    fn gather_rows(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        rows: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// Softmax over the logits, then the `k` largest, the lower index first among equals, and the experts that all tokens share behind
    /// them: `experts` i32 and `weights` f32 are `[T, k + shared]`. The `k` choices are added to `count`.
    fn moe_route_softmax(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &RouterLogits<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError>;

    /// The experts of each token by any rule, best first, then those that all tokens share: `logits` f32 `[T, E]`, `experts` i32 and `weights`
    /// f32 `[T, k + shared]`. The `k` choices are added to `count`.
    fn moe_route(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: MatRef<'_>,
        rule: &RouterRuleArgs<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError>;

    /// [`Kernels::moe_route_softmax`] and [`Kernels::moe_mlp`] in one, if the device does that for these sizes, with the
    /// same results: whether it did.
    fn moe_mlp_from_logits(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        scores: &RouterLogits<'_>,
        experts: &ExpertWeights<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<bool, DeviceError> {
        let _ = (s, y, x, scores, experts, count);
        Ok(false)
    }

    /// Whether experts that all tokens share, and that lie among others, are best computed with these at so many tokens. Else they are
    /// faster by themselves.
    fn fuses_shared_experts(&self, tokens: usize) -> bool {
        let _ = tokens;
        true
    }

    /// Whether an MLP of so many rows whose first weights are `w` is best computed on [`DeviceDriver::side`] while experts are computed, if it is
    /// not among them.
    fn prefers_secondary_stream(&self, tokens: usize, w: &PackedMatrix) -> bool {
        let _ = (tokens, w);
        false
    }

    /// Chosen experts `i32 [T, k]` become the places where a copy of each lies. Row `e` of `places` holds the number of
    /// expert `e`'s places, then these; a token takes one of them by its position: `positions` i32 `[1, P]` has those of tokens `tokens`
    /// i32 `[1, T]`, or of all in order.
    ///
    /// Errors on the CPU: a token or an expert that does not exist; on GPUs its place is -1, and no rank computes it.
    fn eplb_map_experts(
        &self,
        s: &DeviceStream,
        experts: MatMut<'_>,
        positions: MatRef<'_>,
        tokens: Option<MatRef<'_>>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// The tokens that each rank of `spread` gets, once each: those with an expert there. `experts` i32 `[T, k]`. `tokens` i32
    /// `[1, size · T]` begins with those for rank 0, ascending, then those for rank 1; `counts` i32 `[1, size]` says how many. `places` i32 `[T, size]` says
    /// where among them a token is, -1 = nowhere.
    fn moe_dispatch(
        &self,
        s: &DeviceStream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: MatRef<'_>,
        spread: &ExpertParallelLayout,
    ) -> Result<(), DeviceError>;

    /// `y [T, H]`: the sum of those rows of `x [n, H]` that a row of `places` i32 `[T, m]` names, in its order, in f32 from zero on, rounded once;
    /// -1 names none.
    fn moe_combine_ranks(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// `y = Σ weight · down(silu(gate x) · up x)` over a token's experts in ascending order, in f32. A GPU may round
    /// the output of each expert to bf16 where tokens are many.
    fn moe_mlp(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        routes: &TopKRoutes<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError>;

    /// Takes over what a stage says about seats and tables, then lays out ids, positions, slots, lengths
    /// and question tokens of the step. See [`crate::step`].
    fn prepare_step(
        &self,
        s: &DeviceStream,
        stage: &StageView<'_>,
        seats: &mut SequenceSlotArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError>;

    /// Lays out a pass of a draft layer over the newest token of each row of a stage that has more drafts than passes came
    /// before, or over what the last of these made of it. All other rows are padding: no key, id 0, slot −1.
    fn prepare_draft_pass(
        &self,
        s: &DeviceStream,
        stage: MatRef<'_>,
        to: &mut DraftPassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError>;

    /// Hidden states before tokens: of the first of each of the first rows of a stage, `y [rows, H]`; or with `hidden [T, H]`,
    /// which those of the step's own tokens are, of all tokens of these rows, `y [T, H]`. `step`: its stage, and the positions
    /// of its tokens, i32 `[1, T]`.
    fn gather_draft_inputs(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<MatRef<'_>>, &DraftHiddenStates<'_>),
    ) -> Result<(), DeviceError>;

    /// Keeps of the states behind a step, `hidden [T, H]`, what its rows' next ones begin with, and those at the ends of
    /// blocks. `tables` i32 `[S, W]` are by seat, of blocks of so many positions. `step`: as above.
    fn store_draft_states(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        states: &mut DraftHiddenStates<'_>,
        hidden: (MatRef<'_>, usize),
        tables: (MatRef<'_>, usize),
    ) -> Result<(), DeviceError>;

    /// `drafts[pass, first + i]` becomes the lowest id with the largest logit, f32 `[n, V]`: `drafts` i32 `[passes, R]`.
    fn draft_argmax(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// The same where every rank of a group has the logits of a part of the vocabulary, f32 `[n, part.cols]`: ranks tell each other one
    /// id of each row, in two words, by `gather`, and choose as of the whole rows.
    ///
    /// Errors: [`DeviceError::PeerRanksFailed`] where `gather` fails.
    fn draft_argmax_vocab_parallel(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (MatRef<'_>, &VocabShard),
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError>;

    /// Calls the first drafts of a pass, in `drafts` i32 `[passes, R]`, by `names` i32 `[1, V]`; `place` = the pass, and how many they are.
    fn map_draft_ids(
        &self,
        s: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// Enters the drafts of the first `rows` rows of a stage behind their known ids: `ids` i32 `[1, T]`, `history` i32 `[S, L]`.
    /// `step`: as above.
    fn insert_drafts(
        &self,
        s: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: MatRef<'_>,
    ) -> Result<(), DeviceError>;

    /// Answers the first `n` questions of a stage out of `logits` f32 `[n, V]`, row by row; rows
    /// beyond the stage's questions are padding. A token that was chosen becomes the newest one of its seat, and joins its
    /// history where a rule reads it. Drafts are judged by the tokens that are chosen, or by chance; the newest one is the last in
    /// front of which all drafts stand. A row's answer depends on that row and its seat alone.
    fn sample_rows(
        &self,
        s: &DeviceStream,
        logits: MatRef<'_>,
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
    ) -> Result<(), DeviceError>;

    /// Which questions `sample_parts` answers here; the same on all ranks.
    fn vocab_parallel_support(&self, _: &VocabShard) -> VocabParallelSupport {
        VocabParallelSupport::Unsupported
    }

    /// The same where every rank of a group has the logits of a part of the vocabulary, f32 `[n, part.cols]`. All ranks
    /// ask the same of the same rows and get the same answers, in ids those of [`Kernels::sample_rows`] for the whole
    /// rows; `gather` is called as often on each, with matrices of the same shape. Questions are such as [`Kernels::vocab_parallel_support`] says:
    /// which rules they follow the device alone sees.
    ///
    /// Errors: [`DeviceError::PeerRanksFailed`] where `gather` fails; [`DeviceError::VocabParallelUnsupported`] on devices that cannot.
    fn sample_vocab_parallel(
        &self,
        s: &DeviceStream,
        logits: (MatRef<'_>, &VocabShard),
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, logits, asked, seats, answers, gather);
        Err(DeviceError::VocabParallelUnsupported { device: self.name() })
    }
}
