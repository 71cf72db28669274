//! The headers that kernel sources include, by the name they include them under: what a run-time compiler is given.
//! A module of whatever compiles kernels (`#[path]`); kept here, beside the files it lists.

/// `(name in the #include, text)`. `emu.h` is not among them: the emulator supplies its own.
pub const HEADERS: &[(&str, &str)] = &[
    ("dev.h", include_str!("dev.h")),
    ("dev/amd.h", include_str!("dev/amd.h")),
    ("dev/nvidia.h", include_str!("dev/nvidia.h")),
    ("dev/vector.h", include_str!("dev/vector.h")),
    ("dev/fp8.h", include_str!("dev/fp8.h")),
    ("dev/collective.h", include_str!("dev/collective.h")),
    ("dev/matrix.h", include_str!("dev/matrix.h")),
    ("dev/mfma.h", include_str!("dev/mfma.h")),
    ("dev/strip.h", include_str!("dev/strip.h")),
    ("attention/wave.h", include_str!("attention/wave.h")),
    ("gemm/tile.h", include_str!("gemm/tile.h")),
    ("skinny/strips.h", include_str!("skinny/strips.h")),
    ("elementwise/elementwise.h", include_str!("elementwise/elementwise.h")),
    ("moe/segment.h", include_str!("moe/segment.h")),
    ("moe_route/moe_route.h", include_str!("moe_route/moe_route.h")),
    ("norm/norm.h", include_str!("norm/norm.h")),
    ("prepare/prepare.h", include_str!("prepare/prepare.h")),
    ("qk_rope/qk_rope.h", include_str!("qk_rope/qk_rope.h")),
    ("sample/chunk.h", include_str!("sample/chunk.h")),
    ("sample/cut.h", include_str!("sample/cut.h")),
    ("sample/edit.h", include_str!("sample/edit.h")),
    ("sample/order.h", include_str!("sample/order.h")),
    ("sample/philox.h", include_str!("sample/philox.h")),
    ("sample/scan.h", include_str!("sample/scan.h")),
    ("sample/select.h", include_str!("sample/select.h")),
    ("step/step.h", include_str!("step/step.h")),
];
