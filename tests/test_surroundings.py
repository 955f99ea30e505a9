"""What lies around a run: kernels that are gone, and outputs that are not UTF-8."""

import json
import multiprocessing
import os

import pytest

from qa_lib.lab.launch import warm
from qa_lib.lab.launch.process import child_env
from qa_lib.packages import JUPYTER_KERNELS, jupyter_path
from tests.material import leave, python
from tests.tiny import planned

# Prints the folder of the kernel that Jupyter takes for `python3`.
FIND_KERNEL = """
from jupyter_client.kernelspec import KernelSpecManager
print(KernelSpecManager().get_kernel_spec("python3").resource_dir)
"""


@pytest.fixture
def stale_kernels(tmp_path):
    """A folder of Jupyter's with a kernel `python3` whose Python is gone."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = ["/gone/venv/bin/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    content = {"argv": command, "display_name": "Python 3", "language": "python"}
    kernel.write_text(json.dumps(content))
    return tmp_path / "jupyter"


@pytest.mark.parametrize("variable", ["JUPYTER_PATH", "JUPYTER_DATA_DIR"])
def test_a_notebooks_kernel_is_of_this_python_whatever_is_installed(
    stale_kernels, monkeypatch, variable
):
    monkeypatch.setenv(variable, str(stale_kernels))
    done = python("-c", FIND_KERNEL, JUPYTER_PATH=child_env()["JUPYTER_PATH"])
    assert done.stdout.strip() == str(JUPYTER_KERNELS / "kernels" / "python3")


def test_the_kernels_command_is_one_that_jupyter_starts_by_its_own_python():
    content = json.loads((JUPYTER_KERNELS / "kernels" / "python3" / "kernel.json").read_text())
    assert content["argv"][0] == "python"


def test_what_a_user_has_in_jupyters_path_stays_there_and_comes_later(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", os.pathsep.join(["/a", "/b"]))
    assert jupyter_path().split(os.pathsep) == [str(JUPYTER_KERNELS), "/a", "/b"]


def test_our_folder_is_put_into_jupyters_path_once(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/a")
    once = jupyter_path()
    monkeypatch.setenv("JUPYTER_PATH", once)
    assert jupyter_path() == once


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_what_an_output_lacks_is_printed_as_an_escape(encoding, tmp_path):
    leave(tmp_path, planned())
    words = ["export", "--csv", tmp_path / "☃.csv", "--runs", tmp_path]
    assert "\\u2603.csv" in python("-m", "qa_lib", *words, PYTHONIOENCODING=encoding).stdout


# Starts another Python, which prints a snowman.
START_PRINTING = """
import subprocess, sys
from qa_lib.errors import print_anything
print_anything()
subprocess.run([sys.executable, "-c", "print(chr(0x2603))"], check=True)
"""


def test_what_a_process_starts_prints_in_the_same_encoding():
    done = python("-c", START_PRINTING, PYTHONIOENCODING="ascii")
    assert done.stdout.strip() == "\\u2603"


def test_a_warm_process_has_the_environment_it_was_given_and_nothing_of_the_servers(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # so that the folder is the old one again at the end
    servers = {"LEFT_BEHIND": "1", "CHANGED": "old"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", servers)
        warm._take_on({"CHANGED": "new"}, str(tmp_path))
    assert servers == {"CHANGED": "new"}


def test_a_process_is_forked_into_the_current_folder_and_asks_nvml_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setattr(warm, "Forked", lambda process: process)
    monkeypatch.setattr(warm.SERVER, "Process", lambda target, args: args, raising=False)
    asked = warm.fork(["python"], {"A": "1"}, tmp_path / "log")
    assert asked == (["python"], {"A": "1"}, str(tmp_path / "log"), str(tmp_path))
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_a_kernel_whose_command_never_comes_ends_without_a_word(monkeypatch):
    monkeypatch.setattr(os, "setsid", lambda: None)
    warm._be_kernel(*multiprocessing.Pipe())
