//! Symbol table of hipBLASLt and cuBLASLt. Corresponding functions of both libraries have the same
//! parameters, but some enum values differ.

use std::ffi::{c_int, c_void};

use crate::symbol_table::table;
use crate::{DriverPtr, GpuApi};

/// Status code of a function of hipBLASLt or cuBLASLt; 0 = success.
pub type BlasLtStatus = c_int;

table! {
    /// Function table of hipBLASLt or cuBLASLt. In argument lists, `x out` is a pointer to which the function
    /// writes `x`.
    BlasLtApi {
        /// Arguments `(handle out)`. Creates a library handle.
        create: "hipblasLtCreate" "cublasLtCreate" (*mut DriverPtr);
        /// Arguments `(handle)`. Destroys a library handle.
        destroy: "hipblasLtDestroy" "cublasLtDestroy" (DriverPtr);
        /// Arguments `(operation out, compute type, scale type)`. Creates a matmul descriptor.
        operation_create: "hipblasLtMatmulDescCreate" "cublasLtMatmulDescCreate" (*mut DriverPtr, c_int, c_int);
        /// Arguments `(operation)`. Destroys a matmul descriptor.
        operation_destroy: "hipblasLtMatmulDescDestroy" "cublasLtMatmulDescDestroy" (DriverPtr);
        /// Arguments `(operation, attribute, value, bytes)`. Sets an attribute of a matmul descriptor.
        operation_set: "hipblasLtMatmulDescSetAttribute" "cublasLtMatmulDescSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// Arguments `(layout out, data type, rows, columns, leading dimension)`. Creates the layout of a
        /// column-major matrix.
        layout_create: "hipblasLtMatrixLayoutCreate" "cublasLtMatrixLayoutCreate" (
            *mut DriverPtr, c_int, u64, u64, i64,
        );
        /// Arguments `(layout)`. Destroys a matrix layout.
        layout_destroy: "hipblasLtMatrixLayoutDestroy" "cublasLtMatrixLayoutDestroy" (DriverPtr);
        /// Arguments `(layout, attribute, value, bytes)`. Sets an attribute of a matrix layout.
        layout_set: "hipblasLtMatrixLayoutSetAttribute" "cublasLtMatrixLayoutSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// Arguments `(preference out)`. Creates a preference for the heuristic.
        preference_create: "hipblasLtMatmulPreferenceCreate" "cublasLtMatmulPreferenceCreate" (*mut DriverPtr);
        /// Arguments `(preference)`. Destroys a preference.
        preference_destroy: "hipblasLtMatmulPreferenceDestroy" "cublasLtMatmulPreferenceDestroy" (DriverPtr);
        /// Arguments `(preference, attribute, value, bytes)`. Sets an attribute of a preference.
        preference_set: "hipblasLtMatmulPreferenceSetAttribute" "cublasLtMatmulPreferenceSetAttribute" (
            DriverPtr, c_int, *const c_void, usize,
        );
        /// Arguments `(handle, operation, layouts of A B C D, preference, requested result count, results
        /// out, result count out)`. Returns algorithms for a matmul, each as a result of
        /// [`BlasLtConstants::result_bytes`] bytes.
        heuristic: "hipblasLtMatmulAlgoGetHeuristic" "cublasLtMatmulAlgoGetHeuristic" (
            DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, DriverPtr, c_int, *mut c_void, *mut c_int,
        );
        /// Arguments `(handle, operation, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm,
        /// workspace, workspace bytes, stream)`. Launches `D = alpha · A B + beta · C`.
        matmul: "hipblasLtMatmul" "cublasLtMatmul" (
            DriverPtr, DriverPtr, *const c_void, *const c_void, DriverPtr, *const c_void, DriverPtr, *const c_void, *const c_void,
            DriverPtr, DriverPtr, DriverPtr, *const c_void, DriverPtr, usize, DriverPtr,
        );
    }
    optional {
        /// No arguments. Returns the version of cuBLASLt as one integer; hipBLASLt has no such function.
        cuda_version: "" "cublasLtGetVersion" () -> usize;
    }
}

/// Element type of a matrix (`hipDataType`, `cudaDataType`); both APIs use equal enum values.
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
    /// FNUZ fp8 e4m3, 8 bits: the fp8 format of gfx942.
    E4M3Fnuz = 1000,
}

/// Enum values and struct sizes that differ between hipBLASLt and cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlasLtConstants {
    /// Matmul descriptor attribute: whether A is transposed.
    pub trans_a: c_int,
    /// Matmul descriptor attribute: whether B is transposed.
    pub trans_b: c_int,
    /// Matmul descriptor attribute: epilogue, which selects whether a bias is added.
    pub epilogue: c_int,
    /// Matmul descriptor attribute: address of the bias.
    pub bias_pointer: c_int,
    /// Matmul descriptor attribute: element type of the bias.
    pub bias_type: c_int,
    /// Matmul descriptor attributes: addresses of the f32 scales of A and B.
    pub scale_pointers: [c_int; 2],
    /// Matmul descriptor attributes: scaling modes (granularity of the scales) of A and B.
    pub scale_modes: [c_int; 2],
    /// Values of `scale_modes`: one f32 scale per row of A, and one per column of B.
    pub vector_scales: [c_int; 2],
    /// Values of `scale_modes`: one f32 scale per 128 × 128 block of A, and one per 128 elements of a column
    /// of B. `None` if the library does not support these modes: the header of hipBLASLt lists them as "not
    /// supported yet".
    pub block_scales: Option<[c_int; 2]>,
    /// Value of `trans_a` and `trans_b`: not transposed.
    pub op_n: c_int,
    /// Value of `trans_a` and `trans_b`: transposed.
    pub op_t: c_int,
    /// Compute type with f32 accumulation.
    pub compute_f32: c_int,
    /// Matrix layout attribute: number of matrices in a batch.
    pub batch_count: c_int,
    /// Matrix layout attribute: stride between the matrices of a batch, in elements.
    pub batch_stride: c_int,
    /// Preference attribute: bit mask (u32) of the split-K reduction schemes that are allowed; 0 = no
    /// split-K.
    pub reduction_scheme: Option<c_int>,
    /// Preference attributes: minimum alignment (u32) of A, B, C and D, in bytes.
    pub alignments: Option<[c_int; 4]>,
    /// Size in bytes of the opaque algorithm descriptor that the heuristic returns.
    pub algorithm_bytes: usize,
    /// Size in bytes of one result of the heuristic. It contains the algorithm, the workspace size in bytes
    /// (u64) and the status (i32).
    pub result_bytes: usize,
}

// hipBLASLt's attribute 105 (uniform summation order) is not used: it makes results bit-exact along M, which
// is the dimension of the output features. Required is a result of each token that does not depend on the
// other tokens of a batch, which are along N.
impl BlasLtConstants {
    /// Value of `epilogue` in both libraries: no bias is added.
    pub const EPILOGUE_NONE: c_int = 1;
    /// Value of `epilogue` in both libraries: a bias with one element per row of D is added.
    pub const EPILOGUE_BIAS: c_int = 4;
    /// Preference attribute in both libraries: maximum workspace (u64) of an algorithm, in bytes.
    pub const WORKSPACE_BYTES: c_int = 1;

    /// Returns the constants of hipBLASLt or cuBLASLt, as selected by `api`.
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
                vector_scales: [3, 3],
                block_scales: None,
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
                vector_scales: [3, 3],
                block_scales: Some([5, 4]),
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
