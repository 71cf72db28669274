"""Runs a script of this folder inside its own virtual environment, with pinned packages.

The environment is under the path given as the second argument, by default target/clients/.
"""

import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[3]


def enter(*packages):
    """Returns inside the environment; outside of it, creates it and restarts the script there."""
    script = pathlib.Path(sys.argv[0]).resolve()
    base = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "target" / "clients"
    folder = (base / script.stem).resolve()
    if pathlib.Path(sys.prefix).resolve() == folder:
        return
    python = folder / "bin" / "python"
    mark = folder / "packages.txt"
    wanted = "\n".join(packages)
    if not mark.exists() or mark.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        mark.write_text(wanted)
    os.execv(python, [python, script, *sys.argv[1:]])
