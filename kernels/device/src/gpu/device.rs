//! GPU as a device: its runtime libraries, memory, streams, captured graphs and compiled kernels.

use std::sync::Arc;

use hip_runtime_sys::LibrarySearchPaths;

use super::blaslt::BlasLtLibrary;
use super::config::GpuConfig;
use super::gpu_runtime::{GpuRuntime, STREAMS};
use super::half_dtype::HalfDtype;
use super::jit::JitCompiler;
use super::kernel_module::{KernelFunction, KernelModules};
use super::kernel_source::{KernelBuild, KernelDefine, KernelHeaders, KernelSource};
use super::memory::ScratchMemory;
use super::timestamps::{GpuTimestampEvents, KernelTimestamper};
use super::weight_memory::WeightAllocator;
use super::{graph, memory};
use crate::{
    Buffer, CapturedGraph, CopyInFlight, DeviceDriver, DeviceError, DeviceStream, DriverCallCounts,
    MemInfo, PinnedBuffer, TimestampEvents,
};

/// Stream for launches that overlap the launches of the step, which are on stream 0. Stream 1 is used for
/// copies.
const SECONDARY_STREAM: DeviceStream = DeviceStream(2);

/// One GPU, controlled through the HIP runtime, the CUDA driver or the emulator.
#[derive(Debug)]
pub struct GpuDevice {
    pub(crate) half_dtype: HalfDtype,
    runtime: Arc<GpuRuntime>,
    jit: JitCompiler,
    modules: KernelModules,
    /// hipBLASLt or cuBLASLt; `None` if it could not be opened.
    blaslt: Option<BlasLtLibrary>,
    /// Scratch memory of each stream; every launch may overwrite its content.
    scratch: [ScratchMemory; STREAMS],
    /// Device counters of each stream, which the thread blocks of a kernel use to count arrivals or to
    /// distribute work. The counters are 0 before and after each kernel.
    counters: [ScratchMemory; STREAMS],
    weights: WeightAllocator,
    /// Paths at which RCCL or NCCL is searched for when a device group is created; `None` if no collective
    /// library is configured.
    collectives: Option<LibrarySearchPaths>,
}

impl GpuDevice {
    /// Opens the runtime libraries and the device. `headers` are the headers that kernel sources may include.
    ///
    /// Errors: a library or the device does not exist, or the driver fails.
    pub fn open(config: &GpuConfig, headers: KernelHeaders) -> Result<Self, DeviceError> {
        let searches = config.searches();
        let runtime = Arc::new(GpuRuntime::open(config, &searches)?);
        let jit = JitCompiler::open(config, &searches, &runtime.properties, headers)?;
        let blaslt = match &searches.blas {
            Some(search) => BlasLtLibrary::open(&runtime, search)?.ok(),
            None => None,
        };
        Ok(Self {
            half_dtype: config.half_dtype,
            blaslt,
            runtime,
            jit,
            modules: KernelModules::default(),
            scratch: Default::default(),
            counters: Default::default(),
            weights: WeightAllocator::default(),
            collectives: searches.collectives,
        })
    }

    /// Returns the GPU architecture, for example `gfx942` or `sm_90a`; `emulated` for the emulator.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.runtime.properties.arch
    }

    /// Number of lanes of a warp (NVIDIA) or wavefront (AMD).
    #[must_use]
    pub fn warp_size(&self) -> u32 {
        self.runtime.properties.warp_size
    }

    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.runtime.properties.multiprocessors
    }

    /// Whether the device supports warpgroup MMA (WGMMA), with which four warps multiply a tile together.
    pub fn has_warpgroups(&self) -> bool {
        self.arch() == "sm_90a" || (self.arch() == "emulated" && self.warp_size() == 32)
    }

    /// Maximum shared memory per thread block, in bytes.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.runtime.properties.shared_bytes
    }

    /// Compiles several kernel sources in parallel, and loads them. Without this call, each source is
    /// compiled when a launch first uses it.
    pub fn compile(&self, builds: &[KernelBuild]) -> Result<(), DeviceError> {
        Ok(self.modules.load_all(&self.runtime, &self.jit, builds, &mut |_, _| {})?)
    }

    /// Returns the runtime state that is shared by the launches, copies and fences of the device.
    pub fn runtime(&self) -> &Arc<GpuRuntime> {
        &self.runtime
    }

    /// Returns hipBLASLt or cuBLASLt, if it was found.
    pub fn blaslt(&self) -> Option<&BlasLtLibrary> {
        self.blaslt.as_ref()
    }

    /// Returns the paths at which RCCL or NCCL is searched for.
    pub fn collectives(&self) -> Option<&LibrarySearchPaths> {
        self.collectives.as_ref()
    }

    /// Returns the allocator of weight memory.
    pub fn weights(&self) -> &WeightAllocator {
        &self.weights
    }

    /// Returns the kernel `name` of `source`, compiled with the preprocessor definitions `defines`. The first
    /// call compiles the kernel, which is not possible during graph capture: every launch must run once
    /// before it is captured.
    pub fn kernel(
        &self,
        source: &'static KernelSource,
        name: &'static str,
        defines: &[KernelDefine],
    ) -> Result<KernelFunction, DeviceError> {
        Ok(self.modules.function(&self.runtime, &self.jit, source, name, defines)?)
    }

    /// Returns at least `bytes` bytes of scratch memory that only stream `s` uses. The address changes only
    /// if more bytes are requested than before; earlier addresses remain valid. Every launch on `s` may
    /// overwrite the content.
    pub fn scratch(&self, s: &DeviceStream, bytes: usize) -> Result<*mut u8, DeviceError> {
        self.runtime.stream(s)?;
        Ok(self.scratch[s.0].at_least(&self.runtime, bytes)?)
    }

    /// Returns at least `words` 32-bit device counters of stream `s`, all 0. The thread blocks of a kernel
    /// use the counters to count arrivals or to distribute work. Every kernel that uses counters must reset
    /// them to 0.
    pub fn counters(&self, s: &DeviceStream, words: usize) -> Result<*mut u8, DeviceError> {
        self.runtime.stream(s)?;
        Ok(self.counters[s.0].at_least(&self.runtime, words * 4)?)
    }
}

impl DeviceDriver for GpuDevice {
    fn name(&self) -> String {
        let properties = &self.runtime.properties;
        let with_blaslt = if self.blaslt.is_some() { "with" } else { "without" };
        format!(
            "{}, {}, {} multiprocessors, {with_blaslt} a BLASLt library",
            properties.name, properties.arch, properties.multiprocessors
        )
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Ok(memory::alloc(&self.runtime, bytes)?)
    }

    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.copy_in(to, offset, from)
    }

    fn download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.copy_out(s, from, offset, to)
    }

    fn synchronize(&self, s: &DeviceStream) -> Result<(), DeviceError> {
        Ok(self.runtime.synchronize(s)?)
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer, DeviceError> {
        // SAFETY: pinned memory is host memory.
        Ok(unsafe { PinnedBuffer::from_host(memory::alloc_host(&self.runtime, bytes)?) })
    }

    fn start_upload(
        &self,
        s: &DeviceStream,
        to: &mut Buffer,
        from: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        self.begin_copy_in(s, to, from, bytes)
    }

    fn start_download(
        &self,
        s: &DeviceStream,
        from: &Buffer,
        to: PinnedBuffer,
        bytes: usize,
    ) -> Result<CopyInFlight, DeviceError> {
        self.begin_copy_out(s, from, to, bytes)
    }

    fn zero(&self, s: &DeviceStream, x: &mut Buffer) -> Result<(), DeviceError> {
        self.fill_with_zeros(s, x)
    }

    fn captures_graphs(&self) -> bool {
        true
    }

    fn begin_capture(&self, s: &DeviceStream) -> Result<(), DeviceError> {
        Ok(graph::begin(&self.runtime, s)?)
    }

    fn end_capture(&self, s: &DeviceStream) -> Result<CapturedGraph, DeviceError> {
        Ok(CapturedGraph(Box::new(graph::end(&self.runtime, s)?)))
    }

    fn begin_dry_run(&self) {
        self.runtime.set_dry_run(true);
    }

    fn end_dry_run(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        self.runtime.set_dry_run(false);
        Ok(self.modules.load_requested(&self.runtime, &self.jit, progress)?)
    }

    fn secondary_stream(&self) -> Option<DeviceStream> {
        (!self.runtime.is_timestamping()).then_some(SECONDARY_STREAM)
    }

    fn stream_wait(&self, s: &DeviceStream, other: &DeviceStream) -> Result<(), DeviceError> {
        Ok(self.wait_for_stream(s, other)?)
    }

    fn freeze_autotuning(&self) {
        self.runtime.freeze_autotuning();
    }

    fn alloc_timestamps(&self, count: usize) -> Result<Arc<dyn TimestampEvents>, DeviceError> {
        Ok(Arc::new(GpuTimestampEvents::new(&self.runtime, count)?))
    }

    fn begin_kernel_timestamps(&self, timestamps: &Arc<dyn TimestampEvents>, first: usize) {
        let (timestamps, names) = (Arc::clone(timestamps), Vec::new());
        self.runtime.set_timestamping(Some(KernelTimestamper { timestamps, next: first, names }));
    }

    fn end_kernel_timestamps(&self) -> Vec<&'static str> {
        self.runtime.set_timestamping(None).map_or_else(Vec::new, |timestamper| timestamper.names)
    }

    fn loaded_modules(&self) -> usize {
        self.modules.count()
    }

    fn driver_call_counts(&self) -> DriverCallCounts {
        self.runtime.call_counts()
    }

    fn mem_info(&self) -> MemInfo {
        let (free_bytes, total_bytes) = self.runtime.mem_info();
        MemInfo { free_bytes, total_bytes }
    }
}
