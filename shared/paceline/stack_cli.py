"""`python -m paceline.stack up|down|status|logs`: the stack in the background, under a supervisor.

`up` leaves one process that owns the children, starts again what dies, and ends everything on SIGTERM. What runs is in
the state file, so that `status` and `down` work without the supervisor too. `status` ends with 3 unless all is well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import structlog

from paceline.errors import FatalError
from paceline.plain_log import console_renderer
from paceline.processes import alive, birth, http_ready
from paceline.settings import Settings, StackSettings, unknown_variables
from paceline.stack import (
    SERVERS,
    STATE_FILE,
    LocalStack,
    ProcessState,
    StackOptions,
    StackState,
    read_state,
    stop_order,
)
from paceline.stack_logs import Logs
from paceline.stack_supervisor import Supervisor

STOP_S = 15.0
SUPERVISOR_STOP_S = 75.0
"""It stops three groups of children, each within 20 s."""
POLL_S = 0.05
FOLLOW_S = 0.2
NOT_WELL = 3
_READY = "ready\n"

log = structlog.get_logger("supervisor")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        settings = StackSettings.load(**_given(options))
        sys.exit(options.run(settings, options))
    except FatalError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paceline.stack", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|down|status|logs")
    for name, run in (("up", _up), ("down", _down), ("status", _status), ("logs", _logs), ("supervise", _supervise)):
        about = (run.__doc__ or "").splitlines()[0]
        if run is _supervise:
            # Without help it is not listed: it is for `up` alone.
            command = commands.add_parser(name, description=about)
        else:
            command = commands.add_parser(name, description=about, help=about)
        command.set_defaults(run=run)
        command.add_argument("--state-dir", type=Path, help="logs, data, keys and the state file (PACELINE_STATE_DIR)")
        if run in (_up, _supervise):
            for port in ("nats", "redis", "http"):
                command.add_argument(f"--{port}-port", type=int, help=f"0: any free one (PACELINE_{port.upper()}_PORT)")
            command.add_argument("--verifiers", type=int, help="how many (PACELINE_VERIFIERS)")
            what = "interpreter with vLLM: verifiers run there, on vLLM (PACELINE_VLLM_PYTHON)"
            command.add_argument("--vllm-python", type=Path, help=what)
        if run is _logs:
            command.add_argument("names", nargs="*", help="processes; all if none is named")
            command.add_argument("--follow", "-f", action="store_true")
            command.add_argument("--lines", type=int, default=100, help="how many of the latest, 100 if not given")
    return parser


def _given(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name in StackSettings.model_fields if (value := getattr(options, name, None)) is not None}


# --- up ---


def _up(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Start everything and return once it is ready."""
    for variable, hint in unknown_variables().items():
        sys.stderr.write(f"{variable} is not read by anybody: {hint}\n")
    _refuse_if_up(settings.state_dir)
    _stack(settings).check_ports()
    logs = settings.state_dir.resolve() / "logs"
    _put_aside(logs)
    sys.stdout.write(f"starting NATS, Redis and the services; logs in {logs}\n")
    sys.stdout.flush()
    _start_supervisor(settings, logs / "supervisor.log")
    state = read_state(settings.state_dir)
    if state is None:
        raise FatalError("the stack was stopped again while it started")
    sys.stdout.write(f"ready: {state.gateway}\nkey:   {state.key_file}\n")
    if state.gateway != Settings.load().gateway_url:
        sys.stdout.write(f"the clients look elsewhere; do: export PACELINE_GATEWAY_URL={state.gateway}\n")
    return 0


def _refuse_if_up(root: Path) -> None:
    state = read_state(root)
    if state is None or not (_running(state) or _supervisor(state)):
        return
    gone = [name for name in state.processes if name not in _running(state)]
    if _supervisor(state) is None:
        raise FatalError("the stack runs without its supervisor; `make down` first, then `make up` again")
    if gone:
        raise FatalError(
            f"the stack runs, but for {', '.join(gone)}; `make status` tells whether that comes back by itself; "
            "if not, `make down` and then `make up` start everything anew"
        )
    raise FatalError(f"the stack runs already at {state.gateway}; stop it with `make down` first")


def _stack(settings: StackSettings) -> LocalStack:
    options = StackOptions(
        root=settings.state_dir,
        nats_port=settings.nats_port,
        redis_port=settings.redis_port,
        http_port=settings.http_port,
        counts={"verifier": settings.verifiers},
        settings=Settings.load().model_dump(exclude={"instance", "nats_url", "redis_url", "keys_file"}),
        tied=False,
    )
    return LocalStack(options if settings.vllm_python is None else options.with_vllm(settings.vllm_python))


def _put_aside(logs: Path) -> None:
    """The logs of the run before stay as *.log.1, so that *.log are this run's alone."""
    logs.mkdir(parents=True, exist_ok=True)
    for file in logs.glob("*.log"):
        file.replace(file.with_suffix(".log.1"))


def _start_supervisor(settings: StackSettings, log_file: Path) -> None:
    """Returns when everything is ready; raises FatalError with the reason when the start failed."""
    given = settings.model_dump(exclude_none=True)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    with log_file.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.stack", "supervise", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    if process.stdout is None:
        raise AssertionError("the supervisor was started with a pipe")
    try:
        said = process.stdout.read().decode()
    except BaseException:
        process.terminate()
        process.wait(SUPERVISOR_STOP_S)
        raise
    if said != _READY:
        raise FatalError(said.strip() or f"the supervisor ended with code {process.wait()}; see {log_file}")


# --- the supervisor ---


def _supervise(settings: StackSettings, _options: argparse.Namespace) -> int:
    """What `up` leaves running. Answers on stdout, once: `ready`, or why not."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            console_renderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    stack = _stack(settings)
    stack.supervisor = ProcessState(os.getpid(), birth(os.getpid()), str(stack.root / "logs" / "supervisor.log"), {})
    try:
        asyncio.run(Supervisor(stack).run(_answer_ready))
    except FatalError as error:
        log.error("not started", error=str(error).partition("\n")[0])
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _answer_ready() -> None:
    """And let go of `up`, which reads until the pipe closes."""
    # When `up` was killed nobody reads, and the stack runs all the same.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, _READY.encode())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


# --- down ---


def _down(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    state = read_state(settings.state_dir)
    count, supervisor = (len(_running(state)), _supervisor(state)) if state else (0, None)
    if supervisor:
        _end([supervisor], SUPERVISOR_STOP_S)
    # Without a supervisor, or when it did not get to the end, the children are still there.
    left = _running(state) if (state := read_state(settings.state_dir)) else {}
    for group in stop_order(left):
        _end([left[name] for name in group], STOP_S)
    (settings.state_dir / STATE_FILE).unlink(missing_ok=True)
    sys.stdout.write(f"stopped {count} processes\n" if count or supervisor else "nothing runs\n")
    return 0


def _end(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    left = _signalled(processes, signal.SIGTERM, timeout_s)
    _signalled(left, signal.SIGKILL, 5.0)


def _signalled(processes: Sequence[psutil.Process], number: signal.Signals, timeout_s: float) -> list[psutil.Process]:
    """Those that are still there after timeout_s. They are nobody's children here, so they cannot be waited for."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    deadline = time.monotonic() + timeout_s
    while (left := [item for item in processes if _lives(item)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _running(state: StackState) -> dict[str, psutil.Process]:
    found = {name: alive(item.pid, item.started) for name, item in state.processes.items()}
    return {name: process for name, process in found.items() if process is not None}


def _supervisor(state: StackState) -> psutil.Process | None:
    return alive(state.supervisor.pid, state.supervisor.started) if state.supervisor else None


# --- status ---


def _status(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Show each process, its port and whether it is ready; 0 when all is well, else 3."""
    state = read_state(settings.state_dir)
    if state is None:
        sys.stdout.write("nothing runs; `make up` starts the stack\n")
        return NOT_WELL
    supervised = _supervisor(state) is not None
    conditions = dict(zip(state.processes, asyncio.run(_conditions(state, supervised)), strict=True))
    for name, item in state.processes.items():
        ports = ",".join(str(port) for port in item.ports.values())
        sys.stdout.write(f"{name:<14}{item.pid:>8}  {ports:<12}{conditions[name]}{_past(item)}\n")
    if state.supervisor:
        sys.stdout.write(f"{'supervisor':<14}{state.supervisor.pid:>8}  {'':<12}{'runs' if supervised else 'gone'}\n")
    sys.stdout.write(f"gateway {state.gateway}   key in {state.key_file}\n")
    sys.stdout.writelines(f"{line}\n" for line in _advice(state, conditions, supervised))
    well = supervised and all(condition in ("ready", "runs") for condition in conditions.values())
    return 0 if well else NOT_WELL


async def _conditions(state: StackState, supervised: bool) -> list[str]:
    return await asyncio.gather(*(_condition(name, item, supervised) for name, item in state.processes.items()))


async def _condition(name: str, item: ProcessState, supervised: bool) -> str:
    if alive(item.pid, item.started) is None:
        return "comes back" if supervised and not item.gone else "gone for good"
    if name in SERVERS:
        return "runs"
    return await http_ready(f"http://127.0.0.1:{item.ports['http']}/readyz")() or "ready"


def _past(item: ProcessState) -> str:
    if not item.last_end:
        return ""
    times = f", started again {item.restarts} time{'' if item.restarts == 1 else 's'}" if item.restarts else ""
    return f"{times} ({item.last_end})"


def _advice(state: StackState, conditions: dict[str, str], supervised: bool) -> Iterable[str]:
    """What to do, where something is gone for good."""
    gone = [name for name, condition in conditions.items() if condition == "gone for good"]
    if not supervised:
        yield "the supervisor is gone, so nothing is started again when it dies; do: make down, then make up"
    elif gone:
        yield f"{', '.join(gone)} died too often in a row; its log says why: make logs PROCESS={gone[0]}"
        yield "when that is mended, do: make down, then make up"
    elif not state.processes:
        yield "it is starting"


# --- logs ---


def _logs(settings: StackSettings, options: argparse.Namespace) -> int:
    """Show the latest log lines of this run (or the last one), merged by time, and with --follow what comes."""
    folder = settings.state_dir / "logs"
    logs = Logs(folder, options.names)
    unknown = [name for name in options.names if name not in logs.names()]
    if unknown:
        raise FatalError(f"no log of {', '.join(unknown)}; there are {', '.join(logs.names()) or 'none'}")
    if not logs.names():
        sys.stdout.write("no logs yet; `make up` starts the stack\n")
    sys.stdout.writelines(logs.new()[-options.lines :] if options.lines > 0 else [])
    with contextlib.suppress(KeyboardInterrupt):
        while options.follow:
            sys.stdout.flush()
            time.sleep(FOLLOW_S)
            sys.stdout.writelines(logs.new())
    return 0
