//! Test scheduler: it tracks requests, allocates blocks, and builds batches in the format of the real
//! scheduler.

mod harness_request;
mod lockstep_group;
mod model_configs;
mod proposer_configs;
mod request_tables;
mod scripted_bitmasks;
mod test_scheduler;

pub(crate) use harness_request::{HarnessRequest, HarnessRequestChunk};
pub(crate) use lockstep_group::LockstepGroup;
pub(crate) use model_configs::{
    VOCAB, config, mla_model, moe_model, recurrent_model, shared, two_head_sizes_model,
    window_model, with_all_experts_placed, with_expert_placement,
};
pub(crate) use proposer_configs::{
    eagle, eagle_drafting, model_drafting, mtp_drafting, recurrent_mtp_drafting, speculating,
    with_mtp,
};
pub(crate) use request_tables::BLOCK;
pub(crate) use test_scheduler::SchedulerHarness;
