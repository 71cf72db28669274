//! Speculative decoding: draft tokens of a step, proposed by n-gram lookup on the host, or by an MTP module,
//! a draft model or EAGLE-3 on the device, and verified by the target model's own pass.
//!
//! A [`Proposer`] works at two points of a step: before rows are staged, where it proposes tokens or
//! announces that the device proposes them, and after the step, where it observes the emitted tokens. The
//! passes on the device are in [`draft_passes`]; draft tokens are verified where they are sampled
//! ([`verification`]).

mod device_proposer;
mod draft_passes;
mod draft_states;
mod ngram;
mod ngram_matcher;
mod validation;

use crate::BatchError;
use crate::step::StepLimits;
use ops::{DraftBufferSize, DraftVerification, StagingBuffer};
use protocol::{BatchRow, DraftAcceptance, SpeculativeConfig, SpeculativeMethod, Token};

pub(crate) use device_proposer::DeviceProposer;
pub(crate) use draft_passes::ProposerModel;
pub(crate) use draft_states::DraftRowCounts;
pub(crate) use ngram::{EmittedTokenSender, NgramProposer};
pub use validation::{MODEL_DRAFTS_MAX, MTP_DRAFTS_MAX, SpeculationError, check_speculation};

/// Proposes draft tokens for the rows of a step.
pub(crate) trait Proposer: Send {
    /// Proposes draft tokens for a row whose sequence slot is up to date.
    fn propose(&mut self, row: &BatchRow) -> Proposal<'_>;

    /// Updates the proposer from rows whose sequence slots are up to date: tokens of earlier steps, block
    /// tables.
    fn observe(&mut self, rows: &[BatchRow]);

    /// Returns a sender for the tokens that a step with these rows emits, if the proposer reads emitted
    /// tokens.
    fn observe_outputs(&mut self, rows: &[BatchRow]) -> Option<EmittedTokenSender> {
        let _ = rows;
        None
    }

    /// Stages what the device needs to propose tokens for a row.
    ///
    /// Errors: the hidden state before the row is not on the device.
    fn stage(
        &mut self,
        row: &BatchRow,
        staged_row: StagedRow,
        staging: &mut StagingBuffer,
    ) -> Result<(), BatchError> {
        let _ = (row, staged_row, staging);
        Ok(())
    }
}

/// Draft tokens of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proposal<'a> {
    /// Draft tokens from the host, possibly none.
    Tokens(&'a [Token]),
    /// As many draft tokens as the row has room for, proposed on the device.
    OnDevice,
}

/// Position of a staged row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StagedRow {
    /// Index of its first token in the step.
    pub(crate) token: usize,
    /// Number of draft tokens that the device proposes for the row.
    pub(crate) device_drafts: u8,
}

/// A proposer, and the size of its device memory.
pub(crate) struct ProposerSetup {
    pub(crate) proposer: Option<Box<dyn Proposer>>,
    /// `None`: nothing is proposed on the device.
    pub(crate) buffers: Option<DraftBufferSize>,
}

impl ProposerSetup {
    /// Creates the proposer for steps up to `limits`, over a KV pool of `blocks` blocks; `logits_rows` rows
    /// of logits are computed at a time.
    pub(crate) fn new(limits: &StepLimits, blocks: usize, logits_rows: usize) -> Self {
        let Some(config) = limits.speculation else {
            return Self { proposer: None, buffers: None };
        };
        if let Some(ngram) = NgramProposer::new(config, limits.rows) {
            return Self { proposer: Some(Box::new(ngram)), buffers: None };
        }
        let stores_states = config.method != SpeculativeMethod::DraftModel;
        let size = DraftBufferSize {
            rows: limits.rows,
            passes: config.draft_tokens.into(),
            seq_slots: limits.rows,
            hidden: if stores_states { limits.hidden } else { 1 },
            blocks,
            logits: logits_rows,
        };
        let block_tokens = limits.block_tokens as usize;
        let proposer = DeviceProposer::new(limits.rows, block_tokens, stores_states);
        Self { proposer: Some(Box::new(proposer)), buffers: Some(size) }
    }
}

/// Whether the configured proposer runs on the device.
pub(crate) fn runs_on_device(config: Option<SpeculativeConfig>) -> bool {
    config.is_some_and(|config| !matches!(config.method, SpeculativeMethod::Ngram { .. }))
}

/// How the sampler verifies draft tokens.
pub(crate) fn verification(config: Option<SpeculativeConfig>) -> DraftVerification {
    config.map_or(DraftVerification::NoDrafts, |config| match config.acceptance {
        DraftAcceptance::Exact => DraftVerification::MatchSampled,
        DraftAcceptance::Synthetic { per_mille } => DraftVerification::Synthetic { per_mille },
    })
}
