//! Kernel sources and their headers, which are embedded as text in the binary.

/// Names and texts of all headers that kernel sources may include.
pub type KernelHeaders = &'static [(&'static str, &'static str)];

/// Source file that contains one or several kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// Path of the file relative to `kernels/csrc`.
    pub name: &'static str,
    /// Source text. All headers that it includes must be in the [`KernelHeaders`] of the device.
    pub text: &'static str,
}

/// Preprocessor define `-DNAME=value` with which a source is compiled.
pub type KernelDefine = (&'static str, u32);

/// Source and the defines with which it is compiled into one module.
#[derive(Debug, Clone)]
pub struct KernelBuild {
    /// Source to compile.
    pub source: &'static KernelSource,
    /// Defines of this build.
    pub defines: Vec<KernelDefine>,
}
