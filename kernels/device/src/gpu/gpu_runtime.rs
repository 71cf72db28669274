//! One opened device: its driver, context, streams and the facts that kernels ask for.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::{DeviceAttribute, DriverApi, DriverPtr, DriverStatus, GpuApi, code, flag};

use super::config::{GpuConfig, LibrarySearches};
use super::error::GpuError;
use super::timestamps::KernelTimestamper;
use crate::{DeviceError, DeviceStream};

/// Streams of a device: the step's, one for copies beside it, and one for launches beside it.
pub(super) const STREAMS: usize = 3;

/// What kernels want to know about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProperties {
    /// Name of the product.
    pub name: String,
    /// `gfx942`, `sm_90a` or `emulated`.
    pub arch: String,
    /// Lanes of a wave.
    pub warp_size: u32,
    /// Streaming multiprocessors or compute units.
    pub multiprocessors: u32,
    /// Shared memory a block may have.
    pub shared_bytes: u32,
    /// Bytes of the level-2 cache; 0 if the driver does not say.
    pub l2_bytes: u32,
}

/// Everything that launches, copies and fences of one device share.
pub struct GpuRuntime {
    /// Functions of the HIP runtime or the CUDA driver.
    pub driver: DriverApi,
    /// Properties of the device.
    pub properties: GpuProperties,
    context: DriverPtr,
    streams: Vec<DriverPtr>,
    /// Launches on some stream are being recorded.
    capturing: AtomicBool,
    /// Launches do nothing.
    dry_run: AtomicBool,
    autotuning_frozen: AtomicBool,
    /// Of each stream: the next launch comes behind another stream, too.
    stream_waits: [AtomicBool; STREAMS],
    /// Whether `marked` is there, so that a launch that is not marked takes no lock.
    timestamping: AtomicBool,
    kernel_timestamper: Mutex<Option<KernelTimestamper>>,
    /// Events that nobody waits for.
    events: Mutex<Vec<DriverPtr>>,
    /// Memory dropped during a capture, which must not be interrupted by freeing it.
    dropped: Mutex<Vec<(MemoryKind, DriverPtr)>>,
}

/// Which allocator memory goes back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of the device.
    Device,
    /// Pinned memory of the host.
    Host,
}

// SAFETY: the handles may be used from any thread whose current context is set, which `enter` does.
unsafe impl Send for GpuRuntime {}
// SAFETY: as above; the drivers lock what calls share.
unsafe impl Sync for GpuRuntime {}

impl GpuRuntime {
    /// Opens the driver and one of its devices.
    pub fn open(config: &GpuConfig, searches: &LibrarySearches) -> Result<Self, GpuError> {
        let driver = DriverApi::open(searches.api, &searches.driver)?;
        let ordinal = find_device(&driver, config.device)?;
        let facts = GpuProperties::read(&driver, ordinal, config.emulated_warp_size)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised and the device exists.
        check(&driver, unsafe { (driver.context_retain)(&raw mut context, ordinal) }, "context")?;
        let mut runtime = Self {
            driver,
            properties: facts,
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
        runtime.enter()?;
        for _ in 0..STREAMS {
            let mut stream = std::ptr::null_mut();
            let create = runtime.driver.stream_create;
            // SAFETY: the context is current.
            let code = unsafe { create(&raw mut stream, flag::STREAM_NON_BLOCKING) };
            runtime.check(code, "stream create")?;
            runtime.streams.push(stream);
        }
        Ok(runtime)
    }

    /// Whose names the driver exports.
    pub fn api(&self) -> GpuApi {
        self.driver.api
    }

    /// By which other devices of this process know this one.
    pub fn context(&self) -> DriverPtr {
        self.context
    }

    /// Makes this device current on the calling thread; cheap, so every call begins with it.
    pub fn enter(&self) -> Result<(), GpuError> {
        // SAFETY: the context lives as long as this value.
        self.check(unsafe { (self.driver.context_set)(self.context) }, "set context")
    }

    /// The driver's stream.
    pub fn stream(&self, s: &DeviceStream) -> Result<DriverPtr, GpuError> {
        let none = GpuError::NoStream { stream: s.0, streams: self.streams.len() };
        self.streams.get(s.0).copied().ok_or(none)
    }

    /// An error for every code of the driver but success.
    pub fn check(&self, code: DriverStatus, call: &'static str) -> Result<(), GpuError> {
        check(&self.driver, code, call)
    }

    /// Refuses what would break a capture, before the driver does and spoils the graph.
    pub fn not_capturing(&self, call: &'static str) -> Result<(), GpuError> {
        if self.is_capturing() { Err(GpuError::Capturing { call }) } else { Ok(()) }
    }

    /// Whether launches are captured as a graph.
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Relaxed)
    }

    /// Notes the begin or the end of a capture.
    pub fn set_capturing(&self, capturing: bool) {
        self.capturing.store(capturing, Ordering::Relaxed);
    }

    /// Whether steps serve requests, which nothing may hold up.
    pub fn is_autotuning_frozen(&self) -> bool {
        self.autotuning_frozen.load(Ordering::Relaxed)
    }

    /// No launch is timed from now on.
    pub fn freeze_autotuning(&self) {
        self.autotuning_frozen.store(true, Ordering::Relaxed);
    }

    /// The next launch on `s`, a stream of this device, has two predecessors.
    pub fn mark_stream_wait(&self, s: &DeviceStream) {
        self.stream_waits[s.0].store(true, Ordering::Relaxed);
    }

    /// Whether this launch on `s`, a stream of this device, is the one.
    pub fn takes_stream_wait(&self, s: &DeviceStream) -> bool {
        self.stream_waits[s.0].swap(false, Ordering::Relaxed)
    }

    /// Whether launches only note what they need.
    pub fn is_dry_run(&self) -> bool {
        self.dry_run.load(Ordering::Relaxed)
    }

    /// Begins or ends a dry run.
    pub fn set_dry_run(&self, rehearsing: bool) {
        self.dry_run.store(rehearsing, Ordering::Relaxed);
    }

    /// Whether each launch is followed by a mark: none may begin before its predecessor has ended.
    pub fn is_timestamping(&self) -> bool {
        self.timestamping.load(Ordering::Relaxed)
    }

    /// Launches from now on are marked so, or not at all. Returns how they were before.
    pub fn set_timestamping(
        &self,
        marking: Option<KernelTimestamper>,
    ) -> Option<KernelTimestamper> {
        self.timestamping.store(marking.is_some(), Ordering::Relaxed);
        let mut marked = self.kernel_timestamper.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *marked, marking)
    }

    /// Something called `name` was launched on `s`.
    pub fn launched(&self, s: &DeviceStream, name: &'static str) -> Result<(), DeviceError> {
        if !self.is_timestamping() {
            return Ok(());
        }
        let mut marked = self.kernel_timestamper.lock().unwrap_or_else(PoisonError::into_inner);
        marked.as_mut().map_or(Ok(()), |marking| marking.launched(s, name))
    }

    /// Waits for all launches on `s`.
    pub fn synchronize(&self, s: &DeviceStream) -> Result<(), GpuError> {
        self.not_capturing("synchronize")?;
        self.enter()?;
        let stream = self.stream(s)?;
        // SAFETY: one of this device's streams.
        self.check(unsafe { (self.driver.stream_synchronize)(stream) }, "stream synchronize")
    }

    /// Events at rest.
    pub fn events(&self) -> MutexGuard<'_, Vec<DriverPtr>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives memory back, now or after the capture.
    ///
    /// # Safety
    /// It came from `home` and is not used again.
    pub unsafe fn free(&self, home: MemoryKind, memory: DriverPtr) {
        if self.is_capturing() {
            self.dropped().push((home, memory));
            return;
        }
        let free = match home {
            MemoryKind::Device => self.driver.free,
            MemoryKind::Host => self.driver.host_free,
        };
        // A failure here is a device that is lost already; the next call says so.
        if self.enter().is_ok() {
            // SAFETY: as promised.
            unsafe { free(memory) };
        }
    }

    /// Gives back what was dropped during a capture.
    pub fn free_dropped(&self) {
        let dropped = std::mem::take(&mut *self.dropped());
        for (home, memory) in dropped {
            // SAFETY: `free` was promised so when it set this aside.
            unsafe { self.free(home, memory) };
        }
    }

    fn dropped(&self) -> MutexGuard<'_, Vec<(MemoryKind, DriverPtr)>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free and total bytes; zeros if the device does not answer.
    pub fn mem_info(&self) -> (u64, u64) {
        let (mut free, mut total) = (0usize, 0usize);
        if self.enter().is_ok() {
            // SAFETY: two places to write to.
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
            // SAFETY: made by this device, at rest.
            unsafe { (self.driver.event_destroy)(event) };
        }
        for stream in std::mem::take(&mut self.streams) {
            // SAFETY: made by this device; whoever launched has a share of this value.
            unsafe { (self.driver.stream_destroy)(stream) };
        }
    }
}

impl std::fmt::Debug for GpuRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("facts", &self.properties).finish_non_exhaustive()
    }
}

/// The runtime's result as ours.
fn check(driver: &DriverApi, code: DriverStatus, call: &'static str) -> Result<(), GpuError> {
    if code == code::SUCCESS {
        return Ok(());
    }
    Err(GpuError::Call { call, code, name: error_name(driver, code) })
}

fn error_name(driver: &DriverApi, code: DriverStatus) -> String {
    let mut text = std::ptr::null();
    if let Some(name) = driver.hip_error_name {
        // SAFETY: takes any code.
        text = unsafe { name(code) };
    } else if let Some(name) = driver.cuda_error_name {
        // SAFETY: writes the address of a static text, or nothing.
        unsafe { name(code, &raw mut text) };
    }
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: a static text of the runtime.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn find_device(driver: &DriverApi, wanted: usize) -> Result<c_int, GpuError> {
    let none = |found: usize| GpuError::NoDevice {
        library: driver.library.display().to_string(),
        requested: wanted,
        found,
    };
    // SAFETY: first call of the library; repeating it is allowed.
    match unsafe { (driver.init)(0) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Err(none(0)),
        code => check(driver, code, "init")?,
    }
    let mut found = 0;
    // SAFETY: a place to write to.
    match unsafe { (driver.device_count)(&raw mut found) } {
        code::SUCCESS => {}
        code::NO_DEVICE | code::INVALID_DEVICE => return Err(none(0)),
        code => check(driver, code, "device count")?,
    }
    if wanted >= found.max(0) as usize {
        return Err(none(found.max(0) as usize));
    }
    let mut ordinal = 0;
    // SAFETY: a place to write to, and an index below the count.
    check(driver, unsafe { (driver.device_get)(&raw mut ordinal, wanted as c_int) }, "device get")?;
    Ok(ordinal)
}

/// What an emulated block with waves of 32 lanes may have.
const NVIDIA_SHARED_BYTES: u32 = 227 << 10;

impl GpuProperties {
    fn read(driver: &DriverApi, device: c_int, emulated: Option<u32>) -> Result<Self, GpuError> {
        let attribute = |a: DeviceAttribute| {
            let mut value = 0;
            // SAFETY: a place to write to, and an attribute of this vendor.
            let code =
                unsafe { (driver.device_attribute)(&raw mut value, a.number(driver.api), device) };
            check(driver, code, "device attribute").map(|()| value.max(0) as u32)
        };
        let mut text = [0u8; 128];
        // SAFETY: as many bytes as it may write.
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

/// `gfx942` out of `gfx942:sramecc+:xnack-`.
fn hip_arch(driver: &DriverApi, device: c_int) -> Result<String, GpuError> {
    const NAME_AT: usize = 1160;
    let Some(properties) = driver.properties else {
        let library = driver.library.display().to_string();
        let symbol = "hipGetDevicePropertiesR0600".to_owned();
        return Err(hip_runtime_sys::LibraryOpenError::NoSymbol { library, symbol }.into());
    };
    let mut bytes = [0u8; 4096]; // More than any release writes.
    // SAFETY: large enough for the record.
    check(driver, unsafe { properties(bytes.as_mut_ptr(), device) }, "device properties")?;
    let name = until_nul(&bytes[NAME_AT..NAME_AT + 256]);
    Ok(name.split(':').next().unwrap_or_default().to_owned())
}

/// The architecture with its own instructions, where it has any.
fn cuda_arch(major: u32, minor: u32) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
