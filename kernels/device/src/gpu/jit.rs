//! JIT compiler of GPU kernels: compiles kernel sources for the architecture of this device with the run-time
//! compiler, and caches the compiled images on disk.

use std::ffi::{CString, c_char, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use hip_runtime_sys::{DriverPtr, GpuApi, RtcApi};

use super::config::{GpuConfig, GpuLibraryPaths};
use super::error::GpuError;
use super::gpu_properties::GpuProperties;
use super::kernel_cache::KernelCache;
use super::kernel_source::{KernelBuild, KernelDefine, KernelHeaders, KernelSource};

/// Maximum number of parallel compilations. Each compilation needs a core and several hundred megabytes of
/// memory.
const MAX_COMPILERS: usize = 16;
/// Maximum interval between progress reports during compilation. Regular reports prevent the supervisor from
/// treating the process as stalled.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// JIT compiler of kernels for one GPU architecture.
#[derive(Debug)]
pub(super) struct JitCompiler {
    rtc: RtcApi,
    arch: String,
    options: Vec<String>,
    /// Part of the cache key: compiler version, architecture and options. A compiled image depends on these
    /// values and on the source.
    identity: String,
    compilers: usize,
    cache: Option<KernelCache>,
    headers: KernelHeaders,
}

/// Result of a compilation, which a compiler thread sends to the thread that called `images`.
struct CompilationResult {
    /// Index of the source in the list of sources to compile.
    index: usize,
    image: Result<Vec<u8>, GpuError>,
}

impl JitCompiler {
    pub(super) fn open(
        config: &GpuConfig,
        searches: &GpuLibraryPaths,
        properties: &GpuProperties,
        headers: KernelHeaders,
    ) -> Result<Self, GpuError> {
        let rtc = RtcApi::open(searches.api, &searches.rtc)?;
        let mut options = options(searches.api, config.emulated_warp_size, &properties.arch);
        options.extend(config.half_dtype.option().map(str::to_owned));
        let compiler = compiler_version(&rtc, config.emulated_warp_size.is_some())?;
        let identity = format!("{compiler} {} {}", properties.arch, options.join(" "));
        // hiprtc compiles only one program at a time, so that parallel compilations would not be faster.
        let parallel = searches.api == GpuApi::Cuda || config.emulated_warp_size.is_some();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let compilers = if parallel { cores.min(MAX_COMPILERS) } else { 1 };
        let cache = config.cache_dir.clone().map(KernelCache::new);
        Ok(Self {
            rtc,
            arch: properties.arch.clone(),
            options,
            identity,
            compilers,
            cache,
            headers,
        })
    }

    /// Returns the compiled image of a source from the cache, or compiles the source if the image is not
    /// cached.
    pub(super) fn image(
        &self,
        source: &'static KernelSource,
        defines: &[KernelDefine],
    ) -> Result<Vec<u8>, GpuError> {
        let defines: Vec<String> = defines.iter().map(|(n, v)| format!("-D{n}={v}")).collect();
        let Some(cache) = &self.cache else { return self.compile(source, &defines) };
        let headers = self.headers.iter().flat_map(|(name, text)| [*name, *text]);
        let parts = [self.identity.as_str(), source.name, source.text];
        let key = KernelCache::key(
            parts.into_iter().chain(headers).chain(defines.iter().map(String::as_str)),
        );
        if let Some(image) = cache.read(key) {
            return Ok(image);
        }
        let image = self.compile(source, &defines)?;
        cache.write(key, &image);
        Ok(image)
    }

    /// Compiles several sources in parallel and returns the images in the order of the sources. Calls
    /// `progress` with the number of compiled images and the total number after each image, and at least
    /// every `PROGRESS_INTERVAL`.
    pub(super) fn images(
        &self,
        builds: &[KernelBuild],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Vec<Result<Vec<u8>, GpuError>> {
        let next = AtomicUsize::new(0);
        let mut images: Vec<Option<_>> = builds.iter().map(|_| None).collect();
        let (sender, compiled) = channel();
        let work = |sender: Sender<_>| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(build) = builds.get(index) else { return };
                let image = self.image(build.source, &build.defines);
                let _ = sender.send(CompilationResult { index, image }); // The receiver is open.
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.compilers.min(builds.len()) {
                let sender = sender.clone();
                scope.spawn(|| work(sender));
            }
            drop(sender);
            receive_images(&compiled, &mut images, progress);
        });
        let unwrap_image =
            |image: Option<_>| image.expect("every build was compiled by one of the threads");
        images.into_iter().map(unwrap_image).collect()
    }

    fn compile(
        &self,
        source: &'static KernelSource,
        defines: &[String],
    ) -> Result<Vec<u8>, GpuError> {
        let options: Vec<&str> = self.options.iter().chain(defines).map(String::as_str).collect();
        let program = RtcProgram::new(&self.rtc, source, self.headers)?;
        match program.compile(&options)? {
            Ok(image) => Ok(image),
            Err(log) => Err(GpuError::Compile {
                file: source.name,
                arch: self.arch.clone(),
                options: options.join(" "),
                log,
            }),
        }
    }
}

/// Receives compiled images until all compiler threads have ended, and stores each image in `images` at the
/// index of its source. Calls `progress` after each image, and at least every `PROGRESS_INTERVAL`.
fn receive_images(
    compiled: &Receiver<CompilationResult>,
    images: &mut [Option<Result<Vec<u8>, GpuError>>],
    progress: &mut dyn FnMut(u64, u64),
) {
    let mut done = 0;
    loop {
        match compiled.recv_timeout(PROGRESS_INTERVAL) {
            Ok(CompilationResult { index, image }) => {
                images[index] = Some(image);
                done += 1;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        progress(done, images.len() as u64);
    }
}

/// Name and version of the run-time compiler.
fn compiler_version(rtc: &RtcApi, is_emulator: bool) -> Result<String, GpuError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both output pointers are valid for writes.
    let code = unsafe { (rtc.version)(&raw mut major, &raw mut minor) };
    rtc_check(code, "version")?;
    let library = if is_emulator {
        // The emulator has no version number. The name of its folder contains a hash of the emulator, so that
        // the folder identifies the images that the emulator generates.
        rtc.library.parent().unwrap_or(&rtc.library).display().to_string()
    } else {
        format!("{:?}", rtc.api)
    };
    Ok(format!("{library} {major}.{minor}"))
}

/// Compiler options that are used for every source.
fn options(api: GpuApi, emulated_warp_size: Option<u32>, arch: &str) -> Vec<String> {
    let common: &[&str] = &["-std=c++17", "-O3", "-ffp-contract=fast"];
    match (emulated_warp_size, api) {
        (Some(warp_size), _) => vec!["-std=c++17".to_owned(), format!("-DWARP_SIZE={warp_size}")],
        (None, GpuApi::Hip) => {
            let arch = format!("--offload-arch={arch}");
            [arch].into_iter().chain(common.iter().map(ToString::to_string)).collect()
        }
        (None, GpuApi::Cuda) => {
            let arch = format!("--gpu-architecture={arch}");
            vec![arch, "--std=c++17".to_owned(), "--extra-device-vectorization".to_owned()]
        }
    }
}

fn rtc_check(code: c_int, call: &'static str) -> Result<(), GpuError> {
    if code == 0 {
        return Ok(());
    }
    Err(GpuError::Call { call, code, name: "run-time compiler".to_owned() })
}

/// Program of the run-time compiler, created from a kernel source.
struct RtcProgram<'a> {
    rtc: &'a RtcApi,
    raw: DriverPtr,
}

impl<'a> RtcProgram<'a> {
    fn new(
        rtc: &'a RtcApi,
        source: &'static KernelSource,
        headers: KernelHeaders,
    ) -> Result<Self, GpuError> {
        let terminated = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let (text, name) = (terminated(source.text), terminated(source.name));
        let headers: Vec<(CString, CString)> =
            headers.iter().map(|(name, text)| (terminated(name), terminated(text))).collect();
        let names: Vec<*const c_char> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let texts: Vec<*const c_char> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the strings are NUL-terminated, and both arrays have `headers.len()` entries.
        let code = unsafe {
            (rtc.create)(
                &raw mut raw,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        rtc_check(code, "create program")?;
        Ok(Self { rtc, raw })
    }

    /// Compiles the program. Returns the image, or the compiler log if the source could not be compiled.
    fn compile(&self, options: &[&str]) -> Result<Result<Vec<u8>, String>, GpuError> {
        let texts: Vec<CString> =
            options.iter().map(|text| CString::new(*text).unwrap_or_default()).collect();
        let options: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        // SAFETY: the program is live and the options are NUL-terminated.
        let code =
            unsafe { (self.rtc.compile)(self.raw, options.len() as c_int, options.as_ptr()) };
        if code != 0 {
            let log = self.read(self.rtc.log_bytes, self.rtc.log, "program log")?;
            let text = String::from_utf8_lossy(&log);
            return Ok(Err(text.trim_end_matches(['\0', '\n']).to_owned()));
        }
        self.read(self.rtc.code_bytes, self.rtc.code, "program code").map(Ok)
    }

    fn read(
        &self,
        bytes: unsafe extern "C" fn(DriverPtr, *mut usize) -> c_int,
        get: unsafe extern "C" fn(DriverPtr, *mut c_char) -> c_int,
        call: &'static str,
    ) -> Result<Vec<u8>, GpuError> {
        let mut len = 0;
        // SAFETY: the program is live and the output pointer is valid for writes.
        rtc_check(unsafe { bytes(self.raw, &raw mut len) }, call)?;
        let mut out = vec![0u8; len];
        // SAFETY: the buffer has the number of bytes that the compiler reported.
        rtc_check(unsafe { get(self.raw, out.as_mut_ptr().cast()) }, call)?;
        Ok(out)
    }
}

impl Drop for RtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created by this compiler and is destroyed once.
        unsafe { (self.rtc.destroy)(&raw mut self.raw) };
    }
}
