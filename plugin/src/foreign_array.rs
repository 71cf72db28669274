//! Arrays in the memory of a foreign host, with their sizes.

use std::ptr::NonNull;

use device::{Buffer, MatRef};
use ops::DType;

use crate::PluginError;

/// Contiguous memory of the host, as `hadron_array` in `include/hadron.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ForeignArray {
    /// Address in the memory of the device.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Element type, as `hadron_dtype`.
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
}

/// Dtypes in the order of `hadron_dtype`.
const DTYPES: [DType; 6] =
    [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::I32, DType::I64];

/// Dtypes of token ids, positions and context lengths.
pub(crate) const INTEGERS: &[DType] = &[DType::I32, DType::I64];

impl ForeignArray {
    /// Returns the element type, which must be one of `expected`.
    pub(crate) fn dtype(
        &self,
        argument: &'static str,
        expected: &'static [DType],
    ) -> Result<DType, PluginError> {
        let found = DTYPES.get(self.dtype as usize).filter(|dtype| expected.contains(dtype));
        found.copied().ok_or(PluginError::ArrayDtype { argument, got: self.dtype, expected })
    }

    /// Checks that the array has `needed` bytes, and that its address is a multiple of `alignment`.
    fn check(
        &self,
        argument: &'static str,
        needed: usize,
        alignment: usize,
    ) -> Result<NonNull<u8>, PluginError> {
        let (address, needed, alignment) = (self.address, needed as u64, alignment as u64);
        let Some(ptr) = NonNull::new(address as *mut u8) else {
            return Err(PluginError::Null { argument });
        };
        if self.bytes < needed {
            return Err(PluginError::TooSmall { argument, got: self.bytes, needed });
        }
        if !address.is_multiple_of(alignment) {
            return Err(PluginError::Misaligned { argument, address, alignment });
        }
        Ok(ptr)
    }

    /// Views the first `len` elements as a vector `[1, len]`.
    ///
    /// # Safety
    /// The array is memory of the device with this address and size, which is not freed and not written by others for `'a`.
    pub(crate) unsafe fn vector<'a>(
        &self,
        argument: &'static str,
        expected: &'static [DType],
        len: usize,
    ) -> Result<MatRef<'a>, PluginError> {
        let dtype = self.dtype(argument, expected)?;
        let ptr = self.check(argument, len * dtype.bytes(), dtype.bytes())?;
        // SAFETY: size and alignment were checked; the caller guarantees the memory.
        Ok(unsafe { MatRef::from_raw(ptr.as_ptr(), dtype, 1, len, len) })
    }

    /// Returns the first `bytes` bytes as a buffer that does not free them.
    ///
    /// # Safety
    /// The array is memory of the device with this address and size, which is not freed until the buffer is dropped, and not
    /// accessed by others while kernels use it.
    pub(crate) unsafe fn buffer(
        &self,
        argument: &'static str,
        bytes: usize,
    ) -> Result<Buffer, PluginError> {
        let ptr = self.check(argument, bytes, Buffer::ALIGNMENT)?;
        // SAFETY: size and alignment were checked; the caller guarantees the memory.
        Ok(unsafe { Buffer::foreign(ptr, bytes) })
    }
}
