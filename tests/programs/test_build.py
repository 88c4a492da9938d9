"""Test what a build decides about the compiler, OpenMP and the system, before it compiles anything."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that makes the build's command, for a compiler that is a shell script around cc."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    build_ext = runpy.run_path("setup.py")["BuildExt"]

    def make(script: str = "", platform: str | None = None, decide: str = "arguments"):
        """Make a command whose run calls the method `decide`. The script may change the program, whose path is $out."""
        compiler = tmp_path / "cc"
        compiler.write_text(f"""#!/bin/sh
cc "$@" || exit
all=" $* "
case "$all" in *" -c "*) exit;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
{script}
""")
        compiler.chmod(0o755)
        for name in ("CC", "LDSHARED", "LDCXXSHARED"):
            monkeypatch.setenv(name, str(compiler))

        class Decide(build_ext):
            def build_extensions(self):
                self.decided = getattr(super(), decide)()

        extension = setuptools.Extension("module", ["module.c"])
        made = Decide(setuptools.Distribution({"name": "test", "ext_modules": [extension]}))
        made.ensure_finalized()
        made.plat_name = platform or made.plat_name
        return made

    return make


OTHER_MACHINE = r"printf '\177ELF\2\1\1\0\0\0\0\0\0\0\0\0\2\0\377\0' > $out"
NO_LIBRARY = 'case "$all" in *" -fopenmp "*) printf "#!/bin/sh\nexit 127\n" > $out;; esac'
NO_LINK = 'case "$all" in *" -fopenmp "*) exit 1;; esac'


@pytest.mark.parametrize(
    ("script", "has_openmp"),
    [("", True), ("chmod -x $out", True), (OTHER_MACHINE, True), (NO_LIBRARY, False), (NO_LINK, False)],
    ids=["it runs", "noexec", "another machine", "no library", "no linking"],
)
def test_openmp(command, script, has_openmp, capfd):
    """OpenMP is used if its program runs, or if it links where no program runs."""
    made = command(script)
    made.run()
    assert [("-fopenmp" in arguments) for arguments in made.decided] == [has_openmp] * 2
    assert ("WITHOUT OpenMP" in capfd.readouterr().out) != has_openmp


def test_a_compiler_that_does_not_link(command):
    with pytest.raises(SystemExit, match=r"cannot link a small program[\s\S]*apt-get install gcc"):
        command("exit 1", decide="build_extensions").run()


@pytest.mark.parametrize("platform", ["macosx-14.0-arm64", "win-amd64"])
def test_other_systems_are_refused_at_once(command, platform):
    made = command("exit 1", platform, decide="build_extensions")
    with pytest.raises(SystemExit, match=f"^ascend_grad needs Linux, and cannot be built for {platform}$"):
        made.run()
