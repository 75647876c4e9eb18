"""`python -m paceline.stack up|down|status|logs`: the stack in the background, kept in a state file."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from paceline.errors import FatalError
from paceline.processes import alive, http_ready
from paceline.settings import Settings, StackSettings
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

STOP_S = 15.0
FOLLOW_S = 0.2


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
    parser = argparse.ArgumentParser(prog="python -m paceline.stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("up", _up), ("down", _down), ("status", _status), ("logs", _logs)):
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        command.set_defaults(run=run)
        command.add_argument("--state-dir", type=Path, help="logs, data, keys and the state file (PACELINE_STATE_DIR)")
        if name == "up":
            for port in ("nats", "redis", "http"):
                command.add_argument(f"--{port}-port", type=int, help=f"0: any free one (PACELINE_{port.upper()}_PORT)")
            command.add_argument("--verifiers", type=int, help="how many (PACELINE_VERIFIERS)")
        if name == "logs":
            command.add_argument("names", nargs="*", help="processes; all if none is named")
            command.add_argument("--follow", "-f", action="store_true")
            command.add_argument("--lines", type=int, default=20)
    return parser


def _given(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name in StackSettings.model_fields if (value := getattr(options, name, None)) is not None}


def _up(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Start everything and return once it is ready."""
    running = _running(settings.state_dir)
    if running:
        raise FatalError(f"the stack runs already ({', '.join(running)}); stop it with `down` first")
    stack = LocalStack(
        StackOptions(
            root=settings.state_dir,
            nats_port=settings.nats_port,
            redis_port=settings.redis_port,
            http_port=settings.http_port,
            counts={"verifier": settings.verifiers},
            settings=Settings.load().model_dump(exclude={"instance", "nats_url", "redis_url", "keys_file"}),
            tied=False,
        )
    )
    sys.stdout.write(f"starting NATS, Redis and the services; logs in {stack.root / 'logs'}\n")
    asyncio.run(_started(stack))
    sys.stdout.write(f"ready: {stack.gateway_url}\nkey:   {stack.key_file}\n")
    return 0


async def _started(stack: LocalStack) -> None:
    """Up, and left running; if that fails, nothing stays behind."""
    try:
        await stack.up()
    except BaseException:
        await stack.down()
        raise


def _down(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    running = _running(settings.state_dir)
    for group in stop_order(running):
        _end([running[name] for name in group])
    (settings.state_dir / STATE_FILE).unlink(missing_ok=True)
    sys.stdout.write(f"stopped {len(running)} processes\n" if running else "nothing runs\n")
    return 0


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.terminate()
    _, left = psutil.wait_procs(processes, timeout=STOP_S)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)


def _status(settings: StackSettings, _options: argparse.Namespace) -> int:
    """Show each process, its port and whether it is ready."""
    state = read_state(settings.state_dir)
    if state is None:
        sys.stdout.write("nothing runs\n")
        return 1
    rows = asyncio.run(_rows(state))
    for name, pid, ports, condition in rows:
        sys.stdout.write(f"{name:<14}{pid:>8}  {ports:<12}{condition}\n")
    sys.stdout.write(f"gateway {state.gateway}   key in {state.key_file}\n")
    return 0 if all(row[3] in ("ready", "runs") for row in rows) else 1


async def _rows(state: StackState) -> list[tuple[str, int, str, str]]:
    conditions = await asyncio.gather(*(_condition(name, item) for name, item in state.processes.items()))
    return [
        (name, item.pid, ",".join(str(port) for port in item.ports.values()), condition)
        for (name, item), condition in zip(state.processes.items(), conditions, strict=True)
    ]


async def _condition(name: str, item: ProcessState) -> str:
    if alive(item.pid, item.started) is None:
        return "gone"
    if name in SERVERS:
        return "runs"
    return await http_ready(f"http://127.0.0.1:{item.ports['http']}/readyz")() or "ready"


def _logs(settings: StackSettings, options: argparse.Namespace) -> int:
    """Show the end of the logs, and with --follow what comes."""
    folder = settings.state_dir / "logs"
    files = {file.stem: file for file in sorted(folder.glob("*.log"))}
    unknown = [name for name in options.names if name not in files]
    if unknown:
        raise FatalError(f"no log of {', '.join(unknown)}; there are {', '.join(files) or 'none'}")
    chosen = {name: file for name, file in files.items() if not options.names or name in options.names}
    for name, file in chosen.items():
        for line in file.read_text(errors="replace").splitlines()[-options.lines :]:
            sys.stdout.write(f"{name:<12} {line}\n")
    if options.follow:
        _follow(chosen)
    return 0


def _follow(files: dict[str, Path]) -> None:
    """Until interrupted."""
    places = {name: file.stat().st_size for name, file in files.items()}
    while True:
        for name, file in files.items():
            with file.open("rb") as log:
                log.seek(places[name])
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            places[name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                sys.stdout.write(f"{name:<12} {line}\n")
        sys.stdout.flush()
        time.sleep(FOLLOW_S)


def _running(root: Path) -> dict[str, psutil.Process]:
    state = read_state(root)
    found = {name: alive(item.pid, item.started) for name, item in state.processes.items()} if state else {}
    return {name: process for name, process in found.items() if process is not None}
