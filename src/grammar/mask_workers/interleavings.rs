//! What the engine's thread, the threads that make masks and the clock hand to each other, in orders that a scheduler
//! of tests draws: every step gets one message with every row, every mask is that of its place in the output, and
//! a row that was late is told of.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

use super::*;
use crate::grammar::{Compiler, Constraint, Form, Vocabulary};
use protocol::MaskRow;
use scheduler::Finish;
use shuttle::{check_random, thread};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{TryRecvError, sync_channel};

const ORDERS: usize = 1_000;
const END: Token = 256;
/// What every output is, and so its masks.
const OUTPUT: [&[u8]; 3] = [b"ab", b"c", b"de"];

fn compiler() -> Compiler {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.push(b"<|end|>".to_vec());
    let encode = Arc::new(|text: &str| Some(text.bytes().map(Token::from).collect()));
    let vocabulary = Vocabulary { tokens, special: vec![END], ends: vec![END], encode };
    Compiler::new(vocabulary).unwrap()
}

/// The bytes that a mask allows.
fn allowed(row: &MaskRow) -> Vec<u8> {
    let bit = |byte: &u8| row.allowed[usize::from(*byte) / 32] >> (byte % 32) & 1 == 1;
    (0..=255).filter(bit).collect()
}

/// Waits for what another thread sends: a channel of the system would stop them all.
fn next<T>(channel: &Receiver<T>) -> T {
    loop {
        match channel.try_recv() {
            Ok(item) => return item,
            Err(_) => thread::yield_now(),
        }
    }
}

/// The engine's thread between two steps.
struct Steps {
    workers: MaskWorkers,
    executor: SyncSender<ToExecutor>,
    sent: Receiver<ToExecutor>,
    news: Receiver<(RequestId, News)>,
    /// Tokens of each output.
    outputs: [u32; 2],
}

impl Steps {
    /// A step with a row for each output that is not whole: those that were not late get their token.
    fn step(&mut self, number: u64) {
        let rows: Vec<(u32, RequestId)> = (0..)
            .zip(self.outputs)
            .filter(|(_, outputs)| (*outputs as usize) < OUTPUT.len())
            .map(|(row, _)| (row, RequestId(row.into())))
            .collect();
        let wanted: BTreeSet<u32> = rows.iter().map(|(row, _)| *row).collect();
        self.workers.make(StepId(number), rows, &self.executor, Duration::ZERO);
        let ToExecutor::Mask(mask) = next(&self.sent) else { panic!("no mask") };
        assert_eq!(mask.step, StepId(number));
        assert_eq!(mask.rows.iter().map(|row| row.row).collect::<BTreeSet<_>>(), wanted);
        assert_eq!(mask.rows.len(), wanted.len(), "a row twice");
        let mut late = Vec::new();
        for row in mask.rows {
            let outputs = &mut self.outputs[row.row as usize];
            if row.late {
                late.push((RequestId(row.row.into()), *outputs));
                continue;
            }
            assert_eq!(allowed(&row), OUTPUT[*outputs as usize]);
            let token = Token::from(OUTPUT[*outputs as usize][0]);
            *outputs += 1;
            let end = TokenEvent::end(RequestId(row.row.into()), Finish::Length);
            let event = TokenEvent { tokens: [token].as_slice().into(), finish: None, ..end };
            self.workers.hear(&[Effect::Tokens(vec![event])]);
        }
        while !late.is_empty() {
            let (request, news) = next(&self.news);
            late.retain(|(of, at)| {
                let told = matches!(news, News::Made { outputs, .. } if outputs == *at);
                *of != request || !told
            });
        }
    }
}

#[test]
fn every_step_gets_its_masks_and_a_late_one_is_told_of() {
    let compiler = compiler();
    let constraint = Constraint::new(Form::Regex("[ab]c[de]".to_owned()), "test");
    let findings = compiler.try_out(&constraint).unwrap();
    check_random(
        move || {
            // Another in each order: what is found out about a grammar holds for the requests that follow. Which lane serves a
            // request hangs on processor time, though, so an order that fails may take other ways when it is drawn again.
            let grammar = compiler.compile(&constraint, findings).unwrap();
            let (announced, news) = channel();
            let pool = Arc::new(Pool {
                quick: Lane::default(),
                slow: Lane::default(),
                timings: Arc::default(),
                announce: Arc::new(move |request, news| {
                    let _ = announced.send((request, news)); // Who asked may have gone.
                }),
            });
            let lanes: [fn(&Pool) -> &Lane; 3] =
                [|pool| &pool.quick, |pool| &pool.quick, |pool| &pool.slow];
            let servers = lanes.map(|lane| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || pool.serve(lane(&pool)))
            });
            let (clock, ticks) = channel();
            // No step waits longer than this thread takes to come round.
            let watch = thread::spawn(move || {
                let late = AtomicU64::new(0);
                loop {
                    match ticks.try_recv() {
                        Ok(Tick::Step(_, step)) => step.expire(&late),
                        Ok(Tick::Begin(_)) => {}
                        Err(TryRecvError::Empty) => thread::yield_now(),
                        Err(TryRecvError::Disconnected) => return,
                    }
                }
            });
            let (executor, sent) = sync_channel(8);
            let workers = MaskWorkers { live: HashMap::new(), pool: Arc::clone(&pool), clock };
            let mut steps = Steps { workers, executor, sent, news, outputs: [0, 0] };
            for request in 0..2 {
                let guide = Guide { grammar: Some(grammar.clone().seed(false)), budget: None };
                steps.workers.begin(RequestId(request), guide);
            }
            let mut number = 0;
            while steps.outputs[0] < 2 {
                number += 1;
                steps.step(number);
            }
            // One leaves while its mask may be under way.
            let end = TokenEvent::end(RequestId(0), Finish::Length);
            steps.workers.hear(&[Effect::Tokens(vec![end])]);
            steps.outputs[0] = OUTPUT.len() as u32;
            while steps.outputs[1] < OUTPUT.len() as u32 {
                number += 1;
                steps.step(number);
            }
            drop(steps);
            for server in servers {
                server.join().unwrap();
            }
            watch.join().unwrap();
        },
        ORDERS,
    );
}
