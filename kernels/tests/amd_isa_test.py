"""Tests of amd_isa.py: sums of counters, kernels that did not run, and bank conflicts."""
import pathlib, sys, tempfile, unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import amd_isa

HEADER = "arch\tkernel\twaves\t..."


def numbers(lds_cycles=0, ideal=0, waves=1):
    """Columns of counters.cpp without those of the names and of the workgroups."""
    return [waves, *[0] * 15, lds_cycles, ideal]


def counters(lds_cycles=0, ideal=0, workgroups=((0, 64),)):
    return amd_isa.KernelCounters(numbers(lds_cycles, ideal), set(workgroups))


def runs(**ratios):
    """Runs of one architecture. `ratios`: LDS cycles per 100 ideal ones by kernel; None: no LDS accesses."""
    kernels = {kernel: counters(percent, 100) if percent else counters() for kernel, percent in ratios.items()}
    return {"gfx942": [amd_isa.Run(1, 1.0, kernels)]}


class Counters(unittest.TestCase):
    def test_tables_of_processes_are_summed(self):
        line = lambda waves, sizes: "\t".join(["gfx942", "norm", *map(str, numbers(4, 2, waves)), sizes])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "counters"
            path.write_text("\n".join([HEADER, line(3, "0/64 512/256"), HEADER, line(2, "512/256 1024/256")]) + "\n")
            found = amd_isa.read_counters(path)
        self.assertEqual(found["norm"].numbers, numbers(8, 4, 5))
        self.assertEqual(found["norm"].workgroups, {(0, 64), (512, 256), (1024, 256)})

    def test_rows_of_the_page_are_read_back(self):
        rows = [amd_isa.row("gfx942", "gemm", counters(250, 100, [(20 << 10, 256), (10 << 10, 256)])),
                amd_isa.row("gfx942", "cast_rows", counters())]
        self.assertIn("| 20,480 | 3–6 | 2.50 |", rows[0])
        self.assertIn("| 0 | 8 | – |", rows[1])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "page.md"
            path.write_text("\n".join(["## gfx942", "", *rows]))
            self.assertEqual(amd_isa.recorded_lds_ratios(path), {("gfx942", "gemm"): 2.5})


class LaunchedKernels(unittest.TestCase):
    COMPILATIONS = {"norm/norm.hip for gfx942": ["norm: vgpr 1", "  loop: valu 1", "add_norm: vgpr 1"],
                    "gemm/gemm.hip -DTILE_M=64 for gfx942": ["gemm: vgpr 1"], "cast/cast.hip for gfx950": ["cast: vgpr 1"]}

    def test_kernels_of_an_architecture_are_read(self):
        found = amd_isa.recorded_kernels(self.COMPILATIONS)
        self.assertEqual(found, {"gfx942": {"norm", "add_norm", "gemm"}, "gfx950": {"cast"}})

    def test_both_differences_name_the_kernels(self):
        recorded = amd_isa.recorded_kernels(self.COMPILATIONS)["gfx942"]
        self.assertEqual(amd_isa.missing_and_unknown({"norm", "add_norm", "gemm"}, recorded), [])
        self.assertEqual(amd_isa.missing_and_unknown({"gemm", "silu"}, recorded), [
            "recorded in machine_code.txt, but not launched by a test: add_norm, norm",
            "launched, but not recorded in machine_code.txt: silu"])
        self.assertEqual(len(amd_isa.missing_and_unknown(set(), recorded)), 1)


class BankConflicts(unittest.TestCase):
    RECORDED = {("gfx942", "gemm"): 1.0, ("gfx942", "norm"): 1.5}

    def test_equal_and_smaller_ratios_pass(self):
        self.assertEqual(amd_isa.worse_lds_ratios(self.RECORDED, runs(gemm=110, norm=100, cast=300)), [])

    def test_larger_ratio_is_named(self):
        self.assertEqual(amd_isa.worse_lds_ratios(self.RECORDED, runs(gemm=112, norm=150)), ["gfx942, gemm: 1.12, recorded is 1.00"])

    def test_disappeared_kernel_is_named(self):
        gone = ["gfx942, norm: no LDS accesses, recorded is 1.50"]
        self.assertEqual(amd_isa.worse_lds_ratios(self.RECORDED, runs(gemm=100)), gone)
        self.assertEqual(amd_isa.worse_lds_ratios(self.RECORDED, runs(gemm=100, norm=None)), gone)

    def test_kernels_without_conflicts_must_stay_so(self):
        self.assertEqual(amd_isa.conflicts_in(runs(gemm=101)["gfx942"][0].counters), [])
        [text] = amd_isa.conflicts_in(runs(gemm=110)["gfx942"][0].counters)
        self.assertEqual(text, "gemm has LDS bank conflicts: ratio 1.10, not at most 1.02")


if __name__ == "__main__":
    unittest.main()
