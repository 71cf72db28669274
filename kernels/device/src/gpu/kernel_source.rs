//! Kernel sources, as text inside the binary.

/// Name and text of every header that kernel sources may include.
pub type KernelHeaders = &'static [(&'static str, &'static str)];

/// One source file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// Its path below `kernels/csrc`.
    pub name: &'static str,
    /// Its text. Headers it includes are among the [`KernelHeaders`] of the device.
    pub text: &'static str,
}

/// `-DNAME=value`: what a source is specialised for.
pub type KernelDefine = (&'static str, u32);
