"""What an unfinished run needs to go on exactly where it was, and whether it may be believed."""

import hashlib
import io
import os
from functools import cache
from pathlib import Path

import torch

from qa_lib.data.squad import hash_files
from qa_lib.measure.hardware import libraries
from qa_lib.record import RecordError, code_version, regular
from qa_lib.spec import Spec
from qa_lib.train.data_parallel import NoParallel, gather, shard

# What decides how a training goes on. A run that is resumed by other code would be neither the one nor the other.
CODE = ("data", "kernels", "model", "train", "variants.py", "presets.py", "spec.py")
DIGEST = 32  # bytes of SHA-256


class Checkpoint:
    """All that the rest of a run depends on, in one file of torch.save that is replaced atomically.

    Trained parameters, optimizer state, GradScaler, random-number states and the step; beside them the run's hash and
    the code's, and before them a digest of all, by which `load` knows a file that is damaged, of another run or of
    other code. Frozen parameters are not in it: the seed or the pretrained checkpoint gives them again.
    """

    def __init__(self, run_dir: Path, spec: Spec, model, optimizer, scaler, strategy: NoParallel):
        """`strategy` is the way in which the processes of the run share it."""
        self.path, self.hash, self.every = self.path_of(run_dir), spec.hash, spec.preset.checkpoint_every
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.strategy, self.ranks, self.device = strategy, strategy.ranks, strategy.ranks.device

    def is_due(self, step: int, steps: int) -> bool:
        """Whether the state after `step` of `steps` is to be kept; after the last nothing is left to do."""
        return bool(self.every) and step % self.every == 0 and step < steps

    def save(self, step: int) -> None:
        """Write the state after `step` optimizer steps, as the one file of all processes. Raises RecordError when the
        disk is full."""
        weights = {name: gather(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}
        moments = {
            (index, name): self.strategy.gather(value, parameter) if torch.is_tensor(value) else value
            for index, parameter in self._parameters().items()
            for name, value in self.optimizer.state[parameter].items()
        }
        weights, moments = map(self.ranks.gather_stages, (weights, moments))
        drawn = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            drawn["cuda"] = torch.cuda.get_rng_state(self.device)
        drawn = self.ranks.gather(drawn)
        if not self.ranks.first:
            return
        code = {"hash": self.hash, "code": code_digest(), "commit": code_version()["commit"], "libraries": libraries()}
        state = {"weights": weights, "optimizer": moments, "scaler": self.scaler.state_dict(), "drawn": drawn}
        stream = io.BytesIO()
        torch.save(code | state | {"step": step}, stream)
        temporary = self.path.with_suffix(".partial")
        try:
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(stream.getbuffer()).digest())
                file.write(stream.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(regular(self.path))
        except OSError as problem:
            temporary.unlink(missing_ok=True)
            raise RecordError(f"cannot write {self.path}: {problem}; the checkpoint before it is intact") from problem

    def load(self) -> tuple[int, str | None]:
        """Restore the state if this run left one: the number of steps already done, 0 without a checkpoint; and what is
        to be said of it: that other versions of libraries began the run, or why it is not believed. That one is set
        aside as checkpoint.refused until the run ends ok."""
        found, note = self._read() if self.path.exists() else ({}, None)
        self.ranks.gather(None)  # all have read it before the first sets it aside
        if note and not found and self.ranks.first:
            self.path.replace(self.path.with_suffix(".refused"))
        return self._restore(found) if found else 0, note

    def _read(self) -> tuple[dict, str | None]:
        """What `save` wrote, and what is to be said of it; nothing where it is not believed."""
        content = memoryview(self.path.read_bytes())
        anew = "began anew, since its checkpoint"
        if content[:DIGEST] != hashlib.sha256(content[DIGEST:]).digest():
            return {}, f"{anew} is damaged: its digest is not that of what it holds"
        found = torch.load(io.BytesIO(content[DIGEST:]), map_location="cpu")
        if found["hash"] != self.hash:
            return {}, f"{anew} is of another run"
        if found["code"] != code_digest():
            return {}, f"{anew} is of other code (commit {str(found['commit'])[:7]})"
        return found, _changed(found["libraries"])

    def _restore(self, found: dict) -> int:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(shard(found["weights"][name], parameter))
        parameters = self._parameters()
        for (index, name), value in found["optimizer"].items():
            if index not in parameters:  # of another stage of the pipeline
                continue
            if torch.is_tensor(value):
                # PyTorch's plain AdamW keeps its step counts on the CPU.
                on_cpu = name == "step" and not self.optimizer.defaults.get("capturable", True)
                value = self.strategy.shard(value if on_cpu else value.to(self.device), parameters[index])
            self.optimizer.state[parameters[index]][name] = value
        self.scaler.load_state_dict(found["scaler"])
        # A process that the run did not have before draws from its own seed on.
        for drawn in found["drawn"][0 if self.strategy.draws_alike else self.ranks.rank :][:1]:
            torch.set_rng_state(drawn["cpu"])
            if "cuda" in drawn:
                torch.cuda.set_rng_state(drawn["cuda"], self.device)
        return found["step"]

    def _parameters(self) -> dict[int, torch.Tensor]:
        """The optimizer's parameters by their numbers in the whole model. Their states are read one by one, and not by
        state_dict, whose form bitsandbytes changes."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return {self.strategy.place(number): parameter for number, parameter in enumerate(parameters)}

    @staticmethod
    def path_of(run_dir: Path) -> Path:
        """Where a run's checkpoint lies while it is unfinished."""
        return run_dir / "checkpoint.pt"


def _changed(before: dict[str, str | None]) -> str | None:
    """Which libraries have another version than those that a run began with, in words; None where none has."""
    now = libraries()
    other = [f"{name} {now[name]} (it began with {before.get(name)})" for name in now if now[name] != before.get(name)]
    return f"went on under {', '.join(other)}" if other else None


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over names, types, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256(b"{}")  # as in the records that there are
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@cache
def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """SHA-256 (hex) over the sources in CODE."""
    paths = (package / name for name in CODE)
    return hash_files(source for path in paths for source in ([path] if path.is_file() else sorted(path.glob("*.py"))))
