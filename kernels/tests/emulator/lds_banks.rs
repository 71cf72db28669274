//! Bank conflicts of LDS accesses, as emulated machine code counts them: the lanes that are served together and the
//! number of banks, by architecture, direction and width. `kernels/emu/isa/lds_banks.h` has the sources.

use std::ffi::{CStr, c_char};

use crate::emulated_gpu;
use crate::gpu::{KernelArg, LaunchShape};
use crate::machine_code::{ARCHITECTURES, MachineCodeGpu};

const LANES: u32 = 64;
/// Values of `LdsAccessKind` (`kernels/emu/isa/lds_races.h`).
const READ: u32 = 0;
const WRITE: u32 = 1;

type ConflictFunction = unsafe extern "C" fn(u32, u32, u32, *const u32, u64) -> u32;

/// An LDS access: architecture, kind and bytes per lane.
#[derive(Debug, Clone, Copy)]
struct LdsAccess {
    gfx: u32,
    kind: u32,
    bytes: u32,
}

impl LdsAccess {
    /// Returns the additional cycles that bank conflicts cause if the lanes in `active` access `addresses`.
    fn conflicts(self, addresses: [u32; LANES as usize], active: u64) -> u32 {
        // SAFETY: the emulator's library has this function, which reads 64 addresses.
        unsafe {
            let library = libloading::Library::new(emulated_gpu::library()).unwrap();
            let count = library.get::<ConflictFunction>(b"hipemuLdsConflicts").unwrap();
            count(self.gfx, self.kind, self.bytes, addresses.as_ptr(), active)
        }
    }

    /// Whether lanes `a` and `b` are served together: they conflict if they access two words of one bank.
    fn serves_together(self, a: u32, b: u32) -> bool {
        let mut addresses = [0; LANES as usize];
        addresses[b as usize] = 1 << 10;
        self.conflicts(addresses, 1 << a | 1 << b) > 0
    }

    /// Returns the groups of lanes that are served together, by their first lanes.
    fn groups(self) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = Vec::new();
        for lane in 0..LANES {
            match groups.iter_mut().find(|group| self.serves_together(group[0], lane)) {
                Some(group) => group.push(lane),
                None => groups.push(vec![lane]),
            }
        }
        groups
    }

    /// Returns the number of banks: the smallest distance in words at which two lanes of a group conflict.
    fn banks(self) -> u32 {
        let conflict = |words: u32| {
            let mut addresses = [0; LANES as usize];
            addresses[1] = 4 * words;
            self.conflicts(addresses, 0b11) > 0
        };
        let words = self.bytes.max(4) / 4;
        (words..).step_by(words as usize).find(|&distance| conflict(distance)).unwrap()
    }

    /// Returns the additional cycles of an access of operand vectors: lane `l` accesses row `l % 16` at byte
    /// `bytes * (l / 16)`, rows are `stride` bytes apart.
    fn operand_conflicts(self, stride: u32) -> u32 {
        let addresses =
            std::array::from_fn(|l| l as u32 % 16 * stride + l as u32 / 16 * self.bytes);
        self.conflicts(addresses, !0)
    }
}

/// Returns the groups of `lanes` consecutive lanes.
fn consecutive(lanes: u32) -> Vec<Vec<u32>> {
    (0..LANES / lanes).map(|group| (group * lanes..(group + 1) * lanes).collect()).collect()
}

/// Returns groups of lanes from the runs of 4 lanes of each group.
fn of_runs<const RUNS: usize>(groups: &[[u32; RUNS]]) -> Vec<Vec<u32>> {
    let group = |half: u32, runs: &[u32; RUNS]| {
        runs.iter().flat_map(|run| half + run * 4..half + run * 4 + 4).collect()
    };
    let halves = [0, 32];
    halves.into_iter().flat_map(|half| groups.iter().map(move |runs| group(half, runs))).collect()
}

#[test]
fn lds_lane_groups_and_banks_are_those_of_the_sources() {
    let read_gfx942 = of_runs(&[[0, 5], [1, 4], [2, 7], [3, 6]]);
    let read_gfx950 = of_runs(&[[0, 3, 5, 6], [1, 2, 4, 7]]);
    for (gfx, kind, bytes, banks, groups) in [
        (0x942, READ, 4, 32, consecutive(32)),
        (0x942, READ, 8, 32, consecutive(16)),
        (0x942, READ, 16, 32, read_gfx942),
        (0x942, WRITE, 2, 32, consecutive(32)),
        (0x942, WRITE, 8, 32, consecutive(16)),
        (0x942, WRITE, 16, 32, consecutive(8)),
        (0x950, READ, 4, 32, consecutive(32)),
        (0x950, READ, 8, 64, consecutive(32)),
        (0x950, READ, 16, 64, read_gfx950),
        (0x950, WRITE, 2, 32, consecutive(32)),
        (0x950, WRITE, 8, 32, consecutive(16)),
        (0x950, WRITE, 16, 32, consecutive(8)),
    ] {
        let access = LdsAccess { gfx, kind, bytes };
        assert_eq!(access.groups(), groups, "{access:x?}");
        assert_eq!(access.banks(), banks, "{access:x?}");
    }
}

#[test]
fn lanes_that_read_the_same_word_share_it() {
    for gfx in [0x942, 0x950] {
        for bytes in [4, 8, 16] {
            assert_eq!(LdsAccess { gfx, kind: READ, bytes }.conflicts([64; 64], !0), 0);
        }
    }
}

/// Rows of a multiple of 128 bytes need a padding of 32 bytes: with one of 16 or 64 bytes, lanes conflict.
#[test]
fn padding_of_32_bytes_avoids_conflicts_of_operands() {
    for gfx in [0x942, 0x950] {
        let access = LdsAccess { gfx, kind: READ, bytes: 16 };
        for row_bytes in [128, 256, 384, 512] {
            assert_eq!(access.operand_conflicts(row_bytes + 32), 0, "{gfx:x}, {row_bytes}");
            assert!(access.operand_conflicts(row_bytes + 16) > 0, "{gfx:x}, {row_bytes}");
            assert!(access.operand_conflicts(row_bytes + 64) > 0, "{gfx:x}, {row_bytes}");
        }
    }
}

/// Writes rows of 16 bytes with a stride of 32 bytes, and reads them.
const STRIDED: &str = r#"
#include "dev.h"
struct alignas(16) Words { u32 v[4]; };
KERNEL(128) strided_vectors(u32* out) {
    DYN_SHARED(Words, rows);
    rows[tid() * 2] = Words{{tid(), 1, 2, 3}};
    sync();
    out[tid()] = rows[(tid() ^ 1) * 2].v[0];
}
EXPORT(strided_vectors)
"#;

/// Returns the cells of the emulator's counter table for a kernel of one architecture.
fn counters(gfx: u32, kernel: &str) -> Vec<String> {
    let library = emulated_gpu::library_of("machine-code");
    // SAFETY: the emulator's library has this function, which returns a NUL-terminated text.
    let table = unsafe {
        let library = libloading::Library::new(library).unwrap();
        let table = library.get::<extern "C" fn() -> *const c_char>(b"hipemuCounterTable").unwrap();
        CStr::from_ptr(table()).to_str().unwrap().to_owned()
    };
    let row = table.lines().find(|line| line.starts_with(&format!("gfx{gfx:x}\t{kernel}\t")));
    row.unwrap().split('\t').map(str::to_owned).collect()
}

#[test]
fn launches_count_bank_conflicts_and_dynamic_lds() {
    for gfx in ARCHITECTURES {
        let gpu = MachineCodeGpu::open(gfx);
        let out = gpu.alloc(4 * 128);
        let kernel = gpu.kernel(STRIDED, &[], "strided_vectors");
        gpu.launch(kernel, LaunchShape(1, 128, 4096), &[KernelArg::At(out)]);
        assert_eq!(gpu.download::<u32>(out), (0..128u32).map(|i| i ^ 1).collect::<Vec<_>>());
        let cells = counters(gfx, "strided_vectors");
        // Two wavefronts write in 8 groups with 2 cycles each, and read 4-byte words in 2 groups with 8 cycles each.
        assert_eq!(&cells[cells.len() - 3..], ["64", "20", "4096/128"], "{cells:?}");
    }
}
