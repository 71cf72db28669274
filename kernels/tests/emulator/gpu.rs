//! Minimal host API of the emulated GPU for tests, over the function tables of the GPU backend: memory,
//! kernels compiled from source text, and launches.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;

use hip_runtime_sys::{
    DriverApi, DriverPtr, DriverStatus, GpuApi, LibrarySearchPaths, RtcApi, code,
};
use kernels::gpu::HEADERS;

use crate::emulated_gpu;

/// An emulated GPU: its driver and run-time compiler, and one stream.
pub(crate) struct EmulatedGpu {
    pub(crate) driver: DriverApi,
    rtc: RtcApi,
    pub(crate) context: DriverPtr,
    pub(crate) stream: DriverPtr,
    set_seed: extern "C" fn(u64),
    set_isa: extern "C" fn(u32),
    clear_failure: extern "C" fn(),
    last_failure: extern "C" fn() -> *const c_char,
}

/// Memory of the device; freed by [`EmulatedGpu::free`] or with the process.
#[derive(Clone, Copy)]
pub(crate) struct EmulatedMemory {
    pub(crate) at: DriverPtr,
    pub(crate) bytes: usize,
}

/// One argument of a kernel launch.
#[derive(Clone, Copy)]
pub(crate) enum KernelArg {
    At(EmulatedMemory),
    U32(u32),
    F32(f32),
}

/// Shape of a launch: number of blocks, threads per block, and dynamic shared memory in bytes.
#[derive(Clone, Copy)]
pub(crate) struct LaunchShape(pub(crate) u32, pub(crate) u32, pub(crate) u32);

impl EmulatedGpu {
    pub(crate) fn open() -> Self {
        Self::open_device(0)
    }

    /// Opens device `ordinal` and makes it the current device of this thread.
    pub(crate) fn open_device(ordinal: i32) -> Self {
        Self::open_device_of(&emulated_gpu::library(), ordinal)
    }

    /// Opens the emulated GPU of a copy of the library.
    pub(crate) fn open_library(path: &Path) -> Self {
        Self::open_device_of(path, 0)
    }

    fn open_device_of(path: &Path, ordinal: i32) -> Self {
        let driver =
            DriverApi::open(GpuApi::Hip, &LibrarySearchPaths::named("driver", path)).unwrap();
        let rtc = RtcApi::open(GpuApi::Hip, &LibrarySearchPaths::named("run-time compiler", path))
            .unwrap();
        // SAFETY: the emulator's library is already loaded, and its functions have these types.
        let (set_seed, set_isa, clear_failure, last_failure) = unsafe {
            let library: &'static _ = Box::leak(Box::new(libloading::Library::new(path).unwrap()));
            (
                *library.get(b"hipemuSetSeed").unwrap(),
                *library.get(b"hipemuSetIsa").unwrap(),
                *library.get(b"hipemuClearFailure").unwrap(),
                *library.get(b"hipemuLastFailure").unwrap(),
            )
        };
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the driver writes the context and the new stream to variables that are writable.
        unsafe {
            assert_eq!((driver.context_retain)(&raw mut context, ordinal), code::SUCCESS);
            assert_eq!((driver.context_set)(context), code::SUCCESS);
            assert_eq!((driver.stream_create)(&raw mut stream, 1), code::SUCCESS);
        }
        Self { driver, rtc, context, stream, set_seed, set_isa, clear_failure, last_failure }
    }

    /// Makes this device the current device of the calling thread.
    pub(crate) fn select(&self) {
        // SAFETY: a context of the emulator is never destroyed.
        assert_eq!(unsafe { (self.driver.context_set)(self.context) }, code::SUCCESS);
    }

    /// Makes later compilations produce machine code of GPU architecture `gfx`, for example 0x942.
    pub(crate) fn use_machine_code(&self, gfx: u32) {
        (self.set_isa)(gfx);
    }

    /// Makes the device usable again after a failed launch; a real device would stay unusable.
    pub(crate) fn clear_failure(&self) {
        (self.clear_failure)();
    }

    /// Returns the reason why the last failed launch failed.
    pub(crate) fn last_failure(&self) -> String {
        // SAFETY: the emulator returns a NUL-terminated text, which changes in the next failed launch only.
        let text = unsafe { CStr::from_ptr((self.last_failure)()) };
        text.to_string_lossy().into_owned()
    }

    /// Sets the order in which lanes and warps run; see `Order` in `kernels/emu/block.h`.
    pub(crate) fn seed(&self, seed: u64) {
        (self.set_seed)(seed);
    }

    /// Compiles a source to a shared object, or returns the compiler's log. `edit` may change the text of
    /// each header.
    pub(crate) fn try_compile(
        &self,
        source: &str,
        options: &[&str],
        edit: impl Fn(&str, &str) -> String,
    ) -> Result<Vec<u8>, String> {
        let text = |t: &str| CString::new(t).unwrap();
        let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect();
        let texts: Vec<CString> = HEADERS.iter().map(|(n, t)| text(&edit(n, t))).collect();
        let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
        let at = |v: &[CString]| v.iter().map(|t| t.as_ptr()).collect::<Vec<*const c_char>>();
        let (source, name) = (text(source), text("test/test.hip"));
        let (names, texts, options) = (at(&names), at(&texts), at(&options));
        let mut program = std::ptr::null_mut();
        let count = names.len() as i32;
        // SAFETY: all texts are NUL-terminated and live to the end of this function; the array lengths match.
        unsafe {
            let create = self.rtc.create;
            let code = create(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                count,
                texts.as_ptr(),
                names.as_ptr(),
            );
            assert_eq!(code, 0);
            let code = (self.rtc.compile)(program, options.len() as i32, options.as_ptr());
            let (bytes, get) = match code {
                0 => (self.rtc.code_bytes, self.rtc.code),
                _ => (self.rtc.log_bytes, self.rtc.log),
            };
            let mut len = 0;
            assert_eq!(bytes(program, &raw mut len), 0);
            let mut out = vec![0u8; len];
            assert_eq!(get(program, out.as_mut_ptr().cast()), 0);
            (self.rtc.destroy)(&raw mut program);
            if code == 0 { Ok(out) } else { Err(String::from_utf8_lossy(&out).into_owned()) }
        }
    }

    /// Compiles a source and returns its kernel `name`.
    pub(crate) fn kernel(&self, source: &str, options: &[&str], name: &str) -> DriverPtr {
        let [kernel] = self.kernels(source, options, [name]);
        kernel
    }

    /// Compiles a source and returns several of its kernels.
    pub(crate) fn kernels<const N: usize>(
        &self,
        source: &str,
        options: &[&str],
        names: [&str; N],
    ) -> [DriverPtr; N] {
        let image = self.try_compile(source, options, |_, text| text.to_owned());
        let module = self.load(&image.unwrap_or_else(|log| panic!("{log}")));
        names.map(|name| self.function(module, name))
    }

    /// Loads a compiled image as a module of the device.
    pub(crate) fn load(&self, image: &[u8]) -> DriverPtr {
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is writable, and `image` is a complete compiled image.
        let code = unsafe { (self.driver.module_load)(&raw mut module, image.as_ptr().cast()) };
        assert_eq!(code, code::SUCCESS);
        module
    }

    /// Returns the kernel `name` of a module.
    pub(crate) fn function(&self, module: DriverPtr, name: &str) -> DriverPtr {
        let name = CString::new(name).unwrap();
        let mut function = std::ptr::null_mut();
        let get = self.driver.module_function;
        // SAFETY: `module` is a loaded module, and `function` is writable.
        assert_eq!(unsafe { get(&raw mut function, module, name.as_ptr()) }, code::SUCCESS);
        function
    }

    /// Launches a kernel and returns the driver's status code.
    pub(crate) fn try_launch(
        &self,
        kernel: DriverPtr,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> DriverStatus {
        let mut args = args.to_vec();
        let mut addresses: Vec<DriverPtr> = args.iter_mut().map(KernelArg::address).collect();
        let LaunchShape(blocks, threads, shared) = shape;
        let (launch, null) = (self.driver.launch, std::ptr::null_mut());
        // SAFETY: each test passes the arguments that its kernel takes.
        unsafe {
            launch(
                kernel,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                self.stream,
                addresses.as_mut_ptr(),
                null,
            )
        }
    }

    pub(crate) fn launch(&self, kernel: DriverPtr, shape: LaunchShape, args: &[KernelArg]) {
        assert_eq!(self.try_launch(kernel, shape, args), code::SUCCESS);
    }

    /// Allocates device memory, which the emulator fills with NaN.
    pub(crate) fn alloc(&self, bytes: usize) -> EmulatedMemory {
        let mut at = std::ptr::null_mut();
        // SAFETY: the driver writes the address to `at`, which is writable.
        assert_eq!(unsafe { (self.driver.alloc)(&raw mut at, bytes) }, code::SUCCESS);
        EmulatedMemory { at, bytes }
    }

    pub(crate) fn free(&self, memory: EmulatedMemory) {
        // SAFETY: no test uses the memory after it is freed.
        assert_eq!(unsafe { (self.driver.free)(memory.at) }, code::SUCCESS);
    }

    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> EmulatedMemory {
        let memory = self.alloc(size_of_val(values));
        self.write(memory, values);
        memory
    }

    pub(crate) fn write<T: Copy>(&self, memory: EmulatedMemory, values: &[T]) {
        let (copy, from) = (self.driver.copy_to_device, values.as_ptr().cast::<c_void>());
        assert!(size_of_val(values) <= memory.bytes);
        // SAFETY: `values` and the device memory have at least the number of bytes that are copied.
        let code = unsafe { copy(memory.at, from, size_of_val(values), self.stream) };
        assert_eq!(code, code::SUCCESS);
    }

    pub(crate) fn download<T: Copy + Default>(&self, memory: EmulatedMemory) -> Vec<T> {
        let mut values = vec![T::default(); memory.bytes / size_of::<T>()];
        let copy = self.driver.copy_to_host;
        // SAFETY: the device memory and `values` have at least the number of bytes that are copied.
        let code =
            unsafe { copy(values.as_mut_ptr().cast(), memory.at, memory.bytes, self.stream) };
        assert_eq!(code, code::SUCCESS);
        assert_eq!(self.synchronize(), code::SUCCESS);
        values
    }

    pub(crate) fn synchronize(&self) -> DriverStatus {
        // SAFETY: `self.stream` exists until the process ends.
        unsafe { (self.driver.stream_synchronize)(self.stream) }
    }
}

impl KernelArg {
    fn address(&mut self) -> DriverPtr {
        match self {
            Self::At(memory) => (&raw mut memory.at).cast(),
            Self::U32(value) => (&raw mut *value).cast(),
            Self::F32(value) => (&raw mut *value).cast(),
        }
    }
}
