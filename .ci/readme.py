"""Print the shell block below the line "<!-- ci: NAME -->" of README.md, so that what it shows is what is tested.

pytest runs the Python examples of README.md and docs/.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str) -> str:
    found = re.findall(rf"^<!-- ci: {name} -->\n+```sh\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    if len(found) != 1:
        sys.exit(f"README.md: expected one shell block marked {name!r}, found {len(found)}")
    return found[0].strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: readme.py NAME")
    print(command(sys.argv[1]))
