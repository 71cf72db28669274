//! Symbol table of hipBLASLt and cuBLASLt. Both take the same function arguments; their enum values differ.

use std::ffi::{c_int, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, GpuApi};

/// Status code of a BLASLt call; 0 = success.
pub type BlasLtStatus = c_int;

table! {
    /// Function table of hipBLASLt or cuBLASLt.
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
        /// `(handle, operation, layouts of A B C D, preference, requested result count, results out, result
        /// count out)`; one result has [`BlasLtConstants::result_bytes`] bytes.
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
        /// `()`: version of cuBLASLt as one integer.
        cuda_version: "" "cublasLtGetVersion" () -> usize;
    }
}

/// Element type; hipBLASLt and cuBLASLt use the same enum values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum BlasDataType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 2,
    /// bfloat16 (the upper 16 bits of binary32).
    BF16 = 14,
    /// OCP fp8 e4m3, 8 bits.
    E4M3 = 28,
}

/// Enum values and struct sizes that differ between hipBLASLt and cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlasLtConstants {
    /// Operation attribute: whether A is transposed.
    pub trans_a: c_int,
    /// Operation attribute: whether B is transposed.
    pub trans_b: c_int,
    /// Operation attribute: epilogue.
    pub epilogue: c_int,
    /// Operation attribute: address of the bias.
    pub bias_pointer: c_int,
    /// Operation attribute: element type of the bias.
    pub bias_type: c_int,
    /// Operation attributes: addresses of the f32 scales of A and B.
    pub scale_pointers: [c_int; 2],
    /// Operation attributes: scaling modes (granularity of the scales) of A and B.
    pub scale_modes: [c_int; 2],
    /// Values for `scale_modes`: one scale per row, one per 128 elements of a row, one per 128 × 128 block;
    /// `None` where these modes are not known to work.
    pub scale_kinds: Option<[c_int; 3]>,
    /// Operation value: not transposed.
    pub op_n: c_int,
    /// Operation value: transposed.
    pub op_t: c_int,
    /// Compute type: f32 accumulation.
    pub compute_f32: c_int,
    /// Layout attribute: number of matrices of a batch.
    pub batch_count: c_int,
    /// Layout attribute: stride between matrices of a batch, in elements.
    pub batch_stride: c_int,
    /// Preference attribute: bit mask of the allowed split-K reduction schemes (u32); 0 = no split-K.
    pub reduction_scheme: Option<c_int>,
    /// Preference attributes: minimum alignment of A, B, C and D in bytes (u32).
    pub alignments: Option<[c_int; 4]>,
    /// Size of an opaque algorithm descriptor, in bytes.
    pub algorithm_bytes: usize,
    /// Size of one heuristic result in bytes: algorithm, then workspace bytes (u64), then status (i32).
    pub result_bytes: usize,
}

impl BlasLtConstants {
    /// Value of `epilogue` in both libraries: default, without bias.
    pub const EPILOGUE_NONE: c_int = 1;
    /// Value of `epilogue` in both libraries: adds the bias, one element per row of D.
    pub const EPILOGUE_BIAS: c_int = 4;
    /// Preference attribute of both libraries: maximum workspace of an algorithm in bytes (u64).
    pub const WORKSPACE_BYTES: c_int = 1;

    /// Returns the constants of the BLASLt library of `api`.
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
