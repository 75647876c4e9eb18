"""Builds the llama.cpp wheel once and keeps it: `python deploy/build_llama.py --out DIRECTORY [--native]`.

Standard library only: it runs before anything is installed, and in the Dockerfile's builder stage. The baseline wheel
uses AVX2, FMA and F16C and runs on any x86-64 machine of the last ten years; --native uses whatever this machine has.
The wheel's version is the one in constraints.txt. It is built again only when something that goes into it changes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path

from progress import run

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "llama.cmake"
PACKAGE = "llama-cpp-python"


def version() -> str:
    """The pinned version of the bindings."""
    text = (HERE.parent / "constraints.txt").read_text()
    found = re.search(rf"^{PACKAGE}==(\S+)$", text, re.MULTILINE)
    if found is None:
        sys.exit(f"constraints.txt does not pin {PACKAGE}")
    return found.group(1)


def options(native: bool) -> list[str]:
    """CMake definitions, as scikit-build-core takes them through pip."""
    defines = {
        "CMAKE_PROJECT_INCLUDE": str(RECIPE),
        "GGML_NATIVE": "ON" if native else "OFF",
        "LLAVA_BUILD": "OFF",
    }
    return [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]


def fingerprint(native: bool) -> str:
    parts = [version(), sys.implementation.cache_tag or "", str(native), RECIPE.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def need_compiler() -> None:
    if shutil.which("c++") is None or shutil.which("cc") is None:
        sys.exit("compiling llama.cpp needs a C and C++ compiler, for example: apt-get install build-essential")


def build(out: Path, native: bool) -> Path:
    """The wheel in `out`, built if it is not there or its ingredients changed."""
    stamp = out / "made-from"
    made = sorted(out.glob("*.whl"))
    if made and stamp.exists() and stamp.read_text() == fingerprint(native):
        return made[-1]
    need_compiler()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=out) as work:
        # no cache: pip would hand out a wheel that was built with other options
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-binary", PACKAGE]
        run(
            "Compiling llama.cpp (once, 1 to 3 minutes on two cores)",
            [*command, *options(native), "-w", work, f"{PACKAGE}=={version()}"],
            log=out / "build.log",
            step=re.compile(r"^\s*\[(\d+)/(\d+)\]"),
        )
        wheel = next(Path(work).glob("*.whl")).rename(out / next(Path(work).glob("*.whl")).name)
    stamp.write_text(fingerprint(native))
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--native", action="store_true")
    chosen = parser.parse_args()
    print(build(chosen.out.resolve(), chosen.native))


if __name__ == "__main__":
    main()
