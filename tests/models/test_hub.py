"""Models that are named by their id on the Hub: a fake one on loopback has one, or refuses it."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_hub import COMMIT, FakeHub, fake_hub
from support.tiny_models import make_tiny
from text.backends import byte_level_backend

from pdserve.engine.llm import LLM, SamplingParams
from pdserve.models import hub as hubs
from pdserve.models.checkpoint import resolve_folder, weight_files

NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Its own cache, and no token."""
    folder = make_tiny("llama3", tmp_path / "made", max_shard_size="100KB")
    (folder / "README.md").write_text("not for the engine")
    with fake_hub(NAME, folder) as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield made


def refused(revision: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        resolve_folder(NAME, "auto", revision)
    return str(caught.value)


def test_a_model_is_downloaded_once_with_progress(hub: FakeHub) -> None:
    told: list[tuple[int, int]] = []
    folder = resolve_folder(NAME, "auto", report=lambda done, total: told.append((done, total)))
    assert folder.name == COMMIT and len(weight_files(folder)) > 2
    assert not (folder / "README.md").exists()
    done = [each for each, _ in told]
    assert done == sorted(done) and told[-1][0] == told[-1][1] == sum(n for _, n in hub.served)
    served = len(hub.served)
    assert resolve_folder(NAME, "auto") == folder and len(hub.served) == served
    prompt = [[1, 2, 3]]
    params = SamplingParams(temperature=0, max_tokens=4)
    made = [
        LLM(path, tokenizer=False, device="cpu", num_kv_blocks=16).generate(
            prompt, params, use_tqdm=False
        )
        for path in (NAME, str(hub.folder))
    ]
    assert made[0][0].outputs[0].token_ids == made[1][0].outputs[0].token_ids


def test_tokenizers_and_templates_of_other_places(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = byte_level_backend().get_vocab_size()
    model = make_tiny("llama3", tmp_path / "model", vocab_size=vocab)
    with pytest.raises(ValueError, match=r"tokenizer path .* holds no tokenizer\.json"):
        LLM(str(model), device="cpu", num_kv_blocks=16)
    byte_level_backend().save(str(hub.folder / "tokenizer.json"))
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    monkeypatch.chdir(tmp_path)
    for given in (template, "chat.jinja", str(tmp_path / "chat.jinja")):
        llm = LLM(str(model), tokenizer=NAME, chat_template=given, device="cpu", num_kv_blocks=16)
        asked = SamplingParams(temperature=0, max_tokens=2)
        [answer] = llm.chat([{"role": "user", "content": "Hm"}], asked, use_tqdm=False)
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(answer.prompt_token_ids) == "<Hm>"
    with pytest.raises(ValueError, match=r"chat_template: 'none\.jinja' is neither"):
        LLM(str(model), tokenizer=NAME, chat_template="none.jinja", device="cpu", num_kv_blocks=16)
    with pytest.raises(ValueError, match="tokenizer path 'nobody/none' is not a local folder, and"):
        LLM(str(model), tokenizer="nobody/none", device="cpu", num_kv_blocks=16)


def test_routers_download_no_weights(hub: FakeHub) -> None:
    folder = resolve_folder(NAME, "dummy")
    assert (folder / "config.json").is_file() and not list(folder.glob("*.safetensors"))
    assert resolve_folder(NAME, "auto") == folder and list(folder.glob("*.safetensors"))


def test_several_processes_of_a_node_ask_at_once(hub: FakeHub) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_folder(NAME, "auto")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4
    names = [name for name, _ in hub.served]
    assert sorted(names) == sorted(set(names)), "a file went out twice"


def test_what_was_cut_off_goes_on_where_it_was(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    largest = max(hub.files, key=lambda file: file.stat().st_size)
    hub.cut_after = largest.stat().st_size - 1000
    try:
        resolve_folder(NAME, "auto")
    except (ValueError, OSError):
        resolve_folder(NAME, "auto")
    pieces = [size for name, size in hub.served if name == hub.named(largest)]
    assert len(pieces) == 2 and sum(pieces) < largest.stat().st_size + 1000
    folder = resolve_folder(NAME, "auto")
    assert (folder / hub.named(largest)).read_bytes() == largest.read_bytes()


def test_a_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    assert "the Hub has no such model, or it is private: set HF_TOKEN, or run" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the Hub refuses your token (HF_TOKEN or `hf auth login`): make a new one" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert weight_files(resolve_folder(NAME, "auto"))


@pytest.mark.parametrize(
    "refusal,said",
    [
        ((403, "GatedRepo"), "is gated on the Hub: accept its terms at http.*someone/tiny with an"),
        ((401, "RepoNotFound"), "the Hub has no such model, or it is private: set HF_TOKEN"),
        ((403, ""), "the Hub cannot be reached"),
        ((404, "RepoNotFound"), "the Hub has no such model, or it is private"),
        ((500, ""), "its files are not all in the cache .*the Hub cannot be reached"),
    ],
)
def test_refusals_are_named_with_the_cure(
    hub: FakeHub, refusal: tuple[int, str], said: str
) -> None:
    hub.refusal = refusal
    with pytest.raises(ValueError, match=f"model path 'someone/tiny' is not a .*, and .*{said}"):
        resolve_folder(NAME, "auto")


def test_what_is_in_the_cache_needs_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set: run `hf download someone/tiny`" in refused()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = resolve_folder(NAME, "auto")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_folder(NAME, "auto") == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for refusal in ((403, "GatedRepo"), (401, ""), (500, "")):
        hub.refusal = refusal
        assert resolve_folder(NAME, "auto") == folder


def test_revisions(hub: FakeHub) -> None:
    assert resolve_folder(NAME, "auto", COMMIT).name == COMMIT
    assert "the Hub's model has no revision 'v9': see" in refused("v9")


def test_a_disk_without_room_is_said_before_and_during(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sizes = {"config.json": 10**18}
    assert "1000000000.0 GB must be downloaded, but" in refused() and not hub.served
    hub.sizes = {}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert "is full: make room, or set HF_HOME to a folder of a larger disk" in refused()


@pytest.mark.parametrize(
    "file,kind",
    [("model-q4.gguf", "GGUF"), ("pytorch_model.bin", "PyTorch's pickled .bin"), ("a.txt", None)],
)
def test_other_formats_are_refused_by_name(
    hub: FakeHub, tmp_path: Path, file: str, kind: str | None
) -> None:
    for weights in hub.folder.glob("*.safetensors*"):
        weights.unlink()
    (hub.folder / file).write_bytes(b"x")
    want = f"its weights as {kind} alone" if kind else "has no weights in safetensors"
    assert want in refused() and not hub.served
    with pytest.raises(ValueError, match=want.replace(".", r"\.")):
        weight_files(hub.folder)


@pytest.mark.parametrize("path", ["./no/such/folder", "a/b/c", "no folder"])
def test_what_is_no_name_of_the_hub(hub: FakeHub, path: str) -> None:
    with pytest.raises(ValueError, match="is not a local folder, nor a name of the Hub"):
        resolve_folder(path, "auto")


def test_unknown_errors_stay_what_they_are(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(hubs, "_check", fail)
    with pytest.raises(OSError, match="broken"):
        resolve_folder(NAME, "auto")
