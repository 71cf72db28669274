//! Devices, buffers and kernels; the home of unsafe code.
