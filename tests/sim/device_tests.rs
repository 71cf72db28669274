//! The simulated device itself: it says what the oracle says, and only if every slot is right.

use crate::hash_model::text::{Oracle, Voice};
use crate::hash_model::{HashModel, Reading, Shape, Violation};
use protocol::{
    Batch, BlockId, Bucket, Epoch, Input, RequestId, Row, RowError, RowOutput, Sampling, Seat,
    SeatInit, StepId, TableUpdate, Token,
};

const PROMPT: [Token; 5] = [3, 1, 4, 1, 5];

fn device(drafts: u8) -> HashModel {
    let reading = Reading::Slots;
    HashModel::new(Shape { blocks: 8, block_tokens: 2, vocab: 50, drafts, reading })
}

fn oracle(count: usize) -> Vec<Token> {
    let voice = Voice::new(50, Sampling::greedy(), 7, 5);
    Oracle::new(voice, &PROMPT).take(count).collect()
}

fn row(start: u32, input: Input, table: &[u32]) -> Row {
    let len = match &input {
        Input::Tokens(ids) => ids.len() as u32,
        Input::SampledAt { .. } => 1,
    };
    let blocks = table.iter().map(|&b| BlockId(b)).collect();
    let init = SeatInit { sampling: Sampling::greedy(), key: 7, prompt_len: 5, history: vec![] };
    Row {
        request: RequestId(1),
        epoch: 0,
        seat: Seat(0),
        start,
        len,
        drafts: 0,
        samples: start + len >= 5,
        masked: false,
        input,
        tables: vec![TableUpdate { group: 0, from: 0, blocks }].into(),
        next: None,
        init: (start == 0).then(|| Box::new(init)),
    }
}

fn step(device: &mut HashModel, n: u64, row: Row) -> Result<RowOutput, Violation> {
    let bucket = Bucket::Eager { tokens: row.len };
    let batch = Batch {
        step: StepId(n),
        epoch: Epoch(0),
        bucket,
        moe_tokens: 0,
        draft_rows: 0,
        rows: vec![row],
    };
    device.run(&batch).map(|mut output| output.rows.remove(0))
}

#[test]
fn chunks_and_device_fed_decodes_say_what_the_oracle_says() {
    let (mut device, table) = (device(0), [6, 2, 5, 1]);
    let first = row(0, Input::Tokens(PROMPT[..3].to_vec().into()), &table);
    assert!(step(&mut device, 1, first).unwrap().emitted.is_empty());
    let mut said = Vec::new();
    let second = row(3, Input::Tokens(PROMPT[3..].to_vec().into()), &table);
    said.extend(step(&mut device, 2, second).unwrap().emitted);
    for n in 3..6 {
        let decode = row(2 + n as u32, Input::SampledAt { step: StepId(n - 1), slack: 0 }, &table);
        said.extend(step(&mut device, n, decode).unwrap().emitted);
    }
    assert_eq!(said, oracle(4));
}

#[test]
fn verify_rows_say_what_plain_decodes_say() {
    let (mut device, table) = (device(3), [6, 2, 5, 1, 0, 3, 4, 7]);
    let mut said =
        step(&mut device, 1, row(0, Input::Tokens(PROMPT.to_vec().into()), &table)).unwrap();
    let (mut said, mut accepted) = (std::mem::take(&mut said.emitted), 0);
    for n in 2.. {
        let start = 5 + said.len() as u32 - 1;
        if start + 4 > 8 * 2 {
            break; // The table has no room for another row.
        }
        let mut verify = row(start, Input::SampledAt { step: StepId(n - 1), slack: 0 }, &table);
        verify.drafts = 3;
        let output = step(&mut device, n, verify).unwrap();
        assert_eq!(output.emitted.len(), 1 + usize::from(output.accepted));
        accepted += output.accepted;
        said.extend(output.emitted);
    }
    assert!(accepted > 0);
    assert_eq!(said, oracle(said.len()));
}

#[test]
fn an_aliased_a_poisoned_and_an_unwritten_block_change_the_text() {
    let right = oracle(1);
    let whole = || Input::Tokens(PROMPT.to_vec().into());
    assert_eq!(step(&mut device(0), 1, row(0, whole(), &[0, 1, 2])).unwrap().emitted, right);
    assert_ne!(step(&mut device(0), 1, row(0, whole(), &[0, 0, 2])).unwrap().emitted, right);

    let mut poisoned = device(0);
    step(&mut poisoned, 1, row(0, Input::Tokens(PROMPT[..4].to_vec().into()), &[0, 1])).unwrap();
    poisoned.poison(BlockId(1));
    let last = row(4, Input::Tokens(PROMPT[4..].to_vec().into()), &[0, 1, 2]);
    assert_ne!(step(&mut poisoned, 2, last).unwrap().emitted, right);
}

#[test]
fn what_no_device_could_run_is_a_violation() {
    let whole = || Input::Tokens(PROMPT.to_vec().into());
    let violates = |row: Row| assert!(step(&mut device(0), 1, row).is_err());
    violates(row(0, whole(), &[0, 1])); // The table is too short.
    violates(row(0, whole(), &[0, 1, 8])); // Block 8 of 8.
    violates(row(3, Input::Tokens(vec![1, 5].into()), &[0, 1, 2])); // The seat was never initialised.
    violates(Row {
        input: Input::SampledAt { step: StepId(0), slack: 0 },
        ..row(0, whole(), &[0, 1, 2])
    });
    violates(Row { drafts: 1, ..row(0, whole(), &[0, 1, 2]) });
    let hole = vec![TableUpdate { group: 0, from: 1, blocks: vec![BlockId(0)].into() }].into();
    violates(Row { tables: hole, ..row(0, whole(), &[]) });
}

#[test]
fn a_failed_row_poisons_what_it_wrote() {
    let (mut device, table) = (device(0), [0, 1, 2]);
    let first = row(0, Input::Tokens(PROMPT[..3].to_vec().into()), &table);
    let bucket = Bucket::Eager { tokens: 3 };
    let rows = vec![first];
    let batch =
        Batch { step: StepId(1), epoch: Epoch(0), bucket, moe_tokens: 0, draft_rows: 0, rows };
    let output = device.run_with(&batch, &[], |_| Some(RowError::NonFiniteLogits)).unwrap();
    assert_eq!(output.rows[0].error, Some(RowError::NonFiniteLogits));
    let rest = row(3, Input::Tokens(PROMPT[3..].to_vec().into()), &table);
    assert_ne!(step(&mut device, 2, rest).unwrap().emitted, oracle(1));
}
