//! What crosses a process boundary: ids, batches, step outputs, KV layout and KV events.
//!
//! Plain data only. A type belongs here if it is serialised between the scheduler and an executor,
//! or between the scheduler and a KV-event subscriber; it knows no policy and no device.

#![forbid(unsafe_code)]

mod batch;
pub mod codec;
mod executor;
pub mod frame;
mod ids;
mod kv_event;
mod kv_spec;
pub mod link;
mod node;
mod output;
mod packed;
mod sampling;
mod settings;
mod tokens;

pub use batch::{Batch, BlockIds, Bucket, Input, Row, SeatInit, TableUpdate};
pub use executor::{
    FromExecutor, Hello, Mask, MaskRow, Memory, PROTOCOL_VERSION, Pace, Phase, Profiled, Ready,
    ToExecutor, WeightsDigest,
};
pub use ids::{BlockId, Epoch, Rank, Replica, RequestId, Seat, StepId, Token};
pub use kv_event::{BlockHash, ExtraKey, KvEvent};
pub use kv_spec::{KvGroup, KvKind, KvSpec};
pub use node::{FromNode, Handshake, HostSettings, LinkOffer, Member, Nonce, Proof, ToNode};
pub use output::{
    CollectiveTiming, ExpertTokens, RowError, RowOutput, StepOutput, StepTiming, TokenLogprobs,
};
pub use sampling::Sampling;
pub use settings::{
    Acceptance, Capture, Device, DeviceLibraries, Drafter, Dtype, ExpertPlacement, KvDtype, KvSize,
    Parallel, Settings, Speculation,
};
pub use thin_vec::ThinVec;
pub use tokens::{Tokens, TokensIter};
