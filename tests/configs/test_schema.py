"""The configuration tree: surface and defaults are frozen here, unknown keys name the nearest,
nothing can be set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from pdserve.configs.base import Config
from pdserve.configs.engine import EngineConfig, ModelConfig, ResolvedEngineConfig
from pdserve.configs.router import RouterConfig
from pdserve.configs.schema import AutoscalingConfig, ClusterConfig, DeploymentConfig, WorkerConfig
from pdserve.configs.traces import TracesConfig
from pdserve.configs.transfer import PoolConfig, TransferConfig

SURFACE: dict[type[Config], dict[str, Any]] = {
    ModelConfig: {
        "path": "demo/pdserve-demo",
        "name": None,
        "served_names": (),
        "revision": None,
        "tokenizer": None,
        "chat_template": None,
        "dtype": "auto",
        "load_format": "auto",
        "seed": 0,
        "quantization": None,
        "activation_dtype": "auto",
        "kv_scales": None,
        "generation_config": "auto",
        "tool_format": "auto",
        "reasoning_format": "auto",
        "tool_enforcement": "schema",
        "task": "auto",
    },
    EngineConfig: {
        "device": "auto",
        "block_size": None,
        "max_model_len": None,
        "max_num_batched_tokens": None,
        "max_num_seqs": None,
        "num_kv_blocks": None,
        "kv_memory_bytes": 256 << 20,
        "kv_cache_dtype": "auto",
        "kv_memory_fraction": 0.9,
        "enable_prefix_caching": True,
        "deterministic": False,
        "async_scheduling": None,
        "cuda_graphs": True,
        "tensor_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": False,
        "redundant_experts": 0,
        "expert_load_file": None,
        "pipeline_parallel": 1,
        "peer_stages": 1,
        "step_deadline_s": None,
        "grammar_build_s": 5.0,
        "grammar_mask_s": 0.1,
    },
    DeploymentConfig: {
        "replicas": 1,
        "num_cpus": 0.0,
        "num_gpus": 0.0,
        "resources": {},
        "labels": {},
        "engine": None,
        "autoscaling": None,
    },
    AutoscalingConfig: {
        "min": 1,
        "max": 1,
        "up_delay_s": 5.0,
        "down_delay_s": 120.0,
        "queue_ms": None,
        "sequences": None,
    },
    TracesConfig: {
        "enabled": None,
        "endpoint": None,
        "protocol": None,
        "sample_ratio": None,
        "service_name": None,
    },
}
NOT_WRITTEN = (ResolvedEngineConfig,)  # by users


def subclasses(of: type[Config]) -> Iterator[type[Config]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


ALL = [config for config in subclasses(Config) if config not in NOT_WRITTEN]


@pytest.mark.parametrize("config", SURFACE, ids=lambda c: c.__name__)
def test_names_and_defaults(config: type[Config]) -> None:
    assert config().model_dump() == SURFACE[config]


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.__name__)
def test_everything_is_frozen_and_has_defaults(config: type[Config]) -> None:
    made = config()
    for name in type(made).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(made, name, getattr(made, name))


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.__name__)
def test_an_unknown_key_names_the_nearest(config: type[Config]) -> None:
    for name in config.model_fields:
        wrong = name + "x"
        with pytest.raises(
            ValidationError,
            match=f"unknown key '{wrong}' in {config.__name__}: did you mean '{name}'",
        ):
            config(**{wrong: 1})


def test_an_unknown_key_deep_inside() -> None:
    with pytest.raises(
        ValidationError, match=r"unknown key 'blok_size' in EngineConfig: did you mean 'block_size'"
    ):
        ClusterConfig(**{"decode": {"engine": {"blok_size": 16}}})
    with pytest.raises(ValidationError, match=r"unknown key 7 in RouterConfig"):
        ClusterConfig(**{"router": {7: 1}})


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (EngineConfig, {"block_size": 24}),
        (EngineConfig, {"device": "tpu"}),
        (EngineConfig, {"max_num_batched_tokens": 15}),
        (EngineConfig, {"max_num_seqs": 0}),
        (EngineConfig, {"grammar_build_s": 0}),
        (EngineConfig, {"grammar_mask_s": -1}),
        (EngineConfig, {"max_model_len": 0}),
        (EngineConfig, {"num_kv_blocks": 1}),
        (EngineConfig, {"kv_memory_fraction": 0}),
        (EngineConfig, {"kv_memory_fraction": 1.1}),
        (EngineConfig, {"kv_memory_bytes": 0}),
        (EngineConfig, {"kv_cache_dtype": "int8"}),
        (ModelConfig, {"dtype": "float64"}),
        (ModelConfig, {"load_format": "gguf"}),
        (ModelConfig, {"quantization": "fp4"}),
        (ModelConfig, {"activation_dtype": "int8"}),
        (ModelConfig, {"generation_config": "vllm"}),
        (TransferConfig, {"connector": "ucx"}),
        (TransferConfig, {"lease_s": 0}),
        (TransferConfig, {"pull_deadline_s": -1}),
        (TransferConfig, {"max_pinned_fraction": 0}),
        (TransferConfig, {"max_reserved_fraction": 2}),
        (TransferConfig, {"lease_s": float("inf")}),
        (TransferConfig, {"max_pinned_fraction": float("nan")}),
        (RouterConfig, {"worker_silence_s": float("inf")}),
        (DeploymentConfig, {"num_gpus": float("nan")}),
        (DeploymentConfig, {"replicas": -1}),
        (RouterConfig, {"replicas": 0}),
        (RouterConfig, {"max_attempts": 0}),
        (WorkerConfig, {"role": "router"}),
        (TracesConfig, {"protocol": "http/json"}),
        (TracesConfig, {"sample_ratio": 1.5}),
        (TracesConfig, {"endpoint": "collector:4317"}),
        (TracesConfig, {"endpoint": "http://"}),
        (TracesConfig, {"endpoint": "http://c:port"}),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else v.__name__,
)
def test_a_bad_value_is_refused_by_name(config: type[Config], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        config(**values)


def test_a_receivers_url_holds_no_secret() -> None:
    with pytest.raises(ValidationError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        TracesConfig(endpoint="https://me:s3cret@collector:4317")
    assert "s3cret" not in str(refused.value)


def test_an_endpoint_turns_traces_on() -> None:
    endpoint = "grpc://collector:4317"
    assert not TracesConfig().wanted and TracesConfig(endpoint=endpoint).wanted
    assert not TracesConfig(endpoint=endpoint, enabled=False).wanted
    assert TracesConfig(enabled=True).wanted


def test_a_cluster_needs_its_workers() -> None:
    with pytest.raises(ValidationError, match=r"decode\.replicas must be at least 1"):
        ClusterConfig(decode=DeploymentConfig(replicas=0))
    with pytest.raises(
        ValidationError, match=r"prefill\.replicas must be at least 1 .* mode: aggregated"
    ):
        ClusterConfig(prefill=DeploymentConfig(replicas=0))
    assert (
        ClusterConfig(mode="aggregated", prefill=DeploymentConfig(replicas=0)).decode.replicas == 1
    )


def test_only_decode_workers_may_have_rows_in_fp8_alone() -> None:
    fp8 = {"engine": {"kv_cache_dtype": "fp8"}}
    with pytest.raises(ValidationError, match=r"decode\.engine\.kv_cache_dtype must be fp8, as"):
        ClusterConfig.model_validate({"prefill": fp8})
    ClusterConfig.model_validate({"decode": fp8})
    assert ClusterConfig.model_validate(fp8).worker("prefill").engine.kv_cache_dtype == "fp8"
    ClusterConfig.model_validate({"mode": "aggregated", "decode": fp8})


def test_workers_take_their_part_of_the_tree() -> None:
    own = EngineConfig(block_size=64, max_num_seqs=3)
    tree = ClusterConfig(
        model=ModelConfig(path="m"),
        engine=EngineConfig(block_size=32, device="cpu", enable_prefix_caching=False),
        transfer=TransferConfig(lease_s=3),
        prefill=DeploymentConfig(engine=own),
    )
    prefill = tree.worker("prefill")
    decode = tree.worker("decode")
    assert (prefill.role, prefill.connects) == ("prefill", True)
    assert prefill.engine == EngineConfig(
        block_size=64, max_num_seqs=3, device="cpu", enable_prefix_caching=False
    )
    assert (decode.role, decode.engine.block_size, decode.transfer.lease_s) == ("decode", 32, 3)
    assert prefill.model is tree.model
    alone = ClusterConfig(mode="aggregated").worker("decode")
    assert (alone.role, alone.connects, alone.hands_over) == ("both", False, False)
    assert prefill.hands_over and decode.hands_over


@pytest.mark.parametrize(
    ("args", "connects"),
    [
        ({"decode": {"replicas": 2}}, True),
        ({"decode": {"autoscaling": {"min": 1, "max": 2}}}, True),
        ({"decode": {"autoscaling": {"min": 1, "max": 1}}}, False),
        ({"decode": {"replicas": 2}, "transfer": {"fetch_prefixes": False}}, False),
        ({"decode": {"replicas": 2}, "engine": {"enable_prefix_caching": False}}, False),
        (
            {"decode": {"replicas": 2, "engine": {"enable_prefix_caching": False}}},
            False,
        ),
    ],
)
def test_workers_of_whole_requests_connect_to_fetch_prefixes(args: Any, connects: bool) -> None:
    worker = ClusterConfig.model_validate({"mode": "aggregated", **args}).worker("decode")
    assert (worker.connects, worker.hands_over) == (connects, False)


@pytest.mark.parametrize("key", ["prefill", "decode"])
@pytest.mark.parametrize("written", [dict, DeploymentConfig.model_validate], ids=["yaml", "python"])
def test_an_engine_of_its_own_overrides_single_fields(key: Any, written: Any) -> None:
    shared = {"device": "cpu", "block_size": 32, "enable_prefix_caching": False, "num_kv_blocks": 7}
    own = {"max_num_seqs": 3, "enable_prefix_caching": True, "num_kv_blocks": None}
    tree = ClusterConfig.model_validate({"engine": shared, key: written({"engine": own})})
    expected = EngineConfig(device="cpu", block_size=32, enable_prefix_caching=True, max_num_seqs=3)
    assert tree.worker(key).engine == expected, (
        "null is a value: what it stands for is chosen by device"
    )
    assert ClusterConfig.model_validate_json(tree.model_dump_json()).worker(key).engine == expected
    empty = ClusterConfig.model_validate({"engine": shared, key: written({"engine": {}})})
    assert empty.worker(key).engine == EngineConfig.model_validate(shared)


def test_a_mistake_in_the_shared_engine_is_reported_once() -> None:
    for engine, own in (
        ({"block_size": 17}, {}),
        ({"blok_size": 16}, {"max_num_seqs": 2}),
        (3, {}),
        ({}, []),
    ):
        with pytest.raises(ValidationError) as caught:
            ClusterConfig.model_validate({"engine": engine, "decode": {"engine": own}})
        assert caught.value.error_count() == 1


def test_words_that_yaml_reads_as_true_or_false() -> None:
    for data in (
        {"mode": False},
        {"router": {"split": False}},
        {"transfer": {"pool": {"mode": True}}},
    ):
        with pytest.raises(
            ValidationError, match=r"YAML reads an unquoted off .* put the word in quotes"
        ):
            ClusterConfig.model_validate(data)
    assert PoolConfig.model_validate({"mode": False}).mode == "off"
    assert TransferConfig.model_validate({"overlap": False}).overlap is False


def test_names_served() -> None:
    assert ModelConfig(path="some/where/llama-8b").served_name == "llama-8b"
    assert ModelConfig(path="org/llama-8b").resolved_path == "org/llama-8b"
    assert ModelConfig(path="a/b", name="chat").served_name == "chat"


def test_several_names() -> None:
    several = ModelConfig.model_validate({"path": "a/b", "served_names": ["chat", "org/chat"]})
    assert several.all_names == ("chat", "org/chat") and several.served_name == "chat"
    assert ModelConfig.model_validate({"served_names": "chat"}).all_names == ("chat",)
    assert ModelConfig(path="a/b").all_names == ("b",)
    for wrong, complaint in (
        ({"name": "a", "served_names": ["b"]}, "write all names into model.served_names"),
        ({"served_names": ["a", "b", "a"]}, "model.served_names has 'a' twice"),
        ({"served_names": [""]}, r"served_names\.0"),
        ({"name": ""}, "at least 1 character"),
    ):
        with pytest.raises(ValidationError, match=complaint):
            ModelConfig.model_validate(wrong)


def test_a_relative_path_is_looked_for_here_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = Path(ModelConfig().resolved_path)
    assert shipped.is_dir() and (shipped / "config.json").is_file()
    (tmp_path / "demo/pdserve-demo").mkdir(parents=True)
    assert ModelConfig().resolved_path == str((tmp_path / "demo/pdserve-demo").resolve())


def test_a_tree_survives_json() -> None:
    tree = ClusterConfig(
        decode=DeploymentConfig(resources={"H200": 1.0}, engine=EngineConfig(max_num_seqs=3))
    )
    assert ClusterConfig.model_validate_json(tree.model_dump_json()) == tree
    assert isinstance(tree, BaseModel)


@pytest.mark.parametrize(
    ("device", "chosen"), [("cpu", (16, 2048, 256, False)), ("cuda", (64, 8192, 512, True))]
)
def test_what_is_not_given_is_chosen_by_device(device: Any, chosen: tuple) -> None:
    made = EngineConfig(max_model_len=77, cuda_graphs=False).for_device(device)
    assert (
        made.block_size,
        made.max_num_batched_tokens,
        made.max_num_seqs,
        made.async_scheduling,
    ) == chosen
    assert (made.max_model_len, made.cuda_graphs, made.device) == (77, False, device)
    given = EngineConfig(
        block_size=32, max_num_batched_tokens=99, max_num_seqs=3, async_scheduling=True
    )
    made = given.for_device(device)
    assert (
        made.block_size,
        made.max_num_batched_tokens,
        made.max_num_seqs,
        made.async_scheduling,
    ) == (32, 99, 3, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "connect"}, "pool.address must name the running server"),
        ({"mode": "connect", "address": "5755"}, "pool.address must be host:port"),
        ({"mode": "connect", "address": "host:x"}, "pool.address must be host:port"),
        (
            {"mode": "start", "address": "0.0.0.0:5755"},
            "must be on loopback, such as 127.0.0.1:5755",
        ),
        ({"disk_folder": "/tmp/x"}, "pool.mode: start"),
        ({"request_deadline_ms": 0}, "request_deadline_ms"),
        ({"max_store_fraction": 1.5}, "max_store_fraction"),
        ({"breakers_s": 1}, "did you mean 'breaker_s'"),
    ],
)
def test_a_bad_pool_is_refused_by_name(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PoolConfig(**given)


def test_a_chunk_is_whole_blocks() -> None:
    assert PoolConfig().mode == "off"
    assert PoolConfig(chunk_tokens=256).blocks_per_chunk(64) == 4
    with pytest.raises(ValueError, match=r"chunk_tokens \(100\).*block_size \(16\): set it to 96"):
        PoolConfig(chunk_tokens=100).blocks_per_chunk(16)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"engine": {"block_size": 128}},
            r"\(64\) must be a multiple of engine.block_size \(128\): set it to 128",
        ),
        (
            {"engine": {"device": "cpu"}, "decode": {"engine": {"block_size": 128}}},
            r"\(decode workers\)",
        ),
        ({"mode": "aggregated", "engine": {"block_size": 128}}, "decode workers"),
    ],
)
def test_a_chunk_is_whole_blocks_of_every_worker(args: dict[str, Any], said: str) -> None:
    pool = {"transfer": {"pool": {"mode": "start", "chunk_tokens": 64}}}
    assert ClusterConfig.model_validate(pool).transfer.pool.chunk_tokens == 64
    with pytest.raises(ValidationError, match=said):
        ClusterConfig.model_validate(pool | args)


def test_a_chunk_is_whole_blocks_of_the_size_that_the_device_chooses() -> None:
    pool = {"transfer": {"pool": {"mode": "start", "chunk_tokens": 48}}}
    assert ClusterConfig.model_validate(pool | {"engine": {"device": "cpu"}})
    for args in (
        {"engine": {"device": "cuda"}},
        {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}},
    ):
        with pytest.raises(
            ValidationError,
            match=r"prefill workers; cuda engines have this block_size unless it is",
        ):
            ClusterConfig.model_validate(pool | args)


def test_the_pool_needs_prefix_caching_of_every_worker_in_use() -> None:
    pool: dict[str, Any] = {
        "transfer": {"pool": {"mode": "start"}},
        "engine": {"enable_prefix_caching": False},
    }
    on = {"engine": {"enable_prefix_caching": True}}
    assert ClusterConfig.model_validate(pool | {"prefill": on, "decode": on})
    assert ClusterConfig.model_validate(pool | {"decode": on, "mode": "aggregated"})
    with pytest.raises(
        ValidationError,
        match=r"decode.engine.enable_prefix_caching \(from engine, unless set there\)",
    ):
        ClusterConfig.model_validate(pool | {"prefill": on})


def test_bounds_of_autoscaling_hold_what_is_started() -> None:
    with pytest.raises(ValidationError, match=r"max \(1\) must not be below autoscaling.min \(2\)"):
        AutoscalingConfig(min=2)
    with pytest.raises(
        ValidationError, match=r"replicas \(5\) must be from autoscaling.min \(1\) to .* \(3\)"
    ):
        DeploymentConfig.model_validate({"replicas": 5, "autoscaling": {"max": 3}})


def test_workers_know_the_stages_of_the_other_deployment() -> None:
    stages = {"decode": {"engine": {"pipeline_parallel": 2}}}
    tree = ClusterConfig.model_validate(stages)
    assert tree.worker("prefill").engine.peer_stages == 2
    assert tree.worker("decode").engine.peer_stages == 1
    own = ClusterConfig.model_validate({"prefill": {"engine": {"peer_stages": 4}}} | stages)
    assert own.worker("prefill").engine.peer_stages == 4
    both = ClusterConfig.model_validate({"engine": {"pipeline_parallel": 2}})
    assert (
        both.worker("prefill").engine.peer_stages == both.worker("decode").engine.peer_stages == 2
    )
    alone = ClusterConfig.model_validate({"mode": "aggregated"} | stages)
    assert alone.worker("decode").engine.peer_stages == 1
