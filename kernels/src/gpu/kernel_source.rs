//! Kernel sources, as text inside the binary.

#[path = "../../csrc/headers.rs"]
mod headers;

pub use headers::HEADERS;

/// One source file of kernels.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// Its path below `kernels/csrc`.
    pub name: &'static str,
    /// Its text. Headers it includes are listed in `kernels/csrc/headers.rs`.
    pub text: &'static str,
}

/// `-DNAME=value`: what a source is specialised for.
pub type KernelDefine = (&'static str, u32);
