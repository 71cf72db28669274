//! Forward passes in the memory of a host: logits equal those of HF transformers, and do not depend on how a host batches.

use crate::test_host::{HostRow, StepSequence, TestHost};
use crate::test_model::{PluginFixture, TestModel};

/// Maximum difference between logits in f32 and those of HF transformers.
const TOLERANCE: f32 = 1e-4;

fn check_fixture(name: &str) {
    let fixture = PluginFixture::read(name);
    let dir = tempfile::tempdir().unwrap();
    let model = TestModel::open(&fixture.options(dir.path()), None).unwrap();
    model.rehearse().unwrap();
    let mut host = TestHost::new(&model);
    let tokens = fixture.tokens.len();
    let whole = host.add(&fixture.tokens);
    let logits = host.run_one(&model, whole, 0, tokens);
    let worst = logits.iter().zip(&fixture.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= TOLERANCE, "{name}: logits differ by {worst}");
    assert_eq!(logits.len(), fixture.logits.len());
    // In chunks, next to other rows.
    let (chunked, other) = (host.add(&fixture.tokens), host.add(&fixture.tokens[..40]));
    let width = host.vocab;
    for (start, len) in [(0, 5), (5, 17), (22, tokens - 22)] {
        let row = |sequence, start, len| HostRow { sequence, start, len };
        let rows = [row(other, start.min(39), 1), row(chunked, start, len)];
        let batch = host.run(&model, &rows);
        let alone = &logits[start * width..(start + len) * width];
        assert!(batch[width..] == *alone, "{name}: a chunk from {start} on has other bits");
        // Writes the same keys and values again.
        let last = host.run_for_last(&model, &rows);
        assert!(last[width..] == alone[(len - 1) * width..], "{name}: a last token has other bits");
    }
    // A second prefix hit: the keys of the first 32 tokens are read from the cache.
    let again = host.run_one(&model, whole, 32, tokens - 32);
    assert!(again == logits[32 * width..], "{name}: a prefix hit has other bits");
}

macro_rules! fixtures {
    ($($test:ident => $name:literal),* $(,)?) => {
        $(#[test]
        fn $test() {
            check_fixture($name);
        })*
    };
}

fixtures! {
    llama_matches_transformers => "llama-untied",
    mistral_matches_transformers => "mistral-untied",
    qwen2_matches_transformers => "qwen2-untied",
    qwen3_matches_transformers => "qwen3-d64-gqa8",
    qwen3_fp8_blocks_match_transformers => "qwen3-fp8-blocks",
    qwen3_fp8_channels_match_transformers => "qwen3-fp8-channels",
    qwen3_moe_matches_transformers => "qwen3_moe-plain-tied",
    deepseek_v2_matches_transformers => "deepseek_v2-greedy",
    deepseek_v3_matches_transformers => "deepseek_v3-groups-yarn",
}

#[test]
fn two_models_in_one_process_do_not_disturb_each_other() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let fixtures = ["qwen3-tied", "llama-tied-llama3"].map(PluginFixture::read);
    let open = |i: usize| TestModel::open(&fixtures[i].options(dirs[i].path()), None).unwrap();
    let models = [open(0), open(1)];
    let mut hosts = models.each_ref().map(TestHost::new);
    let alone: Vec<Vec<Vec<i32>>> = (0..2)
        .map(|m| {
            let model = open(m);
            let mut host = TestHost::new(&model);
            (0..500).map(|i| step(&mut host, &model, &fixtures[m].tokens, i)).collect()
        })
        .collect();
    for i in 0..500 {
        for (m, alone) in alone.iter().enumerate() {
            let tokens = step(&mut hosts[m], &models[m], &fixtures[m].tokens, i);
            assert_eq!(tokens, alone[i], "step {i} of model {m}");
        }
    }
}

/// Runs the random step `i` of a host: a prompt, or a token of each sequence.
fn step(host: &mut TestHost, model: &TestModel, tokens: &[i32], i: usize) -> Vec<i32> {
    let mut numbers = StepSequence(i as u64);
    if i.is_multiple_of(10) {
        host.clear();
        let len = 3 + numbers.below(20);
        for first in 0..3 {
            host.add(&tokens[first..first + len]);
        }
    }
    let rows: Vec<HostRow> = (0..host.tokens.len())
        .map(|sequence| {
            let len = host.tokens[sequence].len();
            let start = if i.is_multiple_of(10) { 0 } else { len - 1 };
            HostRow { sequence, start, len: len - start }
        })
        .collect();
    let logits = host.run(model, &rows);
    let greedy = host.greedy(&logits);
    let mut end = 0;
    for row in &rows {
        end += row.len;
        host.tokens[row.sequence].push(greedy[end - 1]);
    }
    greedy
}
