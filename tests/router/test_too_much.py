"""The page docs/use/security.md names every reason for a 429, with its settings, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pdserve.configs.router import RouterConfig, SloConfig
from pdserve.configs.schema import ClusterConfig
from pdserve.router import errors

ROOT = Path(errors.__file__).parent.parent
PAGE = ROOT.parent / "docs" / "use" / "security.md"
ROW = re.compile(
    r"^\| `(?P<code>[a-z_]+)` \|(?P<why>[^|]+)\|(?P<settings>[^|]+)\|(?P<retry_after>[^|]+)\|$",
    re.M,
)


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """All of the package that make an error: too_much(...), ApiError(...)."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield path, node


def sent() -> set[str]:
    """The codes of all calls of too_much."""
    codes = [node.args[1] for _, node in calls() if getattr(node.func, "id", "") == "too_much"]
    assert all(isinstance(code, ast.Constant) for code in codes), (
        "a code is written where it is sent"
    )
    return {str(code.value) for code in codes if isinstance(code, ast.Constant)}


def rows() -> dict[str, re.Match[str]]:
    return {row["code"]: row for row in ROW.finditer(PAGE.read_text())}


def test_the_table_has_every_code_and_no_other() -> None:
    assert rows().keys() == sent() and len(sent()) >= 3


def test_there_is_no_other_429() -> None:
    assert 429 not in {status for status, _, _ in errors.STATUS.values()}
    made = [
        path.name
        for path, node in calls()
        for keyword in node.keywords
        if keyword.arg == "status"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value == 429
    ]
    # made by too_much, and where too many grammars wait to be tried
    assert made == ["admission.py", "grammars.py"]


def test_settings_exist_and_every_row_says_what_retry_after_follows_from() -> None:
    parts = {"router": RouterConfig.model_fields, "slo": SloConfig.model_fields}
    assert parts.keys() <= ClusterConfig.model_fields.keys()
    for code, row in rows().items():
        settings = re.findall(r"`(\w+)\.(\w+)`", row["settings"])
        assert settings and all(name in parts[part] for part, name in settings), code
        assert row["why"].strip() and row["retry_after"].strip()
