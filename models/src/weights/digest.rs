//! Digest of the weights that a rank has loaded. Worker threads compute it while the weights are packed and
//! uploaded.
//!
//! The digests of tensors are summed, so the order of loading does not matter. The sharding of a tensor
//! selects the sum to which its digest is added; [`WeightsDigest`] defines which ranks must have equal values
//! of each sum.

use super::LoadProgressCallback;
use super::checkpoint::SafetensorsCheckpoint;
use super::digest_workers::{DigestWorkers, WeightPartLocation};
use super::mxfp4::group_scales;
use super::source::{HostWeightShard, WeightSource};
use crate::sharding::{ShardSpec, WeightSlice};
use crate::weight_table::TensorSpec;
use ops::{ActivationScaling, DType, digest_bytes};
use protocol::WeightsDigest;

/// Number of bytes that every rank hashes at both ends of a stored tensor, even if the rank loads a different
/// part of the tensor or none.
const SAMPLE_BYTES: usize = 64;

/// Observer of weight loading: reports progress and adds each loaded weight to the digest.
pub(crate) struct WeightLoadObserver<'a> {
    /// Called with the number of bytes loaded so far and the total number of bytes.
    pub(crate) progress: LoadProgressCallback<'a>,
    /// Digest to which the digests of all loaded bytes are added.
    pub(crate) digest: &'a mut WeightsDigest,
    /// Worker threads that hash bytes of weight files.
    workers: Option<DigestWorkers>,
}

impl<'a> WeightLoadObserver<'a> {
    /// Creates an observer with up to `threads` worker threads.
    pub(crate) fn new(
        progress: LoadProgressCallback<'a>,
        digest: &'a mut WeightsDigest,
        threads: usize,
    ) -> Self {
        Self { progress, digest, workers: Some(DigestWorkers::start(threads)) }
    }

    /// Adds the digest of this rank's part of a weight: immediately for synthetic weights, by worker threads
    /// for weights from files. `slice` is the range of the whole weight that the rank loads.
    pub(super) fn add(
        &mut self,
        source: &WeightSource,
        spec: &TensorSpec,
        slice: &WeightSlice,
        part: &HostWeightShard<'_>,
    ) {
        // `key` is added in addition to the hash of the bytes, so that a part of zero bytes also changes the
        // digest.
        let key = part_key(spec, slice, part.dtype);
        match source {
            // Name, shape, slice, distribution and seed determine all values of a synthetic weight.
            WeightSource::Synth { seed, .. } => {
                let values = format!("{seed} {:?}", spec.values);
                let values = digest_bytes(values.as_bytes(), key);
                add_part(self.digest, spec.shard, key.wrapping_add(values));
            }
            WeightSource::Files { checkpoint, located } => {
                let location = located.get(&spec.name);
                let scales = match location.and_then(|at| group_scales(checkpoint, at, spec, slice))
                {
                    Some(scales) => digest_bytes(scales, key),
                    None => part.scales_digest(key),
                };
                add_part(self.digest, spec.shard, key.wrapping_add(scales));
                if let (Some(workers), Some(location)) = (&self.workers, location) {
                    let bytes = WeightPartLocation::new(checkpoint, location, slice, part);
                    workers.add(bytes, spec.shard, key);
                }
            }
        }
    }

    /// Waits for the worker threads and adds their digests.
    pub(super) fn finish(&mut self) {
        if let Some(workers) = self.workers.take() {
            add_digest(self.digest, workers.finish());
        }
    }
}

/// Adds `part`, the digest of this rank's part of a weight, to a sum in `digest`. The sharding `shard` of the
/// weight selects the sum.
pub(super) fn add_part(digest: &mut WeightsDigest, shard: ShardSpec, part: u64) {
    let sum = match shard {
        ShardSpec::Replicated => &mut digest.common,
        ShardSpec::VocabRows
        | ShardSpec::Heads(_)
        | ShardSpec::Cols
        | ShardSpec::Rows(_)
        | ShardSpec::FirstRankOnly => &mut digest.sharded,
        ShardSpec::ExpertCols | ShardSpec::ExpertRows | ShardSpec::ExpertFirstRank => {
            &mut digest.experts
        }
    };
    *sum = sum.wrapping_add(part);
}

/// Adds each sum in the digest `other` to the same sum in `sum`. `other` covers other bytes of the same
/// weights, or other weights of the model.
pub(super) fn add_digest(sum: &mut WeightsDigest, other: WeightsDigest) {
    sum.common = sum.common.wrapping_add(other.common);
    sum.sharded = sum.sharded.wrapping_add(other.sharded);
    sum.experts = sum.experts.wrapping_add(other.experts);
}

/// Adds the hash of a tensor and its name to `digest.common`, the sum for bytes that every rank reads.
pub(super) fn add_common(digest: &mut WeightsDigest, name: &str, bytes: &[u8]) {
    let key = digest_bytes(name.as_bytes(), 0);
    digest.common = digest.common.wrapping_add(digest_bytes(bytes, key));
}

/// Adds a hash to `digest.common` for every tensor of a checkpoint: the hash of the name, the dtype, the
/// shape, and the first and the last `SAMPLE_BYTES` bytes of the tensor. If ranks read different files, these
/// hashes differ even if no tensor is loaded by more than one rank.
pub(crate) fn add_samples(digest: &mut WeightsDigest, checkpoint: &SafetensorsCheckpoint) {
    for name in checkpoint.names() {
        let (Some(stored), Some(bytes)) = (checkpoint.get(name), checkpoint.bytes(name)) else {
            continue;
        };
        let length = bytes.len().min(SAMPLE_BYTES);
        let ends = [&bytes[..length], &bytes[bytes.len() - length..]].concat();
        let key = format!("sample {name} {} {:?}", stored.dtype.name(), stored.shape);
        add_common(digest, &key, &ends);
    }
}

/// Hash of a weight's name, dtype and shape, and of the range of the weight that the rank loads.
fn part_key(spec: &TensorSpec, slice: &WeightSlice, dtype: DType) -> u64 {
    let WeightSlice { rows, cols, .. } = slice;
    let key = format!("{} {dtype:?} {:?} {rows:?} {cols:?}", spec.name, spec.matrix());
    digest_bytes(key.as_bytes(), 0)
}

impl HostWeightShard<'_> {
    fn scales_digest(&self, key: u64) -> u64 {
        self.scales.as_ref().map_or(0, |scales| {
            let mut bytes: Vec<u8> = scales.values.iter().flat_map(|v| v.to_le_bytes()).collect();
            if let ActivationScaling::Static(scale) = self.activation_scaling {
                bytes.extend(scale.to_le_bytes());
            }
            digest_bytes(&bytes, key)
        })
    }
}
