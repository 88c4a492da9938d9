"""Count sentences that readers find hard: elliptical sentences, and sentences of more than 30 words.

    prose.py [--list]

A block is a paragraph or list item of a document, a paragraph of a docstring, or a comment.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Folders whose files are read, beside the files of the first folder itself.
FOLDERS = (".ci", "ascend_grad", "bench", "docs", "include", "pyx", "tests")
#: Elliptical phrases, and words at the end of a sentence that refer to something left out.
ELLIPTICAL = re.compile(
    r"\b[Tt]hose of\b|\bso many\b|\bwhat it was\b|\bin the place of\b|\bof (?:its|their|our) own\b"
    r"|,? \b(?:alone|too|besides)[.;:]",
)
MAX_WORDS = 30
#: The largest share of blocks with an elliptical phrase, and the largest number of long sentences in documents.
LIMITS = {"share of elliptical blocks": 0.01, "long sentences": 20}


def of_document(text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\s*\||<!--|#|:|\{|\(|\[).*$", "", text, flags=re.MULTILINE)
    yield from re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)


def of_python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            yield from (each for each in docstring.split("\n\n") if ">>>" not in each)
    yield from of_comments(text, "#")


def of_comments(text: str, mark: str) -> Iterator[str]:
    for found in re.findall(rf"(?:^[ \t]*{mark}:? .*\n)+|(?<=\S)  {mark} .*$", text, re.MULTILINE):
        yield re.sub(rf"^\s*{mark}:?", "", found, flags=re.MULTILINE)


def of_c(text: str) -> Iterator[str]:
    for comment in re.findall(r"/\*(.*?)\*/", text, re.DOTALL):
        yield re.sub(r"^\s*\*", "", comment, flags=re.MULTILINE)


def of_cython(text: str) -> Iterator[str]:
    yield from re.findall(r'"""(.*?)"""', text, re.DOTALL)
    yield from of_comments(text, "#")


READERS = {".md": of_document, ".py": of_python, ".pyx": of_cython, ".pxd": of_cython, ".h": of_c, ".c": of_c}


def files() -> Iterator[Path]:
    """Return the files to read, without this one and without generated pages."""
    for folder in (ROOT, *(ROOT / each for each in FOLDERS)):
        for path in sorted(folder.glob("*") if folder == ROOT else folder.rglob("*")):
            if (
                path.suffix in READERS
                and path != Path(__file__).resolve()
                and ROOT / "docs" / "api" not in path.parents
            ):
                yield path


def main(listing: bool) -> int:
    blocks = elliptical = 0
    long: list[str] = []
    for path in files():
        name, reader = path.relative_to(ROOT), READERS[path.suffix]
        for block in reader(path.read_text()):
            words = " ".join(re.sub(r"`[^`]*`", "x", block).split())
            if not words:
                continue
            blocks += 1
            if ELLIPTICAL.search(words):
                elliptical += 1
                if listing:
                    print(f"{name}: {words}")
            if reader is of_document:
                sentences = re.split(r"(?<=[.:;?!])\s", words)
                long += [f"{name}: {each}" for each in sentences if len(each.split()) > MAX_WORDS]
    if listing:
        print("\n".join(long))
    share = elliptical / blocks
    found = {"share of elliptical blocks": share, "long sentences": len(long)}
    print(f"{blocks} blocks, {elliptical} elliptical ({share:.1%}), {len(long)} long sentences in documents")
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main("--list" in sys.argv[1:]))
