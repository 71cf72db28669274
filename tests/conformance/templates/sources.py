"""Public chat templates: `*.jinja` of the source packages of vLLM and of llama-cpp-python, which contains llama.cpp.

The packages are downloaded once from PyPI (pinned, checked by their hashes); only their templates are unpacked.
"""

import hashlib
import pathlib
import tarfile
import urllib.request

PYPI = "https://files.pythonhosted.org/packages"
PACKAGES = {
    "vllm 0.33.0": (f"{PYPI}/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz",
                    "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
    "llama-cpp-python 0.3.36": (f"{PYPI}/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz",
                                "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"),
}


def download(url, digest, folder):
    """Path of the package in `folder`, downloaded if it is missing."""
    path = folder / url.rsplit("/", 1)[1]
    if not path.exists():
        with urllib.request.urlopen(url, timeout=180) as reply:
            path.with_suffix(".part").write_bytes(reply.read())
        path.with_suffix(".part").rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == digest, f"{path}: its hash is {found}, not {digest}"
    return path


def templates(folder):
    """Returns {name: source} of all templates, without duplicates."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for package, (url, digest) in PACKAGES.items():
        with tarfile.open(download(url, digest, folder)) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".jinja"):
                    name = f"{package.split()[0]}: {pathlib.PurePath(member.name).name}"
                    source = archive.extractfile(member).read().decode()
                    if source not in found.values():
                        found[name if name not in found else f"{name} ({member.name})"] = source
    return dict(sorted(found.items()))
