"""llama.cpp's C interface in a few typed classes; the only importer of llama_cpp. No policy lives here.

All calls block and none takes a lock: one thread must own a model with its contexts (engine_llama's worker). ctypes
releases the GIL while llama.cpp computes, so the event loop runs on meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from paceline.errors import EngineError, ModelError, NoRoom
from paceline.forward_pass import Row

QuantType = Literal["F16", "Q4_0", "Q4_1", "Q8_0"]
FILE_TYPES: dict[str, int] = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""llama_ftype by the name used in the model catalog."""

_PAD = 256
"""llama.cpp rounds the number of KV cells up to a multiple of this."""
_ERROR_LEVEL = 4
_log = structlog.get_logger("llama.cpp")
_last_error = ""


def _on_log(level: int, text: bytes, _data: object) -> None:
    global _last_error
    line = text.decode(errors="replace").strip()
    if level == _ERROR_LEVEL and line:
        _last_error = line
    if line and structlog.is_configured():
        _log.debug(line, level=level)


_LOG_CALLBACK = api.llama_log_callback(_on_log)  # referenced for the life of the process: C keeps the pointer


def _silence() -> None:
    """Everything that llama.cpp prints goes to structlog at debug level (nowhere while structlog is unconfigured)."""
    api.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))


def quantize(src: Path, dst: Path, kind: QuantType, threads: int = 0) -> None:
    """Write `src` in another tensor format to `dst`; already quantised sources are taken. threads 0: all cores.

    F16 from a quantised file keeps the values of the quantised file. Raises ModelError; then no `dst` is left.
    """
    _silence()
    params = api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[kind]
    params.nthread = threads
    params.allow_requantize = True
    code = api.llama_model_quantize(str(src).encode(), str(dst).encode(), ctypes.byref(params))
    if code != 0:
        dst.unlink(missing_ok=True)
        raise ModelError(f"cannot write {src} as {kind}: llama.cpp answered {code} ({_last_error})")


def most_sequences() -> int:
    """Sequences that one context of this build of llama.cpp can have."""
    return int(api.llama_max_parallel_sequences())


class LlamaModel:
    """A GGUF file in memory. `progress` gets the loaded fraction, from the calling thread."""

    def __init__(
        self, path: Path, *, vocab_only: bool = False, progress: Callable[[float], None] | None = None
    ) -> None:
        self._model: Any = None
        _silence()
        if not path.is_file():
            raise ModelError(f"no model file at {path}")
        params = api.llama_model_default_params()
        params.vocab_only = vocab_only
        callback = api.llama_progress_callback(lambda fraction, _: (progress(fraction) if progress else None) or True)
        params.progress_callback = callback
        self._model = api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelError(f"{path} is no model that llama.cpp can read ({_last_error})")
        self.vocab: Any = api.llama_model_get_vocab(self._model)
        self.vocabulary = int(api.llama_vocab_n_tokens(self.vocab))
        self.context = int(api.llama_model_n_ctx_train(self._model))
        self.rewinds = not (api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model))
        """Whether tokens can be taken back out of the model's state."""

    @property
    def handle(self) -> Any:
        return self._model

    def close(self) -> None:
        """Frees the memory; contexts must be closed before. May be called twice."""
        if self._model:
            api.llama_model_free(self._model)
            self._model = None


class LlamaVocab:
    """Only the vocabulary of a GGUF file, with llama.cpp's own tokenization, to check others against."""

    def __init__(self, path: Path | str) -> None:
        self._model = LlamaModel(Path(path), vocab_only=True)
        self.size = self._model.vocabulary

    def tokenize(self, text: bytes, special: bool = False, add_bos: bool = False) -> list[int]:
        """special: control-token texts become control tokens. add_bos: with a start token where the model wants one."""
        room = len(text) + 8
        ids = (api.llama_token * room)()
        count = api.llama_tokenize(self._model.vocab, text, len(text), ids, room, add_bos, special)
        if count < 0:
            raise ModelError(f"llama.cpp needs {-count} tokens for {len(text)} bytes, {room} were expected to do")
        return list(ids[:count])

    def piece(self, token: int) -> bytes:
        """The bytes of a token, control tokens as their text."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = api.llama_token_to_piece(self._model.vocab, token, buffer, size, 0, True)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    def attr(self, token: int) -> int:
        """llama_token_attr bits."""
        return int(api.llama_vocab_get_attr(self._model.vocab, token))

    def is_end(self, token: int) -> bool:
        """Whether llama.cpp takes the token as an end of generation."""
        return bool(api.llama_vocab_is_eog(self._model.vocab, token))

    @property
    def bos_id(self) -> int | None:
        token = int(api.llama_vocab_bos(self._model.vocab))
        return token if token >= 0 else None

    @property
    def add_bos(self) -> bool:
        return bool(api.llama_vocab_get_add_bos(self._model.vocab))

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> LlamaVocab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LlamaContext:
    """KV cells shared by many sequences (unified), and decoding of mixed batches.

    A forward_pass.Memory. cells: KV cells in all (llama.cpp rounds up to 256; the caller keeps the exact number).
    batch, outputs: most rows of one pass, and most of them that want logits. flash: flash attention, which skips the
    cells of other sequences (without it they are computed and masked), and whose results depend less on batch shape.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        cells: int,
        sequences: int,
        threads: int,
        batch: int = 512,
        outputs: int = 128,
        flash: bool = True,
    ) -> None:
        self._context: Any = None
        self.batch = batch
        self.outputs = min(batch, max(outputs, sequences))  # llama.cpp aborts on fewer outputs than sequences
        self.vocabulary = model.vocabulary
        params = api.llama_context_default_params()
        params.n_ctx = -(-cells // _PAD) * _PAD
        params.n_batch = params.n_ubatch = batch
        params.n_outputs_max = self.outputs
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.flash_attn_type = 1 if flash else 0
        params.no_perf = True
        most = most_sequences()
        if sequences > most:
            raise ModelError(f"{sequences} sessions were asked for, llama.cpp takes {most}")
        self._context = api.llama_init_from_model(model.handle, params)
        if not self._context:
            raise ModelError(f"llama.cpp cannot make a context of {cells} cells ({_last_error})")
        self._memory: Any = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(batch, 0, 1)

    def decode(self, rows: Sequence[Row]) -> None:
        """One pass. Raises NoRoom (memory as before) or EngineError (memory of these sequences unknown)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index] = row.token
            batch.pos[index] = row.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.sequence
            batch.logits[index] = row.logits
        code = api.llama_decode(self._context, batch)
        if code == 1:
            raise NoRoom(f"llama.cpp found no cells for {len(rows)} tokens")
        if code != 0:
            raise EngineError(f"llama_decode of {len(rows)} tokens answered {code} ({_last_error})")

    def logits(self, index: int, prompt_length: int = 0) -> NDArray[np.float32]:
        """Raw logits (vocabulary,) of row `index` of the last pass: a view, gone with the next pass."""
        pointer = api.llama_get_logits_ith(self._context, index)
        if not pointer:
            raise EngineError(f"llama.cpp kept no logits for row {index}")
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,))

    def remove(self, sequence: int, start: int = 0) -> None:
        """Forget a sequence from position `start` on."""
        if not api.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise EngineError("this model's state cannot be rewound")

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share the cells of `source` at positions [start, end)."""
        api.llama_memory_seq_cp(self._memory, source, target, start, end)

    def close(self) -> None:
        """May be called twice."""
        if self._context:
            api.llama_batch_free(self._batch)
            api.llama_free(self._context)
            self._context = None
