"""Counts sentences that are hard to read: `python tests/prose.py [--list] [PATH...]`.

It reads the Markdown files, docstrings and comments of the repository. It knows English only by a
list of verbs, so its figures are a compass for the writer, not a law: no test fails by them.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 30
MAX_COLUMNS = 100
OPENERS = ("Of", "What", "Whose")
KINDS = ("long sentence", "long line", "opener", "no verb", "mid-sentence")
VERBS = (ROOT / "tests" / "support" / "verbs.txt").read_text()


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    kind: str
    text: str


def forms(base: str) -> set[str]:
    """The regular forms of a verb, with a doubled consonant or not."""
    stem = base[:-1] if base.endswith("e") else base
    several = base[:-1] + "ies" if base.endswith("y") else base + "s"
    past = base[:-1] + "ied" if base.endswith("y") else stem + "ed"
    double = base + base[-1]
    return {
        base,
        several,
        base + "s",
        base + "es",
        past,
        stem + "ed",
        stem + "ing",
        base + "ing",
    } | {
        double + "ed",
        double + "ing",
    }


def known_verbs() -> set[str]:
    """The regular verbs in all their forms, and the irregular forms, of support/verbs.txt."""
    regular, _, irregular = VERBS.partition("# irregular")
    return set(irregular.split()).union(*(forms(base) for base in regular.split()[2:]))


KNOWN_VERBS = known_verbs()


def words(text: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "code", text)
    return re.findall(r"[A-Za-z0-9'/_.-]*[A-Za-z0-9][A-Za-z0-9'/_-]*", plain)


def sentences(text: str) -> list[str]:
    """A text cut at full stops, colons that end a line, semicolons left alone."""
    joined = re.sub(r"\s+", " ", text)
    parts = re.split(r"(?<=[.!?])[)\"'`]?\s+(?=[A-Z`\"(\[])|\s*\n\s*", joined)
    return [part for part in parts if part]


def has_verb(text: str) -> bool:
    return any(word.lower() in KNOWN_VERBS for word in words(text))


def paragraphs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Runs of lines that belong together: blank lines, bullets and table rows separate them."""
    start = 0
    held: list[str] = []
    for number, line in lines:
        text = line.strip()
        # a bullet, a row of a table, or a line of a legend such as "name: meaning"
        starts = bool(re.match(r"([-*|#]|\d+\.)\s|\||\w+(, \w+)*: ", text))
        if (not text or starts) and held:
            yield start, " ".join(held)
            held = []
        if text:
            start = start if held else number
            held.append(text.lstrip("-*#> "))
    if held:
        yield start, " ".join(held)


def long_sentences(path: Path, lines: list[tuple[int, str]]) -> Iterator[Finding]:
    for number, paragraph in paragraphs(lines):
        for cell in paragraph.split("|"):
            for sentence in sentences(cell):
                if len(words(sentence)) > MAX_WORDS:
                    yield Finding(path, number, "long sentence", sentence)


def of_markdown(path: Path, text: str) -> Iterator[Finding]:
    prose, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            prose.append((number, ""))
        elif not fenced:
            prose.append((number, line))
            if len(line) > MAX_COLUMNS and not line.lstrip().startswith(("|", "[", "![")):
                yield Finding(path, number, "long line", line)
    yield from long_sentences(path, prose)


def of_docstring(
    path: Path, first_line: int, text: str, is_below_field: bool = False
) -> Iterator[Finding]:
    lines = list(enumerate(text.splitlines(), first_line))
    yield from long_sentences(path, lines)
    summary = sentences(text)[0] if sentences(text) else ""
    if summary.split(" ")[0].rstrip(",:") in OPENERS:
        yield Finding(path, first_line, "opener", summary)
    elif summary[:1].islower():
        yield Finding(path, first_line, "mid-sentence", summary)
    if not has_verb(text) and not is_below_field:
        yield Finding(path, first_line, "no verb", " ".join(text.split()))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yields line and text of each docstring, and whether it describes the field above it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value, place > 0


def of_python(path: Path, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield Finding(path, number, "long line", line)
    for number, docstring, is_below_field in docstrings(ast.parse(text)):
        yield from of_docstring(path, number, docstring, is_below_field)
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_trailing = bool(token.line[: token.start[1]].strip())
            if comments and (is_trailing or comments[-1][0] != token.start[0] - 1):
                comments.append((token.start[0] - 1, ""))
            comments.append((token.start[0], token.string.lstrip("# ")))
    yield from long_sentences(path, comments)


def findings(path: Path) -> Iterator[Finding]:
    text = path.read_text()
    yield from of_markdown(path, text) if path.suffix == ".md" else of_python(path, text)


def tracked(asked: list[str]) -> list[Path]:
    """Returns the Markdown and Python files of the repository below these paths. Without paths, all
    of them."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *asked], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = (ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md")))
    return [path for path in found if path.is_file() and "benchmarks/results" not in str(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every finding, too")
    parser.add_argument("paths", nargs="*", help="files or folders of the repository; default: all")
    asked = parser.parse_args()
    found = [each for path in tracked(asked.paths) for each in findings(path)]
    for each in found if asked.list else []:
        print(f"{each.path.relative_to(ROOT)}:{each.line}: {each.kind}: {each.text}")
    rooms: dict[str, Counter[str]] = {}
    for each in found:
        parts = each.path.relative_to(ROOT).parts
        room = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        rooms.setdefault(room, Counter())[each.kind] += 1
    rooms["all"] = Counter(each.kind for each in found)
    print(f"{'':28}" + "".join(f"{kind:>15}" for kind in KINDS))
    for room, counts in sorted(rooms.items(), key=lambda item: item[0] == "all"):
        print(f"{room:28}" + "".join(f"{counts[kind]:15}" for kind in KINDS))


if __name__ == "__main__":
    main()
