//! Worker threads that hash bytes of weight files while the weights are packed and uploaded.

use super::checkpoint::SafetensorsCheckpoint;
use super::digest::{add_digest, add_part};
use super::header::StoredDType;
use super::source::HostWeightShard;
use super::tensor_plan::{StackedRowRange, WeightLocation};
use crate::sharding::{ShardSpec, WeightSlice};
use ops::HashedMatrixPart;
use protocol::WeightsDigest;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Maximum number of threads: more threads would reduce the memory bandwidth that is available for packing
/// and uploading weights.
const THREADS_MAX: usize = 4;
/// Number of hash blocks (about 1 MiB each, hashed separately) in one job. A large matrix is split into
/// several jobs, so that all threads end at about the same time.
const BLOCKS_PER_JOB: usize = 16;

/// Location of a part of a stored tensor that a rank loads and hashes.
#[derive(Debug, Clone)]
pub(super) struct WeightPartLocation {
    /// Checkpoint that contains the stored tensor.
    checkpoint: Arc<SafetensorsCheckpoint>,
    /// Name of the checkpoint tensor that contains the hashed part.
    stored: String,
    /// Byte range of the matrix that contains the part, within the stored tensor; a fused tensor contains
    /// several matrices.
    matrix: Range<usize>,
    /// Number of bytes of a row of the matrix.
    row_bytes: usize,
    /// Rows of the matrix that the rank loads.
    rows: Range<usize>,
    /// Byte range that the rank loads, within each row of the matrix.
    columns: Range<usize>,
}

impl WeightPartLocation {
    /// Returns the location of `part`, which is the slice `slice` of the weight at `location`.
    pub(super) fn new(
        checkpoint: &Arc<SafetensorsCheckpoint>,
        location: &WeightLocation,
        slice: &WeightSlice,
        part: &HostWeightShard<'_>,
    ) -> Self {
        let StackedRowRange { count, transposed, .. } = location.layout;
        let outputs = location.layout.span(slice);
        let (rows, columns, row_elements) = if transposed {
            (slice.cols.clone(), outputs, count)
        } else {
            (outputs, slice.cols.clone(), part.full_shape[1])
        };
        let size = part.dtype.bytes();
        let (row_bytes, columns) = match location.dtype {
            // MXFP4: two elements per byte, and rows end with a whole group.
            StoredDType::U8 => {
                (location.bytes.len() / count.max(1), columns.start / 2..columns.end.div_ceil(2))
            }
            _ => (row_elements * size, columns.start * size..columns.end * size),
        };
        Self {
            checkpoint: Arc::clone(checkpoint),
            stored: location.stored.clone(),
            matrix: location.bytes.clone(),
            row_bytes,
            rows,
            columns,
        }
    }

    /// Returns the part as a window of rows and columns in its matrix.
    ///
    /// # Panics
    /// Panics if the checkpoint does not contain the tensor or the byte range.
    fn window(&self) -> HashedMatrixPart<'_> {
        let stored = self.checkpoint.bytes(&self.stored).expect("the tensor has been located");
        HashedMatrixPart {
            bytes: &stored[self.matrix.clone()],
            row_bytes: self.row_bytes,
            rows: self.rows.clone(),
            columns: self.columns.clone(),
        }
    }
}

/// Job of a worker thread: it hashes the hash blocks with the indices `blocks` (about 1 MiB each) of one part
/// of a weight.
#[derive(Debug)]
struct DigestJob {
    part: Arc<WeightPartLocation>,
    blocks: Range<usize>,
    shard: ShardSpec,
    key: u64,
}

impl DigestJob {
    fn run(&self, digest: &mut WeightsDigest) {
        add_part(
            digest,
            self.shard,
            self.part.window().digest_blocks(self.blocks.clone(), self.key),
        );
    }
}

/// Queue of the jobs that no worker thread has taken yet.
#[derive(Debug, Default)]
struct DigestJobQueue {
    jobs: VecDeque<DigestJob>,
    is_closed: bool,
}

/// Queue of digest jobs that is shared by the worker threads.
#[derive(Debug, Default)]
struct SharedDigestQueue {
    queue: Mutex<DigestJobQueue>,
    changed: Condvar,
}

impl SharedDigestQueue {
    fn lock(&self) -> MutexGuard<'_, DigestJobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job; returns `None` once the queue is closed and empty.
    fn next(&self) -> Option<DigestJob> {
        let mut queue = self.lock();
        loop {
            match queue.jobs.pop_front() {
                Some(job) => return Some(job),
                None if queue.is_closed => return None,
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn run_all(&self) -> WeightsDigest {
        let mut digest = WeightsDigest::default();
        while let Some(job) = self.next() {
            job.run(&mut digest);
        }
        digest
    }
}

/// Worker threads that hash parts of weights. Dropping this value discards the parts that are not hashed yet.
#[derive(Debug)]
pub(super) struct DigestWorkers {
    shared: Arc<SharedDigestQueue>,
    threads: Vec<JoinHandle<WeightsDigest>>,
}

impl DigestWorkers {
    /// Starts up to `threads` worker threads. If no thread can be started, `finish` hashes all parts itself.
    pub(super) fn start(threads: usize) -> Self {
        let shared = Arc::new(SharedDigestQueue::default());
        let start = |_| {
            let shared = Arc::clone(&shared);
            let named = thread::Builder::new().name("weights-digest".to_owned());
            named.spawn(move || shared.run_all()).ok()
        };
        let threads = (0..threads.min(THREADS_MAX)).filter_map(start).collect();
        Self { shared, threads }
    }

    /// Queues the part `part` of a weight for hashing. Its digest, seeded with `key`, is added to the sum
    /// that the sharding `shard` of the weight selects.
    pub(super) fn add(&self, part: WeightPartLocation, shard: ShardSpec, key: u64) {
        let part = Arc::new(part);
        let count = part.window().blocks();
        let firsts = (0..count).step_by(BLOCKS_PER_JOB);
        let mut queue = self.shared.lock();
        queue.jobs.extend(firsts.map(|first| DigestJob {
            part: Arc::clone(&part),
            blocks: first..(first + BLOCKS_PER_JOB).min(count),
            shard,
            key,
        }));
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Waits until all parts are hashed and returns the sum of their digests.
    #[expect(clippy::disallowed_methods, reason = "the threads end with the queue")]
    pub(super) fn finish(mut self) -> WeightsDigest {
        self.close();
        let mut sum = self.shared.run_all();
        for thread in self.threads.drain(..) {
            add_digest(&mut sum, thread.join().expect("hashing cannot fail"));
        }
        sum
    }

    fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for DigestWorkers {
    fn drop(&mut self) {
        self.shared.lock().jobs.clear();
        self.close();
    }
}
