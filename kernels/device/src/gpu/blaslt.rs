//! GEMM with hipBLASLt or cuBLASLt: `y = x Wᵀ (+ bias)` for row-major `x [M, K]`, `W [N, K]` and `y [M, N]`,
//! where M is the number of rows, K the number of input features and N the number of output features.
//!
//! BLASLt libraries are column-major: they compute `yᵀ = W xᵀ` with `W` transposed, and the bias has one
//! element per row of `yᵀ`. The heuristic is queried once per problem, with `M` rounded up to the end of its
//! bucket (range of `M`), so that captured launches and later launches use the same algorithm. For small `M`,
//! the first algorithms that the heuristic returns are autotuned, because the algorithm that it ranks first
//! may be up to 10 times slower than the fastest. A problem for which the library has no algorithm is also
//! cached.
//!
//! For f32 inputs, split-K is disabled in cuBLASLt by a preference attribute, because with split-K the last
//! bits of a row depend on the number of rows. hipBLASLt has no such attribute.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use hip_runtime_sys::{
    BlasDataType, BlasLtApi, BlasLtConstants, DriverPtr, LibraryOpenError, LibrarySearchPaths,
};

use super::autotune::AutotuneTimer;
use super::error::GpuError;
use super::gpu_runtime::{GpuRuntime, STREAMS};
use super::memory::ScratchMemory;
use crate::DeviceStream;

/// Size of the GEMM workspace in bytes, as NVIDIA recommends for Hopper GPUs.
const WORKSPACE: usize = 32 << 20;

/// Value of the field `call` of [`GpuError::Blas`] if the heuristic returns no algorithm.
pub const HEURISTIC: &str = "heuristic";
/// Maximum number of heuristic results that are autotuned.
const CANDIDATES: usize = 8;
/// The fastest candidate replaces the first heuristic result only if its time is below this fraction of the
/// time of the first result.
const MIN_SPEEDUP_RATIO: f32 = 0.97;
/// Largest `M` for which algorithms are autotuned. For larger `M`, the first heuristic result is good, and
/// timing takes long.
const AUTOTUNED_ROWS: usize = 512;
/// Space for a heuristic result of hipBLASLt or cuBLASLt, in 64-bit words.
const HEURISTIC_RESULT_WORDS: usize = 12;

static ZERO: f32 = 0.0;
static ONE: f32 = 1.0;
static TWO: f32 = 2.0;

/// hipBLASLt or cuBLASLt, opened for one device, with cached plans of GEMM problems.
pub struct BlasLtLibrary {
    table: BlasLtApi,
    constants: BlasLtConstants,
    /// Library handle of each stream. Streams have separate handles, because hipBLASLt stores split-K
    /// counters in the handle.
    handles: [DriverPtr; STREAMS],
    /// GEMM workspace of each stream.
    workspaces: [ScratchMemory; STREAMS],
    /// Cached plan of each problem; `None` if the library has no algorithm for the problem.
    plans: Mutex<HashMap<GemmProblem, Option<GemmPlan>>>,
}

// SAFETY: handles may be used from any thread; descriptors are used under the lock of `plans`.
unsafe impl Send for BlasLtLibrary {}
// SAFETY: handles may be used from any thread; descriptors are used under the lock of `plans`.
unsafe impl Sync for BlasLtLibrary {}

/// Sizes, strides and element types of a GEMM. This type is the key of the plan cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmProblem {
    /// Number of rows of x and y. In the key of a cached plan: the largest number of rows for which the plan
    /// is used.
    pub m: usize,
    /// Number of output features: rows of W and columns of y.
    pub n: usize,
    /// Number of input features: columns of W and x.
    pub k: usize,
    /// Row stride of x in elements.
    pub x_stride: usize,
    /// Row stride of y in elements.
    pub y_stride: usize,
    /// Element type of x and W.
    pub input: BlasDataType,
    /// Element type of y and the bias.
    pub output: BlasDataType,
    /// Granularity of the fp8 scales of x and W.
    pub scaling: Fp8Scaling,
    /// Whether the GEMM adds a bias to y.
    pub bias: bool,
    /// Whether all rows of all matrices are aligned to 16 bytes.
    pub aligned: bool,
}

/// Granularity of the fp8 scales of x and W in a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Scaling {
    /// x and W are not scaled.
    None,
    /// Block scales. x has one scale per row and group of 128 columns, stored as `[K / 128, M]`. W has one
    /// scale per 128 × 128 block, stored row-major, with rows padded to multiples of 4 scales.
    Blocks,
    /// One scale per row of x, and one scale per row of W.
    Vectors,
}

/// Device addresses of the operands of a GEMM.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperands {
    /// Output matrix, `[M, N]`.
    pub y: *mut u8,
    /// Input matrix, `[M, K]`.
    pub x: *const u8,
    /// Weight matrix, `[N, K]`.
    pub w: *const u8,
    /// Bias of the output features, `[N]`.
    pub bias: *const u8,
    /// f32 scales of W, then of x.
    pub scales: [*const u8; 2],
}

/// Cached plan of the GEMM problems in a bucket, a range of the number of rows `m`. The problems in a bucket
/// differ only in `m`.
struct GemmPlan {
    operation: MatmulDescriptor,
    /// Opaque algorithm descriptor of hipBLASLt or cuBLASLt.
    algorithm: [u64; 8],
    /// Algorithms that the heuristic returned, including the first; empty after autotuning.
    candidates: Vec<[u64; 8]>,
}

impl GemmPlan {
    /// Replaces the algorithm by `nearest_algorithm`, the autotuned algorithm of a problem with a similar
    /// `m`, if the heuristic also returned this algorithm for the plan's problem.
    fn use_nearest_algorithm(&mut self, nearest_algorithm: Option<[u64; 8]>) {
        if let Some(algorithm) =
            nearest_algorithm.filter(|algorithm| self.candidates.contains(algorithm))
        {
            self.algorithm = algorithm;
        }
    }
}

/// Stream on which a GEMM is launched, with the library handle and the workspace of this stream.
struct GemmStreamState<'a> {
    runtime: &'a Arc<GpuRuntime>,
    s: &'a DeviceStream,
    handle: DriverPtr,
    stream: DriverPtr,
    workspace: *mut u8,
}

impl BlasLtLibrary {
    /// Opens hipBLASLt or cuBLASLt, and allocates the workspace of the first stream. Returns `Ok(Err(_))` if
    /// the library was not found.
    pub fn open(
        runtime: &Arc<GpuRuntime>,
        search: &LibrarySearchPaths,
    ) -> Result<Result<Self, LibraryOpenError>, GpuError> {
        let table = match BlasLtApi::open(runtime.api(), search) {
            Ok(table) => table,
            Err(error) => return Ok(Err(error)),
        };
        runtime.enter()?;
        let mut handles = [std::ptr::null_mut(); STREAMS];
        for handle in &mut handles {
            // SAFETY: the output pointer is valid for writes; the device is current.
            check(unsafe { (table.create)(handle) }, "create", None)?;
        }
        let constants = BlasLtConstants::of(runtime.api());
        let workspaces: [ScratchMemory; STREAMS] = Default::default();
        workspaces[DeviceStream::default().0].at_least(runtime, WORKSPACE)?;
        Ok(Ok(Self { table, constants, handles, workspaces, plans: Mutex::default() }))
    }

    /// Whether the library supports fp8 GEMMs with scales of this granularity.
    pub fn supports_fp8_scaling(&self, scaling: Fp8Scaling) -> bool {
        self.scale_modes(scaling).is_some()
    }

    /// Returns the scale modes of W and x; `None` if W and x are not scaled, or if the library does not
    /// support this granularity.
    fn scale_modes(&self, scaling: Fp8Scaling) -> Option<[c_int; 2]> {
        match scaling {
            Fp8Scaling::None => None,
            Fp8Scaling::Blocks => self.constants.block_scales,
            Fp8Scaling::Vectors => Some(self.constants.vector_scales),
        }
    }

    /// Launches the GEMM `problem` on stream `s`.
    ///
    /// # Safety
    /// The addresses are valid for the sizes, strides and types of the problem until the launch has
    /// completed.
    pub unsafe fn multiply(
        &self,
        runtime: &Arc<GpuRuntime>,
        s: &DeviceStream,
        problem: &GemmProblem,
        operands: GemmOperands,
    ) -> Result<(), GpuError> {
        if runtime.is_dry_run() {
            return Ok(());
        }
        runtime.enter()?;
        let stream = runtime.stream(s)?;
        let workspace = self.workspaces[s.0].at_least(runtime, WORKSPACE)?;
        let stream_state =
            GemmStreamState { runtime, s, handle: self.handles[s.0], stream, workspace };
        let layouts = MatrixLayouts::new(self, problem)?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = GemmProblem { m: bucket(problem.m), ..*problem };
        for key in [bucket, *problem] {
            let is_cached = plans.contains_key(&key);
            let nearest_algorithm = if is_cached { None } else { nearest(&plans, &key) };
            let plan = match plans.entry(key) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    let mut plan = self.plan(&key, &stream_state)?;
                    if let Some(plan) = &mut plan {
                        if runtime.is_autotuning_frozen() {
                            plan.use_nearest_algorithm(nearest_algorithm);
                        } else if !runtime.is_capturing() {
                            // SAFETY: the caller guarantees the addresses; autotuning computes the GEMM
                            // repeatedly into its own output.
                            unsafe {
                                self.autotune(plan, &stream_state, &layouts, problem, operands)
                            }?;
                        }
                    }
                    entry.insert(plan)
                }
            };
            let Some(plan) = plan else { continue };
            // SAFETY: the caller guarantees the addresses of the operands.
            match unsafe { self.launch(plan, &layouts, &stream_state, problem, operands) } {
                // The algorithm that is cached for the bucket may not support this `m`; in that case, an
                // algorithm for exactly this `m` is used.
                Err(GpuError::Blas { .. }) if key != *problem => {}
                result => return result,
            }
        }
        Err(GpuError::Blas { call: HEURISTIC, status: 0, what: problem.text() })
    }

    /// Times the algorithms in `plan.candidates`. Selects the fastest algorithm if it is sufficiently faster
    /// than the first algorithm; otherwise selects the first algorithm.
    ///
    /// # Safety
    /// The addresses are valid for the sizes, strides and types of the problem until the launches have
    /// completed.
    unsafe fn autotune(
        &self,
        plan: &mut GemmPlan,
        stream_state: &GemmStreamState<'_>,
        layouts: &MatrixLayouts<'_>,
        problem: &GemmProblem,
        operands: GemmOperands,
    ) -> Result<(), GpuError> {
        let candidates = std::mem::take(&mut plan.candidates);
        if candidates.len() < 2 {
            return Ok(());
        }
        // Concurrent work on the first stream would distort the timing.
        stream_state.runtime.synchronize(&DeviceStream::default())?;
        let mut timer = AutotuneTimer::new(stream_state.runtime, stream_state.s)?;
        let (first_algorithm, mut times) = (plan.algorithm, Vec::new());
        for candidate in candidates {
            plan.algorithm = candidate;
            // SAFETY: the caller guarantees the addresses of the operands.
            let launch = || unsafe { self.launch(plan, layouts, stream_state, problem, operands) };
            match timer.time(launch) {
                // Candidates that do not support this exact problem are skipped.
                Err(GpuError::Blas { .. }) => {}
                time => times.push((time?, candidate)),
            }
        }
        let first = times.first().copied().unwrap_or((0.0, first_algorithm));
        let fastest = times.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or(first);
        plan.algorithm = if fastest.0 < MIN_SPEEDUP_RATIO * first.0 { fastest.1 } else { first.1 };
        Ok(())
    }

    /// Launches the GEMM with the algorithm of `plan`.
    ///
    /// # Safety
    /// The addresses are valid for the sizes, strides and types of the problem until the launch has
    /// completed.
    unsafe fn launch(
        &self,
        plan: &GemmPlan,
        layouts: &MatrixLayouts<'_>,
        stream_state: &GemmStreamState<'_>,
        problem: &GemmProblem,
        operands: GemmOperands,
    ) -> Result<(), GpuError> {
        if problem.bias {
            let bias = operands.bias;
            self.set(plan.operation.raw, self.constants.bias_pointer, &bias, "bias")?;
        }
        if problem.scaling != Fp8Scaling::None {
            for (attribute, scales) in
                self.constants.scale_pointers.into_iter().zip(&operands.scales)
            {
                self.set(plan.operation.raw, attribute, scales, "scales")?;
            }
        }
        let [w, x, y] = layouts.raw;
        // SAFETY: the descriptors belong to this problem; the caller guarantees the addresses; launches on
        // one stream run serially, so they can share its workspace.
        let status = unsafe {
            (self.table.matmul)(
                stream_state.handle,
                plan.operation.raw,
                std::ptr::from_ref(problem.alpha()).cast(),
                operands.w.cast(),
                w,
                operands.x.cast(),
                x,
                (&raw const ZERO).cast(),
                operands.y.cast_const().cast(),
                y,
                operands.y.cast(),
                y,
                plan.algorithm.as_ptr().cast(),
                stream_state.workspace.cast(),
                WORKSPACE,
                stream_state.stream,
            )
        };
        check(status, "matmul", Some(problem))
    }

    /// Queries the heuristic and returns a plan; `None` if the library has no algorithm for the problem.
    fn plan(
        &self,
        problem: &GemmProblem,
        stream_state: &GemmStreamState<'_>,
    ) -> Result<Option<GemmPlan>, GpuError> {
        let operation = match self.operation(problem, stream_state.workspace) {
            // The library version is too old for an attribute of this problem.
            Err(GpuError::Blas { .. }) => return Ok(None),
            operation => operation?,
        };
        let layouts = MatrixLayouts::new(self, problem)?;
        let preference = MatmulPreference::new(self, problem)?;
        let mut results = [0u64; HEURISTIC_RESULT_WORDS * CANDIDATES];
        debug_assert!(self.constants.result_bytes <= HEURISTIC_RESULT_WORDS * 8);
        let requested = if problem.m <= AUTOTUNED_ROWS { CANDIDATES } else { 1 };
        let mut found: c_int = 0;
        let [w, x, y] = layouts.raw;
        // SAFETY: the descriptors belong to this library; `results` has room for the requested number of
        // results.
        let status = unsafe {
            (self.table.heuristic)(
                stream_state.handle,
                operation.raw,
                w,
                x,
                y,
                y,
                preference.raw,
                requested as c_int,
                results.as_mut_ptr().cast(),
                &raw mut found,
            )
        };
        if status != 0 || found < 1 {
            return Ok(None);
        }
        let words = self.constants.algorithm_bytes / 8;
        let algorithm = |i: usize| {
            let mut algorithm = [0u64; 8];
            let at = i * self.constants.result_bytes / 8;
            algorithm[..words].copy_from_slice(&results[at..at + words]);
            algorithm
        };
        let candidates = (0..found as usize).map(algorithm).collect();
        Ok(Some(GemmPlan { operation, algorithm: algorithm(0), candidates }))
    }

    fn operation(
        &self,
        problem: &GemmProblem,
        placeholder: *mut u8,
    ) -> Result<MatmulDescriptor, GpuError> {
        let n = &self.constants;
        let mut operation = std::ptr::null_mut();
        // SAFETY: the output pointer is valid for writes.
        let status = unsafe {
            (self.table.operation_create)(
                &raw mut operation,
                n.compute_f32,
                BlasDataType::F32 as c_int,
            )
        };
        check(status, "matmul descriptor", Some(problem))?;
        let descriptor = MatmulDescriptor { raw: operation, destroy: self.table.operation_destroy };
        self.set(operation, n.trans_a, &n.op_t, "transpose")?;
        self.set(operation, n.trans_b, &n.op_n, "transpose")?;
        self.set_scale_modes(operation, problem.scaling, placeholder)?;
        if problem.bias {
            self.set(operation, n.epilogue, &BlasLtConstants::EPILOGUE_BIAS, "epilogue")?;
            self.set(operation, n.bias_type, &(problem.output as c_int), "bias type")?;
        }
        Ok(descriptor)
    }

    /// Sets the granularity of the fp8 scales of the matmul descriptor `operation`. `placeholder` is any
    /// valid device address.
    fn set_scale_modes(
        &self,
        operation: DriverPtr,
        scaling: Fp8Scaling,
        placeholder: *mut u8,
    ) -> Result<(), GpuError> {
        let n = &self.constants;
        let Some(modes) = self.scale_modes(scaling) else { return Ok(()) };
        for (attribute, mode) in n.scale_modes.into_iter().zip(&modes) {
            self.set(operation, attribute, mode, "scale mode")?;
        }
        // The heuristic requires scale pointers that are not null; each launch sets the actual addresses.
        for attribute in n.scale_pointers {
            self.set(operation, attribute, &placeholder, "scales")?;
        }
        Ok(())
    }

    fn set<T: Copy>(
        &self,
        operation: DriverPtr,
        attribute: c_int,
        value: &T,
        call: &'static str,
    ) -> Result<(), GpuError> {
        let value = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the matmul descriptor `operation` is live; the library copies the value.
        let status =
            unsafe { (self.table.operation_set)(operation, attribute, value, size_of::<T>()) };
        check(status, call, None)
    }
}

impl Drop for BlasLtLibrary {
    fn drop(&mut self) {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // SAFETY: each handle is created once and destroyed once.
        self.handles.iter().for_each(|handle| unsafe {
            (self.table.destroy)(*handle);
        });
    }
}

impl std::fmt::Debug for BlasLtLibrary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlasLtLibrary")
            .field("library", &self.table.library)
            .finish_non_exhaustive()
    }
}

/// BLASLt matmul descriptor: transposes, epilogue, bias and scales.
struct MatmulDescriptor {
    raw: DriverPtr,
    destroy: unsafe extern "C" fn(DriverPtr) -> c_int,
}

impl Drop for MatmulDescriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was created by the library and is destroyed once; captured graphs do not
        // reference it.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// Column-major BLASLt layouts of W, x and y. Each layout describes the transpose of the row-major matrix.
struct MatrixLayouts<'a> {
    library: &'a BlasLtLibrary,
    raw: [DriverPtr; 3],
}

impl<'a> MatrixLayouts<'a> {
    fn new(library: &'a BlasLtLibrary, problem: &GemmProblem) -> Result<Self, GpuError> {
        let GemmProblem { m, n, k, x_stride, y_stride, input, output, .. } = *problem;
        let shapes = [(input, k, n, k), (input, k, m, x_stride), (output, n, m, y_stride)];
        let mut layouts = Self { library, raw: [std::ptr::null_mut(); 3] };
        for (layout, (dtype, rows, cols, stride)) in layouts.raw.iter_mut().zip(shapes) {
            let (rows, cols, stride) = (rows as u64, cols as u64, stride as i64);
            // SAFETY: the output pointer is valid for writes.
            let status = unsafe {
                (library.table.layout_create)(&raw mut *layout, dtype as c_int, rows, cols, stride)
            };
            check(status, "layout", Some(problem))?;
        }
        Ok(layouts)
    }
}

impl Drop for MatrixLayouts<'_> {
    fn drop(&mut self) {
        for layout in self.raw.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: the layout was created by this library and is destroyed once.
            unsafe { (self.library.table.layout_destroy)(layout) };
        }
    }
}

/// BLASLt preference for the heuristic: workspace limit, split-K reduction schemes and alignments.
struct MatmulPreference<'a> {
    library: &'a BlasLtLibrary,
    raw: DriverPtr,
}

impl<'a> MatmulPreference<'a> {
    fn new(library: &'a BlasLtLibrary, problem: &GemmProblem) -> Result<Self, GpuError> {
        let mut preference = Self { library, raw: std::ptr::null_mut() };
        // SAFETY: the output pointer is valid for writes.
        let status = unsafe { (library.table.preference_create)(&raw mut preference.raw) };
        check(status, "preference", None)?;
        preference.set(BlasLtConstants::WORKSPACE_BYTES, &(WORKSPACE as u64))?;
        if let (Some(reduction_scheme), BlasDataType::F32) =
            (library.constants.reduction_scheme, problem.input)
        {
            preference.set(reduction_scheme, &0u32)?;
        }
        let bytes = if problem.aligned { 16u32 } else { 2 };
        for alignment in library.constants.alignments.into_iter().flatten() {
            preference.set(alignment, &bytes)?;
        }
        Ok(preference)
    }

    fn set<T: Copy>(&self, attribute: c_int, value: &T) -> Result<(), GpuError> {
        let value = std::ptr::from_ref(value).cast::<c_void>();
        let set = self.library.table.preference_set;
        // SAFETY: the preference is live; the library copies the value.
        check(unsafe { set(self.raw, attribute, value, size_of::<T>()) }, "preference", None)
    }
}

impl Drop for MatmulPreference<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the preference was created by this library and is destroyed once.
            unsafe { (self.library.table.preference_destroy)(self.raw) };
        }
    }
}

impl GemmProblem {
    /// Returns the factor by which the product is multiplied. On GPUs with FNUZ fp8, W contains the bits of
    /// OCP fp8, which represent half of the value in FNUZ fp8 (`fp8_to_fnuz` in `fp8_quantize.hip`).
    fn alpha(&self) -> &'static f32 {
        if self.input == BlasDataType::E4M3Fnuz { &TWO } else { &ONE }
    }

    fn text(&self) -> String {
        let Self { m, n, k, input, output, .. } = self;
        format!("{m} x {n} x {k}, {input:?} to {output:?}")
    }
}

/// Returns the algorithm of the cached GEMM problem that differs from `problem` only in `m` and has the
/// nearest `m`.
fn nearest(
    plans: &HashMap<GemmProblem, Option<GemmPlan>>,
    problem: &GemmProblem,
) -> Option<[u64; 8]> {
    let matching =
        plans.iter().filter(|(key, _)| GemmProblem { m: problem.m, ..**key } == *problem);
    let found = matching.filter_map(|(key, plan)| Some((key.m, plan.as_ref()?.algorithm)));
    found.min_by_key(|&(m, _)| (m.abs_diff(problem.m), m)).map(|(_, algorithm)| algorithm)
}

/// Rounds the number of rows `m` up to the largest `m` of its bucket (range of `m`). All `m` in a bucket use
/// the same cached plan.
fn bucket(m: usize) -> usize {
    let step = match m {
        0..=256 => 16,
        257..=1024 => 64,
        _ => 512,
    };
    m.next_multiple_of(step)
}

fn check(status: c_int, call: &'static str, problem: Option<&GemmProblem>) -> Result<(), GpuError> {
    if status == 0 {
        return Ok(());
    }
    let what = problem.map(GemmProblem::text).unwrap_or_default();
    Err(GpuError::Blas { call, status, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gemm_plans_serve_nearby_sizes() {
        for (m, expected) in [(1, 16), (16, 16), (17, 32), (256, 256), (257, 320), (1025, 1536)] {
            assert_eq!(bucket(m), expected, "{m}");
        }
    }
}
