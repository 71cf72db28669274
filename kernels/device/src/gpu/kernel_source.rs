//! Kernel sources, embedded in the binary as text.

/// Names and texts of all headers that kernel sources may include.
pub type KernelHeaders = &'static [(&'static str, &'static str)];

/// Source file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// Path relative to `kernels/csrc`.
    pub name: &'static str,
    /// Source text. All headers that it includes are among the [`KernelHeaders`] of the device.
    pub text: &'static str,
}

/// Preprocessor define `-DNAME=value` that specialises a source.
pub type KernelDefine = (&'static str, u32);
