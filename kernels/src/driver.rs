//! What every device offers: memory (`Driver`) and maths on it (`Kernels`).

use crate::marks::HostMarks;
use crate::step::{
    AnswerArrays, DraftPass, DraftStates, Laid, PassArrays, SeatArrays, StageView, StepArrays,
};
use crate::{
    Around, Attention, BatchRows, Before, Buffer, DType, DeviceError, ExpertCount, Experts, Gather,
    HostMat, InFlight, InParts, KvLayout, KvOrder, LatentAttention, LatentLayout, LatentWrite,
    Marks, Mat, MatMut, Packed, PackedGroup, Pinned, QkRope, RouteRule, Routes, Scores, Spread,
    VocabPart,
};
use std::sync::Arc;

/// An order of launches. The CPU device runs every launch to its end before it returns, so it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(pub usize);

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
pub struct Graph(pub Box<dyn Replay>);

/// What a device keeps of a recording.
pub trait Replay: Send + std::fmt::Debug {
    /// Runs it on `s`.
    fn replay(&self, s: &Stream) -> Result<(), DeviceError>;
}

/// Memory, copies and order of one device.
pub trait Driver: Send + Sync {
    /// The device in words, for logs and reports.
    fn name(&self) -> String;

    /// Allocates zeroed memory.
    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Copies host bytes to `[offset, offset + from.len())` of a buffer.
    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError>;

    /// Copies `[offset, offset + to.len())` of a buffer to the host, after all launches on `s`.
    fn download(
        &self,
        s: &Stream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Waits for all launches on `s`.
    fn synchronize(&self, s: &Stream) -> Result<(), DeviceError>;

    /// Allocates zeroed host memory for copies that run by themselves.
    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned, DeviceError>;

    /// Starts a copy of the first `bytes` of `from` to the beginning of a buffer, in the order of `s`.
    fn start_upload(
        &self,
        s: &Stream,
        to: &mut Buffer,
        from: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError>;

    /// Starts a copy of the first `bytes` of a buffer to the beginning of `to`, in the order of `s`.
    fn start_download(
        &self,
        s: &Stream,
        from: &Buffer,
        to: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError>;

    /// Fills all of a buffer with zeros, in the order of `s`.
    fn zero(&self, s: &Stream, x: &mut Buffer) -> Result<(), DeviceError>;

    /// Whether launches can be captured once and replayed.
    fn captures_graphs(&self) -> bool {
        false
    }

    /// From now on launches on `s` are recorded instead of run. No memory may be allocated, copied
    /// synchronously or freed until `end_capture`.
    fn begin_capture(&self, _: &Stream) -> Result<(), DeviceError> {
        Err(DeviceError::NoGraphs { device: self.name() })
    }

    /// What has been recorded since `begin_capture`, ready to be replayed.
    fn end_capture(&self, _: &Stream) -> Result<Graph, DeviceError> {
        Err(DeviceError::NoGraphs { device: self.name() })
    }

    /// Runs a recording on `s`. Everything it reads and writes must still be allocated.
    fn replay(&self, s: &Stream, graph: &Graph) -> Result<(), DeviceError> {
        graph.0.replay(s)
    }

    /// From now on launches do nothing, but what they would need is noted.
    fn begin_rehearsal(&self) {}

    /// Launches run again, and all that the rehearsed ones need is ready: compiled side by side, where the
    /// launches would have had it compiled one by one. `progress` hears how many modules of how many are
    /// done, again and again for as long as it takes.
    fn end_rehearsal(&self, _progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Where launches run beside those of the first stream, if anywhere: a device that runs one after the other, or marks each
    /// of them, has no such place.
    fn side(&self) -> Option<Stream> {
        None
    }

    /// Launches on `s` from now on come behind all that were made on `other`. In a capture of one of them the other becomes part
    /// of the recording, and must be followed by it before the end.
    fn follow(&self, s: &Stream, other: &Stream) -> Result<(), DeviceError> {
        let _ = (s, other);
        Ok(())
    }

    /// Steps serve requests from now on: nothing is measured any more to choose between ways of computing,
    /// which would hold them up.
    fn settle(&self) {}

    /// `count` marks that have not been set. What is made here suits a device that runs every launch to
    /// its end before it returns.
    fn alloc_marks(&self, count: usize) -> Result<Arc<dyn Marks>, DeviceError> {
        Ok(Arc::new(HostMarks::new(count)))
    }

    /// From now on each launch is followed by one of `marks`, from `first` on, for as long as there are
    /// any, and begins only when its predecessor has ended. A device may mark nothing by itself.
    fn begin_marking(&self, _marks: &Arc<dyn Marks>, _first: usize) {}

    /// What the marks set since `begin_marking` are behind, in their order: names of kernels.
    fn end_marking(&self) -> Vec<&'static str> {
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
pub trait Kernels: Driver {
    /// Packs the rows of `parts`, stacked, as a weight matrix for inputs of `dtype`, in that type, or in fp8 with
    /// scales where the parts are and the device multiplies it. All parts have equal columns.
    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<Packed, DeviceError>;

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
    /// says: [`Kernels::joins_shared`] then tells when.
    fn takes_shared(
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
        PackedGroup::apart(packed.collect::<Result<_, _>>()?)
    }

    /// Packs what latent attention makes of latents, a matrix a head.
    fn pack_heads(
        &self,
        matrices: &[Vec<HostMat<'_>>],
        dtype: DType,
    ) -> Result<PackedGroup, DeviceError> {
        self.pack_group(matrices, dtype, false)
    }

    /// `y = x Wᵀ + bias`: `x [T, K]`, `W [N, K]`, `bias [N]` f32, `y [T, N]` f32 or the dtype of `x`.
    fn linear(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError>;

    /// Whether `linear_around` exists for `rows` rows of input in `dtype`.
    fn fuses(&self, _rows: usize, _dtype: DType, _w: &Packed) -> bool {
        false
    }

    /// Whether `linear_around` exists for such rows with `silu_mul` and nothing else.
    fn fuses_silu_mul(&self, rows: usize, dtype: DType, w: &Packed) -> bool {
        self.fuses(rows, dtype, w)
    }

    /// A linear layer with its neighbours in one launch: `x [T, K]`, `y [T, N]` or `[T, N / 2]`.
    fn linear_around(
        &self,
        _: &Stream,
        _y: MatMut<'_>,
        x: Mat<'_>,
        _w: &Packed,
        _around: &Around<'_>,
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("linear_around", "input");
        Err(DeviceError::Unsupported { kernel, what, dtype: x.dtype() })
    }

    /// Whether products of `rows` rows of `dtype` with `w` take along what makes their inputs: `linear_after`.
    fn joins(&self, _rows: usize, _dtype: DType, _w: &Packed) -> bool {
        false
    }

    /// `linear` of what `before` makes, `[T, K]`: which need not be stored in the type of activations.
    fn linear_after(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        _before: Before<'_>,
        _w: &Packed,
        _bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("linear_after", "output");
        Err(DeviceError::Unsupported { kernel, what, dtype: y.dtype() })
    }

    /// `y[t] = table[ids[t] - first]`, zero where the id is outside: `ids` i32 `[T]`, `y [T, H]`.
    fn embed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: Mat<'_>,
        first: usize,
    ) -> Result<(), DeviceError>;

    /// As `embed`, out of a packed matrix `[V, H]`: a tied head is held once.
    fn embed_packed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: &Packed,
        first: usize,
    ) -> Result<(), DeviceError>;

    /// `y = w · cast(x / sqrt(mean(x²) + eps))`: `x`, `y [T, H]`, `w [H]`.
    fn rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// `x += delta; y = rms_norm(x)`: the residual stream is updated in place and rounded once.
    fn add_rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// `q = rope(norm(q))` into `q [T, N D]`; `rope(norm(k))` and `v` into the pool by slot.
    fn qk_norm_rope_kv_write(
        &self,
        s: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkRope<'_>,
    ) -> Result<(), DeviceError>;

    /// `o = softmax(scale q kᵀ) v` over the keys at or before each query's position: `o [T, N D]`.
    fn paged_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &Attention<'_>,
    ) -> Result<(), DeviceError>;

    /// Whether `rope_attention` is the way for these rows and this pool.
    fn fuses_attention(&self, _: &QkRope<'_>, _rows: &BatchRows<'_>, _: &KvLayout) -> bool {
        false
    }

    /// `qk_norm_rope_kv_write`, then `paged_attention` with its queries and a scale, in one launch, for rows of
    /// one token each: `o [T, N D]`.
    fn rope_attention(
        &self,
        _: &Stream,
        _o: MatMut<'_>,
        _kv: (&mut Buffer, &KvLayout),
        qk: &QkRope<'_>,
        _: (&BatchRows<'_>, f32),
    ) -> Result<(), DeviceError> {
        let (kernel, what) = ("rope_attention", "projections");
        Err(DeviceError::Unsupported { kernel, what, dtype: qk.qkv.dtype() })
    }

    /// Whether activations, weights, keys and values may be of `dtype`.
    fn computes_in(&self, dtype: DType) -> bool;

    /// Whether attention over latent rows exists here: `latent_write` and `latent_attention`.
    fn has_latent_attention(&self) -> bool {
        false
    }

    /// What latent attention does before its scores: `norm(c)` and the turned key channels of `args.kv [T, C + P]` go into the
    /// pool by slot, and the last `P` channels of every head of `q [T, N (M + P)]` are turned in place.
    ///
    /// Errors: [`DeviceError::NoLatent`] on devices that cannot.
    fn latent_write(
        &self,
        s: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &LatentLayout),
        args: &LatentWrite<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, q, kv, args);
        Err(DeviceError::NoLatent { device: self.name() })
    }

    /// `o = softmax(scale q kᵀ) v` over the tokens at or before each query, keys and values made of the pool's rows:
    /// `o [T, N V]`.
    ///
    /// Errors: [`DeviceError::NoLatent`] on devices that cannot.
    fn latent_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &LatentLayout),
        args: &LatentAttention<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, o, kv, args);
        Err(DeviceError::NoLatent { device: self.name() })
    }

    /// `y = silu(gate) · up`: `x [T, 2 I]` holds the gate columns, then the up columns; `y [T, I]`.
    fn silu_mul(&self, s: &Stream, y: MatMut<'_>, x: Mat<'_>) -> Result<(), DeviceError>;

    /// `y = a + b`, all of one shape.
    fn add(&self, s: &Stream, y: MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> Result<(), DeviceError>;

    /// `y[i] = x[rows[i]]`: `rows` i32 `[n]`, `x [T, H]`, `y [n, H]`.
    fn gather_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        rows: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// Softmax over the logits, then the `k` largest, the lower index first among equals, and the experts that all tokens share behind
    /// them: `experts` i32 and `weights` f32 are `[T, k + shared]`. The `k` choices are added to `count`.
    fn moe_route_softmax(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &Scores<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError>;

    /// The experts of each token by any rule, best first, then those that all tokens share: `logits` f32 `[T, E]`, `experts` i32 and `weights`
    /// f32 `[T, k + shared]`. The `k` choices are added to `count`.
    fn moe_route(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: Mat<'_>,
        rule: &RouteRule<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError>;

    /// [`Kernels::moe_route_softmax`] and [`Kernels::moe_mlp`] in one, if the device does that for these sizes, with the
    /// same results: whether it did.
    fn moe_mlp_of_scores(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        scores: &Scores<'_>,
        experts: &Experts<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<bool, DeviceError> {
        let _ = (s, y, x, scores, experts, count);
        Ok(false)
    }

    /// Whether experts that all tokens share, and that lie among others, are best computed with these at so many tokens. Else they are
    /// faster by themselves.
    fn joins_shared(&self, tokens: usize) -> bool {
        let _ = tokens;
        true
    }

    /// Whether an MLP of so many rows whose first weights are `w` is best computed on [`Driver::side`] while experts are computed, if it is
    /// not among them.
    fn runs_beside(&self, tokens: usize, w: &Packed) -> bool {
        let _ = (tokens, w);
        false
    }

    /// Chosen experts `i32 [T, k]` become the places where a copy of each lies. Row `e` of `places` holds the number of
    /// expert `e`'s places, then these; a token takes one of them by its position: `positions` i32 `[1, P]` has those of tokens `tokens`
    /// i32 `[1, T]`, or of all in order.
    ///
    /// Errors on the CPU: a token or an expert that does not exist; on GPUs its place is -1, and no rank computes it.
    fn place_experts(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        positions: Mat<'_>,
        tokens: Option<Mat<'_>>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// The tokens that each rank of `spread` gets, once each: those with an expert there. `experts` i32 `[T, k]`. `tokens` i32
    /// `[1, size · T]` begins with those for rank 0, ascending, then those for rank 1; `counts` i32 `[1, size]` says how many. `places` i32 `[T, size]` says
    /// where among them a token is, -1 = nowhere.
    fn moe_dispatch(
        &self,
        s: &Stream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: Mat<'_>,
        spread: &Spread,
    ) -> Result<(), DeviceError>;

    /// `y [T, H]`: the sum of those rows of `x [n, H]` that a row of `places` i32 `[T, m]` names, in its order, in f32 from zero on, rounded once;
    /// -1 names none.
    fn sum_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// `y = Σ weight · down(silu(gate x) · up x)` over a token's experts in ascending order, in f32. A GPU may round
    /// the output of each expert to bf16 where tokens are many.
    fn moe_mlp(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError>;

    /// Takes over what a stage says about seats and tables, then lays out ids, positions, slots, lengths
    /// and question tokens of the step. See [`crate::step`].
    fn prepare(
        &self,
        s: &Stream,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError>;

    /// Lays out a pass of a draft layer over the newest token of each row of a stage that has more drafts than passes came
    /// before, or over what the last of these made of it. All other rows are padding: no key, id 0, slot −1.
    fn draft_rows(
        &self,
        s: &Stream,
        stage: Mat<'_>,
        to: &mut PassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError>;

    /// Hidden states before tokens: of the first of each of the first rows of a stage, `y [rows, H]`; or with `hidden [T, H]`,
    /// which those of the step's own tokens are, of all tokens of these rows, `y [T, H]`. `step`: its stage, and the positions
    /// of its tokens, i32 `[1, T]`.
    fn draft_before(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<Mat<'_>>, &DraftStates<'_>),
    ) -> Result<(), DeviceError>;

    /// Keeps of the states behind a step, `hidden [T, H]`, what its rows' next ones begin with, and those at the ends of
    /// blocks. `tables` i32 `[S, W]` are by seat, of blocks of so many positions. `step`: as above.
    fn draft_carry(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        states: &mut DraftStates<'_>,
        hidden: (Mat<'_>, usize),
        tables: (Mat<'_>, usize),
    ) -> Result<(), DeviceError>;

    /// `drafts[pass, first + i]` becomes the lowest id with the largest logit, f32 `[n, V]`: `drafts` i32 `[passes, R]`.
    fn draft_argmax(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// The same where every rank of a group has the logits of a part of the vocabulary, f32 `[n, part.cols]`: ranks tell each other one
    /// id of each row, in two words, by `gather`, and choose as of the whole rows.
    ///
    /// Errors: [`DeviceError::Peers`] where `gather` fails.
    fn draft_argmax_parts(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (Mat<'_>, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError>;

    /// Calls the first drafts of a pass, in `drafts` i32 `[passes, R]`, by `names` i32 `[1, V]`; `place` = the pass, and how many they are.
    fn draft_name(
        &self,
        s: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// Enters the drafts of the first `rows` rows of a stage behind their known ids: `ids` i32 `[1, T]`, `history` i32 `[S, L]`.
    /// `step`: as above.
    fn draft_place(
        &self,
        s: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: Mat<'_>,
    ) -> Result<(), DeviceError>;

    /// Answers the first `n` questions of a stage out of `logits` f32 `[n, V]`, row by row; rows
    /// beyond the stage's questions are padding. A token that was chosen becomes the newest one of its seat, and joins its
    /// history where a rule reads it. Drafts are judged by the tokens that are chosen, or by chance; the newest one is the last in
    /// front of which all drafts stand. A row's answer depends on that row and its seat alone.
    fn sample_rows(
        &self,
        s: &Stream,
        logits: Mat<'_>,
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
    ) -> Result<(), DeviceError>;

    /// Which questions `sample_parts` answers here; the same on all ranks.
    fn samples_in_parts(&self, _: &VocabPart) -> InParts {
        InParts::Nothing
    }

    /// The same where every rank of a group has the logits of a part of the vocabulary, f32 `[n, part.cols]`. All ranks
    /// ask the same of the same rows and get the same answers, in ids those of [`Kernels::sample_rows`] for the whole
    /// rows; `gather` is called as often on each, with matrices of the same shape. Questions are such as [`Kernels::samples_in_parts`] says:
    /// which rules they follow the device alone sees.
    ///
    /// Errors: [`DeviceError::Peers`] where `gather` fails; [`DeviceError::NoParts`] on devices that cannot.
    fn sample_parts(
        &self,
        s: &Stream,
        logits: (Mat<'_>, &VocabPart),
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (s, logits, asked, seats, answers, gather);
        Err(DeviceError::NoParts { device: self.name() })
    }
}
