//! A model with a KV pool that tests run without a scheduler. Supports prefill, decode, batches, and KV
//! blocks that several sequences share.

use std::cell::{Cell, RefCell};
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
use std::{fs, thread};

use collectives::{DeviceGroup, ParallelGroup, SharedMemoryRendezvous};
use device::CpuConfig;
use device::gpu::{GpuConfig, GpuLibrarySelection, HalfDtype};
use kernels::KernelBackend;
use kernels::cpu::CpuBackend;
use kernels::gpu::GpuBackend;
use models::sharding::{ParallelRank, ParallelRanks};
use models::synth::{self, SynthDType, SynthOptions};
use models::{
    ExpertExchangeMethod, ForwardContext, ForwardObserver, KvGrouping, LoadFormat, LoadedModel,
    Model, ModelConfig, ModelLoadOptions, MtpModel, load_model,
};
use ops::{
    DType, DeviceBatchMetadata, ExpertRouting, HostBatchMetadata, HostGroupTables, HostStateSlots,
    KvPool, OpError, Ops, Tensor,
};
use protocol::KvKind;

use crate::fixture::GoldenFixture;

/// Number of tokens per KV block.
pub(crate) const BLOCK_TOKENS: usize = 16;
/// Number of blocks per KV group in the KV pool; the pool has one more block, which contains NaN.
const BLOCKS_PER_GROUP: usize = 256;
/// Number of state slots.
const STATE_SLOTS: usize = 64;
/// Number of positions in the RoPE tables.
pub(crate) const POSITIONS: usize = 512;
/// Maximum time for which a rank that has finished waits for the other ranks.
const RANK_WAIT: Duration = Duration::from_mins(1);

/// State of one of the ranks over which a model is distributed: its communicators, its GPU (if any), and a
/// hash of its logits.
pub(crate) struct RankContext {
    pub(crate) ranks: ParallelRanks,
    /// GPU of the rank, if ranks run on GPUs.
    gpu: Option<Arc<GpuBackend>>,
    tp: ParallelGroup,
    dp: ParallelGroup,
    exchange: ExpertExchangeMethod,
    /// Largest number of tokens that any rank has in a step; 0 if all ranks have the same tokens.
    max_tokens_of_any_rank: Cell<usize>,
    logits_hash: Cell<u64>,
}

/// How a model is distributed over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardingMode {
    /// Every layer is sharded over all ranks.
    TensorParallel,
    /// Tensor parallelism, except that experts are not sharded: each rank has some of the experts.
    ExpertParallel,
    /// Data-parallel attention: each rank has some of the experts (unsharded), a copy of all other layers,
    /// and a separate batch of tokens. All ranks receive the tokens of all ranks by all-gather, and apply
    /// their experts.
    AttentionReplicas,
    /// Data-parallel attention as `AttentionReplicas`, but tokens are sent only to the ranks of their
    /// experts, by all-to-all.
    AllToAllReplicas,
}

/// A loaded model and its KV cache.
pub(crate) struct ModelHarness<'a> {
    pub(crate) rank_context: &'a RankContext,
    pub(crate) ops: Ops,
    pub(crate) model: Box<dyn Model>,
    pub(crate) mtp: Option<Box<dyn MtpModel>>,
    kv: KvPool,
    /// Kind of each KV group.
    groups: Vec<KvKind>,
    blocks_used: usize,
    /// Number of state slots that sequences use; `None` = the model has no recurrent state.
    slots_used: Option<usize>,
}

/// Tokens `[start, start + len)` of a sequence, and the block tables of the whole sequence.
#[derive(Clone)]
pub(crate) struct SequenceRow {
    pub(crate) tokens: Vec<i32>,
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// Block table in each KV group.
    tables: Vec<Vec<usize>>,
    /// State slots of the sequence; `None` = the model has no recurrent state.
    slots: Option<SequenceStateSlots>,
}

/// State slots of a sequence.
#[derive(Clone, Copy)]
struct SequenceStateSlots {
    /// Slot that the rows of the sequence write.
    own: usize,
    /// Slot that the row at the end of a prefix hit reads.
    shared: usize,
    /// End of the prefix hit; 0 = none.
    cached: usize,
}

/// Logits and intermediate results of one forward pass.
pub(crate) struct ForwardResults {
    /// Logits of all tokens: `[tokens, vocab_size]`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Hidden states after each layer: `[layers, tokens, hidden_size]`.
    pub(crate) hidden: Vec<Vec<Vec<f32>>>,
    /// Ids of the experts to which each token is routed, in ascending order: `[MoE layers, tokens, experts
    /// per token]`.
    pub(crate) routes: Vec<Vec<Vec<i32>>>,
}

/// Logits and hidden states of an MTP module, `[tokens, vocab_size]` and `[tokens, hidden_size]`.
pub(crate) struct MtpOutputs {
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) states: Vec<Vec<f32>>,
}

impl RankContext {
    /// Context for a model that runs on a single rank, without sharding.
    pub(crate) fn single() -> Self {
        Self::new(
            ParallelRanks::SINGLE,
            None,
            [ParallelGroup::single(), ParallelGroup::single()],
            ExpertExchangeMethod::AllGather,
        )
    }

    fn new(
        ranks: ParallelRanks,
        gpu: Option<Arc<GpuBackend>>,
        [tp, dp]: [ParallelGroup; 2],
        exchange: ExpertExchangeMethod,
    ) -> Self {
        Self {
            ranks,
            gpu,
            tp,
            dp,
            exchange,
            max_tokens_of_any_rank: Cell::default(),
            logits_hash: Cell::default(),
        }
    }

    /// Kernel backend of this rank for `dtype`.
    fn device(&self, dtype: DType) -> KernelBackend {
        if let Some(gpu) = &self.gpu {
            return KernelBackend::Gpu(gpu.clone());
        }
        if let Some(gpu) = gpu(0, half_type(dtype)) {
            return KernelBackend::Gpu(gpu);
        }
        let threads = if self.is_shared() { 1 } else { 2 };
        CpuBackend::new(CpuConfig { threads, ..CpuConfig::default() }).unwrap().into()
    }

    /// Returns the positions of rank `rank` of `size` ranks in the tensor-parallel and expert-parallel
    /// groups.
    pub(crate) fn ranks(rank: usize, size: usize, sharing: ShardingMode) -> ParallelRanks {
        let part = ParallelRank { rank, size };
        match sharing {
            ShardingMode::TensorParallel => ParallelRanks { tp: part, ep: ParallelRank::SINGLE },
            ShardingMode::ExpertParallel => ParallelRanks { tp: part, ep: part },
            ShardingMode::AttentionReplicas | ShardingMode::AllToAllReplicas => {
                ParallelRanks { tp: ParallelRank::SINGLE, ep: part }
            }
        }
    }

    /// Index of this rank among the data-parallel replicas.
    pub(crate) fn replica(&self) -> usize {
        self.dp.rank()
    }

    /// Sets the largest number of tokens that any rank has, for each of the following steps.
    pub(crate) fn set_max_tokens_of_any_rank(&self, tokens: usize) {
        self.max_tokens_of_any_rank.set(tokens);
    }

    /// Whether the model is distributed over several ranks.
    pub(crate) fn is_shared(&self) -> bool {
        self.ranks != ParallelRanks::SINGLE
    }

    /// Adds logits to this rank's hash. At the end, the hashes of all ranks are compared.
    fn hash_logits(&self, logits: &[Vec<f32>]) {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.logits_hash.get());
        logits.iter().flatten().for_each(|x| hasher.write_u32(x.to_bits()));
        self.logits_hash.set(hasher.finish());
    }
}

/// Runs `work` on each of `size` ranks in parallel and checks that all ranks computed the same logits.
/// Returns the hash of the logits.
pub(crate) fn run_ranks(
    size: usize,
    sharing: ShardingMode,
    half: HalfDtype,
    work: impl Fn(&RankContext) + Sync,
) -> u64 {
    let hashes = run_ranks_each(size, sharing, half, |rank_context| {
        work(rank_context);
        rank_context.logits_hash.get()
    });
    assert!(hashes.iter().all(|&hash| hash == hashes[0] && hash != 0), "ranks differ: {hashes:x?}");
    hashes[0]
}

/// Runs `work` on each of `size` ranks in parallel and returns their results. `half`: the 16-bit type for
/// which GPU backends are opened; a GPU backend supports one 16-bit type.
pub(crate) fn run_ranks_each<T: Send>(
    size: usize,
    sharing: ShardingMode,
    half: HalfDtype,
    work: impl Fn(&RankContext) -> T + Sync,
) -> Vec<T> {
    let rendezvous = SharedMemoryRendezvous::create(&[size]).unwrap();
    let ranks_running = AtomicUsize::new(size);
    let run = |rank| {
        let rank_context =
            join(&rendezvous, RankContext::ranks(rank, size, sharing), sharing, half);
        let _last = RankExitBarrier(&ranks_running);
        work(&rank_context)
    };
    let run = &run;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Joins the rendezvous of all ranks and returns the context of one rank.
fn join(
    rendezvous: &SharedMemoryRendezvous,
    ranks: ParallelRanks,
    sharing: ShardingMode,
    half: HalfDtype,
) -> RankContext {
    let rank = ranks.tp.rank.max(ranks.ep.rank);
    let gpu = gpu(rank, half);
    let shared = rendezvous.join(0, rank).unwrap();
    let uses_all_reduce =
        matches!(sharing, ShardingMode::TensorParallel | ShardingMode::ExpertParallel);
    let group = ParallelGroup::new(match &gpu {
        None => Box::new(shared),
        Some(gpu) if uses_all_reduce => Box::new(DeviceGroup::join(shared, gpu).unwrap()),
        Some(gpu) => {
            Box::new(DeviceGroup::join_with_custom_all_reduce_limit(shared, gpu, 0).unwrap())
        }
    });
    let groups = if uses_all_reduce {
        [group, ParallelGroup::single()]
    } else {
        [ParallelGroup::single(), group]
    };
    let exchange = match sharing {
        ShardingMode::AllToAllReplicas => ExpertExchangeMethod::AllToAll,
        ShardingMode::TensorParallel
        | ShardingMode::ExpertParallel
        | ShardingMode::AttentionReplicas => ExpertExchangeMethod::AllGather,
    };
    RankContext::new(ranks, gpu, groups, exchange)
}

/// On drop, makes a rank that has finished wait until all ranks have finished. Without this wait, the other
/// ranks would report the rank as failed.
struct RankExitBarrier<'a>(&'a AtomicUsize);

impl Drop for RankExitBarrier<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
        let since = Instant::now();
        while self.0.load(SeqCst) > 0 && !thread::panicking() && since.elapsed() < RANK_WAIT {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl<'a> ModelHarness<'a> {
    /// Writes the checkpoint of the fixture, with the weights split into several files, and loads it.
    pub(crate) fn load(
        rank_context: &'a RankContext,
        fixture: &GoldenFixture,
        dtype: DType,
    ) -> Self {
        Self::load_with(rank_context, fixture, dtype, false)
    }

    /// Writes and loads the checkpoint of the fixture. The MTP module is included if `drafting`.
    pub(crate) fn load_with(
        rank_context: &'a RankContext,
        fixture: &GoldenFixture,
        dtype: DType,
        drafting: bool,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source.json");
        fs::write(&source, &fixture.config).unwrap();
        let stored = match dtype {
            DType::F32 => SynthDType::F32,
            DType::F16 => SynthDType::F16,
            _ => SynthDType::BF16,
        };
        let options = SynthOptions { seed: fixture.seed, dtype: stored, shard_bytes: 200_000 };
        let out = dir.path().join("model");
        synth::write(&source, &out, &options, &mut |_, _| ()).unwrap();
        let config = ModelConfig { load_mtp: drafting, ..ModelConfig::from_dir(&out).unwrap() };
        Self::new(rank_context, &out, &config, [dtype; 2], LoadFormat::Safetensors)
    }

    /// Loads the fixture's model with weights that are synthesised in memory.
    pub(crate) fn synth(
        rank_context: &'a RankContext,
        fixture: &GoldenFixture,
        dtype: DType,
    ) -> Self {
        Self::of(rank_context, &fixture.config, fixture.seed, dtype)
    }

    /// Loads a model with the configuration `config`, with weights that are synthesised in memory.
    pub(crate) fn of(rank_context: &'a RankContext, config: &str, seed: u64, dtype: DType) -> Self {
        let path = Path::new("config.json");
        let config = ModelConfig::from_json(path, config).unwrap();
        Self::new(rank_context, path, &config, [dtype; 2], LoadFormat::Synth { seed })
    }

    /// Loads the fixture's model with weights that are synthesised in memory, and with a KV cache in fp8.
    pub(crate) fn with_fp8_cache(
        rank_context: &'a RankContext,
        fixture: &GoldenFixture,
        dtype: DType,
    ) -> Self {
        let path = Path::new("config.json");
        let config = ModelConfig::from_json(path, &fixture.config).unwrap();
        let format = LoadFormat::Synth { seed: fixture.seed };
        Self::new(rank_context, path, &config, [dtype, DType::F8E4M3], format)
    }

    /// Loads the model in the folder `dir` with the given dtypes of activations and of the KV cache.
    pub(crate) fn from_folder(
        rank_context: &'a RankContext,
        dir: &Path,
        dtypes: [DType; 2],
    ) -> Self {
        let config = ModelConfig::from_dir(dir).unwrap();
        Self::new(rank_context, dir, &config, dtypes, LoadFormat::Safetensors)
    }

    /// Loads a model with the given dtypes of activations and of the KV cache.
    fn new(
        rank_context: &'a RankContext,
        dir: &Path,
        config: &ModelConfig,
        [dtype, kv_dtype]: [DType; 2],
        format: LoadFormat,
    ) -> Self {
        let ops = Ops::new(rank_context.device(dtype), dtype).unwrap();
        let progress = RefCell::new((0, 0));
        let mut on_progress = |done, total| *progress.borrow_mut() = (done, total);
        let kv_grouping = KvGrouping::new(config, POSITIONS, config.load_mtp, &rank_context.ranks);
        let options = ModelLoadOptions {
            ops: &ops,
            ranks: rank_context.ranks,
            placement: None,
            format,
            kv_dtype,
            kv_grouping: &kv_grouping,
            max_positions: POSITIONS,
            threads: 2,
            progress: &mut on_progress,
            digest: &mut protocol::WeightsDigest::default(),
        };
        let LoadedModel { model, mtp, .. } = load_model(dir, config, options).unwrap();
        let (done, total) = progress.into_inner();
        assert!(done == total && total > 0, "{done} of {total} bytes loaded");
        let order = ops.device().kv_order();
        let (ranks, groups) = (&rank_context.ranks, kv_grouping.kinds().to_vec());
        let blocks = groups.len() * BLOCKS_PER_GROUP + 1;
        let (grouping, block_tokens) = (&kv_grouping, BLOCK_TOKENS);
        let layout =
            models::kv_layout(config, grouping, kv_dtype, blocks, block_tokens, order, ranks)
                .unwrap();
        let spec = models::kv_spec(config, grouping, kv_dtype, block_tokens as u32, ranks).unwrap();
        let bytes = layout.bytes_per_block() + config.boundary_state_channels() * kv_dtype.bytes();
        assert_eq!(spec.bytes_per_block(), bytes as u64);
        let states = models::state_layout(config, grouping, STATE_SLOTS, ranks).unwrap();
        let kv = KvPool::new(&ops, layout).unwrap().with_states(&ops, states).unwrap();
        if groups.iter().any(|kind| kind.window().is_some()) {
            kv.poison_block(&ops, blocks - 1).unwrap();
        }
        let slots_used = states.map(|_| 0);
        Self { rank_context, ops, model, mtp, kv, groups, blocks_used: 0, slots_used }
    }

    /// Number of blocks in the KV pool.
    pub(crate) fn blocks(&self) -> usize {
        self.kv.layout().blocks()
    }

    /// Runs a batch; returns the logits of every token of every row, in the order of rows and tokens.
    pub(crate) fn run(&mut self, rows: &[&SequenceRow]) -> Vec<Vec<f32>> {
        self.forward(rows, None, None)
    }

    /// Runs a batch; returns the logits of the tokens at the batch positions `indices`, in the order of
    /// `indices`.
    pub(crate) fn run_rows(&mut self, rows: &[&SequenceRow], indices: &[i32]) -> Vec<Vec<f32>> {
        self.forward(rows, Some(indices), None)
    }

    /// Runs one row; returns its logits, the hidden states after each layer, and the selected experts.
    pub(crate) fn run_traced(&mut self, row: &SequenceRow) -> ForwardResults {
        let probe = ForwardRecorder::default();
        let logits = self.forward(&[row], None, Some(&probe));
        ForwardResults {
            logits,
            hidden: probe.hidden.into_inner(),
            routes: probe.routes.into_inner(),
        }
    }

    fn forward(
        &self,
        rows: &[&SequenceRow],
        indices: Option<&[i32]>,
        probe: Option<&dyn ForwardObserver>,
    ) -> Vec<Vec<f32>> {
        let indices = indices.map(|tokens| self.ops.ids(tokens).unwrap());
        self.with(rows, |f, ids| {
            let f = ForwardContext { logits_indices: indices.as_ref(), probe, ..*f };
            let hidden = self.model.forward(&f, ids).unwrap();
            self.model.logits(&f, &hidden).unwrap()
        })
    }

    /// Calls `run` with the inputs of a forward pass over `rows`: its context and the token ids. Returns the
    /// rows of the tensor that `run` returns.
    pub(crate) fn with(
        &self,
        rows: &[&SequenceRow],
        run: impl FnOnce(&ForwardContext<'_>, &Tensor) -> Tensor,
    ) -> Vec<Vec<f32>> {
        self.with_pool(&self.kv, rows, run)
    }

    /// As `with`, but with the KV pool `kv` instead of the pool of the harness; both pools have equal size.
    pub(crate) fn with_pool(
        &self,
        kv: &KvPool,
        rows: &[&SequenceRow],
        run: impl FnOnce(&ForwardContext<'_>, &Tensor) -> Tensor,
    ) -> Vec<Vec<f32>> {
        let (ids, inputs) = self.inputs(rows);
        let batch = DeviceBatchMetadata::new(&self.ops, &inputs).unwrap();
        let RankContext { tp, dp, exchange, .. } = self.rank_context;
        let dp_rows = batch.tokens().max(self.rank_context.max_tokens_of_any_rank.get());
        let (ops, exchange, batch) = (&self.ops, *exchange, &batch);
        let f = ForwardContext {
            ops,
            tp,
            dp,
            dp_rows,
            expert_exchange: exchange,
            kv,
            batch,
            logits_indices: None,
            aux_hidden_states: None,
            expert_load: None,
            output_memory: None,
            probe: None,
        };
        let output = run(&f, &self.ops.ids(&ids).unwrap());
        let output = matrix(&self.ops, &output).unwrap();
        self.rank_context.hash_logits(&output);
        output
    }

    /// Runs one row; returns the hidden states that the last layer outputs for its tokens.
    pub(crate) fn hidden(&self, row: &SequenceRow) -> Vec<Vec<f32>> {
        self.with(&[row], |f, ids| self.model.forward(f, ids).unwrap())
    }

    /// Runs the MTP module on a row; returns its logits for each token. `before`: for each token, the model's
    /// hidden state of the previous token.
    pub(crate) fn mtp_logits(&self, row: &SequenceRow, before: &[Vec<f32>]) -> Vec<Vec<f32>> {
        self.mtp_outputs(row, before).logits
    }

    /// As `mtp_logits`, but also returns the module's hidden states, from which the next draft token is computed.
    pub(crate) fn mtp_outputs(&self, row: &SequenceRow, before: &[Vec<f32>]) -> MtpOutputs {
        let mut states = Vec::new();
        let logits = self.with(&[row], |f, ids| {
            let hidden = self.mtp.as_ref().unwrap().forward(f, ids, &self.tensor(before)).unwrap();
            states = matrix(&self.ops, &hidden).unwrap();
            self.model.logits(f, &hidden).unwrap()
        });
        MtpOutputs { logits, states }
    }

    /// As `mtp_logits`, but also returns the experts that the MTP module selects, in ascending order:
    /// `[tokens, experts per token]`.
    pub(crate) fn traced_mtp_logits(
        &self,
        row: &SequenceRow,
        before: &[Vec<f32>],
    ) -> (Vec<Vec<f32>>, Vec<Vec<i32>>) {
        let probe = ForwardRecorder::default();
        let logits = self.with(&[row], |f, ids| {
            let f = ForwardContext { probe: Some(&probe), ..*f };
            let hidden = self.mtp.as_ref().unwrap().forward(&f, ids, &self.tensor(before)).unwrap();
            self.model.logits(&f, &hidden).unwrap()
        });
        (logits, probe.routes.into_inner().concat())
    }

    /// Writes the KV entries of the MTP module for a row's tokens, without computing logits.
    pub(crate) fn write_draft_kv(&self, row: &SequenceRow, before: &[Vec<f32>]) {
        self.with(&[row], |f, ids| {
            let before = self.tensor(before);
            self.mtp.as_ref().unwrap().write_kv_only(f, ids, &before).unwrap();
            before
        });
    }

    /// Converts hidden states (one vector per row) to a tensor `[rows, hidden_size]`.
    pub(crate) fn tensor(&self, rows: &[Vec<f32>]) -> Tensor {
        let shape = [rows.len(), rows[0].len()];
        self.ops.floats(&rows.concat(), self.ops.dtype(), &shape).unwrap()
    }

    /// Returns the ids of `count` unused KV blocks, which are not consecutive, so that block tables are not
    /// either.
    fn take_blocks(&mut self, count: usize) -> Vec<usize> {
        let first = self.blocks_used;
        self.blocks_used += count;
        let limit = self.blocks() - 1;
        assert!(self.blocks_used <= limit);
        (first..first + count).map(|i| i * 89 % limit).collect()
    }

    /// Returns the state slots of a new sequence; `None` if the model has no recurrent state.
    fn take_slots(&mut self) -> Option<SequenceStateSlots> {
        let used = self.slots_used.as_mut()?;
        *used += 1;
        assert!(*used <= STATE_SLOTS);
        let own = (*used - 1) * 37 % STATE_SLOTS;
        Some(SequenceStateSlots { own, shared: own, cached: 0 })
    }

    /// Restores the recurrent state of the sequence of `row` before position `start`, for a row that repeats earlier
    /// positions.
    pub(crate) fn rewind(&mut self, row: &SequenceRow, start: usize) {
        if row.slots.is_some() {
            self.run(&[&row.part(0, start)]);
        }
    }

    /// Returns the token ids and the metadata of a batch of rows.
    fn inputs(&self, rows: &[&SequenceRow]) -> (Vec<i32>, HostBatchMetadata) {
        let (mut ids, mut inputs) =
            (Vec::new(), HostBatchMetadata { cu_q: vec![0], ..Default::default() });
        for row in rows {
            let end = row.start + row.len;
            ids.extend(&row.tokens[row.start..end]);
            inputs.positions.extend((row.start..end).map(|position| position as i32));
            inputs.cu_q.push(ids.len() as i32);
            inputs.context_lens.push(end as i32);
            inputs.state_slots.extend(row.state_slots());
        }
        let mut tables = (0..self.groups.len()).map(|group| self.group_tables(rows, group));
        let first_group = tables.next().unwrap();
        inputs.further_groups = tables.collect();
        (inputs.slots, inputs.block_tables) = (first_group.slots, first_group.block_tables);
        (ids, inputs)
    }

    /// Returns the KV slots and block tables of a batch of rows in KV group `group`. Blocks of which no key is
    /// in the window of the first token of a row are replaced by the block that contains NaN.
    fn group_tables(&self, rows: &[&SequenceRow], group: usize) -> HostGroupTables {
        let width = rows.iter().map(|row| row.tables[group].len()).max().unwrap_or(0);
        let poisoned = self.blocks() - 1;
        let step = self.kv.layout().block_id_step(group);
        let mut tables = HostGroupTables::default();
        for row in rows {
            let table = &row.tables[group];
            tables.slots.extend((row.start..row.start + row.len).map(|position| {
                (table[position / BLOCK_TOKENS] * step * BLOCK_TOKENS + position % BLOCK_TOKENS)
                    as i64
            }));
            let first_read = self.groups[group].first_read(row.start as u32) as usize;
            let behind = first_read / BLOCK_TOKENS;
            let entry = |(i, &block): (usize, &usize)| if i < behind { poisoned } else { block };
            let entries = table.iter().enumerate().map(entry).map(|block| (block * step) as i32);
            tables.block_tables.extend(entries.chain(std::iter::repeat(-1)).take(width));
        }
        tables
    }
}

/// Whether the fixtures run on a GPU (`HADRON_GPU` is set) instead of the CPU.
#[expect(clippy::disallowed_methods, reason = "an environment variable selects the GPU")]
pub(crate) fn on_a_gpu() -> bool {
    std::env::var_os("HADRON_GPU").is_some()
}

/// Whether `ranks` ranks can run: on the CPU always, because ranks are threads; on GPUs up to
/// `HADRON_GPU_RANKS` ranks.
#[expect(clippy::disallowed_methods, reason = "an environment variable selects the GPU")]
pub(crate) fn has_ranks(ranks: usize) -> bool {
    let gpus = || std::env::var("HADRON_GPU_RANKS").map_or(1, |gpus| gpus.parse().unwrap());
    !on_a_gpu() || ranks <= gpus()
}

/// The 16-bit type with which a GPU backend is opened for a model of this dtype.
fn half_type(dtype: DType) -> HalfDtype {
    if dtype == DType::F16 { HalfDtype::F16 } else { HalfDtype::BF16 }
}

/// Opens the GPU of a rank, with the libraries that `HADRON_GPU` selects (`cuda` or `rocm`). Returns `None`
/// if the variable is unset: the fixtures then run on the CPU.
#[expect(clippy::disallowed_methods, reason = "an environment variable selects the GPU")]
fn gpu(rank: usize, half: HalfDtype) -> Option<Arc<GpuBackend>> {
    let libraries = match std::env::var("HADRON_GPU").as_deref() {
        Ok("cuda") => GpuLibrarySelection::Cuda,
        Ok("rocm") => GpuLibrarySelection::Rocm,
        Ok(other) => panic!("HADRON_GPU={other} is not cuda or rocm"),
        Err(_) => return None,
    };
    let cache_dir = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"));
    let config =
        GpuConfig { libraries, half_dtype: half, device: rank, cache_dir, ..GpuConfig::default() };
    Some(Arc::new(GpuBackend::open(&config).unwrap()))
}

impl SequenceRow {
    /// A row with all tokens of a sequence. It has newly allocated KV blocks, with room for 64 more tokens,
    /// which decode needs.
    pub(crate) fn new(harness: &mut ModelHarness<'_>, tokens: &[i32]) -> Self {
        let blocks = (tokens.len() + 64).div_ceil(BLOCK_TOKENS);
        let tables = (0..harness.groups.len()).map(|_| harness.take_blocks(blocks)).collect();
        let slots = harness.take_slots();
        Self { tokens: tokens.to_vec(), start: 0, len: tokens.len(), tables, slots }
    }

    /// A row with the tokens of `other` whose first `cached` tokens are a prefix hit: they are in the KV
    /// blocks of `other`. The other tokens are in newly allocated blocks.
    pub(crate) fn sharing(harness: &mut ModelHarness<'_>, other: &Self, cached: usize) -> Self {
        let mut row = Self::new(harness, &other.tokens);
        let shared = cached / BLOCK_TOKENS;
        for (table, other) in row.tables.iter_mut().zip(&other.tables) {
            table[..shared].copy_from_slice(&other[..shared]);
        }
        if let Some(slots) = &mut row.slots {
            // The checkpoint at the end of the hit is the state of a sequence that ends there.
            let prefix = Self::new(harness, &other.tokens[..cached]);
            harness.run(&[&prefix]);
            slots.shared = prefix.slots.map_or(0, |slots| slots.own);
            slots.cached = cached;
        }
        row
    }

    /// State slots that this row reads and writes.
    fn state_slots(&self) -> Option<HostStateSlots> {
        let SequenceStateSlots { own, shared, cached } = self.slots?;
        let read = match self.start {
            0 => None,
            start if start == cached => Some(shared),
            _ => Some(own),
        };
        Some(HostStateSlots { read: read.map(|slot| slot as u32), write: own as u32 })
    }

    /// Returns the part of this row's sequence with the tokens `[start, start + len)`, as a row.
    pub(crate) fn part(&self, start: usize, len: usize) -> Self {
        Self { start, len, ..self.clone() }
    }
}

/// Probe that a forward pass calls with its intermediate results, which it records.
#[derive(Default)]
struct ForwardRecorder {
    hidden: RefCell<Vec<Vec<Vec<f32>>>>,
    routes: RefCell<Vec<Vec<Vec<i32>>>>,
}

impl ForwardObserver for ForwardRecorder {
    fn hidden(&self, ops: &Ops, layer: usize, x: &Tensor) -> Result<(), OpError> {
        assert_eq!(layer, self.hidden.borrow().len());
        self.hidden.borrow_mut().push(matrix(ops, x)?);
        Ok(())
    }

    fn routes(&self, ops: &Ops, _layer: usize, routing: &ExpertRouting) -> Result<(), OpError> {
        let chosen = ops.read_f32(&routing.experts)?;
        let rows = chosen.chunks(routing.experts.cols()).map(|row| {
            let mut experts: Vec<i32> = row.iter().map(|e| *e as i32).collect();
            experts.sort_unstable();
            experts
        });
        self.routes.borrow_mut().push(rows.collect());
        Ok(())
    }
}

/// Copies a tensor to the host as f32; returns one vector per row.
pub(crate) fn matrix(ops: &Ops, x: &Tensor) -> Result<Vec<Vec<f32>>, OpError> {
    Ok(ops.read_f32(x)?.chunks(x.cols()).map(<[f32]>::to_vec).collect())
}

/// Runs a row in chunks of `size` tokens; returns the logits of all its tokens.
pub(crate) fn chunks(
    harness: &mut ModelHarness<'_>,
    row: &SequenceRow,
    size: usize,
) -> Vec<Vec<f32>> {
    let starts = (row.start..row.start + row.len).step_by(size);
    let part = |start| row.part(start, size.min(row.start + row.len - start));
    starts.flat_map(|start| harness.run(&[&part(start)])).collect()
}

/// Runs a row in chunks of `size` tokens; returns the logits of all its tokens and the selected experts. The
/// hidden states in the result are empty.
pub(crate) fn traced_chunks(
    harness: &mut ModelHarness<'_>,
    row: &SequenceRow,
    size: usize,
) -> ForwardResults {
    let mut all = ForwardResults { logits: Vec::new(), hidden: Vec::new(), routes: Vec::new() };
    for start in (row.start..row.start + row.len).step_by(size) {
        let trace = harness.run_traced(&row.part(start, size.min(row.start + row.len - start)));
        all.logits.extend(trace.logits);
        all.routes.resize_with(trace.routes.len(), Vec::new);
        for (all, routes) in all.routes.iter_mut().zip(trace.routes) {
            all.extend(routes);
        }
    }
    all
}

/// Returns the token id with the largest logit; among equal logits, the lowest id.
pub(crate) fn top(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Returns the largest absolute difference between elements of two matrices; NaN if a difference is NaN.
pub(crate) fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).fold(0f32, |worst, (x, y)| {
        let d = (x - y).abs();
        if d > worst || d.is_nan() { d } else { worst }
    })
}

/// Errors of a model's log-probabilities relative to those of a reference.
#[derive(Debug)]
#[allow(dead_code, reason = "printed by Debug")]
pub(crate) struct LogprobErrors {
    /// Mean absolute difference over the 64 token ids that are most likely in the reference, at all
    /// positions.
    pub(crate) mean: f32,
    /// 99th percentile of the absolute differences over which `mean` is computed.
    pub(crate) p99: f32,
    /// Maximum over all positions of `max(y) - y[argmax(x)]`, with the log-probabilities `y` of the reference
    /// and `x` of the tested model: how much less likely the model's choice is than the reference's choice.
    pub(crate) regret: f32,
    /// Largest of the absolute differences over which `mean` is computed. It grows with the number of
    /// differences.
    pub(crate) worst: f32,
}

/// Compares the log-probabilities of `ours` and `reference` for the 64 token ids that are most likely in the
/// reference, at each position.
pub(crate) fn closeness(ours: &[Vec<f32>], reference: &[Vec<f32>]) -> LogprobErrors {
    const TOP_K: usize = 64;
    let (mut differences, mut regret) = (Vec::new(), 0f32);
    for (ours, reference) in ours.iter().zip(reference) {
        let (x, y) = (log_softmax(ours), log_softmax(reference));
        let mut ids: Vec<usize> = (0..y.len()).collect();
        ids.sort_by(|a, b| y[*b].total_cmp(&y[*a]));
        differences.extend(ids[..TOP_K].iter().map(|i| (x[*i] - y[*i]).abs()));
        regret = regret.max(y[ids[0]] - y[top(ours)]);
    }
    differences.sort_by(f32::total_cmp);
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    let p99 = differences[differences.len() * 99 / 100];
    LogprobErrors { mean, p99, regret, worst: differences[differences.len() - 1] }
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f32 = logits.iter().map(|x| (x - largest).exp()).sum();
    logits.iter().map(|x| x - largest - sum.ln()).collect()
}
