"""Quantised checkpoints whose configuration is not supported or contradicts itself: each is refused
before anything is served, with an error that names the file, the key, and the cure."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.quantised import LOAD_FORMATS, change_config, refused
from support.tiny_models import make_tiny

from demo.storing import WAYS, write_quantised

CORRECT = "correct the file"
SIXTEEN = "use the 16-bit weights"
RESTORE = "restore"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("plain"), intermediate_size=160)


@dataclass(frozen=True)
class Unsupported:
    """A checkpoint of `way` with one change to what config.json says of it, below the keys of
    `path`; None removes the key. What the error must say."""

    way: str
    path: tuple[str, ...]
    value: object
    problem: str
    cure: str = SIXTEEN


GROUP = ("config_groups", "group_0")
UNSUPPORTED: dict[str, Unsupported] = {
    "no method": Unsupported("fp8", ("quant_method",), None, "is not supported (supported: fp8"),
    "another method": Unsupported("fp8", ("quant_method",), "bitsandbytes", "is not supported"),
    "fp8 of another kind": Unsupported("fp8", ("fmt",), "e5m2", 'only "e4m3" is'),
    "other blocks": Unsupported(
        "fp8-blocks",
        ("weight_block_size",),
        [64, 64],
        "=[64, 64] is not supported, only [128, 128]",
    ),
    "other activations": Unsupported("fp8", ("activation_scheme",), "sparse", "='sparse'"),
    "to be dequantised": Unsupported("fp8", ("dequantize",), True, "", "set it to false"),
    "a name for a list": Unsupported(
        "fp8", ("modules_to_not_convert",), "lm_head", "must be a list of names", CORRECT
    ),
    "awq of three bits": Unsupported("awq", ("bits",), 3, "=3 is not supported, only 4 is"),
    "awq bits as a word": Unsupported("awq", ("bits",), "4", "must be a whole number", CORRECT),
    "awq without group_size": Unsupported("awq", ("group_size",), None, "is missing", RESTORE),
    "awq with groups of 48": Unsupported("awq", ("group_size",), 48, "only 32, 64, 128 and -1"),
    "awq gemv": Unsupported("awq", ("version",), "gemv", 'only "gemm" is'),
    "awq of another packer": Unsupported("awq", ("backend",), "llm-awq", 'only "autoawq"'),
    "awq without zeros": Unsupported("awq", ("zero_point",), False, "only true is"),
    "gptq of eight bits": Unsupported("gptq", ("bits",), 8, "=8 is not supported, only 4 is"),
    "gptq in order of activations": Unsupported(
        "gptq", ("desc_act",), True, "is not supported with groups", "desc_act=False"
    ),
    "gptq desc_act as a word": Unsupported(
        "gptq", ("desc_act",), "no", "must be true or false", CORRECT
    ),
    "gptq for marlin": Unsupported("gptq", ("checkpoint_format",), "marlin", '"gptq_v2" is'),
    "gptq of marlin": Unsupported("gptq", ("is_marlin_format",), True, "is not supported"),
    "gptq in words of 64 bits": Unsupported("gptq", ("pack_dtype",), "int64", '"int32"'),
    "gptq with lm_head": Unsupported("gptq", ("lm_head",), True, "lm_head stays in 16 bits"),
    "gptq rotated": Unsupported("gptq", ("rotation",), "hadamard", "is not supported"),
    "gptq with a module of eight bits": Unsupported(
        "gptq", ("dynamic",), {"+:.*down": {"bits": 8}}, "bits=8 is not supported"
    ),
    "gptq with a wrong expression": Unsupported(
        "gptq", ("dynamic",), {"-:(": {}}, "has no valid expression '('", CORRECT
    ),
    "gptq with numbers for names": Unsupported(
        "gptq", ("modules_in_block_to_quantize",), [[3]], "must be lists of names", CORRECT
    ),
    "fake quantised": Unsupported(
        "ct-int4", ("quantization_status",), "frozen", 'only "compressed" is'
    ),
    "int8": Unsupported("ct-int4", ("format",), "int-quantized", "='int-quantized'"),
    "nvfp4": Unsupported("ct-int4", ("format",), "nvfp4-pack-quantized", "is not supported"),
    "marlin 2:4": Unsupported("ct-int4", ("format",), "marlin-24", "is not supported"),
    "sparse": Unsupported(
        "ct-int4", ("sparsity_config",), {"format": "sparse-24-bitmask"}, 'only "dense" is'
    ),
    "transformed": Unsupported(
        "ct-int4", ("transform_config",), {"config_groups": {"R1": {}}}, "is not supported"
    ),
    "without groups": Unsupported("ct-int4", ("config_groups",), None, "is missing", RESTORE),
    "groups in a list": Unsupported("ct-int4", ("config_groups",), [], "a mapping", CORRECT),
    "an empty group": Unsupported(
        "ct-int4", ("config_groups",), {"group_0": None}, "group_0=None is empty", RESTORE
    ),
    "without weights": Unsupported("ct-int4", (*GROUP, "weights"), None, "activations alone"),
    "packed in order of activations": Unsupported(
        "ct-int4", (*GROUP, "weights", "actorder"), "group", "='group'", "actorder 'weight'"
    ),
    "packed with eight bits": Unsupported(
        "ct-int4", (*GROUP, "weights", "num_bits"), 8, "=8 is not supported, only 4 is"
    ),
    "int4 with int8 activations": Unsupported(
        "ct-int4", (*GROUP, "input_activations"), {"num_bits": 8}, 'only "float" is'
    ),
    "int4 with activations of four bits": Unsupported(
        "ct-int4-fp8", (*GROUP, "input_activations", "num_bits"), 4, "only 8 is"
    ),
    "int4 with static activations": Unsupported(
        "ct-int4-fp8", (*GROUP, "input_activations", "dynamic"), False, "only true is"
    ),
    "int4 with activations that have zeros": Unsupported(
        "ct-int4-fp8", (*GROUP, "input_activations", "symmetric"), False, "only true is"
    ),
    "fp8 with 16-bit activations": Unsupported(
        "ct-fp8-rows", (*GROUP, "input_activations"), None, "16-bit activations"
    ),
    "quantised outputs": Unsupported(
        "ct-fp8-rows", (*GROUP, "output_activations"), {"num_bits": 8}, "is not supported"
    ),
    "fp8 with zeros": Unsupported(
        "ct-fp8-rows", (*GROUP, "weights", "symmetric"), False, "only true is"
    ),
    "fp8 in groups": Unsupported(
        "ct-fp8-rows", (*GROUP, "weights", "strategy"), "group", '"block" is'
    ),
    "weights that are quantised again each time": Unsupported(
        "ct-fp8-rows", (*GROUP, "weights", "dynamic"), True, "for weights"
    ),
    "another format in a group": Unsupported(
        "ct-fp8-rows", (*GROUP, "format"), "pack-quantized", "format of the whole", CORRECT
    ),
    "a wrong expression": Unsupported(
        "ct-int4", ("ignore",), ["re:*"], "has no valid expression '*'", CORRECT
    ),
    "an int8 KV cache": Unsupported(
        "ct-int4", ("kv_cache_scheme",), {"type": "int", "num_bits": 8}, 'only "float" is'
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_configuration_is_refused(kind: str, plain: Path, tmp_path: Path) -> None:
    case = UNSUPPORTED[kind]
    folder = write_quantised(plain, tmp_path, WAYS[case.way])
    change_config(folder, case.path, case.value)
    for load_format in LOAD_FORMATS:
        message = refused(folder, load_format)
        assert f"{folder / 'config.json'}: quantization_config." in message
        assert case.path[-1] in message and case.problem in message and case.cure in message
        assert "not supported yet" not in message, "as if it were only not built yet"


def test_there_are_thirty_kinds() -> None:
    assert len(UNSUPPORTED) >= 30


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_configuration_that_is_no_mapping_is_refused(
    key: str, plain: Path, tmp_path: Path
) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, key: "fp8"}))
    assert f"{folder / 'config.json'}: {key}='fp8' must be a mapping: {CORRECT}" in refused(folder)


def test_two_files_that_contradict_each_other(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["gptq"])
    other = folder / "quantize_config.json"
    other.write_text(json.dumps({**WAYS["gptq"].config, "group_size": 64}))
    message = refused(folder)
    assert f"{folder / 'config.json'}: quantization_config says" in message
    assert f"{other} says GPTQ int4 in groups of 64: remove the one" in message
    other.write_text("{")
    assert f"{other} is not valid JSON" in refused(folder)
    other.write_text("[]")
    assert f"{other} is not a JSON mapping: download it again" in refused(folder)


def test_a_file_of_modelopt(plain: Path, tmp_path: Path) -> None:
    folder = write_quantised(plain, tmp_path, WAYS["fp8"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    other = folder / "hf_quant_config.json"
    other.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    message = refused(folder)
    assert f"{other}: quant_method='modelopt' is not supported" in message and SIXTEEN in message
