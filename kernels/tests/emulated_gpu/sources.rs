//! The emulator's source files, which tests compile.

/// Returns (name, text) pairs of files; names are relative to `kernels/emu`.
macro_rules! texts {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../emu/", $name)))),*]
    };
}

/// Names and texts of the emulator's source files.
pub(super) const SOURCES: &[(&str, &str)] = texts![
    "block.cpp",
    "fiber.cpp",
    "grid.cpp",
    "hip_device.cpp",
    "hip_graph.cpp",
    "hip_memory.cpp",
    "hip_module.cpp",
    "hip_stream.cpp",
    "hiprtc.cpp",
    "rccl.cpp",
    "settings.cpp",
    "block.h",
    "emu.h",
    "fiber.h",
    "grid_run.h",
    "hip.h",
    "lane.h",
    "settings.h",
    "isa/bind.cpp",
    "isa/code_object.cpp",
    "isa/control.cpp",
    "isa/conversions.cpp",
    "isa/counters.cpp",
    "isa/decode.cpp",
    "isa/elements.cpp",
    "isa/floats.cpp",
    "isa/global.cpp",
    "isa/integers.cpp",
    "isa/lanes.cpp",
    "isa/launch.cpp",
    "isa/lds.cpp",
    "isa/lds_races.cpp",
    "isa/matrix.cpp",
    "isa/metadata.cpp",
    "isa/number.cpp",
    "isa/packed.cpp",
    "isa/pending.cpp",
    "isa/scalar.cpp",
    "isa/scalar_pairs.cpp",
    "isa/wide.cpp",
    "isa/workgroup.cpp",
    "isa/address_space.h",
    "isa/counters.h",
    "isa/instruction.h",
    "isa/launch.h",
    "isa/lds_races.h",
    "isa/metadata.h",
    "isa/number.h",
    "isa/pending.h",
    "isa/rules.h",
    "isa/wave.h",
    "isa/workgroup.h",
];
