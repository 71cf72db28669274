//! Tests the communication between engine thread, mask workers and timer with random thread interleavings.
//! Every step must get one message with every row, every mask must belong to its position in the output, and
//! every overdue row must be followed by a `MaskEvent::Ready`.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

use super::mask_worker_pool::MaskSessionQueue;
use super::*;
use crate::sync::check_interleavings;
use crate::{GrammarCompiler, GrammarSpec, GrammarVocabulary, OutputConstraint};
use protocol::BitmaskRow;
use scheduler::FinishReason;
use shuttle::thread;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, TryRecvError, channel, sync_channel};

const INTERLEAVINGS_MAX: usize = 1_000;
const END: Token = 256;
/// Allowed bytes at each position of every output.
const OUTPUT: [&[u8]; 3] = [b"ab", b"c", b"de"];

fn compiler() -> GrammarCompiler {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    let vocabulary = GrammarVocabulary { tokens, special: vec![END], end_ids: vec![END], encode };
    GrammarCompiler::new(vocabulary).unwrap()
}

/// Returns the bytes that a mask allows.
fn allowed(row: &BitmaskRow) -> Vec<u8> {
    (0..=255).filter(|&byte| row.bitmasks[0].allows(byte.into())).collect()
}

/// Receives a message from another thread. A blocking receive of the standard library would block all
/// simulated threads.
fn next<T>(channel: &Receiver<T>) -> T {
    loop {
        match channel.try_recv() {
            Ok(item) => return item,
            Err(_) => thread::yield_now(),
        }
    }
}

/// Returns the scheduler effect of one more output token of `request`.
fn token_effect(request: RequestId, token: Token) -> SchedulerEffect {
    let end = TokenEvent::finished(request, FinishReason::Length);
    let event = TokenEvent { tokens: [token].as_slice().into(), finish_reason: None, ..end };
    SchedulerEffect::TokenEvents(vec![event])
}

/// Simulated engine thread: the mask workers, the channels to which they send, and the lengths of two
/// outputs.
struct MaskStepHarness {
    workers: MaskWorkers,
    executor: SyncSender<ExecutorCommand>,
    commands: Receiver<ExecutorCommand>,
    mask_events: Receiver<(RequestId, MaskEvent)>,
    /// Number of tokens of each output.
    outputs: [u32; 2],
}

impl MaskStepHarness {
    /// Returns one row per incomplete output.
    fn incomplete_rows(&self) -> Vec<MaskedRow> {
        (0..)
            .zip(self.outputs)
            .filter(|(_, outputs)| (*outputs as usize) < OUTPUT.len())
            .map(|(row, _)| MaskedRow { row, request: RequestId(row.into()), awaits_drafts: false })
            .collect()
    }

    /// Runs a step with one row per incomplete output. Each row whose mask is not overdue commits one token.
    fn step(&mut self, number: u64) {
        let rows = self.incomplete_rows();
        let expected: BTreeSet<u32> = rows.iter().map(|masked| masked.row).collect();
        self.workers.request_masks(StepId(number), rows, &self.executor, Duration::ZERO);
        let ExecutorCommand::Bitmask(mask) = next(&self.commands) else { panic!("no mask") };
        assert_eq!(mask.step, StepId(number));
        assert_eq!(mask.rows.iter().map(|row| row.row).collect::<BTreeSet<_>>(), expected);
        assert_eq!(mask.rows.len(), expected.len(), "a row twice");
        let mut overdue = Vec::new();
        for row in mask.rows {
            let outputs = &mut self.outputs[row.row as usize];
            if row.is_overdue() {
                overdue.push((RequestId(row.row.into()), *outputs));
                continue;
            }
            assert_eq!(allowed(&row), OUTPUT[*outputs as usize]);
            let token = Token::from(OUTPUT[*outputs as usize][0]);
            *outputs += 1;
            let effect = token_effect(RequestId(row.row.into()), token);
            self.workers.observe_effects(&[effect]);
        }
        while !overdue.is_empty() {
            let (request, event) = next(&self.mask_events);
            overdue.retain(|(awaited, position)| {
                let is_ready = matches!(event, MaskEvent::Ready { output_tokens, .. } if output_tokens == *position);
                *awaited != request || !is_ready
            });
        }
    }
}

#[test]
fn every_step_gets_masks_and_overdue_ones_are_reported() {
    let compiler = compiler();
    let constraint = OutputConstraint::new(GrammarSpec::Regex("[ab]c[de]".to_owned()), "test");
    let report = compiler.dry_run(&constraint).unwrap();
    check_interleavings(INTERLEAVINGS_MAX, move || {
        // Each interleaving compiles a new grammar, because the measured speed of a grammar affects later
        // requests. The queue of a session depends on processor time, so a failing interleaving may run
        // differently when repeated.
        let grammar = compiler.compile(&constraint, report).unwrap();
        let (events_tx, mask_events) = channel();
        let listener = Arc::new(move |request, event| {
            let _ = events_tx.send((request, event)); // The receiver may have been dropped.
        });
        let pool = Arc::new(MaskWorkerPool::new(Arc::default(), listener));
        let queues: [fn(&MaskWorkerPool) -> &MaskSessionQueue; 3] =
            [|pool| &pool.fast, |pool| &pool.fast, |pool| &pool.slow];
        let threads = queues.map(|queue| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.run_worker(queue(&pool)))
        });
        let (timer, timer_events) = channel();
        // The simulated timer has no delay: whenever its thread runs, it treats the deadlines of all
        // waiting steps as passed.
        let timer_thread = thread::spawn(move || {
            let overdue = AtomicU64::new(0);
            loop {
                match timer_events.try_recv() {
                    Ok(MaskTimerCommand::Step(_, step)) => step.send_without_overdue(&overdue),
                    Ok(MaskTimerCommand::Begin(_)) => {}
                    Err(TryRecvError::Empty) => thread::yield_now(),
                    Err(TryRecvError::Disconnected) => return,
                }
            }
        });
        let (executor, commands) = sync_channel(8);
        let workers = MaskWorkers { live: HashMap::new(), pool: Arc::clone(&pool), timer };
        let mut harness =
            MaskStepHarness { workers, executor, commands, mask_events, outputs: [0, 0] };
        for request in 0..2 {
            let guide =
                DecodingGuide { grammar: Some(grammar.clone().session_seed(false)), budget: None };
            harness.workers.begin(RequestId(request), guide);
        }
        let mut number = 0;
        while harness.outputs[0] < 2 {
            number += 1;
            harness.step(number);
        }
        // Ends a request whose mask computation may be in progress.
        let end = TokenEvent::finished(RequestId(0), FinishReason::Length);
        harness.workers.observe_effects(&[SchedulerEffect::TokenEvents(vec![end])]);
        harness.outputs[0] = OUTPUT.len() as u32;
        while harness.outputs[1] < OUTPUT.len() as u32 {
            number += 1;
            harness.step(number);
        }
        drop(harness);
        for thread in threads {
            thread.join().unwrap();
        }
        timer_thread.join().unwrap();
    });
}
