//! The simulated executors of one replica and their link in both directions. The link keeps the order of
//! messages, delays them and may fail.

use crate::hash_model::{
    HashModel, HashModelConfig, InvalidBatchError, KvSlotAccess, StateReplayTokens,
};
use crate::mask_worker::MaskedRowGrammar;
use crate::sim_config::SimConfig;
use protocol::{
    Batch, BatchRow, BitmaskRow, BlockId, Epoch, RowError, StateSlot, StepId, StepOutput,
};
use std::collections::VecDeque;

/// A message from the scheduler to the executors; messages are processed in the order of sending.
#[derive(Debug)]
enum SimExecutorMessage {
    /// A step to run, with its arrival time and the grammars of its rows that are sampled under a grammar.
    Batch { batch: Batch, grammars: Vec<MaskedRowGrammar>, arrives_ms: u64 },
    /// Freed memory. After the preceding messages have been processed, it is overwritten with invalid values, so
    /// that a later read is detected. This message exists only in the simulation and takes no simulated time.
    Freed(FreedMemory),
}

/// Blocks and state slots that were freed in a tick.
#[derive(Debug, Default)]
pub(crate) struct FreedMemory {
    /// Freed blocks.
    pub(crate) blocks: Vec<BlockId>,
    /// Freed slots of each state group.
    pub(crate) state_slots: Vec<Vec<StateSlot>>,
}

/// A finished step: the output that is sent, and what the simulated device actually computed.
#[derive(Debug)]
pub(crate) struct CompletedStep {
    /// The output that the executors send for the step.
    pub(crate) output: StepOutput,
    /// KV blocks that the step filled, each as row index and hash-model context (hash of all tokens up to the
    /// end of the block).
    pub(crate) filled_blocks: Vec<(usize, u64)>,
    /// Rows of the batch that was run.
    pub(crate) rows: Vec<BatchRow>,
    /// Number of rows that started after their planned `start`, because draft tokens of an earlier step in
    /// flight were accepted.
    pub(crate) shifted_rows: u64,
}

/// Ways in which executors hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HangKind {
    /// Steps do not finish, but heartbeats are sent.
    StepNeverEnds,
    /// Steps do not finish, and no heartbeat is sent.
    NoHeartbeat,
}

/// Executors of a replica from one start to the next failure, simulated by one hash model.
#[derive(Debug)]
pub(crate) struct SimExecutor {
    /// Epoch for which the executors were started; they drop batches with another epoch.
    pub(crate) epoch: Epoch,
    /// Arrival time of the last output that the executors sent; later outputs arrive no earlier.
    pub(crate) last_reply_ms: u64,
    /// Whether a step runs, or will run from `begins_ms` on.
    pub(crate) busy: bool,
    /// Start time of the current step.
    pub(crate) begins_ms: u64,
    /// Whether messages to the executors are lost.
    pub(crate) link_broken: bool,
    /// Kind and start time of a hang.
    pub(crate) hang: Option<(HangKind, u64)>,
    /// Time at which the executors last sent a message.
    pub(crate) last_message_ms: u64,
    /// The last step that was run.
    last_step: StepId,
    model: HashModel,
    queue: VecDeque<SimExecutorMessage>,
    last_arrival_ms: u64,
}

impl SimExecutor {
    /// Creates executors with an empty KV pool.
    pub(crate) fn new(epoch: Epoch, blocks: u32, config: &SimConfig) -> Self {
        let (kv, limits) = (&config.scheduler.kv, &config.scheduler.limits);
        let model_config = HashModelConfig {
            blocks,
            block_tokens: kv.spec.block_tokens,
            vocab: limits.vocab_size,
            drafts: limits.draft_tokens,
            slot_access: KvSlotAccess::ReadWrite,
            kinds: kv.spec.groups.iter().map(|group| group.kind).collect(),
            state_slots: kv.state_slots,
        };
        Self {
            epoch,
            last_reply_ms: 0,
            busy: false,
            begins_ms: 0,
            link_broken: false,
            hang: None,
            last_message_ms: 0,
            last_step: StepId(0),
            model: HashModel::new(model_config),
            queue: VecDeque::new(),
            last_arrival_ms: 0,
        }
    }

    /// Sets which tokens of rows with draft tokens are applied to the states.
    pub(crate) fn set_replay(&mut self, tokens: StateReplayTokens) {
        self.model.replay = tokens;
    }

    /// Queues a batch and the grammars of its rows that are sampled under a grammar. The message arrives at
    /// `arrives_ms`, but not before earlier messages.
    pub(crate) fn send(&mut self, batch: Batch, grammars: Vec<MaskedRowGrammar>, arrives_ms: u64) {
        self.last_arrival_ms = self.last_arrival_ms.max(arrives_ms);
        self.queue.push_back(SimExecutorMessage::Batch {
            batch,
            grammars,
            arrives_ms: self.last_arrival_ms,
        });
    }

    /// Queues freed blocks and state slots. When all messages queued earlier have been processed, they are
    /// overwritten with invalid values.
    pub(crate) fn free(&mut self, freed: FreedMemory) {
        self.queue.push_back(SimExecutorMessage::Freed(freed));
    }

    /// Start time of the next batch, if a batch is queued and no step runs.
    pub(crate) fn next_start_ms(&mut self, now_ms: u64) -> Option<u64> {
        if self.busy {
            return None;
        }
        loop {
            match self.queue.front()? {
                SimExecutorMessage::Batch { arrives_ms, .. } => {
                    return Some(now_ms.max(*arrives_ms));
                }
                SimExecutorMessage::Freed(freed) => {
                    for &block in &freed.blocks {
                        self.model.poison(block);
                    }
                    for (group, slots) in freed.state_slots.iter().enumerate() {
                        for &slot in slots {
                            self.model.poison_state(group, slot);
                        }
                    }
                    self.queue.pop_front();
                }
            }
        }
    }

    /// Runs the first batch of the queue. A batch with another epoch is dropped without being run.
    ///
    /// Errors: the batch is invalid, so that no device could run it.
    pub(crate) fn run(
        &mut self,
        fails: impl Fn(&BatchRow) -> Option<RowError>,
    ) -> Result<Option<CompletedStep>, InvalidBatchError> {
        self.busy = false;
        let _ = self.next_start_ms(0);
        let Some(SimExecutorMessage::Batch { batch, grammars, .. }) = self.queue.pop_front() else {
            return Ok(None);
        };
        self.last_step = batch.step;
        if batch.epoch != self.epoch {
            return Ok(None);
        }
        // As in the real engine, the bitmasks depend on the draft tokens, which are known only in the
        // executors.
        let bitmasks = |grammar: &MaskedRowGrammar| {
            grammar.bitmasks(self.model.drafts(&batch.rows[grammar.row as usize]))
        };
        let bitmasks: Vec<BitmaskRow> = grammars.iter().map(bitmasks).collect();
        let output = self.model.run_with(&batch, &bitmasks, fails)?;
        let filled = self.model.filled().iter().map(|f| (f.row as usize, f.context)).collect();
        Ok(Some(CompletedStep {
            output,
            filled_blocks: filled,
            rows: batch.rows,
            shifted_rows: self.model.shifted_rows(),
        }))
    }

    /// Id of the newest step that the executors have started.
    pub(crate) fn newest_begun_step(&self, now_ms: u64) -> StepId {
        match self.queue.front() {
            Some(SimExecutorMessage::Batch { batch, .. })
                if self.busy && self.begins_ms <= now_ms =>
            {
                batch.step
            }
            _ => self.last_step,
        }
    }

    /// Whether any queued batch has not been run.
    pub(crate) fn has_work(&self) -> bool {
        self.queue.iter().any(|message| matches!(message, SimExecutorMessage::Batch { .. }))
    }
}
