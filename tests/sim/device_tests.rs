//! Tests of the simulated device: its output equals the output of the oracle (computed without KV cache and
//! scheduler) if and only if every KV slot is read and written correctly.

use crate::hash_model::text::{HashOracle, HashSampler};
use crate::hash_model::{HashModel, HashModelConfig, InvalidBatchError, KvSlotAccess};
use protocol::{
    Batch, BatchRow, BlockId, BlockTableUpdate, Epoch, RequestId, RowError, RowInput, RowOutput,
    SamplingParams, SequenceInit, SequenceSlot, StepId, StepLaunchMode, Token,
};

const PROMPT: [Token; 5] = [3, 1, 4, 1, 5];

fn device(drafts: u8) -> HashModel {
    HashModel::new(HashModelConfig {
        blocks: 8,
        block_tokens: 2,
        vocab: 50,
        drafts,
        slot_access: KvSlotAccess::ReadWrite,
        kinds: vec![protocol::KvKind::Full],
        state_slots: 0,
    })
}

fn oracle(count: usize) -> Vec<Token> {
    let sampler = HashSampler::new(50, SamplingParams::greedy(), 7, 5);
    HashOracle::new(sampler, &PROMPT).take(count).collect()
}

fn row(start: u32, input: RowInput, table: &[u32]) -> BatchRow {
    let len = match &input {
        RowInput::Tokens(ids) => ids.len() as u32,
        RowInput::SampledAt { .. } => 1,
    };
    let blocks = table.iter().map(|&b| BlockId(b)).collect();
    let init = SequenceInit {
        sampling: SamplingParams::greedy(),
        rng_key: 7,
        prompt_len: 5,
        token_history: vec![],
    };
    BatchRow {
        request: RequestId(1),
        epoch: 0,
        seq_slot: SequenceSlot(0),
        start,
        len,
        drafts: 0,
        samples: start + len >= 5,
        masked: false,
        input,
        table_updates: vec![BlockTableUpdate { group: 0, first_entry: 0, blocks }].into(),
        state_slots: protocol::ThinVec::new(),
        next_token: None,
        seq_init: (start == 0).then(|| Box::new(init)),
    }
}

fn step(device: &mut HashModel, n: u64, row: BatchRow) -> Result<RowOutput, InvalidBatchError> {
    let bucket = StepLaunchMode::Eager { tokens: row.len };
    let batch = Batch {
        step: StepId(n),
        epoch: Epoch(0),
        dispatch: bucket,
        moe_tokens: 0,
        draft_rows: 0,
        rows: vec![row],
    };
    device.run(&batch).map(|mut output| output.rows.remove(0))
}

#[test]
fn chunked_prefill_and_decode_match_the_oracle() {
    let (mut device, table) = (device(0), [6, 2, 5, 1]);
    let first = row(0, RowInput::Tokens(PROMPT[..3].to_vec().into()), &table);
    assert!(step(&mut device, 1, first).unwrap().sampled_tokens.is_empty());
    let mut output = Vec::new();
    let second = row(3, RowInput::Tokens(PROMPT[3..].to_vec().into()), &table);
    output.extend(step(&mut device, 2, second).unwrap().sampled_tokens);
    for n in 3..6 {
        let decode =
            row(2 + n as u32, RowInput::SampledAt { step: StepId(n - 1), draft_slack: 0 }, &table);
        output.extend(step(&mut device, n, decode).unwrap().sampled_tokens);
    }
    assert_eq!(output, oracle(4));
}

#[test]
fn verify_rows_match_plain_decoding() {
    let (mut device, table) = (device(3), [6, 2, 5, 1, 0, 3, 4, 7]);
    let mut first =
        step(&mut device, 1, row(0, RowInput::Tokens(PROMPT.to_vec().into()), &table)).unwrap();
    let (mut tokens, mut accepted) = (std::mem::take(&mut first.sampled_tokens), 0);
    for n in 2.. {
        let start = 5 + tokens.len() as u32 - 1;
        if start + 4 > 8 * 2 {
            break; // The block table has no free position for another row.
        }
        let mut verify =
            row(start, RowInput::SampledAt { step: StepId(n - 1), draft_slack: 0 }, &table);
        verify.drafts = 3;
        let output = step(&mut device, n, verify).unwrap();
        assert_eq!(output.sampled_tokens.len(), 1 + usize::from(output.accepted));
        accepted += output.accepted;
        tokens.extend(output.sampled_tokens);
    }
    assert!(accepted > 0);
    assert_eq!(tokens, oracle(tokens.len()));
}

#[test]
fn corrupt_blocks_change_the_tokens() {
    let expected = oracle(1);
    let whole = || RowInput::Tokens(PROMPT.to_vec().into());
    assert_eq!(
        step(&mut device(0), 1, row(0, whole(), &[0, 1, 2])).unwrap().sampled_tokens,
        expected
    );
    assert_ne!(
        step(&mut device(0), 1, row(0, whole(), &[0, 0, 2])).unwrap().sampled_tokens,
        expected
    );

    let mut poisoned = device(0);
    step(&mut poisoned, 1, row(0, RowInput::Tokens(PROMPT[..4].to_vec().into()), &[0, 1])).unwrap();
    poisoned.poison(BlockId(1));
    let last = row(4, RowInput::Tokens(PROMPT[4..].to_vec().into()), &[0, 1, 2]);
    assert_ne!(step(&mut poisoned, 2, last).unwrap().sampled_tokens, expected);
}

#[test]
fn impossible_rows_are_violations() {
    let whole = || RowInput::Tokens(PROMPT.to_vec().into());
    let violates = |row: BatchRow| assert!(step(&mut device(0), 1, row).is_err());
    violates(row(0, whole(), &[0, 1])); // This block table is too short for the row.
    violates(row(0, whole(), &[0, 1, 8])); // This block table has block 8 of a pool with 8 blocks.
    // The row reads a sequence slot that was never initialised.
    violates(row(3, RowInput::Tokens(vec![1, 5].into()), &[0, 1, 2]));
    violates(BatchRow {
        input: RowInput::SampledAt { step: StepId(0), draft_slack: 0 },
        ..row(0, whole(), &[0, 1, 2])
    });
    violates(BatchRow { drafts: 1, ..row(0, whole(), &[0, 1, 2]) });
    let hole =
        vec![BlockTableUpdate { group: 0, first_entry: 1, blocks: vec![BlockId(0)].into() }].into();
    violates(BatchRow { table_updates: hole, ..row(0, whole(), &[]) });
}

#[test]
fn failed_row_poisons_its_blocks() {
    let (mut device, table) = (device(0), [0, 1, 2]);
    let first = row(0, RowInput::Tokens(PROMPT[..3].to_vec().into()), &table);
    let bucket = StepLaunchMode::Eager { tokens: 3 };
    let rows = vec![first];
    let batch = Batch {
        step: StepId(1),
        epoch: Epoch(0),
        dispatch: bucket,
        moe_tokens: 0,
        draft_rows: 0,
        rows,
    };
    let output = device.run_with(&batch, &[], |_| Some(RowError::NonFiniteLogits)).unwrap();
    assert_eq!(output.rows[0].error, Some(RowError::NonFiniteLogits));
    let rest = row(3, RowInput::Tokens(PROMPT[3..].to_vec().into()), &table);
    assert_ne!(step(&mut device, 2, rest).unwrap().sampled_tokens, oracle(1));
}
