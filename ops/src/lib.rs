//! Tensors and shape-checked maths on one device; chooses kernels and fusions.
//!
//! [`Ops`] is all a layer calls; results come from an arena that hands the same memory out again in the
//! same order, so that a step allocates nothing and could be captured as a graph. Ops knows no peer
//! and no request.

#![forbid(unsafe_code)]

mod arena;
mod aside;
mod attention;
mod batch;
mod dense;
mod drafts;
mod error;
mod expert_counts;
mod fused;
mod kv_pool;
mod latent;
mod moe;
mod moe_dispatch;
mod seats;
mod step;
mod tensor;
mod weights;

pub use aside::Aside;
pub use attention::{AttentionShape, QkRopeWeights, RopeTable};
pub use batch::{BatchInputs, BatchView};
pub use dense::Ops;
pub use drafts::{DraftBuffers, DraftSize};
pub use error::OpError;
pub use expert_counts::{Counting, CountsInFlight, ExpertCounts};
pub use kernels::step::{
    ANSWER_ALL_MASKED, ANSWER_NON_FINITE, ANSWER_OK, ANSWER_STANDS, Answer, DraftRow, Judge,
    RULE_HISTORY, RULE_MASKED, SeatRules, Stage, StageEdit, StageHeader, StageInit, StageQuestion,
    StageRow,
};
pub use kernels::{
    DType, E4m3, ExpertGroups, Gather, Graph, GroupScore, HostMat, InFlight, InParts, KvLayout,
    KvOrder, LatentLayout, MappedFile, Mat, MatMut, MatrixWindow, Pinned, RouterScore, RowBounds,
    Spread, Stream, VocabPart, bf16, digest_bytes, f16,
};
pub use kv_pool::{KvPool, PoolLayout};
pub use latent::{LatentWeights, PackedLatentHeads};
pub use moe::{PackedExperts, RouteRule, Routing};
pub use moe_dispatch::Dispatch;
pub use seats::Seats;
pub use step::{AnswerMemory, Answers, AnswersInFlight, StepBuffers, StepShape, StepSize};
pub use tensor::Tensor;
pub use weights::{Embedding, PackedLinear};
