//! Sums over ranks in the memory that their GPUs share, in one launch of each: `csrc/one_shot/ranks.h`.

use super::check::{check_at_most, check_dtype, check_size};
use super::kernel_launch::KernelLaunch;
use super::kernel_source::{KernelDefine, KernelSource};
use super::peer_memory::{PeerMemory, area_bytes};
use crate::{DType, DeviceError, DeviceStream, MatMut, MatRef};

static ONE_SHOT_ALL_REDUCE: KernelSource = KernelSource {
    name: "one_shot/one_shot.hip",
    text: include_str!("../../csrc/one_shot/one_shot.hip"),
};

const NORM_KERNEL: &str = "one_shot_norm";
const THREADS: u32 = 256;
const EIGHT: usize = 8;
/// Eights of a row that a thread of the kernel with a norm keeps, at most.
const PIECES: usize = 2;

impl PeerMemory {
    /// Whether a matrix is summed here: the same answer on all ranks.
    #[must_use]
    pub fn fits(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        let bytes = rows * cols * dtype.bytes();
        (dtype == DType::F32 || dtype == self.device.half_dtype())
            && (1..=self.limit_bytes).contains(&bytes)
    }

    /// The same of a sum with [`PeerMemory::all_reduce_norm`].
    #[must_use]
    pub fn fits_norm(&self, rows: usize, cols: usize, dtype: DType) -> bool {
        let in_registers =
            cols.is_multiple_of(EIGHT) && cols <= PIECES * EIGHT * self.norm_threads(cols);
        in_registers && self.fits(rows, cols, dtype)
    }

    /// `x = Σ x` over the ranks; rows without gaps, of a shape that [`PeerMemory::fits`].
    pub fn all_reduce(&self, s: &DeviceStream, mut x: MatMut<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "one_shot";
        let (rows, cols, dtype) = (x.rows(), x.cols(), x.dtype());
        check_at_most(KERNEL, "bytes", rows * cols * dtype.bytes(), self.limit_bytes)?;
        let stride = if rows > 1 { x.stride() } else { cols };
        check_size(KERNEL, "elements between rows", stride, cols)?;
        let kernel =
            self.device.kernel(&ONE_SHOT_ALL_REDUCE, KERNEL, &self.defines(KERNEL, dtype)?)?;
        let blocks = (rows * cols).div_ceil(EIGHT * THREADS as usize);
        let launch = KernelLaunch::new(kernel, (self.blocks(blocks), 1, 1), THREADS, 0);
        let launch =
            self.rank_args(launch.overlaps_predecessor().out(&mut x)).u32((rows * cols) as u32);
        // SAFETY: the matrix has so many elements, and the areas room for them; the arguments are those of the kernel.
        unsafe { launch.launch(&self.device, s) }
    }

    /// `x += Σ delta` over the ranks, then `y = rms_norm(x)`, with the roundings of the two one by one: `x`, `y`,
    /// `delta [T, H]`, `norm` a weight `[H]` and ε; of a shape that [`PeerMemory::fits_norm`].
    pub fn all_reduce_norm(
        &self,
        s: &DeviceStream,
        (mut y, mut x): (MatMut<'_>, MatMut<'_>),
        delta: MatRef<'_>,
        (weight, eps): (MatRef<'_>, f32),
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = NORM_KERNEL;
        let (rows, cols, dtype) = (delta.rows(), delta.cols(), delta.dtype());
        check_norm((y.as_ref(), x.as_ref()), delta, weight)?;
        check_at_most(KERNEL, "bytes", rows * cols * dtype.bytes(), self.limit_bytes)?;
        let threads = self.norm_threads(cols);
        check_at_most(KERNEL, "columns", cols, PIECES * EIGHT * threads)?;
        let kernel =
            self.device.kernel(&ONE_SHOT_ALL_REDUCE, KERNEL, &self.defines(KERNEL, dtype)?)?;
        let launch = KernelLaunch::new(kernel, (self.blocks(rows), 1, 1), threads as u32, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .out(&mut x)
            .arg(delta)
            .arg(weight);
        let launch = self
            .rank_args(launch)
            .u32(rows as u32)
            .u32(cols as u32)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32)
            .u32(delta.stride() as u32)
            .f32(eps);
        // SAFETY: shapes and addresses were checked; the arguments are those of the kernel.
        unsafe { launch.launch(&self.device, s) }
    }

    fn defines(
        &self,
        kernel: &'static str,
        dtype: DType,
    ) -> Result<[KernelDefine; 2], DeviceError> {
        Ok([("ACT_F32", self.device.act_f32(kernel, dtype)?), ("RANKS", self.memory.len() as u32)])
    }

    /// All run at once: the same on all ranks, whose devices are alike.
    fn blocks(&self, wanted: usize) -> u32 {
        wanted.min(self.device.multiprocessors() as usize) as u32
    }

    fn norm_threads(&self, cols: usize) -> usize {
        self.device.norm_threads(cols) as usize
    }

    /// Adds what the kernels are told of ranks.
    fn rank_args(&self, launch: KernelLaunch) -> KernelLaunch {
        let (before, from_own) = self.memory.split_at(self.rank);
        let ordered = from_own[..1].iter().chain(before).chain(&from_own[1..]);
        let addresses: Vec<u64> = ordered.map(|&memory| memory as u64).collect();
        launch
            .arg_words(&addresses)
            .arg_ptr(self.count.as_ptr())
            .arg_ptr(self.aborted.as_ptr())
            .arg_words(&[area_bytes(self.limit_bytes) as u64])
            .u32(self.rank as u32)
    }
}

fn check_norm(
    (y, x): (MatRef<'_>, MatRef<'_>),
    delta: MatRef<'_>,
    weight: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = NORM_KERNEL;
    let (rows, cols, dtype) = (delta.rows(), delta.cols(), delta.dtype());
    for (what, found) in [("output", y), ("residual", x)] {
        check_size(KERNEL, "rows", found.rows(), rows)?;
        check_size(KERNEL, "columns", found.cols(), cols)?;
        check_dtype(KERNEL, what, found.dtype(), dtype)?;
    }
    check_size(KERNEL, "weight", weight.cols(), cols)?;
    check_dtype(KERNEL, "weight", weight.dtype(), dtype)?;
    check_size(KERNEL, "columns behind a multiple of eight", cols % EIGHT, 0)?;
    for x in [y, x, delta, weight] {
        let beyond = (x.as_ptr() as usize | (x.stride() * dtype.bytes())) % 16;
        check_size(KERNEL, "bytes behind a multiple of 16", beyond, 0)?;
    }
    Ok(())
}
