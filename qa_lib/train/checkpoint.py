"""What an unfinished run needs to go on exactly where it was, and whether it may be believed."""

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


class NotBelieved(Exception):
    """A checkpoint that must not be gone on from; the message says why."""


class Checkpoint:
    """All that the rest of a run depends on, in one safetensors file that is replaced atomically.

    Trained parameters, optimizer state, GradScaler, random-number states and the step; beside them the run's hash, what
    this machine makes of its settings, the digest of the code that the processes have loaded and one of the tensors. By
    these `load` knows a file that is damaged, of another run, of other settings or of other code, with which the run
    would be neither the one nor the other. Frozen parameters are not in it: the seed or the pretrained checkpoint gives
    them again.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: Spec,
        model,
        optimizer,
        scaler,
        strategy: NoParallel,
        code: LoadedCode = CODE,
    ):
        """`strategy` is the way in which the processes of the run share it, `code` what this process has loaded."""
        self.path, self.hash, self.every = (
            run_dir / CHECKPOINT,
            spec.hash,
            spec.preset.checkpoint_every,
        )
        self.settings = dataclasses.asdict(spec.settings)
        self.code = code
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.strategy, self.ranks, self.device = strategy, strategy.ranks, strategy.ranks.device

    def save(self, step: int) -> None:
        """Write the state after `step` optimizer steps, as the one file of all processes. Raises RecordError when the
        disk is full."""
        tensors = {
            f"model.{name}": gather(p.detach())
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        plain = {}
        for index, parameter in self._parameters().items():
            for key, value in self.optimizer.state[parameter].items():
                name = f"optimizer.{index}.{key}"
                if torch.is_tensor(value):
                    tensors[name] = self.strategy.gather(value, parameter)
                else:
                    plain[name] = value
        on_cpu = {name: None for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        tensors, plain, on_cpu = map(self.ranks.gather_stages, (tensors, plain, on_cpu))
        drawn = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            drawn["cuda"] = torch.cuda.get_rng_state(self.device)
        for rank, states in enumerate(self.ranks.gather(drawn)):
            tensors |= {f"rng.{kind}.{rank}": state for kind, state in states.items()}
        codes = self.ranks.gather((self.code.digest, self.code.changed()))
        if not self.ranks.first:
            return
        # A copy each, since optimizers may let several states share storage, which safetensors refuses; on the host,
        # since a copy on the GPU would count in the run's memory.
        tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        metadata = {
            "hash": self.hash,
            "code": sorted({digest for digest, _ in codes}),
            "changed": sorted({place for _, changed in codes for place in changed}),
            "settings": self.settings,
            "commit": code_version()["commit"],
            "libraries": libraries(),
            "step": step,
            "optimizer": plain,
            "scaler": self.scaler.state_dict(),
            # AdamW keeps its step counts on the CPU, where they must come back.
            "on_cpu": list(on_cpu),
        }
        metadata["digest"] = digest_of(tensors, metadata)
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

    def load(self) -> tuple[int, str | None]:
        """Restore the state if this run left one: the number of steps already done, 0 without a checkpoint; and what is
        to be said of it: that other versions of libraries began the run, or why it is not believed. That one is set
        aside as checkpoint.refused until the run ends ok."""
        seen, found, refusal = self.path.exists(), None, None
        if seen:
            try:
                found = self._read()
            except NotBelieved as reason:
                refusal = str(reason)
        # All have read it before the first sets it aside, and none goes on from what another does not believe or see.
        answers = self.ranks.gather((seen, refusal))
        if not any(others_see for others_see, _ in answers):
            return 0, None
        refusals = [reason for _, reason in answers if reason]
        if not all(others_see for others_see, _ in answers):
            refusals.append("is not there for all processes of the run")
        if not refusals:
            state, tensors = found
            return self._restore(state, tensors), _other_libraries(state["libraries"])
        if self.ranks.first and seen:
            self.path.replace(self.path.with_suffix(".refused"))
        return 0, f"began anew, since its checkpoint {refusals[0]}"

    def _read(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """The file's metadata and tensors. Raises NotBelieved."""
        try:
            with safe_open(self.path, "pt") as stored:
                state = json.loads(stored.metadata()["state"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
            names = ("hash", "code", "digest", "commit", "libraries")
            run, code, digest, commit, _ = (state[name] for name in names)
        except (
            Exception
        ) as problem:  # whatever safetensors, JSON and this layout make of a damaged file
            raise NotBelieved(f"cannot be read ({type(problem).__name__})") from None
        if run != self.hash:
            raise NotBelieved("is of another run")
        del state["digest"]
        if digest != digest_of(tensors, state):
            raise NotBelieved("is damaged: its digest is not that of what it holds")
        if code != [self.code.digest]:
            raise NotBelieved(f"is of other code (commit {str(commit)[:7]})")
        if state["changed"]:
            places = said_of_changes(state["changed"])
            raise NotBelieved(f"is of a process whose code changed while it ran ({places})")
        if changed := self.code.changed():
            places = said_of_changes(changed)
            raise NotBelieved(f"needs code that has changed since this process began ({places})")
        if state["settings"] != self.settings:
            other = _other_settings(state["settings"], self.settings)
            raise NotBelieved(f"is of other settings: {other}")
        return state, tensors

    def _restore(self, state: dict, tensors: dict[str, torch.Tensor]) -> int:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(shard(tensors[f"model.{name}"], parameter))
        for index, parameter in self._parameters().items():
            own, prefix = self.optimizer.state[parameter], f"optimizer.{index}."
            for name, value in (tensors | state["optimizer"]).items():
                if not name.startswith(prefix):
                    continue
                if torch.is_tensor(value):
                    value = self.strategy.shard(
                        value if name in state["on_cpu"] else value.to(self.device), parameter
                    )
                own[name.removeprefix(prefix)] = value
        self.scaler.load_state_dict(state["scaler"])
        # A process that the run did not have before draws from its own seed on.
        rank = 0 if self.strategy.draws_alike else self.ranks.rank
        if (mine := f"rng.cpu.{rank}") in tensors:
            torch.set_rng_state(tensors[mine])
        if (mine := f"rng.cuda.{rank}") in tensors:
            torch.cuda.set_rng_state(tensors[mine], self.device)
        return state["step"]

    def _parameters(self) -> dict[int, torch.Tensor]:
        """The optimizer's parameters by their numbers in the whole model. Their states are read one by one, and not by
        state_dict, whose form bitsandbytes changes."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return {
            self.strategy.place(number): parameter for number, parameter in enumerate(parameters)
        }


def _other_libraries(before: dict[str, str | None]) -> str | None:
    """Which libraries have another version than those that a run began with, in words; None where none has."""
    now = libraries()
    other = [
        f"{name} {now[name]} (it began with {before.get(name)})"
        for name in now
        if now[name] != before.get(name)
    ]
    return f"went on under {', '.join(other)}" if other else None


def _other_settings(before: dict[str, object], now: dict[str, object]) -> str:
    """In words: which settings this machine has otherwise than the one, or the time, that a run began on."""
    return ", ".join(
        f"{name} is {now[name]} on this machine (it began with {before.get(name)})"
        for name in now
        if now[name] != before.get(name)
    )


def digest_of(tensors: dict[str, torch.Tensor], metadata: dict | None = None) -> str:
    """SHA-256 (hex) over names, types, shapes and bytes of tensors on the CPU, and over what JSON holds beside them."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
