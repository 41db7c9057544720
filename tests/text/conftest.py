import json
from pathlib import Path

import pytest
from text.backends import TEMPLATE, byte_level_backend, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    eos = {"content": "<|im_end|>", "lstrip": False, "special": True}
    write_folder(
        path, byte_level_backend(), bos_token="<|bos|>", eos_token=eos, chat_template="unused"
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return path
