//! Messages between the scheduler and one executor.

use crate::{Batch, Epoch, KvSpec, Rank, RequestId, StepId, StepOutput, Token, TokenVec};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Protocol version; both ends must have the same.
pub const PROTOCOL_VERSION: u16 = 18;

/// Messages from the scheduler to an executor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ExecutorCommand {
    /// Endpoints of all ranks that start together. Response to `ExecutorEvent::Endpoint`, after all ranks have sent theirs.
    Endpoints(Vec<RankEndpoint>),
    /// Allocates the KV cache. The number of blocks is the minimum over all ranks.
    AllocateKv {
        /// Blocks per rank.
        blocks: u32,
    },
    /// Runs a step.
    Batch(Batch),
    /// Grammar bitmasks of a step that was sent before; the bitmasks of one step may be sent in several
    /// messages.
    Bitmask(BitmaskMessage),
    /// Starts or ends a step trace. The executor responds with `ProfilerStatus`.
    Profile {
        /// Whether to record a trace.
        enabled: bool,
    },
    /// Finishes the current step and exits.
    Shutdown,
}

/// Messages from an executor to the scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ExecutorEvent {
    /// First message after the settings: identity of the executor.
    Hello(ExecutorHello),
    /// Start-up progress.
    Progress {
        /// Current phase.
        phase: StartupPhase,
        /// Number of finished units of the phase; the comment on each `StartupPhase` names its unit.
        done: u64,
        /// Total number of units of the phase.
        total: u64,
    },
    /// Endpoint of this rank, for the ranks on other hosts. The scheduler responds with `Endpoints`.
    Endpoint(RankEndpoint),
    /// The weights are loaded; their digests are computed while they are read.
    WeightsLoaded(WeightsDigest),
    /// Warm-up is complete. The scheduler responds with `AllocateKv`.
    WarmUpDone(WarmUpReport),
    /// The KV cache is allocated, and batches are accepted.
    Ready(ExecutorReady),
    /// Draft tokens of the masked rows of a batch, from which their grammar bitmasks are computed. Sent while
    /// the forward pass runs.
    Drafts(StepDrafts),
    /// Output of a batch.
    StepOutput(StepOutput),
    /// A rank that sends no `StepOutput` (TP rank above 0) finished a batch.
    StepDone {
        /// Step id.
        step: StepId,
        /// Duration of the step in nanoseconds.
        duration_ns: u64,
    },
    /// Response to `Profile`, sent after all earlier steps are recorded.
    ProfilerStatus(ProfilerStatus),
    /// The device or the executor failed; the executor exits.
    Fault {
        /// Step in which the failure occurred, if any.
        step: Option<StepId>,
        /// Description of the failure.
        text: String,
    },
    /// The executor process is alive. A heartbeat says nothing about the device.
    Heartbeat,
}

/// Address at which the ranks of other nodes reach a rank. `Debug` does not reveal the secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEndpoint {
    /// World rank.
    pub rank: Rank,
    /// Host name or IP address, and port.
    pub address: String,
    /// Secret that connecting ranks present.
    pub token: [u8; 32],
}

impl fmt::Debug for RankEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut endpoint = f.debug_struct("RankEndpoint");
        endpoint.field("rank", &self.rank).field("address", &self.address).finish_non_exhaustive()
    }
}

/// Grammar bitmasks of a step. They are computed while the forward pass runs, and the sampler waits for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitmaskMessage {
    /// Step id.
    pub step: StepId,
    /// Bitmasks of some or all masked rows of the step.
    pub rows: Vec<BitmaskRow>,
}

/// Grammar bitmasks of one row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BitmaskRow {
    /// Index of the row in its batch.
    pub row: u32,
    /// Bitmask of the first token that the row samples, then one after each draft token. The row samples at
    /// as many positions as it has bitmasks; further draft tokens are rejected. Empty = the first bitmask is
    /// overdue: the row samples nothing and reports `RowError::MaskOverdue`.
    pub bitmasks: Vec<TokenBitmask>,
}

impl BitmaskRow {
    /// Whether the first bitmask of the row is overdue.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.bitmasks.is_empty()
    }
}

/// Set of the token ids that may be sampled at one position.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenBitmask {
    /// Bit `i % 32` of word `i / 32` allows token `i`; tokens beyond the words are masked.
    #[serde(with = "crate::packed_list")]
    pub words: Vec<u32>,
}

impl TokenBitmask {
    /// Whether the bitmask allows `token`.
    #[must_use]
    pub fn allows(&self, token: Token) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }
}

impl From<Vec<u32>> for TokenBitmask {
    fn from(words: Vec<u32>) -> Self {
        Self { words }
    }
}

/// Draft tokens of the masked rows of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepDrafts {
    /// Step id.
    pub step: StepId,
    /// One entry for each masked row with `BatchRow::drafts` above 0.
    pub rows: Vec<RowDrafts>,
}

/// Draft tokens of one row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowDrafts {
    /// Request of the row.
    pub request: RequestId,
    /// Draft tokens, possibly none.
    pub tokens: TokenVec,
}

/// Status of the profiler after a `Profile` command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProfilerStatus {
    /// Recording has started; contains the path of the trace file.
    Started(String),
    /// Recording has ended; contains the path of the complete trace file, or `None` if no trace was recorded.
    Stopped(Option<String>),
    /// No trace folder is configured, or the file cannot be written; contains the error.
    Failed(String),
}

/// Identity of an executor. A mismatch with the scheduler or with other ranks aborts the start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorHello {
    /// Protocol version.
    pub version: u16,
    /// Rank in the world.
    pub rank: Rank,
    /// Epoch of the executor group: a number that increases when the executors are restarted.
    pub epoch: Epoch,
    /// Device name.
    pub device: String,
    /// Version of the executor's build.
    pub build: String,
    /// Digest of `config.json` and of the weight files: names, sizes, headers and samples of their bytes.
    pub model_digest: u64,
}

/// Digests of the weights that an executor has loaded, model and draft model together.
///
/// Each digest is a sum over tensors, so it depends neither on the order of the tensors nor on the number of
/// threads. The three digests differ in the set of ranks on which they must be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WeightsDigest {
    /// Digest of the tensors that every rank loads completely, and of samples of all tensors of the
    /// checkpoint: equal on all ranks.
    pub common: u64,
    /// Digest of the tensor-parallel slices: equal on ranks with the same TP rank.
    pub sharded: u64,
    /// Digest of the experts: different on each rank with expert parallelism, otherwise equal on the same
    /// ranks as `sharded`.
    pub experts: u64,
}

impl WeightsDigest {
    /// Returns the combined digest of a model and its draft model.
    #[must_use]
    pub fn with_draft(self, draft: Self) -> Self {
        // The rotation makes the sum depend on the order, so that an exchange of the model and the draft
        // model is detected.
        let both = |model: u64, draft: u64| model.wrapping_add(draft.rotate_left(23));
        Self {
            common: both(self.common, draft.common),
            sharded: both(self.sharded, draft.sharded),
            experts: both(self.experts, draft.experts),
        }
    }
}

/// Start-up phase of an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartupPhase {
    /// Opening the device and its libraries; the units are the steps of this phase.
    Device,
    /// Compiling kernels that are not cached; units are modules.
    Compile,
    /// Reading and packing weights; units are bytes.
    Load,
    /// Forward passes that measure memory and speed; units are passes.
    WarmUp,
    /// Capturing graphs for the configured row counts; units are graphs.
    Capture,
    /// Joining the communication groups of the ranks that share the model; the only unit is the rendezvous of
    /// these ranks.
    Join,
}

impl StartupPhase {
    /// Returns the name of the phase for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "open device",
            Self::Compile => "compile kernels",
            Self::Load => "load weights",
            Self::WarmUp => "warm up",
            Self::Capture => "capture graphs",
            Self::Join => "join the other ranks",
        }
    }
}

/// Result of the warm-up, from which the scheduler chooses the KV cache size and the initial step deadlines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmUpReport {
    /// KV layout of the model on this rank.
    pub kv_spec: KvSpec,
    /// Number of KV blocks that fit on this rank.
    pub kv_blocks: u32,
    /// Measured duration of a step, from which the first step deadlines are computed.
    pub step_cost: StepCost,
}

/// Estimated duration of a step: `fixed_ns`, plus `per_token_ns` for each of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StepCost {
    /// Nanoseconds per step.
    pub fixed_ns: u64,
    /// Nanoseconds per token.
    pub per_token_ns: u64,
}

/// Report that the executor has allocated its KV cache and accepts batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorReady {
    /// Number of allocated KV blocks.
    pub kv_blocks: u32,
    /// Row counts of captured graphs, ascending; empty = eager dispatch only.
    pub capture_sizes: Vec<u32>,
}
