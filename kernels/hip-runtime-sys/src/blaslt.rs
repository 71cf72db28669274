//! BLASLt: hipBLASLt or cuBLASLt. Functions take equal arguments; the numbers of their enums differ.

use std::ffi::{c_int, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, GpuApi};

/// What a BLASLt call returns; 0 = success.
pub type BlasLtStatus = c_int;

table! {
    /// The matrix library of one vendor.
    BlasLtApi {
        /// `(handle out)`.
        create: "hipblasLtCreate" "cublasLtCreate" (*mut DriverPtr);
        /// `(handle)`.
        destroy: "hipblasLtDestroy" "cublasLtDestroy" (DriverPtr);
        /// `(operation out, compute type, scale type)`.
        operation_create: "hipblasLtMatmulDescCreate" "cublasLtMatmulDescCreate" (*mut DriverPtr, c_int, c_int);
        /// `(operation)`.
        operation_destroy: "hipblasLtMatmulDescDestroy" "cublasLtMatmulDescDestroy" (DriverPtr);
        /// `(operation, attribute, value, bytes)`.
        operation_set: "hipblasLtMatmulDescSetAttribute" "cublasLtMatmulDescSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// `(layout out, data type, rows, columns, leading dimension)`, column-major.
        layout_create: "hipblasLtMatrixLayoutCreate" "cublasLtMatrixLayoutCreate" (
            *mut DriverPtr, c_int, u64, u64, i64,
        );
        /// `(layout)`.
        layout_destroy: "hipblasLtMatrixLayoutDestroy" "cublasLtMatrixLayoutDestroy" (DriverPtr);
        /// `(layout, attribute, value, bytes)`.
        layout_set: "hipblasLtMatrixLayoutSetAttribute" "cublasLtMatrixLayoutSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// `(preference out)`.
        preference_create: "hipblasLtMatmulPreferenceCreate" "cublasLtMatmulPreferenceCreate" (*mut DriverPtr);
        /// `(preference)`.
        preference_destroy: "hipblasLtMatmulPreferenceDestroy" "cublasLtMatmulPreferenceDestroy" (DriverPtr);
        /// `(preference, attribute, value, bytes)`.
        preference_set: "hipblasLtMatmulPreferenceSetAttribute" "cublasLtMatmulPreferenceSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// `(handle, operation, layouts of A B C D, preference, wanted, results out, found out)`; a
        /// result takes [`BlasLtConstants::result_bytes`].
        heuristic: "hipblasLtMatmulAlgoGetHeuristic" "cublasLtMatmulAlgoGetHeuristic" (
            DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, c_int, *mut c_void, *mut c_int,
        );
        /// `(handle, operation, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm,
        /// workspace, workspace bytes, stream)`.
        matmul: "hipblasLtMatmul" "cublasLtMatmul" (
            DriverPtr, DriverPtr, *const c_void, *const c_void, DriverPtr, *const c_void, DriverPtr, *const c_void, *const c_void,
            DriverPtr, DriverPtr, DriverPtr, *const c_void, DriverPtr, usize, DriverPtr,
        );
    }
    optional {
        /// `()`: version as a number.
        cuda_version: "" "cublasLtGetVersion" () -> usize;
    }
}

/// An element type, numbered equally by both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum BlasDataType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 2,
    /// The upper half of binary32.
    BF16 = 14,
    /// 8 bits, OCP e4m3.
    E4M3 = 28,
}

/// Numbers that differ between the libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlasLtConstants {
    /// Operation attribute: whether A is transposed.
    pub trans_a: c_int,
    /// Operation attribute: whether B is transposed.
    pub trans_b: c_int,
    /// Operation attribute: what happens to the sums.
    pub epilogue: c_int,
    /// Operation attribute: address of the bias.
    pub bias_pointer: c_int,
    /// Operation attribute: element type of the bias.
    pub bias_type: c_int,
    /// Operation attributes: addresses of the f32 scales of A and B.
    pub scale_pointers: [c_int; 2],
    /// Operation attributes: granularity of the scales of A and B.
    pub scale_modes: [c_int; 2],
    /// Values of `scale_modes` where they are known to work: one scale a row, one for 128 elements of a row, one for
    /// 128 × 128.
    pub scale_kinds: Option<[c_int; 3]>,
    /// Value: as stored.
    pub op_n: c_int,
    /// Value: transposed.
    pub op_t: c_int,
    /// Value: f32 sums.
    pub compute_f32: c_int,
    /// Layout attribute: matrices of a batch.
    pub batch_count: c_int,
    /// Layout attribute: elements between matrices of a batch.
    pub batch_stride: c_int,
    /// Preference attribute: bits of the allowed ways to add up parts of a sum (u32); 0 = none, sums stay whole.
    pub reduction_scheme: Option<c_int>,
    /// Preference attributes: bytes to which A, B, C, D are aligned (u32).
    pub alignments: Option<[c_int; 4]>,
    /// Bytes of an opaque algorithm.
    pub algorithm_bytes: usize,
    /// Bytes of one answer of the heuristic: algorithm, then workspace bytes (u64), then status (i32).
    pub result_bytes: usize,
}

impl BlasLtConstants {
    /// Value of `epilogue`, equal on both sides: sums as they are.
    pub const EPILOGUE_NONE: c_int = 1;
    /// Value of `epilogue`, equal on both sides: plus the bias, one element per row of D.
    pub const EPILOGUE_BIAS: c_int = 4;
    /// Preference attribute, equal on both sides: bytes of workspace an algorithm may use (u64).
    pub const WORKSPACE_BYTES: c_int = 1;

    /// The numbers of one library.
    #[must_use]
    pub const fn of(api: GpuApi) -> Self {
        match api {
            GpuApi::Hip => Self {
                trans_a: 0,
                trans_b: 1,
                epilogue: 2,
                bias_pointer: 3,
                bias_type: 4,
                scale_pointers: [5, 6],
                scale_modes: [31, 32],
                scale_kinds: None,
                op_n: 111,
                op_t: 112,
                compute_f32: 2,
                batch_count: 0,
                batch_stride: 1,
                reduction_scheme: None,
                alignments: None,
                algorithm_bytes: 24,
                result_bytes: 56,
            },
            GpuApi::Cuda => Self {
                trans_a: 3,
                trans_b: 4,
                epilogue: 7,
                bias_pointer: 8,
                bias_type: 26,
                scale_pointers: [17, 18],
                scale_modes: [31, 32],
                scale_kinds: Some([3, 4, 5]),
                op_n: 0,
                op_t: 1,
                compute_f32: 68,
                batch_count: 5,
                batch_stride: 6,
                reduction_scheme: Some(3),
                alignments: Some([5, 6, 7, 8]),
                algorithm_bytes: 64,
                result_bytes: 96,
            },
        }
    }
}
