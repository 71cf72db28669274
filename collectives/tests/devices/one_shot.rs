//! Tests of one-shot all-reduces through peer memory: the results must have the exact expected bits, between
//! threads and between processes.

use crate::deadlines::DeadlineBarrier;
use crate::emulated_gpu::bounded_child::{CHILD_TIMEOUT, wait_within};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use collectives::{
    AllReduceNormArgs, CollectiveBackend, DeviceGroup, PeerMemory, PeerMemoryRank,
    SharedMemoryRendezvous,
};
use device::gpu::PeerMemoryView;
use device::{Buffer, DType, DeviceDriver, bf16};
use kernels::gpu::GpuBackend;
use kernels::{AddRmsNorm, OneShotAllReduce};

use super::{CollectiveTestElement, DeviceTestRank, S, device, ranks, ranks_of, read, upload};

/// Input element of rank `rank`: a fraction. The bits of a sum of these fractions depend on the order of the
/// additions.
fn fraction(rank: usize, i: usize) -> f32 {
    let hash = (i as u32 ^ (rank as u32) << 20).wrapping_mul(0x9e37_79b1);
    (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77) as f32 / 2_f32.powi(31) - 1.0
}

/// Floating-point element type in a test, with conversions from and to f32.
trait FloatTestElement: CollectiveTestElement {
    fn round(x: f32) -> Self;
    fn number(self) -> f32;
}
impl FloatTestElement for f32 {
    fn round(x: f32) -> Self {
        x
    }
    fn number(self) -> f32 {
        self
    }
}
impl FloatTestElement for bf16 {
    fn round(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn number(self) -> f32 {
        self.to_f32()
    }
}

fn fractions<T: FloatTestElement>(device: &GpuBackend, rank: usize, count: usize) -> Buffer {
    let bytes: Vec<u8> = (0..count).flat_map(|i| T::round(fraction(rank, i)).bytes()).collect();
    upload(device, &bytes)
}

impl DeviceTestRank {
    fn fractions<T: FloatTestElement>(&self, rank: usize, count: usize) -> Buffer {
        fractions::<T>(&self.device, rank, count)
    }

    /// Runs one eager all-reduce, then `replays` replays of a captured graph, each with a new input, and
    /// checks the results.
    fn check_one_shot<T: FloatTestElement>(&self, rows: usize, cols: usize, replays: usize) {
        let (own, size, count) = (self.group.rank(), self.group.size(), rows * cols);
        assert!(
            self.group.uses_one_shot_all_reduce(rows, cols, T::DTYPE),
            "no peer access between the GPUs"
        );
        let sum = |i| {
            let parts = (0..size).map(|rank| T::round(fraction(rank, i)).number());
            T::round(parts.fold(0.0, |sum, x| sum + x))
        };
        let expected: Vec<T> = (0..count).map(sum).collect();
        let input = self.fractions::<T>(own, count);
        let mut x = self.fractions::<T>(own, count);
        let view = |x: &mut Buffer| {
            self.group.all_reduce(&S, x.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
        };
        view(&mut x);
        assert_eq!(self.read::<T>(&x, count), expected, "{size} ranks, {rows} x {cols}");
        let mut bytes = vec![0; count * T::DTYPE.bytes()];
        self.device.download(&S, &input, 0, &mut bytes).unwrap();
        self.device.begin_capture(&S).unwrap();
        view(&mut x);
        let graph = self.device.end_capture(&S).unwrap();
        for replay in 0..replays {
            self.device.upload(&mut x, 0, &bytes).unwrap();
            self.device.replay(&S, &graph).unwrap();
            assert_eq!(self.read::<T>(&x, count), expected, "replay {replay}");
        }
        self.group.barrier(&S).unwrap();
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the environment names the GPUs")]
fn one_shot_all_reduce_sums_in_rank_order() {
    let work = |rank: DeviceTestRank| {
        for (rows, cols) in [(1, 1), (3, 37), (2, 64), (5, 4096)] {
            rank.check_one_shot::<bf16>(rows, cols, 3);
            rank.check_one_shot::<f32>(rows, cols, 2);
        }
        let max_bytes = (1 << 20) / (rank.group.size() - 1) / 16 * 16;
        assert!(rank.group.uses_one_shot_all_reduce(1, max_bytes / 2, DType::BF16));
        assert!(!rank.group.uses_one_shot_all_reduce(1, max_bytes / 2 + 8, DType::BF16));
        assert!(!rank.group.uses_one_shot_all_reduce(1, 8, DType::I32));
    };
    ranks_of("one shot", 2, DeviceGroup::join, work);
    if std::env::var_os("HADRON_GPU").is_none() {
        ranks_of("one shot", 3, DeviceGroup::join, work);
    }
}

/// Checks that the fused kernel (all-reduce, residual addition and RMS norm) returns the same bits as two
/// launches, with norm weights of `W`.
fn check_fused_norm<T: FloatTestElement, W: FloatTestElement>(
    rank: &DeviceTestRank,
    rows: usize,
    cols: usize,
) {
    let (own, count) = (rank.group.rank(), rows * cols);
    assert!(rank.group.fuses_all_reduce_norm(rows, cols, T::DTYPE));
    let weight = rank.fractions::<W>(7, cols);
    let weight = weight.mat(W::DTYPE, 1, cols).unwrap();
    let run = |fused: bool| {
        let [mut delta, mut x] = [own, 9].map(|rank_of| rank.fractions::<T>(rank_of, count));
        let mut y = rank.device.alloc(count * T::DTYPE.bytes()).unwrap();
        let (y_mut, x_mut) = (y.mat_mut(T::DTYPE, rows, cols), x.mat_mut(T::DTYPE, rows, cols));
        let (y_mut, x_mut) = (y_mut.unwrap(), x_mut.unwrap());
        if fused {
            let delta = delta.mat(T::DTYPE, rows, cols).unwrap();
            let args = AllReduceNormArgs { y: y_mut, x: x_mut, delta, weight, eps: 1e-5 };
            rank.group.all_reduce_norm(&S, args).unwrap();
        } else {
            rank.group.all_reduce(&S, delta.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
            let delta = delta.mat(T::DTYPE, rows, cols).unwrap();
            let op = AddRmsNorm { y: y_mut, x: x_mut, delta, weight, eps: 1e-5 };
            rank.device.launch(&S, op).unwrap();
        }
        (rank.read::<T>(&y, count), rank.read::<T>(&x, count))
    };
    let (fused, separate) = (run(true), run(false));
    assert_eq!(fused.1, separate.1, "residual stream, {rows} x {cols}");
    assert_eq!(fused.0, separate.0, "norm, {rows} x {cols}");
    assert!(fused.0.iter().any(|y| y.number() != 0.0));
}

#[test]
fn fused_all_reduce_norm_matches_two_launches() {
    ranks("norms", |rank| {
        for (rows, cols) in [(1, 8), (3, 96), (1, 4096), (6, 1024), (2, 8192)] {
            check_fused_norm::<bf16, bf16>(&rank, rows, cols);
            check_fused_norm::<bf16, f32>(&rank, rows, cols);
            check_fused_norm::<f32, f32>(&rank, rows, cols);
        }
        assert!(
            !rank.group.fuses_all_reduce_norm(1, 12, DType::BF16),
            "not a multiple of eight columns"
        );
        assert!(
            !rank.group.fuses_all_reduce_norm(1, 10_240, DType::BF16),
            "too many columns for registers"
        );
        rank.group.barrier(&S).unwrap();
    });
}

#[test]
fn processes_access_each_others_peer_memory() {
    let rendezvous = SharedMemoryRendezvous::create(&[2]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_shot::peer_memory_child_process", "--ignored", "--nocapture"])
        .env("HADRON_TEST_RENDEZVOUS", rendezvous.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    run_one_of_two_processes(&rendezvous, 0);
    assert!(wait_within(&mut child, CHILD_TIMEOUT).success());
}

/// Second process of the test `processes_access_each_others_peer_memory`.
#[test]
#[ignore = "child process, started by processes_access_each_others_peer_memory"]
#[expect(clippy::disallowed_methods, reason = "the environment names the GPUs")]
fn peer_memory_child_process() {
    let Some(path) = std::env::var_os("HADRON_TEST_RENDEZVOUS") else { return };
    run_one_of_two_processes(&SharedMemoryRendezvous::open(path.as_ref(), &[2]).unwrap(), 1);
}

fn run_one_of_two_processes(rendezvous: &SharedMemoryRendezvous, rank: usize) {
    let device = Arc::new(GpuBackend::open(&device("processes", rank)).unwrap());
    let group = DeviceGroup::join(rendezvous.join(0, rank).unwrap(), &device).unwrap();
    let rank = DeviceTestRank { group, device, active_ranks: Arc::default() };
    rank.check_one_shot::<bf16>(2, 1000, 4);
    check_fused_norm::<bf16, bf16>(&rank, 2, 128);
    let _ = rank.group.barrier(&S); // The other process may exit as soon as it has passed the barrier.
}

/// One of two ranks that have peer memory, but no communicator.
struct PeerMemoryTestRank<'a> {
    rank: usize,
    device: &'a GpuBackend,
    memory: PeerMemory,
    view: PeerMemoryView,
}

/// Runs two ranks without a communicator, each in a separate thread. If `work` panics in one rank, the other rank
/// panics at the deadline of its wait.
fn run_two_peers<T: Send>(
    world: &str,
    work: impl Fn(PeerMemoryTestRank<'_>) -> T + Sync,
) -> [T; 2] {
    let (handles, barrier) = (Mutex::new([None; 2]), DeadlineBarrier::new(2));
    thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let (handles, barrier, work) = (&handles, &barrier, &work);
            scope.spawn(move || {
                let device = Arc::new(GpuBackend::open(&device(world, rank)).unwrap());
                let own = PeerMemoryRank { rank, ranks: 2 };
                let mut memory = PeerMemory::allocate(device.device(), own, 64 << 10).unwrap();
                handles.lock().unwrap()[rank] = Some(memory.handle());
                barrier.wait();
                let all = handles.lock().unwrap().map(Option::unwrap);
                let view = memory.open_peers(&all).unwrap();
                barrier.wait();
                let results = work(PeerMemoryTestRank { rank, device: &device, memory, view });
                barrier.wait(); // The memory must stay open while the other rank computes.
                results
            })
        });
        threads.map(|thread| thread.join().unwrap())
    })
}

impl PeerMemoryTestRank<'_> {
    /// Runs the all-reduce with launch number `launch`, and checks that it returns the sum of the inputs of
    /// both ranks.
    fn check_sum(&self, launch: usize, count: usize) -> bool {
        let value = |rank, i| bf16::from_f32(fraction(2 * launch + rank, i)).to_f32();
        let expected = (0..count).map(|i| bf16::from_f32(value(0, i) + value(1, i)));
        let mut x = fractions::<bf16>(self.device, 2 * launch + self.rank, count);
        let x_mut = x.mat_mut(DType::BF16, 1, count).unwrap();
        self.device.launch(&S, OneShotAllReduce { x: x_mut, peers: &self.view }).unwrap();
        read::<bf16>(self.device, &x, count).into_iter().eq(expected)
    }
}

/// Kernels tag their data in peer memory with the launch number. After its largest value, the launch number
/// continues with 2. Data of an earlier launch 2 must not be accepted as data of the new launch 2.
#[test]
fn launch_numbers_wrap_around() {
    const LARGE: usize = 4000;
    const SMALL: usize = 24;
    let done = DeadlineBarrier::new(2);
    let (sum_done, receiver) = mpsc::channel();
    let receiver = Mutex::new(receiver);
    let results = run_two_peers("numbers", |mut peer| {
        let mut correct = Vec::new();
        let mut sum = |peer: &PeerMemoryTestRank<'_>, count| {
            correct.push(peer.check_sum(correct.len(), count));
        };
        peer.memory.set_launch_count(3).unwrap();
        (0..2).for_each(|_| sum(&peer, LARGE)); // These are launches 4 and 5.
        done.wait();
        peer.memory.set_launch_count(u32::MAX - 3).unwrap();
        done.wait();
        (0..5).for_each(|_| sum(&peer, SMALL)); // The three largest numbers, then launches 2 and 3.
        if peer.rank == 1 {
            // Rank 1 delays launch 4. During this delay, rank 0 must not accept the data of the earlier
            // launch 4.
            let _ = receiver.lock().unwrap().recv_timeout(Duration::from_millis(300));
        }
        sum(&peer, LARGE);
        if peer.rank == 0 {
            sum_done.send(()).unwrap();
        }
        sum(&peer, LARGE);
        correct
    });
    assert_eq!(results, [vec![true; 9], vec![true; 9]]);
}
