"""Writes docs/use/configuration.md from the fields of `pdserve.configs.schema.ClusterConfig`.

    python tests/configuration_page.py > docs/use/configuration.md

`tests/configs/test_configuration_page.py` fails when the page is not up to date.
"""

import re
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from pdserve.configs.base import Config
from pdserve.configs.schema import ClusterConfig

ROOM = "docs/use/"
HEAD = """# Configuration

This page lists every key of a cluster file. It is generated from the code
(`python tests/configuration_page.py`), so it is complete for this version.

A cluster file is a
[Ray Serve configuration](https://docs.ray.io/en/latest/serve/production-guide/config.html)
with one application. The keys below belong under its `args:`. This is a whole file:

```yaml
http_options: {host: 127.0.0.1, port: 8000}   # without host, `serve run` listens on every interface
applications:
  - name: pdserve
    import_path: pdserve.cluster.app:build
    external_scaler_enabled: true             # for `pdserve scale`
    args:
      model: {path: demo/pdserve-demo}
      prefill: {replicas: 1}
      decode: {replicas: 2}
      # On GPUs, each worker needs one (`pdserve up --model` writes this):
      # prefill: {replicas: 1, num_gpus: 1}
      # decode: {replicas: 2, num_gpus: 1}
      engine: {max_model_len: 2048}
```

- `pdserve up FILE` serves it. `pdserve doctor FILE` reports errors, and what this machine
  lacks.
- `--set KEY=VALUE` sets any of these keys without editing the file, for example
  `pdserve up FILE --set engine.max_model_len=8192`. `--print-yaml` prints the resulting file.
- An unknown key is an error that names the nearest known key. Ray checks the rest of the file.
- Example files are in [pdserve/configs](../../pdserve/configs). [options.md](options.md) says what
  the important keys gain and cost.
- Keys that end in `_s` are in seconds, `_ms` in milliseconds, `_us` in microseconds, `_bytes` in
  bytes, `_gib` in GiB. A key that ends in `_fraction` is a share between 0 and 1.
- In the tables, `null` means that the key is not set.
- A *whole request* has its prompt and its answer computed by one worker. Timelines and traces call
  this worker's part a leg of the phase `full`.
"""


def inner_config(field: FieldInfo) -> type[Config] | None:
    """The section that a field holds, if it holds one."""
    for each in (field.annotation, *get_args(field.annotation)):
        if isinstance(each, type) and issubclass(each, Config):
            return each
    return None


def bounds(field: FieldInfo) -> str:
    """The limits of a number: " > 0", " from 1 to 32"."""
    low = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    above = next((m.gt for m in field.metadata if isinstance(m, Gt)), None)
    high = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    if above is not None:
        return f" above {above:,}" + (f", at most {high:,}" if high is not None else "")
    return "" if low is None else f" from {low:,}"


def kind(annotation: Any) -> str:
    """A type in the words of a YAML file."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return ", ".join(kind(part) for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is dict:
        return f"mapping of names to {kind(get_args(annotation)[1])}s"
    if get_origin(annotation) in (list, tuple):
        return f"list of {kind(get_args(annotation)[0])}s"
    return {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}[annotation]


def default(name: str, field: FieldInfo) -> str:
    """The default as a YAML file has it, and large sizes in MiB too."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
    mebibytes = f" ({value >> 20:,} MiB)" if name.endswith("_bytes") else ""
    return f"`{value}`" if value == "off" else f"`{text}`{mebibytes}"


def linked(text: str) -> str:
    """Paths of pages become links, and None becomes the YAML word."""
    text = re.sub(r"\bNone\b", "`null`", " ".join(text.split()))
    text = re.sub(r"docs/use/([a-z-]+\.md)", r"[\1](\1)", text)
    text = re.sub(r"docs/design/([a-z-]+\.md)", r"[\1](../design/\1)", text)
    return text.replace("|", "\\|")


def described(field: FieldInfo, name: str) -> str:
    assert field.description, f"{name} has no description: write a string below the field"
    return linked(field.description)


def sections(config: type[Config], path: str = "") -> Iterator[str]:
    """A section for this configuration, then one for each inside it."""
    doc = linked(re.sub(r"\n\n.*", "", config.__doc__ or "", flags=re.S))
    doc = textwrap.fill(doc, 100, break_long_words=False, break_on_hyphens=False)
    yield f"\n## `{path}`\n\n{doc}\n" if path else "\n## Top level\n\n" + doc + "\n"
    yield "| key | values | default | meaning |\n|---|---|---|---|"
    inside: list[tuple[str, type[Config]]] = []
    for name, field in config.model_fields.items():
        key = f"{path}.{name}" if path else name
        section = inner_config(field)
        if section is None:
            values = kind(field.annotation) + bounds(field)
            shown = "required" if key in REQUIRED else default(name, field)
            yield f"| `{name}` | {values} | {shown} | {described(field, key)} |"
            continue
        place = PLACES.get(key, key)
        target = re.sub(r"[^a-z_ -]", "", place).replace(" ", "-")
        is_unset = field.get_default(call_default_factory=True) is None
        none = "`null`" if is_unset else ""
        yield f"| `{name}` | [section](#{target}) | {none} | {described(field, key)} |"
        if place == key or key in FIRST:
            inside.append((place, section))
    if path in EXAMPLES:
        yield f"\nFor example:\n\n```yaml\n{EXAMPLES[path]}\n```"
    for place, section in inside:
        yield from sections(section, place)


# Keys that a file must have, although the code has a default for `LLM` and tests.
REQUIRED = ("model.path",)
# Sections that are the same for both kinds of workers stand once.
PLACES = {
    "prefill": "prefill and decode",
    "decode": "prefill and decode",
    "prefill and decode.engine": "engine",
    "prefill and decode.autoscaling": "autoscaling",
}
FIRST = ("prefill", "prefill and decode.autoscaling")
# A line below `args:` for each section that is easier to understand by an example.
EXAMPLES = {
    "transfer.pool": 'transfer: {pool: {mode: start, address: "127.0.0.1:5755", l1_gib: 64}}',
    "slo": "slo: {ttft_ms: 500, tpot_ms: 40, refuse_beyond: 1.0}",
    "prefill and decode": "decode: {replicas: 2, num_gpus: 1, engine: {kv_cache_dtype: fp8}}",
    "autoscaling": "decode: {replicas: 1, autoscaling: {min: 1, max: 4, down_delay_s: 300}}",
}


def page() -> str:
    return HEAD + "\n".join(sections(ClusterConfig)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
