"""Use the code blocks of README.md, so that what it prints is what is tested.

readme.py command NAME   print the shell block below the line "<!-- ci: NAME -->"
readme.py examples       run every Python block, in one namespace, as a reader would from top to bottom
"""

import contextlib
import doctest
import os
import re
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str) -> str:
    found = re.findall(rf"^<!-- ci: {name} -->\n+```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    if len(found) != 1:
        sys.exit(f"README.md: expected one shell block marked {name!r}, found {len(found)}")
    return found[0].strip()


def run_examples() -> None:
    text = README.read_text()
    namespace: dict = {"__name__": "readme"}
    failures = 0
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    # Examples may write files.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in blocks:
            code, line = block[1], text[: block.start(1)].count("\n")
            if ">>> " in code:
                example = doctest.DocTestParser().get_doctest(code, namespace, f"line {line + 1}", str(README), line)
                failures += doctest.DocTestRunner().run(example, clear_globs=False).failed
                namespace.update(example.globs)
            else:
                # The empty lines let a traceback name the line of README.md.
                exec(compile("\n" * line + code, str(README), "exec"), namespace)
    print(f"README.md: {len(blocks)} Python blocks, {failures} failures")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    match sys.argv[1:]:
        case ["command", name]:
            print(command(name))
        case ["examples"]:
            run_examples()
        case _:
            sys.exit(__doc__)
