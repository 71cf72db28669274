//! Layers that draft for another model (EAGLE-3), out of checkpoints of both spellings.

use crate::fixture::{DraftFixture, Fixture};
use crate::replay::{
    self, BLOCK_TOKENS, BLOCKS, POSITIONS, Place, Replay, Row, Sharing, difference, in_a_world,
    matrix, top,
};
use kernels::hip::Half;
use models::synth::{self, SynthDType, SynthOptions};
use models::{Config, Drafted, Eagle3, LoadFormat, LoadOptions, kv_layout, load_eagle3};
use ops::{DType, KvPool};
use std::fs;
use std::path::Path;

const NAMES: [&str; 2] = ["llama-eagle3", "qwen3_moe-eagle3-variants"];
/// CPU f32 against the reference: sums in another order.
const TOLERANCE: f32 = 1e-4;

/// A layer beside its model, with a pool of its own.
struct Layer<'a, 'b> {
    replay: &'b Replay<'a>,
    eagle: Eagle3,
    kv: KvPool,
}

/// What a pass makes: the logits of the layer's ids, and the states that go on.
struct Made {
    logits: Vec<Vec<f32>>,
    carried: Vec<Vec<f32>>,
}

/// Calls the layer as newer checkpoints do, in the header of the one file.
fn respell(file: &Path) {
    let bytes = fs::read(file).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = std::str::from_utf8(header).unwrap().replace("midlayer.", "layers.0.");
    let spelled = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    fs::write(file, spelled).unwrap();
}

impl<'a, 'b> Layer<'a, 'b> {
    /// Written and read again; `newer` as newer checkpoints spell it.
    fn load(replay: &'b Replay<'a>, fixture: &DraftFixture, target: &str, newer: bool) -> Self {
        let (dir, place) = (tempfile::tempdir().unwrap(), replay.place);
        let (source, out) = (dir.path().join("source.json"), dir.path().join("layer"));
        fs::write(&source, &fixture.config).unwrap();
        let (seed, dtype) = (fixture.seed, SynthDType::F32);
        let options = SynthOptions { seed, dtype, ..SynthOptions::default() };
        synth::write(&source, &out, &options, &mut |_, _| ()).unwrap();
        if newer {
            respell(&out.join("model.safetensors"));
        }
        let config = Config::from_dir(&out).unwrap();
        let target = Config::from_json(Path::new("config.json"), target).unwrap();
        let options = LoadOptions {
            ops: &replay.ops,
            ranks: place.ranks,
            placement: None,
            format: LoadFormat::Safetensors,
            kv_dtype: DType::F32,
            max_positions: POSITIONS,
            threads: 2,
            progress: &mut |_, _| (),
            digest: &mut protocol::WeightsDigest::default(),
        };
        let eagle = load_eagle3(&out, (&config, &target), options).unwrap();
        let (size, order) = ((BLOCKS, BLOCK_TOKENS), replay.ops.device().kv_order());
        let layout = kv_layout(&config, DType::F32, size, order, &place.ranks).unwrap();
        Self { replay, eagle, kv: KvPool::new(&replay.ops, layout).unwrap() }
    }

    /// The states of a row's tokens.
    fn states(&self, row: &Row) -> Vec<Vec<f32>> {
        let Self { replay, eagle, .. } = self;
        let taps = eagle.taps();
        replay.with(&[row], |f, ids| {
            let f = models::Forward { taps: Some(&taps), ..*f };
            replay.model.forward(&f, ids).unwrap()
        });
        matrix(&replay.ops, &taps.states().unwrap()).unwrap()
    }

    /// Drafts behind a row's tokens, given the states before them.
    fn draft(&self, row: &Row, before: &[Vec<f32>]) -> Made {
        let Self { replay, eagle, kv } = self;
        let mut states = Vec::new();
        let logits = replay.with_pool(kv, &[row], |f, ids| {
            let before = replay.tensor(before);
            let made = eagle.draft(f, (replay.model.as_ref(), ids), before).unwrap();
            let Drafted { hidden, carried } = made;
            states = matrix(&replay.ops, carried.as_ref().unwrap_or(&hidden)).unwrap();
            eagle.logits(f, &hidden).unwrap()
        });
        Made { logits, carried: states }
    }

    fn keep(&self, row: &Row, before: &[Vec<f32>]) {
        let Self { replay, eagle, kv } = self;
        replay.with_pool(kv, &[row], |f, ids| {
            let before = replay.tensor(before);
            eagle.keep(f, (replay.model.as_ref(), ids), &before).unwrap();
            before
        });
    }

    /// What the model calls the likeliest of the layer's ids.
    fn choice(&self, logits: &[f32]) -> i32 {
        let names = self.eagle.names().unwrap();
        self.replay.ops.read_f32(names).unwrap()[top(logits)] as i32
    }
}

fn matches_the_paper(place: &Place, fixture: &DraftFixture, newer: bool) {
    let base = Fixture::read(&fixture.model);
    let mut replay = Replay::load(place, &base, DType::F32);
    let [row, again, hidden] = [0; 3].map(|_| Row::new(&mut replay, &base.tokens));
    let layer = Layer::load(&replay, fixture, &base.config, newer);
    let states = layer.states(&row);
    assert!(
        replay.hidden(&hidden) == replay.hidden(&row),
        "a model that is watched computes the same"
    );
    let (behind, before) = (row.part(1, states.len() - 1), &states[..states.len() - 1]);
    let all = layer.draft(&behind, before).logits;
    let tokens: Vec<i32> = all.iter().map(|logits| layer.choice(logits)).collect();
    assert_eq!(tokens, fixture.tokens);
    let worst = difference(&all[all.len() - fixture.logits.len()..], &fixture.logits);
    assert!(worst <= TOLERANCE, "logits differ by {worst}");

    // Bit for bit, however it is cut; what the first position is given nobody sees.
    layer.keep(&again.part(0, 1), &[vec![7.0; states[0].len()]]);
    for (start, end) in [(1, 8), (8, 24), (24, 25), (25, 89), (89, states.len())] {
        let (part, before) = (again.part(start, end - start), &states[start - 1..end - 1]);
        if start % 2 == 0 {
            layer.keep(&part, before);
        } else {
            let logits = layer.draft(&part, before).logits;
            assert!(logits == all[start - 1..end - 1], "{start}..{end}");
        }
    }

    // Guesses behind guesses, which leave nothing that later ones see.
    for (at, chain) in &fixture.chains {
        let mut row = again.clone();
        let mut made = layer.draft(&row.part(1, *at), &states[..*at]);
        for (i, expected) in chain.iter().enumerate() {
            let last = made.logits.len() - 1;
            let guess = layer.choice(&made.logits[last]);
            assert_eq!(guess, *expected, "draft {i} behind {at}");
            let place = at + 1 + i;
            row.tokens.resize(row.tokens.len().max(place + 1), 0);
            row.tokens[place] = guess;
            made = layer.draft(&row.part(place, 1), &made.carried[last..]);
        }
    }
}

#[test]
fn drafts_match_the_paper() {
    if replay::on_a_gpu() {
        return; // There draft layers are held to the CPU by executor/tests/emulated.
    }
    for name in NAMES {
        let fixture = DraftFixture::read(name);
        matches_the_paper(&Place::alone(), &fixture, false);
        matches_the_paper(&Place::alone(), &fixture, true);
    }
    // Whose heads split evenly.
    let [dense, _] = NAMES.map(DraftFixture::read);
    in_a_world(2, Sharing::Parts, Half::BF16, |place| matches_the_paper(place, &dense, false));
}
