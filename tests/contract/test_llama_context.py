"""llama.cpp at its edges: files that are no models, bounds, and what it says of a vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs
from tiny_model import write_gguf

from paceline import llama_context
from paceline.engine_llama import LlamaDraft, LlamaTarget
from paceline.errors import EngineError, ModelError, NoRoom
from paceline.forward_pass import Row
from paceline.llama_context import LlamaContext, LlamaModel, LlamaVocab, quantize


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def garbage(tmp_path: Path) -> Path:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF but not really" * 9)
    return path


class TestFiles:
    async def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no model file at .*nowhere"):
            await LlamaTarget.load(tmp_path / "nowhere.gguf")

    async def test_no_model(self, garbage: Path) -> None:
        with pytest.raises(ModelError, match="garbage"):
            await LlamaDraft.load(garbage)

    def test_quantize_refuses_and_leaves_nothing(self, garbage: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="Q4_0"):
            quantize(garbage, tmp_path / "out.gguf", "Q4_0")
        assert not (tmp_path / "out.gguf").exists()

    def test_quantize(self, tiny: Path, tmp_path: Path) -> None:
        quantize(tiny, tmp_path / "out.gguf", "Q4_0", threads=1)
        with LlamaVocab(tiny) as before, LlamaVocab(tmp_path / "out.gguf") as after:
            assert [before.piece(i) for i in range(before.size)] == [after.piece(i) for i in range(after.size)]

    async def test_more_sessions_than_llama_takes(self, tiny: Path) -> None:
        with pytest.raises(ModelError, match="100000 sessions"):
            await LlamaTarget.load(tiny, cells=256, max_sessions=100_000)

    async def test_progress_ends_at_one(self, tiny: Path) -> None:
        seen: list[float] = []
        target = await LlamaTarget.load(tiny, cells=256, progress=seen.append)
        assert seen[-1] == 1.0
        assert target.status().context == min(256, target.engine.context)
        await target.close()


class TestVocabulary:
    def test_control_tokens(self, tiny: Path) -> None:
        with LlamaVocab(tiny) as vocabulary:
            assert vocabulary.piece(0) == b"<|im_start|>"
            assert vocabulary.tokenize(b"<|im_start|>", special=True) == [0]
            assert len(vocabulary.tokenize(b"<|im_start|>")) > 1
            assert vocabulary.is_end(1)
            assert vocabulary.attr(0) != vocabulary.attr(10)

    def test_closing_twice(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        freed: list[object] = []
        free = llama_context.api.llama_model_free
        monkeypatch.setattr(llama_context.api, "llama_model_free", lambda model: (freed.append(model), free(model)))
        vocabulary = LlamaVocab(tiny)
        vocabulary.close()
        vocabulary.close()
        assert len(freed) == 1


class TestMemory:
    def test_what_llama_refuses(self, tiny: Path) -> None:
        model = LlamaModel(tiny)
        context = LlamaContext(model, cells=256, sequences=2, threads=1, batch=64)
        context.decode([Row(5, 0, 0, False), Row(6, 1, 0, True)])
        assert context.logits(1).shape == (model.vocabulary,)
        with pytest.raises(EngineError, match="row 0"):
            context.logits(0)
        with pytest.raises(EngineError, match="answered -1"):
            context.decode([Row(5, 9, 0, True)])  # a gap in the positions
        context.remove(0, 0)
        for start in range(0, 256, 64):
            context.decode([Row(5, start + i, 0, False) for i in range(64)])
        with pytest.raises(NoRoom):
            context.decode([Row(5, 0, 1, True)])
        context.close()
        context.close()
        model.close()

    def test_its_log_is_debug_and_structured(self, tiny: Path) -> None:
        with capture_logs() as unconfigured, LlamaVocab(tiny):
            pass
        assert structlog.is_configured() == bool(unconfigured)
        structlog.configure()
        try:
            with capture_logs() as logs, LlamaVocab(tiny):
                pass
        finally:
            structlog.reset_defaults()
        assert {entry["log_level"] for entry in logs} == {"debug"}
