"""Which format each module has: by headers, and by the configuration's rules without them."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import make_tiny

from demo.storing import AWQ_CONFIG, BLOCKS, GPTQ_CONFIG, WAYS, Written, write_quantised
from pdserve.models.checkpoint import read_entries
from pdserve.models.formats.config_keys import find_keys
from pdserve.models.formats.formats import Formats, formats_of_modules
from pdserve.models.formats.headers import is_kv_scale, tensor_layouts
from pdserve.models.formats.read import read_formats
from pdserve.models.formats.source_format import DENSE, SourceFormat

LAYER = "model.layers.1"
MATRICES = [
    *(f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"),
    *(f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("plain"), intermediate_size=160)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2-moe", tmp_path_factory.mktemp("mixture"), intermediate_size=128)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def read(folder: Path, has_files: bool = True, skipped: tuple[str, ...] = ()) -> Formats:
    entries = read_entries(folder) if has_files else None
    formats = read_formats(folder, config_of(folder), entries, skipped)
    assert formats is not None
    return formats


def says(folder: Path, quantization: dict[str, Any]) -> Formats:
    """Returns what the configuration alone says."""
    formats = read_formats(folder, {"quantization_config": quantization}, None)
    assert formats is not None
    return formats


EXPECTED = {
    "fp8": ("fp8", "plain", (0, 0)),
    "fp8-static": ("fp8", "plain", (0, 0)),
    "fbgemm": ("fp8", "plain", (1, 0)),
    "fp8-blocks": ("fp8_block", "plain", (128, 128)),
    "ct-fp8-tensor": ("fp8", "plain", (0, 0)),
    "ct-fp8-rows": ("fp8", "plain", (1, 0)),
    "ct-fp8-blocks": ("fp8_block", "plain", (128, 128)),
    "ct-int4": ("int4", "compressed", (1, 32)),
    "ct-int4-rows": ("int4", "compressed", (1, 0)),
    "ct-int4-zeros": ("int4", "compressed", (1, 32)),
    "ct-int4-fp8": ("int4_fp8", "compressed", (1, 32)),
    "awq": ("int4", "awq", (1, 32)),
    "awq-rows": ("int4", "awq", (1, 0)),
    "gptq": ("int4", "gptq", (1, 32)),
    "gptq-zeros": ("int4", "gptq", (1, 32)),
    "gptq-rows": ("int4", "gptq", (1, 0)),
    "gptq-v2": ("int4", "gptq_v2", (1, 32)),
}


@pytest.mark.parametrize("way", WAYS)
def test_headers_and_configuration_give_the_format(way: str, plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS[way])
    formats, ruled = read(folder), read(folder, has_files=False)
    for module in MATRICES:
        format = formats.of(module)
        assert (format.kind, format.packing, format.group) == EXPECTED[way]
        assert not format.optional, "the headers say which tensors there are"
        said = ruled.of(module)
        assert (said.kind, said.packing, said.group) == EXPECTED[way]
    for module in ("lm_head", "model.embed_tokens", "model.norm", f"{LAYER}.input_layernorm"):
        assert formats.of(module) == ruled.of(module) == DENSE
    assert not formats.rules and not formats.exceptions and len(formats.kinds) == 2


@pytest.mark.parametrize("way", WAYS)
def test_tensor_layouts_are_those_of_the_files(way: str, plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS[way])
    formats = read(folder)
    entries = {entry.name: entry for entry in read_entries(folder)}
    module = f"{LAYER}.mlp.down_proj"
    stored = tensor_layouts(formats.of(module), 64, 160)
    assert {f"{module}.{name}" for name in stored} == {n for n in entries if module in n}
    for name, tensor in stored.items():
        entry = entries[f"{module}.{name}"]
        assert entry.shape in tensor.shapes and entry.dtype in tensor.dtypes


@pytest.mark.parametrize("way", ["fp8", "fp8-blocks", "ct-fp8-rows"])
def test_experts_have_formats_and_routers_have_none(
    way: str, mixture: Path, tmp_path: Path
) -> None:
    folder = write_quantised(mixture, tmp_path, WAYS[way])
    layer = "model.layers.2.mlp"
    for formats in (read(folder), read(folder, has_files=False)):
        assert formats.of(f"{layer}.experts.7.down_proj").kind != "dense"
        assert formats.of(f"{layer}.shared_expert.up_proj").kind != "dense"
        assert formats.of(f"{layer}.gate") == formats.of(f"{layer}.shared_expert_gate") == DENSE
    found = read(folder)
    assert "model.layers.*.mlp.experts.*.down_proj" in found.patterns and not found.exceptions
    assert len(found.model_dump_json()) < 4_000


def test_a_value_survives_json(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["gptq"], dense=("layers.1.mlp",))
    for formats in (read(folder), read(folder, has_files=False)):
        assert Formats.model_validate_json(formats.model_dump_json()) == formats


@pytest.mark.parametrize("way", ["awq", "gptq"])
def test_a_dense_module_that_is_not_listed_is_an_exception(
    way: str, plain: Path, tmp_path: Path
) -> None:
    folder = write_quantised(plain, tmp_path, WAYS[way], dense=("layers.1.mlp.up",))
    formats = read(folder)
    assert formats.of("model.layers.1.mlp.up_proj") == DENSE
    assert formats.of("model.layers.2.mlp.up_proj").kind == "int4"
    assert formats.exceptions.keys() == {"model.layers.1.mlp.up_proj"}


def test_mixed_precision_has_a_format_for_each_module(plain: Path, tmp_path: Path) -> None:
    int4, rows = WAYS["ct-int4"], WAYS["ct-fp8-rows"]
    groups = {
        "all": {**rows.config["config_groups"]["group_0"], "format": "float-quantized"},
        "mlp": {
            **int4.config["config_groups"]["group_0"],
            "format": "pack-quantized",
            "targets": [r"re:.*mlp\..*_proj", "model.layers.0.self_attn.q_proj"],
        },
    }
    config = {**int4.config, "format": "mixed-precision", "config_groups": groups}
    half = write_quantised(plain, tmp_path / "half", Written(config, int4.store), ("self_attn",))
    folder = write_quantised(half, tmp_path / "all", Written(config, rows.store))
    formats = says(tmp_path, config)
    assert formats.of("model.layers.0.self_attn.q_proj").kind == "int4"
    assert formats.of("model.layers.1.self_attn.q_proj").kind == "fp8"
    assert formats.of("model.layers.2.mlp.up_proj").kind == "int4"
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight_packed is missing"):
        read(folder)
    groups["mlp"]["targets"].pop()
    said = config_of(folder) | {"quantization_config": config}
    found = read_formats(folder, said, read_entries(folder))
    assert found is not None and {kind.kind for kind in found.kinds} == {"dense", "fp8", "int4"}
    assert found.of("model.layers.0.self_attn.q_proj").kind == "fp8"
    assert found.of("model.layers.0.mlp.up_proj").kind == "int4"


def test_layers_that_nobody_loads_are_skipped(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8-blocks"], dense=("layers.2.",))
    with pytest.raises(ValueError, match=r"model\.layers\.2\..*not converted"):
        read(folder)
    formats = read(folder, skipped=("model.layers.2.",))
    assert formats.of("model.layers.1.mlp.up_proj").kind == "fp8_block"


@pytest.mark.parametrize(
    ("quantization", "dense", "quantised"),
    [
        (
            {**AWQ_CONFIG, "modules_to_not_convert": ["mlp.up"]},
            "layers.0.mlp.up_proj",
            "layers.0.mlp.down_proj",
        ),
        (
            {**BLOCKS, "modules_to_not_convert": ["mlp.gat", "up_proj"]},
            "layers.0.mlp.up_proj",
            "layers.0.mlp.gate_proj",
        ),
        (
            {**BLOCKS, "ignored_layers": ["model.layers.1"]},
            "model.layers.1.mlp.up_proj",
            "model.layers.10.mlp.up_proj",
        ),
        (
            {**WAYS["ct-int4"].config, "ignore": [r"re:.*layers\.1\."]},
            "layers.1.mlp.up_proj",
            "layers.2.mlp.up_proj",
        ),
        (
            {**WAYS["ct-int4"].config, "ignore": ["up_proj", "re:up_proj", "layers.1.q_proj"]},
            "layers.1.q_proj",
            "layers.1.up_proj",
        ),
        (
            {**GPTQ_CONFIG, "dynamic": {r"-:.*\.1\.": {}, r".*\.2\.": {"group_size": 64}}},
            "layers.1.mlp.up_proj",
            "layers.0.mlp.up_proj",
        ),
        (
            {
                **GPTQ_CONFIG,
                "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]],
            },
            "layers.0.self_attn.q_proj",
            "layers.0.self_attn.k_proj",
        ),
    ],
)
def test_rules_of_each_method(
    quantization: dict[str, Any], dense: str, quantised: str, tmp_path: Path
) -> None:
    formats = says(tmp_path, quantization)
    assert formats.of(dense) == DENSE
    assert formats.of(quantised).kind != "dense"


def test_a_gptq_rule_may_have_groups_of_its_own(tmp_path: Path) -> None:
    dynamic = {r"+:.*\.2\.": {"group_size": 64}, r".*\.3\.": {"group_size": -1, "desc_act": True}}
    formats = says(tmp_path, {**GPTQ_CONFIG, "dynamic": dynamic})
    groups = [formats.of(f"model.layers.{n}.mlp.up_proj").group for n in (1, 2, 3)]
    assert groups == [(1, 32), (1, 64), (1, 0)]


def test_old_places_and_names_of_keys(plain: Path, tmp_path: Path) -> None:
    awq = {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}
    (tmp_path / "quant_config.json").write_text(json.dumps(awq))
    formats = read_formats(tmp_path, {}, None)
    assert formats is not None and formats.place == "quant_config.json"
    assert formats.of("model.layers.0.mlp.up_proj").group == (1, 64)
    (tmp_path / "quant_config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(json.dumps({**GPTQ_CONFIG, "group_size": 128}))
    formats = read_formats(tmp_path, {}, None)
    assert formats is not None and formats.of("model.layers.0.mlp.up_proj").group == (1, 128)
    agreeing = {"quantization_config": {**GPTQ_CONFIG, "group_size": 128}}
    assert [keys.place for keys in find_keys(tmp_path, agreeing)] == [
        "config.json: quantization_config",
        "quantize_config.json",
    ]
    assert read_formats(tmp_path, agreeing, None) is not None
    (tmp_path / "quantize_config.json").unlink()
    said = dict(WAYS["ct-fp8-rows"].config)
    del said["quant_method"]
    formats = read_formats(tmp_path, {"compression_config": said}, None)
    assert formats is not None and formats.of("model.layers.0.mlp.up_proj").kind == "fp8"
    nothings: tuple[dict[str, Any], ...] = (
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
    )
    for nothing in nothings:
        assert read_formats(tmp_path, nothing, None) is None


def test_scales_of_the_kv_cache_are_no_tensors_of_a_matrix(plain: Path, tmp_path: Path) -> None:
    for name in ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale"):
        assert is_kv_scale(f"model.layers.0.{name}")
    for name in ("self_attn.k_proj.weight_scale", "mlp.k_scale", "self_attn.o_proj.output_scale"):
        assert not is_kv_scale(f"model.layers.0.{name}")


def test_many_modules_are_few_patterns() -> None:
    block = SourceFormat(kind="fp8_block", group=(128, 128), tensors=("weight", "weight_scale_inv"))
    found = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}": block
        for layer in range(3, 61)
        for expert in range(256)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    found |= {"model.layers.7.mlp.experts.9.up_proj": DENSE, "lm_head": DENSE}
    formats = formats_of_modules("config.json", found)
    assert len(formats.model_dump_json()) < 1_500
    assert {module: formats.of(module) for module in found} == found
