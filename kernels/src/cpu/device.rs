//! `CpuDevice`: threads, memory, and the table that leads each kernel of the trait to its file.

use std::sync::{Arc, Mutex};

use super::isa::Isa;
use super::memory::{CpuMemory, host_memory};
use super::moe::Workspace;
use super::pool::ThreadPool;
use super::sample::Sampler;
use super::topology::physical_cores;
use crate::check::check_range;
use crate::pinned::Passed;
use crate::step::{
    AnswerArrays, DraftPass, DraftStates, Laid, PassArrays, SeatArrays, StageView, StepArrays,
};
use crate::{
    Attention, Buffer, DType, DeviceError, Driver, ExpertCount, Experts, Gather, HostMat, InFlight,
    InParts, Kernels, KvLayout, KvOrder, LatentAttention, LatentLayout, LatentWrite, Mat, MatMut,
    MemInfo, Packed, Pinned, QkRope, RouteRule, Routes, Scores, Spread, Stream, VocabPart,
};

/// How a CPU device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, the caller included; 0 = one per physical core.
    pub threads: usize,
    /// Instruction set; tests name slower ones than the best.
    pub isa: Isa,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 0, isa: Isa::detect() }
    }
}

/// The host processor as a device.
#[derive(Debug)]
pub struct CpuDevice {
    threads: ThreadPool,
    memory: Arc<CpuMemory>,
    sampler: Sampler,
    experts: Mutex<Workspace>,
    spread: Mutex<Option<Buffer>>,
    isa: Isa,
}

impl CpuDevice {
    /// Starts the threads. Refuses an instruction set that the processor lacks.
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        if !config.isa.available() {
            return Err(DeviceError::MissingIsa { isa: config.isa.name() });
        }
        let threads = if config.threads == 0 { physical_cores() } else { config.threads };
        Ok(Self {
            threads: ThreadPool::new(threads)?,
            memory: Arc::default(),
            sampler: Sampler::new(threads),
            experts: Mutex::default(),
            spread: Mutex::default(),
            isa: config.isa,
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Copies of inputs whose rows would clash in cache; never contended either.
    pub(super) fn spread(&self) -> &Mutex<Option<Buffer>> {
        &self.spread
    }

    /// Memory of `moe_mlp`; one thread owns a device, so it is never contended.
    pub(super) fn workspace(&self) -> &Mutex<Workspace> {
        &self.experts
    }

    pub(super) fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The threads, for other host work between kernels (sampling).
    #[must_use]
    pub fn threads(&self) -> &ThreadPool {
        &self.threads
    }
}

impl Driver for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {} threads, {}", self.threads.threads(), self.isa.name())
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.memory.alloc(bytes)
    }

    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        check_range("upload", offset, from.len(), to.bytes())?;
        // SAFETY: the range was checked, and a host slice never overlaps a uniquely borrowed buffer.
        unsafe {
            to.as_mut_ptr().add(offset).copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
        Ok(())
    }

    fn download(
        &self,
        _: &Stream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        check_range("download", offset, to.len(), from.bytes())?;
        // SAFETY: the range was checked; buffers are initialised and `to` is uniquely borrowed.
        unsafe {
            to.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr().add(offset), to.len());
        }
        Ok(())
    }

    fn synchronize(&self, _: &Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        // SAFETY: this device's memory is the host's.
        Ok(unsafe { Pinned::from_host(self.memory.alloc(bytes)?) })
    }

    fn start_upload(
        &self,
        _: &Stream,
        to: &mut Buffer,
        from: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError> {
        check_range("start_upload", 0, bytes, from.bytes().len())?;
        self.upload(to, 0, &from.bytes()[..bytes])?;
        Ok(InFlight::new(from, Box::new(Passed)))
    }

    fn start_download(
        &self,
        s: &Stream,
        from: &Buffer,
        mut to: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError> {
        check_range("start_download", 0, bytes, to.bytes().len())?;
        self.download(s, from, 0, &mut to.bytes_mut()[..bytes])?;
        Ok(InFlight::new(to, Box::new(Passed)))
    }

    fn zero(&self, _: &Stream, x: &mut Buffer) -> Result<(), DeviceError> {
        // SAFETY: all of a buffer that is uniquely borrowed.
        unsafe { x.as_mut_ptr().write_bytes(0, x.bytes()) };
        Ok(())
    }

    fn kv_order(&self) -> KvOrder {
        KvOrder::Lanes
    }

    fn mem_info(&self) -> MemInfo {
        let (free_bytes, total_bytes) = host_memory();
        MemInfo { free_bytes, total_bytes }
    }
}

impl Kernels for CpuDevice {
    fn computes_in(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
    }

    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<Packed, DeviceError> {
        self.pack_parts(parts, dtype)
    }

    fn linear(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        self.linear_rows(y, x, w, bias)
    }

    fn embed(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: Mat<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_table(y, ids, table, first)
    }

    fn embed_packed(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: &Packed,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_panels(y, ids, table, first)
    }

    fn rms_norm(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_rows(y, x, w, eps)
    }

    fn add_rms_norm(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.add_norm_rows(y, x, delta, w, eps)
    }

    fn qk_norm_rope_kv_write(
        &self,
        _: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkRope<'_>,
    ) -> Result<(), DeviceError> {
        self.rope_and_store(q, kv, args)
    }

    fn paged_attention(
        &self,
        _: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &Attention<'_>,
    ) -> Result<(), DeviceError> {
        self.attend(o, kv, args)
    }

    fn has_latent_attention(&self) -> bool {
        true
    }

    fn latent_write(
        &self,
        _: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &LatentLayout),
        args: &LatentWrite<'_>,
    ) -> Result<(), DeviceError> {
        self.store_latents(q, kv, args)
    }

    fn latent_attention(
        &self,
        _: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &LatentLayout),
        args: &LatentAttention<'_>,
    ) -> Result<(), DeviceError> {
        self.attend_latent(o, kv, args)
    }

    fn silu_mul(&self, _: &Stream, y: MatMut<'_>, x: Mat<'_>) -> Result<(), DeviceError> {
        self.silu_mul_rows(y, x)
    }

    fn add(&self, _: &Stream, y: MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> Result<(), DeviceError> {
        self.add_rows(y, a, b)
    }

    fn gather_rows(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        rows: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.gather(y, x, rows)
    }

    fn moe_route_softmax(
        &self,
        _: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &Scores<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError> {
        Self::route(experts, weights, scores.logits, &RouteRule::softmax(scores), count)
    }

    fn moe_route(
        &self,
        _: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: Mat<'_>,
        rule: &RouteRule<'_>,
        count: Option<&mut ExpertCount<'_>>,
    ) -> Result<(), DeviceError> {
        Self::route(experts, weights, logits, rule, count)
    }

    fn place_experts(
        &self,
        _: &Stream,
        experts: MatMut<'_>,
        positions: Mat<'_>,
        tokens: Option<Mat<'_>>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError> {
        Self::place_chosen(experts, (positions, tokens), places)
    }

    fn moe_dispatch(
        &self,
        _: &Stream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: Mat<'_>,
        spread: &Spread,
    ) -> Result<(), DeviceError> {
        Self::dispatch(tokens, places, counts, experts, spread)
    }

    fn sum_rows(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        places: Mat<'_>,
    ) -> Result<(), DeviceError> {
        self.sum_named_rows(y, x, places)
    }

    fn moe_mlp(
        &self,
        _: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        self.expert_mlp(y, x, routes, experts)
    }

    fn prepare(
        &self,
        _: &Stream,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        Self::prepare_step(stage, seats, step, block_tokens)
    }

    fn draft_rows(
        &self,
        _: &Stream,
        stage: Mat<'_>,
        to: &mut PassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        Self::lay_out_pass(stage, to, pass)
    }

    fn draft_before(
        &self,
        _: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<Mat<'_>>, &DraftStates<'_>),
    ) -> Result<(), DeviceError> {
        Self::states_before((step.0, step.1, rows), y, from)
    }

    fn draft_carry(
        &self,
        _: &Stream,
        step: (Mat<'_>, Mat<'_>),
        states: &mut DraftStates<'_>,
        hidden: (Mat<'_>, usize),
        tables: (Mat<'_>, usize),
    ) -> Result<(), DeviceError> {
        Self::carry_states(step, states, hidden, tables)
    }

    fn draft_argmax(
        &self,
        _: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: Mat<'_>,
    ) -> Result<(), DeviceError> {
        Self::choose_drafts(drafts, place, logits)
    }

    fn draft_argmax_parts(
        &self,
        _: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (Mat<'_>, &VocabPart),
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        Self::choose_drafts_of_parts(drafts, place, logits, gather)
    }

    fn draft_name(
        &self,
        _: &Stream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: Mat<'_>,
    ) -> Result<(), DeviceError> {
        Self::name_drafts(drafts, place, names)
    }

    fn draft_place(
        &self,
        _: &Stream,
        step: (Mat<'_>, Mat<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: Mat<'_>,
    ) -> Result<(), DeviceError> {
        Self::place_drafts((step.0, step.1, rows), to, drafts)
    }

    fn sample_rows(
        &self,
        _: &Stream,
        logits: Mat<'_>,
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
    ) -> Result<(), DeviceError> {
        self.answer_questions(logits, asked, seats, answers)
    }

    fn samples_in_parts(&self, _: &VocabPart) -> InParts {
        InParts::Everything
    }

    fn sample_parts(
        &self,
        _: &Stream,
        logits: (Mat<'_>, &VocabPart),
        asked: (&StageView<'_>, &Laid<'_>),
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
        gather: &mut Gather<'_>,
    ) -> Result<(), DeviceError> {
        self.answer_in_parts(logits, asked, seats, answers, gather)
    }
}

/// Calls a method generic over the element type for the model types.
macro_rules! for_float {
    ($kernel:expr, $dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $call
            }
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $call
            }
            $crate::DType::F16 => {
                type $T = half::f16;
                $call
            }
            dtype => {
                let (kernel, what) = ($kernel, "activation");
                return Err($crate::DeviceError::Unsupported { kernel, what, dtype });
            }
        }
    };
}
pub(super) use for_float;
