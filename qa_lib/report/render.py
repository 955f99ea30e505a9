"""The report notebook executed, as the repository keeps it beside the runs for those who only read."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from qa_lib.record import write_atomically

NOTEBOOK, RENDERED = Path("notebooks/report.ipynb"), Path("runs/h200-report.ipynb")


def rendered() -> str:
    """The notebook executed in this folder, as the text of a file: its outputs, and no trace of when or where.

    Raises nbclient's CellExecutionError, which names the cell.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Over files of its own: the kernel listens on no port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, config=config, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return nbformat.writes(notebook).rstrip() + "\n"


def render() -> None:
    """Execute the notebook and keep what came out as RENDERED."""
    write_atomically(RENDERED, rendered())
