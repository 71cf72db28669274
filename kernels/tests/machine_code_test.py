"""Tests of the checks of machine code: machine_code.py and lds_waits.py."""
import pathlib, sys, unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "csrc"))
import lds_waits, machine_code

# A loop that copies 32 bytes per lane to LDS and multiplies them.
LISTING = """
kernel.co:\tfile format elf64-amdgpu

0000000000001000 <product>:
\ts_mov_b32 s2, 0                                     // 000000001000: BE820080
\tglobal_load_dwordx4 v[4:7], v0, s[0:1]              // 000000001004: DC5C8000 04000000
\tglobal_load_dwordx4 v[8:11], v0, s[0:1] offset:16   // 00000000100C: DC5C8010 08000000
\ts_waitcnt vmcnt(1)                                  // 000000001014: BF8C0F71
\tds_write_b128 v1, v[4:7]                            // 000000001018: D9BE0000 00000401
\ts_waitcnt vmcnt(0)                                  // 000000001020: BF8C0F70
\tds_write_b128 v1, v[8:11] offset:16                 // 000000001024: D9BE0010 00000801
\ts_waitcnt lgkmcnt(0)                                // 00000000102C: BF8CC07F
\ts_barrier                                           // 000000001030: BF8A0000
\tds_read_b128 v[12:15], v2                           // 000000001034: D9FE0000 0C000002
\ts_waitcnt lgkmcnt(0)                                // 00000000103C: BF8CC07F
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[12:13], v[14:15], a[0:3] // 000000001040: D3E10000 04021D0C
\tv_exp_f32_e32 v3, v3                                // 000000001048: 7E064103
\tv_add_u32_sdwa v3, v3, v2 dst_sel:DWORD src0_sel:WORD_1 src1_sel:DWORD // 00000000104C: 680604F9 06050603
\ts_add_i32 s2, s2, 1                                 // 000000001054: 81028102
\ts_cmp_lt_u32 s2, s3                                 // 000000001058: BF0A0302
\ts_cbranch_scc1 65513                                // 00000000105C: BF85FFE9
\ts_endpgm                                            // 000000001060: BF810000
"""
LOOP = ("valu 2 (sdwa 1, 20 cycles), salu 3, mfma 1 (16 cycles), mfma per valu cycle 0.80, global loads dwordx4:2, stores none, "
        "lds reads b128:1, writes b128:2, waits 2 (for all 1), loads in flight 1 to 2, mean 1.5, barriers 1")
RESOURCES = "product: vgpr 100, agpr 4, sgpr 10, waves per SIMD by registers 4, static lds 0, sgpr spills 2, waves per SIMD by static lds 8"


def instructions(listing=LISTING):
    return machine_code.parse_disassembly(listing)["product"]


class LoopCounts(unittest.TestCase):
    def test_loop_of_a_listing_is_counted(self):
        loops = machine_code.hot_loops(instructions())
        self.assertEqual([machine_code.loop_text(body) for body in loops], [LOOP])

    def test_loop_without_matrix_instructions_has_no_ratio(self):
        listing = "\n".join(line for line in LISTING.splitlines() if "mfma" not in line)
        [body] = machine_code.hot_loops(instructions(listing))
        self.assertIn("mfma 0 (0 cycles), global loads", machine_code.loop_text(body))

    def test_transcendental_instructions_take_16_cycles(self):
        for op in ["v_exp_f32_e32", "v_log_f32_e64", "v_rcp_iflag_f32_e32", "v_rsq_f16_e32", "v_sqrt_f32_e32"]:
            self.assertEqual(machine_code.valu_cycles(op), 16, op)
        for op in ["v_add_f32_e32", "v_cvt_pk_f32_fp8", "v_expand_f32", "v_pk_fma_f32"]:
            self.assertEqual(machine_code.valu_cycles(op), 4, op)

    def test_unknown_matrix_shape_is_an_error(self):
        self.assertRaisesRegex(ValueError, "8x8x8", machine_code.mfma_cycles, "v_mfma_f32_8x8x8_f16")

    def test_lds_limits_waves_in_units_of_the_architecture(self):
        for arch, lds_bytes, threads, waves in [("gfx942", 0, 256, 8), ("gfx942", 20 << 10, 256, 3), ("gfx942", 64 << 10, 256, 1),
                                                ("gfx942", 42 * 512, 256, 3), ("gfx942", 42 * 512 + 1, 256, 2),
                                                ("gfx942", 64 << 10, 1024, 4), ("gfx950", 64 << 10, 256, 2), ("gfx950", 1, 64, 8)]:
            self.assertEqual(machine_code.waves_by_lds(arch, lds_bytes, threads), waves, f"{arch}, {lds_bytes}, {threads}")


def code(*items):
    """Instructions of 4 bytes, each given as an op, or as an op and the index of the target of a branch."""
    listed = [(item, i + 1) if isinstance(item, str) else item for i, item in enumerate(items)]
    return [machine_code.Instruction(4 * i, op, "", (target - i - 1) & 0xFFFF) for i, (op, target) in enumerate(listed)]


class Loops(unittest.TestCase):
    def loops(self, *items):
        return machine_code.loops_of(code(*items))

    def test_jump_back_out_of_a_branch_is_no_loop(self):
        # The code of a rare case is after the end of the kernel and jumps back to it, as in moe_gemm_small_m with biases.
        self.assertEqual(self.loops("s_load", ("s_cbranch_scc1", 4), "global_store", "s_endpgm", "global_load", ("s_branch", 2)), [])

    def test_branch_around_code_is_no_loop(self):
        self.assertEqual(self.loops("s_load", ("s_cbranch_scc1", 3), "global_load", "global_store", "s_endpgm"), [])

    def test_loop_of_one_instruction_is_found(self):
        self.assertEqual(self.loops("s_load", ("s_cbranch_scc1", 1), "s_endpgm"), [(1,)])

    def test_nested_loops_are_kept(self):
        loops = self.loops("s_load", "v_add", "v_mul", ("s_cbranch_scc1", 2), ("s_cbranch_scc1", 1), "s_endpgm")
        self.assertEqual(loops, [(1, 2, 3, 4), (2, 3)])
        self.assertEqual(machine_code.innermost(loops), [(2, 3)])
        self.assertEqual(machine_code.smallest_around((2, 3), loops), (1, 2, 3, 4))

    def test_two_branches_to_the_begin_are_one_loop(self):
        # `continue` at 1, an exit at 2.
        self.assertEqual(self.loops("v_add", ("s_cbranch_scc1", 0), ("s_cbranch_scc1", 5), "v_mul", ("s_branch", 0), "s_endpgm"),
                         [(0, 1, 2, 3, 4)])

    def test_loop_that_begins_at_its_condition_is_found(self):
        self.assertEqual(self.loops(("s_branch", 2), "v_add", "s_cmp", ("s_cbranch_scc1", 1), "s_endpgm"), [(1, 2, 3)])

    def test_branch_of_a_loop_that_is_after_its_end_is_in_the_loop(self):
        # Code between the loop and its rare case is in no loop.
        self.assertEqual(self.loops("v_add", ("s_cbranch_execnz", 5), "v_mul", ("s_cbranch_scc1", 0), "s_endpgm",
                                    "global_store", ("s_branch", 2)), [(0, 1, 2, 3, 5, 6)])

    def test_copy_of_vectors_is_hot_and_search_is_not(self):
        product = ["global_load_dwordx4", "v_mfma_f32_16x16x16_bf16", ("s_cbranch_scc1", 0)]
        for load, hot in [("global_load_dword", [3]), ("global_load_dwordx2", [3, 3])]:
            bodies = machine_code.hot_loops(code(*product, load, "ds_write_b64", ("s_cbranch_scc1", 3), "s_endpgm"))
            self.assertEqual([len(body) for body in bodies], hot, load)

    def test_loop_with_two_entries_is_found(self):
        self.assertEqual(self.loops(("s_cbranch_scc1", 2), "v_add", "v_mul", ("s_cbranch_scc1", 1), "s_endpgm"), [(1, 2, 3)])


class BarrierWaits(unittest.TestCase):
    def test_barrier_after_a_wait_is_accepted(self):
        self.assertEqual(lds_waits.error({"product": instructions()}), "")

    def test_barrier_without_a_wait_is_found(self):
        found = [i for i in instructions() if i.address != 0x102C]
        self.assertEqual(lds_waits.barriers_without_wait(found), [0x1030])
        self.assertIn("product: barriers at 0x1030", lds_waits.error({"product": found}))

    def test_access_on_the_path_of_a_branch_is_found(self):
        # Without the wait at 103C, the read of an iteration reaches the barrier of the next one only past the wait at 102C.
        found = [i for i in instructions() if i.address != 0x103C]
        self.assertEqual(lds_waits.barriers_without_wait(found), [])
        moved = [i._replace(op="s_nop", args="0") if i.address in (0x1018, 0x1024, 0x102C) else i for i in found]
        self.assertEqual(lds_waits.barriers_without_wait(moved), [0x1030])

    def test_exchanges_between_lanes_are_no_accesses(self):
        self.assertFalse(lds_waits.accesses_lds("ds_bpermute_b32"))
        self.assertTrue(lds_waits.accesses_lds("ds_add_u32"))


class WorseCounts(unittest.TestCase):
    def worse(self, old, new):
        recorded = [RESOURCES, "  loop: " + LOOP]
        counts = [line.replace(old, new) for line in recorded]
        self.assertNotEqual(recorded, counts)
        return machine_code.worse_counts(recorded, counts)

    def test_equal_counts_are_not_worse(self):
        self.assertEqual(machine_code.worse_counts([RESOURCES, LOOP], [RESOURCES, LOOP]), [])

    def test_slightly_more_registers_are_not_worse(self):
        self.assertEqual(self.worse("vgpr 100", "vgpr 112"), [])

    def test_each_clearly_worse_count_is_named(self):
        for old, new, text in [
            ("vgpr 100", "vgpr 120", "vgpr: 120, recorded is 100"),
            ("by registers 4", "by registers 3", "waves per SIMD: 3, recorded is 4"),
            ("sgpr spills 2", "sgpr spills 9", "sgpr spills: 9, recorded is 2"),
            ("valu 2 ", "valu 5 ", "valu: 5, recorded is 2"),
            ("20 cycles", "40 cycles", "valu cycles: 40, recorded is 20"),
            ("cycle 0.80", "cycle 0.50", "mfma per valu cycle: 0.5, recorded is 0.8"),
            ("mean 1.5", "mean 1.0", "loads in flight, mean: 1, recorded is 1.5"),
        ]:
            self.assertEqual(self.worse(old, new), [text])

    def test_another_number_of_loops_is_worse(self):
        self.assertEqual(machine_code.worse_counts([RESOURCES], [RESOURCES, LOOP]), ["2 rows, recorded are 1"])


if __name__ == "__main__":
    unittest.main()
