//! `CpuDevice`: threads, memory, and the table that leads each kernel of the trait to its file.

use std::sync::{Arc, Mutex};

use super::isa::CpuIsa;
use super::memory::{CpuMemory, host_memory};
use super::moe::MoeWorkspace;
use super::sample::CpuSampler;
use super::thread_pool::ThreadPool;
use super::topology::physical_cores;
use crate::check::check_range;
use crate::pinned_memory::CompletedFence;
use crate::step::{
    DraftHiddenStates, DraftPass, DraftPassArrays, PreparedStep, SamplerOutputArrays,
    SequenceSlotArrays, StageView, StepArrays,
};
use crate::{
    Buffer, CopyInFlight, DType, DeviceDriver, DeviceError, DeviceStream, ExpertLoadArgs,
    ExpertParallelLayout, ExpertWeights, GatherFn, HostMat, Kernels, KvLayout, KvOrder, MatMut,
    MatRef, MemInfo, MlaAttentionArgs, MlaKvLayout, MlaKvWriteArgs, PackedMatrix,
    PagedAttentionArgs, PinnedBuffer, QkNormRopeArgs, RouterLogits, RouterRuleArgs, TopKRoutes,
    VocabParallelSupport, VocabShard,
};

/// How a CPU device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that compute, the caller included; 0 = one per physical core.
    pub threads: usize,
    /// Instruction set; tests name slower ones than the best.
    pub isa: CpuIsa,
}

impl Default for CpuConfig {
    fn default() -> Self {
        Self { threads: 0, isa: CpuIsa::detect() }
    }
}

/// The host processor as a device.
#[derive(Debug)]
pub struct CpuDevice {
    threads: ThreadPool,
    memory: Arc<CpuMemory>,
    sampler: CpuSampler,
    moe_workspace: Mutex<MoeWorkspace>,
    padded_rows: Mutex<Option<Buffer>>,
    isa: CpuIsa,
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
            sampler: CpuSampler::new(threads),
            moe_workspace: Mutex::default(),
            padded_rows: Mutex::default(),
            isa: config.isa,
        })
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> CpuIsa {
        self.isa
    }

    /// Copies of inputs whose rows would clash in cache; never contended either.
    pub(super) fn padded_rows(&self) -> &Mutex<Option<Buffer>> {
        &self.padded_rows
    }

    /// Memory of `moe_mlp`; one thread owns a device, so it is never contended.
    pub(super) fn moe_workspace(&self) -> &Mutex<MoeWorkspace> {
        &self.moe_workspace
    }

    pub(super) fn sampler(&self) -> &CpuSampler {
        &self.sampler
    }

    /// The threads, for other host work between kernels (sampling).
    #[must_use]
    pub fn threads(&self) -> &ThreadPool {
        &self.threads
    }
}

impl DeviceDriver for CpuDevice {
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
        _: &DeviceStream,
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

    fn synchronize(&self, _: &DeviceStream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        // SAFETY: this device's memory is the host's.
        Ok(unsafe { PinnedBuffer::from_host(self.memory.alloc(bytes)?) })
    }

    fn start_upload(
        &self,
        _: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_upload", 0, bytes, from.bytes().len())?;
        self.upload(to, 0, &from.bytes()[..bytes])?;
        Ok(CopyInFlight::new(from, Box::new(CompletedFence)))
    }

    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        mut to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        check_range("start_download", 0, bytes, to.bytes().len())?;
        self.download(s, from, 0, &mut to.bytes_mut()[..bytes])?;
        Ok(CopyInFlight::new(to, Box::new(CompletedFence)))
    }

    fn zero(&self, _: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError> {
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
    fn supports_dtype(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
    }

    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<PackedMatrix, DeviceError> {
        self.pack_stacked(parts, dtype)
    }

    fn linear(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: &PackedMatrix,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        self.linear_rows(y, x, w, bias)
    }

    fn embed(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: MatRef<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_table(y, ids, table, first)
    }

    fn embed_packed(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        ids: MatRef<'_>,
        table: &PackedMatrix,
        first: usize,
    ) -> Result<(), DeviceError> {
        self.embed_panels(y, ids, table, first)
    }

    fn rms_norm(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_rows(y, x, w, eps)
    }

    fn add_rms_norm(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: MatRef<'_>,
        w: MatRef<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.add_norm_rows(y, x, delta, w, eps)
    }

    fn qk_norm_rope_kv_write(
        &self,
        _: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkNormRopeArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.rope_and_store(q, kv, args)
    }

    fn paged_attention(
        &self,
        _: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &PagedAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.attend(o, kv, args)
    }

    fn has_mla(&self) -> bool {
        true
    }

    fn mla_kv_write(
        &self,
        _: &DeviceStream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &MlaKvLayout),
        args: &MlaKvWriteArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.write_mla_kv(q, kv, args)
    }

    fn mla_attention(
        &self,
        _: &DeviceStream,
        o: MatMut<'_>,
        kv: (&Buffer, &MlaKvLayout),
        args: &MlaAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        self.attend_mla(o, kv, args)
    }

    fn silu_mul(&self, _: &DeviceStream, y: MatMut<'_>, x: MatRef<'_>) -> Result<(), DeviceError> {
        self.silu_mul_rows(y, x)
    }

    fn add(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        a: MatRef<'_>,
        b: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.add_rows(y, a, b)
    }

    fn gather_rows(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        rows: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.gather(y, x, rows)
    }

    fn moe_route_softmax(
        &self,
        _: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        scores: &RouterLogits<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError> {
        Self::route(experts, weights, scores.logits, &RouterRuleArgs::softmax(scores), count)
    }

    fn moe_route(
        &self,
        _: &DeviceStream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: MatRef<'_>,
        rule: &RouterRuleArgs<'_>,
        count: Option<&mut ExpertLoadArgs<'_>>,
    ) -> Result<(), DeviceError> {
        Self::route(experts, weights, logits, rule, count)
    }

    fn eplb_map_experts(
        &self,
        _: &DeviceStream,
        experts: MatMut<'_>,
        positions: MatRef<'_>,
        tokens: Option<MatRef<'_>>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        Self::map_chosen_experts(experts, (positions, tokens), places)
    }

    fn moe_dispatch(
        &self,
        _: &DeviceStream,
        tokens: MatMut<'_>,
        places: MatMut<'_>,
        counts: MatMut<'_>,
        experts: MatRef<'_>,
        spread: &ExpertParallelLayout,
    ) -> Result<(), DeviceError> {
        Self::dispatch(tokens, places, counts, experts, spread)
    }

    fn moe_combine_ranks(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        places: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        self.combine_named_rows(y, x, places)
    }

    fn moe_mlp(
        &self,
        _: &DeviceStream,
        y: MatMut<'_>,
        x: MatRef<'_>,
        routes: &TopKRoutes<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError> {
        self.expert_mlp(y, x, routes, experts)
    }

    fn prepare_step(
        &self,
        _: &DeviceStream,
        stage: &StageView<'_>,
        seats: &mut SequenceSlotArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        Self::prepare_step(stage, seats, step, block_tokens)
    }

    fn prepare_draft_pass(
        &self,
        _: &DeviceStream,
        stage: MatRef<'_>,
        to: &mut DraftPassArrays<'_>,
        pass: &DraftPass<'_>,
    ) -> Result<(), DeviceError> {
        Self::lay_out_draft_pass(stage, to, pass)
    }

    fn gather_draft_inputs(
        &self,
        _: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        y: MatMut<'_>,
        from: (Option<MatRef<'_>>, &DraftHiddenStates<'_>),
    ) -> Result<(), DeviceError> {
        Self::gather_previous_states((step.0, step.1, rows), y, from)
    }

    fn store_draft_states(
        &self,
        _: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        states: &mut DraftHiddenStates<'_>,
        hidden: (MatRef<'_>, usize),
        tables: (MatRef<'_>, usize),
    ) -> Result<(), DeviceError> {
        Self::store_draft_state_rows(step, states, hidden, tables)
    }

    fn draft_argmax(
        &self,
        _: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        Self::argmax_drafts(drafts, place, logits)
    }

    fn draft_argmax_vocab_parallel(
        &self,
        _: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        logits: (MatRef<'_>, &VocabShard),
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError> {
        Self::argmax_drafts_vocab_parallel(drafts, place, logits, gather)
    }

    fn map_draft_ids(
        &self,
        _: &DeviceStream,
        drafts: MatMut<'_>,
        place: (usize, usize),
        names: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        Self::map_draft_token_ids(drafts, place, names)
    }

    fn insert_drafts(
        &self,
        _: &DeviceStream,
        step: (MatRef<'_>, MatRef<'_>),
        rows: usize,
        to: (MatMut<'_>, MatMut<'_>),
        drafts: MatRef<'_>,
    ) -> Result<(), DeviceError> {
        Self::insert_draft_tokens((step.0, step.1, rows), to, drafts)
    }

    fn sample_rows(
        &self,
        _: &DeviceStream,
        logits: MatRef<'_>,
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
    ) -> Result<(), DeviceError> {
        self.sample_logits_rows(logits, asked, seats, answers)
    }

    fn vocab_parallel_support(&self, _: &VocabShard) -> VocabParallelSupport {
        VocabParallelSupport::AllRules
    }

    fn sample_vocab_parallel(
        &self,
        _: &DeviceStream,
        logits: (MatRef<'_>, &VocabShard),
        asked: (&StageView<'_>, &PreparedStep<'_>),
        seats: &mut SequenceSlotArrays<'_>,
        answers: &mut SamplerOutputArrays<'_>,
        gather: &mut GatherFn<'_>,
    ) -> Result<(), DeviceError> {
        self.sample_vocab_parallel_rows(logits, asked, seats, answers, gather)
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
