//! Symbol table of the run-time compiler of kernels: hiprtc (AMD) or NVRTC (NVIDIA).

use std::ffi::{c_char, c_int};

use crate::DriverPtr;
use crate::symbol_table::table;

table! {
    /// Function table of hiprtc or NVRTC.
    RtcApi {
        /// Arguments `(major out, minor out)`. Returns the version of the compiler.
        version: "hiprtcVersion" "nvrtcVersion" (*mut c_int, *mut c_int);
        /// Arguments `(program out, source, name, header count, header sources, header names)`. Creates a
        /// program from source text.
        create: "hiprtcCreateProgram" "nvrtcCreateProgram" (
            *mut DriverPtr, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        /// Arguments `(program, option count, options)`. Compiles a program.
        compile: "hiprtcCompileProgram" "nvrtcCompileProgram" (DriverPtr, c_int, *const *const c_char);
        /// Arguments `(program, bytes out)`. Returns the size of the compiler log.
        log_bytes: "hiprtcGetProgramLogSize" "nvrtcGetProgramLogSize" (DriverPtr, *mut usize);
        /// Arguments `(program, text out)`. Returns the compiler log.
        log: "hiprtcGetProgramLog" "nvrtcGetProgramLog" (DriverPtr, *mut c_char);
        /// Arguments `(program, bytes out)`. Returns the size of the compiled image.
        code_bytes: "hiprtcGetCodeSize" "nvrtcGetCUBINSize" (DriverPtr, *mut usize);
        /// Arguments `(program, code out)`. Returns the compiled image.
        code: "hiprtcGetCode" "nvrtcGetCUBIN" (DriverPtr, *mut c_char);
        /// Arguments `(program in and out)`. Destroys a program.
        destroy: "hiprtcDestroyProgram" "nvrtcDestroyProgram" (*mut DriverPtr);
    }
    optional {}
}
