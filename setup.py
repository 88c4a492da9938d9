"""Build the compiled modules. Metadata and the settings of tools are in pyproject.toml.

Every ``pyx/<folder>/<name>.pyx`` becomes ``ascend_grad.<name>``. Environment variables change the build:

ASCEND_GRAD_OPENMP=0
    Build without OpenMP: one thread, same results.
ASCEND_GRAD_SANITIZE=address, undefined or thread
    Build with that sanitizer of the compiler, for tests. Two can be combined: "address,undefined".
ASCEND_GRAD_EMULATE_BF16=1
    Let the variant avx512_bf16 run, slowly, on any CPU with AVX-512, for tests.
ASCEND_GRAD_EMULATE_AMX=1
    Let the variant amx_bf16 run, very slowly, wherever avx512_bf16 runs, for tests.
ASCEND_GRAD_EMULATE_BFMMLA=1
    Let the variant neon_bf16 run, very slowly, on any CPU, for tests.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import Cython
import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, PlatformError

# This module has the helper code that Cython would otherwise repeat in every module.
SHARED_UTILITY = "ascend_grad._cyutility"

# The flags do not depend on this machine (no -march=native), as the kernels choose their instruction set at run time.
# The kernels rely on NaN, Inf and the order of additions (no -ffast-math), but do not read errno or the floating-point
# status. Multiplications and additions are fused only by explicit calls, so that every build computes the same sums.
# -g0 overrides the flags of Python itself, whose debugging information would be most of the size.
COMPILE_ARGS = ["-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden"]

# Cython's code runs once per call or task. With -O3 it would take a fifth longer to compile, and not be faster. It
# holds the loops that copy strided elements, though, which GCC vectorises at -O2 only with the cost model of -O3: they
# are two to four times as fast then. Clang lacks the flag, and vectorises loops at -O2.
CYTHON_ARGS = ["-O2"]
VECTORISE = "-fvect-cost-model=dynamic"

# Macros of all files. Modules only declare the kernels, which are compiled separately (AG_KERNEL_LANES, foreach_isa.h).
MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]


class Kernels(NamedTuple):
    """A family of kernels: the module that is linked with it, its source, and the flags to compile it."""

    module: str
    source: str
    arguments: list[str]


# The linear kernels are explicitly vectorised: with -O2 they take half of the time to compile, and are faster. The
# row-wise kernels gain a few per cent from -O3.
KERNELS = [
    Kernels("ascend_grad._rowwise_schedule", "pyx/rowwise/rowwise_kernels.c", ["-O3"]),
    Kernels("ascend_grad._linear_plan", "pyx/linear/linear_kernels.c", ["-O2"]),
]

# On x86-64 the kernels with 4 lanes serve CPUs without AVX2, which servers have had since 2013. With -O1, GCC 12
# compiles these kernels in half of the time. They then have the same bits and 0.96 of the speed.
BASELINE_ARGS = ["-O1"]

# Float32 lanes of a vector. Each family is compiled once for each number, so that cores share the work. The object file
# is empty if the architecture has no such vectors.
LANES = (16, 8, 4)

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "freethreading_compatible": True,
}

PLAIN_PROBE = "#include <pyconfig.h>\nint main(void) { return 0; }\n"

# This program starts a team, as some tool chains compile and link OpenMP but lack its library at run time.
OPENMP_PROBE = """\
#include <omp.h>
int main(void)
{
    int count = 0;
#pragma omp parallel num_threads(2) reduction(+ : count)
    count += 1;
    return count < 1 || omp_get_max_threads() < 1;
}
"""

NO_LINUX = "ascend_grad needs Linux, and cannot be built for {}"

NO_COMPILER = """
ascend_grad is built from C, which does not work here: {}.
It takes GCC or Clang, and the headers of Python:
    Debian, Ubuntu:  apt-get install gcc libc6-dev python3-dev
    Fedora, RHEL:    dnf install gcc python3-devel
Another compiler can be named in the environment variable CC."""

NO_OPENMP = """
*** ascend_grad is built WITHOUT OpenMP: {}.
*** The results are the same, but every call runs on one thread.
"""


def sanitizers() -> list[str]:
    names = [name.strip() for name in os.environ.get("ASCEND_GRAD_SANITIZE", "").split(",") if name.strip()]
    for name in names:
        if name not in ("address", "undefined", "thread"):
            raise SystemExit(f"ASCEND_GRAD_SANITIZE: expected address, undefined or thread, got {name!r}")
    return names


def switch(name: str, default: str) -> bool:
    value = os.environ.get(name, default)
    if value not in ("0", "1"):
        raise SystemExit(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"


# Patterns of the names by which a source file reads others: cimported modules, and C headers in quotes. Macros that
# name the bodies of kernels also have quotes.
CIMPORT = re.compile(r"^ *from ascend_grad(?:\.(\w+))? cimport (\([^)]*\)|.*)", re.MULTILINE)
HEADER = re.compile(r'"([\w/.]+\.h)"')


# Cython finds declarations by the name of their package, so the private ones are copied to a folder of that name.
# Public declarations are part of the package itself.
DECLARATIONS = Path("build/declarations/ascend_grad")


def copy_if_changed(source: Path, target: Path) -> None:
    if not target.exists() or target.read_bytes() != source.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def copy_declarations() -> None:
    private = {path.name: path for path in Path("pyx").rglob("*.pxd")}
    for path in DECLARATIONS.glob("*.pxd"):
        if path.name not in private:
            path.unlink()
    for name, path in private.items():
        copy_if_changed(path, DECLARATIONS / name)


def direct_dependencies(path: Path) -> set[Path]:
    text = path.read_text(encoding="utf-8")
    modules = {path.stem}  # a module reads its own declarations
    for module, names in CIMPORT.findall(text):
        modules |= {module} if module else set(re.findall(r"\w+", names))
    paths = [folder / f"{module}.pxd" for folder in (DECLARATIONS, Path("ascend_grad")) for module in modules]
    for folder in (path.parent, Path("include"), Path("include/ascend_grad")):
        paths += [folder / name for name in HEADER.findall(text)]
    return {Path(os.path.normpath(each)) for each in paths if each.exists()} - {path}


def dependencies(path: Path) -> set[Path]:
    """Return a source with all declarations and headers that it depends on, or nothing if the source does not exist."""
    found = {path} if path.exists() else set()
    left = set(found)
    while left:
        new = direct_dependencies(left.pop()) - found
        found |= new
        left |= new
    return found


def is_outdated(result: Path, sources: Iterable[Path]) -> bool:
    return not result.exists() or any(source.stat().st_mtime > result.stat().st_mtime for source in sources)


class BuildExt(build_ext):
    """A build_ext that tests the compiler's features, and rebuilds all modules if they or the flags have changed."""

    def build_extensions(self) -> None:
        if not self.plat_name.startswith("linux"):
            raise SystemExit(NO_LINUX.format(self.plat_name))
        if self.compiler.compiler_type != "unix":
            raise SystemExit(f"ascend_grad needs GCC or Clang, not the compiler {self.compiler.compiler_type!r}")
        if failure := self.probe(PLAIN_PROBE, []):
            raise SystemExit(NO_COMPILER.format(failure))
        compile_args, link_args = self.arguments()
        cython_args = [*CYTHON_ARGS, *compile_args]
        if not self.probe(PLAIN_PROBE, [VECTORISE]):
            cython_args.insert(1, VECTORISE)
        # The recipe is a file with all settings of the build. All modules depend on it, and are rebuilt if it changes.
        recipe = Path("build", "recipe.txt")
        versions = f"Cython {Cython.__version__}, NumPy {numpy.__version__}"
        arguments = f"{cython_args} {KERNELS} {BASELINE_ARGS} {compile_args} {link_args}"
        text = f"{versions} {self.compiler.compiler_so} {self.compiler.linker_so} {MACROS} {DIRECTIVES} {arguments}\n"
        changed = not recipe.exists() or recipe.read_text(encoding="utf-8") != text

        copy_declarations()
        # Outdated modules are found here, as Cython would translate all modules in each new environment, whose NumPy
        # files are new.
        outdated = []
        for extension in self.extensions:
            source = Path(extension.sources[0])
            generated = Path("build/cython", source).with_suffix(".c")
            reads = dependencies(source)
            if changed or is_outdated(generated, reads):
                outdated.append(Extension(extension.name, extension.sources))
            # The extension, which setuptools has prepared, is kept. Only its source becomes the generated C file.
            extension.sources = [str(generated)]
            for kernels in KERNELS:
                if kernels.module == extension.name:
                    reads |= dependencies(Path(kernels.source))
            extension.depends = [*map(str, sorted(reads)), str(recipe)]
            extension.define_macros = [*MACROS, ("AG_KERNEL_LANES", "0")]
            extension.include_dirs = ["include", numpy.get_include()]
            extension.extra_compile_args = cython_args
            extension.extra_link_args = link_args
        if outdated:
            cythonize(
                outdated,
                build_dir="build/cython",
                include_path=[str(DECLARATIONS.parent), "."],
                shared_utility_qualified_name=SHARED_UTILITY,
                compiler_directives=DIRECTIVES,
                force=True,
            )
        if changed:
            recipe.write_text(text, encoding="utf-8")
        self.parallel = self.parallel or len(os.sched_getaffinity(0))
        self.compile_kernels(compile_args)
        super().build_extensions()
        self.copy_stubs()

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        self.copy_stubs()

    def copy_stubs(self) -> None:
        """Copy the stubs (.pyi) for type checkers to the folders of the compiled modules."""
        for path in Path("pyx").rglob("*.pyi"):
            module = Path(self.get_ext_fullpath(f"ascend_grad.{path.stem}"))
            copy_if_changed(path, module.with_name(path.name))

    def compile_kernels(self, arguments: list[str]) -> None:
        """Compile the kernels in parallel, and add their objects to the modules that are linked with them."""
        modules = {extension.name: extension for extension in self.extensions}

        def is_needed(module: Extension) -> bool:
            result = Path(self.get_ext_fullpath(module.name))
            return self.force or is_outdated(result, map(Path, [*module.sources, *module.depends]))

        def compile_unit(kernels: Kernels, lanes: int) -> list[str]:
            is_baseline = lanes == min(LANES) and self.plat_name.endswith("x86_64")
            folder = Path(self.build_temp, f"lanes_{lanes}")
            # Setuptools would make the folder, but caches that it exists while another thread is still making it.
            Path(folder, kernels.source).parent.mkdir(parents=True, exist_ok=True)
            return self.compiler.compile(
                [kernels.source],
                output_dir=str(folder),
                macros=[*MACROS, ("AG_KERNEL_LANES", str(lanes))],
                include_dirs=["include"],
                extra_postargs=[*(BASELINE_ARGS if is_baseline else kernels.arguments), *arguments],
            )

        with ThreadPoolExecutor(self.parallel) as pool:
            units = [
                (modules[kernels.module], pool.submit(compile_unit, kernels, lanes))
                for kernels in KERNELS
                if is_needed(modules[kernels.module])
                for lanes in LANES
            ]
            for module, objects in units:
                module.extra_objects = [*module.extra_objects, *objects.result()]

    def arguments(self) -> tuple[list[str], list[str]]:
        """Return the arguments for the compiler and for the linker."""
        compile_args, link_args = list(COMPILE_ARGS), []
        if switch("ASCEND_GRAD_EMULATE_BF16", "0"):
            compile_args.append("-DAG_EMULATE_BF16")
        if switch("ASCEND_GRAD_EMULATE_AMX", "0"):
            compile_args.append("-DAG_EMULATE_AMX")
        if switch("ASCEND_GRAD_EMULATE_BFMMLA", "0"):
            compile_args.append("-DAG_EMULATE_BFMMLA")
        if not switch("ASCEND_GRAD_OPENMP", "1"):
            print(NO_OPENMP.format("ASCEND_GRAD_OPENMP=0 asks for it"))
        # No program runs here if a cross compiler made it, or if the temporary folder forbids execution.
        elif failure := self.probe(OPENMP_PROBE, ["-fopenmp"], runs=not self.probe(PLAIN_PROBE, [], runs=True)):
            print(NO_OPENMP.format(failure))
        else:
            compile_args.append("-fopenmp")
            link_args.append("-fopenmp")
        if names := sanitizers():
            flag = f"-fsanitize={','.join(names)}"
            compile_args += [flag, "-fno-omit-frame-pointer", "-g1", "-O1"]
            # The address sanitizer reports the same accesses. These two checks add a quarter to the time to compile.
            if "undefined" in names:
                compile_args.append("-fno-sanitize=null,object-size")
            link_args.append(flag)
        return compile_args, link_args

    def probe(self, source: str, arguments: list[str], *, runs: bool = False) -> str:
        """Return the reason why a program cannot be compiled and linked (`runs`: and run), or "" if it can."""
        compiler = " ".join([self.compiler.compiler_so[0], *arguments])
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("probe.c").write_text(source, encoding="utf-8")
            try:
                objects = self.compiler.compile(["probe.c"], extra_preargs=arguments)
            except (CCompilerError, PlatformError) as error:
                return f"'{compiler}' cannot compile a small program ({error})"
            try:
                self.compiler.link_executable(objects, "probe", extra_postargs=arguments)
            except (CCompilerError, PlatformError) as error:
                return f"'{compiler}' cannot link a small program ({error})"
            try:
                if runs:
                    subprocess.run(["./probe"], check=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                return f"a small program made by '{compiler}' does not run ({error})"
        return ""


packages = [
    *find_packages(include=["ascend_grad", "ascend_grad.*"]),
    "ascend_grad.include",
    "ascend_grad.bench",
    *(f"ascend_grad.bench.{name}" for name in find_packages("bench")),
]

extensions = [Extension(f"ascend_grad.{path.stem}", [str(path)]) for path in sorted(Path("pyx").rglob("*.pyx"))]
extensions.append(Extension(SHARED_UTILITY, [SHARED_UTILITY.replace(".", "/") + ".c"]))  # generated under build/

setup(
    packages=packages,
    package_dir={"ascend_grad.include": "include", "ascend_grad.bench": "bench"},
    package_data={
        "ascend_grad": ["py.typed", "*.pxd"],
        "ascend_grad.bench": ["onednn.c"],
        "ascend_grad.include": ["**/*.h"],
    },
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExt},
)
