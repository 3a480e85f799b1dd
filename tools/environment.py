"""Makes the virtual environment in which `make` builds and runs dpkernels: Python, torch and the build tools.

    python3 tools/environment.py .venv
    python3 tools/environment.py .venv-cuda --cuda

Only the standard library is used, in words that an older Python parses too, so that it can say that it is too old.
Nothing outside the named folder is changed, except pip's cache. A second run keeps what fits.

Which torch:

1. Where the Python that runs this file (an active environment's) imports torch >= 2.11, that torch is shared: a path
   file shows the environment's packages to the new one, behind its own, and nothing is downloaded.
2. On a machine with an NVIDIA GPU, and off Linux, pip's default build is the right one.
3. On Linux without a GPU, pip's default build is CUDA's, several GB. The CPU build of the same release carries the
   local version "+cpu". pip finds it where it is told of one (find-links, an extra index); else uv is asked, which
   knows by itself where PyTorch keeps its CPU builds (--torch-backend); only then the default build is taken.

With --cuda a torch with CUDA is meant, also where there is no GPU: kernels can be built for it there.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig

PYTHON_MINIMUM = (3, 10)
TORCH_MINIMUM = (2, 11)
TORCH_TESTED = "2.13.0"
TORCH = "torch>={}.{}".format(*TORCH_MINIMUM)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def fail(reason):
    sys.exit(f"\ndpkernels: {reason.strip()}\n")


def say(words):
    print(f"dpkernels: {words}", flush=True)


def succeeds(*command, **options):
    return subprocess.run(command, check=False, **options).returncode == 0


def output(*command):
    """What `command` prints, or None where it fails."""
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return None


def check_python():
    if sys.version_info[:2] < PYTHON_MINIMUM:
        fail(
            "Python {}.{} or newer is needed, ".format(*PYTHON_MINIMUM)
            + "and {} is {}.{}. ".format(sys.executable, *sys.version_info[:2])
            + "Name another one: make PYTHON=/path/to/python3"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        fail(f"{sys.executable} has no module {error.name!r}; on Debian and Ubuntu it is in the package python3-venv.")


def check_compiler():
    """The compiler that torch's build will call takes C++20 and finds Python's headers."""
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        fail(
            f"no C++ compiler: {compiler[0]!r} is not on PATH. Install one (Debian, Ubuntu: apt-get install g++; "
            "macOS: xcode-select --install) or name it: make CXX=g++-13"
        )
    headers = sysconfig.get_path("include")
    for header, missing in (
        ("concepts", f"the C++ compiler {' '.join(compiler)!r} does not take C++20; GCC does from version 11 on"),
        ("Python.h", f"Python's headers are missing in {headers}; on Debian and Ubuntu they are in python3-dev"),
    ):
        probe = subprocess.run(
            [*compiler, "-std=c++20", "-fsyntax-only", "-I", headers, "-x", "c++", "-"],
            check=False,
            input=f"#include <{header}>\n".encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if probe.returncode != 0:
            fail(f"{missing}:\n{probe.stdout.decode(errors='replace')}")


def torch_of(python, cuda):
    """(version, folder of packages) of the torch that `python` imports, where it is new enough and has CUDA if that is
    wanted; else None."""
    found = output(
        python, "-c", "import torch; print(torch.version.cuda, torch.__version__, torch.__file__, sep='\\n')"
    )
    if found is None:
        return None
    has_cuda, version, file = found.splitlines()[-3:]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < TORCH_MINIMUM or (cuda and has_cuda == "None"):
        return None
    return version, os.path.dirname(os.path.dirname(file))


def make_venv(folder):
    """Python of the virtual environment in `folder`, which is made where it is missing or broken."""
    python = os.path.join(folder, "bin", "python")
    if output(python, "-m", "pip", "--version") is None:
        if os.path.realpath(folder) == os.path.realpath(sys.prefix):
            fail(f"{folder} is active and broken: run `deactivate`, then make again.")
        say(f"making a virtual environment in {os.path.relpath(folder)}")
        if not succeeds(sys.executable, "-m", "venv", "--clear", folder):
            fail("the virtual environment could not be made; the reason is above.")
    return python


def share_torch(python, cuda):
    """Show the virtual environment the packages of this Python, behind its own, where they hold a fitting torch."""
    found = torch_of(sys.executable, cuda)
    if found is None:
        return False
    version, packages = found
    own = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    with open(os.path.join(own, "shared_torch.pth"), "w") as path_file:
        path_file.write(f"import site; site.addsitedir({packages!r})\n")
    say(f"sharing torch {version} of {sys.prefix}")
    return True


def install_torch(python, cuda):
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check")
    if not cuda and sys.platform.startswith("linux") and not output("nvidia-smi", "-L"):
        say(f"no GPU: looking for the CPU build of torch {TORCH_TESTED}")
        if succeeds(*pip, f"torch=={TORCH_TESTED}+cpu", stderr=subprocess.DEVNULL):
            return True
        say("pip is told of none; asking uv, which knows where PyTorch keeps its CPU builds")
        if succeeds(*pip, "--quiet", "uv") and succeeds(
            python, "-m", "uv", "pip", "install", "--python", python, "--no-cache", "--torch-backend", "cpu", TORCH
        ):
            return True
        say("no CPU build was found; taking pip's default build, which may be several GB")
    return succeeds(*pip, TORCH)


def install_build_tools(python):
    """What pyproject.toml's [build-system] requires. Builds look for ninja on the PATH, so it is installed here even
    where a shared environment has it."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as project:
        requires = ast.literal_eval(re.search(r"^requires = (\[.*\])$", project.read(), re.MULTILINE).group(1))
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    ninja = os.path.join(os.path.dirname(python), "ninja")
    return succeeds(*pip, *requires) and (os.path.exists(ninja) or succeeds(*pip, "--ignore-installed", "ninja"))


def main():
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--cuda"]):
        fail("usage: python3 tools/environment.py FOLDER [--cuda]")
    check_python()
    check_compiler()
    folder, cuda = os.path.abspath(sys.argv[1]), "--cuda" in sys.argv
    python = make_venv(folder)
    if torch_of(python, cuda) is None and not share_torch(python, cuda) and not install_torch(python, cuda):
        fail(
            "torch could not be installed; the reason is above. Without a network, activate an environment that has "
            f"{TORCH} and dpkernels' other requirements, and run make again."
        )
    if torch_of(python, cuda) is None:
        succeeds(python, "-c", "import torch")
        wanted = TORCH + (" with CUDA" if cuda else "")
        fail(f"no {wanted} can be imported in {os.path.relpath(folder)}; the reason is above.")
    if not install_build_tools(python):
        fail("the build tools could not be installed; pip's reason is above. Is there a network?")


if __name__ == "__main__":
    main()
