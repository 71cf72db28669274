//! Compiled kernel modules on the device, and their kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::{DriverPtr, GpuApi, flag};

use super::error::GpuError;
use super::gpu_runtime::GpuRuntime;
use super::jit::JitCompiler;
use super::kernel_source::{KernelBuild, KernelDefine, KernelSource};

/// Launchable kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub struct KernelFunction {
    /// Function handle of the driver; null during a dry run.
    pub raw: DriverPtr,
    /// Name of the kernel.
    pub name: &'static str,
}

// SAFETY: every thread may launch the handle; modules are never unloaded, so that graphs may outlive their
// device.
unsafe impl Send for KernelFunction {}
// SAFETY: every thread may launch the handle; modules are never unloaded.
unsafe impl Sync for KernelFunction {}

/// Driver handle of a loaded module.
#[derive(Debug, Clone, Copy)]
struct KernelModule(DriverPtr);

// SAFETY: every thread may use the handle; modules are never unloaded.
unsafe impl Send for KernelModule {}

/// Key of a kernel module: name of its source file, and the defines with which it was compiled.
type ModuleKey = (&'static str, Vec<KernelDefine>);

/// Registry of all kernel modules that have been compiled and loaded on the device.
#[derive(Debug, Default)]
pub(super) struct KernelModules {
    loaded: Mutex<LoadedModules>,
}

/// Loaded modules and their kernels, and the kernels that a dry run has requested.
#[derive(Debug, Default)]
struct LoadedModules {
    modules: HashMap<ModuleKey, KernelModule>,
    functions: HashMap<(&'static str, ModuleKey), KernelFunction>,
    /// Kernels that were requested during a dry run and are not compiled yet.
    requested: HashMap<(&'static str, ModuleKey), &'static KernelSource>,
}

impl KernelModules {
    /// Returns the kernel `name` of `source`, after compiling and loading it if necessary. During a dry run,
    /// the kernel is only added to the requested kernels.
    ///
    /// Errors: the kernel is not loaded and a graph capture is active; the compiler or the driver fails.
    pub(super) fn function(
        &self,
        runtime: &GpuRuntime,
        jit: &JitCompiler,
        source: &'static KernelSource,
        name: &'static str,
        defines: &[KernelDefine],
    ) -> Result<KernelFunction, GpuError> {
        let key = (name, (source.name, defines.to_vec()));
        let mut loaded = self.lock();
        if let Some(function) = loaded.functions.get(&key) {
            return Ok(*function);
        }
        runtime.not_capturing("compiling a kernel")?;
        if runtime.is_dry_run() {
            loaded.requested.entry(key).or_insert(source);
            return Ok(KernelFunction { raw: std::ptr::null_mut(), name });
        }
        let loaded_module = loaded.modules.get(&key.1).copied();
        let module = match loaded_module {
            Some(module) => module,
            None => load(runtime, &jit.image(source, defines)?)?,
        };
        loaded.modules.insert(key.1.clone(), module);
        let function = find(runtime, module, source, name)?;
        loaded.functions.insert(key, function);
        Ok(function)
    }

    /// Compiles and loads all kernels that were requested during a dry run.
    pub(super) fn load_requested(
        &self,
        runtime: &GpuRuntime,
        jit: &JitCompiler,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), GpuError> {
        let requested = std::mem::take(&mut self.lock().requested);
        let builds: HashMap<&ModuleKey, _> =
            requested.iter().map(|((_, key), source)| (key, *source)).collect();
        let build = |((_, defines), source): (&ModuleKey, _)| KernelBuild {
            source,
            defines: defines.clone(),
        };
        let builds: Vec<_> = builds.into_iter().map(build).collect();
        self.load_all(runtime, jit, &builds, progress)?;
        for ((name, (_, defines)), source) in requested {
            self.function(runtime, jit, source, name, &defines)?;
        }
        Ok(())
    }

    /// Compiles and loads several sources. They are compiled in parallel, up to the maximum number of
    /// parallel compilations of `jit`.
    pub(super) fn load_all(
        &self,
        runtime: &GpuRuntime,
        jit: &JitCompiler,
        builds: &[KernelBuild],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), GpuError> {
        runtime.not_capturing("compiling kernels")?;
        let key = |build: &KernelBuild| (build.source.name, build.defines.clone());
        let missing: Vec<_> = {
            let loaded = self.lock();
            builds.iter().filter(|b| !loaded.modules.contains_key(&key(b))).cloned().collect()
        };
        for (build, image) in missing.iter().zip(jit.images(&missing, progress)) {
            let module = load(runtime, &image?)?;
            self.lock().modules.insert(key(build), module);
        }
        Ok(())
    }

    /// Returns the number of loaded modules.
    pub(super) fn count(&self) -> usize {
        self.lock().modules.len()
    }

    fn lock(&self) -> MutexGuard<'_, LoadedModules> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn load(runtime: &GpuRuntime, image: &[u8]) -> Result<KernelModule, GpuError> {
    runtime.enter()?;
    let mut module = std::ptr::null_mut();
    // SAFETY: the image is complete and built for this architecture; the driver copies what it needs.
    let code = unsafe { (runtime.driver.module_load)(&raw mut module, image.as_ptr().cast()) };
    runtime.check(code, "module load")?;
    Ok(KernelModule(module))
}

fn find(
    runtime: &GpuRuntime,
    module: KernelModule,
    source: &'static KernelSource,
    name: &'static str,
) -> Result<KernelFunction, GpuError> {
    let none = GpuError::NoFunction { file: source.name, kernel: name };
    let text = CString::new(name).map_err(|_| none.clone())?;
    let mut raw = std::ptr::null_mut();
    // SAFETY: the module is loaded and the name is NUL-terminated.
    let code = unsafe { (runtime.driver.module_function)(&raw mut raw, module.0, text.as_ptr()) };
    if code != 0 || raw.is_null() {
        return Err(none);
    }
    let function = KernelFunction { raw, name };
    allow_large_shared(runtime, function)?;
    Ok(function)
}

/// Allows more than 48 KiB of dynamic shared memory per thread block for the kernel, which must be enabled
/// explicitly on NVIDIA GPUs. The setting does not slow down the kernel.
fn allow_large_shared(runtime: &GpuRuntime, function: KernelFunction) -> Result<(), GpuError> {
    const STATIC_SHARED: c_int = 1;
    let (GpuApi::Cuda, Some(set), Some(get)) =
        (runtime.api(), runtime.driver.function_set, runtime.driver.function_get)
    else {
        return Ok(());
    };
    let mut used = 0;
    // SAFETY: the output pointer is valid for writes, and the function is loaded.
    let code = unsafe { get(&raw mut used, STATIC_SHARED, function.raw) };
    runtime.check(code, "function attribute")?;
    let max_dynamic = runtime.properties.shared_bytes as c_int - used;
    // SAFETY: the function is loaded.
    let code = unsafe { set(function.raw, flag::FUNCTION_MAX_DYNAMIC_SHARED, max_dynamic) };
    runtime.check(code, "function set attribute")
}
