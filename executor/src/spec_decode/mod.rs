//! Speculative decoding. Draft tokens are proposed by n-gram lookup on the host, or on the device by an MTP
//! module, a draft model or an EAGLE-3 layer. The forward pass of the target model verifies them.
//!
//! A [`Proposer`] is called at two points of a step. Before the rows are staged, the proposer returns draft
//! tokens or the information that the device proposes them; after the step, the proposer reads the emitted
//! tokens. The passes on the device are in [`draft_passes`]. The sampler verifies draft tokens
//! ([`verification`]).

mod device_proposer;
mod draft_passes;
mod draft_states;
mod ngram;
mod ngram_matcher;
mod validation;

use crate::BatchError;
use crate::step::StepLimits;
use ops::{DraftBufferLimits, DraftVerification, KvPoolLayout, StagingBuffer};
use protocol::{BatchRow, DraftAcceptanceRule, SpeculativeConfig, SpeculativeMethod, Token};

pub(crate) use device_proposer::DeviceProposer;
pub(crate) use draft_passes::ProposerModel;
use draft_states::DraftHiddenStateTracker;
pub(crate) use draft_states::DraftRowCounts;
pub(crate) use ngram::{EmittedTokenSender, NgramProposer};
pub use validation::{MODEL_DRAFTS_MAX, MTP_DRAFTS_MAX, SpeculationError, check_speculation};

/// Device state of a proposer and the models, for tests.
#[cfg(test)]
pub(crate) struct ProposerTestState<'a> {
    /// KV pool of the proposer.
    pub(crate) kv: &'a ops::KvPool,
    /// Device buffers of the proposer.
    pub(crate) draft_buffers: &'a ops::DraftBuffers,
    /// Target model and proposer.
    pub(crate) context: &'a crate::model_context::ModelContext,
}

/// Host part of a proposer of draft tokens. Implementations: n-gram lookup, and proposers that run on the
/// device.
pub(crate) trait Proposer: Send {
    /// Proposes draft tokens for a row. Called after the row's sequence slot was updated.
    fn propose(&mut self, row: &BatchRow) -> DraftProposal<'_>;

    /// Updates the proposer from the rows of a batch (tokens of earlier steps, block table updates). Called
    /// after the sequence slots of the rows were updated.
    fn observe(&mut self, rows: &[BatchRow]);

    /// Returns a sender with which the step of these rows reports its emitted tokens; `None` = the proposer
    /// does not read emitted tokens.
    fn observe_outputs(&mut self, rows: &[BatchRow]) -> Option<EmittedTokenSender> {
        let _ = rows;
        None
    }

    /// Writes the inputs that the device needs to propose draft tokens for a row to the staging buffer.
    ///
    /// Errors: the hidden state of the token before the row is not on the device.
    fn stage(
        &mut self,
        row: &BatchRow,
        staged_row: StagedRowDrafts,
        staging: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        let _ = (row, staged_row, staging);
        Ok(())
    }
}

/// Result of a proposer for one row: the draft tokens, or the information that the device will propose them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DraftProposal<'a> {
    /// Draft tokens that were proposed on the host, possibly none.
    Tokens(&'a [Token]),
    /// The device proposes the maximum number of draft tokens of the row (`BatchRow::drafts`).
    OnDevice,
}

/// Position of a row's draft tokens in the step: the index of the row's first token in the step, and the
/// number of draft tokens that the device proposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StagedRowDrafts {
    /// Index of the row's first token in the step.
    pub(crate) token: usize,
    /// Number of draft tokens that the device proposes for the row.
    pub(crate) device_drafts: u8,
}

/// The configured proposer and the size of its device buffers.
pub(crate) struct ConfiguredProposer {
    pub(crate) proposer: Option<Box<dyn Proposer>>,
    /// Sizes of the proposer's device buffers; `None` = the proposer runs on the host.
    pub(crate) buffers: Option<DraftBufferLimits>,
}

impl ConfiguredProposer {
    /// Creates the configured proposer for steps within `limits`, with the block ids of the KV pool `kv`. At most
    /// `logits_rows` rows of logits are computed at a time.
    pub(crate) fn new(limits: &StepLimits, kv: &KvPoolLayout, logits_rows: usize) -> Self {
        let Some(config) = limits.speculation else {
            return Self { proposer: None, buffers: None };
        };
        if let Some(ngram) = NgramProposer::new(config, limits.rows) {
            return Self { proposer: Some(Box::new(ngram)), buffers: None };
        }
        let stores_states = config.method != SpeculativeMethod::DraftModel;
        let size = DraftBufferLimits {
            rows: limits.rows,
            passes: config.draft_tokens.into(),
            seq_slots: limits.rows,
            hidden: if stores_states { limits.hidden } else { 1 },
            block_ids: kv.blocks() * kv.block_id_step(0),
            logits: logits_rows,
        };
        let tracker = DraftHiddenStateTracker::new(limits, kv.block_id_step(0), stores_states);
        let proposer = DeviceProposer::new(tracker);
        Self { proposer: Some(Box::new(proposer)), buffers: Some(size) }
    }
}

/// Whether the configured proposer runs on the device.
pub(crate) fn runs_on_device(config: Option<SpeculativeConfig>) -> bool {
    config.is_some_and(|config| !matches!(config.method, SpeculativeMethod::Ngram { .. }))
}

/// Returns the rule by which the sampler verifies draft tokens.
pub(crate) fn verification(config: Option<SpeculativeConfig>) -> DraftVerification {
    config.map_or(DraftVerification::NoDrafts, |config| match config.acceptance {
        DraftAcceptanceRule::Exact => DraftVerification::MatchSampled,
        DraftAcceptanceRule::Synthetic { per_mille, decrease } => {
            DraftVerification::Synthetic { per_mille, decrease }
        }
    })
}
