//! The structures of the header have the sizes and offsets of those in Rust.

use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::emulated_gpu::bounded_child::run_within;
use hadron_plugin::{ForeignArray, ForeignRanks, ForeignStep, ModelCounters, abi};

/// Lists the size of a structure and the offsets of its fields, as an expression in Rust and in C.
macro_rules! layout {
    ($rust:ty, $c:literal, $($field:ident),*) => {
        (
            vec![size_of::<$rust>(), $(offset_of!($rust, $field)),*],
            [format!("sizeof({})", $c), $(format!("offsetof({}, {})", $c, stringify!($field))),*].to_vec(),
        )
    };
}

#[test]
fn structures_equal_those_of_the_header() {
    let layouts = [
        layout!(ForeignArray, "hadron_array", address, bytes, dtype, reserved),
        layout!(ForeignRanks, "hadron_ranks", context, all_gather, rank, size),
        layout!(
            ForeignStep,
            "hadron_step",
            struct_bytes,
            one_token_rows,
            stream,
            token_ids,
            positions,
            slots,
            row_starts,
            context_lens,
            block_tables,
            output_tokens,
            hidden,
            tokens,
            rows,
            table_width,
            decode_rows,
            max_query_len,
            max_context_len,
            outputs,
            reserved
        ),
        layout!(
            ModelCounters,
            "hadron_counters",
            allocations,
            kernel_modules,
            synchronizations,
            steps
        ),
    ];
    let mut source = String::from("#include \"hadron.h\"\n#include <stddef.h>\n");
    writeln!(source, "_Static_assert(HADRON_ABI_VERSION == {}, \"version\");", abi::ABI_VERSION)
        .unwrap();
    for (values, names) in layouts {
        for (value, name) in values.iter().zip(names) {
            writeln!(source, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("layout.c");
    fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Werror", "-c", "-o", "/dev/null", "-I"]).arg(include);
    let output = run_within(compile.arg(file), Duration::from_mins(1));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
