"""Reads cluster.yaml: Ray Serve's keys, as Serve's own schema defines them, and pdserve's below
`args:`.

Serve ignores keys that it does not know. Here every key of every level must be one of the installed
Serve's, so that a misspelt `args` is an error and not a cluster of defaults. Ray is imported inside
functions only (see `cluster.operate.ray_settings` for the reason). Used by `pdserve up` and
`pdserve doctor`.
"""

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pdserve.configs.base import sentences_of
from pdserve.configs.schema import ClusterConfig

BUILDER = "pdserve.cluster.app:build"
DEFAULT_HOST = "127.0.0.1"  # for `pdserve up`; Serve's default is every interface
DEFAULT_PORT = 8000

# The keys of Serve that `pdserve up` uses. It always sets external_scaler_enabled.
USED = {"proxy_location", "http_options", "applications"}
USED_OF_APPLICATION = {"name", "route_prefix", "import_path", "args", "external_scaler_enabled"}


@dataclass(frozen=True)
class ClusterFile:
    """A checked file. `document` is all of it, `application` its only application, `config` its
    `args:`."""

    document: Mapping[str, Any]
    application: Mapping[str, Any]
    config: ClusterConfig

    @property
    def http_options(self) -> dict[str, Any]:
        """The file's http_options, with the host and port of `pdserve up` where the file names
        none."""
        defaults = {"host": DEFAULT_HOST, "port": DEFAULT_PORT}
        return defaults | (self.document.get("http_options") or {})

    @property
    def names_host(self) -> bool:
        return "host" in (self.document.get("http_options") or {})

    @property
    def name(self) -> str:
        return str(self.application.get("name", "default"))

    @property
    def route_prefix(self) -> str:
        return str(self.application.get("route_prefix", "/"))

    @property
    def unused(self) -> list[str]:
        """Lists keys that only `serve run` uses."""
        top = [key for key in self.document if key not in USED]
        inner = [key for key in self.application if key not in USED_OF_APPLICATION]
        return top + [f"applications[0].{key}" for key in inner]


def load(path: Path) -> ClusterFile:
    """Reads and checks a file. Raises a ValueError that says what is wrong, and where."""
    return checked(read(path), str(path))


def read(path: Path) -> dict[str, Any]:
    """Returns a file's document; everything except what stands below `args:` is checked.

    Raises ValueError.
    """
    with _errors_of(str(path)):
        document = _parse(_text(path))
        if unknown := list(_unknown_keys(document)):
            raise ValueError("; ".join(unknown))
        _application(document)
        _check_as_serve_does(document)
        return document


def checked(document: Mapping[str, Any], name: str) -> ClusterFile:
    """Checks a document of `read` below `args:`; `name` is its name in errors.

    Raises a ValueError that says what is wrong, and where.
    """
    application = document["applications"][0]
    with _errors_of(name):
        return ClusterFile(document, application, _config(application))


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{name}: is nested too deeply, or a part of it contains itself through an alias"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Refuses a key that appears twice; YAML itself would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and not key_node.tag.endswith(":merge"):
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key_node.value!r} appears twice")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text in UTF-8 (byte {error.start}): save it as UTF-8") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        document = _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"is not YAML: {error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        raise ValueError("is empty")
    if not isinstance(document, dict):
        raise ValueError("must be a mapping with `applications:`; see cluster.yaml")
    return document


def _unknown_keys(document: Mapping[str, Any]) -> Iterator[str]:
    from ray.serve.schema import ServeDeploySchema

    yield from _unknown_in(document, ServeDeploySchema, "")


def _unknown_in(value: object, model: type[BaseModel], where: str) -> Iterator[str]:
    """Yields complaints about keys that `model` has no field for, here and further inside."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_in(item, model, f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            yield f"{where or 'the file'}: {_not_known(key, list(model.model_fields))}"
        elif nested := _model_in(field.annotation):
            yield from _unknown_in(inner, nested, f"{where}.{key}" if where else str(key))


def _not_known(key: object, known: Sequence[str]) -> str:
    if isinstance(key, bool):
        return f"unknown key {str(key).lower()}: YAML reads on, off, yes and no so, unless quoted"
    [near] = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return f"unknown key {key!r}: did you mean {near!r}?"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the schema inside an Optional, a Union with Dict, or a List."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def _application(document: Mapping[str, Any]) -> dict[str, Any]:
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1:
        found = f"a list of {len(applications)}" if isinstance(applications, list) else "no list"
        raise ValueError(f"`applications:` must be a list of one application, but is {found}")
    application = applications[0]
    if not isinstance(application, dict):
        raise ValueError(
            f"applications[0] must be a mapping with import_path and args, not {application!r}"
        )
    if application.get("import_path") != BUILDER:
        path = application.get("import_path")
        raise ValueError(f"applications[0].import_path must be {BUILDER}, not {path!r}")
    if not isinstance(application.get("args"), dict):
        raise ValueError(
            "applications[0]: `args:` is missing: the cluster's configuration belongs there "
            "(model, engine, prefill, decode and so on), as in cluster.yaml"
        )
    prefix = application.get("route_prefix", "/")
    if not isinstance(prefix, str) or not prefix.startswith("/"):
        raise ValueError(f"applications[0].route_prefix must begin with /, not be {prefix!r}")
    return application


def _check_as_serve_does(document: Mapping[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ValueError(sentences_of(error)) from error


def _config(application: Mapping[str, Any]) -> ClusterConfig:
    config = ClusterConfig.read(application["args"], "applications[0].args")
    config.check_model_is_named()
    return config
