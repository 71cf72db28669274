//! Steps on the stream of a host, eager and captured by the host, on the emulated GPU.

use crate::gpu_host::{EmulatedHost, open_emulated};
use crate::test_host::{BLOCK_TOKENS, HostRow, StepMemory, StepSequence, TestHost};
use crate::test_model::{PluginFixture, TestModel};

/// Longest context of the models.
const LONGEST: usize = 128;
const WIDTH: usize = LONGEST / BLOCK_TOKENS;

/// Adds `n` sequences of different lengths and computes their prompts.
fn add_sequences(host: &mut TestHost, model: &TestModel, fixture: &PluginFixture, n: usize) {
    for i in 0..n {
        let sequence = host.add(&fixture.tokens[i..=i + 7 + 2 * i]);
        let len = host.tokens[sequence].len();
        host.run_one(model, sequence, 0, len - 1);
    }
}

/// The last token of each of the first `m` sequences.
fn last_tokens(host: &TestHost, m: usize) -> Vec<HostRow> {
    let last = |sequence: usize| host.tokens[sequence].len() - 1;
    (0..m).map(|sequence| HostRow { sequence, start: last(sequence), len: 1 }).collect()
}

fn check_padding(name: &str, layers: usize) {
    let fixture = PluginFixture::read(name).with_layers(layers);
    let EmulatedHost { model, mut host, gpu } = open_emulated(name, &fixture, true);
    add_sequences(&mut host, &model, &fixture, 8);
    let eager: Vec<Vec<f32>> = (1..=8).map(|m| host.run(&model, &last_tokens(&host, m))).collect();
    for n in [1, 2, 4, 8] {
        let rows = last_tokens(&host, n);
        let values = host.values(&rows, Some(n), WIDTH);
        let mut memory = StepMemory::new(&values, host.hidden_size);
        let step = host.decode_step(&memory, n, WIDTH, LONGEST);
        let capture = || gpu.capture(|| model.forward(&step).unwrap());
        gpu.destroy(&capture()); // A host may capture only to measure memory.
        let graph = capture();
        for m in 1..=n {
            let values = host.values(&rows[..m], Some(n), WIDTH);
            memory.replace(&values);
            gpu.replay(&graph);
            let logits = host.logits(&model, &memory, m);
            assert!(logits == eager[m - 1], "{name}: {m} rows in a graph of {n}");
        }
        gpu.destroy(&graph);
    }
}

#[test]
fn padding_of_graphs_changes_no_row() {
    check_padding("qwen3-tied", 1);
}

#[test]
fn padding_of_graphs_changes_no_row_with_experts() {
    check_padding("qwen3_moe-plain-tied", 1);
}

#[test]
fn padding_of_graphs_changes_no_row_with_mla() {
    check_padding("deepseek_v3-groups-yarn", 2);
}

#[test]
fn emulated_steps_equal_those_of_the_cpu() {
    let fixture = PluginFixture::read("qwen3-fp8-blocks").with_layers(1);
    let dir = tempfile::tempdir().unwrap();
    let cpu = TestModel::open(&fixture.options(dir.path()), None).unwrap();
    let mut cpu_host = TestHost::new(&cpu);
    let EmulatedHost { model, mut host, gpu: _gpu } = open_emulated("cpu", &fixture, true);
    let tokens = &fixture.tokens[..24];
    let (on_cpu, on_gpu) = (cpu_host.add(tokens), host.add(tokens));
    let expected = cpu_host.run_one(&cpu, on_cpu, 0, 24);
    let logits = host.run_one(&model, on_gpu, 0, 24);
    let worst = expected.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "{worst}");
}

/// Selects the logits of the last token of each row.
fn last_logits(host: &TestHost, rows: &[HostRow], logits: &[f32]) -> Vec<f32> {
    let mut end = 0;
    let last = |row: &HostRow| {
        end += row.len;
        &logits[(end - 1) * host.vocab..end * host.vocab]
    };
    rows.iter().flat_map(last).copied().collect()
}

#[test]
fn steps_allocate_compile_and_wait_for_nothing() {
    let fixture = PluginFixture::read("qwen3-tied").with_layers(1);
    let EmulatedHost { model, mut host, gpu: _gpu } = open_emulated("counters", &fixture, true);
    let mut numbers = StepSequence(33);
    let before = model.counters();
    for i in 0..1_000 {
        if i % 16 == 0 {
            host.clear();
            for _ in 0..=numbers.below(3) {
                let len = 1 + numbers.below(8);
                host.add(&fixture.tokens[..len]);
            }
        }
        let (mut rows, mut budget) = (vec![], 24);
        for sequence in 0..host.tokens.len() {
            let len = host.tokens[sequence].len();
            let new = if i % 16 == 0 { len } else { 1 + numbers.below(2) };
            let len = new.min(len).min(budget);
            budget -= len;
            if len > 0 {
                rows.push(HostRow { sequence, start: host.tokens[sequence].len() - len, len });
            }
        }
        rows.sort_by_key(|row| row.len > 1);
        let logits = if i % 2 == 0 {
            host.run_for_last(&model, &rows)
        } else {
            let logits = host.run(&model, &rows);
            last_logits(&host, &rows, &logits)
        };
        for (row, token) in rows.iter().zip(host.greedy(&logits)) {
            if host.tokens[row.sequence].len() < 60 {
                host.tokens[row.sequence].push(token);
            }
        }
    }
    let after = model.counters();
    assert_eq!(after.steps, before.steps + 1_000);
    assert_eq!(
        (after.allocations, after.kernel_modules, after.synchronizations),
        (before.allocations, before.kernel_modules, before.synchronizations)
    );
}

#[test]
fn capture_of_a_step_that_was_not_rehearsed_is_rejected() {
    let fixture = PluginFixture::read("qwen3-tied").with_layers(1);
    let EmulatedHost { model, mut host, gpu } = open_emulated("cold", &fixture, false);
    let sequence = host.add(&fixture.tokens[..1]);
    let rows = [HostRow { sequence, start: 0, len: 1 }];
    let values = host.values(&rows, Some(1), WIDTH);
    let memory = StepMemory::new(&values, host.hidden_size);
    let step = host.decode_step(&memory, 1, WIDTH, LONGEST);
    let mut result = Ok(());
    let graph = gpu.capture(|| result = model.forward(&step));
    let error = result.unwrap_err();
    assert_eq!(error.status, 1, "{}", error.text);
    assert!(error.text.ends_with("is not allowed during graph capture"), "{}", error.text);
    gpu.destroy(&graph);
    host.run_one(&model, sequence, 0, 1);
}
