"""Writes the cluster.yaml of a layout, which `pdserve doctor` and `pdserve up` accept."""

from typing import Any

import yaml

from pdserve.plan.layouts.layout import Layout, Part, Slo, engine_fields


def cluster_yaml(
    layout: Layout, model: str, slo: Slo, max_model_len: int, says: str, is_cpu: bool = False
) -> str:
    """Returns the YAML of workers on GPUs, or on CPUs if is_cpu. `says` is its first line, without
    a comment sign. `model` is a folder or Hub id."""
    shared: dict[str, Any] = {"device": "cpu" if is_cpu else "cuda", "max_model_len": max_model_len}
    args: dict[str, Any] = {
        "mode": "disaggregated" if layout.is_split else "aggregated",
        "model": {"path": model},
        "engine": shared,
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
    }
    for part in layout.parts:
        args["prefill" if part.role == "prefill" else "decode"] = _deployment(part, is_cpu)
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "pdserve",
                "route_prefix": "/",
                "import_path": "pdserve.cluster.app:build",
                "external_scaler_enabled": True,
                "args": args,
            }
        ],
    }
    return f"# {says}\n" + yaml.safe_dump(document, sort_keys=False)


def _deployment(part: Part, is_cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"replicas": part.count, "num_gpus": 0 if is_cpu else 1}
    fields = engine_fields(part.degrees)
    return found | ({"engine": fields} if fields else {})
