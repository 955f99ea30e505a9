"""What an unfinished run needs to go on exactly where it was."""

import json
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

from qa_lib.record import RecordError
from qa_lib.spec import Spec


class Checkpoint:
    """All that the rest of a run depends on, in one safetensors file that is replaced atomically.

    Trained parameters, optimizer state, GradScaler, random-number states and the step. Frozen parameters are not in
    it: the seed or the pretrained checkpoint gives them again.
    """

    def __init__(self, run_dir: Path, spec: Spec, model, optimizer, scaler, device: torch.device):
        self.path, self.hash = self.path_of(run_dir), spec.hash
        self.model, self.optimizer, self.scaler, self.device = model, optimizer, scaler, device

    def save(self, step: int) -> None:
        """Write the state after `step` optimizer steps. Raises RecordError when the disk is full."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        plain = {}
        for index, values in enumerate(self._states()):
            for key, value in values.items():
                if torch.is_tensor(value):
                    tensors[f"optimizer.{index}.{key}"] = value
                else:
                    plain[f"{index}.{key}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        metadata = {
            "hash": self.hash,
            "step": step,
            "optimizer": plain,
            "scaler": self.scaler.state_dict(),
            # AdamW keeps its step counts on the CPU, where they must come back.
            "on_cpu": [name for name, tensor in tensors.items() if tensor.device.type == "cpu"],
        }
        temporary = self.path.with_suffix(".partial")
        try:
            # A copy each, since optimizers may let several states share storage, which safetensors refuses; on the
            # host, since a copy on the GPU would count in the run's memory.
            tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
            safetensors.torch.save_file(tensors, temporary, {"state": json.dumps(metadata)})
            temporary.replace(self.path)
        except (OSError, safetensors.SafetensorError) as problem:
            temporary.unlink(missing_ok=True)
            raise RecordError(f"cannot write {self.path}: {problem}; the checkpoint before it is intact") from problem

    def load(self) -> int:
        """Restore the state if this run left one; the number of steps already done, 0 without a checkpoint."""
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, "pt") as stored:
                state = json.loads(stored.metadata()["state"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        except (safetensors.SafetensorError, OSError):
            return 0  # torn by a power cut: begin anew
        if state["hash"] != self.hash:
            return 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(tensors[f"model.{name}"])
        states = self._states()
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                states[int(index)][key] = tensor if name in state["on_cpu"] else tensor.to(self.device)
        for name, value in state["optimizer"].items():
            index, key = name.split(".", 1)
            states[int(index)][key] = value
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        return state["step"]

    def _states(self) -> list[dict]:
        """The optimizer's state of each trained parameter, in order; not through state_dict, whose form bitsandbytes
        changes."""
        return [self.optimizer.state[p] for group in self.optimizer.param_groups for p in group["params"]]

    @staticmethod
    def path_of(run_dir: Path) -> Path:
        """Where a run's checkpoint lies while it is unfinished."""
        return run_dir / "checkpoint.safetensors"
