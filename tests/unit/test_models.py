"""The catalog, sources, pulling and verifying, on tiny real GGUF files and the real llama.cpp."""

from __future__ import annotations

import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import huggingface_hub.constants
import msgspec
import pytest
from filelock import FileLock
from tiny_model import write_gguf

from paceline import models
from paceline.errors import ModelError
from paceline.gguf_card import card_from_gguf
from paceline.model_card import NORMAL, byte_level_bpe, write_whole
from paceline.model_files import Record
from paceline.model_sources import locate

FILES = ["card.json", "draft-card.json", "draft.gguf", "draft.gguf.json", "target.gguf", "target.gguf.json"]


def write_catalog(path: Path, *, target: str = "", draft: str = "", context: int = 48, name: str = "tiny") -> Path:
    """A catalog of one pair; `target` and `draft` are further lines of their tables."""
    path.write_text(
        f'[{name}]\nlicence = "MIT"\ncontext = {context}\n'
        f'[{name}.target]\nsource = "file:base.gguf"\nquantize = "F16"\n{target}\n'
        f'[{name}.draft]\nsource = "file:{"other" if "other" in draft else "base"}.gguf"\nquantize = "Q4_0"\n'
        f"{draft.replace('other', '')}\n"
    )
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "base.gguf")


@pytest.fixture
def extra(tmp_path: Path, base: Path) -> Path:
    return write_catalog(tmp_path / "mine.toml")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Steps(list[str]):
    """Progress lines."""

    def said(self, word: str) -> int:
        return sum(word in line for line in self)


class TestCatalog:
    def test_the_embedded_pairs(self) -> None:
        pairs = models.catalog()
        assert set(pairs) == {"smollm2", "smollm2-hi", "toy"}
        assert pairs["toy"].simulated
        assert pairs["smollm2"].target is not None
        assert (pairs["smollm2"].target.quantize, pairs["smollm2"].licence) == ("F16", "Apache-2.0")

    def test_a_file_of_ones_own_adds_pairs_with_paths_from_its_folder(self, extra: Path, base: Path) -> None:
        pairs = models.catalog(extra)
        assert set(pairs) == {"smollm2", "smollm2-hi", "toy", "tiny"}
        assert pairs["tiny"].target is not None
        assert pairs["tiny"].target.source == f"file:{base}"

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("[a", "cannot be used"),
            ('[a]\nlicence = "MIT"', "context"),
            ('[a]\nlicence = "MIT"\ncontext = 64', r"needs a table \[a.target\]"),
            ('[a]\nlicence = "MIT"\ncontext = 64\nsimulated = true\ntarget = {source = "file:x"}', "must not have"),
            ('[a]\nlicence = "MIT"\ncontext = 64\ntarget = {source = "ftp:x"}', "source"),
            ('[a]\nlicence = "MIT"\ncontext = 64\ntarget = {source = "file:x", quantize = "Q2"}', "quantize"),
            ('["../a"]\nlicence = "MIT"\ncontext = 64', "cannot be used"),
        ],
    )
    def test_a_bad_catalog_is_named_with_its_fault(self, tmp_path: Path, text: str, complaint: str) -> None:
        path = tmp_path / "bad.toml"
        path.write_text(text)
        with pytest.raises(ModelError, match=complaint) as error:
            models.catalog(path)
        assert str(path) in str(error.value)

    def test_an_unknown_pair_is_answered_with_the_known_ones(self, store: Path) -> None:
        with pytest.raises(ModelError, match=r"'nope'.*smollm2, smollm2-hi, toy"):
            models.pull("nope", store)


class TestPull:
    def test_makes_files_cards_and_records(self, store: Path, extra: Path) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        assert sorted(file.name for file in pulled.folder.iterdir()) == FILES
        card = models.ModelCard.load(pulled.card)
        draft_card = models.ModelCard.load(pulled.draft_card)
        assert (card.model, card.context, card.end_ids, card.bos_id) == ("tiny", 48, (1,), 2)
        assert (draft_card.model, draft_card.fingerprint) == ("tiny-draft", card.fingerprint)
        record = Record.of(pulled.draft)
        assert record is not None
        assert record.sha256 == hashlib.sha256(pulled.draft.read_bytes()).hexdigest()
        assert models.find("tiny", store, extra=extra) == pulled

    def test_a_second_pull_does_nothing(self, store: Path, extra: Path) -> None:
        first, second = Steps(), Steps()
        models.pull("tiny", store, first.append, extra=extra)
        models.pull("tiny", store, second.append, extra=extra)
        assert first.said("writing") == 2
        assert not second

    def test_the_simulated_pair_has_only_a_card(self, store: Path) -> None:
        pulled = models.pull("toy", store)
        assert pulled.simulated
        assert [file.name for file in pulled.folder.iterdir()] == ["card.json"]
        assert models.ModelCard.load(pulled.card).simulated
        assert models.verify("toy", store) == pulled

    def test_two_pulls_at_once_make_each_file_once(self, store: Path, extra: Path) -> None:
        steps = Steps()
        with ThreadPoolExecutor(2) as pool:
            pulls = [pool.submit(models.pull, "tiny", store, steps.append, extra=extra) for _ in range(2)]
        assert pulls[0].result() == pulls[1].result()
        assert steps.said("writing") == 2

    def test_a_pull_that_never_ends_is_not_waited_for_for_ever(
        self, store: Path, extra: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "LOCK_TIMEOUT_S", 0.01)
        store.mkdir()
        steps = Steps()
        with FileLock(store / ".lock"), pytest.raises(ModelError, match="another pull has held"):
            models.pull("tiny", store, steps.append, extra=extra)
        assert steps.said("waiting for another pull") == 1

    def test_pairs_share_a_file_that_is_made_the_same_way(self, store: Path, extra: Path, tmp_path: Path) -> None:
        one = models.pull("tiny", store, extra=extra)
        steps = Steps()
        two = models.pull("twin", store, steps.append, extra=write_catalog(tmp_path / "twin.toml", name="twin"))
        assert one.target.samefile(two.target)
        assert not steps.said("writing")

    def test_a_source_that_needs_no_work_is_taken_over_as_it_is(self, store: Path, tmp_path: Path, base: Path) -> None:
        path = write_catalog(tmp_path / "plain.toml")
        path.write_text(path.read_text().replace('quantize = "F16"', ""))
        pulled = models.pull("tiny", store, extra=path)
        assert pulled.target.read_bytes() == base.read_bytes()

    def test_without_hard_links_it_is_copied(
        self, store: Path, extra: Path, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError("cross-device link")

        monkeypatch.setattr(os, "link", refuse)
        extra.write_text(extra.read_text().replace('quantize = "F16"', ""))
        pulled = models.pull("tiny", store, extra=extra)
        assert pulled.target.read_bytes() == base.read_bytes()
        assert not pulled.target.samefile(base)

    @pytest.mark.parametrize("change", ["source", "file", "catalog"])
    def test_what_has_changed_is_made_anew(self, store: Path, extra: Path, base: Path, change: str) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        if change == "source":
            write_gguf(base, seed=1, more=["new"])
        elif change == "file":
            pulled.draft.write_bytes(pulled.draft.read_bytes() + b"x")
        else:
            extra.write_text(extra.read_text().replace("Q4_0", "Q4_1"))
        steps = Steps()
        again = models.pull("tiny", store, steps.append, extra=extra)
        assert steps.said("writing") == (2 if change == "source" else 1)
        assert models.ModelCard.load(again.card).fingerprint == card_from_gguf(again.target, "x").fingerprint
        models.verify("tiny", store, extra=extra)

    def test_the_catalogs_context_is_served_or_refused(self, store: Path, extra: Path, tmp_path: Path) -> None:
        models.pull("tiny", store, extra=extra)
        steps = Steps()
        again = models.pull("tiny", store, steps.append, extra=write_catalog(tmp_path / "less.toml", context=32))
        assert (models.ModelCard.load(again.card).context, steps.said("writing")) == (32, 0)
        with pytest.raises(ModelError, match="allows 64 tokens, the catalog asks for 65"):
            models.pull("tiny", store, extra=write_catalog(tmp_path / "more.toml", context=65))

    def test_a_damaged_card_is_made_anew(self, store: Path, extra: Path) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        card = pulled.card.read_bytes()
        pulled.card.write_bytes(b"{}")
        models.pull("tiny", store, extra=extra)
        assert pulled.card.read_bytes() == card

    def test_a_source_that_is_gone_is_not_missed(self, store: Path, extra: Path, base: Path) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        base.unlink()
        assert models.pull("tiny", store, extra=extra) == pulled

    def test_a_wrong_checksum_leaves_nothing_behind(self, store: Path, tmp_path: Path, base: Path) -> None:
        path = write_catalog(tmp_path / "sum.toml", target=f'sha256 = "{"0" * 64}"')
        with pytest.raises(ModelError, match="not the file the catalog means"):
            models.pull("tiny", store, extra=path)
        assert [file.name for file in (store / "tiny").iterdir()] == []

    def test_a_pair_of_two_vocabularies_is_refused(self, store: Path, tmp_path: Path, base: Path) -> None:
        write_gguf(tmp_path / "other.gguf", more=["q!"])
        path = write_catalog(tmp_path / "two.toml", draft="# other")
        with pytest.raises(ModelError, match="token 268 is nothing in the one and 'q!' in the other"):
            models.pull("tiny", store, extra=path)
        with pytest.raises(ModelError, match="paceline models pull tiny"):
            models.find("tiny", store, extra=path)

    def test_a_damaged_file_is_no_model(self, store: Path, extra: Path, base: Path) -> None:
        base.write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(ModelError, match=r"base\.gguf"):
            models.pull("tiny", store, extra=extra)

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, extra: Path) -> None:
        (tmp_path / "blocked").write_text("a file")
        with pytest.raises(ModelError, match="cannot write the models of tiny"):
            models.pull("tiny", tmp_path / "blocked", extra=extra)


class TestVerify:
    def test_reads_every_byte(self, store: Path, extra: Path) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        assert models.verify("tiny", store, extra=extra) == pulled
        facts = pulled.target.stat()
        content = bytearray(pulled.target.read_bytes())
        content[-1] ^= 1
        pulled.target.write_bytes(content)
        os.utime(pulled.target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert models.find("tiny", store, extra=extra) == pulled
        with pytest.raises(ModelError, match=r"target\.gguf is not the file that was pulled"):
            models.verify("tiny", store, extra=extra)

    def test_a_card_that_does_not_fit_is_named(self, store: Path, extra: Path) -> None:
        pulled = models.pull("tiny", store, extra=extra)
        card = models.ModelCard.load(pulled.card)
        msgspec.structs.replace(card, chat_template="").save(pulled.card)
        with pytest.raises(ModelError, match=r"card\.json does not fit its model"):
            models.verify("tiny", store, extra=extra)

    def test_what_was_never_pulled(self, store: Path, extra: Path) -> None:
        with pytest.raises(ModelError, match="paceline models pull tiny"):
            models.verify("tiny", store, extra=extra)


class TestCards:
    def test_another_kind_of_tokenizer_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="'llama' is not supported"):
            card_from_gguf(write_gguf(tmp_path / "spm.gguf", kind="llama"), "x")

    def test_an_unknown_splitting_rule_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="'viking' is not supported"):
            card_from_gguf(write_gguf(tmp_path / "x.gguf", pre="viking"), "x")

    def test_a_file_cut_short_is_named(self, tmp_path: Path, base: Path) -> None:
        whole = base.read_bytes()
        cut = tmp_path / "cut.gguf"
        for length in (0, 3, 24, 60, 5000, 9000):
            cut.write_bytes(whole[:length])
            with pytest.raises(ModelError, match=r"cut\.gguf"):
                card_from_gguf(cut, "x")

    def test_merges_that_the_vocabulary_lacks(self) -> None:
        with pytest.raises(ModelError, match="do not fit"):
            byte_level_bpe(["a", "b"], [NORMAL, NORMAL], ["a c"], "gpt-2")

    def test_a_card_that_cannot_be_written_leaves_no_half(self, tmp_path: Path) -> None:
        (tmp_path / "card.json").mkdir()
        with pytest.raises(OSError, match="directory"):
            write_whole(tmp_path / "card.json", b"x")
        assert [path.name for path in tmp_path.iterdir()] == ["card.json"]


class TestSources:
    def test_a_file(self, base: Path) -> None:
        assert locate(f"file:{base}") == base
        with pytest.raises(ModelError, match="no file at"):
            locate(f"file:{base}x")

    def test_data_of_an_installed_package(self) -> None:
        version = metadata.version("msgspec")
        assert locate(f"package:msgspec@{version}/msgspec/py.typed").name == "py.typed"
        assert locate("package:msgspec/msgspec/py.typed").is_file()

    @pytest.mark.parametrize(
        ("uri", "complaint"),
        [
            ("package:msgspec/nothing", "holds no file nothing"),
            ("package:msgspec@0.0.1/msgspec/py.typed", r"the catalog wants 0\.0\.1.*pip install --no-deps msgspec==0"),
            ("package:no-such-thing@1.2/x", "not installed.*pip install --no-deps no-such-thing==1.2"),
            ("package:msgspec", "is not package:NAME"),
            ("hf:owner/repo", "is not hf:OWNER"),
            ("ftp:x", "unknown model source"),
        ],
    )
    def test_what_is_missing_is_said_with_the_way_to_get_it(self, uri: str, complaint: str) -> None:
        with pytest.raises(ModelError, match=complaint):
            locate(uri)


class Hub(http.server.BaseHTTPRequestHandler):
    """Just enough of the hub: one file of one revision."""

    content = b"weights"

    def do_HEAD(self) -> None:
        known = self.path == "/owner/repo/resolve/v1/sub/file.gguf"
        self.send_response(200 if known else 404)
        if known:
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", '"' + hashlib.sha256(self.content).hexdigest() + '"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(self.content) if known else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class TestHub:
    def test_a_file_is_downloaded_once(self, hub: http.server.ThreadingHTTPServer) -> None:
        path = locate("hf:owner/repo/sub/file.gguf@v1")
        assert path.read_bytes() == Hub.content
        assert not path.is_symlink()
        assert locate("hf:owner/repo/sub/file.gguf@v1") == path

    def test_a_file_that_is_not_there(self, hub: http.server.ThreadingHTTPServer) -> None:
        with pytest.raises(ModelError, match=r"cannot fetch hf:owner/repo/other\.gguf@v1: .*404"):
            locate("hf:owner/repo/other.gguf@v1")
