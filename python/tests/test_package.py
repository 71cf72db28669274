"""Tests that need neither vLLM, SGLang nor the library: `python3 -m unittest discover -s python/tests`."""

import ast
import ctypes
import dataclasses
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
HEADER = ROOT / "plugin" / "include" / "hadron.h"
sys.path.insert(0, str(PACKAGE))

import hadron  # noqa: E402 (found by the path above)
from hadron import abi, adapters, environment, refusals  # noqa: E402
from hadron.checkpoint import ModelSettings, refuse_mla_features, refuse_quantization, refuse_windows  # noqa: E402

STRUCTS = {
    "hadron_array": abi.HadronArray,
    "hadron_ranks": abi.HadronRanks,
    "hadron_step": abi.HadronStep,
    "hadron_counters": abi.HadronCounters,
}
HOSTS = ("vllm", "sglang")


def sources(folder: str = "") -> Iterator[tuple[Path, ast.Module]]:
    """Yields the modules of a folder of the package with their syntax trees."""
    for path in sorted((PACKAGE / "hadron" / folder).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    """Yields the names of all modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def host_names(tree: ast.AST) -> set[str]:
    """Returns the names that imports from a host bind."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in HOSTS:
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.partition(".")[0] in HOSTS]
            names.update(alias.asname or alias.name.partition(".")[0] for alias in found)
    return names


def settings(config: dict, quantization: str | None = None, kv_cache_dtype: str = "auto") -> ModelSettings:
    """Settings with contexts of up to 64 tokens."""
    return ModelSettings(config, quantization, "float32", kv_cache_dtype, max_model_len=64, synthetic_seed=None)


class AbiTest(unittest.TestCase):
    """The ctypes mirror of hadron.h."""

    def test_sizes_and_offsets_equal_those_of_the_header(self) -> None:
        lines = []
        for name, struct in STRUCTS.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            lines += [
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                for field, _ in struct._fields_
            ]
        expected = []
        for name, struct in STRUCTS.items():
            expected.append(f"{name} {ctypes.sizeof(struct)}")
            for field, _ in struct._fields_:
                place = getattr(struct, field)
                expected.append(f"{name}.{field} {place.offset} {place.size}")
        self.assertEqual(self.run_c(lines).splitlines(), expected)

    def test_constants_equal_those_of_the_header(self) -> None:
        names = {f"HADRON_{status.name}": status for status in abi.Status}
        names |= {f"HADRON_{dtype.name}": dtype for dtype in abi.DType}
        names["HADRON_ABI_VERSION"] = abi.ABI_VERSION
        printed = self.run_c([f'printf("{name} %d\\n", (int){name});' for name in names])
        self.assertEqual(printed.splitlines(), [f"{name} {int(value)}" for name, value in names.items()])

    def test_all_fields_and_functions_of_the_header_are_declared(self) -> None:
        text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
        for name, struct in STRUCTS.items():
            body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text, re.DOTALL).group(1)
            fields = re.findall(r"\(\*(\w+)\)\(|(\w+);", re.sub(r"\(void \*context.*?\)", "()", body, flags=re.DOTALL))
            self.assertEqual([a or b for a, b in fields], [field for field, _ in struct._fields_], name)
        functions = set(re.findall(r"\b(hadron_\w+)\(", text))
        declared = set(re.findall(r"\bhadron_\w+", (PACKAGE / "hadron" / "abi.py").read_text()))
        self.assertEqual(functions - declared, set())

    def run_c(self, lines: list[str]) -> str:
        """Compiles and runs a program that includes the header."""
        program = "\n".join([f'#include "{HEADER}"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"])
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "mirror.c"), Path(folder, "mirror")
            source.write_text("\n".join([program, *lines, "return 0; }"]))
            subprocess.run(["cc", "-o", binary, source], check=True)
            return subprocess.run([binary], check=True, capture_output=True, text=True).stdout


class EnvironmentTest(unittest.TestCase):
    """Environment variables."""

    def test_documented_variables_are_those_that_are_read(self) -> None:
        tree = ast.parse((PACKAGE / "hadron" / "environment.py").read_text())
        read = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("HADRON_")
        }
        pages = [PACKAGE / "README.md", *[page for page in [ROOT / "docs" / "plugins.md"] if page.exists()]]
        for page in pages:
            documented = set(re.findall(r"^\| `(HADRON_\w+)`", page.read_text(), re.MULTILINE))
            self.assertEqual(documented, read, page)

    def test_environment_is_read_in_one_module(self) -> None:
        readers = {path.name for path, tree in sources() if "os" in set(imports(tree))}
        self.assertEqual(readers, {"environment.py"})

    def test_values_are_checked(self) -> None:
        read = environment.read_environment
        self.assertEqual(read({}).kernel_cache, Path("~/.cache/hadron/kernels").expanduser())
        self.assertTrue(read({"HADRON_REQUIRE": "1"}).require)
        self.assertEqual(read({"HADRON_THREADS": "3"}).threads, 3)
        for name, value in (("HADRON_REQUIRE", "yes"), ("HADRON_THREADS", "0"), ("HADRON_THREADS", "many")):
            with self.assertRaisesRegex(ValueError, f"{name}={value}"):
                read({name: value})


class RefusalTest(unittest.TestCase):
    """Refusals that depend on the checkpoint."""

    def test_all_refusals_are_in_one_error(self) -> None:
        listed = [refusals.Refusal("a", "b", "c"), refusals.Refusal("d", "e", "f")]
        with self.assertRaises(ValueError) as caught:
            refusals.reject("XForCausalLM", listed, "Way back.")
        text = "Hadron cannot compute XForCausalLM with these settings:\n  - a: b; c\n  - d: e; f\nWay back."
        self.assertEqual(str(caught.exception), text)
        refusals.reject("XForCausalLM", [], "Way back.")

    def test_windows(self) -> None:
        accepted = [
            {},
            {"sliding_window": None},
            {"sliding_window": 64},
            {"sliding_window": 8, "use_sliding_window": False},
        ]
        self.assertEqual([list(refuse_windows(settings(config))) for config in accepted], [[]] * 4)
        self.assertEqual(len(list(refuse_windows(settings({"sliding_window": 63})))), 1)

    def test_mla(self) -> None:
        self.assertEqual(list(refuse_mla_features(settings({}))), [])
        self.assertEqual(len(list(refuse_mla_features(settings({"index_topk": 8}, kv_cache_dtype="fp8")))), 2)

    def test_quantization(self) -> None:
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        groups = {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
        channels = {"quant_method": "compressed-tensors", "config_groups": groups}
        modelopt = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
        int4 = {"group_0": {"weights": {"type": "int", "num_bits": 4}}}
        for stored in (fp8, channels, modelopt):
            config = {"quantization_config": stored}
            self.assertEqual(list(refuse_quantization(settings(config, quantization=stored["quant_method"]))), [])
        for stored in (
            {"quant_method": "awq"},
            channels | {"config_groups": int4},
            modelopt | {"quant_algo": "NVFP4"},
        ):
            self.assertEqual(len(list(refuse_quantization(settings({"quantization_config": stored})))), 1, stored)
        self.assertEqual(len(list(refuse_quantization(settings({}, quantization="fp8")))), 1)
        self.assertEqual(list(refuse_quantization(settings({}))), [])


class StructureTest(unittest.TestCase):
    """Rules for the modules of the package."""

    def test_hosts_do_not_import_each_other(self) -> None:
        for host, other in (HOSTS, HOSTS[::-1]):
            for path, tree in sources(host):
                wrong = [name for name in imports(tree) if name.startswith((other, f"hadron.{other}"))]
                self.assertEqual(wrong, [], path)
        for path, tree in sources():
            if path.parent.name == "hadron":
                wrong = [name for name in imports(tree) if name.partition(".")[0] in HOSTS]
                self.assertEqual(wrong, [], path)

    def test_no_attribute_of_a_host_is_assigned(self) -> None:
        for path, tree in sources():
            names = host_names(tree)
            for node in ast.walk(tree):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else []:
                    root = target
                    while isinstance(root, ast.Attribute | ast.Subscript):
                        root = root.value
                    assigns = isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in names
                    self.assertFalse(assigns, f"{path}:{node.lineno}")
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            self.assertFalse([f for f in calls if isinstance(f, ast.Name) and f.id in ("setattr", "delattr")], path)
            self.assertNotIn("argv", path.read_text())

    def test_exports_exist(self) -> None:
        self.assertEqual([name for name in hadron.__all__ if not hasattr(hadron, name)], [])

    def test_version_is_that_of_the_workspace(self) -> None:
        manifest = (ROOT / "Cargo.toml").read_text()
        self.assertEqual(hadron.__version__, re.search(r'^version = "(.*)"', manifest, re.MULTILINE).group(1))

    def test_adapters_are_frozen_and_named_by_architecture(self) -> None:
        for architecture, adapter in adapters.ADAPTERS.items():
            self.assertEqual(adapter.architecture, architecture)
            with self.assertRaises(dataclasses.FrozenInstanceError):
                adapter.architecture = "other"
            self.assertEqual(re.findall(r"\d+", adapter.layer_name(3)), ["3"])
        with self.assertRaises(TypeError):
            adapters.ADAPTERS["other"] = adapter

    def test_entry_points_need_no_host_to_import(self) -> None:
        text = (PACKAGE / "pyproject.toml").read_text()
        modules = re.findall(r'^hadron = "(hadron\.\w+\.register):register"$', text, re.MULTILINE)
        self.assertEqual(sorted(modules), ["hadron.sglang.register", "hadron.vllm.register"])
        for module in modules:
            code = f"import {module}, sys; assert not {{'vllm', 'sglang', 'torch'}} & sys.modules.keys()"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE)


if __name__ == "__main__":
    unittest.main()
