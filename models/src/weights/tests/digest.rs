//! Tests of the digest of the weights that a rank loads.

use super::{FILE, TestCheckpointFolder, TestTensor};
use crate::sharding::{ParallelRank, ParallelRanks};
use crate::weight_table::{TensorSpec, tensors};
use crate::weights::{WeightLoadObserver, WeightSource, digest, header, split};
use protocol::WeightsDigest;
use std::fs;

/// Digest of all weights that a rank loads from a folder. Tensors are loaded one by one, in the order in
/// which `sort` puts them.
fn loaded_in_order(
    folder: &TestCheckpointFolder,
    ranks: &ParallelRanks,
    threads: usize,
    sort: impl FnOnce(&mut Vec<TensorSpec>),
) -> WeightsDigest {
    let mut specs = tensors(&folder.config);
    let source = WeightSource::open(folder.path(), &folder.config, &specs).unwrap();
    let mut sum = WeightsDigest::default();
    let WeightSource::Files { checkpoint, .. } = &source else { panic!("a folder of files") };
    digest::add_samples(&mut sum, checkpoint);
    sort(&mut specs);
    let progress = &mut |_, _| ();
    let mut observer = WeightLoadObserver::new(progress, &mut sum, threads);
    for spec in &specs {
        let slice = split(spec, &folder.config, ranks).unwrap();
        let part = source.part(spec, slice.clone()).unwrap();
        observer.add(&source, spec, &slice, &part);
    }
    observer.finish();
    sum
}

fn loaded(folder: &TestCheckpointFolder, ranks: &ParallelRanks) -> WeightsDigest {
    loaded_in_order(folder, ranks, 1, |_| ())
}

fn rank(rank: usize, size: usize) -> ParallelRanks {
    ParallelRanks { tp: ParallelRank { rank, size }, ep: ParallelRank::SINGLE }
}

#[test]
fn order_and_threads_do_not_change_the_digest() {
    let folder = TestCheckpointFolder::new("Qwen3MoeForCausalLM", 1 << 30);
    let first = loaded(&folder, &ParallelRanks::SINGLE);
    assert!(first.common != 0 && first.sharded != 0 && first.experts != 0, "{first:?}");
    assert_eq!(loaded_in_order(&folder, &ParallelRanks::SINGLE, 1, |specs| specs.reverse()), first);
    let by_shape = |specs: &mut Vec<TensorSpec>| specs.sort_by_key(|spec| spec.shape.clone());
    assert_eq!(loaded_in_order(&folder, &ParallelRanks::SINGLE, 7, by_shape), first);
    // The second checkpoint stores the same tensors in several files.
    assert_eq!(
        loaded(&TestCheckpointFolder::new("Qwen3MoeForCausalLM", 1 << 14), &ParallelRanks::SINGLE),
        first
    );
}

#[test]
fn changed_byte_changes_the_digest_of_its_rank() {
    check_changed_bytes(&TestCheckpointFolder::new("Qwen3MoeForCausalLM", 1 << 30));
    check_changed_bytes(&super::gpt_oss::mxfp4());
}

/// Changes three bytes of each tensor; for one and for two ranks, the digest of a rank changes.
fn check_changed_bytes(folder: &TestCheckpointFolder) {
    let path = folder.path().join(FILE);
    let bytes = fs::read(&path).unwrap();
    for size in [1, 2] {
        let all = || (0..size).map(|r| loaded(folder, &rank(r, size))).collect::<Vec<_>>();
        let before = all();
        assert!(before.iter().all(|digest| digest.common == before[0].common));
        for (name, stored) in header::parse(&bytes).unwrap() {
            let (first, last) = (stored.bytes.start, stored.bytes.end - 1);
            for at in [first, usize::midpoint(first, last), last] {
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                fs::write(&path, changed).unwrap();
                assert_ne!(all(), before, "byte {at} of {name}, {size} ranks");
            }
        }
        fs::write(&path, &bytes).unwrap();
        assert_eq!(all(), before);
    }
}

#[test]
fn ranks_that_read_different_files_have_no_common_digest() {
    let (folder, other) = (
        TestCheckpointFolder::new("Qwen3ForCausalLM", 1 << 30),
        TestCheckpointFolder::new("Qwen3ForCausalLM", 1 << 30),
    );
    assert_eq!(loaded(&folder, &rank(0, 2)).common, loaded(&other, &rank(1, 2)).common);
    // Only matrices are changed, as in a fine-tuned model. No matrix is loaded by two ranks.
    other.edit(|map| {
        for TestTensor { shape, bytes, .. } in map.values_mut().filter(|t| t.shape.len() == 2) {
            assert!(shape.iter().product::<u64>() > 0);
            bytes.iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
        }
    });
    assert_ne!(loaded(&folder, &rank(0, 2)).common, loaded(&other, &rank(1, 2)).common);
}

#[test]
fn swapped_tensors_change_the_digest() {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", 1 << 30);
    let before = loaded(&folder, &ParallelRanks::SINGLE);
    folder.edit(|map| {
        let names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"];
        let [first, second] = names.map(|name| map[name].bytes.clone());
        map.get_mut(names[0]).unwrap().bytes = second;
        map.get_mut(names[1]).unwrap().bytes = first;
    });
    let after = loaded(&folder, &ParallelRanks::SINGLE);
    assert_ne!(after.sharded, before.sharded);
}

#[test]
fn model_and_draft_model_digests_differ() {
    let [one, two] = [1, 2].map(|n| WeightsDigest { common: n, sharded: n, experts: n });
    assert_ne!(one.with_draft(two), two.with_draft(one));
}

#[test]
fn digest_of_synthetic_weights_names_seed_and_part() {
    let folder = TestCheckpointFolder::new("Qwen3ForCausalLM", 1 << 30);
    let digest = |seed: u64, ranks: &ParallelRanks| {
        let source = WeightSource::Synth { seed, threads: 1 };
        let (mut sum, progress) = (WeightsDigest::default(), &mut |_, _| ());
        let mut observer = WeightLoadObserver::new(progress, &mut sum, 1);
        for spec in tensors(&folder.config).iter().filter(|spec| source.has(spec)) {
            let slice = split(spec, &folder.config, ranks).unwrap();
            let part = source.part(spec, slice.clone()).unwrap();
            observer.add(&source, spec, &slice, &part);
        }
        observer.finish();
        sum
    };
    let (first, second) = (digest(1, &rank(0, 2)), digest(1, &rank(1, 2)));
    assert_eq!(first.common, second.common);
    assert_ne!(first.sharded, second.sharded, "different shards of the weights");
    assert_eq!(digest(1, &rank(0, 2)), first);
    assert_ne!(digest(2, &rank(0, 2)).sharded, first.sharded);
}
