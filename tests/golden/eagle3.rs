//! Compares EAGLE-3 draft models with a reference. Checkpoints with both common schemes of tensor names are
//! loaded.

use std::fs;
use std::path::Path;

use device::gpu::HalfDtype;
use models::synth::{self, SynthDType, SynthOptions};
use models::{
    DraftPassOutput, Eagle3Model, KvGrouping, LoadFormat, ModelConfig, ModelLoadOptions, kv_layout,
    load_eagle3,
};
use ops::{DType, KvPool};

use crate::fixture::{DraftChain, Eagle3Fixture, GoldenFixture};
use crate::model_harness::{
    self, BLOCK_TOKENS, ModelHarness, POSITIONS, RankContext, SequenceRow, ShardingMode,
    difference, matrix, run_ranks, top,
};

const NAMES: [&str; 2] = ["llama-eagle3", "qwen3_moe-eagle3-variants"];
/// Maximum absolute difference between logits on the CPU in f32 and logits of the reference, which adds in
/// another order.
const TOLERANCE: f32 = 1e-4;

/// An EAGLE-3 draft layer for the target model in `harness`, with a separate KV pool.
struct Eagle3Harness<'a, 'b> {
    harness: &'b ModelHarness<'a>,
    eagle: Eagle3Model,
    kv: KvPool,
}

/// Output of one draft pass: logits over the draft vocabulary, and the hidden states for the next pass.
struct Eagle3Output {
    logits: Vec<Vec<f32>>,
    next_states: Vec<Vec<f32>>,
}

/// Renames the tensors in the header of a safetensors file as in newer EAGLE-3 checkpoints: `midlayer.`
/// becomes `layers.0.`.
fn rename_tensors(file: &Path) {
    let bytes = fs::read(file).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = std::str::from_utf8(header).unwrap().replace("midlayer.", "layers.0.");
    let renamed = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    fs::write(file, renamed).unwrap();
}

impl<'a, 'b> Eagle3Harness<'a, 'b> {
    /// Writes the checkpoint of the fixture and loads it. If `newer`, the tensors are renamed as in newer
    /// EAGLE-3 checkpoints.
    fn load(
        harness: &'b ModelHarness<'a>,
        fixture: &Eagle3Fixture,
        target: &str,
        newer: bool,
    ) -> Self {
        let (dir, rank_context) = (tempfile::tempdir().unwrap(), harness.rank_context);
        let (source, out) = (dir.path().join("source.json"), dir.path().join("layer"));
        fs::write(&source, &fixture.config).unwrap();
        let (seed, dtype) = (fixture.seed, SynthDType::F32);
        let options = SynthOptions { seed, dtype, ..SynthOptions::default() };
        synth::write(&source, &out, &options, &mut |_, _| ()).unwrap();
        if newer {
            rename_tensors(&out.join("model.safetensors"));
        }
        let config = ModelConfig::from_dir(&out).unwrap();
        let target = ModelConfig::from_json(Path::new("config.json"), target).unwrap();
        let kv_grouping = KvGrouping::single(&config);
        let options = ModelLoadOptions {
            ops: &harness.ops,
            ranks: rank_context.ranks,
            placement: None,
            format: LoadFormat::Safetensors,
            kv_dtype: DType::F32,
            kv_grouping: &kv_grouping,
            max_positions: POSITIONS,
            threads: 2,
            progress: &mut |_, _| (),
            digest: &mut protocol::WeightsDigest::default(),
        };
        let eagle = load_eagle3(&out, &config, &target, options).unwrap();
        let order = harness.ops.device().kv_order();
        let layout = kv_layout(
            &config,
            &kv_grouping,
            DType::F32,
            harness.blocks(),
            BLOCK_TOKENS,
            order,
            &rank_context.ranks,
        )
        .unwrap();
        Self { harness, eagle, kv: KvPool::new(&harness.ops, layout).unwrap() }
    }

    /// Runs the target model on a row; returns its auxiliary hidden states (the input of the EAGLE-3 layer)
    /// for each token.
    fn states(&self, row: &SequenceRow) -> Vec<Vec<f32>> {
        let Self { harness, eagle, .. } = self;
        let aux_states = eagle.aux_hidden_states();
        harness.with(&[row], |f, ids| {
            let f = models::ForwardContext { aux_hidden_states: Some(&aux_states), ..*f };
            harness.model.forward(&f, ids).unwrap()
        });
        matrix(&harness.ops, &aux_states.states().unwrap()).unwrap()
    }

    /// Runs a draft pass over a row's tokens. `before`: for each token, the hidden state of the previous
    /// token.
    fn draft(&self, row: &SequenceRow, before: &[Vec<f32>]) -> Eagle3Output {
        let Self { harness, eagle, kv } = self;
        let mut states = Vec::new();
        let logits = harness.with_pool(kv, &[row], |f, ids| {
            let before = harness.tensor(before);
            let output = eagle.draft(f, harness.model.as_ref(), ids, before).unwrap();
            let DraftPassOutput { hidden, next_hidden } = output;
            states = matrix(&harness.ops, next_hidden.as_ref().unwrap_or(&hidden)).unwrap();
            eagle.logits(f, &hidden).unwrap()
        });
        Eagle3Output { logits, next_states: states }
    }

    fn write_kv(&self, row: &SequenceRow, before: &[Vec<f32>]) {
        let Self { harness, eagle, kv } = self;
        harness.with_pool(kv, &[row], |f, ids| {
            let before = harness.tensor(before);
            eagle.write_kv_only(f, harness.model.as_ref(), ids, &before).unwrap();
            before
        });
    }

    /// Returns the draft token with the largest logit, as an id of the target vocabulary.
    fn top_draft_id(&self, logits: &[f32]) -> i32 {
        let target_ids = self.eagle.draft_to_target().unwrap();
        self.harness.ops.read_f32(target_ids).unwrap()[top(logits)] as i32
    }
}

fn matches_reference(rank_context: &RankContext, fixture: &Eagle3Fixture, newer: bool) {
    let base = GoldenFixture::read(&fixture.model);
    let mut harness = ModelHarness::load(rank_context, &base, DType::F32);
    let [row, again, hidden] = [0; 3].map(|_| SequenceRow::new(&mut harness, &base.tokens));
    let layer = Eagle3Harness::load(&harness, fixture, &base.config, newer);
    let states = layer.states(&row);
    assert!(
        harness.hidden(&hidden) == harness.hidden(&row),
        "reading auxiliary hidden states changes the results"
    );
    let (shifted, before) = (row.part(1, states.len() - 1), &states[..states.len() - 1]);
    let all = layer.draft(&shifted, before).logits;
    let tokens: Vec<i32> = all.iter().map(|logits| layer.top_draft_id(logits)).collect();
    assert_eq!(tokens, fixture.tokens);
    let worst = difference(&all[all.len() - fixture.logits.len()..], &fixture.logits);
    assert!(worst <= TOLERANCE, "logits differ by {worst}");

    // Logits are bit-exact for any chunking. The first position gets an arbitrary hidden state, which must
    // not affect later positions.
    layer.write_kv(&again.part(0, 1), &[vec![7.0; states[0].len()]]);
    for (start, end) in [(1, 8), (8, 24), (24, 25), (25, 89), (89, states.len())] {
        let (part, before) = (again.part(start, end - start), &states[start - 1..end - 1]);
        if start % 2 == 0 {
            layer.write_kv(&part, before);
        } else {
            let logits = layer.draft(&part, before).logits;
            assert!(logits == all[start - 1..end - 1], "{start}..{end}");
        }
    }

    // Each chain of draft tokens (each one computed from the previous draft token) matches the reference, and
    // the KV entries that it writes do not affect the next chain.
    for DraftChain { start: at, tokens: chain } in &fixture.chains {
        let mut row = again.clone();
        let mut pass = layer.draft(&row.part(1, *at), &states[..*at]);
        for (i, expected) in chain.iter().enumerate() {
            let last = pass.logits.len() - 1;
            let draft_token = layer.top_draft_id(&pass.logits[last]);
            assert_eq!(draft_token, *expected, "draft {i} after {at}");
            let position = at + 1 + i;
            row.tokens.resize(row.tokens.len().max(position + 1), 0);
            row.tokens[position] = draft_token;
            pass = layer.draft(&row.part(position, 1), &pass.next_states[last..]);
        }
    }
}

#[test]
fn eagle3_logits_match_the_reference() {
    if model_harness::on_a_gpu() {
        return; // On GPUs, draft models are compared with the CPU in executor/tests/emulated_gpu.
    }
    for name in NAMES {
        let fixture = Eagle3Fixture::read(name);
        matches_reference(&RankContext::single(), &fixture, false);
        matches_reference(&RankContext::single(), &fixture, true);
    }
    // In this fixture the numbers of heads are divisible by 2, so the layer can be sharded over two ranks.
    let [dense, _] = NAMES.map(Eagle3Fixture::read);
    run_ranks(2, ShardingMode::TensorParallel, HalfDtype::BF16, |rank_context| {
        matches_reference(rank_context, &dense, false);
    });
}
