//! The run-time compiler: hiprtc or NVRTC.

use std::ffi::{c_char, c_int};

use crate::Ptr;
use crate::table::table;

table! {
    /// The run-time compiler of one vendor.
    Rtc {
        /// `(major out, minor out)`.
        version: "hiprtcVersion" "nvrtcVersion" (*mut c_int, *mut c_int);
        /// `(program out, source, name, headers, header sources, header names)`.
        create: "hiprtcCreateProgram" "nvrtcCreateProgram" (
            *mut Ptr, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        /// `(program, options, option texts)`.
        compile: "hiprtcCompileProgram" "nvrtcCompileProgram" (Ptr, c_int, *const *const c_char);
        /// `(program, bytes out)`.
        log_bytes: "hiprtcGetProgramLogSize" "nvrtcGetProgramLogSize" (Ptr, *mut usize);
        /// `(program, text out)`.
        log: "hiprtcGetProgramLog" "nvrtcGetProgramLog" (Ptr, *mut c_char);
        /// `(program, bytes out)`.
        code_bytes: "hiprtcGetCodeSize" "nvrtcGetCUBINSize" (Ptr, *mut usize);
        /// `(program, code out)`.
        code: "hiprtcGetCode" "nvrtcGetCUBIN" (Ptr, *mut c_char);
        /// `(program in and out)`.
        destroy: "hiprtcDestroyProgram" "nvrtcDestroyProgram" (*mut Ptr);
    }
    optional {}
}
