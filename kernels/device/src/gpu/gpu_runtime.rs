//! Runtime state of one opened GPU: driver, context, streams and device properties.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::{DeviceAttribute, DriverApi, DriverPtr, DriverStatus, GpuApi, code, flag};

use super::config::{GpuConfig, GpuLibrarySearches};
use super::error::GpuError;
use super::timestamps::KernelTimestamper;
use crate::{DeviceError, DeviceStream};

/// Number of streams of a device: stream 0 for steps, stream 1 for copies, stream 2 for overlapped launches.
pub(super) const STREAMS: usize = 3;

/// Properties of a GPU on which kernels and their launches depend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuProperties {
    /// Product name of the GPU.
    pub name: String,
    /// GPU architecture, for example `gfx942` or `sm_90a`; `emulated` for the emulator.
    pub arch: String,
    /// Number of lanes of a warp (NVIDIA) or wavefront (AMD).
    pub warp_size: u32,
    /// Number of streaming multiprocessors (NVIDIA) or compute units (AMD).
    pub multiprocessors: u32,
    /// Maximum shared memory per thread block, in bytes.
    pub shared_bytes: u32,
    /// Size of the L2 cache in bytes; 0 if the driver does not report it.
    pub l2_bytes: u32,
}

/// State of an opened GPU that its launches, copies and fences share.
pub struct GpuRuntime {
    /// Function table of the HIP runtime or the CUDA driver.
    pub driver: DriverApi,
    /// Properties of the device.
    pub(super) properties: GpuProperties,
    context: DriverPtr,
    streams: Vec<DriverPtr>,
    /// Whether a graph capture is active on any stream.
    capturing: AtomicBool,
    /// Whether a dry run is active: launches do nothing.
    dry_run: AtomicBool,
    autotuning_frozen: AtomicBool,
    /// For each stream, whether `stream_wait` was called since the last launch, so that the next launch must
    /// also wait for another stream.
    stream_waits: [AtomicBool; STREAMS],
    /// Whether `kernel_timestamper` is set. Launches read this flag first, so that they lock the mutex only
    /// if per-kernel timestamps are enabled.
    timestamping: AtomicBool,
    kernel_timestamper: Mutex<Option<KernelTimestamper>>,
    /// GPU events that are not in use and can be recorded again.
    events: Mutex<Vec<DriverPtr>>,
    /// Memory that was dropped during a graph capture. It is freed after the capture, because freeing is not
    /// allowed during it.
    dropped: Mutex<Vec<(MemoryKind, DriverPtr)>>,
}

/// Kind of GPU-accessible memory, which determines how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory.
    Device,
    /// Pinned host memory.
    Host,
}

// SAFETY: the handles may be used from any thread after `enter` has set the current context.
unsafe impl Send for GpuRuntime {}
// SAFETY: the handles may be used from any thread after `enter`; the drivers are thread-safe.
unsafe impl Sync for GpuRuntime {}

impl GpuRuntime {
    /// Opens the driver and the configured device.
    pub fn open(config: &GpuConfig, searches: &GpuLibrarySearches) -> Result<Self, GpuError> {
        let driver = DriverApi::open(searches.api, &searches.driver)?;
        let ordinal = find_device(&driver, config.device)?;
        let properties = GpuProperties::read(&driver, ordinal, config.emulated_warp_size)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised and the device exists.
        check(&driver, unsafe { (driver.context_retain)(&raw mut context, ordinal) }, "context")?;
        let mut runtime = Self {
            driver,
            properties,
            context,
            streams: Vec::new(),
            capturing: AtomicBool::new(false),
            dry_run: AtomicBool::new(false),
            autotuning_frozen: AtomicBool::new(false),
            stream_waits: Default::default(),
            timestamping: AtomicBool::new(false),
            kernel_timestamper: Mutex::default(),
            events: Mutex::default(),
            dropped: Mutex::default(),
        };
        runtime.create_streams()?;
        Ok(runtime)
    }

    /// Creates the streams of the device.
    fn create_streams(&mut self) -> Result<(), GpuError> {
        self.enter()?;
        for _ in 0..STREAMS {
            let mut stream = std::ptr::null_mut();
            let create = self.driver.stream_create;
            // SAFETY: the context is current.
            let code = unsafe { create(&raw mut stream, flag::STREAM_NON_BLOCKING) };
            self.check(code, "stream create")?;
            self.streams.push(stream);
        }
        Ok(())
    }

    /// Returns the API (HIP or CUDA) of the driver.
    pub fn api(&self) -> GpuApi {
        self.driver.api
    }

    /// Returns the driver context, with which other devices of this process enable peer access to this
    /// device.
    pub fn context(&self) -> DriverPtr {
        self.context
    }

    /// Makes the context of this device current on the calling thread. The call is cheap, so it precedes
    /// every driver call.
    pub fn enter(&self) -> Result<(), GpuError> {
        // SAFETY: the context outlives this value.
        self.check(unsafe { (self.driver.context_set)(self.context) }, "set context")
    }

    /// Returns the driver handle of a stream.
    pub fn stream(&self, s: &DeviceStream) -> Result<DriverPtr, GpuError> {
        let none = GpuError::NoStream { stream: s.0, streams: self.streams.len() };
        self.streams.get(s.0).copied().ok_or(none)
    }

    /// Returns [`GpuError::Call`] for every result code other than success.
    pub fn check(&self, code: DriverStatus, call: &'static str) -> Result<(), GpuError> {
        check(&self.driver, code, call)
    }

    /// Returns [`GpuError::Capturing`] during graph capture. Callers check it before a driver call that would
    /// invalidate the captured graph.
    pub fn not_capturing(&self, call: &'static str) -> Result<(), GpuError> {
        if self.is_capturing() { Err(GpuError::Capturing { call }) } else { Ok(()) }
    }

    /// Whether a graph capture is active.
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    /// Sets whether a graph capture is active.
    pub fn set_capturing(&self, capturing: bool) {
        self.capturing.store(capturing, Ordering::Relaxed);
    }

    /// Whether autotuning is frozen: launches are not timed any more.
    pub fn is_autotuning_frozen(&self) -> bool {
        self.autotuning_frozen.load(Ordering::Relaxed)
    }

    /// Freezes autotuning: launches are not timed afterwards.
    pub fn freeze_autotuning(&self) {
        self.autotuning_frozen.store(true, Ordering::Relaxed);
    }

    /// Notes that the next launch on `s` must also wait for another stream. `s` must be a stream of this
    /// device.
    pub fn set_stream_wait(&self, s: &DeviceStream) {
        self.stream_waits[s.0].store(true, Ordering::Relaxed);
    }

    /// Returns and clears the flag that `set_stream_wait` sets: the next launch on `s` must also wait for
    /// another stream. `s` must be a stream of this device.
    pub fn take_stream_wait(&self, s: &DeviceStream) -> bool {
        self.stream_waits[s.0].swap(false, Ordering::Relaxed)
    }

    /// Whether a dry run is active: launches only collect the kernels that they need.
    pub fn is_dry_run(&self) -> bool {
        self.dry_run.load(Ordering::Relaxed)
    }

    /// Begins a dry run if `active` is true, otherwise ends it.
    pub fn set_dry_run(&self, active: bool) {
        self.dry_run.store(active, Ordering::Relaxed);
    }

    /// Whether an event timestamp is recorded after each launch. If so, a launch must not overlap the
    /// previous launch.
    pub fn is_timestamping(&self) -> bool {
        self.timestamping.load(Ordering::Relaxed)
    }

    /// Sets the recorder of per-kernel timestamps, or disables them with `None`. Returns the previous
    /// recorder.
    pub fn set_timestamping(
        &self,
        timestamper: Option<KernelTimestamper>,
    ) -> Option<KernelTimestamper> {
        self.timestamping.store(timestamper.is_some(), Ordering::Relaxed);
        let mut current = self.kernel_timestamper.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, timestamper)
    }

    /// Records a timestamp after a launch of the kernel `name` on `s`, if per-kernel timestamps are enabled.
    pub fn launched(&self, s: &DeviceStream, name: &'static str) -> Result<(), DeviceError> {
        if !self.is_timestamping() {
            return Ok(());
        }
        let mut current = self.kernel_timestamper.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_mut().map_or(Ok(()), |timestamper| timestamper.launched(s, name))
    }

    /// Blocks the host until all work on `s` has completed.
    pub fn synchronize(&self, s: &DeviceStream) -> Result<(), GpuError> {
        self.not_capturing("synchronize")?;
        self.enter()?;
        let stream = self.stream(s)?;
        // SAFETY: the stream belongs to this device.
        self.check(unsafe { (self.driver.stream_synchronize)(stream) }, "stream synchronize")
    }

    /// Returns the list of GPU events that are not in use.
    pub fn events(&self) -> MutexGuard<'_, Vec<DriverPtr>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees memory: immediately, or after the active graph capture.
    ///
    /// # Safety
    /// The memory is of kind `kind` and is not used again.
    pub unsafe fn free(&self, kind: MemoryKind, memory: DriverPtr) {
        if self.is_capturing() {
            self.dropped().push((kind, memory));
            return;
        }
        let free = match kind {
            MemoryKind::Device => self.driver.free,
            MemoryKind::Host => self.driver.host_free,
        };
        // `enter` fails only if the device has failed already; the next driver call reports that failure.
        if self.enter().is_ok() {
            // SAFETY: the caller guarantees the kind of the memory and that it is not used again.
            unsafe { free(memory) };
        }
    }

    /// Frees the memory that was dropped during a graph capture.
    pub fn free_dropped(&self) {
        let dropped = std::mem::take(&mut *self.dropped());
        for (kind, memory) in dropped {
            // SAFETY: guaranteed by the caller of `free` that queued the memory.
            unsafe { self.free(kind, memory) };
        }
    }

    fn dropped(&self) -> MutexGuard<'_, Vec<(MemoryKind, DriverPtr)>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the free and the total bytes of the device; 0 if the driver call fails.
    pub fn mem_info(&self) -> (u64, u64) {
        let (mut free, mut total) = (0usize, 0usize);
        if self.enter().is_ok() {
            // SAFETY: both output pointers are valid for writes.
            unsafe { (self.driver.mem_info)(&raw mut free, &raw mut total) };
        }
        (free as u64, total as u64)
    }
}

impl Drop for GpuRuntime {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        self.set_capturing(false);
        self.free_dropped();
        for event in std::mem::take(&mut *self.events()) {
            // SAFETY: the event was created on this device and has no waiters.
            unsafe { (self.driver.event_destroy)(event) };
        }
        for stream in std::mem::take(&mut self.streams) {
            // SAFETY: the stream was created on this device; all users of the stream share ownership of this
            // value, so none is left.
            unsafe { (self.driver.stream_destroy)(stream) };
        }
    }
}

impl std::fmt::Debug for GpuRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuRuntime").field("properties", &self.properties).finish_non_exhaustive()
    }
}

/// Converts a result code of the driver to a `Result`.
fn check(driver: &DriverApi, code: DriverStatus, call: &'static str) -> Result<(), GpuError> {
    if code == code::SUCCESS {
        return Ok(());
    }
    Err(GpuError::Call { call, code, name: error_name(driver, code) })
}

fn error_name(driver: &DriverApi, code: DriverStatus) -> String {
    let mut text = std::ptr::null();
    if let Some(name) = driver.hip_error_name {
        // SAFETY: the function accepts any code.
        text = unsafe { name(code) };
    } else if let Some(name) = driver.cuda_error_name {
        // SAFETY: the function writes the address of a static string, or nothing.
        unsafe { name(code, &raw mut text) };
    }
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: the pointer is a static NUL-terminated string of the runtime.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn find_device(driver: &DriverApi, requested: usize) -> Result<c_int, GpuError> {
    let none = |found: usize| GpuError::NoDevice {
        library: driver.library.display().to_string(),
        requested,
        found,
    };
    // SAFETY: initialisation is the first call and may be repeated.
    match unsafe { (driver.init)(0) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Err(none(0)),
        code => check(driver, code, "init")?,
    }
    let mut found = 0;
    // SAFETY: the output pointer is valid for writes.
    match unsafe { (driver.device_count)(&raw mut found) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Err(none(0)),
        code => check(driver, code, "device count")?,
    }
    if requested >= found.max(0) as usize {
        return Err(none(found.max(0) as usize));
    }
    let mut ordinal = 0;
    // SAFETY: the output pointer is valid for writes, and the index is less than the device count.
    let code = unsafe { (driver.device_get)(&raw mut ordinal, requested as c_int) };
    check(driver, code, "device get")?;
    Ok(ordinal)
}

/// Maximum shared memory per thread block, in bytes, when the emulator runs with 32 lanes per warp: 227 KiB
/// as on Hopper.
const NVIDIA_SHARED_BYTES: u32 = 227 << 10;

impl GpuProperties {
    fn read(driver: &DriverApi, device: c_int, emulated: Option<u32>) -> Result<Self, GpuError> {
        let attribute = |a: DeviceAttribute| {
            let mut value = 0;
            // SAFETY: the output pointer is valid for writes, and the attribute number belongs to this API.
            let code =
                unsafe { (driver.device_attribute)(&raw mut value, a.number(driver.api), device) };
            check(driver, code, "device attribute").map(|()| value.max(0) as u32)
        };
        let mut text = [0u8; 128];
        // SAFETY: the buffer has at least as many bytes as the call may write.
        let code = unsafe { (driver.device_name)(text.as_mut_ptr().cast(), 127, device) };
        check(driver, code, "device name")?;
        let arch = match driver.api {
            GpuApi::Hip => hip_arch(driver, device)?,
            GpuApi::Cuda => cuda_arch(
                attribute(DeviceAttribute::CapabilityMajor)?,
                attribute(DeviceAttribute::CapabilityMinor)?,
            ),
        };
        Ok(Self {
            name: until_nul(&text),
            arch,
            warp_size: emulated.map_or_else(|| attribute(DeviceAttribute::WarpSize), Ok)?,
            multiprocessors: attribute(DeviceAttribute::Multiprocessors)?.max(1),
            shared_bytes: match emulated {
                Some(32) => NVIDIA_SHARED_BYTES,
                _ => attribute(DeviceAttribute::SharedBytesPerBlock)?,
            },
            l2_bytes: attribute(DeviceAttribute::L2Bytes).unwrap_or(0),
        })
    }
}

/// Returns the AMD architecture without feature flags, for example `gfx942` from `gfx942:sramecc+:xnack-`.
fn hip_arch(driver: &DriverApi, device: c_int) -> Result<String, GpuError> {
    const NAME_AT: usize = 1160;
    let Some(properties) = driver.properties else {
        let library = driver.library.display().to_string();
        let symbol = "hipGetDevicePropertiesR0600".to_owned();
        return Err(hip_runtime_sys::LibraryOpenError::NoSymbol { library, symbol }.into());
    };
    let mut bytes = [0u8; 4096]; // Larger than the struct in any version of ROCm.
    // SAFETY: the buffer is large enough for the properties struct.
    check(driver, unsafe { properties(bytes.as_mut_ptr(), device) }, "device properties")?;
    let name = until_nul(&bytes[NAME_AT..NAME_AT + 256]);
    Ok(name.split(':').next().unwrap_or_default().to_owned())
}

/// Returns the NVIDIA architecture name. From compute capability 9.0 on, it has the suffix `a`, which enables
/// architecture-specific instructions.
fn cuda_arch(major: u32, minor: u32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
