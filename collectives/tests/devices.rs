//! Groups whose ranks are GPUs: two emulated ones, each a copy of the emulator's library, or the first two of a machine:
//!
//! `HADRON_GPU=cuda cargo test --release -p collectives --test devices -- --include-ignored --nocapture --test-threads 1`
//!
//! (or `rocm`; `HADRON_GPU_FOLDERS` names folders of libraries that the loader does not find). The ignored one measures.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::print_stdout, reason = "figures are shown, not judged")]
#![allow(clippy::disallowed_methods, reason = "the environment names the GPUs")]

#[path = "../../kernels/tests/emulated/mod.rs"]
mod emulated;

use collectives::{CallState, Collective, CollectiveError, DeviceGroup, Meeting, SharedGroup};
use kernels::hip::{Api, HipConfig, HipDevice, Libraries};
use kernels::{Buffer, DType, Driver, Element, Kernels, Stream, bf16};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const S: Stream = Stream(0);
/// Longer than anything here may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// The GPU of a rank. Emulated worlds have names, because tests run side by side.
fn device(world: &str, rank: usize) -> HipConfig {
    let folders = std::env::var("HADRON_GPU_FOLDERS").unwrap_or_default();
    let folders = std::env::split_paths(&folders).collect();
    let cache_dir = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"));
    match std::env::var("HADRON_GPU").as_deref() {
        Ok("cuda") => HipConfig {
            libraries: Libraries::Cuda,
            folders,
            device: rank,
            cache_dir,
            emulated_wave: None,
        },
        Ok("rocm") => HipConfig { folders, device: rank, cache_dir, ..HipConfig::default() },
        _ => {
            let library = emulated::library_of(world, rank);
            let (driver, rtc, collectives) = (library.clone(), library.clone(), Some(library));
            let api = Api::Hip;
            HipConfig {
                libraries: Libraries::Named { api, driver, rtc, blas: None, collectives },
                cache_dir,
                emulated_wave: Some(64),
                ..HipConfig::default()
            }
        }
    }
}

/// One rank, and its device.
struct Rank {
    group: DeviceGroup,
    device: Arc<HipDevice>,
}

/// Runs `work` as both ranks of a group, each in a thread, and returns what each found.
fn ranks<T: Send>(world: &str, work: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let join = |own, device: &Arc<HipDevice>| DeviceGroup::join(own, device).unwrap();
    ranks_of(world, 2, join, work)
}

/// The same of `size` ranks that join as they are told.
fn ranks_of<T: Send>(
    world: &str,
    size: usize,
    join: impl Fn(SharedGroup, &Arc<HipDevice>) -> DeviceGroup + Sync,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let meeting = Meeting::create(&[size]).unwrap();
    let (join, work) = (&join, &work);
    thread::scope(|scope| {
        let rank = |rank| {
            let own = Meeting::open(meeting.path(), &[size]).unwrap();
            let config = device(world, rank);
            scope.spawn(move || {
                let device = Arc::new(HipDevice::open(&config).unwrap());
                let group = join(own.join(0, rank).unwrap(), &device);
                work(Rank { group, device })
            })
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Elements that are tested, and their bytes.
trait Plain: Element + PartialEq + std::fmt::Debug {
    fn of(value: i32) -> Self;
    fn bytes(self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($type:ty, $of:expr) => {
        impl Plain for $type {
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
plain!(f32, |value| value as f32);
plain!(i32, |value| value);
plain!(bf16, |value| bf16::from_f32(value as f32));

impl Rank {
    fn matrix<T: Plain>(
        &self,
        rows: usize,
        cols: usize,
        of: impl Fn(usize, usize) -> i32,
    ) -> Buffer {
        let all = (0..rows * cols).flat_map(|i| T::of(of(i / cols, i % cols)).bytes());
        let bytes: Vec<u8> = all.collect();
        let mut buffer = self.device.alloc(bytes.len()).unwrap();
        self.device.upload(&mut buffer, 0, &bytes).unwrap();
        buffer
    }

    fn read<T: Plain>(&self, buffer: &Buffer, count: usize) -> Vec<T> {
        let mut bytes = vec![0; count * T::DTYPE.bytes()];
        self.device.download(&S, buffer, 0, &mut bytes).unwrap();
        bytes.chunks_exact(T::DTYPE.bytes()).map(T::read).collect()
    }

    /// Runs `work`; then once more, recorded, and replays that. `work` must not build upon its results.
    fn twice(&self, mut work: impl FnMut()) {
        work();
        self.device.synchronize(&S).unwrap();
        self.device.begin_capture(&S).unwrap();
        self.group.begin_recording();
        work();
        let graph = self.device.end_capture(&S).unwrap();
        self.group.replayed(&self.group.end_recording()).unwrap();
        self.device.replay(&S, &graph).unwrap();
        self.group.barrier(&S).unwrap(); // Recordings end before the group.
    }
}

/// What rank `rank` brings; small, so that sums are whole numbers in every type.
fn value(rank: usize, row: usize, col: usize) -> i32 {
    ((rank * 31 + row * 7 + col * 3) % 23) as i32 - 11
}

fn sums<T: Plain>(world: &str, rows: usize, cols: usize) {
    ranks(world, |rank| {
        let own = rank.group.rank();
        let mut x = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        // The sum of two sums of two: recorded launches run on what the first have left.
        rank.twice(|| {
            rank.group.all_reduce(&S, x.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
        });
        let found = rank.read::<T>(&x, rows * cols);
        let sum = |i: usize| value(0, i / cols, i % cols) + value(1, i / cols, i % cols);
        let expected: Vec<T> = (0..rows * cols).map(|i| T::of(2 * sum(i))).collect();
        assert_eq!(found, expected);

        // Each rank has room for `most` rows and wants one less.
        let most = rows.div_ceil(2);
        let mut own_sums = rank.matrix::<T>(most, cols, |_, _| 99);
        let x = rank.matrix::<T>(2 * most, cols, |r, c| value(own, r, c));
        let wanted = most - 1;
        rank.twice(|| {
            let x = x.mat(T::DTYPE, 2 * most, cols).unwrap();
            let sums = own_sums.mat_mut(T::DTYPE, wanted, cols).unwrap();
            rank.group.reduce_scatter(&S, x, sums).unwrap();
        });
        let sum = |r, c| value(0, own * most + r, c) + value(1, own * most + r, c);
        let at = |i| if i < wanted * cols { sum(i / cols, i % cols) } else { 99 };
        let expected: Vec<T> = (0..most * cols).map(|i| T::of(at(i))).collect();
        assert_eq!(rank.read::<T>(&own_sums, most * cols), expected);
    });
}

#[test]
fn sums_are_those_of_all_ranks_launched_and_replayed() {
    sums::<f32>("sums", 5, 33);
    sums::<bf16>("sums", 5, 33);
    sums::<f32>("sums", 3, 40_000); // More than an emulated rank brings at a time.
}

fn gathers<T: Plain>(world: &str, rows: usize, cols: usize, total: usize) {
    ranks(world, |rank| {
        let own = rank.group.rank();
        let x = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        let x = x.mat(T::DTYPE, rows, cols).unwrap();
        let mut all = rank.matrix::<T>(rows, total, |_, _| 99);
        rank.twice(|| {
            rank.group.all_gather(&S, x, all.mat_mut(T::DTYPE, rows, total).unwrap()).unwrap();
        });
        let of = |i: usize| value(i % total / cols, i / total, i % total % cols);
        let expected: Vec<T> = (0..rows * total).map(|i| T::of(of(i))).collect();
        assert_eq!(rank.read::<T>(&all, rows * total), expected);

        let most = rows + 2;
        let brought = rows - own;
        let mut all = rank.matrix::<T>(2 * most, cols, |_, _| 99);
        rank.twice(|| {
            let below = all.mat_mut(T::DTYPE, 2 * most, cols).unwrap();
            rank.group.all_gather_rows(&S, x.rows_from(0, brought), below).unwrap();
        });
        let blank = if T::DTYPE == DType::I32 { -1 } else { 0 };
        let at = |row: usize, col| match (row / most, row % most) {
            (from, row) if row < rows - from => value(from, row, col),
            _ => blank,
        };
        let expected: Vec<T> =
            (0..2 * most * cols).map(|i| T::of(at(i / cols, i % cols))).collect();
        assert_eq!(rank.read::<T>(&all, 2 * most * cols), expected);

        let mut told = rank.matrix::<T>(rows, cols, |r, c| value(own, r, c));
        rank.twice(|| {
            rank.group.broadcast(&S, told.mat_mut(T::DTYPE, rows, cols).unwrap(), 1).unwrap();
        });
        let expected: Vec<T> =
            (0..rows * cols).map(|i| T::of(value(1, i / cols, i % cols))).collect();
        assert_eq!(rank.read::<T>(&told, rows * cols), expected);
    });
}

#[test]
fn what_ranks_bring_lies_side_by_side_or_below_each_other() {
    gathers::<f32>("gathers", 1, 64, 128);
    gathers::<f32>("gathers", 5, 64, 117);
    gathers::<bf16>("gathers", 3, 24, 41);
    gathers::<i32>("gathers", 4, 3, 6);
}

#[test]
fn rows_go_where_they_are_sent_and_are_not_recorded() {
    ranks("rows", |rank| {
        let (own, cols) = (rank.group.rank(), 5);
        let to = if own == 0 { [1, 3] } else { [2, 0] };
        let x = rank.matrix::<f32>(4, cols, |r, c| value(own, r, c));
        let mut y = rank.matrix::<f32>(4, cols, |_, _| 99);
        let sent: usize = to.iter().sum();
        let x = x.mat(DType::F32, 4, cols).unwrap().rows_from(0, sent);
        let came = rank.group.all_to_all(&S, x, &to, y.mat_mut(DType::F32, 4, cols).unwrap());
        let came = came.unwrap();
        assert_eq!(came, if own == 0 { [1, 2] } else { [3, 0] });
        let first = if own == 0 { [0, 0] } else { [1, 2] };
        let rows = (0..2).flat_map(|from| (0..came[from]).map(move |r| (from, first[from] + r)));
        let expected: Vec<f32> = rows
            .flat_map(|(from, row)| (0..cols).map(move |c| value(from, row, c) as f32))
            .collect();
        assert_eq!(rank.read::<f32>(&y, expected.len()), expected);

        rank.device.begin_capture(&S).unwrap();
        let refused = rank.group.all_to_all(&S, x, &to, y.mat_mut(DType::F32, 4, cols).unwrap());
        assert_eq!(refused, Err(CollectiveError::Recorded { collective: "all_to_all" }));
        rank.device.end_capture(&S).unwrap();
        assert!(rank.group.all_reduce(&S, y.mat_mut(DType::I32, 1, 1).unwrap()).is_err());
    });
}

/// The device of a rank would wait for good: what is under way ends, and nothing of it is believed.
#[test]
fn a_rank_that_leaves_ends_the_group() {
    let found = ranks("leaves", |rank| {
        let mut x = rank.matrix::<f32>(2, 8, |_, _| 1);
        rank.group.all_reduce(&S, x.mat_mut(DType::F32, 2, 8).unwrap()).unwrap();
        let before = rank.group.launched().unwrap();
        rank.group.barrier(&S).unwrap();
        assert_eq!(before.finish(), Ok(()));
        if rank.group.rank() == 1 {
            return None;
        }
        let launched = rank.group.all_reduce(&S, x.mat_mut(DType::F32, 2, 8).unwrap());
        let after = rank.group.launched().unwrap();
        let synchronized = rank.device.synchronize(&S);
        let started = Instant::now();
        while after.finish().is_ok() && started.elapsed() < PATIENCE {
            thread::yield_now();
        }
        let again = rank.group.barrier(&S);
        Some((launched, synchronized, after.finish(), again))
    });
    let (launched, _, finished, again) = found[0].clone().unwrap();
    let lost = Err(CollectiveError::Lost { rank: 1 });
    assert!(launched == Ok(()) || launched == lost, "{launched:?}");
    assert_eq!((finished, again), (lost.clone(), lost));
}

#[test]
fn calls_are_done_once_the_device_has_come_past_them() {
    let meeting = Meeting::create(&[2]).unwrap();
    let path = meeting.path();
    let join = |rank| {
        let (own, config) = (Meeting::open(path, &[2]).unwrap(), device("done", rank));
        let device = Arc::new(HipDevice::open(&config).unwrap());
        let group = DeviceGroup::join(own.join(0, rank).unwrap(), &device).unwrap();
        let mut x = device.alloc(4).unwrap();
        group.all_reduce(&S, x.mat_mut(DType::F32, 1, 1).unwrap()).unwrap();
        let launched = group.launched().unwrap();
        device.synchronize(&S).unwrap();
        (group, launched)
    };
    let ranks = thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        [join(0), other.join().unwrap()]
    });
    let states =
        |rank| -> Vec<CallState> { meeting.calls(0, rank).iter().map(|call| call.state).collect() };
    let [done, waiting] = [CallState::Done, CallState::Waiting];
    let calls = "the id, offers of memory, whether it was reached, and a sum";
    assert_eq!(states(0), [done, done, done, waiting], "{calls}");
    for (_, launched) in &ranks {
        launched.finish().unwrap();
    }
    assert_eq!([states(0), states(1)], [[CallState::Done; 4]; 2]);
}

/// What rank `rank` brings to sums whose bits depend on their order.
fn fraction(rank: usize, i: usize) -> f32 {
    let hash = (i as u32 ^ (rank as u32) << 20).wrapping_mul(0x9e37_79b1);
    (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77) as f32 / 2_f32.powi(31) - 1.0
}

/// An element and what it counts.
trait Real: Plain {
    fn round(x: f32) -> Self;
    fn number(self) -> f32;
}
impl Real for f32 {
    fn round(x: f32) -> Self {
        x
    }
    fn number(self) -> f32 {
        self
    }
}
impl Real for bf16 {
    fn round(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn number(self) -> f32 {
        self.to_f32()
    }
}

impl Rank {
    fn fractions<T: Real>(&self, rank: usize, count: usize) -> Buffer {
        let bytes: Vec<u8> = (0..count).flat_map(|i| T::round(fraction(rank, i)).bytes()).collect();
        let mut buffer = self.device.alloc(bytes.len()).unwrap();
        self.device.upload(&mut buffer, 0, &bytes).unwrap();
        buffer
    }

    /// Sums once, then as often as `replays` says out of a recording, fresh values each time.
    fn check_one_shot<T: Real>(&self, rows: usize, cols: usize, replays: usize) {
        let (own, size, count) = (self.group.rank(), self.group.size(), rows * cols);
        assert!(self.group.sums_in_one_shot(rows, cols, T::DTYPE), "no way between the GPUs");
        let sum = |i| {
            let parts = (0..size).map(|rank| T::round(fraction(rank, i)).number());
            T::round(parts.fold(0.0, |sum, x| sum + x))
        };
        let expected: Vec<T> = (0..count).map(sum).collect();
        let brought = self.fractions::<T>(own, count);
        let mut x = self.fractions::<T>(own, count);
        let view = |x: &mut Buffer| {
            self.group.all_reduce(&S, x.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
        };
        view(&mut x);
        assert_eq!(self.read::<T>(&x, count), expected, "{size} ranks, {rows} x {cols}");
        let mut bytes = vec![0; count * T::DTYPE.bytes()];
        self.device.download(&S, &brought, 0, &mut bytes).unwrap();
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
fn sums_in_one_shot_are_those_in_the_order_of_ranks() {
    let join = |own, device: &Arc<HipDevice>| DeviceGroup::join(own, device).unwrap();
    let work = |rank: Rank| {
        for (rows, cols) in [(1, 1), (3, 37), (2, 64), (5, 4096)] {
            rank.check_one_shot::<bf16>(rows, cols, 3);
            rank.check_one_shot::<f32>(rows, cols, 2);
        }
        assert!(!rank.group.sums_in_one_shot(1, (256 << 10) / 2 + 1, DType::BF16));
        assert!(!rank.group.sums_in_one_shot(1, 8, DType::I32));
    };
    ranks_of("one shot", 2, join, work);
    if std::env::var_os("HADRON_GPU").is_none() {
        ranks_of("one shot", 3, join, work);
    }
}

/// The sum over ranks, the sum with the stream and the norm are one launch with the bits of the two.
fn norms<T: Real>(rank: &Rank, rows: usize, cols: usize) {
    let (own, count) = (rank.group.rank(), rows * cols);
    assert!(rank.group.fuses_norm(rows, cols, T::DTYPE));
    let weight = rank.fractions::<T>(7, cols);
    let weight = weight.mat(T::DTYPE, 1, cols).unwrap();
    let run = |fused: bool| {
        let [mut delta, mut x] = [own, 9].map(|rank_of| rank.fractions::<T>(rank_of, count));
        let mut y = rank.device.alloc(count * T::DTYPE.bytes()).unwrap();
        let (to, stream) = (y.mat_mut(T::DTYPE, rows, cols), x.mat_mut(T::DTYPE, rows, cols));
        let (to, stream) = (to.unwrap(), stream.unwrap());
        if fused {
            let delta = delta.mat(T::DTYPE, rows, cols).unwrap();
            rank.group.all_reduce_norm(&S, (to, stream), delta, (weight, 1e-5)).unwrap();
        } else {
            rank.group.all_reduce(&S, delta.mat_mut(T::DTYPE, rows, cols).unwrap()).unwrap();
            let delta = delta.mat(T::DTYPE, rows, cols).unwrap();
            rank.device.add_rms_norm(&S, to, stream, delta, weight, 1e-5).unwrap();
        }
        (rank.read::<T>(&y, count), rank.read::<T>(&x, count))
    };
    let (fused, one_by_one) = (run(true), run(false));
    assert_eq!(fused.1, one_by_one.1, "the stream, {rows} x {cols}");
    assert_eq!(fused.0, one_by_one.0, "its norm, {rows} x {cols}");
    assert!(fused.0.iter().any(|y| y.number() != 0.0));
}

#[test]
fn a_sum_over_ranks_is_normed_in_the_same_launch() {
    ranks("norms", |rank| {
        for (rows, cols) in [(1, 8), (3, 96), (1, 4096), (6, 1024), (2, 8192)] {
            norms::<bf16>(&rank, rows, cols);
            norms::<f32>(&rank, rows, cols);
        }
        assert!(!rank.group.fuses_norm(1, 12, DType::BF16), "no whole eights");
        assert!(!rank.group.fuses_norm(1, 10_240, DType::BF16), "not in registers");
        rank.group.barrier(&S).unwrap();
    });
}

#[test]
fn processes_reach_the_memory_of_each_other() {
    let meeting = Meeting::create(&[2]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_child_of_another_test", "--ignored", "--nocapture"])
        .env("HADRON_TEST_MEETING", meeting.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    one_of_two_processes(&meeting, 0);
    assert!(child.wait().unwrap().success());
}

/// The other rank.
#[test]
#[ignore = "a process of processes_reach_the_memory_of_each_other"]
fn the_child_of_another_test() {
    let Some(path) = std::env::var_os("HADRON_TEST_MEETING") else { return };
    one_of_two_processes(&Meeting::open(path.as_ref(), &[2]).unwrap(), 1);
}

fn one_of_two_processes(meeting: &Meeting, rank: usize) {
    let device = Arc::new(HipDevice::open(&device("processes", rank)).unwrap());
    let group = DeviceGroup::join(meeting.join(0, rank).unwrap(), &device).unwrap();
    let rank = Rank { group, device };
    rank.check_one_shot::<bf16>(2, 1000, 4);
    norms::<bf16>(&rank, 2, 128);
    rank.group.barrier(&S).unwrap();
}

/// Microseconds of one of `CHAIN` launches, one by one and replayed. Launches before it have made everything ready.
fn time(rank: &Rank, mut launch: impl FnMut()) -> [f64; 2] {
    const CHAIN: usize = 20;
    let each = |since: Instant| since.elapsed().as_secs_f64() * 1e6 / CHAIN as f64;
    (0..3).for_each(|_| launch());
    rank.group.barrier(&S).unwrap();
    let started = Instant::now();
    (0..CHAIN).for_each(|_| launch());
    rank.device.synchronize(&S).unwrap();
    let launched = each(started);
    rank.device.begin_capture(&S).unwrap();
    (0..CHAIN).for_each(|_| launch());
    let graph = rank.device.end_capture(&S).unwrap();
    let mut replays: Vec<f64> = (0..10)
        .map(|_| {
            rank.group.barrier(&S).unwrap();
            let started = Instant::now();
            rank.device.replay(&S, &graph).unwrap();
            rank.device.synchronize(&S).unwrap();
            each(started)
        })
        .collect();
    rank.group.barrier(&S).unwrap();
    replays.sort_by(f64::total_cmp);
    [launched, replays[replays.len() / 2]]
}

/// Bytes of matrices that are summed in one shot to find out from where on it is no longer worth it.
const MEASURED_BYTES: usize = 1 << 20;

/// Sums of 8 KiB to 64 MiB, launch by launch and replayed: microseconds of one, and bytes over that time; in one shot
/// and by the library.
#[test]
#[ignore = "measures two GPUs, named by HADRON_GPU"]
fn all_reduce_speed() {
    let sums = |rank: Rank| {
        let mut x = rank.matrix::<f32>(1, (64 << 20) / 4, |_, _| 0);
        let kib = (3..17).map(|power| 1_usize << power);
        let mut table = Vec::new();
        for count in kib.map(|kib| kib * 1024 / 2) {
            if rank.group.sums_in_one_shot(1, 8, DType::BF16)
                && !rank.group.sums_in_one_shot(1, count, DType::BF16)
            {
                break;
            }
            table.push(time(&rank, || {
                let x = x.mat_mut(DType::BF16, 1, count).unwrap();
                rank.group.all_reduce(&S, x).unwrap();
            }));
        }
        table
    };
    let up_to = |bytes| {
        let join = move |own, device: &Arc<HipDevice>| {
            DeviceGroup::join_summing(own, device, bytes).unwrap()
        };
        ranks_of("speed", 2, join, sums).swap_remove(0)
    };
    let (library, own) = (up_to(0), up_to(MEASURED_BYTES));
    println!("{:>10} {:>24} {:>24} {:>10}", "KiB", "library: launched, graph", "one shot", "GB/s");
    for (i, [launched, replayed]) in library.iter().enumerate() {
        let kib = 8 << i;
        let best = own.get(i).map_or(*replayed, |own| own[1].min(*replayed));
        let own = own.get(i).map_or(String::new(), |own| format!("{:.1}, {:.1}", own[0], own[1]));
        let rate = f64::from(kib) * 1024.0 / best / 1e3;
        println!("{kib:10} {:>24} {own:>24} {rate:10.1}", format!("{launched:.1}, {replayed:.1}"));
    }
}

/// A sum over ranks with the residual sum and the norm behind it, rows of 4,096 in bf16: microseconds in a recording, by
/// the library and a norm, in one shot and a norm, and all in one launch.
#[test]
#[ignore = "measures two GPUs, named by HADRON_GPU"]
fn sum_and_norm_speed() {
    const COLS: usize = 4096;
    let rows = [1_usize, 2, 4, 8, 16, 32];
    let norms = |rank: Rank| {
        let [mut delta, mut x, mut y] = [(); 3].map(|()| rank.matrix::<bf16>(32, COLS, |_, _| 0));
        let weight = rank.matrix::<bf16>(1, COLS, |_, _| 1);
        let weight = weight.mat(DType::BF16, 1, COLS).unwrap();
        let mut table = Vec::new();
        for rows in rows {
            let mut norm = |fused: bool| {
                let [to, stream] = [&mut y, &mut x].map(|x| x.mat_mut(DType::BF16, rows, COLS));
                let (to, stream) = (to.unwrap(), stream.unwrap());
                if !fused {
                    let sum = delta.mat_mut(DType::BF16, rows, COLS).unwrap();
                    rank.group.all_reduce(&S, sum).unwrap();
                }
                let delta = delta.mat(DType::BF16, rows, COLS).unwrap();
                if fused {
                    rank.group.all_reduce_norm(&S, (to, stream), delta, (weight, 1e-5)).unwrap();
                } else {
                    rank.device.add_rms_norm(&S, to, stream, delta, weight, 1e-5).unwrap();
                }
            };
            let apart = time(&rank, || norm(false))[1];
            let fuses = rank.group.fuses_norm(rows, COLS, DType::BF16);
            let fused = if fuses { time(&rank, || norm(true))[1] } else { f64::NAN };
            table.push([apart, fused]);
        }
        table
    };
    let up_to = |bytes| {
        let join = move |own, device: &Arc<HipDevice>| {
            DeviceGroup::join_summing(own, device, bytes).unwrap()
        };
        ranks_of("speed", 2, join, norms).swap_remove(0)
    };
    let (library, own) = (up_to(0), up_to(MEASURED_BYTES));
    println!("{:>6} {:>10} {:>10} {:>10}", "rows", "library", "one shot", "fused");
    for ((rows, [library, _]), [own, fused]) in rows.iter().zip(library).zip(own) {
        println!("{rows:6} {library:10.2} {own:10.2} {fused:10.2}");
    }
}
