//! What identifies the weights that a rank has loaded: a digest of their bytes, made while they are read.
//!
//! Digests of tensors are added up, so the order of loading does not matter. Which sum a tensor counts in follows from
//! how ranks split it: [`WeightsDigest`] says which ranks must agree on each.

use super::Progress;
use super::checkpoint::Checkpoint;
use super::source::HostPart;
use crate::sharding::{Shard, Slice};
use ops::{MatrixWindow, digest_bytes};
use protocol::WeightsDigest;

/// Bytes at either end of a stored tensor that every rank looks at, whichever part of the tensor it loads.
const SAMPLE_BYTES: usize = 64;

/// What observes the loading of weights.
pub(crate) struct LoadObserver<'a> {
    /// Gets the bytes loaded so far.
    pub(crate) progress: Progress<'a>,
    /// Gets the digest of everything that is read added.
    pub(crate) digest: &'a mut WeightsDigest,
    /// Threads that make digests.
    pub(crate) threads: usize,
}

/// Adds the digest of a rank's part of a weight.
pub(super) fn add_part(digest: &mut WeightsDigest, shard: Shard, part: u64) {
    let sum = match shard {
        Shard::Replicated => &mut digest.common,
        Shard::VocabRows | Shard::Heads(_) | Shard::Cols | Shard::Rows(_) | Shard::OnFirst => {
            &mut digest.sharded
        }
        Shard::ExpertCols | Shard::ExpertRows => &mut digest.experts,
    };
    *sum = sum.wrapping_add(part);
}

/// Adds values that every rank reads whole, under the name of their tensor.
pub(super) fn add_common(digest: &mut WeightsDigest, name: &str, bytes: &[u8]) {
    let key = digest_bytes(name.as_bytes(), 0);
    digest.common = digest.common.wrapping_add(digest_bytes(bytes, key));
}

/// Adds samples of all tensors of a checkpoint: name, type, shape, and the bytes at both ends of each. Ranks that read
/// different files find out by them even where they load no tensor in common.
pub(crate) fn add_samples(digest: &mut WeightsDigest, checkpoint: &Checkpoint) {
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

impl HostPart<'_> {
    /// Digest of the rank's part of the weight `name`: what it is called, where it lies, its bytes and its scales.
    pub(crate) fn digest(&self, name: &str, threads: usize) -> u64 {
        let Slice { rows, cols, .. } = &self.slice;
        let key = format!("{name} {:?} {:?} {rows:?} {cols:?}", self.dtype, self.whole);
        let key = digest_bytes(key.as_bytes(), 0);
        let size = self.dtype.bytes();
        let window = MatrixWindow {
            bytes: &self.bytes,
            row_bytes: self.whole[1] * size,
            rows: rows.clone(),
            columns: cols.start * size..cols.end * size,
        };
        let scales = self.scales.as_ref().map_or(0, |scales| {
            let bytes: Vec<u8> = scales.values.iter().flat_map(|v| v.to_le_bytes()).collect();
            digest_bytes(&bytes, key)
        });
        // The key too, so that a part without bytes counts.
        key.wrapping_add(window.digest(key, threads)).wrapping_add(scales)
    }
}
