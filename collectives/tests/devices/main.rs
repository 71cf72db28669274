//! Tests of groups of ranks that are GPUs. They run on two devices of the emulator, or on the first two GPUs of
//! a machine:
//!
//! `HADRON_GPU=cuda cargo test --release -p collectives --test devices -- --include-ignored --nocapture --test-threads 1`
//!
//! (`HADRON_GPU=rocm` selects AMD GPUs; `HADRON_GPU_FOLDERS` names library folders that the loader does not
//! search.) Ignored tests are benchmarks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "benchmarks print their results")]

mod all_reduce_speed;
#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
#[path = "../../../kernels/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
mod one_shot;

use std::sync::Arc;
use std::sync::atomic::AtomicIsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use collectives::{
    CollectiveBackend, CollectiveCallState, CollectiveError, DeviceGroup, SharedMemoryGroup,
    SharedMemoryRendezvous,
};
use deadlines::DeadlineBarrier;
use device::gpu::{GpuApi, GpuConfig, GpuLibrarySelection};
use device::{Buffer, DType, DeviceDriver, DeviceElement, DeviceStream, bf16};
use kernels::gpu::GpuBackend;

const S: DeviceStream = DeviceStream(0);
/// Timeout of a test; longer than any wait of a rank in the tests.
const TEST_TIMEOUT: Duration = Duration::from_mins(1);

/// Returns the configuration of the GPU of a rank. `world` is a name that identifies the emulated GPUs of a
/// test, because tests run concurrently.
#[expect(clippy::disallowed_methods, reason = "the environment names the GPUs")]
fn device(world: &str, rank: usize) -> GpuConfig {
    let folders = std::env::var("HADRON_GPU_FOLDERS").unwrap_or_default();
    let folders = std::env::split_paths(&folders).collect();
    let cache_dir = Some(emulated_gpu::kernel_cache());
    match std::env::var("HADRON_GPU").as_deref() {
        Ok("cuda") => GpuConfig {
            libraries: GpuLibrarySelection::Cuda,
            folders,
            device: rank,
            cache_dir,
            ..GpuConfig::default()
        },
        Ok("rocm") => GpuConfig { folders, device: rank, cache_dir, ..GpuConfig::default() },
        _ => {
            let library = emulated_gpu::library_of(world);
            let (driver, rtc, collectives) = (library.clone(), library.clone(), Some(library));
            let api = GpuApi::Hip;
            GpuConfig {
                libraries: GpuLibrarySelection::Named { api, driver, rtc, blas: None, collectives },
                device: rank,
                cache_dir,
                emulated_warp_size: Some(64),
                ..GpuConfig::default()
            }
        }
    }
}

/// One rank of a test with its GPU. All ranks of a test are dropped together, so that no rank reports an
/// exited peer after the last barrier.
struct DeviceTestRank {
    group: DeviceGroup,
    device: Arc<GpuBackend>,
    /// Number of ranks of the test that have not finished, including this rank.
    active_ranks: Arc<AtomicIsize>,
}

impl Drop for DeviceTestRank {
    fn drop(&mut self) {
        self.active_ranks.fetch_sub(1, SeqCst);
        let started = Instant::now();
        while self.active_ranks.load(SeqCst) > 0
            && !thread::panicking()
            && started.elapsed() < TEST_TIMEOUT
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs `work` on the two ranks of a group, each in a separate thread, and returns the results. `world` is a
/// name that identifies the emulated GPUs.
fn ranks<T: Send>(world: &str, work: impl Fn(DeviceTestRank) -> T + Sync) -> Vec<T> {
    ranks_of(world, 2, DeviceGroup::join, work)
}

/// Runs `work` on two ranks, with one-shot all-reduces for matrices of up to `one_shot_bytes` bytes; 0
/// disables one-shot all-reduces.
fn ranks_with_one_shot_limit<T: Send>(
    world: &str,
    one_shot_bytes: usize,
    work: impl Fn(DeviceTestRank) -> T + Sync,
) -> Vec<T> {
    let join = |own, device: &_| {
        DeviceGroup::join_with_custom_all_reduce_limit(own, device, one_shot_bytes)
    };
    ranks_of(world, 2, join, |rank: DeviceTestRank| {
        let has_one_shot = rank.group.uses_one_shot_all_reduce(1, 8, DType::BF16);
        assert_eq!(has_one_shot, one_shot_bytes > 0, "{:?}", rank.group.peer_access_error());
        work(rank)
    })
}

/// Runs `work` on `size` ranks, each in a separate thread. Each rank joins the group with the function
/// `join`.
fn ranks_of<T: Send>(
    world: &str,
    size: usize,
    join: impl Fn(SharedMemoryGroup, &Arc<GpuBackend>) -> Result<DeviceGroup, CollectiveError> + Sync,
    work: impl Fn(DeviceTestRank) -> T + Sync,
) -> Vec<T> {
    let rendezvous = SharedMemoryRendezvous::create(&[size]).unwrap();
    let (join, work) = (&join, &work);
    let active_ranks = Arc::new(AtomicIsize::new(size as isize));
    thread::scope(|scope| {
        let rank = |rank| {
            let own = SharedMemoryRendezvous::open(rendezvous.path(), &[size]).unwrap();
            let (config, active_ranks) = (device(world, rank), Arc::clone(&active_ranks));
            scope.spawn(move || {
                let device = Arc::new(GpuBackend::open(&config).unwrap());
                let group = join(own.join(0, rank).unwrap(), &device).unwrap();
                work(DeviceTestRank { group, device, active_ranks })
            })
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Element type in a test, with conversions from integers and to and from bytes.
trait CollectiveTestElement: DeviceElement + PartialEq + std::fmt::Debug {
    fn of(value: i32) -> Self;
    fn bytes(self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! impl_test_element {
    ($type:ty, $of:expr) => {
        impl CollectiveTestElement for $type {
            fn of(value: i32) -> Self {
                $of(value)
            }
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn read(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    };
}
impl_test_element!(f32, |value| value as f32);
impl_test_element!(i32, |value| value);
impl_test_element!(bf16, |value| bf16::from_f32(value as f32));

fn upload(device: &GpuBackend, bytes: &[u8]) -> Buffer {
    let mut buffer = device.alloc(bytes.len()).unwrap();
    device.upload(&mut buffer, 0, bytes).unwrap();
    buffer
}

/// Downloads `count` elements of a buffer after all launches have completed.
fn read<T: CollectiveTestElement>(device: &GpuBackend, buffer: &Buffer, count: usize) -> Vec<T> {
    let mut bytes = vec![0; count * T::DTYPE.bytes()];
    device.download(&S, buffer, 0, &mut bytes).unwrap();
    bytes.chunks_exact(T::DTYPE.bytes()).map(T::read).collect()
}

impl DeviceTestRank {
    fn matrix<T: CollectiveTestElement>(
        &self,
        rows: usize,
        cols: usize,
        of: impl Fn(usize, usize) -> i32,
    ) -> Buffer {
        let all = (0..rows * cols).flat_map(|i| T::of(of(i / cols, i % cols)).bytes());
        upload(&self.device, &all.collect::<Vec<u8>>())
    }

    fn read<T: CollectiveTestElement>(&self, buffer: &Buffer, count: usize) -> Vec<T> {
        read(&self.device, buffer, count)
    }

    /// Runs `work` eagerly, then captures it into a graph and replays the graph. `work` is therefore executed
    /// twice; an in-place operation is applied to its own result.
    fn run_eager_and_replayed(&self, mut work: impl FnMut()) {
        work();
        self.device.synchronize(&S).unwrap();
        self.device.begin_capture(&S).unwrap();
        self.group.begin_capture();
        work();
        let graph = self.device.end_capture(&S).unwrap();
        self.group.on_replayed(&self.group.end_capture()).unwrap();
        self.device.replay(&S, &graph).unwrap();
        self.group.barrier(&S).unwrap(); // All replays must end before the group ends.
    }
}

/// Input element of rank `rank`: a small integer, so that sums are exact in every type.
fn value(rank: usize, row: usize, col: usize) -> i32 {
    ((rank * 31 + row * 7 + col * 3) % 23) as i32 - 11
}

fn check_sums<T: CollectiveTestElement>(world: &str, rows: usize, cols: usize) {
    ranks(world, |rank| {
        let own = rank.group.rank();
        let mut x = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        // `work` computes an in-place all-reduce, so the input of the replay is the output of the eager
        // all-reduce.
        rank.run_eager_and_replayed(|| {
            rank.group.all_reduce(&S, x.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
        });
        let found = rank.read::<T>(&x, rows * cols);
        let sum = |i: usize| value(0, i / cols, i % cols) + value(1, i / cols, i % cols);
        let expected: Vec<T> = (0..rows * cols).map(|i| T::of(2 * sum(i))).collect();
        assert_eq!(found, expected);

        // The input has `max_rows` rows for each rank; each rank receives one row less.
        let max_rows = rows.div_ceil(2);
        let mut own_sums = rank.matrix::<T>(max_rows, cols, |_, _| 99);
        let x = rank.matrix::<T>(2 * max_rows, cols, |r, c| value(own, r, c));
        let row_count = max_rows - 1;
        rank.run_eager_and_replayed(|| {
            let x = x.mat(T::DTYPE, 2 * max_rows, cols).unwrap();
            let sums = own_sums.mat_mut(T::DTYPE, row_count, cols).unwrap();
            rank.group.reduce_scatter(&S, x, sums).unwrap();
        });
        let sum = |r, c| value(0, own * max_rows + r, c) + value(1, own * max_rows + r, c);
        let at = |i| if i < row_count * cols { sum(i / cols, i % cols) } else { 99 };
        let expected: Vec<T> = (0..max_rows * cols).map(|i| T::of(at(i))).collect();
        assert_eq!(rank.read::<T>(&own_sums, max_rows * cols), expected);
    });
}

#[test]
fn all_reduce_matches_eager_and_replayed() {
    check_sums::<f32>("sums", 5, 33);
    check_sums::<bf16>("sums", 5, 33);
    check_sums::<f32>("sums", 3, 40_000); // The matrix exceeds the chunk size of an emulated rank.
}

fn check_gathers<T: CollectiveTestElement>(world: &str, rows: usize, cols: usize, total: usize) {
    ranks(world, |rank| {
        let own = rank.group.rank();
        let x = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        let x = x.mat(T::DTYPE, rows, cols).unwrap();
        let mut all = rank.matrix::<T>(rows, total, |_, _| 99);
        rank.run_eager_and_replayed(|| {
            rank.group.all_gather(&S, x, all.mat_mut(T::DTYPE, rows, total).unwrap()).unwrap();
        });
        let of = |i: usize| value(i % total / cols, i / total, i % total % cols);
        let expected: Vec<T> = (0..rows * total).map(|i| T::of(of(i))).collect();
        assert_eq!(rank.read::<T>(&all, rows * total), expected);

        let max_rows = rows + 2;
        let row_count = rows - own;
        let mut all = rank.matrix::<T>(2 * max_rows, cols, |_, _| 99);
        rank.run_eager_and_replayed(|| {
            let gathered = all.mat_mut(T::DTYPE, 2 * max_rows, cols).unwrap();
            rank.group.all_gather_rows(&S, x.rows_from(0, row_count), gathered).unwrap();
        });
        let padding = if T::DTYPE == DType::I32 { -1 } else { 0 };
        let at = |row: usize, col| match (row / max_rows, row % max_rows) {
            (from, row) if row < rows - from => value(from, row, col),
            _ => padding,
        };
        let expected: Vec<T> =
            (0..2 * max_rows * cols).map(|i| T::of(at(i / cols, i % cols))).collect();
        assert_eq!(rank.read::<T>(&all, 2 * max_rows * cols), expected);

        let mut shared = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        rank.run_eager_and_replayed(|| {
            rank.group.broadcast(&S, shared.mat_mut(T::DTYPE, rows, cols).unwrap(), 1).unwrap();
        });
        let expected: Vec<T> =
            (0..rows * cols).map(|i| T::of(value(1, i / cols, i % cols))).collect();
        assert_eq!(rank.read::<T>(&shared, rows * cols), expected);
    });
}

#[test]
fn all_gather_concatenates_columns_or_rows() {
    check_gathers::<f32>("gathers", 1, 64, 128);
    check_gathers::<f32>("gathers", 5, 64, 117);
    check_gathers::<bf16>("gathers", 3, 24, 41);
    check_gathers::<i32>("gathers", 4, 3, 6);
}

/// A rank that neither sends nor receives rows makes no library call; the other rank must not wait for this
/// rank.
#[test]
fn all_to_all_handles_one_sided_and_chunked_rows() {
    ranks("one-sided", |rank| {
        let (own, cols) = (rank.group.rank(), 9_000);
        for to in [[[2, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [2, 0]], [[1, 2], [2, 1]]] {
            let rows = to[own].iter().sum();
            let x = rank.matrix::<f32>(3, cols, |r, c| value(own, r, c));
            let x = x.mat(DType::F32, 3, cols).unwrap().rows_from(0, rows);
            let mut y = rank.matrix::<f32>(3, cols, |_, _| 99);
            let counts = rank.group.exchange_counts(&to[own]).unwrap();
            let all = y.mat_mut(DType::F32, 3, cols).unwrap();
            rank.group.all_to_all(&S, x, all, &counts).unwrap();
            let first = |from: usize| if own == 0 { 0 } else { to[from][0] };
            let received = (0..2).flat_map(|from| (0..to[from][own]).map(move |r| (from, r)));
            let expected: Vec<f32> = received
                .flat_map(|(from, r)| {
                    (0..cols).map(move |c| value(from, first(from) + r, c) as f32)
                })
                .collect();
            assert_eq!(rank.read::<f32>(&y, expected.len()), expected, "{to:?}");
        }
    });
}

#[test]
fn all_to_all_delivers_rows_and_rejects_capture() {
    ranks("rows", |rank| {
        let (own, cols) = (rank.group.rank(), 5);
        let to = if own == 0 { [1, 3] } else { [2, 0] };
        let x = rank.matrix::<f32>(4, cols, |r, c| value(own, r, c));
        let mut y = rank.matrix::<f32>(4, cols, |_, _| 99);
        let sent: usize = to.iter().sum();
        let x = x.mat(DType::F32, 4, cols).unwrap().rows_from(0, sent);
        let counts = rank.group.exchange_counts(&to).unwrap();
        let all = y.mat_mut(DType::F32, 4, cols).unwrap();
        rank.group.all_to_all(&S, x, all, &counts).unwrap();
        let received = [0, 1].map(|from| counts.rows_from(from)[own]);
        assert_eq!(received, if own == 0 { [1, 2] } else { [3, 0] });
        let first = if own == 0 { [0, 0] } else { [1, 2] };
        let rows =
            (0..2).flat_map(|from| (0..received[from]).map(move |r| (from, first[from] + r)));
        let expected: Vec<f32> = rows
            .flat_map(|(from, row)| (0..cols).map(move |c| value(from, row, c) as f32))
            .collect();
        assert_eq!(rank.read::<f32>(&y, expected.len()), expected);

        rank.device.begin_capture(&S).unwrap();
        let not_capturable = |collective| CollectiveError::NotCapturable { collective };
        let all = y.mat_mut(DType::F32, 4, cols).unwrap();
        let rejected = rank.group.all_to_all(&S, x, all, &counts);
        assert_eq!(rejected, Err(not_capturable("all_to_all")));
        assert_eq!(rank.group.exchange_counts(&to), Err(not_capturable("exchange_counts")));
        rank.device.end_capture(&S).unwrap();
        assert!(rank.group.all_reduce(&S, y.mat_mut(DType::I32, 1, 1).unwrap()).is_err());
    });
}

/// Rank 1 leaves during an operation. Without an abort, the device of rank 0 would wait forever. The
/// operation in flight must end, and `LaunchedCollectives::finish` must return an error, because the results
/// are undefined.
#[test]
fn leaving_rank_fails_the_device_group() {
    check_rank_leaves("leaves", 64 << 10);
    check_rank_leaves("leaves", 0);
}

fn check_rank_leaves(world: &str, one_shot_bytes: usize) {
    let after_barrier = DeadlineBarrier::new(2);
    let results = ranks_with_one_shot_limit(world, one_shot_bytes, |rank| {
        let mut x = rank.matrix::<f32>(2, 8, |_, _| 1);
        rank.group.all_reduce(&S, x.mat_mut(DType::F32, 2, 8).unwrap()).unwrap();
        let before = rank.group.launch_checkpoint().unwrap();
        rank.group.barrier(&S).unwrap();
        assert_eq!(before.finish(), Ok(()));
        after_barrier.wait();
        if rank.group.rank() == 1 {
            rank.active_ranks.store(1, SeqCst); // Skips the wait of `drop` for the other rank.
            return None;
        }
        let launched = rank.group.all_reduce(&S, x.mat_mut(DType::F32, 2, 8).unwrap());
        let after = rank.group.launch_checkpoint().unwrap();
        let synchronized = rank.device.synchronize(&S);
        let started = Instant::now();
        while after.finish().is_ok() && started.elapsed() < TEST_TIMEOUT {
            thread::yield_now();
        }
        let again = rank.group.barrier(&S);
        Some((launched, synchronized, after.finish(), again))
    });
    let (launched, _, finished, again) = results[0].clone().unwrap();
    let failed = Err(CollectiveError::RankFailed { rank: 1 });
    assert!(launched == Ok(()) || launched == failed, "{launched:?}");
    assert_eq!((finished, again), (failed.clone(), failed));
}

#[test]
fn calls_are_done_after_the_device_passes_them() {
    let rendezvous = SharedMemoryRendezvous::create(&[2]).unwrap();
    let path = rendezvous.path();
    let join = |rank| {
        let (own, config) =
            (SharedMemoryRendezvous::open(path, &[2]).unwrap(), device("done", rank));
        let device = Arc::new(GpuBackend::open(&config).unwrap());
        let group = DeviceGroup::join(own.join(0, rank).unwrap(), &device).unwrap();
        let mut x = device.alloc(4).unwrap();
        group.all_reduce(&S, x.mat_mut(DType::F32, 1, 1).unwrap()).unwrap();
        let launched = group.launch_checkpoint().unwrap();
        device.synchronize(&S).unwrap();
        (group, launched)
    };
    let ranks = thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        [join(0), other.join().unwrap()]
    });
    let states = |rank| -> Vec<CollectiveCallState> {
        rendezvous.call_history(0, rank).iter().map(|call| call.state).collect()
    };
    let [done, in_flight] = [CollectiveCallState::Done, CollectiveCallState::InProgress];
    let calls = "communicator id, peer memory handles, peer access, all-reduce";
    assert_eq!(states(0), [done, done, done, in_flight], "{calls}");
    for (_, launched) in &ranks {
        launched.finish().unwrap();
    }
    assert_eq!([states(0), states(1)], [[CollectiveCallState::Done; 4]; 2]);
}
