//! Builder of a kernel launch: arguments are added in the order of the kernel parameters, then the kernel is
//! launched.

use hip_runtime_sys::{DriverPtr, LaunchAttribute, LaunchConfig};

use super::device::GpuDevice;
use super::kernel_module::KernelFunction;
use crate::{DeviceError, DeviceStream, MatMut, MatRef};

/// Maximum total size of the arguments of a kernel, in 64-bit words.
const MAX_WORDS: usize = 56;

/// Kernel launch under construction: kernel, grid, block size and arguments.
#[derive(Debug)]
pub struct KernelLaunch {
    function: KernelFunction,
    /// Grid dimensions x, y and z, in thread blocks.
    grid: [u32; 3],
    block: u32,
    shared_bytes: u32,
    overlaps: bool,
    cluster: u32,
    /// Values of the kernel arguments. Each argument starts at a new 64-bit word and may have several words.
    words: [u64; MAX_WORDS],
    /// Index in `words` of the first word of each argument.
    arg_offsets: [u8; MAX_WORDS],
    words_used: usize,
    arg_count: usize,
}

impl KernelLaunch {
    /// Creates a launch of a `grid` (x, y, z) of thread blocks of `block` threads with `shared_bytes` bytes
    /// of dynamic shared memory.
    #[must_use]
    pub fn new(function: KernelFunction, grid: [u32; 3], block: u32, shared_bytes: u32) -> Self {
        let (words, arg_offsets) = ([0; MAX_WORDS], [0; MAX_WORDS]);
        Self {
            function,
            grid,
            block,
            shared_bytes,
            overlaps: false,
            cluster: 1,
            words,
            arg_offsets,
            words_used: 0,
            arg_count: 0,
        }
    }

    /// Adds one argument that consists of several 64-bit words.
    #[must_use]
    pub fn arg_words(mut self, words: &[u64]) -> Self {
        self.arg_offsets[self.arg_count] = self.words_used as u8;
        self.arg_count += 1;
        self.words[self.words_used..self.words_used + words.len()].copy_from_slice(words);
        self.words_used += words.len();
        self
    }

    fn push(self, word: u64) -> Self {
        self.arg_words(&[word])
    }

    /// Adds a device address as argument.
    #[must_use]
    pub fn arg_ptr(self, address: *const u8) -> Self {
        self.push(address as u64)
    }

    /// Adds the address of an input matrix as argument.
    #[must_use]
    pub fn arg(self, x: MatRef<'_>) -> Self {
        self.arg_ptr(x.as_ptr())
    }

    /// Adds the address of an input matrix as argument; null if `x` is `None`.
    #[must_use]
    pub fn arg_or_null(self, x: Option<MatRef<'_>>) -> Self {
        self.arg_ptr(x.map_or(std::ptr::null(), |x| x.as_ptr()))
    }

    /// Adds the address of an output matrix as argument.
    #[must_use]
    pub fn out(self, y: &mut MatMut<'_>) -> Self {
        self.arg_ptr(y.as_mut_ptr())
    }

    /// Adds a 32-bit unsigned integer as argument.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.push(u64::from(value))
    }

    /// Adds a 32-bit float as argument.
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    /// Enables programmatic dependent launch: the kernel may start before the previous kernel has ended, and
    /// waits for the previous kernel with `griddepcontrol.wait`. The setting has no effect if the driver does
    /// not support it, directly after a wait for another stream, or while per-kernel timestamps are recorded.
    #[must_use]
    pub fn overlaps_predecessor(mut self) -> Self {
        self.overlaps = true;
        self
    }

    /// Launches thread block clusters of `blocks` adjacent thread blocks. The blocks of a cluster are
    /// co-scheduled and can access each other's shared memory (`csrc/dev/cluster.h`).
    #[must_use]
    pub fn in_clusters(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// Launches the kernel on stream `s`. If a grid dimension is 0, nothing is launched.
    ///
    /// # Safety
    /// The arguments match the kernel parameters in number, order and type, and every address is valid for
    /// all accesses of the kernel at these sizes until the kernel has completed.
    pub unsafe fn launch(
        mut self,
        device: &GpuDevice,
        s: &DeviceStream,
    ) -> Result<(), DeviceError> {
        let [x, y, z] = self.grid;
        if self.grid.contains(&0) {
            return Ok(());
        }
        let runtime = device.runtime();
        if runtime.is_dry_run() {
            return Ok(());
        }
        let stream = runtime.stream(s)?;
        runtime.enter()?;
        let mut arguments: [DriverPtr; MAX_WORDS] = [std::ptr::null_mut(); MAX_WORDS];
        for (argument, offset) in arguments.iter_mut().zip(&self.arg_offsets[..self.arg_count]) {
            *argument = std::ptr::from_mut(&mut self.words[usize::from(*offset)..]).cast();
        }
        let arguments = arguments.as_mut_ptr();
        // Programmatic dependent launch is only defined for a dependency on one preceding kernel, so it is
        // disabled after a wait for another stream.
        let overlaps = !runtime.take_stream_wait(s) && self.overlaps && !runtime.is_timestamping();
        let clustered = self.cluster > 1;
        let all_attributes =
            [LaunchAttribute::overlap_predecessor(), LaunchAttribute::clusters(self.cluster)];
        let attributes = &all_attributes[usize::from(!overlaps)..=usize::from(clustered)];
        let code = match runtime.driver.launch_ex {
            Some(launch_ex) if !attributes.is_empty() => {
                let config = LaunchConfig {
                    grid: self.grid,
                    block: [self.block, 1, 1],
                    shared_bytes: self.shared_bytes,
                    stream,
                    attributes: attributes.as_ptr(),
                    attribute_count: attributes.len() as u32,
                };
                // SAFETY: the caller guarantees the arguments; the driver copies configuration and arguments.
                unsafe {
                    launch_ex(&raw const config, self.function.raw, arguments, std::ptr::null_mut())
                }
            }
            // SAFETY: the caller guarantees the arguments; the driver copies them.
            _ => unsafe {
                (runtime.driver.launch)(
                    self.function.raw,
                    x,
                    y,
                    z,
                    self.block,
                    1,
                    1,
                    self.shared_bytes,
                    stream,
                    arguments,
                    std::ptr::null_mut(),
                )
            },
        };
        runtime.check(code, self.function.name)?;
        runtime.launched(s, self.function.name)
    }
}
