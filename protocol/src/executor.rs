//! Messages between the scheduler and one executor.

use crate::{Batch, Epoch, KvSpec, Rank, StepId, StepOutput};
use serde::{Deserialize, Serialize};

/// Version of the messages; both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 13;

/// Scheduler to executor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ExecutorCommand {
    /// Allocate this many KV blocks: the smallest number that every rank can hold.
    AllocateKv {
        /// Blocks per rank.
        blocks: u32,
    },
    /// Run a step.
    Batch(Batch),
    /// Masks of a step that was sent before; those of one step may come in several messages.
    Bitmask(GrammarBitmask),
    /// Record steps from now on in a new trace, or no more; answered by `ProfilerStatus`.
    Profile {
        /// Whether to record.
        enabled: bool,
    },
    /// Finish the current step and exit.
    Shutdown,
}

/// Executor to scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ExecutorEvent {
    /// First message, once the settings have come: who this is and what it serves.
    Hello(ExecutorHello),
    /// Start-up goes on.
    Progress {
        /// What is being done.
        phase: StartupPhase,
        /// Units finished.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// The weights are loaded: the digests of their bytes, made while they were read.
    WeightsLoaded(WeightsDigest),
    /// Warm-up is over; answered by `AllocateKv`.
    WarmUpDone(WarmUpReport),
    /// KV is allocated; batches are welcome.
    Ready(ExecutorReady),
    /// Answer to a batch.
    StepOutput(StepOutput),
    /// Answer to a batch of a rank whose tokens another one reports.
    StepDone {
        /// The step.
        step: StepId,
        /// How long it took, in nanoseconds.
        duration_ns: u64,
    },
    /// Answer to `Profile`, once all steps that came before are recorded.
    ProfilerStatus(ProfilerStatus),
    /// The device or the executor failed; it exits.
    Fault {
        /// The step it happened in, if any.
        step: Option<StepId>,
        /// What happened.
        text: String,
    },
    /// The process is alive, whatever its device does.
    Heartbeat,
}

/// What rows of a step may sample: the forward pass runs meanwhile, the sampler waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrammarBitmask {
    /// The step.
    pub step: StepId,
    /// Some of its masked rows, or all.
    pub rows: Vec<BitmaskRow>,
}

/// What one row may sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitmaskRow {
    /// Index of the row in its batch.
    pub row: u32,
    /// Bit `i % 32` of word `i / 32` allows id `i`; ids beyond the words are masked.
    #[serde(with = "crate::packed_list")]
    pub bitmask: Vec<u32>,
    /// The step is to go on without it: the row samples nothing and answers `RowError::MaskOverdue`.
    pub overdue: bool,
}

/// What became of an order to record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfilerStatus {
    /// Steps are recorded in this file.
    Started(String),
    /// This file is complete; `None` = nothing was being recorded.
    Stopped(Option<String>),
    /// No folder is configured, or the file cannot be written.
    Failed(String),
}

/// Identity of an executor; a mismatch refuses to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorHello {
    /// Protocol version.
    pub version: u16,
    /// Rank in the world.
    pub rank: Rank,
    /// Group generation.
    pub epoch: Epoch,
    /// Device, in words.
    pub device: String,
    /// Release of the build.
    pub build: String,
    /// Digest of `config.json` and of the weight files: their names, sizes, headers and samples of their bytes.
    pub model_digest: u64,
}

/// Digests of the weights that an executor has loaded, model and draft model together.
///
/// Each is a sum over tensors and depends neither on their order nor on threads. The three differ in which ranks must
/// agree on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WeightsDigest {
    /// Of the tensors that every rank loads whole, and of samples of all tensors of the checkpoint: equal on all ranks.
    pub common: u64,
    /// Of the tensor-parallel slices: equal on ranks in the same place of their replicas.
    pub sharded: u64,
    /// Of the experts: with expert parallelism each rank has its own, otherwise as `sharded`.
    pub experts: u64,
}

impl WeightsDigest {
    /// The digest of a model together with that of its draft model.
    #[must_use]
    pub fn with_draft(self, draft: Self) -> Self {
        // Rotated, so that a model and its draft model that change places are noticed.
        let both = |model: u64, draft: u64| model.wrapping_add(draft.rotate_left(23));
        Self {
            common: both(self.common, draft.common),
            sharded: both(self.sharded, draft.sharded),
            experts: both(self.experts, draft.experts),
        }
    }
}

/// A part of the executor's start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartupPhase {
    /// Opening the device and its libraries; units are steps of it.
    Device,
    /// Compiling kernels that no cache holds; units are modules.
    Compile,
    /// Reading and packing weights; units are bytes.
    Load,
    /// Forward passes that measure memory and speed; units are passes.
    WarmUp,
    /// Recording steps of the row counts to come; units are recordings.
    Capture,
    /// Taking a place in the groups of ranks that share the model; units are meetings.
    Join,
}

impl StartupPhase {
    /// The phase in words, for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "open device",
            Self::Compile => "compile kernels",
            Self::Load => "load weights",
            Self::WarmUp => "warm up",
            Self::Capture => "capture steps",
            Self::Join => "join the other ranks",
        }
    }
}

/// Measured after the warm-up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmUpReport {
    /// KV layout of the model on this rank.
    pub kv_spec: KvSpec,
    /// Blocks this rank can hold.
    pub kv_blocks: u32,
    /// How long steps take, measured in the warm-up; seeds step deadlines.
    pub step_cost: StepCost,
}

/// How long a step takes: `fixed_ns` and `per_token_ns` for each of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepCost {
    /// Nanoseconds of every step.
    pub fixed_ns: u64,
    /// Nanoseconds of each token.
    pub per_token_ns: u64,
}

/// The executor accepts batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorReady {
    /// Blocks allocated.
    pub kv_blocks: u32,
    /// Row counts for which graphs are captured, ascending; empty = eager only.
    pub capture_sizes: Vec<u32>,
}
