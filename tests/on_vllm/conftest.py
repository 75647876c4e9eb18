"""Tests of the vLLM engine, in an environment of their own (`make test-vllm`). Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
