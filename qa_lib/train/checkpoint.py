"""Checkpoints of unfinished runs: a run that was stopped goes on exactly where it was.

A checkpoint is one safetensors file in the run's folder, which is replaced atomically. It has all
that the rest of a run depends on: the trained parameters, the optimizer's state, the GradScaler's,
the states of the random-number generators and the step. Frozen parameters are not in it: the seed
or the pretrained checkpoint gives them again.

A run that went on from a wrong checkpoint would be neither the one run nor the other. Beside the
tensors there are therefore the run's hash, the settings that this machine gave it, the digest of
the code that its processes had loaded, and a digest of all of the checkpoint. By these `load`
recognises a checkpoint that is damaged, of another run, of other settings or of other code, and
refuses it.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

from qa_lib.loaded import CODE, LoadedCode, said_of_changes
from qa_lib.measure.hardware import libraries
from qa_lib.records.code import code_version
from qa_lib.records.files import RecordError, writable
from qa_lib.spec.spec import Spec
from qa_lib.train.parallel.data_parallel import NoParallel, gather, shard

CHECKPOINT = "checkpoint.safetensors"  # in the folder of a run that is unfinished


class CheckpointRefused(Exception):
    """A checkpoint from which a run must not go on; the message says why."""


class Checkpoint:
    """The checkpoint of one run, and what it is saved from and restored into.

    `path` is its file, and `every` the number of steps from one checkpoint to the next, 0 for none.
    `strategy` is the way in which the processes of the run share its steps, and `code` is what this
    process has loaded. All processes make one, and call its methods together.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: Spec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        strategy: NoParallel,
        code: LoadedCode = CODE,
    ):
        self.path = run_dir / CHECKPOINT
        self.hash = spec.hash
        self.every = spec.preset.checkpoint_every
        self.settings = dataclasses.asdict(spec.settings)
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.strategy = strategy
        self.ranks = strategy.ranks
        self.device = strategy.ranks.device
        self.code = code

    # Saving.

    def save(self, step: int) -> None:
        """Write the state after `step` optimizer steps, as one file for all processes.

        Raises RecordError when the file cannot be written; the checkpoint before it is intact then.
        """
        tensors, numbers = self._gather_state()
        on_cpu = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
        tensors = self.ranks.gather_stages(tensors)
        numbers = self.ranks.gather_stages(numbers)
        on_cpu = list(self.ranks.gather_stages(dict.fromkeys(on_cpu)))
        tensors |= self._gather_random_states()
        codes = self.ranks.gather((self.code.digest, self.code.changed()))
        if not self.ranks.first:
            return
        # A copy of each, since optimizers may let several states share storage, which safetensors
        # refuses; on the host, since a copy on the GPU would count in the run's memory.
        tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        metadata = {
            "hash": self.hash,
            "code": sorted({digest for digest, _ in codes}),
            "changed": sorted({place for _, changed in codes for place in changed}),
            "settings": self.settings,
            "commit": code_version()["commit"],
            "libraries": libraries(),
            "step": step,
            "optimizer": numbers,
            "scaler": self.scaler.state_dict(),
            # AdamW keeps its step counts on the CPU, where they must come back.
            "on_cpu": on_cpu,
        }
        metadata["digest"] = digest_of(tensors, metadata)
        self._write(tensors, metadata)

    def _gather_state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the whole tensors of this stage's model and optimizer, and other optimizer state.

        The optimizer's states are read one by one, and not by state_dict, whose form bitsandbytes
        changes.
        """
        tensors = {}
        numbers = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                tensors[f"model.{name}"] = gather(parameter.detach())
        for place, parameter in self._parameters().items():
            for key, value in self.optimizer.state[parameter].items():
                name = f"optimizer.{place}.{key}"
                if torch.is_tensor(value):
                    tensors[name] = self.strategy.gather(value, parameter)
                else:
                    numbers[name] = value
        return tensors, numbers

    def _gather_random_states(self) -> dict[str, torch.Tensor]:
        """Return the states of all processes' random-number generators, by kind and rank."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        tensors = {}
        for rank, states_of_rank in enumerate(self.ranks.gather(states)):
            for kind, state in states_of_rank.items():
                tensors[f"rng.{kind}.{rank}"] = state
        return tensors

    def _write(self, tensors: dict[str, torch.Tensor], metadata: dict) -> None:
        """Replace the file; it is whole on the disk before it takes the place of the older one."""
        temporary = self.path.with_suffix(".partial")
        try:
            safetensors.torch.save_file(
                tensors, writable(temporary), {"state": json.dumps(metadata)}
            )
            with open(temporary, "rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(writable(self.path))
        except (OSError, safetensors.SafetensorError) as problem:
            temporary.unlink(missing_ok=True)
            raise RecordError(
                f"cannot write {self.path}: {problem}; one that was there before is intact"
            ) from problem

    # Loading.

    def load(self) -> tuple[int, str | None]:
        """Restore the state from the run's checkpoint, if there is one.

        Returns the number of steps that are done, 0 where the run begins, and a note for the
        record: that the run began under other versions of libraries, or why its checkpoint was
        refused. A refused one is set aside as checkpoint.refused until the run ends ok.
        """
        exists = self.path.exists()
        refusal = None
        if exists:
            try:
                metadata, tensors = self._read()
            except CheckpointRefused as reason:
                refusal = str(reason)
        # Every process has read the file before the first sets it aside, and none goes on from what
        # another does not see or refuses.
        answers = self.ranks.gather((exists, refusal))
        seen_by = [seen for seen, _ in answers]
        refusals = [reason for _, reason in answers if reason]
        if not any(seen_by):
            return 0, None
        if not all(seen_by):
            refusals.append("is not there for all processes of the run")
        if refusals:
            if self.ranks.first and exists:
                self.path.replace(self.path.with_suffix(".refused"))
            return 0, f"began anew, since its checkpoint {refusals[0]}"
        self._restore(metadata, tensors)
        return metadata["step"], _note_of_libraries(metadata["libraries"])

    def _read(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """Return the file's metadata and tensors.

        Raises CheckpointRefused where they are not those of this run, as it is on this machine and
        by this code.
        """
        try:
            with safe_open(self.path, "pt") as stored:
                metadata = json.loads(stored.metadata()["state"])
                names = list(stored.keys())  # `stored` is no dict, and has no items
                tensors = {name: stored.get_tensor(name) for name in names}
            run_hash = metadata["hash"]
            code = metadata["code"]
            commit = metadata["commit"]
            digest = metadata.pop("digest")
            metadata["libraries"]  # which older checkpoints have not
        except Exception as problem:
            # Whatever safetensors, JSON and this layout make of a damaged file.
            raise CheckpointRefused(f"cannot be read ({type(problem).__name__})") from None
        if run_hash != self.hash:
            raise CheckpointRefused("is of another run")
        if digest != digest_of(tensors, metadata):
            raise CheckpointRefused("is damaged: its digest is not that of what it holds")
        if code != [self.code.digest]:
            raise CheckpointRefused(f"is of other code (commit {str(commit)[:7]})")
        if metadata["changed"]:
            places = said_of_changes(metadata["changed"])
            raise CheckpointRefused(f"is of a process whose code changed while it ran ({places})")
        changed_here = self.code.changed()
        if changed_here:
            places = said_of_changes(changed_here)
            raise CheckpointRefused(
                f"needs code that has changed since this process began ({places})"
            )
        if metadata["settings"] != self.settings:
            differences = _different_settings(metadata["settings"], self.settings)
            raise CheckpointRefused(f"is of other settings: {differences}")
        return metadata, tensors

    def _restore(self, metadata: dict, tensors: dict[str, torch.Tensor]) -> None:
        """Give model, optimizer, scaler and random-number generators their states, in place."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(shard(tensors[f"model.{name}"], parameter))
        for place, parameter in self._parameters().items():
            prefix = f"optimizer.{place}."
            state = self.optimizer.state[parameter]
            for name, value in (tensors | metadata["optimizer"]).items():
                if not name.startswith(prefix):
                    continue
                if torch.is_tensor(value):
                    if name not in metadata["on_cpu"]:
                        value = value.to(self.device)
                    value = self.strategy.shard(value, parameter)
                state[name.removeprefix(prefix)] = value
        self.scaler.load_state_dict(metadata["scaler"])
        # A process that the run did not have before draws from its own seed on.
        rank = 0 if self.strategy.draws_alike else self.ranks.rank
        cpu_state = tensors.get(f"rng.cpu.{rank}")
        cuda_state = tensors.get(f"rng.cuda.{rank}")
        if cpu_state is not None:
            torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, self.device)

    def _parameters(self) -> dict[int, torch.Tensor]:
        """Return the optimizer's parameters by their numbers in the whole model."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            self.strategy.place(number): parameter for number, parameter in enumerate(parameters)
        }


def _note_of_libraries(before: dict[str, str | None]) -> str | None:
    """Return words for libraries of other versions than the run began with; None without any."""
    now = libraries()
    differences = [
        f"{name} {now[name]} (it began with {before.get(name)})"
        for name in now
        if now[name] != before.get(name)
    ]
    if not differences:
        return None
    return f"went on under {', '.join(differences)}"


def _different_settings(before: dict[str, object], now: dict[str, object]) -> str:
    """Return words for the settings that the run began with otherwise than this machine has them.

    It began on another machine, or before something was installed on this one.
    """
    differences = [
        f"{name} is {now[name]} on this machine (it began with {before.get(name)})"
        for name in now
        if now[name] != before.get(name)
    ]
    return ", ".join(differences)


def digest_of(tensors: dict[str, torch.Tensor], metadata: dict | None = None) -> str:
    """Return SHA-256 (hex) over tensors on the CPU and `metadata` that JSON can hold.

    It covers the names, types, shapes and bytes of the tensors.
    """
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
