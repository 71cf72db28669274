//! Symbol table of the run-time compiler: hiprtc or NVRTC.

use std::ffi::{c_char, c_int};

use crate::DriverPtr;
use crate::symbol_table::table;

table! {
    /// Function table of hiprtc or NVRTC.
    RtcApi {
        /// `(major out, minor out)`.
        version: "hiprtcVersion" "nvrtcVersion" (*mut c_int, *mut c_int);
        /// `(program out, source, name, header count, header sources, header names)`.
        create: "hiprtcCreateProgram" "nvrtcCreateProgram" (
            *mut DriverPtr, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        /// `(program, option count, options)`.
        compile: "hiprtcCompileProgram" "nvrtcCompileProgram" (DriverPtr, c_int, *const *const c_char);
        /// `(program, bytes out)`.
        log_bytes: "hiprtcGetProgramLogSize" "nvrtcGetProgramLogSize" (DriverPtr, *mut usize);
        /// `(program, text out)`.
        log: "hiprtcGetProgramLog" "nvrtcGetProgramLog" (DriverPtr, *mut c_char);
        /// `(program, bytes out)`.
        code_bytes: "hiprtcGetCodeSize" "nvrtcGetCUBINSize" (DriverPtr, *mut usize);
        /// `(program, code out)`.
        code: "hiprtcGetCode" "nvrtcGetCUBIN" (DriverPtr, *mut c_char);
        /// `(program in and out)`.
        destroy: "hiprtcDestroyProgram" "nvrtcDestroyProgram" (*mut DriverPtr);
    }
    optional {}
}
