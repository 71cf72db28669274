//! Runtime state of one opened GPU: driver, context, streams and device properties.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::{DriverApi, DriverPtr, DriverStatus, GpuApi, code, flag};

use super::config::{GpuConfig, GpuLibraryPaths};
use super::error::GpuError;
use super::foreign_stream::ForeignStreamSlot;
use super::gpu_properties::{GpuProperties, until_nul};
use super::timestamps::KernelTimestamper;
use crate::cpu::host_memory;
use crate::{DeviceError, DeviceStream, DriverCallCounts};

/// Number of streams of a device: stream 0 for steps of the model, stream 1 for copies, stream 2 for launches
/// that overlap launches on stream 0.
pub(super) const STREAMS: usize = 3;

/// State of an opened GPU, shared by all launches, copies and fences of this GPU.
pub struct GpuRuntime {
    /// Function table of the HIP runtime or the CUDA driver.
    pub driver: DriverApi,
    /// Properties of the device.
    pub(super) properties: GpuProperties,
    /// Index of the device in the device list of the driver.
    ordinal: c_int,
    context: DriverPtr,
    streams: Vec<DriverPtr>,
    /// Stream of a foreign host that replaces stream 0 during its calls.
    pub(super) foreign_stream: ForeignStreamSlot,
    /// Whether a graph capture is active on any stream.
    capturing: AtomicBool,
    /// Whether a dry run is active, in which launches do not execute anything.
    dry_run: AtomicBool,
    autotuning_frozen: AtomicBool,
    /// For each stream, whether `stream_wait` was called since the last launch, so that the next launch must
    /// also wait for another stream.
    stream_waits: [AtomicBool; STREAMS],
    /// Whether `kernel_timestamper` is set. Launches check this flag first, so that they lock the mutex only
    /// if per-kernel timestamps are enabled.
    timestamping: AtomicBool,
    kernel_timestamper: Mutex<Option<KernelTimestamper>>,
    /// GPU events that are not in use and can be recorded again.
    events: Mutex<Vec<DriverPtr>>,
    /// Number of allocations of device memory and of pinned host memory.
    allocations: AtomicU64,
    /// Number of times that the host waited for the device.
    synchronizations: AtomicU64,
    /// Memory that was dropped during graph capture. It is freed after the capture, because memory must not
    /// be freed during capture.
    dropped: Mutex<Vec<(MemoryKind, DriverPtr)>>,
}

/// Identification of a device within its process, for peer access: HIP identifies the device by index, CUDA
/// by context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerDeviceHandle {
    /// Index of the device in the device list of the driver.
    pub ordinal: i32,
    /// Driver context of the device.
    pub context: u64,
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
    pub fn open(config: &GpuConfig, searches: &GpuLibraryPaths) -> Result<Self, GpuError> {
        let driver = DriverApi::open(searches.api, &searches.driver)?;
        let ordinal = find_device(&driver, config)?;
        let properties = GpuProperties::read(&driver, ordinal, config.emulated_warp_size)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised and the device exists.
        check(&driver, unsafe { (driver.context_retain)(&raw mut context, ordinal) }, "context")?;
        let mut runtime = Self {
            driver,
            properties,
            ordinal,
            context,
            streams: Vec::new(),
            foreign_stream: ForeignStreamSlot::default(),
            capturing: AtomicBool::new(false),
            dry_run: AtomicBool::new(false),
            autotuning_frozen: AtomicBool::new(false),
            stream_waits: Default::default(),
            timestamping: AtomicBool::new(false),
            kernel_timestamper: Mutex::default(),
            events: Mutex::default(),
            allocations: AtomicU64::new(0),
            synchronizations: AtomicU64::new(0),
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

    /// Returns the identification of this device, with which other devices of the same process enable peer
    /// access.
    pub fn peer_address(&self) -> PeerDeviceHandle {
        PeerDeviceHandle { ordinal: self.ordinal, context: self.context as u64 }
    }

    /// Enables access from this device to the memory of another device of this process.
    ///
    /// Errors: the driver does not support peer access, or the link between the devices does not support it.
    pub fn enable_peer_access(&self, peer: PeerDeviceHandle) -> Result<(), GpuError> {
        self.enter()?;
        let code = match (self.driver.hip_peer_enable, self.driver.cuda_peer_enable) {
            // SAFETY: the driver accepts any device index.
            (Some(enable), _) => unsafe { enable(peer.ordinal, 0) },
            // SAFETY: the peer keeps its context until the process exits.
            (None, Some(enable)) => unsafe { enable(peer.context as DriverPtr, 0) },
            (None, None) => {
                let what = "peer access between devices of one process";
                return Err(GpuError::PeerAccessUnsupported { what });
            }
        };
        match code {
            code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check(code, "enable peer access"),
        }
    }

    /// Returns the PCI address of the device; `None` if the driver does not report it.
    pub fn pci_bus_id(&self) -> Option<String> {
        let get = self.driver.pci_bus_id?;
        let mut text = [0u8; 32];
        // SAFETY: the buffer has as many bytes as the call may write.
        let code = unsafe { get(text.as_mut_ptr().cast(), text.len() as c_int, self.ordinal) };
        (code == code::SUCCESS).then(|| until_nul(&text).to_lowercase())
    }

    /// Returns the driver context of the device.
    pub fn context(&self) -> DriverPtr {
        self.context
    }

    /// Makes the context of this device current on the calling thread. The call is cheap and precedes every
    /// driver call.
    pub fn enter(&self) -> Result<(), GpuError> {
        // SAFETY: the context outlives this value.
        self.check(unsafe { (self.driver.context_set)(self.context) }, "set context")
    }

    /// Returns the driver handle of a stream.
    pub fn stream(&self, s: &DeviceStream) -> Result<DriverPtr, GpuError> {
        if let (0, Some(foreign)) = (s.0, self.foreign_stream.get()) {
            return Ok(foreign);
        }
        let none = GpuError::NoStream { stream: s.0, streams: self.streams.len() };
        self.streams.get(s.0).copied().ok_or(none)
    }

    /// Returns [`GpuError::Call`] if the result code `code` is not success.
    pub fn check(&self, code: DriverStatus, call: &'static str) -> Result<(), GpuError> {
        check(&self.driver, code, call)
    }

    /// Returns [`GpuError::Capturing`] during graph capture. Must precede driver calls that would invalidate
    /// the captured graph.
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

    /// Whether autotuning is disabled, so that launches are not timed any more.
    pub fn is_autotuning_frozen(&self) -> bool {
        self.autotuning_frozen.load(Ordering::Relaxed)
    }

    /// Disables autotuning permanently: later launches are not timed.
    pub fn freeze_autotuning(&self) {
        self.autotuning_frozen.store(true, Ordering::Relaxed);
    }

    /// Sets the flag that the next launch on `s` must also wait for another stream. `s` must be a stream of
    /// this device.
    pub fn set_stream_wait(&self, s: &DeviceStream) {
        self.stream_waits[s.0].store(true, Ordering::Relaxed);
    }

    /// Returns and clears the flag that `set_stream_wait` sets: whether the next launch on `s` must also wait
    /// for another stream. `s` must be a stream of this device.
    pub fn take_stream_wait(&self, s: &DeviceStream) -> bool {
        self.stream_waits[s.0].swap(false, Ordering::Relaxed)
    }

    /// Whether a dry run is active, in which launches only record the kernels that they need.
    pub fn is_dry_run(&self) -> bool {
        self.dry_run.load(Ordering::Relaxed)
    }

    /// Begins a dry run if `active` is true, otherwise ends it.
    pub fn set_dry_run(&self, active: bool) {
        self.dry_run.store(active, Ordering::Relaxed);
    }

    /// Whether an event timestamp is recorded after each launch. In this case, launches must not overlap each
    /// other.
    pub fn is_timestamping(&self) -> bool {
        self.timestamping.load(Ordering::Relaxed)
    }

    /// Sets the recorder of per-kernel timestamps, or disables per-kernel timestamps if it is `None`. Returns
    /// the previous recorder.
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
        self.count_synchronization();
        let stream = self.stream(s)?;
        // SAFETY: the stream belongs to this device.
        self.check(unsafe { (self.driver.stream_synchronize)(stream) }, "stream synchronize")
    }

    /// Counts an allocation of device memory or of pinned host memory.
    pub fn count_allocation(&self) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a wait of the host for the device.
    pub fn count_synchronization(&self) {
        self.synchronizations.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the numbers of allocations and of waits of the host since the device was opened.
    pub fn call_counts(&self) -> DriverCallCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DriverCallCounts {
            allocations: count(&self.allocations),
            synchronizations: count(&self.synchronizations),
        }
    }

    /// Returns the list of GPU events that are not in use.
    pub fn events(&self) -> MutexGuard<'_, Vec<DriverPtr>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees memory: immediately, or after the graph capture if one is active.
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
        // `enter` only fails if the device has already failed, which the next driver call reports.
        if self.enter().is_ok() {
            // SAFETY: the caller guarantees the kind of the memory and that it is not used again.
            unsafe { free(memory) };
        }
    }

    /// Frees the memory that was dropped during a graph capture.
    pub fn free_dropped(&self) {
        let dropped = std::mem::take(&mut *self.dropped());
        for (kind, memory) in dropped {
            // SAFETY: the caller of `free` that queued the memory guaranteed the kind of the memory and that
            // the memory is not used again.
            unsafe { self.free(kind, memory) };
        }
    }

    fn dropped(&self) -> MutexGuard<'_, Vec<(MemoryKind, DriverPtr)>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the free and the total number of bytes of the device; 0 if the driver call fails. If GPU and
    /// host CPU share the same memory, the free bytes are limited to the available host memory.
    pub fn mem_info(&self) -> (u64, u64) {
        let (mut free, mut total) = (0usize, 0usize);
        if self.enter().is_ok() {
            // SAFETY: both output pointers are valid for writes.
            unsafe { (self.driver.mem_info)(&raw mut free, &raw mut total) };
        }
        let (free, total) = (free as u64, total as u64);
        if self.properties.has_unified_memory {
            return (free.min(host_memory().0), total);
        }
        (free, total)
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
pub(super) fn check(
    driver: &DriverApi,
    code: DriverStatus,
    call: &'static str,
) -> Result<(), GpuError> {
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

/// Initialises the driver and returns the number of devices that it lists.
fn count_devices(driver: &DriverApi) -> Result<usize, GpuError> {
    // SAFETY: initialisation is the first call and may be repeated.
    match unsafe { (driver.init)(0) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Ok(0),
        code => check(driver, code, "init")?,
    }
    let mut count = 0;
    // SAFETY: the output pointer is valid for writes.
    match unsafe { (driver.device_count)(&raw mut count) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Ok(0),
        code => check(driver, code, "device count")?,
    }
    Ok(count.max(0) as usize)
}

fn find_device(driver: &DriverApi, config: &GpuConfig) -> Result<c_int, GpuError> {
    let (requested, variables) = (config.device, config.visibility.clone());
    let none = |found: usize| {
        let library = driver.library.display().to_string();
        if variables.is_empty() {
            return GpuError::NoDevice { library, requested, found };
        }
        GpuError::DeviceNotVisible { library, requested, found, variables: variables.clone() }
    };
    let found = count_devices(driver)?;
    if requested >= found {
        return Err(none(found));
    }
    let mut ordinal = 0;
    // SAFETY: the output pointer is valid for writes, and the index is less than the device count.
    let code = unsafe { (driver.device_get)(&raw mut ordinal, requested as c_int) };
    check(driver, code, "device get")?;
    Ok(ordinal)
}
